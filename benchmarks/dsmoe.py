"""DSMoE on tiny-dense beside LLaMA-MoE's fixed top-k and the paper's ablations.

    python benchmarks/dsmoe.py --text TRAIN.jsonl       writes benchmarks/dsmoe.json

TRAIN.jsonl is the training text of the tiny models, as scripts/gather_text.py leaves it. All
variants start from the same weights and train on the same windows in the same order, all
parameters, with the same schedule. The ratio is that of 4 of 8 blocks, which top-k runs exactly;
lambda moves to meet it for those that have a threshold. What is left of the difference on the
shipped evaluation text, which nothing has been trained on, is taken out by the threshold: the
median of all gates there. Perplexity is given at the trained threshold, 0.5, and at that one.

Rows are written as they come; those that are there are kept, so a run can be split.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import moesaic
from moesaic.data.text import Tokens, evaluation_tokens, load_texts, windows
from moesaic.io.source import resolve
from moesaic.methods.dsmoe.gates import recorded
from moesaic.metrics.measure import environment
from moesaic.metrics.score import score
from moesaic.nn import ThresholdRouter

LENGTH, BATCH, ACTIVE, HELD_OUT = 256, 8, 0.625, 16_384
OUT = Path(__file__).with_suffix(".json")
VARIANTS: dict[str, dict[str, Any]] = {
    "dsmoe": {},
    "top-k": {"variant": "top-k", "top_k_scale": 2.0},  # 2: the mean weight is one, as dense
    "top-k, LLaMA-MoE's scale": {"variant": "top-k"},
    "no-straight-through": {"variant": "no-straight-through"},
    "no-piecewise": {"variant": "no-piecewise"},
}


def training_windows(text: str, tokenizer: Any, count: int) -> torch.Tensor:
    """Windows of all domains, drawn without replacement from every third document."""
    ids = windows(load_texts(text, "calibration")[::3], tokenizer, LENGTH)
    drawn = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    if len(ids) < count:
        raise moesaic.MoesaicError(f"{text} fills {len(ids)} windows, {count} are needed.")
    return ids[drawn[:count]]


@torch.inference_mode()
def choose_tau(model: Any, tokens: Tokens) -> float | None:
    """The threshold at which half of the blocks are active on a text; None without thresholds.

    The median of all gates. It is taken again at the new threshold, which changes later layers.
    """
    gates = [m for m in model.modules() if isinstance(m, ThresholdRouter)]
    tau = None
    for _ in range(4 if gates else 0):
        with recorded(gates) as seen:
            values = []
            for batch in tokens.batches(4096):
                model(input_ids=batch.input_ids, logits_to_keep=1, use_cache=False)
                values += [(seen[g][0].float() @ g.weight.T).sigmoid().flatten() for g in gates]
        tau = torch.cat(values).median().item()
        for gate in gates:
            gate.tau = tau
    return tau


def measured(model: Any, held: Tokens) -> dict[str, Any]:
    found = score(model, held)
    return {
        "perplexity": found.perplexity,
        "active_ratio": found.active_ratio,
        "active_blocks": [r.calls for r in found.routing.values()],
        "idle_tokens": [r.idle for r in found.routing.values()],
    }


def run(name: str, options: dict[str, Any], train: Tokens, held: Tokens) -> Any:
    ids = train.input_ids
    steps = len(ids) // BATCH
    config = moesaic.DSMoEConfig(
        active=ACTIVE, steps=steps, batch=BATCH, length=LENGTH, save_every=10**6, **options
    )
    base = resolve("tiny-dense").load(dtype=torch.float32)
    start = time.perf_counter()
    result = moesaic.carve(base, config, calibration=train, inplace=True)
    seconds = time.perf_counter() - start
    losses = result.summary["training"]["losses"]
    row = {
        "name": name,
        "options": options,
        "train_tokens": ids.numel(),
        "seconds": seconds,
        "at_its_own_threshold": measured(result.model, held),
        "tau": choose_tau(result.model, held),
        **measured(result.model, held),
        "curve": losses[:: max(1, steps // 50)] + losses[-1:],
    }
    print(f"{name:26} perplexity {row['perplexity']:.3f} active {row['active_ratio']:.4f}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--gain", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=list(VARIANTS))
    asked = parser.parse_args()
    tokenizer = resolve("tiny-dense").tokenizer
    ids = training_windows(asked.text, tokenizer, asked.steps * BATCH)
    train = Tokens(ids)
    held = evaluation_tokens("", tokenizer, LENGTH, HELD_OUT)
    common = {"lr": asked.lr, "gain": asked.gain, "seed": asked.seed}
    rows = json.loads(OUT.read_text())["results"] if OUT.exists() else []
    dense = score(resolve("tiny-dense").load(dtype=torch.float32), held)
    for name in asked.only:
        options = {**VARIANTS[name], **common}
        same = {"name": name, "options": options, "train_tokens": train.input_ids.numel()}
        if any(same.items() <= row.items() for row in rows):
            continue
        rows.append(run(name, options, train, held))
        record = {
            "benchmark": "dsmoe",
            "target": ACTIVE,
            "held_out_tokens": dense.tokens,
            "dense_perplexity": dense.perplexity,
            "environment": environment(),
            "results": rows,
        }
        OUT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
