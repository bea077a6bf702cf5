"""ToMoE's run: experts and routers are trained over frozen weights, then fixed in a plan.

In the plan, experts of a layer have equal widths, choices are fixed, and the hypernetwork is
dropped.

Shape suffixes: T tokens, N experts, M neurons, W neurons of an expert, A size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import quantiles

import torch
from torch import Tensor

from moesaic.arch.dense import Arch, AttentionNames, Heads
from moesaic.carving.budget import alignment, layer_sizes
from moesaic.carving.more.config import MoREConfig, Variant
from moesaic.carving.more.method import MoRE
from moesaic.carving.overlapping_layer import EMBED, OFFSET, PROJECT, SCALE, SHIFT, OverlappingLayer
from moesaic.carving.tomoe.config import ToMoEConfig
from moesaic.carving.tomoe.masks import MEDIAN, LayerShape, MaskingModules, gumbel_like
from moesaic.carving.tomoe.student import Student, StudentLoss, layer_shapes
from moesaic.config import Calibration
from moesaic.errors import MoesaicError
from moesaic.methods import figures
from moesaic.methods.base import Decision, DenseMethod, Outline, Summary
from moesaic.methods.figures import carved_clause, layers_text, number
from moesaic.observation.job import Job
from moesaic.plan import Plan
from moesaic.record import Figure, LayerRecord, Row
from moesaic.train.learning import examples_of, learn
from moesaic.types import JSON


@dataclass(frozen=True)
class Logits:
    """Logits of one layer plus b and Gumbel noise or its median; above a threshold they are on."""

    shape: LayerShape
    mlp_NM: Tensor
    qk: Tensor | None = None
    """Logits of Q/K dimensions (free,); None if attention is unchanged, as ``vo_TA``."""
    vo_TA: Tensor | None = None
    """Logits of V/O dimensions for calibration tokens."""

    def widths(self, threshold: float) -> tuple[int, int, int]:
        """Return neurons of the widest expert, dimensions of Q/K, and of V/O: K of Sec. 3.3."""
        heads, full = self.shape.heads, self.shape.width
        step = alignment(full, 1)
        widest = int((self.mlp_NM > threshold).sum(-1).max())
        width = min(full, max(step, step * round(widest / step)))
        if self.qk is None or self.vo_TA is None:
            return width, heads.size, heads.size
        qk = int(heads.paired(_on(self.qk, threshold)).sum())
        mean = (self.vo_TA > threshold).sum(-1).float().mean()
        return width, qk, min(heads.size, max(1, round(float(mean))))


def _on(logits: Tensor, threshold: float) -> Tensor:
    """Return True for the static choices that are on: at least the likeliest, if any."""
    on = logits > threshold
    return on | (logits == logits.max()) if logits.numel() else on


def learned_logits(masking: MaskingModules, head_logits: Mapping[int, Tensor]) -> dict[int, Logits]:
    """Return the logits of every layer, by index; with the option ``noise``, one sample of them.

    Args:
        masking: trained modules; a forward pass has begun.
        head_logits: logits of the V/O dimensions for calibration tokens (T, A), by layer; if
            missing, those of the mean expert embedding are used.
    """
    config = masking.config
    layers = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        for i, shape in enumerate(masking.shapes):
            mlp_NM = _raised(masking.expert_logits(i), config.bias, config.noise)
            if config.attention == "none":
                layers[i] = Logits(shape, mlp_NM)
                continue
            static = _raised(masking.static_logits(i), config.head_bias, config.noise)
            size = shape.heads.size
            vo_TA = static[None, :size]
            if i in head_logits:
                vo_TA = _raised(head_logits[i], config.head_bias, config.noise)
            layers[i] = Logits(shape, mlp_NM, static[size:], vo_TA)
    return layers


def _raised(logits: Tensor, bias: float, noise: bool) -> Tensor:
    """Add b and Gumbel noise, or its median, to logits: they are on above 0 (Eq. 15)."""
    return logits + bias + (gumbel_like(logits) if noise else MEDIAN)


def active_ratio_at(layers: Mapping[int, Logits], threshold: float) -> float:
    """Return the share of the projections that a token uses at a threshold."""
    used = total = 0.0
    for layer in layers.values():
        shape = layer.shape
        width, qk, vo = layer.widths(threshold)
        used += shape.neuron * width + shape.dimension * (qk + vo)
        total += shape.ffn + shape.attention
    return used / total


def least_ratio(shapes: Sequence[LayerShape], attention: str) -> float:
    """Return the lowest possible active ratio: the narrowest experts, one dimension."""
    layers = {}
    for i, shape in enumerate(shapes):
        mlp_NM, heads = torch.zeros(1, shape.width), shape.heads
        cut = (torch.arange(heads.free), torch.zeros(1, heads.size)) if attention != "none" else ()
        layers[i] = Logits(shape, mlp_NM, *cut)
    return active_ratio_at(layers, math.inf)


def threshold_for(layers: Mapping[int, Logits], active: float) -> float:
    """Return the threshold at which the active ratio is nearest to its target.

    The ratio falls as the threshold rises; training has brought it near the target at 0.
    """
    low, high = -16.0, 16.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if active_ratio_at(layers, middle) > active else (low, middle)
    return min((0.0, low, high), key=lambda t: abs(active_ratio_at(layers, t) - active))


def similarity(experts_NW: Tensor, width: int) -> Tensor:
    """Return the share of neurons that two experts have in common (N, N), Fig. 9.

    >>> similarity(torch.tensor([[0, 1], [1, 2]]), 3)
    tensor([[1.0000, 0.5000],
            [0.5000, 1.0000]])
    """
    on_NM = torch.zeros(len(experts_NW), width).scatter_(1, experts_NW, 1)
    return on_NM @ on_NM.T / experts_NW.shape[1]


def decide(
    masking: MaskingModules, layers: Mapping[int, Logits], names: AttentionNames, threshold: float
) -> tuple[dict[int, OverlappingLayer], dict[int, JSON]]:
    """Return the plan of every layer, and the figures that the paper reports about it.

    Args:
        masking: trained modules; a forward pass has begun.
        layers: logits by layer.
        names: attention's projections.
        threshold: logits above it are on.

    Returns:
        plans by layer; and for the record ``expert_widths``, ``union``, ``similarity``, ``qk``,
        ``vo`` and ``head_dim`` by layer.
    """
    plans, analyses = {}, {}
    for i, layer in layers.items():
        width, qk, vo = layer.widths(threshold)
        experts_NW = layer.mlp_NM.topk(width, dim=-1).indices.sort(-1).values
        attention: JSON = {}
        if layer.qk is not None:
            attention = _pruned(masking, i, _on(layer.qk, threshold), vo, names)
        plans[i] = OverlappingLayer(
            experts_NW=experts_NW,
            router_ND=masking.mlp_modules(i).router.weight.float().clone(),
            materialized=masking.config.materialize,
            noise=masking.config.noise,
            **attention,
        )
        shared_NN = similarity(experts_NW, layer.shape.width)
        analyses[i] = {
            "expert_widths": (layer.mlp_NM > threshold).sum(-1).tolist(),
            "union": experts_NW.unique().numel() / layer.shape.width,
            "similarity": [[round(share, 4) for share in row] for row in shared_NN.tolist()],
            "qk": qk,
            "vo": vo,
            "head_dim": layer.shape.heads.size,
        }
    return plans, analyses


def _pruned(
    masking: MaskingModules, index: int, on: Tensor, vo: int, names: AttentionNames
) -> JSON:
    """Return the plan's fields of attention: fixed Q/K dimensions; V/O top-K by token."""
    heads = masking.shapes[index].heads
    qk_A = heads.paired(on).nonzero().flatten()
    parts = {
        "q": _over(qk_A, heads.queries, heads.size),
        "k": _over(qk_A, heads.keys, heads.size),
        "v": torch.arange(heads.keys * heads.size),
    }
    rows = _rows(parts, heads, names)
    if vo == heads.size:
        return {"rows": rows}
    modules = masking.mha_modules(index)
    router = {
        EMBED: modules.proj_e.weight,
        SHIFT: masking.mean_embedding(index),
        SCALE: modules.proj_d.norm.weight,
        OFFSET: modules.proj_d.norm.bias,
        PROJECT: modules.proj_d.linear.weight[: heads.size],
    }
    tensors = {name: tensor.float().clone() for name, tensor in router.items()}
    return {"rows": rows, "head_router": tensors, "head_top_k": vo}


