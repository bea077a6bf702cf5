"""The floating-point type that a model from disk computes in."""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import nn

from moesaic.types import Config

logger = logging.getLogger(__name__)


SUPPORTED = {
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}
"""The operator that says whether a CPU has products of a type."""


def has_products(dtype: torch.dtype, device: str) -> bool:
    """True if a device multiplies matrices of a type itself.

    Processors without AVX-512, most laptops' among them, have no products of bfloat16 and float16:
    torch spells these out number by number, ten times as slowly as in float32 and more.
    """
    if torch.device(device).type != "cpu" or dtype not in SUPPORTED:
        return True
    available = torch.backends.mkldnn.is_available()  # not on a Mac
    return available and bool(getattr(torch.ops.mkldnn, SUPPORTED[dtype])())


def working_type(
    config: Config, dtype: torch.dtype | None = None, device: str = "cpu"
) -> torch.dtype | None:
    """The type in which a checkpoint is looked at and timed; results are saved in their own.

    Args:
        config: of the checkpoint.
        dtype: as asked for; None for the checkpoint's own.
        device: where to compute.

    Returns:
        what was asked for. Where nothing was: None for the checkpoint's own, or float32, which
        holds the same weights exactly, where the device has no products of the own type.
    """
    stored = config.dtype
    if dtype is not None or stored is None or has_products(stored, device):
        return dtype
    _say(str(stored).removeprefix("torch."))
    return torch.float32


def sizes_in(module: nn.Module, dtype: torch.dtype | None = None) -> list[int]:
    """Bytes of each of a module's weights in a type; None for their own."""
    return [p.numel() * (dtype or p.dtype).itemsize for p in module.parameters()]


@cache
def _say(name: str) -> None:
    logger.warning(
        f"This processor has no products of {name}: models are computed in float32, and saved in "
        "their own types."
    )
