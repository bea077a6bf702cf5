"""SmolLM2 with a carved FFN of half the width in every layer against the dense one, in llama.cpp.

    LLAMA_CPP=folder python benchmarks/llamacpp.py            writes benchmarks/llamacpp.json

Active ratio 0.625, exported as GraniteMoeShared; f32, bf16 and q8_0; on two threads, 512 tokens of
prompt and 64 new ones, interleaved. Ratios are carved over dense, round by round; the ideal one
follows from active parameters. The same comparison in our own execution, float32 and bfloat16.
What was not asked for (``--types`` and ``--dtypes`` may be empty) stays as it was in the file.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from moesaic import MoREConfig, bench, carve, export
from moesaic.metrics.measure import environment


def measured(given: argparse.Namespace, work: Path) -> Iterator[dict[str, Any]]:
    """A row for every type in llama.cpp, then one for every dtype in transformers."""
    models = {"model": str(work / "carved"), "against": "smollm2"}
    asked = {"new_tokens": 64, "rounds": given.rounds}
    if not (work / "carved").exists():
        carve("smollm2", MoREConfig(active=0.625, layers="all"), samples=40).save(work / "carved")
    for type in given.types:
        files = {name: work / f"{name}-{type}.gguf" for name in models}
        for name, file in files.items():
            if not file.exists():
                export(models[name], file, to="gguf", type=type)
        if given.rounds:
            names = {name: str(file) for name, file in files.items()}
            yield {"engine": "llamacpp", "type": type, **bench(names, engine="llamacpp", **asked)}
    for name in given.dtypes if given.rounds else ():
        figures = bench(models, dtype=getattr(torch, name), **asked)
        yield {"engine": "transformers", "type": name, **figures}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9, help="0 only makes what is to be measured")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--types", nargs="*", default=["f32", "bf16", "q8_0"], help="llama.cpp's")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"], help="our own")
    parser.add_argument("--work", type=Path, help="keep the carved model and GGUF files here")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    out = Path(__file__).with_suffix(".json")
    record = json.loads(out.read_text()) if out.exists() else {"results": []}
    rows = {(row["engine"], row["type"]): row for row in record["results"]}
    with tempfile.TemporaryDirectory() as place:
        for row in measured(given, given.work or Path(place)):
            circumstances = {"environment": environment(), "rounds": given.rounds}
            rows[row["engine"], row["type"]] = {**row, **circumstances}
            print(row["engine"], row["type"], json.dumps(row["ratio"]))
            record = {"benchmark": "llamacpp", "results": list(rows.values())}
            out.write_text(json.dumps(record, indent=1) + "\n")
