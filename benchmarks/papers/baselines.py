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
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.arch.dense import Arch
from moesaic.arch.lookup import base_arch, moe_arch
from moesaic.data.text import Tokens, calibration_tokens
from moesaic.exports.rounder import tap
from moesaic.io.source import Source, resolve
from moesaic.metrics.forward import InMemory
from moesaic.metrics.score import scores
from moesaic.observation.stats import Tally, square_sums
from moesaic.observation.stream import LayerStream


def opened(model: str, text: str, device: str = "cpu") -> tuple[Source, Any, Tokens]:
    """A model, loaded, and its calibration tokens."""
    source = resolve(model)
    name, samples, length = text.rsplit(",", 2)
    tokens = calibration_tokens(name, source.tokenizer, int(samples), int(length))
    return source, source.load(device), tokens


def kept(source: Source, live: Any, out: str, **figures: Any) -> dict[str, Any]:
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


@torch.no_grad()
def wanda(model: str, out: str, text: str, device: str = "cpu") -> dict[str, Any]:
    """Experts at 2:4; one that no token reached, by only |W|."""
    source, live, tokens = opened(model, text, device)
    arch = moe_arch(live.config)
    wanted = arch.moe_layers(live)
    stream = LayerStream(live, arch, tokens, wanted, view=arch.mixture)
    for block, states in stream.turns():
        view = arch.mixture(block.layer)
        into, down = (f"{arch.inside}{arch.experts}.{name}" for name in view.matrices)
        tally = Tally()

        def note(
            path: str,
            x_NI: Tensor,
            expert: int | None,
            tally: Tally = tally,
            count: int = view.count,
        ) -> None:
            tally.add(path, square_sums(x_NI), expert, count)

        with tap(block.layer, arch, (into, down), note):
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


def _layers(arch: Arch, live: nn.Module, active: float | str) -> int:
    """How many layers go."""
    return max(1, round(len(arch.layers(live)) * (1 - float(active))))


@torch.no_grad()
def shortgpt(model: str, out: str, text: str, active: str, device: str = "cpu") -> dict[str, Any]:
    """The share ``active`` of the layers is kept, by block influence."""
    source, live, tokens = opened(model, text, device)
    arch = base_arch(live.config)
    states = entering(live, arch, tokens)
    influence = [1 - float(cosine(x, y).mean()) for x, y in pairwise(states)]
    order = sorted(range(len(influence)), key=influence.__getitem__)
    dropped = sorted(order[: _layers(arch, live, active)])
    remove(live, arch, dropped)
    return kept(source, live, out, removed=dropped, influence=influence)


def _block(states: Sequence[Tensor], count: int, angle: bool) -> tuple[int, list[float]]:
    """The first layer of the block that changes its input least, and all distances."""
    found = []
    for x, y in zip(states, states[count:], strict=False):
        cos_T = cosine(x, y)
        found.append(float((cos_T.arccos() / math.pi if angle else 1 - cos_T).mean()))
    return min(range(len(found)), key=found.__getitem__), found


@torch.no_grad()
def uidl(model: str, out: str, text: str, active: str, device: str = "cpu") -> dict[str, Any]:
    """The share ``active`` of the layers is kept; those removed are neighbours."""
    source, live, tokens = opened(model, text, device)
    arch = base_arch(live.config)
    count = _layers(arch, live, active)
    first, distances = _block(entering(live, arch, tokens), count, True)
    remove(live, arch, range(first, first + count))
    return kept(source, live, out, removed=[*range(first, first + count)], distances=distances)


@torch.no_grad()
def replaceme(model: str, out: str, text: str, active: str, device: str = "cpu") -> dict[str, Any]:
    """As :func:`uidl`; the FFN before the block learns what it did, in closed form."""
    source, live, tokens = opened(model, text, device)
    arch = base_arch(live.config)
    count = _layers(arch, live, active)
    states = entering(live, arch, tokens)
    first, distances = _block(states[1:], count, False)
    first += 1  # an FFN is before it
    written: list[Tensor] = []
    ffn = arch.ffn_of(arch.layers(live)[first - 1])
    with arch.watch(ffn, lambda y: written.append(y.flatten(0, -2))):
        for batch in tokens.batches():
            live(batch.input_ids.to(device), use_cache=False)
    m_TD = torch.cat(written).double()
    wanted_TD = states[first + count].double() - (states[first].double() - m_TD)
    map_DD = torch.linalg.lstsq(m_TD, wanted_TD).solution
    down = getattr(ffn, arch.ffn.down).weight
    down.copy_((map_DD.T @ down.double()).to(down.dtype))
    remove(live, arch, range(first, first + count))
    return kept(source, live, out, removed=[*range(first, first + count)], distances=distances)


@torch.no_grad()
def sleb(model: str, out: str, text: str, active: str, device: str = "cpu") -> dict[str, Any]:
    """One layer after the other is removed, by the perplexity of the calibration text."""
    source, live, tokens = opened(model, text, device)
    arch = base_arch(live.config)

    def passed(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        return (x, *output[1:]) if isinstance(output, tuple) else x

    def without(i: int) -> float:
        handle = arch.layers(live)[i].register_forward_hook(passed, with_kwargs=True)
        try:
            return scores([InMemory(live)], tokens)[0].perplexity
        finally:
            handle.remove()

    gone: list[int] = []
    numbers = [*range(len(arch.layers(live)))]
    for _ in range(_layers(arch, live, active)):
        worst = min(range(len(numbers)), key=without)
        gone.append(numbers.pop(worst))
        remove(live, arch, [worst])
    return kept(source, live, out, removed=gone)


def size(folder: str) -> dict[str, Any]:
    """Bytes of a checkpoint in 16 bits a value; matrices that are 2:4 as their kernels hold them:
    half of the values and two bits for each of these."""
    total = 0.0
    for parameter in resolve(folder).load().parameters():
        thin = parameter.dim() > 1 and float((parameter == 0).float().mean()) >= 0.5
        total += parameter.numel() * (9 if thin else 16) / 8
    return {"bytes": round(total)}
