"""Where a mixture is redundant: between its experts, inside them, or in neither.

From statistics alone a quarter and a half are taken out in both ways, whole experts and neurons of
each, as quickly as can be: nothing is refitted or written. Each is one branch of the model
(:mod:`moesaic.observation.branches`), and the KL at its output is what is compared. Why it comes
out so is told by three figures: how alike the outputs of two experts are on the same token, how
much of what neurons write is written by half of them, and how evenly tokens choose experts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TypeVar

import torch
from torch import Tensor

from moesaic.arch.dense import Arch
from moesaic.arch.lookup import base_arch, moe_arch
from moesaic.config import Calibration, MethodConfig, RunArgs
from moesaic.data.text import Tokens, evaluation_tokens
from moesaic.errors import MoesaicError
from moesaic.estimates import Built, Stage, comparing
from moesaic.foreign import JSON, Track, silent
from moesaic.io.source import resolve
from moesaic.layers.base import LayerPlan
from moesaic.methods.naee.config import QUICK, PruneConfig
from moesaic.methods.slim.config import SlimConfig
from moesaic.observation.branches import divergences
from moesaic.observation.expert_stats import unpacked
from moesaic.observation.files import StatsFile, from_file
from moesaic.observation.job import Job
from moesaic.pipeline import convert

K = TypeVar("K", bound=Hashable)
PARTS = QUARTER, HALF = 0.25, 0.5
"""Shares of the experts' parameters that are taken out."""
WINDOWS = 16
"""Of text, on which it is measured."""
TOKENS = 512
"""Of a layer, whose experts' outputs are compared."""
MUCH = 0.1
"""A KL that no quarter of the experts is worth."""
AHEAD = 1.25
"""One way is ahead of the other where that loses so many times as much."""


@dataclass(frozen=True)
class Redundancy:
    """What quick decisions lose, and three figures of the experts."""

    dropped: Mapping[float, float]
    """KL in nats a token by the share of each layer's experts that goes."""
    narrowed: Mapping[float, float]
    """The same by the share of each expert's neurons."""
    alike: float | None
    """Mean cosine of two experts' outputs on the same token; None where no pairs were observed."""
    half: float
    """The share of what an expert's neurons write, squared, that half of them write."""
    flat: float
    """Entropy of the choice of experts, relative to even choice; mean of the layers."""

    @property
    def lies(self) -> str:
        """Where it is: ``between`` experts, ``inside`` them, ``both``, or ``neither``."""
        least = min(kls.get(QUARTER, MUCH) for kls in (self.dropped, self.narrowed))
        if least >= MUCH:
            return "neither"
        drop, narrow = (kls.get(HALF, torch.inf) for kls in (self.dropped, self.narrowed))
        if drop * AHEAD < narrow:
            return "between"
        return "inside" if narrow * AHEAD < drop else "both"

    def hopeless(self, verb: str) -> bool:
        """Whether a verb loses more by a quarter than the other one by a half; both are known."""
        ways = {"prune": (self.dropped, self.narrowed), "slim": (self.narrowed, self.dropped)}
        kls, others = ways.get(verb, ({}, {}))
        return kls.get(QUARTER, 0.0) > others.get(HALF, torch.inf)

    @property
    def summary(self) -> str:
        """One paragraph."""
        advice = {
            "between": "Experts are interchangeable: drop whole ones (prune).",
            "inside": "Each expert is needed, and not all of it: narrow them (slim).",
            "both": "Dropping experts and narrowing them lose about as much: try both.",
            "neither": "Neither can go without loss: round (export --to gguf) before anything.",
        }[self.lies]
        if not (self.dropped and self.narrowed):
            way = "dropping whole experts" if self.dropped else "narrowing experts"
            advice = f"Of the two ways this model can have one alone, {way}."
        losses = [
            f"{words} a {name} loses {kls[share]:.2g}"
            for words, kls in (("dropping", self.dropped), ("narrowing by", self.narrowed))
            for share, name in ((QUARTER, "quarter"), (HALF, "half"))
            if share in kls
        ]
        alike = ""
        if self.alike is not None:
            alike = f"outputs of two experts have a cosine of {self.alike:.2f}, "
        return (
            f"{advice} KL before any refit: {', '.join(losses)}. Why: {alike}half of the neurons "
            f"write {self.half:.0%} of all that is written, and routing has {self.flat:.0%} of the "
            "entropy of even routing."
        )

    @property
    def points(self) -> list[tuple[float, float, str]]:
        """The share that goes in percent, the KL, and ``d`` (drops experts) or ``n`` (narrows)."""
        marks = (("d", self.dropped), ("n", self.narrowed))
        return [(100 * share, kl, mark) for mark, kls in marks for share, kl in kls.items()]

    def as_json(self) -> JSON:
        """All of it, with ``lies``."""
        losses = {
            name: {str(share): kl for share, kl in getattr(self, name).items()}
            for name in ("dropped", "narrowed")
        }
        return {**asdict(self), **losses, "lies": self.lies}


