"""What condensing costs in held-out perplexity, and how much of it tuning brings back.

A sweep of layer counts on a trained mixture with shared experts: CD-MoE's greedy search, the
paper's layer rank, and Block Drop, each beside its share of the weights' bytes. Then the condensed
layers of one count are tuned on the text that ships.

    python benchmarks/condense_quality.py [MODEL] [--steps 300]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from moesaic.checkpoint import Checkpoint
from moesaic.condensing import condense
from moesaic.data import calibration_tokens, evaluation_tokens
from moesaic.hub import resolve
from moesaic.measure import environment
from moesaic.methods import CondenseConfig, TuneConfig
from moesaic.metrics.perplexity import perplexity
from moesaic.moe import moe_arch
from moesaic.tuning import tune

VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"keep": "shared"},
    "greedy, shared+routed": {"keep": "shared+routed"},
    "layer rank": {"keep": "shared", "layer_search": "rank"},
    "global layer rank": {"keep": "shared", "layer_search": "global-rank"},
    "block drop": {"keep": "attention", "layer_search": "cosine"},
    "layer drop": {"keep": "nothing", "layer_search": "cosine"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="tiny-shared-moe")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=32_768)
    parser.add_argument("--tune-layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    given = parser.parse_args()
    source = resolve(given.model)
    model = source.load("cpu", torch.float32)
    tokens = calibration_tokens("", source.tokenizer, given.samples, given.length)
    held_out = evaluation_tokens("", source.tokenizer, 512, given.max_tokens)
    original = perplexity(model, held_out).perplexity
    routed = len(moe_arch(model.config).moe_layers(model))
    record: dict[str, Any] = {
        "model": given.model,
        "original_perplexity": original,
        "environment": environment(),
        "sweep": {},
    }
    for name, options in VARIANTS.items():
        count = routed - (
            options["keep"] == "nothing"
            and moe_arch(model.config).is_moe(moe_arch(model.config).layers(model)[0])
        )
        counts = [str(n) for n in range(1, count)]
        config = CondenseConfig(layers=count, **options)
        result = condense(model, config, calibration=tokens, compare=counts)
        plans = {**result.comparisons, str(count): result.plan}
        rows = []
        for n, plan in plans.items():
            trial = result.build(plan)
            parameters = sum(p.numel() for p in trial.parameters())
            rows.append(
                {
                    "layers": result.summary["layers"][: int(n)],
                    "perplexity": perplexity(trial, held_out).perplexity,
                    "memory_ratio": parameters / sum(p.numel() for p in model.parameters()),
                }
            )
            print(name, rows[-1], flush=True)
        record["sweep"][name] = rows
    for keep in ("shared", "shared+routed"):
        config = CondenseConfig(layers=given.tune_layers, keep=keep)
        result = condense(given.model, config, calibration=tokens)
        with tempfile.TemporaryDirectory() as folder:
            out = result.save(Path(folder) / "condensed")
            checkpoint = Checkpoint(out)
            stored = sum(checkpoint.tensor(name).nbytes for name in checkpoint.names())
            before = perplexity(resolve(str(out)).load("cpu", torch.float32), held_out).perplexity
            settings = TuneConfig(steps=given.steps, lr=given.lr, length=256)
            tuned = tune(out, settings, dtype=torch.float32)
        after = perplexity(tuned.model, held_out).perplexity
        record[f"tune {keep}"] = {
            "layers": result.summary["layers"],
            "bytes_predicted": result.summary["memory_bytes"]["result"],
            "bytes_stored": stored,
            "perplexity": {"original": original, "condensed": before, "tuned": after},
            "regained": (before - after) / (before - original),
            "trained_share": tuned.trained_parameters / tuned.total_parameters,
            "steps": given.steps,
        }
        print(keep, record[f"tune {keep}"], flush=True)
    given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
