"""A device of another kind for machines that have none: it refuses tensors that are elsewhere.

Tensors on it say that they are on ``meta`` and compute on the CPU. An operation on them and on a
tensor of the CPU raises, as CUDA does, but for numbers (0 dimensions) and indices of the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

FAR = torch.device("meta")
aten = torch.ops.aten
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
INDEXED |= {aten._index_put_impl_.default}
MOVING = {aten._to_copy.default, aten.copy_.default}


class Mixed(RuntimeError):
    """Two devices in one operation."""


class Faraway(Tensor):
    """A tensor on the other device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        wrapper = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=FAR,
        )
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return carried_out(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Faraway({self.inner})"

    is_meta = False  # it has values

    def tolist(self) -> Any:
        return self.inner.tolist()


def near(value: Any) -> Any:
    return value.inner if isinstance(value, Faraway) else value


def far(value: Any) -> Any:
    return Faraway(value) if isinstance(value, Tensor) and not isinstance(value, Faraway) else value


def carried_out(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    ours = [x for x in tensors if isinstance(x, Faraway)]
    if func in MOVING:
        return moved(func, args, kwargs)
    checked = [args[0], *args[2:3]] if func in INDEXED else tensors
    here = [x for x in checked if not isinstance(x, Faraway) and x.dim() > 0 and not x.is_meta]
    there = [x for x in checked if isinstance(x, Faraway) and x.dim() > 0]
    indices = args[1] if func in INDEXED else ()
    if (
        indices
        and not isinstance(args[0], Faraway)
        and any(isinstance(i, Faraway) for i in indices)
    ):
        raise Mixed(f"{func}: a tensor that is here takes no indices from far away")
    if here and there:
        raise Mixed(f"{func}: one tensor is far away, another of shape {tuple(here[0].shape)} not")
    wanted = kwargs.get("device")
    if wanted is not None and torch.device(wanted) == FAR:
        kwargs = {**kwargs, "device": torch.device("cpu")}
        ours = ours or [None]  # type: ignore[list-item]
    out = func(*tree_map(near, args), **tree_map(near, kwargs))
    if not ours:
        return out
    if func._schema.name.endswith("_") and isinstance(args[0], Faraway):
        return args[0]
    return tree_map(far, out)


def moved(func: Any, args: Any, kwargs: Any) -> Any:
    if func is aten.copy_.default:
        near(args[0]).copy_(near(args[1]))
        return args[0]
    wanted = kwargs.get("device")
    to_far = isinstance(args[0], Faraway) if wanted is None else torch.device(wanted) == FAR
    if args[0].is_meta and not isinstance(args[0], Faraway):
        return func(*args, **kwargs)  # a skeleton
    options = {**kwargs, "device": torch.device("cpu")} if wanted is not None else kwargs
    out = func(near(args[0]), *args[1:], **options)
    return Faraway(out) if to_far else out


class _There(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        wanted = kwargs.get("device")
        asked = wanted is not None and torch.device(wanted) == FAR
        if asked or any(isinstance(x, Faraway) for x in tensors):
            return carried_out(func, args, kwargs)
        return func(*args, **kwargs)


class _Data(TorchFunctionMode):
    """torch.tensor forgets its values on meta before anybody is asked."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        wanted = kwargs.get("device")
        if func is torch.tensor and wanted is not None and torch.device(wanted) == FAR:
            return Faraway(torch.tensor(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **kwargs)


@contextmanager
def device() -> Iterator[torch.device]:
    """Inside, the device is there."""
    with _Data(), _There():
        yield FAR


def put_far(model: nn.Module) -> nn.Module:
    """A model on that device."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(Faraway(parameter.data), False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = Faraway(buffer)
    return model
