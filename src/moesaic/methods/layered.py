"""Methods that decide layer by layer: one run and one outline for all of them.

A method says what layers may become (``sizes``), what statistics it ``needs`` or makes itself
(``observe``), what it would make of a layer at each size (``decide``), and where a budget goes
(``allocate``). Everything else is here: the model or a file of statistics, layers that were decided
before, several processes, comparisons, the refit, and what can be told beforehand, by the same
``decide``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from moesaic.arch.dense import FFN
from moesaic.methods.base import A, C, Decision, Method, Outline
from moesaic.methods.refit import recover, refit_name
from moesaic.observation.branches import divergences
from moesaic.observation.job import Finished, Job
from moesaic.observation.processes import each_layer
from moesaic.observation.stats import (
    LayerStats,
    Observation,
    Observed,
    bytes_of,
    shows_tokens,
)
from moesaic.observation.stream import Site
from moesaic.plan import Plan
from moesaic.plans.base import LayerPlan
from moesaic.plans.regression import significantly_worse
from moesaic.types import JSON

S = TypeVar("S")
"""What a layer may become, such as a number of experts."""
RESULT = "result"
"""The name of what was asked for, beside its comparisons."""
Decided = Mapping[S, tuple[LayerPlan, JSON]]
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
    statistic: Any = None
    """What the method's ``observe`` made of them."""

    @property
    def view(self) -> FFN:
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
        """The statistics that :meth:`decide` reads, of :data:`moesaic.observation.stats.NEEDS`."""

    @property
    def gram_bytes(self) -> int:
        """Memory for the Gram matrices of one layer's experts."""
        return 0

    def observe(self, site: Site[Any]) -> Any:
        """A statistic of the method's own, from a layer's tokens; the same for all comparisons."""

    @abstractmethod
    def decide(self, case: Case[A], sizes: Sequence[S]) -> Decided[S]:
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

    def rivals(self) -> Mapping[str, LayerMethod[C, A, S]]:
        """Simpler alternatives with the same budget, by name.

        All are compared by KL on held-out windows. This method's result is used only if every
        alternative is :func:`~moesaic.plans.regression.significantly_worse`; otherwise the best
        alternative is."""
        return {}

    def tag(self, size: S) -> str:
        """A size in the name of a file."""
        return str(size)

    def finish(self, job: Job[A], layers: Mapping[int, LayerPlan]) -> Mapping[int, LayerPlan]:
        """A plan's layers, once all are known."""
        return layers

    def summary(self, job: Job[A], losses: Mapping[int, Mapping[S, float]]) -> JSON:
        """What was found of the whole model, as plain JSON."""
        return {}

    def passing_on(
        self, site: Site[FFN], layer: LayerPlan
    ) -> AbstractContextManager[nn.Module | None]:
        """Of options that are ``progressive``: inside, a layer passes on what it became makes."""
        raise NotImplementedError

    @property
    def final(self) -> bool:
        """What is decided of a layer of one size is what the plan holds: ``finish`` leaves it."""
        return True

    # --- the run ---------------------------------------------------------------------------------

    def _option(self, name: str) -> bool:
        """Whether an option that some configs have is on."""
        return bool(getattr(self.config, name, False))

    @torch.no_grad()
    def run(self, job: Job[A]) -> Decision:
        config = self.config
        methods: Mapping[str, LayerMethod[C, A, S]]
        rivals = self.rivals()
        held_out = job.held_back() if rivals else None
        methods = {RESULT: self, **rivals, **self.compared(job.args.compare)}
        sizes = {name: method.sizes(job) for name, method in methods.items()}
        needs = {name for method in methods.values() for name in method.needs}
        gram_bytes = max(method.gram_bytes for method in methods.values())
        observation = Observation(job, needs, gram_bytes)
        calibration, refit = observation.calibration, self._option("refit")
        text = calibration or (job.tokens.fingerprint if refit else "")
        request = {
            "verb": config.verb,
            "config": asdict(config),
            "compare": list(job.args.compare),
            "stats": observation.file,
            "text": job.text if refit or observation.reads_text else {"fingerprint": calibration},
        }
        finished = job.finished(request)
        self._decide(job, methods, sizes, observation, finished)
        plans, analyses, losses = {}, {}, {}
        for name, method in methods.items():
            decided = {
                i: {size: finished[method._key(name, size), i] for size in options}
                for i, options in sizes[name].items()
            }
            losses[name] = _losses(decided)
            chosen = {i: decided[i][size] for i, size in method.allocate(losses[name]).items()}
            layers = method.finish(job, {i: layer for i, (layer, _) in chosen.items()})
            plans[name] = Plan(config.name, job.base, layers, asdict(method.config), text)
            analyses[name] = {i: analysis for i, (_, analysis) in chosen.items()}
        if refit:
            follow = self._option("progressive")
            plans, refits = recover(job, plans, finished, propagate=follow)
            for name, of_plan in refits.items():
                analyses[name] = {
                    i: {**analysis, "refit": of_plan[i]} for i, analysis in analyses[name].items()
                }
        best, compared = RESULT, JSON()
        if held_out is not None:
            names = [RESULT, *rivals]
            stream = job.stream(list(sizes[RESULT]), job.arch.view, held_out)
            kl_CN = divergences(stream, [plans[name].layers for name in names], job.track)
            kls = dict(zip(names, kl_CN.mean(1).tolist(), strict=True))
            if not all(significantly_worse(rival_N, kl_CN[0]) for rival_N in kl_CN[1:]):
                best = min(rivals, key=lambda name: kls[name])
                self.config = methods[best].config
            compared = {"compared": kls, "kept": best}
        summary = {**methods[best].summary(job, losses[best]), **compared}
        others = {name: plans[name] for name in job.args.compare}
        return Decision(plans[best], analyses[best], others, summary)

    def _decide(
        self,
        job: Job[A],
        methods: Mapping[str, LayerMethod[C, A, S]],
        sizes: Mapping[str, Mapping[int, Sequence[S]]],
        observation: Observation,
        finished: Finished,
    ) -> None:
        """Decide on every layer that is not finished, for all comparisons and sizes."""
        missing: dict[int, list[str]] = {}
        for name, method in methods.items():
            for i, options in sizes[name].items():
                if any((method._key(name, size), i) not in finished for size in options):
                    missing.setdefault(i, []).append(name)
        if not missing:
            return
        follow = self._option("progressive")

        def decided(observed: Observed) -> tuple[int, dict[str, tuple[LayerPlan, JSON]]]:
            i, stats, site = observed
            results: dict[str, tuple[LayerPlan, JSON]] = {}
            statistic = self.observe(site) if site is not None and i in missing else None
            case = Case(i, job, stats, site, statistic)
            for name in missing.get(i, ()):
                method, options = methods[name], sizes[name][i]
                for size, decision in method.decide(case, options).items():
                    results[method._key(name, size)] = decision
                    if method._at_once(job, observation.needs, options):
                        assert site is not None
                        results[refit_name(name)] = decision[0].refit(site)
            if follow and site is not None:
                key = self._key(RESULT, sizes[RESULT][i][0])
                layer, _ = results[key] if key in results else finished[key, i]
                site.change = self.passing_on(site, layer)
            return i, results

        def source(layers: Sequence[int]) -> Iterator[Observed]:
            return observation.layers(layers, follow)

        indices = sorted(sizes[RESULT] if follow else missing)
        shared = observation.whole and not follow
        for i, results in each_layer(job, indices, source, decided, self.words, shared=shared):
            for name, (layer, analysis) in results.items():
                finished.add(name, i, layer, analysis)

    def _at_once(self, job: Job[A], needs: Collection[str], options: Sequence[S]) -> bool:
        """Whether a layer is refitted as it is decided, on the tokens that are at hand."""
        alone = len(options) == 1 and self.final and not self._option("progressive")
        return self._option("refit") and alone and shows_tokens(job, needs)

    def _key(self, name: str, size: S) -> str:
        """The name under which a layer of a size is kept."""
        return f"{name}-{self.tag(size)}"

    # --- beforehand ------------------------------------------------------------------------------

    @torch.no_grad()
    def outline(self, job: Job[A]) -> Outline:
        """What :meth:`decide` makes of layers of which nothing is known but their shapes."""
        sizes = self.sizes(job)
        decided = {i: self.decide(Case(i, job, None), options) for i, options in sizes.items()}
        # what is spent by layer will differ: as if each lost more than the one before
        losses = {
            i: {size: loss * (1 + n) for size, loss in of_layer.items()}
            for n, (i, of_layer) in enumerate(_losses(decided).items())
        }
        chosen = self.allocate(losses)
        layers = self.finish(job, {i: decided[i][size][0] for i, size in chosen.items()})
        return Outline(
            Plan(self.config.name, job.base, layers, asdict(self.config)),
            exact=all(len(options) == 1 for options in sizes.values()),
            statistics=bytes_of(self.needs, job, list(sizes), self.gram_bytes),
            backward="curvature" in self.needs,
        )


def _losses(decided: Mapping[int, Decided[S]]) -> dict[int, dict[S, float]]:
    """What was told of every layer and size."""
    return {
        i: {
            size: float(analysis.get("relative_loss", 0.0))
            for size, (_, analysis) in of_layer.items()
        }
        for i, of_layer in decided.items()
    }
