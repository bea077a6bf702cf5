"""Moesaic rebuilds pretrained language models out of experts.

Importing it registers the converted model types with ``AutoModelForCausalLM``.

>>> import moesaic
>>> config = moesaic.MoREConfig(active=0.8)
>>> result = moesaic.carve("smollm2", config)  # doctest: +SKIP
"""

from moesaic.metrics.bench import bench
from moesaic.methods.cdmoe.method import condense
from moesaic.data.text import Tokens
from moesaic.errors import MoesaicError
from moesaic.export import export
from moesaic.metrics.measure import evaluate, generate, inspect
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
from moesaic.methods.naee.reduction import observe, prune, skip
from moesaic.result import Result
from moesaic.pipeline import apply, carve, run_recipe
from moesaic.stream.experts import merge_files
from moesaic.methods.sft.method import tune
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
