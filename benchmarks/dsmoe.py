"""DSMoE on tiny-dense beside LLaMA-MoE's fixed top-k and the paper's ablations.

    python benchmarks/dsmoe.py [--text TRAIN.jsonl] [--seed 0 1 2]     writes benchmarks/dsmoe.json

TRAIN.jsonl is the training text of the tiny models, as scripts/gather_text.py leaves it; without
it, the calibration text that ships, which they have not seen. All variants start from the same
weights and train on the same windows in the same order, all
parameters, with the same schedule. The ratio is that of 4 of 8 blocks, which top-k runs exactly;
lambda moves to meet it for those that have a threshold. What is left of the difference on the
shipped evaluation text, which nothing has been trained on, is taken out by the threshold: the
median of all gates there. Perplexity is given at the trained threshold, 0.5, and at that one.

Rows are written as they come; those that are there are kept, so a run can be split. ``spread`` has
mean and standard deviation over seeds of what was trained on the same text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import product
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
    """Windows of all domains, drawn without replacement; of a file from every third document."""
    ids = windows(load_texts(text, "calibration")[:: 3 if text else 1], tokenizer, LENGTH)
    drawn = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    if len(ids) < count:
        raise moesaic.MoesaicError(f"The text fills {len(ids)} windows, {count} are needed.")
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


def spread(rows: list[Any]) -> list[Any]:
    """Perplexities over seeds: count, mean and sample standard deviation, by name and text."""
    found: dict[tuple[str, str, int], list[Any]] = {}
    for row in rows:
        key = (row["name"], row.get("text", "gathered"), row["train_tokens"])
        found.setdefault(key, []).append(row)
    table = []
    for (name, text, tokens), same in found.items():
        at_tau = {"at_its_own_threshold": [r["at_its_own_threshold"] for r in same]}
        line: dict[str, Any] = {"name": name, "text": text, "train_tokens": tokens}
        for where, scores in {"at_the_ratio": same, **at_tau}.items():
            for figure in ("perplexity", "active_ratio"):
                values = [s[figure] for s in scores]
                line[f"{figure} {where}"] = {
                    "runs": len(values),
                    "mean": statistics.fmean(values),
                    "deviation": statistics.stdev(values) if len(values) > 1 else None,
                }
        table.append(line)
    return table


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
    parser.add_argument("--text", default="")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--gain", type=float, default=1.0)
    parser.add_argument("--seed", type=int, nargs="*", default=[0])
    parser.add_argument("--only", nargs="*", default=list(VARIANTS))
    asked = parser.parse_args()
    tokenizer = resolve("tiny-dense").tokenizer
    ids = training_windows(asked.text, tokenizer, asked.steps * BATCH)
    train = Tokens(ids)
    held = evaluation_tokens("", tokenizer, LENGTH, HELD_OUT)
    text = Path(asked.text).name or "ships"
    rows = json.loads(OUT.read_text())["results"] if OUT.exists() else []
    dense = score(resolve("tiny-dense").load(dtype=torch.float32), held)
    for seed, name in product(asked.seed, asked.only):
        options = {**VARIANTS[name], "lr": asked.lr, "gain": asked.gain, "seed": seed}
        same = {"name": name, "options": options, "train_tokens": ids.numel(), "text": text}
        if any(same.items() <= row.items() for row in rows):
            continue
        made = run(name, options, train, held)
        rows.append({**made, "text": text, "environment": environment()})
        record = {
            "benchmark": "dsmoe",
            "target": ACTIVE,
            "held_out_tokens": dense.tokens,
            "dense_perplexity": dense.perplexity,
            "spread": spread(rows),
            "results": rows,
        }
        OUT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
