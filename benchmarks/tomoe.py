"""ToMoE beside MoRE and static pruning at the active ratio that was measured of it.

    python benchmarks/tomoe.py                              tiny-dense at 0.6: minutes on one core
    python benchmarks/tomoe.py smollm2 0.7 0.5 --work DIR --steps 800 --length 256 --lr 3e-3 \\
        --decay cosine                                      SmolLM2-135M: about an hour a ratio

A step of 256 tokens of SmolLM2 takes 3.7 seconds of one core (float32): 800 take 50 minutes.
Without the options of that line it is the paper's 10,000 steps of 2,048 tokens, for a GPU.

Trains on all the text that ships for calibration, with the default schedule for the model's size or
what is given; measures on the text that ships for evaluation, 512 tokens a window. With --work a
run that was stopped continues. Writes benchmarks/tomoe_MODEL.json after each ratio.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import moesaic
from moesaic.data.text import evaluation_tokens
from moesaic.io.source import resolve
from moesaic.metrics.measure import environment

KEPT_LOSSES = 100


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="tiny-dense")
    parser.add_argument("active", nargs="*", type=float, default=[0.6])
    parser.add_argument("--work", type=Path, help="keeps checkpoints of unfinished training")
    parser.add_argument("--max-tokens", type=int, default=65_536)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    for name, kind in (("steps", int), ("batch", int), ("length", int), ("lr", float)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--decay", choices=("constant", "cosine"))
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    given = asked()
    source = resolve(given.model)
    dtype = getattr(torch, given.dtype)
    tokens = evaluation_tokens("", source.tokenizer, 512, given.max_tokens)
    options: dict[str, Any] = {"device": given.device, "dtype": dtype}
    file = given.out or Path(__file__).with_name(f"tomoe_{given.model.replace('-', '_')}.json")
    record: dict[str, Any] = {
        "model": given.model,
        "environment": environment(given.device),
        "evaluation_tokens": tokens.count,
        "dense": measured(source.load(given.device, dtype), tokens),
        "runs": [],
    }
    print(f"dense            perplexity {record['dense']['perplexity']:.3f}")
    names = ("steps", "batch", "length", "lr", "decay")
    schedule = {n: getattr(given, n) for n in names if getattr(given, n) is not None}
    for active in given.active:
        config = moesaic.ToMoEConfig(active=active, experts=given.experts, **schedule)
        with tempfile.TemporaryDirectory() as scratch:
            progress = (given.work or Path(scratch)) / f"{given.model}-{active:g}"
            start, before = time.perf_counter(), time.process_time()
            result = moesaic.carve(given.model, config, progress=progress, **options)
            seconds = {
                "wall_seconds": time.perf_counter() - start,
                "cpu_seconds": time.process_time() - before,
            }
        training = result.summary["training"]
        every = max(1, len(training["losses"]) // KEPT_LOSSES)
        training["losses"] = training["losses"][::every]
        scores = {"tomoe": measured(result.model.to(given.device), tokens)}
        share = scores["tomoe"]["active_ratio"]
        for name, baseline in {
            "more-4": moesaic.MoREConfig(active=share, experts=4, layers="all"),
            "more-8": moesaic.MoREConfig(active=share, experts=8, layers="all"),
            "static": moesaic.MoREConfig(active=share, layers="all", variant="static"),
        }.items():
            carved = moesaic.carve(given.model, baseline, **options).model
            scores[name] = measured(carved.to(given.device), tokens)
        for name, score in scores.items():
            score["ratio_to_dense"] = score["perplexity"] / record["dense"]["perplexity"]
            print(
                f"{active:g} {name:10} perplexity {score['perplexity']:8.3f} "
                f"({score['ratio_to_dense']:.3f} of dense) active {score['active_ratio']:.4f}"
            )
        assert result.plan is not None
        analyses = {i: {**a, "similarity": None} for i, a in result.analyses.items()}
        record["runs"].append(
            {
                "config": asdict(config) | result.plan.config,
                **seconds,
                "training": training,
                "scores": scores,
                "layers": analyses,
            }
        )
        file.write_text(json.dumps(record, indent=1) + "\n")


def measured(model: Any, tokens: Any) -> dict[str, Any]:
    score = moesaic.evaluate(model, data=tokens).as_json()
    kept = ("perplexity", "tokens", "total_parameters", "active_parameters", "active_ratio")
    return {name: score[name] for name in kept}


if __name__ == "__main__":
    main()
