"""The carved FFN with many petals beside the dense one: time, as a ratio within one run.

    python benchmarks/fine_petals.py               writes benchmarks/fine_petals.json
    python benchmarks/fine_petals.py --prompts     adds prompts of a block of SmolLM2's size
    python benchmarks/fine_petals.py --prompts --petals 256     those of these numbers again

d 2048, d_mid 8192, petals of several numbers and widths, the backbone what they leave. "ideal" is a
dense block of the active width: what no routing could beat. Prompts: d 576, d_mid 1536, one layer,
warm, other tokens in every round; times the dense block's speed, by CPU time, medians of the
rounds' own ratios with the lowest and the highest; what the share of the width would allow.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from moesaic.arch.dense import FFNNames
from moesaic.metrics.measure import environment
from moesaic.nn import CarvedFFN
from moesaic.nn.kernels.petals import highest, silenced

HIDDEN, WIDTH = 2048, 8192
SHAPES = ((64, 32, 68), (64, 8, 68), (256, 120, 17), (256, 32, 28))
"""Petals, top-k, neurons of a petal."""
SMALL = 576, 1536
NARROW = ((256, 119, 3), (24, 11, 32), (12, 6, 64), (6, 3, 128))
"""Hidden and intermediate size of SmolLM2, and its petals at 0.8 active."""


def block(
    width: int,
    sizes: tuple[int, ...],
    top_k: int,
    routing: str,
    dtype: torch.dtype,
    hidden: int = HIDDEN,
) -> CarvedFFN:
    def linear(inputs: int, outputs: int) -> nn.Linear:
        return nn.Linear(inputs, outputs, bias=False, dtype=dtype)

    projections = {
        "gate_proj": linear(hidden, width),
        "up_proj": linear(hidden, width),
        "down_proj": linear(width, hidden),
    }
    backbone = width - sum(sizes)
    module = CarvedFFN(projections, nn.SiLU(), FFNNames(), hidden, backbone, sizes, top_k, routing)
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


@torch.inference_mode()
def prompt(
    shape: tuple[int, int, int], dtype: torch.dtype, tokens: int, rounds: int
) -> dict[str, Any]:
    """Times the dense block's speed, of a block of SmolLM2's size."""
    torch.manual_seed(0)
    (hidden, width), (petals, top_k, petal) = SMALL, shape
    blocks = [
        block(width, (), 0, "cosine", dtype, hidden),
        block(width, (petal,) * petals, top_k, "linear", dtype, hidden),
    ]
    ratios = []
    for _ in range(rounds + 1):
        x_TD = torch.randn(tokens, hidden, dtype=dtype)
        seconds = []
        for module in blocks:
            started = time.thread_time()
            module(x_TD)
            seconds.append(time.thread_time() - started)
        ratios.append(seconds[0] / seconds[1])
    del ratios[0]
    return {
        "petals": petals,
        "top_k": top_k,
        "petal": petal,
        "dtype": str(dtype),
        "tokens": tokens,
        "ratio": median(ratios),
        "spread": [min(ratios), max(ratios)],
        "ideal": width / (width - (petals - top_k) * petal),
    }


@torch.inference_mode()
def pieces(dtype: torch.dtype, tokens: int, rounds: int) -> dict[str, Any]:
    """Microseconds of CPU time of the finest petals' pieces and of the dense block, medians."""
    torch.manual_seed(0)
    (hidden, width), (petals, top_k, petal) = SMALL, NARROW[0]
    dense = block(width, (), 0, "cosine", dtype, hidden)
    sizes = (petal,) * petals
    router = block(width, sizes, top_k, "linear", dtype, hidden).router
    x_TD = torch.randn(tokens, hidden, dtype=dtype)
    h_TM = torch.randn(tokens, width, dtype=dtype)
    scores_TR = router.scores(x_TD, None)
    on_TR = highest(scores_TR, top_k)
    ways: dict[str, Callable[[], Any]] = {
        "dense block": lambda: dense(x_TD),
        "scores": lambda: router.scores(x_TD, None),
        "choice": lambda: highest(scores_TR, top_k),
        "silencing": lambda: silenced(h_TM, on_TR, width - sum(sizes), sizes),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            started = time.thread_time()
            run()
            times[name].append(1e6 * (time.thread_time() - started))
    told = {name: round(median(some)) for name, some in times.items()}
    return {"dtype": str(dtype), "tokens": tokens, "load": os.getloadavg(), "microseconds": told}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", action="store_true")
    parser.add_argument("--petals", type=int, nargs="*", default=[shape[0] for shape in NARROW])
    given = parser.parse_args()
    torch.set_num_threads(1)
    out = Path(__file__).with_suffix(".json")
    if given.prompts:
        record = json.loads(out.read_text("utf-8"))
        found = record.get("prompts", {"rows": []})
        kept = [row for row in found["rows"] if row["petals"] not in given.petals]
        rows = [
            {**prompt(shape, dtype, tokens, 25), "load": os.getloadavg()}
            for dtype in (torch.float32, torch.bfloat16)
            for shape in NARROW
            if shape[0] in given.petals
            for tokens in (128, 512)
        ]
        parts = [
            pieces(dtype, tokens, 60)
            for dtype in (torch.float32, torch.bfloat16)
            for tokens in (32, 128, 512)
        ]
        found = {"environment": environment("cpu"), "rows": rows + kept, "pieces": parts}
        out.write_text(json.dumps({**record, "prompts": found}, indent=1) + "\n")
        for row in found["rows"]:
            print(row)
        return
    rows = [
        compare(shape, dtype, tokens, rounds)
        for shape in SHAPES
        for dtype in (torch.float32, torch.bfloat16)
        for tokens, rounds in ((1, 50), (512, 5))
    ]
    record = {"environment": environment("cpu"), "threads": 1, "rows": rows}
    out.write_text(json.dumps(record, indent=1) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
