"""The library's verbs: a line each.

A model is a loaded PreTrainedModel, or a name: a hub id, a folder, a ``.gguf`` file, ``smollm2`` or
a model that ships. The caller's model is not changed unless ``inplace=True``. The further
``options`` of the verbs that convert are the fields of :class:`~moesaic.config.RunArgs` and of
:class:`~moesaic.config.Calibration`, such as ``calibration="prose", samples=50, device="cuda"``;
``calibration`` may also be texts, or tokens (N, T). Each returns a
:class:`~moesaic.result.Result`, and raises :class:`~moesaic.errors.MoesaicError` where the request
cannot be met.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from moesaic.config import MethodConfig, RunArgs, takes_options
from moesaic.estimates import estimate
from moesaic.exports import export
from moesaic.fitting.run import fit
from moesaic.methods import methods_of
from moesaic.metrics.bench import bench
from moesaic.metrics.evaluate import evaluate
from moesaic.metrics.generations import generate
from moesaic.metrics.size import inspect
from moesaic.observation.files import observe
from moesaic.pipeline import apply, convert, run_recipe
from moesaic.recipe import step_config
from moesaic.result import Result
from moesaic.sharing import push
from moesaic.types import Model

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

Named: TypeAlias = str | Path | Model
"""A model, or a name of one."""


@takes_options(*methods_of("carve").values())
def carve(model: Named, config: MethodConfig | None = None, **options: object) -> Result:
    """Let each token use a part of a dense model; by default 0.8, in fine petals."""
    return verb("carve", model, config, **options)


@takes_options(*methods_of("prune").values())
def prune(model: Named, config: MethodConfig | None = None, **options: object) -> Result:
    """Take experts out of a mixture of experts; by default with NAEE, refitted."""
    return verb("prune", model, config, **options)


@takes_options(*methods_of("slim").values())
def slim(model: Named, config: MethodConfig | None = None, **options: object) -> Result:
    """Make experts narrower, or the FFNs of a dense model, neuron by neuron."""
    return verb("slim", model, config, **options)


@takes_options(*methods_of("condense").values())
def condense(model: Named, config: MethodConfig | None = None, **options: object) -> Result:
    """Turn some layers of a mixture of experts into small dense layers; by default with CD-MoE."""
    return verb("condense", model, config, **options)


@takes_options(*methods_of("skip").values())
def skip(model: Named, config: MethodConfig | None = None, **options: object) -> Result:
    """Let tokens leave out experts of little weight; by default with NAEE's dynamic skipping."""
    return verb("skip", model, config, **options)


@takes_options(*methods_of("tune").values())
def tune(model: Named, config: MethodConfig | None = None, **options: object) -> Result:
    """Train a converted model a little."""
    return verb("tune", model, config, **options)


def verb(name: str, model: Named, config: MethodConfig | None = None, **options: object) -> Result:
    """Carry out a verb of :data:`moesaic.methods.VERBS` by name; other packages may add some.

    Raises:
        MoesaicError: there is no such verb, or the request cannot be met.
        TypeError: the config is another verb's, or an option is unknown.
    """
    config = step_config(name, {}) if config is None else config
    if config.verb != name:
        raise TypeError(f"{type(config).__name__} is a config of {config.verb}, not of {name}.")
    return convert(config, RunArgs.of(model, **options))
