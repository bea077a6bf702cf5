"""Moesaic rebuilds pretrained language models out of experts.

Importing it registers the converted model types with ``AutoModelForCausalLM``.

>>> import moesaic
>>> config = moesaic.MoREConfig(active=0.8)
>>> result = moesaic.carve("smollm2", config)  # doctest: +SKIP
"""

from moesaic.data import Tokens
from moesaic.errors import MoesaicError
from moesaic.measure import bench, evaluate, generate, inspect
from moesaic.methods import MoREConfig
from moesaic.plan import Plan
from moesaic.recipe import Recipe, load_recipe
from moesaic.run import Result, apply, carve, run_recipe
from moesaic.version import __version__

__all__ = [
    "MoREConfig",
    "MoesaicError",
    "Plan",
    "Recipe",
    "Result",
    "Tokens",
    "__version__",
    "apply",
    "bench",
    "carve",
    "evaluate",
    "generate",
    "inspect",
    "load_recipe",
    "run_recipe",
]
