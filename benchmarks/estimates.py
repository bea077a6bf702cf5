"""What dry runs tell, beside what came: bytes, peak memory, time.

    python benchmarks/estimates.py      writes benchmarks/estimates.json; goes on where it stopped

Each run is a process of its own, by the command line, measurement of the result included; memory is
the peak of its resident set. Ratios are what was told over what came.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moesaic.metrics.measure import environment

OUT = Path(__file__).with_suffix(".json")
SHORT = ["--samples", "32", "--max-tokens", "4096"]
RUNS: dict[str, list[str]] = {
    "prune, tiny-moe": ["prune", "tiny-moe", "--keep", "6", *SHORT],
    "prune --refit, tiny-shared-moe": [
        *["prune", "tiny-shared-moe", "--keep", "16", "--criterion", "reap", "--refit", *SHORT]
    ],
    "slim, tiny-moe": ["slim", "tiny-moe", "--keep", "0.5", *SHORT],
    "slim --refit, tiny-shared-moe": [
        "slim",
        "tiny-shared-moe",
        "--keep",
        "0.5",
        "--refit",
        *SHORT,
    ],
    "condense, tiny-shared-moe": ["condense", "tiny-shared-moe", "--layers", "2", *SHORT],
    "skip, tiny-moe": ["skip", "tiny-moe", *SHORT],
    "carve, tiny-dense": ["carve", "tiny-dense", "--active", "0.8", *SHORT],
    "carve wina, smollm2": ["carve", "smollm2", "--method", "wina", *SHORT],
    "slim, smollm2": ["slim", "smollm2", "--keep", "0.8", *SHORT],
    "carve, smollm2": ["carve", "smollm2", "--active", "0.8", *SHORT],
}
CODE = """
import json, sys, time
start = time.perf_counter()
sys.argv = ["moesaic", *json.loads(sys.argv[1])]
from moesaic import cli
from moesaic.metrics.memory import peak_resident
code = 0
try:
    cli.main()
except SystemExit as stop:
    code = stop.code or 0
import resource
children = resource.getrusage(resource.RUSAGE_CHILDREN)
cpu = time.process_time() + children.ru_utime + children.ru_stime
took = {"wall": time.perf_counter() - start, "cpu": cpu}
print("TOOK", json.dumps({**took, "peak": peak_resident()}), file=sys.stderr)
sys.exit(code)
"""


def command(arguments: Sequence[str]) -> tuple[Any, dict[str, float]]:
    """What a command prints as JSON, and what it took."""
    run = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps([*arguments, "--json"])],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(run.stderr[-2000:])
    took = next(line for line in run.stderr.splitlines() if line.startswith("TOOK "))
    return json.loads(run.stdout), json.loads(took.removeprefix("TOOK "))


def measured(name: str) -> dict[str, Any]:
    """One run, told and carried out."""
    verb, model, *options = RUNS[name]
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "out"
        given = [verb, model, str(out), *options]
        told, asking = command([*given, "--dry-run"])
        load = os.getloadavg()[0]
        start = time.time()
        record, took = command(given)
        files = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
        written = sum(f.stat().st_size for f in out.glob("model*.safetensors*"))
    estimate = told["estimate"]
    return {
        "told": estimate,
        "came": {**took, "output_bytes": written, "folder_bytes": files},
        "asking": asking,
        "ratios": {
            "output_bytes": estimate["output_bytes"] / written,
            "peak_memory": estimate["peak_memory_bytes"] / took["peak"],
            "seconds": estimate["seconds"] / took["wall"],
            "cpu_seconds": estimate["seconds"] / took["cpu"],
        },
        "load": load,
        "at": start,
        "native": record["native"],
    }


def main(names: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="runs whose names contain this")
    options = parser.parse_args(names)
    kept: dict[str, Any] = json.loads(OUT.read_text()) if OUT.exists() else {}
    kept["environment"] = environment()
    rows = kept.setdefault("runs", {})
    for name in RUNS:
        if name in rows or options.only not in name:
            continue
        rows[name] = measured(name)
        OUT.write_text(json.dumps(kept, indent=1) + "\n")
        print(name, json.dumps(rows[name]["ratios"]), flush=True)


if __name__ == "__main__":
    main()
