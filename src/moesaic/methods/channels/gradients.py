"""How much the loss of the whole model feels each channel of each projection.

The change of the loss where channel i is left out is g_i x_i to first order, with g the gradient of
the loss with respect to what this projection alone takes in; over tokens its mean square is
E[g_i^2] x_i^2 (the diagonal of the Fisher information). Not in a paper on channel skipping; the
square root of E[g_i^2] takes the place of WINA's column norm. Of an expert the mean is over the
tokens that it runs.

Shape suffixes: T tokens, I inputs (channels), O outputs, E experts, N tokens of one, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.arch.dense import Arch
from moesaic.arch.mixture import MoEArch, MoEFFN
from moesaic.data.text import Tokens
from moesaic.foreign import Model, Track, logits_alone
from moesaic.io.caller import forward_replaced
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
    """The root mean square of the loss's gradient by channel, float32: (I), of experts (E, I).

    The loss is the sum over a window's tokens, so that a gradient is what one token's value changes
    of everything after it. An expert that runs for none of the tokens has the mean of the others.

    Args:
        model: live.
        arch: its architecture.
        wanted: projections by decoder layer.
        tokens: padding is left out of the loss.
        track: shows progress.
    """
    sums = Sums()
    batches = list(tokens.batches(1024))
    with _watched(model, arch, wanted, sums):
        for batch in track(batches, "Gradients", len(batches)):
            mask = batch.attention_mask
            sums.real_T = None if mask is None else mask.flatten().bool()
            sums.tokens += _backward(model, batch)
    return {key: sums.size(key).float().cpu() for key in sums.squares}


class Sums:
    """Sums over tokens of squared gradients."""

    def __init__(self) -> None:
        self.squares: dict[Key, Tensor] = {}
        """(I), of experts (E, I), float64."""
        self.calls: dict[Key, Tensor] = {}
        """int64 (E): tokens that each expert runs, padding left out."""
        self.tokens = 0
        self.real_T: Tensor | None = None
        """Of the batch at hand; None where all are."""

    def add(self, key: Key, square: Tensor) -> None:
        """Add to a projection's sums."""
        self.squares[key] = self.squares[key] + square if key in self.squares else square

    def add_expert(self, key: Key, count: int, number: int, square_I: Tensor) -> None:
        """Add to the sums of one expert of ``count``."""
        if key not in self.squares:
            self.squares[key] = square_I.new_zeros(count, len(square_I))
        self.squares[key][number] += square_I

    def size(self, key: Key) -> Tensor:
        """The root of the mean square."""
        square = self.squares[key]
        if key not in self.calls:
            return (square / self.tokens).sqrt()
        calls_E = self.calls[key].to(square.device)
        mean_EI = square / calls_E.clamp(min=1)[:, None]
        mean_EI[calls_E == 0] = mean_EI[calls_E > 0].mean(0)
        return mean_EI.sqrt()


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
        options = {"use_cache": False, **logits_alone(model.config)}
        logits = model(inputs_embeds=states, attention_mask=mask, **options).logits
        wanted = ids[:, 1:] if mask is None else ids[:, 1:].masked_fill(~mask[:, 1:].bool(), -100)
        loss = F.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), wanted.flatten(), reduction="sum"
        )
        torch.autograd.backward(loss, inputs=[states])
    return ids.numel() if mask is None else int(mask.sum())


@contextmanager
def _watched(
    model: Model, arch: Arch, wanted: Mapping[int, Collection[Projection]], sums: Sums
) -> Iterator[None]:
    """Sum the squares of gradients while the model runs backward."""
    with ExitStack() as watched:
        for i, layer in enumerate(arch.layers(model)):
            projections = wanted.get(i, ())
            experts = {p.path.rpartition(".")[2]: (i, p.path) for p in projections if p.experts}
            if experts:
                assert isinstance(arch, MoEArch)
                view = arch.mixture(layer)
                seen = _seen_experts(view, experts, sums)
                watched.enter_context(forward_replaced(view.experts, seen))
            for projection in projections:
                if not projection.experts:
                    module = layer.get_submodule(projection.path)
                    hook = module.register_forward_hook(_adder(sums, (i, projection.path)))
                    watched.callback(hook.remove)
        yield


def _adder(sums: Sums, key: Key) -> Callable[[nn.Module, object, Tensor], None]:
    def watch(module: nn.Module, args: object, out: Tensor) -> None:
        weight_OI: Tensor = module.weight.detach()  # type: ignore[operator]
        out.register_hook(lambda g: sums.add(key, _square_sum(g.flatten(0, -2) @ weight_OI)))

    return watch


def _seen_experts(view: MoEFFN, keys: Mapping[str, Key], sums: Sums) -> Callable[..., Tensor]:
    """The forward of a layer's experts, one expert after the other.

    Args:
        view: the layer's.
        keys: by the name of a tensor that holds all experts' projections.
        sums: gradients are added to them.
    """

    def forward(x: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        x_TD = x.flatten(0, -2)
        y_TD = torch.zeros_like(x_TD)
        for key in keys.values():
            sums.calls.setdefault(key, torch.zeros(view.count, dtype=torch.int64))
        for number in range(view.count):
            token_N, place_N = (chosen_TK == number).nonzero(as_tuple=True)
            if not len(token_N):
                continue
            real_T = sums.real_T
            ran = len(token_N) if real_T is None else int(real_T.to(x.device)[token_N].sum())
            x_NI = x_TD[token_N]
            h_NI = view.hidden(number, x_NI)
            for name, taken_NI in (("gate_up_proj", x_NI), ("down_proj", h_NI)):
                if name in keys:
                    sums.calls[keys[name]][number] += ran
                    taken_NI.register_hook(_expert_adder(sums, keys[name], view.count, number))
            weighted_ND = view.written(number, h_NI) * weights_TK[token_N, place_N, None]
            y_TD = y_TD.index_add(0, token_N, weighted_ND.to(y_TD.dtype))
        return y_TD.view_as(x)

    return forward


def _expert_adder(sums: Sums, key: Key, count: int, number: int) -> Callable[[Tensor], None]:
    return lambda g_NI: sums.add_expert(key, count, number, _square_sum(g_NI))


def _square_sum(g_TI: Tensor) -> Tensor:
    return g_TI.double().square().sum(0)
