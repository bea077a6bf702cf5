"""SmolLM2 with a carved FFN of half the width in every layer against the dense one, in llama.cpp.

    LLAMA_CPP=folder python benchmarks/llamacpp.py            writes benchmarks/llamacpp.json

Active ratio 0.625, exported as GraniteMoeShared; f32, bf16 and q8_0; on two threads, 512 tokens of
prompt and 64 new ones, interleaved. Ratios are carved over dense, round by round; the ideal one
follows from active parameters. The same comparison in our own execution, float32 and bfloat16.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from moesaic import MoREConfig, bench, carve, export
from moesaic.measure import environment

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--types", nargs="*", default=["f32", "bf16", "q8_0"])
    parser.add_argument("--carved", type=Path, help="a folder carved before")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        carved = given.carved or Path(place) / "carved"
        if given.carved is None:
            config = MoREConfig(active=0.625, layers="all")
            carve("smollm2", config, samples=40).save(carved)
        for type in given.types:
            files = {name: Path(place) / f"{name}-{type}.gguf" for name in ("model", "against")}
            for file, model in zip(files.values(), (carved, "smollm2"), strict=True):
                export(str(model), file, to="gguf", type=type)
            figures = bench(
                {name: str(file) for name, file in files.items()},
                engine="llamacpp",
                new_tokens=64,
                rounds=given.rounds,
            )
            rows.append({"engine": "llamacpp", "type": type, **figures})
            print(type, json.dumps(figures["ratio"]))
            for file in files.values():
                file.unlink()
        for dtype in (torch.float32, torch.bfloat16):
            figures = bench(
                {"model": str(carved), "against": "smollm2"},
                new_tokens=64,
                rounds=given.rounds,
                dtype=dtype,
            )
            name = str(dtype).removeprefix("torch.")
            rows.append({"engine": "transformers", "type": name, **figures})
            print(name, json.dumps(figures["ratio"]))
    out = Path(__file__).with_suffix(".json")
    measured = {(row["engine"], row["type"]) for row in rows}
    before = json.loads(out.read_text())["results"] if out.exists() else []
    rows = [row for row in before if (row["engine"], row["type"]) not in measured] + rows
    record = {"benchmark": "llamacpp", "environment": environment(), "results": rows}
    out.write_text(json.dumps(record, indent=1) + "\n")
