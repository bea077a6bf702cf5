"""Train a small GLM-4.5 from nothing, with a layer that predicts a further token.

    python scripts/train_mtp.py [--out build/tiny-mtp]

As DeepSeek-V3 (arXiv 2412.19437): the loss of the next token, and 0.3 times that of the one behind
it; routers are balanced by their biases. On the calibration text that ships, so nothing is fetched.
The checkpoint is as publishers write it, the further layer behind the last. Nine minutes of one
core without AMX. ``mtp.json`` beside the weights has the losses on the held-out text that ships.
"""

import argparse
import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_report import WINDOW, held_out_losses, machine, read_jsonl
from torch import nn
from train_tiny import COMMON, all_experts_at_once, get_optimizers, rate
from transformers import AutoTokenizer, Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moesaic.arch.lookup import base_arch
from moesaic.data.reader import shipped_texts
from moesaic.metrics.drafts import Drafter, one_layer

SEED, BATCH, LAYERS = 20, 8, 4
FURTHER = 0.3  # weight of the loss of the token behind the next
BIAS = 0.001  # what a step adds to a router's bias, or takes from it


def build() -> tuple[Glm4MoeForCausalLM, Drafter]:
    """The model, and the layer that predicts further; they share embedding and head."""
    settings = {**COMMON, "hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2}
    settings |= {"num_hidden_layers": LAYERS, "tie_word_embeddings": False, "head_dim": 32}
    config = Glm4MoeConfig(
        **settings,
        intermediate_size=384,
        moe_intermediate_size=64,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        num_nextn_predict_layers=1,
    )
    model, arch = Glm4MoeForCausalLM(config), base_arch(config)
    twin = Glm4MoeForCausalLM(copy.deepcopy(config))
    drafter = Drafter(one_layer(twin, arch, LAYERS - 1), arch)
    drafter.model.set_input_embeddings(model.get_input_embeddings())
    drafter.model.set_output_embeddings(model.get_output_embeddings())
    nn.init.normal_(drafter.join.weight, std=config.initializer_range)
    return model, drafter


def batches(tokens: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
    """Windows (BATCH, WINDOW + 1) from anywhere in the text; a function of the seed."""
    draw = torch.Generator().manual_seed(SEED)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - WINDOW - 1, (BATCH,), generator=draw)
        yield torch.stack([tokens[start : start + WINDOW + 1] for start in starts])


def balanced(whole: nn.Module) -> None:
    """Let every router's bias follow how often its experts are chosen."""

    def follow(gate: nn.Module, _: object, outputs: tuple[torch.Tensor, ...]) -> None:
        count = torch.bincount(outputs[2].flatten(), minlength=len(gate.e_score_correction_bias))
        gate.e_score_correction_bias += BIAS * (count.float().mean() - count).sign()

    for name, module in whole.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(follow)


def train(model: Glm4MoeForCausalLM, drafter: Drafter, tokens: torch.Tensor, steps: int) -> None:
    whole = nn.ModuleDict({"model": model, "drafter": drafter}).train()
    balanced(whole)
    optimizers, start, sums = get_optimizers(whole), time.time(), torch.zeros(2)
    for step, batch in enumerate(batches(tokens, steps), 1):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.model(batch[:, :-1], use_cache=False)[0]
            logits = model.lm_head(hidden)
            _, drafted = drafter(hidden[:, :-1], batch[:, 1:-1])
        pairs = (logits, batch[:, 1:]), (drafted, batch[:, 2:])
        losses = [F.cross_entropy(x.float().flatten(0, 1), y.flatten()) for x, y in pairs]
        (losses[0] + FURTHER * losses[1]).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        for peak, optimizer in optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = peak * rate(step - 1, steps)
            optimizer.step()
            optimizer.zero_grad()
        sums += torch.stack(losses).detach()
        if step % 20 == 0:
            left = (time.time() - start) / step * (steps - step) / 60
            averages = ", ".join(f"{x / 20:.3f}" for x in sums.tolist())
            print(f"step {step} of {steps}, losses {averages}, {left:.1f} minutes left", flush=True)
            sums.zero_()
    whole.eval()


def save(model: Glm4MoeForCausalLM, drafter: Drafter, folder: Path) -> None:
    """Write both as one checkpoint."""
    model.bfloat16(), drafter.bfloat16()
    prefix = f"model.layers.{LAYERS}"
    parts = {
        "eh_proj": drafter.join,
        "enorm": drafter.embedding_norm,
        "hnorm": drafter.hidden_norm,
        "shared_head.norm": drafter.model.model.norm,
        "shared_head.head": model.lm_head,
        "embed_tokens": model.model.embed_tokens,
    }
    model.model.layers.append(drafter.model.model.layers[0])
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    more = {f"{prefix}.{name}.weight": part.weight.detach().clone() for name, part in parts.items()}
    save_file({**load_file(file), **more}, file, metadata={"format": "pt"})
    del model.model.layers[LAYERS]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/tiny-mtp"))
    parser.add_argument("--assets", type=Path, default=Path("src/moesaic/assets"))
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    start = time.time()
    torch.manual_seed(SEED)
    ALL_EXPERTS_FUNCTIONS.register("all_at_once", all_experts_at_once)
    tokenizer = AutoTokenizer.from_pretrained(args.assets / "models/tiny-moe")
    texts = shipped_texts("calibration")
    rows = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    tokens = torch.tensor([token for row in rows for token in (*row, 0)])
    model, drafter = build()
    for part in (model, drafter.model):
        part.config._experts_implementation = "all_at_once"
    train(model, drafter, tokens, args.steps)
    args.out.mkdir(parents=True, exist_ok=True)
    save(model, drafter, args.out)
    tokenizer.save_pretrained(args.out)
    losses = held_out_losses(
        model.float(), tokenizer, read_jsonl(args.assets / "evaluation.jsonl"), windows=40
    )
    record = {"seed": SEED, "steps": args.steps, "tokens": args.steps * BATCH * WINDOW}
    record |= {"tokens_of_text": len(tokens), "seconds": round(time.time() - start)}
    record |= {"machine": machine(), "held_out_loss": losses}
    (args.out / "mtp.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(losses, indent=1))


if __name__ == "__main__":
    main()
