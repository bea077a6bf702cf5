"""One file a paper, reading like the paper."""

from typing import Any

from moesaic.methods.base import Carver, carve_layers
from moesaic.methods.condense import CondenseConfig
from moesaic.methods.dsmoe import DSMoE, DSMoEConfig
from moesaic.methods.more import MoRE, MoREConfig
from moesaic.methods.naee import PruneConfig, Pruner
from moesaic.methods.skipping import SkipConfig, Skipper
from moesaic.methods.tomoe import ToMoEConfig
from moesaic.methods.tuning import TuneConfig

CARVERS = {MoREConfig: MoRE}
"""A carving method by the class of its config."""

STEPS: dict[str, dict[str, Any]] = {
    "carve": {"more": MoREConfig, "tomoe": ToMoEConfig, "dsmoe": DSMoEConfig},
    "prune": {"naee": PruneConfig},
    "skip": {"naee": SkipConfig},
    "condense": {"cd-moe": CondenseConfig},
    "tune": {"sft": TuneConfig},
}
"""The config of every step of a run, by verb and method."""

BUNDLES: dict[str, dict[str, dict[str, Any]]] = {
    "best": {
        "more": {
            "experts": 256,
            "top_k": 0,
            "layers": "all",
            "router": "ridge",
            "refit": True,
        },
        "naee": {"refit": True},
        "cd-moe": {"refit": True},
    }
}
"""Options by name and method: what measured best (docs/beyond.md)."""

__all__ = [
    "BUNDLES",
    "CARVERS",
    "STEPS",
    "Carver",
    "CondenseConfig",
    "DSMoE",
    "DSMoEConfig",
    "MoRE",
    "MoREConfig",
    "PruneConfig",
    "Pruner",
    "SkipConfig",
    "Skipper",
    "ToMoEConfig",
    "TuneConfig",
    "carve_layers",
]
