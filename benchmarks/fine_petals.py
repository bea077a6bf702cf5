"""The carved FFN with many petals beside the dense one: time, as a ratio within one run.

    python benchmarks/fine_petals.py         writes benchmarks/fine_petals.json

d 2048, d_mid 8192, petals of several numbers and widths, the backbone what they leave. "ideal" is a
dense block of the active width: what no routing could beat.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moesaic.arch.dense import FFNNames
from moesaic.metrics.measure import environment
from moesaic.nn import CarvedFFN

HIDDEN, WIDTH = 2048, 8192
SHAPES = ((64, 32, 68), (64, 8, 68), (256, 120, 17), (256, 32, 28))
"""Petals, top-k, neurons of a petal."""


def block(
    width: int, sizes: tuple[int, ...], top_k: int, routing: str, dtype: torch.dtype
) -> CarvedFFN:
    def linear(inputs: int, outputs: int) -> nn.Linear:
        return nn.Linear(inputs, outputs, bias=False, dtype=dtype)

    projections = {
        "gate_proj": linear(HIDDEN, width),
        "up_proj": linear(HIDDEN, width),
        "down_proj": linear(width, HIDDEN),
    }
    backbone = width - sum(sizes)
    module = CarvedFFN(projections, nn.SiLU(), FFNNames(), HIDDEN, backbone, sizes, top_k, routing)
    if module.router is not None:
        nn.init.normal_(module.router.weight, std=0.02)
    return module


@torch.inference_mode()
def compare(
    shape: tuple[int, int, int], dtype: torch.dtype, tokens: int, rounds: int
) -> dict[str, Any]:
    torch.manual_seed(0)
    petals, top_k, petal = shape
    sizes = (petal,) * petals
    active = WIDTH - (petals - top_k) * petal
    blocks = {
        "dense": block(WIDTH, (), 0, "cosine", dtype),
        "ideal": block(active, (), 0, "cosine", dtype),
        "linear": block(WIDTH, sizes, top_k, "linear", dtype),
        "backbone": block(WIDTH, sizes, top_k, "backbone", dtype),
    }
    x_TD = torch.randn(tokens, HIDDEN, dtype=dtype)
    times: dict[str, list[float]] = {name: [] for name in blocks}
    for _ in range(rounds):
        for name, module in blocks.items():
            started = time.perf_counter()
            module(x_TD)
            times[name].append(time.perf_counter() - started)
    best = {name: min(some) for name, some in times.items()}
    return {
        "petals": petals,
        "top_k": top_k,
        "petal": petal,
        "active_share": active / WIDTH,
        "dtype": str(dtype),
        "tokens": tokens,
        "rounds": rounds,
        "dense_seconds": best["dense"],
        "ratio": {name: seconds / best["dense"] for name, seconds in best.items()},
    }


def main() -> None:
    torch.set_num_threads(1)
    rows = [
        compare(shape, dtype, tokens, rounds)
        for shape in SHAPES
        for dtype in (torch.float32, torch.bfloat16)
        for tokens, rounds in ((1, 50), (512, 5))
    ]
    record = {"environment": environment("cpu"), "threads": 1, "rows": rows}
    Path(__file__).with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
