"""Methods that decide layer by layer: one run and one outline for all of them.

A method says what layers may become (``sizes``), what statistics it ``needs``, what it would make
of a layer at each size (``decide``), and where a budget goes (``allocate``). Everything else is
here: the model or a file of statistics, layers that were decided before, several processes,
comparisons, the refit, and what can be told beforehand, by the same ``decide``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from moesaic.foreign import JSON
from moesaic.layers.base import LayerPlan
from moesaic.methods.base import A, C, Decision, Method, Outline
from moesaic.methods.refit import recover, settled
from moesaic.observation.job import Finished, Job
from moesaic.observation.layers import Cost, LayerStats, Observation, cost_of
from moesaic.observation.stream import Site
from moesaic.plan import Plan

S = TypeVar("S")
"""What a layer may become, such as a number of experts."""
RESULT = "result"
"""The name of what was asked for, beside its comparisons."""
Made = Mapping[S, tuple[LayerPlan, JSON]]
"""By size a layer's plan, and what was seen on the way; of losses ``relative_loss``."""


@dataclass
class Case(Generic[A]):
    """One layer that is to be decided."""

    index: int
    job: Job[A]
    stats: LayerStats | None
    """What was observed; None where nothing is known but the layer's shape."""
    site: Site[Any] | None = None
    """The layer and its tokens, where ``needs`` asked for them."""

    @property
    def view(self) -> Any:
        """The layer's view; without values where the model is on disk."""
        return self.job.arch.view(self.job.layers[self.index])


