"""The modules that a plan puts into a model."""

from moesaic.nn.carved import CarvedFFN, Router, carved_like

__all__ = ["CarvedFFN", "Router", "carved_like"]
