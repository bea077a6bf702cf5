"""The same weights mapped from files whose values begin where they happen to, and at whole lines.

    python benchmarks/mapped.py    writes benchmarks/mapped.json

SmolLM2-135M in bfloat16, which is read as it lies, by one thread and by two; a prompt of 128 tokens
and 16 greedy steps a round, all in turn. Ratios to the model whose weights were copied into memory
of their own, medians of the rounds with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from moesaic.foreign import Model
from moesaic.hub import save_live
from moesaic.io.source import resolve
from moesaic.metrics.machine import environment
from moesaic.metrics.speed import against, compare_speed

OUT = Path(__file__).with_suffix(".json")
COPIED = "copied"


def mapped(folder: Path) -> tuple[Model, int]:
    """A model as transformers loads it, and how far from a whole line its first weight begins."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    return model, next(model.parameters()).data_ptr() % 64


def main(names: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args(names)
    record: dict[str, Any] = {"environment": environment(), "rounds": args.rounds}
    model = resolve("smollm2").load("cpu", torch.bfloat16).eval()
    prompt = torch.randint(5, 20_000, (1, 128), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as work:
        theirs, ours = Path(work, "theirs"), Path(work, "ours")
        model.save_pretrained(theirs)
        save_live(model, None, ours)
        models = {COPIED: model}
        for name, folder in {"as safetensors writes": theirs, "at whole lines": ours}.items():
            models[name], record[f"{name}: bytes beside a line"] = mapped(folder)
        for threads in (1, 2):
            load = os.getloadavg()
            torch.set_num_threads(threads)
            speeds = compare_speed(models, prompt, 16, args.rounds)
            rows = {
                name: {**speed.as_json(), **against(speed, speeds[COPIED], 1.0)}
                for name, speed in speeds.items()
            }
            record[f"threads {threads}"] = {"load": load, "rows": rows}
            OUT.write_text(json.dumps(record, indent=1) + "\n")
            for name, speed in rows.items():
                ratios = {k: round(speed[k]["ratio"], 3) for k in ("prefill", "decode")}
                print(threads, name, ratios, flush=True)


if __name__ == "__main__":
    main()