class LayerMethod(Method[C, A], Generic[C, A, S]):
    """Decides on one layer after the other."""

    words: ClassVar[str] = "Deciding layers"
    """For the progress bar."""

    # --- what a method says ----------------------------------------------------------------------

    @abstractmethod
    def sizes(self, job: Job[A]) -> Mapping[int, Sequence[S]]:
        """What each layer that is decided may become; only shapes are looked at.

        Raises:
            MoesaicError: the request cannot be met.
        """

    @property
    @abstractmethod
    def needs(self) -> Collection[str]:
        """The statistics that :meth:`decide` reads, of :data:`moesaic.observation.layers.NEEDS`."""

    @property
    def gram_bytes(self) -> int:
        """Memory for the Gram matrices of one layer's experts."""
        return 0

    @abstractmethod
    def decide(self, case: Case[A], sizes: Sequence[S]) -> Made[S]:
        """What a layer becomes at each size.

        Args:
            case: the layer. Without statistics that it needs: any decision that weighs as much.
            sizes: of :meth:`sizes`.
        """

    def allocate(self, losses: Mapping[int, Mapping[S, float]]) -> Mapping[int, S]:
        """The size that each layer gets.

        Args:
            losses: by layer and size the ``relative_loss``; 0 where none was told.
        """
        return {i: next(iter(of_layer)) for i, of_layer in losses.items()}

    def tag(self, size: S) -> str:
        """A size in the name of a file."""
        return str(size)

    def finish(self, job: Job[A], layers: Mapping[int, LayerPlan]) -> Mapping[int, LayerPlan]:
        """A plan's layers, once all are known."""
        return layers

    def summary(self, job: Job[A], losses: Mapping[int, Mapping[S, float]]) -> JSON:
        """What was found of the whole model, as plain JSON."""
        return {}

    def check(self, job: Job[A]) -> None:
        """Refuse what cannot go together in one run.

        Raises:
            MoesaicError: says what.
        """

    def passing_on(
        self, site: Site[Any], layer: LayerPlan
    ) -> AbstractContextManager[nn.Module | None]:
        """Of options that are ``progressive``: inside, a layer passes on what it became makes."""
        raise NotImplementedError

    def work(self, job: Job[A], sizes: Mapping[int, Sequence[S]]) -> float:
        """Operations that deciding takes beside observing, per calibration token."""
        return 0.0

    # --- the run ---------------------------------------------------------------------------------

    def settle(self, job: Job[A]) -> Iterator[str]:
        if "refit" in vars(self.config):
            config: Any = self.config
            refit, why_not = settled(job, config.refit)
            self.config = replace(config, refit=refit)
            yield from filter(None, [why_not])

    def _option(self, name: str) -> Any:
        """An option that some configs have."""
        return getattr(self.config, name, False)

    @torch.no_grad()
    def run(self, job: Job[A]) -> Decision:
        config, sizes = self.config, self.sizes(job)
        methods = self.compared(job.args.compare) | {RESULT: self}
        self.check(job)
        needs = {name for method in methods.values() for name in method.needs}
        gram_bytes = max(method.gram_bytes for method in methods.values())
        observation = Observation(job, needs, gram_bytes)
        calibration, refit = observation.calibration, bool(self._option("refit"))
        request = {
            "config": asdict(config),
            "compare": list(job.args.compare),
            "stats": observation.file,
            "calibration": job.tokens.fingerprint if refit else calibration,
        }
        finished = job.finished(request)
        self._decide(job, methods, sizes, observation, finished)
        plans, losses, analyses = {}, {}, {}
        for name, method in methods.items():
            losses = {
                i: {s: method._loss(finished, name, s, i) for s in options}
                for i, options in sizes.items()
            }
            chosen = method.allocate(losses)
            made = {i: finished[method._key(name, s), i] for i, s in chosen.items()}
            layers = method.finish(job, {i: layer for i, (layer, _) in made.items()})
            plans[name] = Plan(config.name, job.base, layers, asdict(method.config), calibration)
            analyses = {i: seen for i, (_, seen) in made.items()}  # RESULT is the last
        if refit:
            follow = bool(self._option("progressive"))
            plans, found = recover(job, plans, finished, propagate=follow)
            analyses = {i: {**seen, "refit": found[i]} for i, seen in analyses.items()}
        return Decision(plans.pop(RESULT), analyses, plans, self.summary(job, losses))

    def _decide(
        self,
        job: Job[A],
        methods: Mapping[str, LayerMethod[C, A, S]],
        sizes: Mapping[int, Sequence[S]],
        observation: Observation,
        finished: Finished,
    ) -> None:
        """Decide on every layer that is not finished, for all comparisons and sizes."""
        missing = {
            i
            for i, options in sizes.items()
            for name, method in methods.items()
            if any((method._key(name, size), i) not in finished for size in options)
        }
        if not missing:
            return
        follow = bool(self._option("progressive"))
        seen = observation.layers(sorted(sizes if follow else missing), follow)
        for i, stats, site in job.track(seen, self.words, len(sizes if follow else missing)):
            if i in missing:
                case = Case(i, job, stats, site)
                for name, method in methods.items():
                    for size, (layer, analysis) in method.decide(case, sizes[i]).items():
                        finished.add(method._key(name, size), i, layer, analysis)
            if follow and site is not None:
                layer, _ = finished[self._key(RESULT, sizes[i][0]), i]
                site.change = self.passing_on(site, layer)

    def _key(self, name: str, size: S) -> str:
        """The name under which a layer of a size is kept."""
        return f"{name}-{self.tag(size)}"

    def _loss(self, finished: Finished, name: str, size: S, layer: int) -> float:
        loss: float = finished[self._key(name, size), layer][1].get("relative_loss", 0.0)
        return loss

    # --- beforehand ------------------------------------------------------------------------------

    @torch.no_grad()
    def outline(self, job: Job[A]) -> Outline:
        """What :meth:`decide` makes of layers of which nothing is known but their shapes."""
        sizes = self.sizes(job)
        made = {i: self.decide(Case(i, job, None), options) for i, options in sizes.items()}
        losses = {
            i: {size: seen.get("relative_loss", 0.0) for size, (_, seen) in of_layer.items()}
            for i, of_layer in made.items()
        }
        chosen = self.allocate(losses)
        layers = self.finish(job, {i: made[i][size][0] for i, size in chosen.items()})
        cost: Cost = cost_of(self.needs, job, list(sizes), self.gram_bytes)
        refit = bool(self._option("refit")) * (2 + bool(self._option("progressive")))
        return Outline(
            Plan(self.config.name, job.base, layers, asdict(self.config)),
            exact=all(len(options) == 1 for options in sizes.values()),
            passes=cost.passes + refit,
            work=cost.work + self.work(job, sizes),
            held=cost.held,
        )
