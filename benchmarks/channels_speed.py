"""Speed of SmolLM2-135M when channels are skipped, beside the dense model in the same rounds.

    python benchmarks/channels_speed.py      writes benchmarks/channels_speed.json

One thread, a prompt of 64 tokens, 16 greedy steps a round; ratios are medians of the rounds' own.
``ideal`` is what the parameters that a token reads would allow, embeddings and head included;
``share`` is what is reached of it. The load of the machine at the start is kept with the figures.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch

import moesaic
from moesaic.config import parse_dtype
from moesaic.foreign import Model
from moesaic.io.source import resolve
from moesaic.methods.channels.config import WINAConfig
from moesaic.metrics.measure import environment, speed_json
from moesaic.metrics.size import model_size
from moesaic.metrics.speed import against, compare_speed

OUT = Path(__file__).with_suffix(".json")
RATIOS = (0.8, 0.6)


def main(names: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(names)
    torch.set_num_threads(1)
    source = resolve("smollm2")
    prompt = torch.randint(5, 20_000, (1, 64), generator=torch.Generator().manual_seed(0))
    found: dict[str, object] = {"load": os.getloadavg(), "environment": environment()}
    for name in ("float32", "bfloat16"):
        dense = source.load("cpu", parse_dtype(name))
        models: dict[str, Model] = {"dense": dense}
        for ratio in RATIOS:
            copy = source.load("cpu", parse_dtype(name))
            result = moesaic.carve(copy, WINAConfig(active=ratio), inplace=True)
            models[f"WINA {ratio:g}"] = result.model.eval()
        speeds = compare_speed(models, prompt, 16, options.rounds)
        whole = model_size(dense).active_parameters
        rows = {}
        for key, speed in speeds.items():
            ideal = whole / model_size(models[key]).active_parameters
            rows[key] = {**speed_json(speed), **against(speed, speeds["dense"], ideal)}
        found[name] = rows
        OUT.write_text(json.dumps(found, indent=1) + "\n")
        for key, row in rows.items():
            print(name, key, json.dumps({k: row[k] for k in ("prefill", "decode")}), flush=True)


if __name__ == "__main__":
    main()
