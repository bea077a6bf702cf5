"""ToMoE with one option changed at a time, at the same active ratio (the paper's Tab. 13, Fig. 6c).

    OMP_NUM_THREADS=1 python benchmarks/tomoe_ablations.py [ROW ...] [--work DIR]

tiny-dense at 0.6, the schedule and the held-out text of benchmarks/tomoe.py: about three minutes of
one core a row. Two more seeds say how much of a difference is chance. Writes
benchmarks/tomoe_ablations.json after each row; a row that is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tomoe import measured

import moesaic
from moesaic.data.text import evaluation_tokens
from moesaic.io.source import resolve
from moesaic.metrics.measure import environment
from moesaic.train import Schedule

MODEL, ACTIVE = "tiny-dense", 0.6
ROWS: dict[str, dict[str, Any]] = {
    "default": {},
    "seed=1": {"seed": 1},
    "seed=2": {"seed": 2},
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
}
LAST = 50
"""Steps at the end whose losses are averaged."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--work", type=Path, help="keeps checkpoints of an unfinished row")
    given = parser.parse_args()
    file = Path(__file__).with_suffix(".json")
    record: dict[str, Any] = (
        json.loads(file.read_text()) if file.exists() else {"model": MODEL, "rows": {}}
    )
    tokens = evaluation_tokens("", resolve(MODEL).tokenizer, 512, 65_536)
    for name in given.rows or ROWS:
        config = moesaic.ToMoEConfig(active=ACTIVE, **ROWS[name])
        known = record["rows"].get(name)
        if known and known["asked"] == asdict(config):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            progress = (given.work or Path(scratch)) / name
            before = time.process_time()
            result = moesaic.carve(MODEL, config, progress=progress)
            seconds = time.process_time() - before
        training = result.summary["training"]
        last = training["losses"][-LAST:]
        terms = [k for k in last[0] if k not in ("step", "loss", "learning_rate")]
        row = {
            **measured(result.model, tokens),
            "cpu_seconds": seconds,
            "threshold": training["threshold"],
            "last_steps": {k: sum(step[k] for step in last) / len(last) for k in terms},
            "trained_parameters": training["trained_parameters"],
            "schedule": asdict(Schedule.of(config.settled(tiny=True))),
            "asked": asdict(config),
            "environment": environment(),
        }
        record["rows"][name] = row
        file.write_text(json.dumps(record, indent=1) + "\n")
        print(
            f"{name:20} perplexity {row['perplexity']:7.3f} active {row['active_ratio']:.4f} "
            f"threshold {row['threshold']:+.2f} {seconds:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
