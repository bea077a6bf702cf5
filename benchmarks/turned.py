"""What a prompt's products cost through weights that decoding has turned in memory.

    python benchmarks/turned.py         writes benchmarks/turned.json

A weight (O, I) as it comes, and the same shape and values with its columns contiguous, as channel
skipping keeps it (nn/kernels, rows_of). Projections of SmolLM2's sizes, sixty of each in turn, so
that none is in the cache; one warm one beside it. CPU time as a multiple of the weight's as it
comes, medians of the rounds' own ratios with the lowest and the highest, one thread.
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

from moesaic.metrics.measure import environment

SHAPES = ((1536, 576), (576, 1536), (576, 576))
COUNT, ROUNDS = 60, 7


def seconds(x_TI: Tensor, weights: list[Tensor]) -> float:
    """CPU time of a product with each weight."""
    started = thread_time()
    for weight_OI in weights:
        F.linear(x_TI, weight_OI)
    return thread_time() - started


@torch.inference_mode()
def compare(shape: tuple[int, int], dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    """A row of the record."""
    given = [torch.randn(shape).to(dtype) for _ in range(COUNT)]
    turned = [weight.T.contiguous().T for weight in given]
    x_TI = torch.randn(tokens, shape[1]).to(dtype)
    found: dict[str, Any] = {"shape": shape, "dtype": str(dtype), "tokens": tokens}
    for name, many in (("cold", COUNT), ("warm", 1)):
        pairs = [
            (given[:many] * (COUNT // many), turned[:many] * (COUNT // many))
            for _ in range(ROUNDS + 1)
        ]
        ratios = [seconds(x_TI, after) / seconds(x_TI, before) for before, after in pairs][1:]
        found[name] = {"ratio": median(ratios), "spread": [min(ratios), max(ratios)]}
    return found


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
