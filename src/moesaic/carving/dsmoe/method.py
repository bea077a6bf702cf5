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

All parameters train. The layer is ``carving.carved_layer.CarvedFFN`` without a backbone.

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

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor, nn

from moesaic import hub
from moesaic.arch.dense import Arch
from moesaic.carving.budget import LayerSize, active_ratio, ffn_share, layer_sizes
from moesaic.carving.carved_layer import CarvedLayer
from moesaic.carving.dsmoe.config import DSMoEConfig
from moesaic.errors import MoesaicError
from moesaic.losses import next_token_loss, predicting
from moesaic.methods.base import Decision, DenseMethod, Outline, Summary
from moesaic.methods.figures import carved_clause, layers_text, number, percent
from moesaic.observation.job import Job
from moesaic.plan import Plan
from moesaic.record import LayerRecord
from moesaic.surgery import apply_plan, routed_modules
from moesaic.train.learning import Objective, Tensors, examples_of, learn
from moesaic.types import JSON, Model

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

    def __call__(self, model: nn.Module, inputs: Tensors) -> tuple[Tensor, Tensors]:
        labels_BL = inputs.pop("labels")
        records: dict[nn.Module, tuple[Tensor, Tensor]] = {}  # inputs (T, D) and outputs (T, N)

        def note(router: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            records[router] = (args[0], out)

        with ExitStack() as hooks:
            for router in self.routers:
                hooks.enter_context(router.register_forward_hook(note))
            logits_BLV = model(**inputs).logits
        language = next_token_loss(logits_BLV, labels_BL)
        valid_T = predicting(labels_BL).flatten()
        G_LTN = torch.stack([records[router][1][valid_T] for router in self.routers])
        config = self.config
        # gate value up to which a block is idle in the finished model
        idle = config.tau if config.variant == "no-piecewise" else 0.0
        on_LTN = G_LTN.detach() > idle
        figures = {
            "language": language,
            "active_blocks": on_LTN.float().mean(dim=(0, 2)).sum(),
            "idle_tokens": (~on_LTN.any(-1)).float().mean(0).sum(),
        }
        if config.variant == "top-k":
            inputs_of = {router: records[router][0][valid_T] for router in self.routers}
            layers = [
                imbalance(G_TN, router.probabilities(inputs_of[router]))  # type: ignore[operator]
                for router, G_TN in zip(self.routers, G_LTN, strict=True)
            ]
            figures["imbalance"] = torch.stack(layers).mean() * valid_T.sum()
            return language + config.balance * figures["imbalance"], figures
        figures["sparsity"] = sparsity(G_LTN).sum()
        return language + self.state["lambda"] * figures["sparsity"], figures

    def after_step(self, figures: dict[str, float]) -> dict[str, float]:
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


# --- the run -------------------------------------------------------------------------------------


CURVES = {
    "language": "language-model loss",
    "active_blocks": "share of blocks active",
    "idle_tokens": "share of tokens that run no block",
    "sparsity": "sparsity loss",
    "imbalance": "load-balance loss",
    "lambda": "lambda, the weight of sparsity",
}
"""Names of the figures that training logs, in words."""


class DSMoE(DenseMethod[DSMoEConfig]):
    """Method ``dsmoe`` of ``carve``: splits FFNs into blocks with gates and trains all weights."""

    ratio = "projections"

    def run(self, job: Job[Arch]) -> Decision:
        """Split the FFNs and train; comparisons are trained when their models are loaded."""
        config, args = self.config, job.args
        variants = {"": self, **self.compared(args.compare)}
        sizes = layer_sizes(job.skeleton, job.arch)
        plans = {
            name: Plan(config.name, job.base, dict(method.start(sizes)), asdict(method.config))
            for name, method in variants.items()
        }
        texts = examples_of(job, config, stream=True)

        def trained(name: str) -> tuple[Model, list[dict[str, float]]]:
            folder = args.resume_from and args.resume_from / name
            live = job.live() if not name else job.live(inplace=False)
            method = variants[name]
            apply_plan(live, job.arch, plans[name])
            hub.convert_class(live, job.arch, plans[name])
            routed = routed_modules(live, job.arch)
            objective = SparseObjective(
                [routed[i].router for i in sorted(plans[name].layers)],
                method.config,
                method.target(sizes),
            )
            learning = dict(live.named_parameters())
            losses = learn(job, method.config, live, learning, texts, folder, objective=objective)
            live.requires_grad_(True).to(job.return_device).eval()
            return live, losses

        def compared(name: str) -> Model:
            return trained(name)[0].to(job.device)

        live, losses = trained("")
        count = sum(p.numel() for p in live.parameters())
        return Decision(
            plans[""],
            summary={
                "training": {
                    "what": "all weights",
                    "losses": losses,
                    "labels": CURVES,
                    "trained_parameters": count,
                    "total_parameters": count,
                }
            },
            trained=live,
            retrained={name: partial(compared, name) for name in args.compare},
        )

    def outline(self, job: Job[Arch]) -> Outline:
        """Return the shape of the model before training."""
        config = self.config
        sizes = layer_sizes(job.skeleton, job.arch)
        self.target(sizes)
        count = sum(p.numel() for p in job.skeleton.parameters())
        return Outline(
            Plan(config.name, job.base, dict(self.start(sizes)), asdict(config)), trained=count
        )

    def title_and_text(
        self, layers: list[LayerRecord], decision: Decision, active: float | None
    ) -> Summary:
        """Describe how FFNs were split, how blocks are chosen, and how long they were trained."""
        assert decision.plan is not None
        where = layers_text(len(decision.plan.layers), len(layers))
        blocks = f"{number(self.config.experts)} blocks each"
        steps, target = len(decision.summary["training"]["losses"]), self.config.active
        towards = "" if target is None else f", towards {percent(target)} active"
        return Summary(
            carved_clause(self.config, active),
            f"The feed-forward networks of {where} are cut into {blocks}, of which each token runs "
            f"{self._chosen(layers)}. All weights were trained for {steps:,} steps{towards}.",
        )

    def _chosen(self, layers: Iterable[LayerRecord]) -> str:
        """Return which blocks a token runs, in words."""
        config = self.config
        if config.variant == "top-k":
            counts = {layer.top_k for layer in layers if layer.experts}
            few = number(counts.pop()) if len(counts) == 1 else "a fixed number"
            return f"{few}, chosen and weighed by a softmax as in LLaMA-MoE"
        gates = f"those whose gates are above {config.tau:g}"
        if config.variant == "no-straight-through":
            return f"{gates}; in training, gates below it had no gradient"
        if config.variant == "no-piecewise":
            return f"{gates}; in training, this threshold was left out"
        return gates

    def target(self, sizes: list[LayerSize]) -> float | None:
        """Return the share of active blocks that meets ``active``; None if no target was given.

        Raises:
            MoesaicError: the FFNs are too small a part of the model.
        """
        config = self.config
        if config.active is None:
            return None
        layers = range(len(sizes))
        share = ffn_share(sizes, layers, config.active)
        if share * config.experts < 1:
            least = active_ratio(sizes, {i: sizes[i].width / config.experts for i in layers})
            raise MoesaicError(
                f"active {config.active:g} is out of reach: with one of {config.experts} blocks "
                f"in each of {len(layers)} layers the ratio is {least:.3f}."
            )
        return share

    def start(self, sizes: list[LayerSize]) -> Mapping[int, CarvedLayer]:
        """Return the layers before training: dense weights, random gates.

        Raises:
            MoesaicError: an FFN cannot be cut into so many equal blocks.
        """
        config = self.config
        layers, blocks = range(len(sizes)), config.experts
        for i in layers:
            if sizes[i].width % blocks:
                raise MoesaicError(
                    f"Layer {i} has {sizes[i].width} neurons, which {blocks} blocks cannot share "
                    "evenly; choose another number of experts."
                )
        seeded = torch.Generator().manual_seed(config.seed)
        return {i: self._layer(sizes[i], self._top_k(sizes), seeded) for i in layers}

    def _top_k(self, sizes: list[LayerSize]) -> int:
        config = self.config
        if config.variant != "top-k":
            return config.experts
        share = self.target(sizes)
        if share is None:
            raise MoesaicError("variant top-k needs active.")
        return max(1, round(config.experts * share))

    def _layer(self, size: LayerSize, top_k: int, seeded: torch.Generator) -> CarvedLayer:
        config, blocks = self.config, self.config.experts
        gate: JSON = {
            "tau": config.tau,
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
            gate={"scale": 1.0} if config.variant == "top-k" else gate,
        )
