"""Type names for plain JSON, transformers' classes and the caller's progress bars.

transformers brings no types; its classes are named here so that signatures state what they take.
Long loops pass their items through a :class:`Track`, which shows progress.
"""

from __future__ import annotations

import ctypes
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, Union, get_args, get_origin

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    Config: TypeAlias = PreTrainedConfig
    Model: TypeAlias = PreTrainedModel
    Tokenizer: TypeAlias = PreTrainedTokenizerBase
else:
    Config = Model = Tokenizer = object


class MadeModel(ABC):
    """Model that this package made from another, as :class:`moesaic.result.Result` holds it."""

    @property
    @abstractmethod
    def model(self) -> Model:
        """Loaded model."""

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the model; None if a loaded model came without one."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write the model's checkpoint into an existing folder."""


Named: TypeAlias = str | Path | Model | MadeModel
"""Model: its name, its folder, a loaded one, or what a verb returned."""

JSON: TypeAlias = dict[str, Any]
"""JSON object."""

Values: TypeAlias = Mapping[str, Any]
"""JSON object that is only read, or options by name."""

T = TypeVar("T")


class Figures(dict[str, float]):
    """Item that has figures, of which the loss is shown as the items pass."""


class Track(Protocol):
    """Function that wraps an iterable to show progress."""

    def __call__(self, items: Iterable[T], label: str, total: int | None = None) -> Iterable[T]: ...


def silent(items: Iterable[T], label: str, total: int | None = None) -> Iterable[T]:
    """Iterate over the items without showing progress."""
    return items


def logits_alone(config: Config) -> JSON:
    """Return the arguments by which a model returns its logits and nothing else.

    A config may request router logits, from which transformers computes a loss, hidden states or
    attentions; these need whole blocks and fail where one layer at a time is read.

    Args:
        config: of the model; one without such requests needs no arguments.
    """
    more = ("output_router_logits", "output_hidden_states", "output_attentions")
    return {name: False for name in more if getattr(config, name, False)}


CACHES = ("cache", "past_key_values")
"""Names of a model's cache in transformers: from 5.24 on, and before."""


def cache_of(values: Values) -> Values:
    """Return the cache among a model's arguments or outputs, by its name there; {} if none."""
    name = next((name for name in CACHES if name in values), None)
    return {} if name is None else {name: values[name]}


def suits(value: object, hint: object) -> bool:
    """Return True if a value is of a field's type; a number must be finite, too."""
    origin, kinds = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(suits(value, kind) for kind in kinds)
    if origin in (tuple, list):
        return isinstance(value, tuple | list) and all(suits(part, kinds[0]) for part in value)
    if hint in (int, float):
        number = Integral if hint is int else Real
        return isinstance(value, number) and not isinstance(value, bool) and math.isfinite(value)
    kind = origin or hint
    return not isinstance(kind, type) or isinstance(value, kind)


def expand_home(name: str | Path) -> str:
    """Return a path with ~ at its beginning replaced by the user's folder, if there is such one."""
    return os.path.expanduser(name)  # noqa: PTH111 - a Path would leave ./ out


def release_memory() -> None:
    """Return freed memory to the system, which glibc's allocator otherwise keeps."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
