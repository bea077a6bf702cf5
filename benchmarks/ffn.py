"""A carved FFN at half the width against the dense one: time of both in one interleaved run.

    python benchmarks/ffn.py            writes benchmarks/ffn.json

d = 2048, d_mid = 8192, a backbone of about a third and four petals of a sixth, so that a token
runs half of the neurons; at 512 tokens and at one; float32 and bfloat16. The ratio is taken round
by round, carved over dense, each some calls in a row; its median is what counts. The bound is 0.65.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from moesaic.arch.dense import Arch
from moesaic.layers.carved import CarvedLayer
from moesaic.methods.budget import LayerSize, split_for_target
from moesaic.metrics.measure import environment
from moesaic.nn import CarvedFFN
from moesaic.surgery import applied

HIDDEN, WIDTH, ROUNDS = 2048, 8192, 50


def carve(dense: LlamaMLP, petals: int) -> CarvedFFN:
    """The dense block in four petals, with a router that spreads random tokens evenly."""
    size = LayerSize(attention=0, ffn=3 * HIDDEN * WIDTH, width=WIDTH)
    split = split_for_target([size], [0], active=0.5, experts=petals, top_k=1)[0]
    layer = CarvedLayer(
        order_M=torch.arange(WIDTH),
        backbone=split.backbone,
        petals=(split.petal,) * petals,
        top_k=1,
        router_RD=torch.randn(petals, HIDDEN),
    )
    with applied(torch.nn.ModuleDict({"mlp": dense}), Arch("llama"), layer) as carved:
        module = carved.get_submodule("mlp")
    assert isinstance(module, CarvedFFN)
    return module


@torch.inference_mode()
def ratio(dtype: torch.dtype, tokens: int) -> dict[str, object]:
    torch.manual_seed(0)
    dense = LlamaMLP(LlamaConfig(hidden_size=HIDDEN, intermediate_size=WIDTH)).to(dtype)
    carved = carve(dense, 4)
    x = torch.randn(1, tokens, HIDDEN, dtype=dtype)
    repeats = max(4, 64 // tokens)  # calls in a row: the first pays for the change of module
    seconds: dict[str, list[float]] = {"dense": [], "carved": []}
    for number in range(ROUNDS + 2):
        for name, module in (("dense", dense), ("carved", carved)):
            start = time.perf_counter()
            for _ in range(repeats):
                module(x)
            if number >= 2:
                seconds[name].append((time.perf_counter() - start) / repeats)
    ratios = [c / d for c, d in zip(seconds["carved"], seconds["dense"], strict=True)]
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": tokens,
        "active_width": (carved.backbone + carved.petals[0]) / WIDTH,
        "dense_ms": statistics.median(seconds["dense"]) * 1e3,
        "carved_ms": statistics.median(seconds["carved"]) * 1e3,
        "ratio": statistics.median(ratios),
        "ratio_spread": [min(ratios), max(ratios)],
    }


if __name__ == "__main__":
    torch.set_num_threads(2)
    rows = [ratio(d, t) for d in (torch.float32, torch.bfloat16) for t in (512, 1)]
    for row in rows:
        print(row)
    record = {"benchmark": "ffn", "bound": 0.65, "environment": environment(), "results": rows}
    Path(__file__).with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