def _over(kept_A: Tensor, heads: int, size: int) -> Tensor:
    """Return the rows of the same dimensions of every head."""
    return (torch.arange(heads)[:, None] * size + kept_A).flatten()


def _rows(parts: Mapping[str, Tensor], heads: Heads, names: AttentionNames) -> dict[str, Tensor]:
    """Return the kept rows by projection; projections that keep all are left out."""
    full = {"q": heads.queries * heads.size} | dict.fromkeys("kv", heads.keys * heads.size)
    rows: dict[str, Tensor] = {}
    sizes: dict[str, int] = {}
    for part, name in (("q", names.q), ("k", names.k), ("v", names.v)):
        start = sizes.get(name, 0)
        added = parts[part] + start
        rows[name] = torch.cat([rows[name], added]) if name in rows else added
        sizes[name] = start + full[part]
    return {name: kept for name, kept in rows.items() if kept.numel() < sizes[name]}


# --- figures -------------------------------------------------------------------------------------


def _expert_figures(layers: Sequence[LayerRecord]) -> list[Figure]:
    """Draw widths, unions and similarity of the experts of each layer.

    Args:
        layers: records of the result; their analysis is that of :func:`decide`.
    """
    learned = [x for x in layers if x.analysis.get("expert_widths") and x.width_before]
    section = "What was learned"
    used = {x.index: x.active_width / x.width_before for x in learned}
    columns = {("FFN, an expert", ".0%"): [*used.values()]}
    for name, key in (("queries and keys", "qk"), ("values and outputs", "vo")):
        columns[name, ".0%"] = [x.analysis[key] / x.analysis["head_dim"] for x in learned]
    unions = [
        figures.series("all experts together", [(x.index, x.analysis["union"]) for x in learned]),
        figures.series("one expert", used.items()),
    ]
    names = ("narrowest", "a quarter is below", "half is below", "three quarters are", "widest")
    spread: list[list[tuple[int, float]]] = [[] for _ in names]
    for layer in learned:
        widths = sorted(w / layer.width_before for w in layer.analysis["expert_widths"])
        if len(widths) > 1:
            marks = (widths[0], *quantiles(widths, method="inclusive"), widths[-1])
            for points, mark in zip(spread, marks, strict=True):
                points.append((layer.index, mark))
    caption = "What a token uses of each layer, of the dense model’s width."
    return [
        *figures.bars(section, "Width by layer.", caption, learned, columns),
        *figures.lines(
            section,
            "The union of experts.",
            unions,
            "share of the neurons",
            log=False,
            caption="How much of the dense FFN some expert has.",
        ),
        *figures.lines(
            section,
            "Widths of experts.",
            [figures.series(name, points) for name, points in zip(names, spread, strict=True)],
            "share of the width",
            strong=names[2],
            form=".0%",
            log=False,
            caption="As trained, before all experts of a layer were given the width of the widest.",
        ),
        *_similar(learned, section),
    ]


