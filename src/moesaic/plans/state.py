"""Tensors of one decoder layer, live or on disk: the two implementations of ``State``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from moesaic.io.checkpoint import cast
from moesaic.io.naming import Naming


class LiveState:
    """State of a live layer; names as stored and in memory are the same."""

    def __init__(self, layer: nn.Module) -> None:
        self._tensors = {name: tensor.detach() for name, tensor in layer.state_dict().items()}

    def stored(self, *prefixes: str) -> Iterator[tuple[str, str]]:
        return ((name, name) for name in self._tensors if name.startswith(prefixes))

    def read(self, stored: str) -> Tensor:
        return self._tensors[stored]

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors


class DiskState:
    """State of a layer in a checkpoint, whose tensors are read when they are used.

    Args:
        naming: the checkpoint's names and tensors.
        prefix: the start of the layer's names in memory.
        names: full names in memory of the layer's tensors, by full name on disk.
        dtype: function from a full name in memory to its dtype, None for the checkpoint's own.
    """

    def __init__(
        self,
        naming: Naming,
        prefix: str,
        names: Mapping[str, str],
        dtype: Callable[[str], torch.dtype | None],
    ) -> None:
        self._naming, self._prefix, self._dtype = naming, prefix, dtype
        self.stored_prefix = _stored_prefix(prefix, names)
        """Start of the layer's names on disk."""
        self._names = {
            disk.removeprefix(self.stored_prefix): name.removeprefix(prefix)
            for disk, name in names.items()
        }
        self._in_memory = {*self._names.values()}

    def stored(self, *prefixes: str) -> Iterator[tuple[str, str]]:
        return ((d, n) for d, n in self._names.items() if n.startswith(prefixes))

    def read(self, stored: str) -> Tensor:
        dtype = self._dtype(self._prefix + self._names[stored])
        return self._naming.ordered(self.stored_prefix + stored, lambda t: cast(t, dtype))

    def __getitem__(self, name: str) -> Tensor:
        full = self._prefix + name
        return self._naming.read(full, lambda tensor: cast(tensor, self._dtype(full)))

    def __contains__(self, name: str) -> bool:
        return name in self._in_memory


def _stored_prefix(prefix: str, names: Mapping[str, str]) -> str:
    """Return the start of a layer's names on disk, which may differ from that in memory.

    >>> _stored_prefix("model.layers.3.", {"backbone.layers.3.mixer.D": "model.layers.3.mixer.D"})
    'backbone.layers.3.'
    """
    number = f".{prefix.rstrip('.').rpartition('.')[2]}."
    starts = {disk.partition(number)[0] + number for disk in names if number in disk}
    return starts.pop() if len(starts) == 1 else prefix
