"""The projections of a decoder layer that can skip channels, and what goes into them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import nn

from moesaic.arch.dense import Arch
from moesaic.arch.mixture import MoEArch
from moesaic.arch.use import LayerUse
from moesaic.nn.channel_linear import EXPERTS

_OURS = "moesaic."
"""Modules of these packages have forms of their own, and are left as they are."""


@dataclass(frozen=True)
class Projection:
    """A linear module of a layer, or a tensor that holds one projection of all its experts."""

    path: str
    """In the decoder layer."""
    inputs: int
    outputs: int
    run: float
    """Weights that a token runs."""
    attention: bool
    experts: bool = False


def projections(layer: nn.Module, arch: Arch, use: LayerUse, where: str) -> list[Projection]:
    """The projections of a layer that can skip channels.

    Left out are parts that have another form than the base's, quantised or routed in a way of their
    own.

    Args:
        layer: a skeleton will do.
        arch: its architecture.
        use: what a token uses of it.
        where: ``all``, or ``ffn``.
    """
    every = []
    if where == "all":
        for name, module in _base_modules(layer, arch.attention_path):
            if type(module) is nn.Linear:
                path = f"{arch.attention_path}.{name}" if name else arch.attention_path
                every.append(_linear(path, module, attention=True))
    if isinstance(arch, MoEArch) and arch.is_moe(layer):
        view = arch.mixture(layer)
        path = f"{arch.inside}{arch.experts}"
        ours = type(view.experts).__module__.startswith(_OURS)
        if view.matrices == EXPERTS and not (ours or arch.parts.inward):
            for name in EXPERTS:
                weight = getattr(view.experts, name)
                inputs, outputs = weight.shape[1:] if arch.transposed else weight.mT.shape[1:]
                run = weight.numel() * use.top_k / max(1, use.experts)
                every.append(Projection(f"{path}.{name}", inputs, outputs, run, False, True))
        if arch.shared_at is not None:
            every += _named(layer, arch.shared_at, arch.shared_names.projections)
    else:
        every += _named(layer, arch.ffn_path, arch.ffn.projections)
    return every


def _base_modules(layer: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """A part's modules by name, if it is of the base's own classes."""
    names = {name for name, _ in layer.named_modules()}
    if path in names and not type(layer.get_submodule(path)).__module__.startswith(_OURS):
        yield from layer.get_submodule(path).named_modules()


def _named(layer: nn.Module, path: str, names: Collection[str]) -> list[Projection]:
    return [
        _linear(f"{path}.{name}", module, attention=False)
        for name, module in _base_modules(layer, path)
        if name in names and type(module) is nn.Linear
    ]


def _linear(path: str, module: nn.Linear, attention: bool) -> Projection:
    size = module.weight.numel()
    return Projection(path, module.in_features, module.out_features, float(size), attention)
