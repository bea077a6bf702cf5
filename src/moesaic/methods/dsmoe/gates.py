"""DSMoE: Matrix-Partitioned Experts with Dynamic Routing, dense to MoE by continued training.

Lv et al., "DSMoE: Matrix-Partitioned Experts with Dynamic Routing for Computation-Efficient Dense
LLMs". Equation numbers are the paper's.

==============  ===============================================================================
n               blocks: equal, contiguous parts of the FFN's neurons (Eq. 6)
o_i             a block's output; together they are the dense block's
Y, g_i          gates: g_i = sigmoid(x Y_i), no bias
tau, G          threshold, piecewise function (Eq. 7): ``nn.routers.thresholded``
k, n / k        active blocks of a token, scale of the output (Eq. 8): ``nn.routers.norm_scale``
S               straight-through estimator (Eqs. 10, 11): ``nn.routers.straight_through``
L_sparse        mean of G over layers, blocks and tokens (Eqs. 17-19)
==============  ===============================================================================

All parameters train. The block that computes this is ``nn.carved.CarvedFFN`` without a backbone.

Where the paper is silent or we depart from it:

- n / k applies in training and inference, without a gradient through k.
- A token may activate no block (k = 0): its output is 0. Such tokens are counted; ``force_one``
  lets the largest gate run instead.
- Gates start at N(0, 0.02). From zero, sigmoid would be 0.5, not above tau, and nothing active.
  ``gate_bias`` adds to every logit, for a start near the dense model.
- L_sparse is a mean over the tokens that predict one; its weight ``sparsity`` (lambda) is 1.
- The paper has no target. With ``active``, a controller moves lambda after each step with the share
  of active blocks that is too many; below zero, lambda rewards activity.
- ``top-k`` is the comparison with LLaMA-MoE: the same blocks, a fixed number of them by a softmax,
  the scale n / k, and the load-balance loss of Switch. Its noise is left out. ``top_k_scale``
  is the sum of a token's weights: 1 in LLaMA-MoE.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from moesaic.methods.budget import LayerSize, active_ratio, chosen_layers, ffn_share
from moesaic.errors import MoesaicError
from moesaic.plan import CarvedLayer
from moesaic.train import Objective, Schedule, next_token_loss, predicting

SWIFT = 10.0
"""The controller's proportional gain, relative to the integral one: steps it looks back on."""

Variant = Literal["full", "no-straight-through", "no-piecewise", "top-k"]


@dataclass(frozen=True)
class DSMoEConfig:
    """Options of DSMoE. The defaults are the paper's, or our decision where it gives none."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    active: float | None = None
    """Target active ratio of the whole model, reached by moving lambda; None leaves it as it is."""
    experts: int = 8
    """Blocks n a layer."""
    layers: str | tuple[int, ...] = "all"
    """all, last-half, uniform, early-middle, or layer numbers."""
    variant: Variant = "full"
    """full; no-straight-through (G for S in Eq. 11), no-piecewise (Eq. 20), top-k (LLaMA-MoE)."""
    tau: float = 0.5
    """Threshold of the gates."""
    sparsity: float = 1.0
    """lambda: the weight of the sparsity loss."""
    gain: float = 0.3
    """What lambda grows by in a step in which all blocks are active and none should be."""
    gate_bias: float = 0.0
    """Added to every gate's logit."""
    force_one: bool = False
    """A token with no gate above tau runs the largest."""
    top_k: int | None = None
    """top-k: blocks a token runs; None for as many as ``active`` asks for."""
    top_k_scale: float = 1.0
    """top-k: the sum of a token's weights."""
    balance: float = 0.01
    """top-k: the weight of the load-balance loss."""
    data: str = ""
    """Text to train on: as for --calibration, a mix of weights included."""
    length: int = 1024
    """Tokens a window."""
    steps: int = 1000
    """Optimizer steps; the paper's 10B tokens are 305,176 of its batches."""
    batch: int = 32
    """Windows a process takes at a time."""
    accumulate: int = 1
    """Batches before the weights move."""
    lr: float = 2e-5
    warmup: float = 0.1
    """The share of the steps in which the rate rises."""
    weight_decay: float = 0.0
    recompute: bool = False
    """Gradient checkpointing."""
    save_every: int = 100
    """Steps between checkpoints."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.variant not in get_args(Variant):
            raise MoesaicError(
                f"Unknown variant {self.variant!r}; choose from {', '.join(get_args(Variant))}."
            )
        if self.active is not None and not 0 < self.active <= 1:
            raise MoesaicError(f"--active {self.active:g} is not a ratio above 0, at most 1.")
        if not 0 <= self.tau < 1 or not 0 <= self.warmup < 1:
            raise MoesaicError("tau and warmup must be at least 0 and below 1.")
        for name in ("experts", "length", "steps", "batch", "accumulate", "save_every"):
            if getattr(self, name) < 1:
                raise MoesaicError(f"{name} must be at least 1.")
        if self.top_k is not None and not 0 < self.top_k <= self.experts:
            raise MoesaicError(f"--top-k {self.top_k} is not from 1 to --experts {self.experts}.")

    @property
    def schedule(self) -> Schedule:
        """What the training loop needs to know."""
        return Schedule.of(self)


# --- losses --------------------------------------------------------------------------------------


def sparsity(G_LTN: Tensor) -> Tensor:
    """L_sparse, Eq. 19, of each token: the mean gate over layers and blocks (T,).

    Active gates alone have a gradient, as dG/dg has, even where G came straight through.

    >>> sparsity(torch.tensor([[[0.8, 0.0], [0.6, 0.6]]]))
    tensor([0.4000, 0.6000])
    """
    return (G_LTN * (G_LTN > 0)).mean(dim=(0, 2))


def imbalance(weights_TN: Tensor, probabilities_TN: Tensor) -> Tensor:
    """Load-balance loss of one layer (Switch): n sum_i f_i P_i, 1 where both are uniform.

    f_i is the share of choices that fell on block i, P_i its mean probability.

    >>> imbalance(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.75, 0.25]]))
    tensor(1.5000)
    """
    on_TN = (weights_TN > 0).to(probabilities_TN.dtype)
    f_N = on_TN.sum(0) / on_TN.sum()
    return weights_TN.shape[-1] * (f_N * probabilities_TN.mean(0)).sum()


@contextmanager
def recorded(routers: Sequence[nn.Module]) -> Iterator[dict[nn.Module, tuple[Tensor, Tensor]]]:
    """What goes in and out of each router inside."""
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def note(router: nn.Module, args: Any, out: Tensor) -> None:
        seen[router] = (args[0], out)

    handles = [router.register_forward_hook(note) for router in routers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


class SparseObjective(Objective):
    """Next-token loss, and what keeps gates sparse or choices balanced (Eqs. 17-19).

    Args:
        routers: of the carved layers.
        config: the method's.
        target: the share of blocks to be active; None leaves lambda as it is.
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
        with recorded(self.routers) as seen:
            logits_BLV = model(**inputs).logits
        language = next_token_loss(logits_BLV, labels_BL)
        valid_T = predicting(labels_BL).flatten()
        G_LTN = torch.stack([seen[router][1][valid_T] for router in self.routers])
        on_LTN = G_LTN.detach() > self._idle
        figures = {
            "language": language,
            "active_blocks": on_LTN.float().mean(dim=(0, 2)).sum(),
            "idle_tokens": (~on_LTN.any(-1)).float().mean(0).sum(),
        }
        if self.config.variant == "top-k":
            inputs_of = {router: seen[router][0][valid_T] for router in self.routers}
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
        """Gates up to here are idle in the finished model; in training, ours are zero then."""
        return self.config.tau if self.config.variant == "no-piecewise" else 0.0

    def stepped(self, figures: dict[str, float]) -> dict[str, float]:
        """The controller, proportional and integral: more weight while too many are active."""
        if self.config.variant == "top-k":
            return {}
        used = self.state["lambda"]
        if self.target is not None:
            gain, excess = self.config.gain, figures["active_blocks"] - self.target
            total = self.state["sum"] + gain * excess
            weight = self.config.sparsity + total + SWIFT * gain * excess
            self.state = {"lambda": weight, "sum": total}
        return {"lambda": used}


