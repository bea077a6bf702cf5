"""The modules that a plan puts into a model."""

from moesaic.modules.carved_ffn import CarvedFFN, carved_like, projections_like
from moesaic.modules.condensed_ffn import CondensedFFN, PassThrough
from moesaic.modules.heads import HeadRouter, PartialAttention
from moesaic.modules.overlapping_ffn import OverlappingFFN, set_form
from moesaic.modules.routers import Router, SoftmaxRouter, ThresholdRouter
from moesaic.modules.skipping_router import Skipping, make_skipping, skip, survivors

__all__ = [
    "CarvedFFN",
    "CondensedFFN",
    "HeadRouter",
    "OverlappingFFN",
    "PartialAttention",
    "PassThrough",
    "Router",
    "Skipping",
    "SoftmaxRouter",
    "ThresholdRouter",
    "carved_like",
    "make_skipping",
    "projections_like",
    "set_form",
    "skip",
    "survivors",
]
