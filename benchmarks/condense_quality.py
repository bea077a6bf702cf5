"""What condensing costs in held-out perplexity, and how much of it tuning brings back.

A sweep of layer counts on a trained mixture with shared experts: CD-MoE's greedy search, the
paper's layer rank, and Layer Drop, each beside its share of the weights' bytes. Then the condensed
layers of one count are tuned on the text that ships.

    python benchmarks/condense_quality.py [MODEL] [--parts sweep tune] [--teacher MODEL]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moesaic import CondenseConfig, TuneConfig, condense, tune
from moesaic.arch.lookup import moe_arch
from moesaic.data.text import Tokens, calibration_tokens, evaluation_tokens
from moesaic.io.checkpoint import Checkpoint
from moesaic.io.source import resolve
from moesaic.metrics.measure import environment
from moesaic.metrics.perplexity import perplexity

VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"keep": "shared"},
    "greedy by perplexity": {"keep": "shared", "metric": "ppl"},
    "greedy, shared+routed": {"keep": "shared+routed"},
    "layer rank": {"keep": "shared", "layer_search": "rank"},
    "global layer rank": {"keep": "shared", "layer_search": "global-rank"},
    "layer drop": {"keep": "attention", "layer_search": "cosine"},
    "block drop": {"keep": "nothing", "layer_search": "cosine"},
}


def sweep(model: Any, tokens: Tokens, held_out: Tokens, variants: list[str]) -> dict[str, Any]:
    """Perplexity by how many layers were condensed, for each way to choose them."""
    arch = moe_arch(model.config)
    routed, parameters = len(arch.moe_layers(model)), size(model)
    found: dict[str, Any] = {}
    for name in variants:
        options = VARIANTS[name]
        first_stays = options["keep"] == "nothing" and arch.is_moe(arch.layers(model)[0])
        count = routed - first_stays
        config = CondenseConfig(layers=count, **{"refit": False, **options})
        counts = [str(n) for n in range(1, count)]
        result = condense(model, config, calibration=tokens, compare=counts)
        found[name] = []
        plan = result.plan
        assert plan is not None
        builders: dict[str, Callable[[], Any]] = {
            **result.builders,
            str(count): partial(result.build, plan),
        }
        for n, build in builders.items():
            trial = build()
            row = {
                "layers": result.summary["layers"][: int(n)],
                "perplexity": perplexity(trial, held_out).perplexity,
                "memory_ratio": size(trial) / parameters,
            }
            found[name].append(row)
            print(name, row, flush=True)
    return found


def size(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


def tuning(
    name: str, tokens: Tokens, held_out: Tokens, original: float, given: argparse.Namespace
) -> dict[str, Any]:
    """Condense, save, and train what was condensed."""
    found: dict[str, Any] = {}
    for keep, count in (wanted.split("=") for wanted in given.tune):
        result = condense(
            name, CondenseConfig(layers=int(count), keep=keep, refit=False), calibration=tokens
        )
        with tempfile.TemporaryDirectory() as folder:
            out = result.save(Path(folder) / "condensed")
            checkpoint = Checkpoint(out)
            stored = sum(checkpoint.tensor(name).nbytes for name in checkpoint.names())
            before = perplexity(resolve(str(out)).load("cpu", torch.float32), held_out).perplexity
            settings = TuneConfig(steps=given.steps, lr=given.lr, length=256, teacher=given.teacher)
            tuned = tune(out, settings, dtype=torch.float32)
        training = tuned.summary["training"]
        after = perplexity(tuned.model, held_out).perplexity
        found[keep] = {
            "layers": result.summary["layers"],
            "bytes_predicted": result.summary["memory_bytes"]["result"],
            "bytes_stored": stored,
            "perplexity": {"original": original, "condensed": before, "tuned": after},
            "regained": (before - after) / (before - original),
            "trained_share": training["trained_parameters"] / training["total_parameters"],
            "steps": given.steps,
            "lr": given.lr,
            "teacher": given.teacher,
        }
        print(keep, found[keep], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="tiny-shared-moe")
    parser.add_argument("--parts", nargs="+", default=["sweep", "tune"])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=32_768)
    parser.add_argument("--tune", nargs="+", default=["shared=4", "shared+routed=2"])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--teacher", default="", help="learn from this model, not from the text")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    given = parser.parse_args()
    source = resolve(given.model)
    model = source.load("cpu", torch.float32)
    tokens = calibration_tokens("", source.tokenizer, given.samples, given.length)
    held_out = evaluation_tokens("", source.tokenizer, 512, given.max_tokens)
    original = perplexity(model, held_out).perplexity
    record = json.loads(given.out.read_text()) if given.out.exists() else {}
    record |= {"model": given.model, "original_perplexity": original, "environment": environment()}
    if "sweep" in given.parts:
        record["sweep"] = record.get("sweep", {}) | sweep(model, tokens, held_out, given.variants)
    if "tune" in given.parts:
        label = "tune, from the original" if given.teacher else "tune"
        made = tuning(given.model, tokens, held_out, original, given)
        record[label] = record.get(label, {}) | made
    given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
