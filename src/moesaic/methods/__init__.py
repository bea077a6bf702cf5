"""Verbs and methods by name, one folder per paper, imported only when they are used.

A method is a config (its options, title and paper; imports no torch) and a
:class:`~moesaic.methods.base.Method` (the computation). Other packages add methods by an entry
point ``VERB.NAME`` in the group ``moesaic.methods`` that names the config's class.
"""

from __future__ import annotations

from importlib.util import find_spec
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from moesaic.config import MethodConfig, Verb
from moesaic.errors import MoesaicError, how_to_install
from moesaic.registry import Registry

if TYPE_CHECKING:
    from moesaic.arch.dense import Arch
    from moesaic.methods.base import Method


BUILT_IN = (
    Verb(
        "carve",
        "Let each token use a part of a dense model: petals or experts.",
        "moesaic carve tiny-dense out --active 0.8",
        compares="this variant at the same active ratio (more, tomoe, dsmoe)",
    ),
    Verb(
        "prune",
        "Take experts out of a mixture of experts; the result loads wherever the original does.",
        "moesaic prune tiny-moe out --keep 6",
        observes=True,
        compares="this criterion at the same size",
    ),
    Verb(
        "slim",
        "Make experts narrower, neuron by neuron; the result loads wherever the original does.",
        "moesaic slim tiny-shared-moe out --keep 0.5",
        observes=True,
        compares="this score at the same size",
    ),
    Verb(
        "condense",
        "Turn some layers of a mixture of experts into small dense layers.",
        "moesaic condense tiny-shared-moe out --count 2",
        compares="with this many of the layers condensed",
    ),
    Verb(
        "skip",
        "Let tokens leave out experts of little weight; beta is calibrated on MODEL as it is.",
        "moesaic skip tiny-moe out --quantile 0.5",
        observes=True,
    ),
    Verb(
        "tune",
        "Train a converted model a little. Runs under accelerate launch.",
        "moesaic tune tiny-dense tuned --what all --steps 20",
        calibrates=False,
    ),
)


VERBS = Registry("moesaic.verbs", {}, {verb.name: verb for verb in BUILT_IN})
"""Commands that make one model from another (:class:`~moesaic.config.Verb`), by name."""

METHODS: Registry[type[MethodConfig]] = Registry(
    "moesaic.methods",
    {
        "carve.more": "moesaic.carving.more.config:MoREConfig",
        "carve.tomoe": "moesaic.carving.tomoe.config:ToMoEConfig",
        "carve.dsmoe": "moesaic.carving.dsmoe.config:DSMoEConfig",
        "prune.naee": "moesaic.methods.prune.config:PruneConfig",
        "slim.neurons": "moesaic.methods.slim.config:SlimConfig",
        "skip.naee": "moesaic.methods.skip.config:SkipConfig",
        "skip.top-k": "moesaic.methods.skip.config:TopKConfig",
        "condense.cd-moe": "moesaic.methods.condense.config:CondenseConfig",
        "tune.sft": "moesaic.train.tune.config:TuneConfig",
    },
)
"""Config classes of all methods by ``VERB.NAME``. A verb's first method, with its bundle ``best``
if it has one, is the default."""


def methods_of(verb: str) -> dict[str, type[MethodConfig]]:
    """Return the config classes of a verb's methods by name, the default first.

    Raises:
        MoesaicError: there is no such verb.
    """
    if verb not in VERBS:
        raise MoesaicError(f"Unknown step {verb!r}; known: {', '.join(VERBS)}.")
    keys = [key for key in METHODS if key.partition(".")[0] == verb]
    return {key.partition(".")[2]: METHODS[key] for key in keys}


def implementation(config: MethodConfig) -> Method[MethodConfig, Arch]:
    """Return the :class:`~moesaic.methods.base.Method` that carries out a config; imports torch.

    Raises:
        MoesaicError: a library that the method needs is not installed.
    """
    library, extra = config.library
    if library and find_spec(library) is None:
        raise MoesaicError(
            f"{config.verb} with {config.title} needs {library}, which is not installed: "
            f"{how_to_install(extra)}."
        )
    method: type[Method[MethodConfig, Arch]] = resolve_name(config.implementation)
    return method(config)
