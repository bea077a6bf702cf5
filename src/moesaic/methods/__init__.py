"""One file a paper, reading like the paper."""

from moesaic.methods.base import Carver, carve_layers
from moesaic.methods.more import MoRE, MoREConfig

CARVERS = {MoREConfig: MoRE}
"""A carving method by the class of its config."""

STEPS = {"carve": {"more": MoREConfig}}
"""The config of every step of a run, by verb and method."""

__all__ = ["CARVERS", "STEPS", "Carver", "MoRE", "MoREConfig", "carve_layers"]