# --- the method ----------------------------------------------------------------------------------


class DSMoE:
    """Split every FFN into blocks with gates, then train everything."""

    name = "dsmoe"

    def __init__(self, config: DSMoEConfig) -> None:
        self.config = config

    def target(self, sizes: list[LayerSize]) -> float | None:
        """The share of blocks to be active that ``active`` asks for.

        Raises:
            MoesaicError: the FFNs are too small a part of the model.
        """
        config = self.config
        if config.active is None:
            return None
        layers = chosen_layers(config.layers, len(sizes))
        share = ffn_share(sizes, layers, config.active)
        if share * config.experts < 1:
            least = active_ratio(sizes, {i: sizes[i].width / config.experts for i in layers})
            raise MoesaicError(
                f"--active {config.active:g} is out of reach: with one of {config.experts} blocks "
                f"in each of {len(layers)} layers the ratio is {least:.3f}."
            )
        return share

    def start(self, sizes: list[LayerSize]) -> Mapping[int, CarvedLayer]:
        """The layers as training finds them: dense weights, random gates.

        Raises:
            MoesaicError: an FFN cannot be cut into so many equal blocks.
        """
        config = self.config
        layers, blocks = chosen_layers(config.layers, len(sizes)), config.experts
        for i in layers:
            if sizes[i].width % blocks:
                raise MoesaicError(
                    f"Layer {i} has {sizes[i].width} neurons, which {blocks} blocks cannot share "
                    "evenly; choose another --experts."
                )
        seeded = torch.Generator().manual_seed(config.seed)
        return {i: self._layer(sizes[i], self._top_k(sizes), seeded) for i in layers}

    def _top_k(self, sizes: list[LayerSize]) -> int:
        config = self.config
        if config.variant != "top-k":
            return config.experts
        share = self.target(sizes)
        if config.top_k is None and share is None:
            raise MoesaicError("variant top-k needs --top-k or --active.")
        return config.top_k or max(1, round(config.experts * float(share or 0)))

    def _layer(self, size: LayerSize, top_k: int, seeded: torch.Generator) -> CarvedLayer:
        config, blocks = self.config, self.config.experts
        gate: dict[str, Any]
        if config.variant == "top-k":
            gate = {"scale": config.top_k_scale}
        else:
            gate = {
                "tau": config.tau,
                "bias": config.gate_bias,
                "force_one": config.force_one,
                "through": config.variant != "no-straight-through",
                "piecewise": config.variant != "no-piecewise",
            }
        return CarvedLayer(
            order_M=torch.arange(size.width),
            backbone=0,
            petals=(size.width // blocks,) * blocks,
            top_k=top_k,
            routing="softmax" if config.variant == "top-k" else "threshold",
            router_RD=0.02 * torch.randn(blocks, size.hidden, generator=seeded),
            gate=gate,
        )
