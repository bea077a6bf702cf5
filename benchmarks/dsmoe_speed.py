"""DSMoE's FFN at several shares of active blocks against the dense one, in one interleaved run.

    python benchmarks/dsmoe_speed.py            writes benchmarks/dsmoe_speed.json

d = 2048, d_mid = 8192 in eight blocks; random tokens run 2 to 8 of them on average, each its own.
At 512 tokens and at one, float32 and bfloat16. Ratio: sparse over dense, round by round; its median
is what counts. It must be below one wherever fewer than 60 % of the blocks are active.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from moesaic.arch.dense import Arch
from moesaic.layers.carved import CarvedLayer
from moesaic.metrics.measure import environment
from moesaic.nn import CarvedFFN
from moesaic.surgery import applied

HIDDEN, WIDTH, BLOCKS, ROUNDS, BOUND = 2048, 8192, 8, 5, 0.6


def carve(dense: LlamaMLP) -> CarvedFFN:
    """The dense block with gates that differ from token to token."""
    layer = CarvedLayer(
        order_M=torch.arange(WIDTH),
        backbone=0,
        petals=(WIDTH // BLOCKS,) * BLOCKS,
        top_k=BLOCKS,
        routing="threshold",
        router_RD=torch.randn(BLOCKS, HIDDEN) / HIDDEN**0.5,
        gate={"tau": 0.5},
    )
    with applied(torch.nn.ModuleDict({"mlp": dense}), Arch("llama"), layer) as carved:
        module = carved.get_submodule("mlp")
    assert isinstance(module, CarvedFFN)
    return module.eval()


@torch.inference_mode()
def rows(dtype: torch.dtype, tokens: int, active: list[float]) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    dense = LlamaMLP(LlamaConfig(hidden_size=HIDDEN, intermediate_size=WIDTH)).to(dtype)
    carved = carve(dense)
    inputs = torch.randn(8, 1, tokens, HIDDEN, dtype=dtype)
    inputs = inputs if tokens == 1 else inputs[:1]
    gates = (inputs.view(-1, HIDDEN).float() @ carved.router.weight.T).sigmoid()
    taus = {k: gates.quantile(1 - k / BLOCKS).item() if k < BLOCKS else 0.0 for k in active}
    seconds: dict[float, list[float]] = {k: [] for k in (0, *active)}
    share: dict[float, float] = {}
    for number in range(ROUNDS + 1):
        for k in seconds:
            module: torch.nn.Module = carved if k else dense
            if k:
                carved.router.tau = taus[k]
                share[k] = (gates > taus[k]).float().mean().item()
            start = time.perf_counter()
            for x in inputs:
                module(x)
            if number:
                seconds[k].append((time.perf_counter() - start) / len(inputs))
    found = []
    for k in active:
        ratios = [a / b for a, b in zip(seconds[k], seconds[0], strict=True)]
        found.append(
            {
                "dtype": str(dtype).removeprefix("torch."),
                "tokens": tokens,
                "active_share": share[k],
                "dense_ms": statistics.median(seconds[0]) * 1e3,
                "sparse_ms": statistics.median(seconds[k]) * 1e3,
                "ratio": statistics.median(ratios),
                "ratio_spread": [min(ratios), max(ratios)],
            }
        )
    return found


if __name__ == "__main__":
    active = [2, 3, 4, 4.75, 6, 8]
    results = [
        row
        for dtype in (torch.float32, torch.bfloat16)
        for tokens in (512, 1)
        for row in rows(dtype, tokens, active)
    ]
    for row in results:
        print(row)
    record = {
        "benchmark": "dsmoe_speed",
        "bound": BOUND,
        "faster_below_bound": all(r["ratio"] < 1 for r in results if r["active_share"] < BOUND),
        "environment": environment(),
        "results": results,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
