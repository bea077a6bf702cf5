"""What a prompt's products cost through weights that decoding has turned in memory.

    python benchmarks/turned.py         writes benchmarks/turned.json

A weight (O, I) as it comes, and the same shape and values with its columns contiguous, as channel
skipping keeps it (nn/kernels, rows_of); ``close``: without room between columns that are whole
pages. Projections of SmolLM2's sizes and of d 2048, M 8192, many of each in turn, so that none is
in the cache; one warm one beside it. CPU time as a multiple of the weight's as it comes, medians of
the rounds' own ratios with the lowest and the highest, one thread.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.metrics.machine import environment
from moesaic.nn.kernels import rows_of

SHAPES = ((1536, 576), (576, 1536), (576, 576), (8192, 2048), (2048, 8192), (2048, 2048))
WEIGHTS, ROUNDS = 3 << 24, 7
"""Numbers of all weights of a shape, more than a cache holds; rounds."""


def seconds(x_TI: Tensor, weights: list[Tensor]) -> float:
    """CPU time of a product with each weight."""
    started = thread_time()
    for weight_OI in weights:
        F.linear(x_TI, weight_OI)
    return thread_time() - started


@torch.inference_mode()
def compare(shape: tuple[int, int], dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    """A row of the record."""
    weights = [torch.randn(shape).to(dtype) for _ in range(WEIGHTS // (shape[0] * shape[1]))]
    close = [weight.T.contiguous().T for weight in weights]
    turned = [weight.clone() for weight in weights]
    for weight in turned:
        rows_of(weight)
    x_TI = torch.randn(tokens, shape[1]).to(dtype)
    record: dict[str, Any] = {"shape": shape, "dtype": str(dtype), "tokens": tokens}
    ways = {"cold": (weights, turned), "warm": (weights[:1] * 20, turned[:1] * 20)}
    if turned[0].stride() != close[0].stride():
        ways["close"] = weights, close
    for name, (before, after) in ways.items():
        ratios = [seconds(x_TI, after) / seconds(x_TI, before) for _ in range(ROUNDS + 1)][1:]
        record[name] = {"ratio": median(ratios), "spread": [min(ratios), max(ratios)]}
    return record


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    record: dict[str, Any] = {"environment": environment("cpu"), "load": os.getloadavg()}
    record["rows"] = [
        compare(shape, dtype, tokens)
        for dtype in (torch.float32, torch.bfloat16)
        for tokens in (32, 128)
        for shape in SHAPES
    ]
    Path(__file__).with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    for row in record["rows"]:
        print(row)


if __name__ == "__main__":
    main()
