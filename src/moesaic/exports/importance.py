"""Importance matrices for llama.cpp's quantiser: mean squares of weights' inputs.

Given E[x_i^2], the mean square of each input of a matrix over some text, a k-quant quantises a row
w to q so that sum_i E[x_i^2] (w_i - q_i)^2 is small, instead of sum_i w_i^2 (w_i - q_i)^2.

Shape suffixes: T tokens, D hidden size, E routed experts, I inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from moesaic.arch.dense import Arch
from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.data.text import Tokens
from moesaic.io.source import Source
from moesaic.observation.stream import LayerStream
from moesaic.observation.tap import Event, Squares, tapped
from moesaic.types import Track, silent

EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
"""Names of the routed experts' stacked matrices in llama.cpp."""


@torch.no_grad()
def importance(
    source: Source, tokens: Tokens, named: Callable[[str], str | None], track: Track = silent
) -> dict[str, Tensor]:
    """Return E[x_i^2] of the matrices of a native checkpoint, which is read layer by layer.

    Args:
        source: the checkpoint.
        tokens: the text.
        named: function from a module's name in transformers to that in llama.cpp, or None.
        track: shows progress.

    Returns:
        float32 (I,) by llama.cpp's names; (E I,) for stacked experts.
    """
    arch = base_arch(source.config)
    stream: LayerStream[nn.Module] = LayerStream.from_disk(
        source.checkpoint, source.config, arch, tokens, view=lambda layer: layer
    )
    squares: Squares[str] = Squares()
    for turn in track(stream.turns(), "Importance", len(stream)):
        layer = turn.block.layer
        names = dict(names_in(layer, turn.block.index, arch, named))
        with tapped(layer, arch, names, partial(_take, squares, names, arch.experts_in(layer))):
            turn.run()
    return means(squares)


def means(squares: Squares[str]) -> dict[str, Tensor]:
    """Return E[x_i^2], float32, the experts one after the other (E I,).

    An expert that no token reached has ones: all of its inputs have equal weight.
    """
    of_each = {name: squares.mean(name) for name in squares.sums}
    return {
        name: torch.where(squares.counts[name][:, None] > 0, mean_EI, 1.0).flatten().float()
        for name, mean_EI in of_each.items()
    }


def _take(
    squares: Squares[str], names: Mapping[str, Sequence[str]], experts: int, event: Event
) -> None:
    for name in names[event.path]:
        count = 1 if event.expert is None else experts
        squares.add(name, event.x_NI.float(), event.expert, count)


def names_in(
    layer: nn.Module, index: int, arch: Arch, named: Callable[[str], str | None]
) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the paths of a layer's matrices, each with llama.cpp's names of its parts."""
    for path, module in layer.named_modules():
        name = named(f"{arch.layer_prefix(index)}{path}") if isinstance(module, nn.Linear) else None
        if name is not None:
            yield path, [f"{name}.weight"]
    if isinstance(arch, MoEArch) and arch.is_moe(layer):
        view = arch.mixture(layer)
        up, down = view.matrices
        gates, *stacked = [f"blk.{index}.{name}.weight" for name in EXPERTS]
        yield f"{arch.inside}{arch.experts}.{up}", [gates] * view.gated + stacked[:1]
        yield f"{arch.inside}{arch.experts}.{down}", stacked[1:]
