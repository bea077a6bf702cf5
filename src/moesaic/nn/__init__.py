"""The modules that a plan puts into a model."""

from moesaic.nn.carved import CarvedFFN, carved_like
from moesaic.nn.condensed import CondensedFFN, PassThrough
from moesaic.nn.routers import Router, SoftmaxRouter, ThresholdRouter, chosen, running
from moesaic.nn.skipping import Skipping, make_skipping, skip, survivors

__all__ = [
    "CarvedFFN",
    "CondensedFFN",
    "PassThrough",
    "Router",
    "Skipping",
    "SoftmaxRouter",
    "ThresholdRouter",
    "carved_like",
    "chosen",
    "make_skipping",
    "running",
    "skip",
    "survivors",
]
