"""DSMoE on tiny-dense beside LLaMA-MoE's fixed top-k and the paper's ablations.

    python benchmarks/dsmoe.py --text TRAIN.jsonl       writes benchmarks/dsmoe.json

TRAIN.jsonl is the training text of the tiny models, as scripts/gather_text.py leaves it. All
variants start from the same weights and train on the same tokens in the same order, all parameters,
with the same schedule. The ratio is that of top-5 of 8 blocks; DSMoE's lambda moves to meet it.
Perplexity and active ratio are measured on the shipped evaluation text, which none has seen.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import moesaic
from moesaic.data import Tokens, load_texts, windows
from moesaic.hub import resolve
from moesaic.learning import learn
from moesaic.metrics.score import score

LENGTH, BATCH, ACTIVE = 256, 8, 0.6
"""Windows and batches small enough for minutes on one core; 0.6 is nearest to 4 or 5 of 8 blocks."""


def training_windows(text: str, tokenizer: Any, count: int, seed: int) -> torch.Tensor:
    """Windows drawn without replacement from every tenth document on, so that all domains are in."""
    texts = load_texts(text, "calibration")[seed % 10 :: 3]
    ids = windows(texts, tokenizer, LENGTH)
    drawn = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    if len(ids) < count:
        raise moesaic.MoesaicError(f"{text} fills {len(ids)} windows, {count} are needed.")
    return ids[drawn[:count]]


def run(
    name: str, options: dict[str, Any], ids: torch.Tensor, held: Tokens, steps: int, seed: int
) -> dict[str, Any]:
    base = resolve("tiny-dense").load(dtype=torch.float32)
    config = moesaic.DSMoEConfig(
        steps=steps, batch=BATCH, length=LENGTH, save_every=10**6, seed=seed, **options
    )
    start = time.perf_counter()
    result = learn(base, config, calibration=ids, inplace=True)
    seconds = time.perf_counter() - start
    measured = score(result.model, held)
    row = {
        "name": name,
        **options,
        "perplexity": measured.perplexity,
        "active_ratio": measured.active_ratio,
        "active_blocks": [r.calls for r in measured.routing.values()],
        "idle_tokens": [r.idle for r in measured.routing.values()],
        "train_tokens": steps * BATCH * LENGTH,
        "seconds": seconds,
        "curve": result.losses[:: max(1, steps // 50)] + result.losses[-1:],
    }
    print(
        f"{name:24} ppl {row['perplexity']:8.3f} active {row['active_ratio']:.4f} {seconds:.0f} s"
    )
    return row
