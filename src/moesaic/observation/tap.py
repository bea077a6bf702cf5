"""Hooks on the inputs of a layer's projections.

Shape suffixes: T tokens of a batch, N of them, I inputs, E experts, D hidden size, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from moesaic.arch.dense import Arch
from moesaic.arch.mixture import MoEArch, MoEFFN
from moesaic.io.restore import forward_replaced


@dataclass(frozen=True)
class Event:
    """Batch of inputs at one projection, or at one expert of a fused tensor."""

    path: str
    """Path of the projection in the decoder layer, or of the experts' tensor."""
    x_NI: Tensor
    """Inputs, padding left out."""
    expert: int | None = None
    weights_N1: Tensor | None = None
    """Combine weights of an expert."""


Notify = Callable[[Event], None]
Masks = Iterator[Tensor | None]
"""Tokens to count, per batch (B, L); None for all."""


@contextmanager
def tapped(
    layer: nn.Module,
    arch: Arch,
    paths: Collection[str],
    notify: Notify,
    masks: Masks | None = None,
    *,
    instead: bool = False,
) -> Iterator[None]:
    """Call ``notify`` with the inputs of a layer's projections while it runs.

    Args:
        layer: the decoder layer, live.
        arch: its architecture.
        paths: paths of projections in the layer; for routed experts those of their tensors.
        notify: called once per projection and batch, for experts once per expert that runs.
        masks: per batch the tokens to count (B, L); None for all.
        instead: True to run experts one by one instead of their own kernel, False to run them
        additionally: half of the work, but another rounding.
    """
    real: list[Tensor | None] = [None]

    def entering(_: nn.Module, args: object) -> None:
        mask = None if masks is None else next(masks)
        real[0] = None if mask is None else mask.flatten().bool()

    def linear(path: str) -> Callable[..., None]:
        def before(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            notify(Event(path, _counted(args[0].flatten(0, -2), real[0])))

        return before

    with ExitStack() as hooks:
        hooks.callback(layer.register_forward_pre_hook(entering).remove)
        tensors, view = {}, None
        if isinstance(arch, MoEArch) and arch.is_moe(layer):
            view = arch.mixture(layer)
            block = f"{arch.inside}{arch.experts}."
            tensors = {p.removeprefix(block): p for p in paths if p.startswith(block)}
        for path in {*paths} - {*tensors.values()}:
            handle = layer.get_submodule(path).register_forward_pre_hook(linear(path))
            hooks.callback(handle.remove)
        if view is not None and tensors:
            experts = _Experts(view, tensors, notify, real)
            if instead:
                hooks.enter_context(forward_replaced(view.experts, experts.forward))
            else:
                handle = view.experts.register_forward_pre_hook(experts.beside)
                hooks.callback(handle.remove)
        yield


def _counted(x_TI: Tensor, real_T: Tensor | None) -> Tensor:
    return x_TI if real_T is None else x_TI[real_T.to(x_TI.device)]


@dataclass
class _Experts:
    """Experts of a layer, run one after the other."""

    view: MoEFFN
    tensors: Mapping[str, str]
    """Paths in the layer, by the name of a tensor that holds all experts' projections."""
    notify: Notify
    real: list[Tensor | None]
    """Tokens to count of the current batch (T,)."""

    def each(self, x_RD: Tensor, *routed: Tensor) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Yield each expert that runs: its index, its rows, their weights (N, 1), and h."""
        for i, rows, x_NI, weights_N1 in self.view.split(x_RD, *routed):
            h_NI = self.view.activated(i, x_NI)
            up, down = self.view.matrices
            for name, taken_NI in ((up, x_NI), (down, h_NI)):
                if name in self.tensors:
                    self._show(self.tensors[name], i, rows, taken_NI, weights_N1)
            yield i, rows, weights_N1, h_NI

    def _show(self, path: str, i: int, rows: Tensor, x_NI: Tensor, weights_N1: Tensor) -> None:
        real_N = None
        if self.real[0] is not None:
            real_T = self.real[0].to(rows.device)
            real_N = real_T[rows % len(real_T)]
        counted_N1 = _counted(weights_N1, real_N)
        self.notify(Event(path, _counted(x_NI, real_N), i, counted_N1))

    def beside(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Run before the experts' own forward, as a hook."""
        for _output in self.each(args[0].flatten(0, -2), *args[1:3]):
            pass

    def forward(self, x: Tensor, *routed: Tensor) -> Tensor:
        """Run instead of the experts' own forward."""
        x_RD = x.flatten(0, -2)
        y_RD = torch.zeros_like(x_RD)
        for i, rows, weights_N1, h_NI in self.each(x_RD, *routed):
            written_ND = self.view.written(i, h_NI) * weights_N1
            y_RD.index_add_(0, rows, written_ND.to(y_RD.dtype))
        return y_RD.view_as(x)


K = TypeVar("K", bound=Hashable)


class Squares(Generic[K]):
    """Sums of squares over tokens, by any key: (E, I), one row without experts."""

    def __init__(self) -> None:
        self.sums: dict[K, Tensor] = {}
        """Sums by key, float64 (E, I), on the CPU."""
        self.counts: dict[K, Tensor] = {}
        """Tokens by key, int64 (E,)."""

    def add(self, key: K, x_NI: Tensor, expert: int | None = None, experts: int = 1) -> None:
        """Add tokens; products are computed in their own dtype."""
        if key not in self.sums:
            self.sums[key] = torch.zeros(experts, x_NI.shape[-1], dtype=torch.float64)
            self.counts[key] = torch.zeros(experts, dtype=torch.int64)
        self.sums[key][expert or 0] += square_sums(x_NI)
        self.counts[key][expert or 0] += len(x_NI)

    def mean(self, key: K) -> Tensor:
        """Return the mean of each row over its own tokens (E, I); 0 if there were none."""
        return self.sums[key] / self.counts[key].clamp(min=1)[:, None]


def square_sums(h_NM: Tensor) -> Tensor:
    """Return sums of squares over tokens, (N, M) to (M,), float64 on the CPU."""
    return h_NM.square().sum(0, dtype=torch.float64).cpu()
