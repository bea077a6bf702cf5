"""Modules that plans put into a model."""

from moesaic.modules.condensed_ffn import CondensedFFN, PassThrough
from moesaic.modules.skipping_router import Skipping, make_skipping, skip, survivors

__all__ = ["CondensedFFN", "PassThrough", "Skipping", "make_skipping", "skip", "survivors"]
