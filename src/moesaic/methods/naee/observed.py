"""Statistics of a model's routed layers, from the model itself or from a file of ``observe``."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from moesaic.arch.mixture import MoEArch, MoEFFN
from moesaic.arch.routing import RoutingFunction
from moesaic.data.text import Tokens
from moesaic.distributed import gathered
from moesaic.errors import MoesaicError
from moesaic.foreign import JSON
from moesaic.observation.experts import (
    PARTS,
    ExpertStats,
    StatsFile,
    observe_experts,
    sample_share,
)
from moesaic.observation.job import Job
from moesaic.observation.stream import Site
from moesaic.plan import BaseShape, differing

NO_TEXT = Tokens(torch.zeros(1, 1, dtype=torch.int64))
"""Passed through the model where its weights say everything."""


def observed(
    site: Site[MoEFFN],
    tokens: Tokens,
    numbers: Sequence[int],
    gram_bytes: int,
    parts: Collection[str] = PARTS,
) -> ExpertStats:
    """A layer's statistics over the tokens of all processes, the same in each.

    Args:
        site: the layer, and this process's share of the tokens.
        tokens: those of all processes.
        numbers: of the batches in this process's share.
        gram_bytes: memory for the layer's Gram matrices; 0 for none.
        parts: what is wanted, of :data:`moesaic.observation.experts.PARTS`.

    Raises:
        MoesaicError: not even one token's Gram matrix fits.
    """
    share = sample_share(tokens.count, site.view.count, gram_bytes)
    stats = ExpertStats.merged(gathered(observe_experts(site, numbers, share, parts)))
    if gram_bytes and not stats.sampled_T.any():
        raise MoesaicError(
            f"gram_mb {gram_bytes / 2**20:.3g} is too small for {stats.experts} experts and "
            f"{stats.tokens:,} tokens: no token's Gram matrix is kept. Raise gram_mb."
        )
    return stats


def from_file(job: Job[MoEArch], path: str | Path, needs_gram: bool) -> StatsFile:
    """A statistics file of this model.

    Raises:
        MoesaicError: it is of another model, or lacks what is needed.
    """
    file = StatsFile(Path(path))
    other = [*differing({"base": file.header["base"]}, {"base": plain(job.base)})]
    if other:
        raise MoesaicError(f"{path} was observed on another model than this: {other[0]}.")
    if needs_gram and not file.header["gram"]:
        raise MoesaicError(f"{path} holds no Gram matrices, which reconstruction needs.")
    return file


def plain(base: BaseShape) -> JSON:
    """A base's shape as JSON reads it back."""
    shape: JSON = json.loads(json.dumps(asdict(base)))
    return shape


def routing_of(job: Job[MoEArch], layer: int, stats: ExpertStats) -> RoutingFunction:
    """A layer's routing function, ready to decide over recorded logits."""
    routing = job.arch.mixture(job.layers[layer]).routing
    if routing.bias_E is not None:
        routing.bias_E = stats.bias_E
    return routing
