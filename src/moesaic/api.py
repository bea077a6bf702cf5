"""The library's verbs and functions.

A model is a name (a hub id, a folder, a ``.gguf`` file, ``smollm2`` or a model that ships), a
loaded PreTrainedModel, or the :class:`~moesaic.result.Result` of a verb. The caller's model is not
changed unless ``inplace=True``. A verb's options are given by name: the fields of its method's
config, and those of :class:`~moesaic.config.RunArgs` and :class:`~moesaic.config.Calibration`, such
as ``calibration="prose", samples=50, device="cuda"``; ``calibration`` may also be texts, or tokens
(N, T). Each verb returns a Result, and raises :class:`~moesaic.errors.MoesaicError` where the
request cannot be met.
"""

from __future__ import annotations

from typing import Any

from moesaic.config import MethodConfig, takes_options
from moesaic.exports import export
from moesaic.fitting.run import fit
from moesaic.methods import methods_of
from moesaic.metrics.evaluate import evaluate
from moesaic.metrics.generations import generate
from moesaic.metrics.measurement import bench
from moesaic.observation.files import observe
from moesaic.pipeline import apply, run_recipe, verb
from moesaic.result import Result, push
from moesaic.sizes import estimate, inspect
from moesaic.types import Named

__all__ = [
    "apply",
    "bench",
    "carve",
    "condense",
    "estimate",
    "evaluate",
    "export",
    "fit",
    "generate",
    "inspect",
    "observe",
    "prune",
    "push",
    "run_recipe",
    "skip",
    "slim",
    "tune",
    "verb",
]


@takes_options(*methods_of("carve").values())
def carve(model: Named, config: MethodConfig | None = None, **options: Any) -> Result:
    """Turn a dense model into a mixture of which a token uses a part; by default 0.8 of it."""
    return verb("carve", model, config, **options)


@takes_options(*methods_of("prune").values())
def prune(model: Named, config: MethodConfig | None = None, **options: Any) -> Result:
    """Remove experts from a mixture of experts; by default with NAEE, refitted."""
    return verb("prune", model, config, **options)


@takes_options(*methods_of("slim").values())
def slim(model: Named, config: MethodConfig | None = None, **options: Any) -> Result:
    """Remove neurons from the experts of a mixture, or from the FFNs of a dense model."""
    return verb("slim", model, config, **options)


@takes_options(*methods_of("condense").values())
def condense(model: Named, config: MethodConfig | None = None, **options: Any) -> Result:
    """Turn some layers of a mixture of experts into small dense layers; by default with CD-MoE."""
    return verb("condense", model, config, **options)


@takes_options(*methods_of("skip").values())
def skip(model: Named, config: MethodConfig | None = None, **options: Any) -> Result:
    """Let tokens skip experts of little weight; by default with NAEE's dynamic skipping."""
    return verb("skip", model, config, **options)


@takes_options(*methods_of("tune").values())
def tune(model: Named, config: MethodConfig | None = None, **options: Any) -> Result:
    """Train a converted model a little."""
    return verb("tune", model, config, **options)
