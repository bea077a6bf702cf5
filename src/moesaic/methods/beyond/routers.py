"""Routers in closed form: a regression from a router's inputs to the energies of the petals.

Not in a paper. MoRE's router compares x with the mean x of each petal's tokens (Eqs. 11 to 13).
It should find the petals whose absence would change the output most. By the triangle inequality's
square that is about their *weighted energy*,

    A_e(t) = sqrt(sum over j in petal e of (h_j(t) ||W_down[:, j]||)^2),

so a linear function of the router's inputs is fitted to it by least squares over calibration
tokens, and a token runs the top-k petals of it. Inputs are x, or x and the backbone's hidden
activations: those are computed for every token anyway and are not linear in x. A constant is no
input: x, normalised, has directions that hardly vary, and native routers have no bias.

Shape suffixes: T tokens, D hidden size, M neurons, B backbone's, R petals, F = D (+ B).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.arch.dense import DenseFFN
from moesaic.layers.regression import Ridge
from moesaic.observation.stream import Site


def neuron_weights(ffn: DenseFFN) -> Tensor:
    """||W_down[:, j]||_2, the size of a neuron's contribution to the output for h_j = 1 (M,)."""
    return ffn.down_DM.float().norm(dim=0)


def petal_energies(h_TM: Tensor, norm_M: Tensor, petals: Sequence[Tensor]) -> Tensor:
    """A, the weighted energy of each petal for each token (T, R).

    >>> one, two = torch.tensor([0]), torch.tensor([1, 2])
    >>> petal_energies(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([5.0, 1.0, 2.0]), [one, two])
    tensor([[5., 5.]])
    """
    member_MR = torch.zeros(len(norm_M), len(petals), device=h_TM.device)
    for e, petal in enumerate(petals):
        member_MR[petal, e] = 1
    return ((h_TM.float() * norm_M).square() @ member_MR).sqrt()


def fit_router(
    site: Site[DenseFFN], backbone: Tensor, petals: Sequence[Tensor], sees_backbone: bool
) -> Tensor:
    """The router of a layer, by ridge regression.

    Args:
        site: the layer and its tokens.
        backbone: the backbone's neurons (B,), in their carved order.
        petals: each petal's neurons.
        sees_backbone: the backbone's hidden activations are inputs beside x.

    Returns:
        its weight (R, F), float32.
    """
    norm_M = neuron_weights(site.view)
    ridge = None
    for x_TD, h_TM in site.activations():
        parts = [x_TD.float(), h_TM[:, backbone].float()] if sees_backbone else [x_TD.float()]
        x_TF = torch.cat(parts, dim=1)
        if ridge is None:
            ridge = Ridge(x_TF.shape[1], len(petals), x_TF.device)
        ridge.add(x_TF, petal_energies(h_TM, norm_M, petals))
    assert ridge is not None
    return ridge.solve().weight_FO.T.float().cpu().contiguous()
