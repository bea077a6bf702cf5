"""Tensor names on disk and in memory, which differ: transformers fuses experts when it loads.

Its own conversion table is the authority for both directions, so that an architecture needs no
second list of names here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from moesaic.io.checkpoint import Checkpoint

_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


class Naming:
    """What the tensors of one checkpoint are called in memory, and how to read them so."""

    def __init__(self, checkpoint: Checkpoint, model_type: str) -> None:
        self.checkpoint = checkpoint
        steps: list[Any] = get_checkpoint_conversion_mapping(model_type) or []
        renamings = [step for step in steps if isinstance(step, WeightRenaming)]
        converters = [step for step in steps if isinstance(step, WeightConverter)]
        self._converters = {p: c for c in converters for p in c.source_patterns}
        self.in_memory: dict[str, str] = {}
        """The name in memory by the name on disk, in the order of the files."""
        self._parts: dict[str, list[tuple[str, str | None]]] = {}
        for name in checkpoint.names():
            found, pattern = rename_source_key(name, renamings, converters)
            self.in_memory[name] = found
            self._parts.setdefault(found, []).append((name, pattern))

    def read(self, name: str, cast: Callable[[Tensor], Tensor] = lambda t: t) -> Tensor:
        """The tensor that is called ``name`` in memory.

        Raises:
            MoesaicError: the checkpoint does not hold it.
        """
        parts = self._parts.get(name, [(name, None)])
        if parts[0][1] is None:
            return cast(self.checkpoint.tensor(parts[0][0]))
        converter = copy.deepcopy(self._converters[parts[0][1]])
        for part, pattern in sorted(parts, key=lambda p: dot_natural_key(p[0])):
            converter.add_tensor(name, part, pattern, cast(self.checkpoint.tensor(part)))
        (tensor,) = converter.convert(name).values()
        return tensor[0] if isinstance(tensor, list) else tensor


def expert_number(name: str) -> int | None:
    """The expert that a tensor on disk belongs to alone.

    >>> expert_number("model.layers.2.mlp.experts.14.up_proj.weight")
    14
    """
    found = _EXPERT.search(name)
    return int(found.group()) if found else None


def renumbered(name: str, number: int) -> str:
    """The same tensor of another expert.

    >>> renumbered("model.layers.2.mlp.experts.14.up_proj.weight", 3)
    'model.layers.2.mlp.experts.3.up_proj.weight'
    """
    return _EXPERT.sub(str(number), name)
