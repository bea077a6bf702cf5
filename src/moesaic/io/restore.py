"""Access to a caller's model, which is restored to its earlier state afterwards."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from moesaic.errors import MoesaicError
from moesaic.io.source import Source, resolve
from moesaic.types import Made, Model, Tokenizer


def source_or_model(
    model: object, revision: str | None = None, token: str | bool | None = None
) -> Source | Model:
    """Return the model that a verb was given: a loaded one itself, or the source of a name.

    Args:
        model: a name or folder, a loaded model, or what a verb returned.
        revision: as for :func:`~moesaic.io.source.resolve`.
        token: the same.

    Raises:
        MoesaicError: it is neither, or there is no such model.
    """
    if isinstance(model, str | Path):
        return resolve(str(model), revision, token)
    if isinstance(model, Made):
        return model.model
    if isinstance(model, PreTrainedModel | Source):
        return model
    raise MoesaicError(
        "A model is a name, a folder, a loaded PreTrainedModel of transformers, or a Result; "
        f"got {type(model).__name__}."
    )


def tokenizer_of(model: object, opened: Source | Model) -> Tokenizer | None:
    """Return the tokenizer that comes with a model; None for a loaded one, which has none.

    Args:
        model: the argument of a verb.
        opened: what :func:`source_or_model` returned for it.

    Raises:
        MoesaicError: its folder holds no tokenizer that can be used.
    """
    if isinstance(model, Made):
        return model.tokenizer
    return opened.tokenizer if isinstance(opened, Source) else None


P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def untouched(*models: object) -> Iterator[None]:
    """Context in which loaded models are in evaluation mode; afterwards their state is restored.

    That is each module's mode, which parameters learn, and the state of random numbers. Weights,
    hooks and forwards are restored by the code that changes them.

    Args:
        models: arguments that verbs take as models; names and None are ignored.
    """
    held = (model.model if isinstance(model, Made) else model for model in models)
    loaded = [model for model in held if isinstance(model, nn.Module)]
    # weakly: a model that is converted in place gives up its old modules meanwhile
    modes = [(weakref.ref(m), m.training) for model in loaded for m in model.modules()]
    learning = [(weakref.ref(p), p.requires_grad) for model in loaded for p in model.parameters()]
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    for model in loaded:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            if (live := module()) is not None:
                live.training = training
        for parameter, learns in learning:
            if (weight := parameter()) is not None:
                weight.requires_grad_(learns)
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


def leaves_untouched(verb: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that the loaded models among its arguments are :func:`untouched`."""

    @wraps(verb)
    def called(*args: P.args, **options: P.kwargs) -> T:
        with untouched(*args, *options.values()):
            return verb(*args, **options)

    return called


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., object]) -> Iterator[None]:
    """Context in which a module's forward is replaced; it is restored afterwards, even a hook's."""
    before = vars(module).get("forward")  # device_map's hooks stand here
    module.forward = forward  # shadows the class's
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
