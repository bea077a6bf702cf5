"""The modules that a plan puts into a model."""

from moesaic.nn.carved_ffn import CarvedFFN, carved_like, projections_like
from moesaic.nn.condensed_ffn import CondensedFFN, PassThrough
from moesaic.nn.heads import HeadRouter, PartialAttention
from moesaic.nn.overlapping_ffn import OverlappingFFN, set_form
from moesaic.nn.routers import Router, SoftmaxRouter, ThresholdRouter
from moesaic.nn.skipping_router import Skipping, make_skipping, skip, survivors

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
