"""DSMoE: Matrix-Partitioned Experts with Dynamic Routing, dense to MoE by continued training.

Lv et al., "DSMoE: Matrix-Partitioned Experts with Dynamic Routing for Computation-Efficient Dense
LLMs". Equation numbers are the paper's.

==============  ===============================================================================
n               blocks: equal, contiguous parts of the FFN's neurons (Eq. 6)
o_i             a block's output; together they are the dense block's
Y, g_i          gates: g_i = sigmoid(x Y_i), no bias
tau, G          threshold, piecewise function (Eq. 7): ``routers.thresholded``
k, n / k        active blocks of a token, scale of the output (Eq. 8): ``routers.norm_scale``
S               straight-through estimator (Eqs. 10, 11): ``routers.straight_through``
L_sparse        mean of G over layers, blocks and tokens (Eqs. 17-19)
==============  ===============================================================================

All parameters train. The layer is ``carving.carved_ffn.CarvedFFN`` without a backbone.

Deviations, and choices where the paper gives none:

- n / k applies in training and inference, without a gradient through k.
- A token may activate no block (k = 0): its output is 0. Such tokens are counted.
- Gates start at N(0, 0.02). From zero, sigmoid would be 0.5, not above tau, and nothing active.
- L_sparse is a mean over the tokens with a next token; its weight ``sparsity`` (lambda) is 1.
- The paper has no target. With ``active``, a controller changes lambda after each step by the
  excess share of active blocks; below zero, lambda rewards activity.
- ``top-k`` is the comparison with LLaMA-MoE: the same blocks, a fixed number of them by a softmax,
  the scale n / k, and the load-balance loss of Switch. Its noise is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from moesaic.carving.dsmoe.config import DSMoEConfig
from moesaic.losses import next_token_loss, predicting
from moesaic.train.objectives import Objective

_SWIFT = 10.0
"""Proportional gain of the controller, relative to its integral gain: steps it looks back on."""


# --- losses --------------------------------------------------------------------------------------


def sparsity(G_LTN: Tensor) -> Tensor:
    """Return L_sparse of each token, Eq. 19: the mean gate over layers and blocks (T,).

    Only active gates have a gradient, as in dG/dg, even if G is a straight-through estimate.

    >>> sparsity(torch.tensor([[[0.8, 0.0], [0.6, 0.6]]]))
    tensor([0.4000, 0.6000])
    """
    return (G_LTN * (G_LTN > 0)).mean(dim=(0, 2))


def imbalance(weights_TN: Tensor, probabilities_TN: Tensor) -> Tensor:
    """Return the load-balance loss of one layer (Switch): n sum_i f_i P_i, 1 if both are uniform.

    f_i is the share of choices that fell on block i, P_i its mean probability.

    >>> imbalance(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.75, 0.25]]))
    tensor(1.5000)
    """
    on_TN = (weights_TN > 0).to(probabilities_TN.dtype)
    f_N = on_TN.sum(0) / on_TN.sum()
    return weights_TN.shape[-1] * (f_N * probabilities_TN.mean(0)).sum()


@contextmanager
def recorded(routers: Sequence[nn.Module]) -> Iterator[dict[nn.Module, tuple[Tensor, Tensor]]]:
    """Record the input and the output of each router while the context lasts.

    Yields:
        input (T, D) and output (T, N) by router.
    """
    records: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def note(router: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        records[router] = (args[0], out)

    with ExitStack() as hooks:
        for router in routers:
            hooks.enter_context(router.register_forward_hook(note))
        yield records


class SparseObjective(Objective):
    """Next-token loss plus sparsity loss of the gates or load-balance loss (Eqs. 17-19).

    Args:
        routers: routers of the carved layers.
        config: the method's config.
        target: share of blocks that should be active; None keeps lambda constant.
    """

    def __init__(
        self, routers: Sequence[nn.Module], config: DSMoEConfig, target: float | None
    ) -> None:
        super().__init__()
        self.routers = list(routers)
        self.config = config
        self.target = target
        self.state = {"lambda": config.sparsity, "sum": 0.0}

    def __call__(
        self, model: nn.Module, inputs: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        labels_BL = inputs.pop("labels")
        with recorded(self.routers) as records:
            logits_BLV = model(**inputs).logits
        language = next_token_loss(logits_BLV, labels_BL)
        valid_T = predicting(labels_BL).flatten()
        G_LTN = torch.stack([records[router][1][valid_T] for router in self.routers])
        on_LTN = G_LTN.detach() > self._idle
        figures = {
            "language": language,
            "active_blocks": on_LTN.float().mean(dim=(0, 2)).sum(),
            "idle_tokens": (~on_LTN.any(-1)).float().mean(0).sum(),
        }
        if self.config.variant == "top-k":
            inputs_of = {router: records[router][0][valid_T] for router in self.routers}
            layers = [
                imbalance(G_TN, router.probabilities(inputs_of[router]))  # type: ignore[operator]
                for router, G_TN in zip(self.routers, G_LTN, strict=True)
            ]
            figures["imbalance"] = torch.stack(layers).mean() * valid_T.sum()
            return language + self.config.balance * figures["imbalance"], figures
        figures["sparsity"] = sparsity(G_LTN).sum()
        return language + self.state["lambda"] * figures["sparsity"], figures

    @property
    def _idle(self) -> float:
        """Gate value up to which a block is idle in the finished model."""
        return self.config.tau if self.config.variant == "no-piecewise" else 0.0

    def stepped(self, figures: dict[str, float]) -> dict[str, float]:
        """Update lambda by a proportional-integral controller on the share of active blocks."""
        if self.config.variant == "top-k":
            return {}
        used = self.state["lambda"]
        if self.target is not None:
            gain, excess = self.config.gain, figures["active_blocks"] - self.target
            total = self.state["sum"] + gain * excess
            weight = self.config.sparsity + total + _SWIFT * gain * excess
            self.state = {"lambda": weight, "sum": total}
        return {"lambda": used}
