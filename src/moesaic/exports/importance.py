"""Importance matrices for llama.cpp's quantiser: mean squares of weights' inputs.

Given E[x_i^2], the mean square of each input of a matrix over some text, a k-quant quantises a row
w to q so that sum_i E[x_i^2] (w_i - q_i)^2 is small, instead of sum_i w_i^2 (w_i - q_i)^2.

Shape suffixes: N tokens, E routed experts, I inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from moesaic.arch.dense import Arch
from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.data.text import Tokens
from moesaic.io.source import Source
from moesaic.observation.stats import Stats, Tally, square_sums
from moesaic.observation.stream import LayerStream
from moesaic.types import Track, silent

EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
"""Names of the routed experts' stacked matrices in llama.cpp."""
SQUARE, CALLS = ".square_EI", ".calls_E"
"""Ends of the names of a matrix's statistics."""
Notify = Callable[[str, Tensor, int | None], None]


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
    tally = Tally()
    for block, states in track(stream.turns(), "Importance", len(stream)):
        layer = block.layer
        names = dict(names_in(layer, block.index, arch, named))
        with tapped(layer, arch, names, partial(_take, tally, names, arch.experts_in(layer))):
            block.run(states)
    return means(tally.stats())


def means(stats: Stats) -> dict[str, Tensor]:
    """Return E[x_i^2], float32, the experts one after the other (E I,).

    An expert that no token reached has ones: all of its inputs have equal weight.

    Args:
        stats: by matrix sums of x_i^2, ``NAME.square_EI``, and tokens, ``NAME.calls_E``.
    """
    found = {}
    for name in (key.removesuffix(SQUARE) for key in stats if key.endswith(SQUARE)):
        calls_E1 = stats[f"{name}{CALLS}"][:, None]
        mean_EI = stats[f"{name}{SQUARE}"] / calls_E1.clamp(min=1)
        found[name] = torch.where(calls_E1 > 0, mean_EI, 1.0).flatten().float()
    return found


def _take(
    tally: Tally,
    names: Mapping[str, Sequence[str]],
    experts: int,
    path: str,
    x_NI: Tensor,
    expert: int | None,
) -> None:
    row = (0, 1) if expert is None else (expert, experts)
    for name in names[path]:
        tally.add(f"{name}{SQUARE}", square_sums(x_NI.float()), *row)
        tally.add(f"{name}{CALLS}", torch.tensor(len(x_NI)), *row)


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


@contextmanager
def tapped(layer: nn.Module, arch: Arch, paths: Collection[str], notify: Notify) -> Iterator[None]:
    """Call ``notify`` with the inputs of a layer's projections while it runs, padding too.

    Experts run additionally, one by one.

    Args:
        layer: the decoder layer, live.
        arch: its architecture.
        paths: paths of projections in the layer; for routed experts those of their tensors.
        notify: called with a path, inputs (N, I) and the expert's index: once per projection and
            batch, for experts once per expert that runs.
    """

    def linear(path: str) -> Callable[..., None]:
        def before(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            notify(path, args[0].flatten(0, -2), None)

        return before

    experts: set[str] = set()
    with ExitStack() as hooks:
        if isinstance(arch, MoEArch) and arch.is_moe(layer):
            view, block = arch.mixture(layer), f"{arch.inside}{arch.experts}."
            experts = {path for path in paths if path.startswith(block)}

            def routed(_: nn.Module, args: tuple[Tensor, ...]) -> None:
                up, down = (f"{block}{name}" for name in view.matrices)
                for i, _rows, x_NI, _weights in view.split(args[0].flatten(0, -2), *args[1:3]):
                    if up in experts:
                        notify(up, x_NI, i)
                    if down in experts:
                        notify(down, view.activated(i, x_NI), i)

            if experts:
                hooks.callback(view.experts.register_forward_pre_hook(routed).remove)
        for path in {*paths} - experts:
            handle = layer.get_submodule(path).register_forward_pre_hook(linear(path))
            hooks.callback(handle.remove)
        yield
