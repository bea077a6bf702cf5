"""Moesaic rebuilds pretrained language models out of experts.

Importing it registers the converted model types with ``AutoModelForCausalLM``.

>>> import moesaic
>>> config = moesaic.MoREConfig(active=0.8)
>>> result = moesaic.carve("smollm2", config)  # doctest: +SKIP
"""

from moesaic.benching import bench
from moesaic.condensing import condense
from moesaic.data import Tokens
from moesaic.errors import MoesaicError
from moesaic.exporting import export
from moesaic.measure import evaluate, generate, inspect
from moesaic.methods import (
    CondenseConfig,
    DSMoEConfig,
    MoREConfig,
    PruneConfig,
    SkipConfig,
    ToMoEConfig,
    TuneConfig,
)
from moesaic.plan import Plan
from moesaic.recipe import Recipe, load_recipe
from moesaic.reduction import observe, prune, skip
from moesaic.result import Result
from moesaic.run import apply, carve, run_recipe
from moesaic.statistics import merge_files
from moesaic.tuning import tune
from moesaic.version import __version__

__all__ = [
    "CondenseConfig",
    "DSMoEConfig",
    "MoREConfig",
    "MoesaicError",
    "Plan",
    "PruneConfig",
    "Recipe",
    "Result",
    "SkipConfig",
    "ToMoEConfig",
    "Tokens",
    "TuneConfig",
    "__version__",
    "apply",
    "bench",
    "carve",
    "condense",
    "evaluate",
    "export",
    "generate",
    "inspect",
    "load_recipe",
    "merge_files",
    "observe",
    "prune",
    "run_recipe",
    "skip",
    "tune",
]