def _similar(layers: Sequence[LayerRecord], section: str) -> list[Figure]:
    """Draw the share of neurons that two experts have in common, one map per layer."""
    rows = [
        Row(str(j), tuple(map(figures.finite, shares)), 1.0, panel=f"layer {layer.index}")
        for layer in layers
        for j, shares in enumerate(layer.analysis["similarity"])
    ]
    caption = (
        "The share of neurons that two experts of a layer have in common: the darker, the more."
    )
    return figures.heat(section, "Similarity of experts.", caption, rows, row="expert")


# --- the run -------------------------------------------------------------------------------------


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
        examples = examples_of(job, config)
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
            layers = learned_logits(student.masking, head_logits)
            threshold = 0.0 if config.noise else threshold_for(layers, config.active)
            plans, analyses = decide(student.masking, layers, job.arch.attention, threshold)
        student.release()
        live.to(job.return_device)
        active = active_ratio_at(layers, threshold)
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
        shapes = layer_shapes(job.skeleton, job.arch)
        least = least_ratio(shapes, self.config.attention)
        if self.config.active < least:
            kept = "; attention='routed' reaches lower" * (self.config.attention == "none")
            raise MoesaicError(
                f"active {self.config.active:g} is out of reach: with experts of the least width "
                f"in every layer and attention {self.config.attention!r} the ratio is "
                f"{least:.3f}{kept}."
            )
        for name in job.args.compare:
            _baseline(name, self.config.active).choose(layer_sizes(job.skeleton, job.arch))
        return shapes

    @torch.no_grad()
    def outline(self, job: Job[Arch]) -> Outline:
        """Outline a run with untrained experts, at the threshold that meets the active ratio."""
        shapes = self._check(job)
        config = self.config
        masking = MaskingModules(config, shapes)
        masking.begin(torch.ones(1, 1, dtype=torch.bool), noise=False)
        layers = learned_logits(masking, {})
        threshold = threshold_for(layers, config.active)
        plans, _ = decide(masking, layers, job.arch.attention, threshold)
        count = parameters(masking)
        return Outline(
            Plan(config.name, job.base, dict(plans), asdict(config)), exact=False, trained=count
        )

    def _beside(self, job: Job[Arch], name: str, active: float) -> Plan:
        """Return the plan of a comparison, carved at the active ratio of the result."""
        baseline = _baseline(name, active)
        folder = job.args.resume_from and job.args.resume_from / name
        every = Calibration()  # all windows, as they are
        args = replace(job.args, text=job.tokens, calibration=every, compare=(), resume_from=folder)
        plan = baseline.run(Job(args, baseline.find)).plan
        assert plan is not None
        return plan

    def figures(self, layers: list[LayerRecord], decision: Decision) -> list[Figure]:
        return [*_expert_figures(layers), *super().figures(layers, decision)]

    def title_and_text(
        self, layers: list[LayerRecord], decision: Decision, active: float | None
    ) -> Summary:
        """Describe how FFNs and attention were divided, and how long modules were trained."""
        assert decision.plan is not None
        config, training = self.config, decision.summary["training"]
        where = layers_text(len(decision.plan.layers), len(layers))
        hold = "hold copies of" if config.materialize else "share"
        runs = f"The feed-forward networks of {where} are {number(config.experts)} experts each"
        attention = _attention(decision)
        attention += " Tokens choose at random, as in training." * config.noise
        return Summary(
            carved_clause(config, training["active"] if active is None else active),
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
        return "Attention is kept whole."
    if cut == {"qk"}:
        return "Attention is cut down, for all tokens alike."
    sentence = "Each token uses only a part of attention's values and outputs"
    return (
        f"{sentence}; queries and keys are cut down for all tokens alike."
        if "qk" in cut
        else f"{sentence}."
    )


def _copied(layers: Mapping[int, Logits], plans: Mapping[int, OverlappingLayer]) -> int:
    """Return the number of FFN weights that materialised experts hold beyond the dense model's."""
    shares = {i: sum(p.header()["petals"]) / layers[i].shape.width for i, p in plans.items()}
    return round(sum(layers[i].shape.ffn * (share - 1) for i, share in shares.items()))
