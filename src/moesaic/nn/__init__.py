"""The modules that a plan puts into a model."""

from moesaic.nn.carved import CarvedFFN, Router, carved_like
from moesaic.nn.condensed import CondensedFFN, PassThrough
from moesaic.nn.skipping import Skipping, make_skipping, skip, survivors

__all__ = [
    "CarvedFFN",
    "CondensedFFN",
    "PassThrough",
    "Router",
    "Skipping",
    "carved_like",
    "make_skipping",
    "skip",
    "survivors",
]
