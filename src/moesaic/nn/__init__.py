"""The modules that a plan puts into a model."""

from moesaic.nn.carved import CarvedFFN, Router, carved_like
from moesaic.nn.skipping import Skipping, make_skipping, skip, survivors

__all__ = ["CarvedFFN", "Router", "Skipping", "carved_like", "make_skipping", "skip", "survivors"]
