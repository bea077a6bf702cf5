"""What the papers compare with, as far as a few lines hold it: steps of the YAML files beside this.

Each follows the formula of its paper, not the code of its authors, and writes an ordinary
checkpoint. ``text`` is the calibration: a source, windows and their tokens, with commas between.

=========  =========================================================================================
wanda      Sun et al., ICLR 2024, at 2:4, of the experts alone: the two of every four neighbouring
           weights with the least |W_ij| ||x_j|| become zero, layer by layer
shortgpt   Men et al., 2024: the layers of least block influence go, 1 - cos(x_l, x_l+1)
uidl       Gromov et al., ICLR 2025: the block of neighbouring layers with the least angle between
           what enters and what leaves it is removed; here by all tokens, not only by the last one
replaceme  Shopkhoev et al., 2025: removes the block of least cosine distance, and the FFN before
           it gets a linear map, by least squares, into its down projection
sleb       Song et al., ICML 2024: removes one layer at a time, the one that costs least perplexity
=========  =========================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.arch.dense import Arch
from moesaic.arch.lookup import base_arch, moe_arch
from moesaic.data.text import Tokens, calibration_tokens
from moesaic.exports.quantised_model import tap
from moesaic.io.source import Source, resolve
from moesaic.metrics.forward import InMemory
from moesaic.metrics.score import scores
from moesaic.observation.stats import Tally, square_sums
from moesaic.observation.stream import LayerStream
from moesaic.types import JSON

Choice = tuple[list[int], JSON]
"""Layers that go, and what they were chosen by."""


def opened(
    model: str, text: str, device: str = "cpu", documents: bool = False
) -> tuple[Source, Any, Tokens]:
    """A model, loaded, and its calibration tokens; ``documents``: a window of each document."""
    source = resolve(model)
    name, samples, length = text.rsplit(",", 2)
    tokens = calibration_tokens(
        name, source.tokenizer, int(samples), int(length), documents=documents
    )
    return source, source.load(device), tokens


def kept(source: Source, live: Any, out: str, **figures: Any) -> JSON:
    """Write a live model as a folder; return its figures."""
    live.save_pretrained(out)
    source.tokenizer.save_pretrained(out)
    return figures


# --- weights -------------------------------------------------------------------------------------


def two_of_four(weight_OI: Tensor, norm_I: Tensor) -> Tensor:
    """The kept weights: of every four neighbours in a row the two of most |W| ||x||, bool.

    >>> two_of_four(torch.tensor([[3.0, -2.0, 1.0, 1.0]]), torch.tensor([1.0, 1.0, 5.0, 1.0]))
    tensor([[ True, False,  True, False]])
    """
    score_OG4 = (weight_OI.abs().float() * norm_I.to(weight_OI.device)).unflatten(1, (-1, 4))
    least_OG2 = score_OG4.argsort(dim=2, stable=True)[..., :2]
    return torch.ones_like(score_OG4, dtype=torch.bool).scatter_(2, least_OG2, False).flatten(1)


def _note(tally: Tally, count: int, path: str, x_NI: Tensor, expert: int | None) -> None:
    tally.add(path, square_sums(x_NI), expert, count)


@torch.no_grad()
def wanda(model: str, out: str, text: str, device: str = "cpu") -> JSON:
    """Experts at 2:4; one that no token reached, by only |W|."""
    source, live, tokens = opened(model, text, device)
    arch = moe_arch(live.config)
    wanted = arch.moe_layers(live)
    stream = LayerStream(live, arch, tokens, wanted, view=arch.mixture)
    for block, states in stream.turns():
        view = arch.mixture(block.layer)
        into, down = (f"{arch.inside}{arch.experts}.{name}" for name in view.matrices)
        tally = Tally()
        with tap(block.layer, arch, (into, down), partial(_note, tally, view.count)):
            for _ in block.outputs(states):
                pass
        for i in range(view.count):
            *ups, last = view.weights_of(i)
            for weight_OI, path in [*((up, into) for up in ups), (last, down)]:
                norm_I = tally.added[path][i].sqrt().float()
                norm_I = norm_I if norm_I.any() else torch.ones_like(norm_I)
                weight_OI.mul_(two_of_four(weight_OI, norm_I))
        block.run(states)
    return kept(source, live, out, layers=len(wanted))


# --- layers --------------------------------------------------------------------------------------


def entering(live: nn.Module, arch: Arch, tokens: Tokens) -> list[Tensor]:
    """What enters each layer, and what leaves the last (T, D)."""
    passed = []
    for block, states in LayerStream(live, arch, tokens, view=arch.view).turns():
        passed.append(torch.cat([s.flatten(0, 1) for s in states]))
        block.run(states)
        left = torch.cat([s.flatten(0, 1) for s in states])
    return [*passed, left]


def cosine(x_TD: Tensor, y_TD: Tensor) -> Tensor:
    """By token (T,)."""
    return F.cosine_similarity(x_TD.float(), y_TD.float(), dim=-1).clamp(-1, 1)


def remove(live: Any, arch: Arch, dropped: Sequence[int]) -> None:
    """Take layers out of a live model, and say so in its config."""
    layers, config = arch.layers(live), live.config
    for i in sorted(dropped, reverse=True):
        del layers[i]
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:i] + config.layer_types[i + 1 :]
    for i, layer in enumerate(layers):
        arch.attention_of(layer).layer_idx = i  # type: ignore[assignment]
    config.num_hidden_layers = len(layers)


def step(choose: Callable[[Any, Arch, Tokens, int], Choice]) -> Callable[..., JSON]:
    """A step that takes out so many layers, by a function that says which."""

    @torch.no_grad()
    def removed(model: str, out: str, text: str, active: str, device: str = "cpu") -> JSON:
        """The share ``active`` of the layers is kept."""
        source, live, tokens = opened(model, text, device)
        arch = base_arch(live.config)
        count = max(1, round(len(arch.layers(live)) * (1 - float(active))))
        gone, figures = choose(live, arch, tokens, count)
        remove(live, arch, gone)
        return kept(source, live, out, removed=gone, **figures)

    return removed


@step
def shortgpt(live: Any, arch: Arch, tokens: Tokens, count: int) -> Choice:
    """By block influence."""
    influence = [1 - float(cosine(x, y).mean()) for x, y in pairwise(entering(live, arch, tokens))]
    order = sorted(range(len(influence)), key=influence.__getitem__)
    return sorted(order[:count]), {"influence": influence}


def _block(distances: list[float], count: int, start: int = 0) -> Choice:
    """The block of layers of least distance; ``start`` is the layer of the first distance."""
    first = start + min(range(len(distances)), key=distances.__getitem__)
    return [*range(first, first + count)], {"distances": distances}


@step
def uidl(live: Any, arch: Arch, tokens: Tokens, count: int) -> Choice:
    """Neighbours, by the angle between what enters and what leaves them."""
    states = entering(live, arch, tokens)
    both = zip(states, states[count:], strict=False)
    return _block([float((cosine(x, y).arccos() / math.pi).mean()) for x, y in both], count)


@step
def replaceme(live: Any, arch: Arch, tokens: Tokens, count: int) -> Choice:
    """As :func:`uidl`; the FFN before the block learns what it did, in closed form."""
    states = entering(live, arch, tokens)
    both = zip(states[1:], states[1 + count :], strict=False)  # an FFN is before the block
    choice = _block([float((1 - cosine(x, y)).mean()) for x, y in both], count, 1)
    first = choice[0][0]
    written: list[Tensor] = []
    ffn = arch.ffn_of(arch.layers(live)[first - 1])
    with arch.watch(ffn, lambda y: written.append(y.flatten(0, -2))):
        for batch in tokens.batches():
            live(batch.input_ids.to(live.device), use_cache=False)
    m_TD = torch.cat(written).double()
    wanted_TD = states[first + count].double() - (states[first].double() - m_TD)
    map_DD = torch.linalg.lstsq(m_TD, wanted_TD).solution
    down = getattr(ffn, arch.ffn.down).weight
    down.copy_((map_DD.T @ down.double()).to(down.dtype))
    return choice


def _passed(_: nn.Module, args: tuple[Any, ...], kwargs: JSON, output: Any) -> Any:
    """What a layer that is not there returns: its input."""
    x = args[0] if args else kwargs["hidden_states"]
    return (x, *output[1:]) if isinstance(output, tuple) else x


@step
def sleb(live: Any, arch: Arch, tokens: Tokens, count: int) -> Choice:
    """One layer after the other, by the perplexity of the calibration text without it."""
    layers = arch.layers(live)

    def without(i: int) -> float:
        handle = layers[i].register_forward_hook(_passed, with_kwargs=True)
        try:
            return scores([InMemory(live)], tokens)[0].perplexity
        finally:
            handle.remove()

    gone: list[int] = []
    while len(gone) < count:
        gone.append(min((i for i in range(len(layers)) if i not in gone), key=without))
        layers[gone[-1]].register_forward_hook(_passed, with_kwargs=True)
    return gone, {}


def size(folder: str) -> JSON:
    """Bytes of a checkpoint in 16 bits a value; matrices that are 2:4 as their kernels hold them:
    half of the values and two bits for each of these."""
    total = 0.0
    for parameter in resolve(folder).load().parameters():
        thin = parameter.dim() > 1 and float((parameter == 0).float().mean()) >= 0.5
        total += parameter.numel() * (9 if thin else 16) / 8
    return {"bytes": round(total)}
