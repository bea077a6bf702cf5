"""ToMoE with one option changed at a time, at the same active ratio (the paper's Tab. 13, Fig. 6c).

    OMP_NUM_THREADS=1 python benchmarks/tomoe_ablations.py [ROW ...] [--steps 100] [--work DIR]

tiny-dense at 0.6, 16,384 of the held-out tokens of benchmarks/tomoe.py, and its schedule with fewer
steps: about 30 seconds of one core a run. Each row is run with three seeds, all rows with one
before any with the next, so that a run that was stopped compares like with like. Writes
benchmarks/tomoe_ablations.json after each run; one that is there is not run again. ``table`` has
the mean over seeds and the sample standard deviation, and the same of each seed's difference from
the default with that seed; ``missing`` the seeds that a row was not run with; ``before`` runs of
800 steps from when R_L had another gradient.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from tomoe import measured

import moesaic
from moesaic.data.text import evaluation_tokens
from moesaic.io.source import resolve
from moesaic.metrics.measure import environment
from moesaic.objectives import Schedule

MODEL, ACTIVE = "tiny-dense", 0.6
PAPER = {
    name: value
    for name, value in moesaic.ToMoEConfig.bundles["paper"].items()
    if name not in ("steps", "batch", "length", "lr", "decay")
}
"""The paper's objective and result, with the schedule of the other rows."""
ROWS: dict[str, dict[str, Any]] = {
    "default": {},
    "attention=static": {"attention": "static"},
    "attention=heads": {"attention": "heads"},
    "attention=none": {"attention": "none"},
    "embeddings=local": {"embeddings": "local"},
    "head_bias=3": {"head_bias": 3.0},
    "union=0": {"union": 0.0},
    "objective=language": {"objective": "language"},
    "budget=tossed": {"budget": "tossed"},
    "tau=0.3": {"tau": 0.3},
    "tau=0.5": {"tau": 0.5},
    "experts=16": {"experts": 16},
    "experts=24": {"experts": 24},
    "mask_outputs=false": {"mask_outputs": False},
    "paper": PAPER,
}
SEEDS = (0, 1, 2)
LAST = 50
"""Steps at the end whose losses are averaged."""


def table(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds, sample standard deviations, and differences from the default's runs."""
    lines = {}
    for name, by_seed in runs.items():
        line: dict[str, Any] = {"runs": len(by_seed)}
        for figure in ("perplexity", "active_ratio"):
            values = [run[figure] for run in by_seed.values()]
            line[figure] = statistics.fmean(values)
            line[f"{figure}_deviation"] = statistics.stdev(values) if len(values) > 1 else None
        paired = [s for s in by_seed if s in runs.get("default", {}) and name != "default"]
        more = [by_seed[s]["perplexity"] - runs["default"][s]["perplexity"] for s in paired]
        if more:
            line["more_than_default"] = statistics.fmean(more)
            line["more_deviation"] = statistics.stdev(more) if len(more) > 1 else None
        lines[name] = line
    return lines


def missing(runs: dict[str, dict[str, Any]]) -> dict[str, list[int]]:
    """The seeds that rows were not run with."""
    left = {name: [s for s in SEEDS if str(s) not in runs.get(name, {})] for name in ROWS}
    return {name: seeds for name, seeds in left.items() if seeds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="*", default=[*SEEDS])
    parser.add_argument("--work", type=Path, help="keeps checkpoints of an unfinished run")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    given = parser.parse_args()
    record: dict[str, Any] = {"model": MODEL}
    if given.out.exists():
        record = json.loads(given.out.read_text())
    tokens = evaluation_tokens("", resolve(MODEL).tokenizer, 512, 16_384)
    if "dense" not in record:
        record["dense"] = measured(resolve(MODEL).load(), tokens)
    for seed, name in product(given.seeds, given.rows or ROWS):
        config = moesaic.ToMoEConfig(active=ACTIVE, steps=given.steps, seed=seed, **ROWS[name])
        runs = record.setdefault("runs", {}).setdefault(name, {})
        if str(seed) in runs and runs[str(seed)]["asked"] == asdict(config):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            progress = (given.work or Path(scratch)) / f"{name}-{seed}"
            before = time.process_time()
            result = moesaic.carve(MODEL, config, progress=progress)
            seconds = time.process_time() - before
        training = result.summary["training"]
        last = training["losses"][-LAST:]
        terms = [k for k in last[0] if k not in ("step", "loss", "learning_rate")]
        run = {
            **measured(result.model, tokens),
            "cpu_seconds": seconds,
            "threshold": training["threshold"],
            "last_steps": {k: sum(step[k] for step in last) / len(last) for k in terms},
            "trained_parameters": training["trained_parameters"],
            "schedule": asdict(Schedule.of(config)),
            "asked": asdict(config),
            "environment": environment(),
        }
        runs[str(seed)] = run
        record |= {"table": table(record["runs"]), "missing": missing(record["runs"])}
        given.out.write_text(json.dumps(record, indent=1) + "\n")
        print(
            f"{name:20} seed {seed} perplexity {run['perplexity']:7.3f} "
            f"active {run['active_ratio']:.4f} threshold {run['threshold']:+.2f} {seconds:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