def redundancy(args: RunArgs, windows: Tokens, track: Track = silent) -> Redundancy | None:
    """Look where a mixture is redundant; None where it can have neither way.

    Args:
        args: the model, and the file of its statistics.
        windows: text on which it is measured, of which the first few are taken.
        track: shows progress.

    Raises:
        MoesaicError: the model is dense, or the file is of another one.
    """
    job: Job[Arch] = Job(args, moe_arch)
    stats = from_file(job, args.calibration.stats, needs_gram=False)
    experts = max(job.base.experts)
    plans: dict[tuple[str, float], Mapping[int, LayerPlan]] = {}
    for share in PARTS:
        prune = PruneConfig(keep=round((1 - share) * experts), score=QUICK, refit=False)
        slim = SlimConfig(keep=1 - share, score="energy", refit=False)
        for name, config in (("dropped", prune), ("narrowed", slim)):
            with suppress(MoesaicError):  # the model cannot have it
                if layers := decided(config, args):
                    plans[name, share] = layers
    if not plans:
        return None
    losses = divergences_of(plans, args, windows.rows(slice(WINDOWS)), track)
    dropped, narrowed = (
        {share: kl for (name, share), kl in losses.items() if name == way}
        for way in ("dropped", "narrowed")
    )
    return Redundancy(dropped, narrowed, *_figures(stats))


def decided(config: MethodConfig, args: RunArgs) -> Mapping[int, LayerPlan]:
    """What a method makes of each layer; nothing is written.

    Raises:
        MoesaicError: the model cannot have it.
    """
    plan = convert(config, args).plan
    assert plan is not None  # those of ladders decide layer by layer
    return plan.layers


def divergences_of(
    plans: Mapping[K, Mapping[int, LayerPlan]], args: RunArgs, windows: Tokens, track: Track
) -> dict[K, float]:
    """KL(original || changed) of each of several decisions on some windows, nats a token."""
    job: Job[Arch] = Job(args, base_arch)
    stream = job.stream((), lambda layer: layer, windows)
    losses = divergences(stream, [*plans.values()], track).mean(1).tolist()
    return dict(zip(plans, losses, strict=True))


def observed_redundancy(
    model: str,
    stats: str,
    track: Track = silent,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
) -> Redundancy:
    """Look where a mixture is redundant, on text that ships.

    Args:
        model: a name for :func:`moesaic.io.source.resolve`.
        stats: a file of ``observe``.
        track: shows progress.
        device: where it is run.
        dtype: that it is run in; None: as on disk.

    Raises:
        MoesaicError: as of :func:`redundancy`; or the model has no tokenizer, or neither way.
    """
    length = MethodConfig.window
    text = evaluation_tokens("", resolve(model).tokenizer, length, WINDOWS * length)
    args = RunArgs.of(
        model, calibration=Calibration(stats=stats), device=device, dtype=dtype, progress=False
    )
    result = redundancy(args, text, track)
    if result is None:
        raise MoesaicError(f"{model} can lose neither experts nor neurons of each.")
    return result


def looking(model: Built) -> list[Stage]:
    """What :func:`observed_redundancy` takes: a mixture itself and a branch for each change."""
    if not any(use.experts for use in model.size.layers):
        return []
    return [comparing(model, 2 * len(PARTS), WINDOWS * MethodConfig.window)]


def _figures(stats: StatsFile) -> tuple[float | None, float, float]:
    """The means over layers of a mixture's ``alike``, ``half`` and ``flat``."""
    alike, half, flat = list[float](), list[float](), list[float]()
    for i in stats.layers:
        layer = stats.layer(i)
        if len(layer.gram_SP):
            gram_SAA = unpacked(layer.gram_SP[:TOKENS], layer.weighed)
            alike.append(cosine(gram_SAA[:, : layer.experts, : layer.experts]))
        written_EM = layer.neurons.energy_EM * layer.neurons.reach_EM.square()
        top_EM = written_EM.topk(written_EM.shape[1] // 2, dim=1).values
        half.append((top_EM.sum() / written_EM.sum().clamp(min=1e-300)).item())
        share_E = layer.calls_E.double() / max(1, int(layer.calls_E.sum()))
        flat.append(torch.special.entr(share_E).sum().item() / math.log(max(2, layer.experts)))
    return fmean(alike) if alike else None, fmean(half), fmean(flat)


def cosine(gram_SEE: Tensor) -> float:
    """The mean cosine of the outputs of two different experts.

    Args:
        gram_SEE: inner products of all experts' outputs on some tokens.

    >>> cosine(torch.tensor([[[4.0, 2.0], [2.0, 1.0]], [[1.0, 0.0], [0.0, 9.0]]]))
    0.5
    """
    norm_SE = gram_SEE.diagonal(dim1=1, dim2=2).clamp(min=1e-30).sqrt()
    cosine_SEE = gram_SEE / norm_SE[:, :, None] / norm_SE[:, None]
    experts = gram_SEE.shape[1]
    others_S = cosine_SEE.sum((1, 2)) - experts
    return others_S.mean().item() / (experts * (experts - 1))
