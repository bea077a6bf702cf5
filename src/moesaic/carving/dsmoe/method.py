"""DSMoE's run: every FFN is split into blocks with gates, then all weights train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial

import torch

from moesaic import hub
from moesaic.arch.dense import Arch
from moesaic.carving.budget import LayerSize, active_ratio, ffn_share, layer_sizes
from moesaic.carving.carved_layer import CarvedLayer
from moesaic.carving.dsmoe.config import DSMoEConfig
from moesaic.carving.dsmoe.gates import SparseObjective
from moesaic.errors import MoesaicError
from moesaic.exports.quantiser import Model
from moesaic.methods.base import Decision, DenseMethod, Outline, Summary
from moesaic.methods.sentences import carved, number, some
from moesaic.observation.job import Job
from moesaic.plan import Plan
from moesaic.record import LayerRecord
from moesaic.surgery import apply_plan, routed_modules
from moesaic.train.learning import examples_of, learn
from moesaic.types import JSON

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
        sizes = layer_sizes(job.shape, job.arch)
        plans = {
            name: Plan(config.name, job.base, dict(method.start(sizes)), asdict(method.config))
            for name, method in variants.items()
        }
        text = args.calibration.source if args.text is None else args.text
        texts = examples_of(job, config, text, stream=True)

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
        sizes = layer_sizes(job.shape, job.arch)
        self.target(sizes)
        count = sum(p.numel() for p in job.shape.parameters())
        return Outline(
            Plan(config.name, job.base, dict(self.start(sizes)), asdict(config)),
            trained=count,
        )

    def title_and_text(
        self, layers: list[LayerRecord], decision: Decision, active: float | None
    ) -> Summary:
        """Describe how FFNs were split, how blocks are chosen, and how long they were trained."""
        assert decision.plan is not None
        where = some(len(decision.plan.layers), len(layers))
        blocks = f"{number(self.config.experts)} blocks each"
        steps = len(decision.summary["training"]["losses"])
        return Summary(
            carved(self.config, self.config.active if active is None else active),
            f"The feed-forward networks of {where} are cut into {blocks}, of which each token runs "
            f"{self._chosen(layers)}. All weights were trained for {steps:,} steps.",
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
