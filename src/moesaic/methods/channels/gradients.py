"""How much the loss of the whole model feels each channel of each projection.

The change of the loss where channel i is left out is g_i x_i to first order, with g the gradient of
the loss with respect to what this projection alone takes in; over tokens its mean square is
E[g_i^2] x_i^2 (the diagonal of the Fisher information). Not in a paper on channel skipping; the
square root of E[g_i^2] takes the place of WINA's column norm.

Shape suffixes: T tokens, I inputs (channels), O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.arch.dense import Arch
from moesaic.data.text import Tokens
from moesaic.foreign import Model, Track
from moesaic.methods.channels.projections import Projection

Key = tuple[int, str]
"""A decoder layer, and the path of a projection in it."""


def gradient_sizes(
    model: Model,
    arch: Arch,
    wanted: Mapping[int, Collection[Projection]],
    tokens: Tokens,
    track: Track,
) -> dict[Key, Tensor]:
    """The root mean square of the loss's gradient by channel, float32 (I), of linear modules.

    The loss is the sum over a window's tokens, so that a gradient is what one token's value changes
    of everything after it.

    Args:
        model: live.
        arch: its architecture.
        wanted: projections by decoder layer.
        tokens: padding is left out of the loss.
        track: shows progress.
    """
    squares: dict[Key, Tensor] = {}
    count = 0
    batches = list(tokens.batches(1024))
    with _watched(model, arch, wanted, squares):
        for batch in track(batches, "Gradients", len(batches)):
            count += _backward(model, batch)
    return {key: (square_I / count).sqrt().float().cpu() for key, square_I in squares.items()}


def _backward(model: Model, batch: Tokens) -> int:
    """Run one batch forward and backward; parameters collect nothing.

    Returns:
        its tokens, padding left out.
    """
    embedding = model.get_input_embeddings()
    ids = batch.input_ids.to(embedding.weight.device)
    mask = None if batch.attention_mask is None else batch.attention_mask.to(ids.device)
    with torch.no_grad():
        states = embedding(ids)
    states = states.detach().requires_grad_()
    with torch.enable_grad():
        logits = model(inputs_embeds=states, attention_mask=mask, use_cache=False).logits
        wanted = ids[:, 1:] if mask is None else ids[:, 1:].masked_fill(~mask[:, 1:].bool(), -100)
        loss = F.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), wanted.flatten(), reduction="sum"
        )
        torch.autograd.backward(loss, inputs=[states])
    return ids.numel() if mask is None else int(mask.sum())


@contextmanager
def _watched(
    model: Model,
    arch: Arch,
    wanted: Mapping[int, Collection[Projection]],
    squares: dict[Key, Tensor],
) -> Iterator[None]:
    """Sum the squares of gradients while the model runs backward."""
    handles = []
    for i, layer in enumerate(arch.layers(model)):
        for projection in wanted.get(i, ()):
            module = layer.get_submodule(projection.path)
            handles.append(module.register_forward_hook(_adder(squares, (i, projection.path))))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _adder(squares: dict[Key, Tensor], key: Key) -> Callable[[nn.Module, object, Tensor], None]:
    def watch(module: nn.Module, args: object, out: Tensor) -> None:
        weight_OI: Tensor = module.weight.detach()  # type: ignore[operator]

        def add(gradient: Tensor) -> None:
            square_I = (gradient.flatten(0, -2) @ weight_OI).double().square().sum(0)
            squares[key] = squares[key] + square_I if key in squares else square_I

        out.register_hook(add)

    return watch
