"""Measure a trained tiny model on the shipped evaluation text, and write its card.

    python scripts/tiny_report.py src/moesaic/assets/models/tiny-moe

Writes `training.json` (all figures) and `README.md` (the card) beside the weights.
"""

import json
import math
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

WINDOW = 256


def read_jsonl(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.open(encoding="utf-8")]


def machine() -> str:
    """Return the processor in words."""
    info = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    name = match[1] if match else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} thread(s)"


def windows_of(tokenizer: Any, rows: list[dict[str, str]], domain: str) -> torch.Tensor:
    """Return whole windows of a domain's tokens, texts in file order; "all" is every text."""
    text = "\n\n".join(row["text"] for row in rows if domain in ("all", row["domain"]))
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(tokens[: len(tokens) // WINDOW * WINDOW]).view(-1, WINDOW)


@torch.no_grad()
def window_losses(model: PreTrainedModel, windows: torch.Tensor) -> torch.Tensor:
    """Every next-token loss: [windows, WINDOW - 1]."""
    losses = []
    for batch in windows.split(8):
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
        losses.append(F.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none"))
    return torch.cat(losses)


def held_out_losses(
    model: PreTrainedModel, tokenizer: Any, rows: list[dict[str, str]], windows: int | None = None
) -> dict[str, float]:
    """Mean next-token loss of each domain, and of "all" the text in file order."""
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    return {
        domain: window_losses(model, windows_of(tokenizer, rows, domain)[:windows]).mean().item()
        for domain in [*domains, "all"]
    }


def gates_of(model: PreTrainedModel) -> list[nn.Module]:
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]


@torch.no_grad()
def routing_shares(model: PreTrainedModel, windows: torch.Tensor) -> torch.Tensor:
    """Each expert's share of the choices: [layers, experts]."""
    gates = gates_of(model)
    counts = torch.zeros(len(gates), gates[0].num_experts)

    def counter(layer: int) -> Callable[..., None]:
        def hook(gate: nn.Module, _: Any, output: tuple[torch.Tensor, ...]) -> None:
            counts[layer] += torch.bincount(output[2].flatten(), minlength=gate.num_experts)

        return hook

    handles = [gate.register_forward_hook(counter(i)) for i, gate in enumerate(gates)]
    window_losses(model, windows)
    for handle in handles:
        handle.remove()
    return counts / counts.sum(-1, keepdim=True)


def divergence(shares: torch.Tensor) -> float:
    """Jensen-Shannon divergence, in bits, of the rows of a matrix of distributions."""

    def entropy(p: torch.Tensor) -> torch.Tensor:
        return -torch.special.xlogy(p, p).sum(-1) / math.log(2)

    return (entropy(shares.mean(0)) - entropy(shares).mean()).item()


def without_expert(gate: nn.Module, expert: int) -> torch.utils.hooks.RemovableHandle:
    """Mask an expert's router logit until the handle is removed."""

    def hook(gate: nn.Module, _: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits = output[0].clone()
        logits[:, expert] = -torch.inf
        weights, chosen = logits.float().softmax(-1).topk(gate.top_k)
        if getattr(gate, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(output[1].dtype), chosen

    return gate.register_forward_hook(hook)


def specialisation(model: PreTrainedModel, windows: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Who is routed where, and what it costs a domain to remove the expert that it uses most."""
    domains = list(windows)
    shares = torch.stack([routing_shares(model, windows[d]) for d in domains], 1)  # [layer, domain]
    sample = {d: windows[d][:48] for d in domains}
    base = {d: window_losses(model, sample[d]).mean().item() for d in domains}
    removals = []
    for layer, gate in enumerate(gates_of(model)):
        for i, domain in enumerate(domains):
            expert = int(shares[layer, i].argmax())
            handle = without_expert(gate, expert)
            rise = {d: window_losses(model, sample[d]).mean().item() - base[d] for d in domains}
            handle.remove()
            removals.append(
                {
                    "layer": layer,
                    "domain": domain,
                    "expert": expert,
                    "share": dict(zip(domains, shares[layer, :, expert].tolist(), strict=True)),
                    "rise": rise,
                }
            )
    return {
        "shares": {
            d: [[round(x, 4) for x in row] for row in shares[:, i].tolist()]
            for i, d in enumerate(domains)
        },
        "divergence": [divergence(layer) for layer in shares],
        "least_share": shares.mean(1).min().item(),
        "removals": removals,
    }


CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# {name}

{what}
A fixture for tests and demonstrations: really trained, so that routing, experts and domains mean
something, and far too small to be of use as a language model.

| | |
|---|---|
| class | `{architecture}` |
| parameters | {parameters:,} |
| shape | {shape} |
| tokens seen | {tokens:,} in {steps:,} steps of {batch}, as many of each domain |
| optimizers | Muon for matrices, AdamW for the rest, peak rates {rates} |
| besides | seed {seed}, bf16 autocast{balance} |
| time | {minutes:.0f} minutes{remark} on {machine} |
| versions | Python {python}, torch {torch}, transformers {transformers} |

Rebuild it with `python scripts/gather_text.py` and `python scripts/train_tiny.py {name}`. The text
and its licences are described in `TEXT.md` two folders up.

## Held-out loss

On the shipped `evaluation.jsonl`: the texts of a domain joined by an empty line, in windows of
{window} tokens without special tokens, the weights in float32.

| domain | loss | perplexity |
|---|---|---|
{losses}
"""

ROUTING = """
## Specialisation

Jensen-Shannon divergence (bits) between the routing shares of the domains, by layer:
{divergence}.
The least used expert of any layer has {least:.1%} of the choices; an even share is {even:.1%}.

Removing, in one layer, the expert that a domain uses most: its share of each domain's choices,
and what each domain's loss rises by.

| layer | expert most used by | number | {share_heads} | {rise_heads} |
|---|---|---|{rules}
{removals}

The domain that uses the expert is hurt more than any other in {hits} of {total} rows.
`training.json` holds the share of every expert in every layer and domain.
"""

WHAT = {
    "tiny-dense": "A dense Llama with grouped-query attention and gated SiLU.",
    "tiny-moe": "A Mixtral with 8 experts, 2 of them chosen.",
    "tiny-shared-moe": "A Qwen2-MoE with 32 fine-grained experts, 4 chosen, and a shared one.",
}


def card(name: str, model: PreTrainedModel, training: dict[str, Any]) -> str:
    """Return the model card, in Markdown."""
    config = model.config
    shape = (
        f"{config.num_hidden_layers} layers, width {config.hidden_size}, "
        f"{config.num_attention_heads} heads on {config.num_key_value_heads} key-value heads, "
        f"{config.vocab_size} tokens, tied embeddings"
    )
    weight = training["balance_weight"]
    text = CARD.format(
        **{"remark": ""} | training,
        name=name,
        what=WHAT[name],
        architecture=type(model).__name__,
        parameters=model.num_parameters(),
        shape=shape,
        balance=f", load-balancing weight {weight} on each layer" if weight else "",
        rates=" and ".join(map(str, training["peak_learning_rates"].values())),
        minutes=training["seconds"] / 60,
        window=WINDOW,
        losses="\n".join(
            f"| {domain} | {loss:.4f} | {math.exp(loss):.2f} |"
            for domain, loss in training["held_out_loss"].items()
        ),
    )
    if "specialisation" in training:
        figures = training["specialisation"]
        domains = list(figures["shares"])
        rows, hits = [], 0
        for r in figures["removals"]:
            hits += max(r["rise"], key=r["rise"].get) == r["domain"]
            shares = " | ".join(f"{x:.1%}" for x in r["share"].values())
            rises = " | ".join(f"{x:+.4f}" for x in r["rise"].values())
            rows.append(f"| {r['layer']} | {r['domain']} | {r['expert']} | {shares} | {rises} |")
        text += ROUTING.format(
            divergence=", ".join(f"{x:.3f}" for x in figures["divergence"]),
            least=figures["least_share"],
            even=1 / len(figures["shares"][domains[0]][0]),
            share_heads=" | ".join(f"{d} share" for d in domains),
            rise_heads=" | ".join(f"{d} loss" for d in domains),
            rules="---|" * 2 * len(domains),
            removals="\n".join(rows),
            hits=hits,
            total=len(rows),
        )
    return text


def write_report(folder: Path, training: dict[str, Any]) -> None:
    """Measure the saved weights, and write `training.json` and `README.md`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = read_jsonl(folder.parents[1] / "evaluation.jsonl")
    training = training | {"held_out_loss": held_out_losses(model, tokenizer, rows)}
    print(folder.name, training["held_out_loss"], flush=True)
    if gates_of(model):
        domains = list(training["held_out_loss"])[:-1]
        windows = {domain: windows_of(tokenizer, rows, domain) for domain in domains}
        training["specialisation"] = specialisation(model, windows)
    (folder / "training.json").write_text(json.dumps(training, indent=1) + "\n")
    (folder / "README.md").write_text(card(folder.name, model, training))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write_report(target, json.loads((target / "training.json").read_text()))
