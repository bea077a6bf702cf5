"""Wanda at 2:4, the weight pruning that NAEE is compared with (its Tables 1 and 3).

Sun et al., "A Simple and Effective Pruning Approach for Large Language Models" (ICLR 2024). Of
every four neighbouring weights of an output the two of least |W_ij| ||x_j|| become zero, x_j being
what an input was over the calibration tokens that reached the matrix. Layer by layer: a layer sees
tokens as the layers thinned before it pass them on.

Where we depart from it:

- The experts alone are thinned, as expert pruning leaves the rest of a model alone too.
- An expert that no token reached goes by |W_ij|.
- Of equal weights the first go.

Half of the weights are zero and all are stored: what that saves is up to kernels for 2:4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.arch.mixture import MoEArch, MoEFFN
from moesaic.data.text import Tokens
from moesaic.errors import MoesaicError
from moesaic.foreign import Model
from moesaic.methods.naee.criteria import WANDA
from moesaic.observation.neurons import square_sums
from moesaic.observation.stream import LayerStream, Spill


def two_of_four(weight_OI: Tensor, norm_I: Tensor) -> Tensor:
    """The weights that stay: of every four neighbours in a row the two of most |W| ||x||, bool.

    Args:
        weight_OI: outputs by inputs, a multiple of four.
        norm_I: ||x_j||, over tokens.

    >>> two_of_four(torch.tensor([[3.0, -2.0, 1.0, 1.0]]), torch.tensor([1.0, 1.0, 5.0, 1.0]))
    tensor([[ True, False,  True, False]])
    """
    score_OG4 = (weight_OI.abs().float() * norm_I.to(weight_OI.device)).unflatten(1, (-1, 4))
    least_OG2 = score_OG4.argsort(dim=2, stable=True)[..., :2]
    kept_OG4 = torch.ones_like(score_OG4, dtype=torch.bool)
    return kept_OG4.scatter_(2, least_OG2, False).flatten(1)


@torch.no_grad()
def thin(view: MoEFFN, inputs: Spill) -> None:
    """Set half of the weights of a layer's experts to zero, in place.

    Args:
        view: the layer's.
        inputs: batches of x (T, D).
    """
    weights = [view.weights_of(i) for i in range(view.count)]
    squares = [[torch.zeros(w.shape[1], dtype=torch.float64) for w in every] for every in weights]
    for x_TD in inputs:
        w_TE = view.combine_weights(x_TD)
        for i in (w_TE != 0).any(0).nonzero().flatten().tolist():
            x_ND = x_TD[w_TE[:, i] != 0]
            seen = square_sums(x_ND.float())
            *into, down = squares[i]  # of gates, where there are any, and ups
            for square in into:
                square += seen
            down += square_sums(view.hidden(i, x_ND).float())
    for every, sums in zip(weights, squares, strict=True):
        for weight_OI, square_I in zip(every, sums, strict=True):
            norm_I = square_I.sqrt() if square_I.any() else torch.ones_like(square_I)
            weight_OI.mul_(two_of_four(weight_OI, norm_I.float()))


@torch.no_grad()
def thinned(model: Model, arch: MoEArch, tokens: Tokens) -> Model:
    """A live model with the experts of every layer that routes thinned, in place.

    Args:
        model: the original.
        arch: its architecture.
        tokens: to calibrate on.

    Raises:
        MoesaicError: rows of weights are no multiple of four.
    """
    wanted = arch.moe_layers(model)
    for i in wanted:
        for weight_OI in arch.mixture(arch.layers(model)[i]).weights_of(0):
            if weight_OI.shape[1] % 4:
                raise MoesaicError(
                    f"compare {WANDA!r}: rows of {weight_OI.shape[1]} weights are no multiple of "
                    "four."
                )
    stream: LayerStream[MoEFFN] = LayerStream(model, arch, tokens, wanted, view=arch.mixture)
    hidden, kwargs = stream.record()
    inputs = Spill(1 << 30)
    for block in stream.blocks(kwargs):
        if block.index in wanted:
            with stream.seen(arch.ffn_of(block.layer), inputs, None, block.index, True):
                for _ in block.outputs(hidden):
                    pass
            thin(arch.mixture(block.layer), inputs)
            inputs.clear()
        block.run(hidden)
    hidden.clear()
    return model
