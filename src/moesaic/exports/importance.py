"""How large the inputs of weights are: importance matrices for llama.cpp's quantiser.

A k-quant that is given E[x_i^2], the mean square of each input of a matrix over some text, rounds
a row w to q so that sum_i E[x_i^2] (w_i - q_i)^2 is small, instead of sum_i w_i^2 (w_i - q_i)^2.

Shape suffixes: T tokens, D hidden size, E routed experts, I inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from moesaic.arch.dense import Arch
from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.data.text import Tokens
from moesaic.foreign import Track, silent
from moesaic.io.source import Source
from moesaic.observation.neurons import square_sums
from moesaic.observation.stream import LayerStream

EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
"""llama.cpp's names of the routed experts' stacked matrices."""


class Squares:
    """Sums of squares of what enters the matrices of a model, by llama.cpp's names of these."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}

    def add(self, name: str, x_TI: Tensor, expert: int = 0, experts: int = 1) -> None:
        """Take the inputs of a matrix, or of one of several stacked ones, in."""
        if name not in self.sums:
            self.sums[name] = torch.zeros(experts, x_TI.shape[-1], dtype=torch.float64)
            self.counts[name] = torch.zeros(experts, dtype=torch.float64)
        x_TI = x_TI.flatten(0, -2)
        self.sums[name][expert] += square_sums(x_TI.float()).cpu()
        self.counts[name][expert] += len(x_TI)

    def means(self) -> dict[str, Tensor]:
        """E[x_i^2], float32, the experts one after the other (E I,).

        An expert that no token reached has ones: all of its inputs weigh the same.
        """
        found = {}
        for name, sum_EI in self.sums.items():
            count_E1 = self.counts[name][:, None]
            mean_EI = torch.where(count_E1 > 0, sum_EI / count_E1.clamp(min=1), 1.0)
            found[name] = mean_EI.flatten().float()
        return found


@torch.no_grad()
def importance(
    source: Source, tokens: Tokens, named: Callable[[str], str | None], track: Track = silent
) -> dict[str, Tensor]:
    """E[x_i^2] of the matrices of a native checkpoint, which is read layer by layer.

    Args:
        source: the checkpoint.
        tokens: the text.
        named: llama.cpp's name of a module by transformers', None where it has none.
        track: shows progress.

    Returns:
        by llama.cpp's names, float32 (I,), of stacked experts (E I,).
    """
    arch = base_arch(source.config)
    stream: LayerStream[nn.Module] = LayerStream.from_disk(
        source.checkpoint, source.config, arch, tokens, view=lambda layer: layer
    )
    hidden, kwargs = stream.record()
    squares = Squares()
    for block in track(stream.blocks(kwargs), "Importance", stream.count):
        with _listening(block.layer, block.index, arch, named, squares):
            block.run(hidden)
    hidden.clear()
    return squares.means()


@contextmanager
def _listening(
    layer: nn.Module,
    index: int,
    arch: Arch,
    named: Callable[[str], str | None],
    squares: Squares,
) -> Iterator[None]:
    """While the context lasts, what enters a layer's matrices is summed."""

    def enters(name: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        squares.add(name, args[0])

    def routed(arch: MoEArch, block: nn.Module, args: tuple[Tensor, ...]) -> None:
        view = arch.mixture(layer)
        x_TD = args[0].flatten(0, -2)
        w_TE = view.combine_weights(x_TD)
        for e in range(view.count):
            x_ND = x_TD[w_TE[:, e] != 0]
            inputs = (x_ND, x_ND, view.hidden(e, x_ND))
            for name, x in zip(EXPERTS, inputs, strict=True):
                squares.add(f"blk.{index}.{name}.weight", x, e, view.count)

    handles = []
    for path, module in layer.named_modules():
        place = f"{arch.layer_prefix(index)}{path}"
        name = named(place) if isinstance(module, nn.Linear) else None
        if name is not None:
            handles.append(module.register_forward_pre_hook(partial(enters, f"{name}.weight")))
    if isinstance(arch, MoEArch) and arch.is_moe(layer):
        block = arch.mixture(layer).block
        handles.append(block.register_forward_pre_hook(partial(routed, arch)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
