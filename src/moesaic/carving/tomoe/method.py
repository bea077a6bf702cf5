"""ToMoE's run: experts and routers are trained over frozen weights, then fixed in a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import torch

from moesaic.arch.dense import Arch
from moesaic.carving.budget import layer_sizes
from moesaic.carving.more.config import MoREConfig, Variant
from moesaic.carving.more.method import MoRE
from moesaic.carving.overlapping_layer import OverlappingLayer
from moesaic.carving.tomoe.config import ToMoEConfig
from moesaic.carving.tomoe.decision import (
    Learned,
    active_ratio,
    decide,
    drawn,
    learned,
    least_ratio,
    threshold_for,
)
from moesaic.carving.tomoe.masks import LayerShape, MaskingModules
from moesaic.carving.tomoe.student import Student, StudentLoss, layer_shapes
from moesaic.errors import MoesaicError
from moesaic.methods.base import Decision, DenseMethod, Outline, Summary
from moesaic.methods.sentences import carved, number, some
from moesaic.observation.job import Job
from moesaic.plan import Plan
from moesaic.record import Figure, LayerRecord
from moesaic.train.learning import examples_of, learn

CURVES = {
    "distillation": "KL divergence from the dense model",
    "parameters": "R_P, the budget",
    "union": "R_U, the union of experts",
    "balance": "R_L, the load balance",
    "active": "active ratio",
}
"""Names of the figures that training logs, in words."""


class ToMoE(DenseMethod[ToMoEConfig]):
    """Method ``tomoe`` of ``carve``: learns which part of a frozen dense model each token uses."""

    ratio = "projections"

    def run(self, job: Job[Arch]) -> Decision:
        """Train masks, and fix them in a plan.

        Training uses all of the calibration text; the windows drawn from it decide how many
        dimensions of a head are used.
        """
        args = job.args
        self._check(job)
        job.tokens  # noqa: B018 - refuse a wrong text before a model is read
        live = job.live()
        total = parameters(live)
        config = self.config
        student = Student(live, job.arch, config)
        learning = student.learning
        text = args.calibration.source if args.text is None else args.text
        examples = examples_of(job, config, text)
        losses = learn(
            job,
            config,
            student,
            learning,
            examples,
            args.resume_from and args.resume_from / "training",
            objective=StudentLoss(config.seed),
            request={"text": job.text},
        )
        head_logits = student.head_logits(job.tokens)
        student.to("cpu")
        with torch.no_grad():
            student.masking.begin(torch.ones(1, 1, dtype=torch.bool), noise=False)
            layers = learned(student.masking, head_logits)
            threshold = 0.0 if config.noise else threshold_for(layers, config.active)
            plans, analyses = decide(student.masking, layers, job.arch.attention, threshold)
        student.release()
        live.to(job.return_device)
        active = active_ratio(layers, threshold)
        return Decision(
            Plan(config.name, job.base, dict(plans), asdict(config), job.tokens.fingerprint),
            analyses=analyses,
            comparisons={name: self._beside(job, name, active) for name in args.compare},
            summary={
                "training": {
                    "what": "experts and routers",
                    "losses": losses,
                    "labels": CURVES,
                    "trained_parameters": sum(p.numel() for p in learning.values()),
                    "total_parameters": total,
                    "active": active,
                    "threshold": threshold,
                    "examples": len(examples) if isinstance(examples, Sequence) else None,
                    "copied_parameters": _copied(layers, plans) if config.materialize else 0,
                }
            },
        )

    def _check(self, job: Job[Arch]) -> list[LayerShape]:
        """Return the sizes of the layers.

        Raises:
            MoesaicError: the active ratio is out of reach, for the result or a comparison.
        """
        shapes = layer_shapes(job.shape, job.arch)
        least = least_ratio(shapes, self.config.attention)
        if self.config.active < least:
            kept = "; attention='routed' reaches lower" * (self.config.attention == "none")
            raise MoesaicError(
                f"active {self.config.active:g} is out of reach: with experts of the least width "
                f"in every layer and attention {self.config.attention!r} the ratio is "
                f"{least:.3f}{kept}."
            )
        for name in job.args.compare:
            _baseline(name, self.config.active).choose(layer_sizes(job.shape, job.arch))
        return shapes

    @torch.no_grad()
    def outline(self, job: Job[Arch]) -> Outline:
        """Outline a run with untrained experts, at the threshold that meets the active ratio."""
        shapes = self._check(job)
        config = self.config
        masking = MaskingModules(config, shapes)
        masking.begin(torch.ones(1, 1, dtype=torch.bool), noise=False)
        layers = learned(masking, {})
        threshold = threshold_for(layers, config.active)
        plans, _ = decide(masking, layers, job.arch.attention, threshold)
        count = parameters(masking)
        return Outline(
            Plan(config.name, job.base, dict(plans), asdict(config)),
            exact=False,
            trained=count,
        )

    def _beside(self, job: Job[Arch], name: str, active: float) -> Plan:
        """Return the plan of a comparison, carved at the active ratio of the result."""
        baseline = _baseline(name, active)
        folder = job.args.resume_from and job.args.resume_from / name
        args = replace(job.args, text=job.tokens, compare=(), resume_from=folder)
        plan = baseline.run(Job(args, baseline.find)).plan
        assert plan is not None
        return plan

    def figures(self, layers: list[LayerRecord], decision: Decision) -> list[Figure]:
        return [*drawn(layers), *super().figures(layers, decision)]

    def title_and_text(
        self, layers: list[LayerRecord], decision: Decision, active: float | None
    ) -> Summary:
        """Describe how FFNs and attention were divided, and how long modules were trained."""
        assert decision.plan is not None
        config, training = self.config, decision.summary["training"]
        where = some(len(decision.plan.layers), len(layers))
        hold = "hold copies of" if config.materialize else "share"
        runs = f"The feed-forward networks of {where} are {number(config.experts)} experts each"
        attention = _attention(decision)
        attention += " Choices are tossed, as they were in training." * config.noise
        return Summary(
            carved(config, training["active"] if active is None else active),
            f"{runs}, which {hold} the original's neurons, and each token runs one. {attention} "
            f"Experts and routers were trained for {len(training['losses']):,} steps.",
        )


def _baseline(name: str, active: float) -> MoRE:
    """Return the method that makes a comparison."""
    variant: Variant = "static" if name == "static" else "full"
    return MoRE(MoREConfig(active=active, experts=8, layers="all", variant=variant))


def parameters(module: torch.nn.Module) -> int:
    """Return the number of a module's parameters."""
    return sum(p.numel() for p in module.parameters())


def _attention(decision: Decision) -> str:
    """Return a sentence on how attention was cut down."""
    analyses = decision.analyses.values()
    cut = {part for part in ("qk", "vo") if any(x[part] < x["head_dim"] for x in analyses)}
    if not cut:
        return "Attention stays whole."
    if cut == {"qk"}:
        return "Attention is cut down, for all tokens alike."
    sentence = "Each token uses only a part of attention's values and outputs"
    return (
        f"{sentence}; queries and keys are cut down for all tokens alike."
        if "qk" in cut
        else f"{sentence}."
    )


def _copied(layers: Mapping[int, Learned], plans: Mapping[int, OverlappingLayer]) -> int:
    """Return the number of FFN weights that materialised experts hold beyond the dense model's."""
    shares = {i: sum(p.header()["petals"]) / layers[i].shape.width for i, p in plans.items()}
    return round(sum(layers[i].shape.ffn * (share - 1) for i, share in shares.items()))
