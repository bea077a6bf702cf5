"""Quantisation alone: what a user would take instead of a smaller model, measured beside it.

Matrices hold the values that a GGUF file of a plain type does, quantised by the gguf package, in
blocks of 32 along a row; everything else, routers too, is float32 as in llama.cpp's files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.data.text import Tokens
from moesaic.io.source import Source
from moesaic.metrics.evaluate import named
from moesaic.metrics.forward import Runner, Whole
from moesaic.metrics.score import Score, scores
from moesaic.types import Model, Track, silent

BLOCK = 32
"""Weights of a row that are quantised together."""


@torch.no_grad()
def rounded(model: Model, type: str) -> int:
    """Quantise a live model's matrices in place.

    Args:
        model: in float32.
        type: one of :data:`~moesaic.config.ROUNDED`.

    Returns:
        bytes of the tensors of such a file.
    """
    from gguf import GGMLQuantizationType, quants

    kind, arch = GGMLQuantizationType[type.upper()], base_arch(model.config)
    unrounded, turned = set[int](), set[int]()
    for layer in arch.layers(model):
        if isinstance(arch, MoEArch) and arch.is_moe(layer):
            view = arch.mixture(layer)
            unrounded |= {id(p) for p in view.router.parameters()}
            if arch.transposed:
                turned |= {id(p) for p in view.experts.parameters()}
    size = 0
    for parameter in model.parameters():
        matrix: Tensor = parameter.data
        matrix = matrix.transpose(-1, -2) if id(parameter) in turned else matrix
        if matrix.ndim < 2 or matrix.shape[-1] % BLOCK or id(parameter) in unrounded:
            size += 4 * matrix.numel()
            continue
        for part in matrix if matrix.ndim == 3 else [matrix]:
            quantised = quants.quantize(part.contiguous().float().cpu().numpy(), kind)
            size += int(quantised.nbytes)
            part.copy_(torch.from_numpy(quants.dequantize(quantised, kind)))
    return size


def rounded_scores(
    source: Source,
    reference: Runner,
    tokens: Tokens,
    types: Iterable[str],
    device: str = "cpu",
    track: Track = silent,
) -> Iterator[tuple[str, Score, Score]]:
    """Yield the scores of a model quantised to some types, one held at a time, beside its own.

    Args:
        source: the model, for which there is room in float32.
        reference: the same model, not quantised.
        tokens: what both are measured on.
        types: of :data:`~moesaic.config.ROUNDED`.
        device: where to compute.
        track: shows progress.

    Yields:
        the type, its score, whose bytes are those of a file, and the score of the reference.
    """
    for type in types:
        run = Whole.of(source, device, torch.float32)
        size = rounded(run.shape, type)
        score, reference_score = scores([run, reference], tokens, named(track, type))
        yield type, replace(score, total_bytes=size), reference_score
        del run, score, reference_score  # before the next one comes
