"""Run and outline shared by all methods that decide layer by layer.

A method defines the ``sizes`` a layer may have, the names of the statistics that it ``needs``,
those that it computes itself (``observe``), the plan of a layer at each size (``decide``), and how
a budget is divided (``allocate``). Everything else is here: the model or a file of statistics,
layers decided before, several processes, comparisons, the refit, and the outline, made by the same
``decide``.

If a layer's plan depends on all layers, as the number of kept experts may, plans are refitted
after all layers were decided (:func:`recover`), in one more pass. Others are refitted as they are
decided.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch

from moesaic.arch.dense import Arch
from moesaic.arch.mixture import FFN, MoEFFN
from moesaic.arch.routing import RoutingFunction
from moesaic.losses import significantly_worse
from moesaic.methods.base import A, C, Decision, Method, Outline
from moesaic.modules.running import LayerTokens
from moesaic.observation.changes import divergences, layer_replacement
from moesaic.observation.files import Observation, Observed
from moesaic.observation.job import Job
from moesaic.observation.stats import Stats, Tally, bytes_of
from moesaic.plan import Plan, Progress
from moesaic.plans.base import LayerPlan
from moesaic.surgery import converted_copy
from moesaic.types import JSON


@torch.no_grad()
def recover(
    job: Job[Arch], plans: Mapping[str, Plan], finished: Progress, *, propagate: bool = False
) -> tuple[dict[str, Plan], dict[str, dict[int, JSON]]]:
    """Refit every layer of several plans of one model; see :meth:`LayerPlan.refit`.

    Several processes share the layers, unless each layer needs those before it.

    Args:
        job: the model and the calibration tokens.
        plans: by name; "result" is the one to write.
        finished: store of refitted layers; new ones are added.
        propagate: fit each layer on the output of the converted layers before it; for a single
            plan.

    Returns:
        the refitted plans, and by plan and layer the figures of
        :meth:`~moesaic.plans.base.LayerPlan.refit`.

    Raises:
        MoesaicError: layers of some plan's kind cannot be refitted.
    """
    layers = sorted({i for plan in plans.values() for i in plan.layers})
    missing = {
        i: [
            name
            for name, plan in plans.items()
            if i in plan.layers and (_refit_name(name), i) not in finished
        ]
        for i in layers
    }

    def refitted(site: LayerTokens[FFN]) -> tuple[int, dict[str, tuple[LayerPlan, JSON]]]:
        i = site.index
        results = {name: plans[name].layers[i].refit(site) for name in missing[i]}
        if propagate:
            layer = results["result"] if "result" in results else finished[_refit_name("result"), i]
            site.change = converted_copy(site.layer, job.arch, layer[0])
        return i, results

    def source(indices: Sequence[int]) -> Iterable[LayerTokens[FFN]]:
        return job.stream(indices, job.arch.view, follow=propagate)

    if any(missing.values()):
        indices = layers if propagate else [i for i in layers if missing[i]]
        words, shared = "Refitting layers", not propagate
        for i, results in job.each_layer(indices, source, refitted, words, shared=shared):
            for name, (layer, figures) in results.items():
                finished.add(_refit_name(name), i, layer, figures)
    recovered = {
        name: replace(plan, layers={i: finished[_refit_name(name), i][0] for i in plan.layers})
        for name, plan in plans.items()
    }
    return recovered, {
        name: {i: finished[_refit_name(name), i][1] for i in plan.layers}
        for name, plan in plans.items()
    }


def _refit_name(name: str) -> str:
    """Return the key of a plan's refitted layers."""
    return f"{name}-refit"


# --- layer by layer ------------------------------------------------------------------------------


S = TypeVar("S")
"""Size of a layer, such as a number of experts."""
RESULT = "result"
"""Name of the requested result, beside its comparisons."""
Decided = Mapping[S, tuple[LayerPlan, JSON]]
"""Plan and observations of a layer by size; ``relative_loss`` is the loss used by ``allocate``."""


@dataclass
class LayerCase(Generic[A]):
    """Layer to decide, with its statistics and tokens."""

    index: int
    job: Job[A]
    stats: Stats | None
    """Statistics of the layer by name; None if only its shape is known, as in a dry run."""
    site: LayerTokens[Any] | None = None
    """Layer and its tokens, if ``needs`` includes them."""

    @property
    def view(self) -> FFN:
        """View of the layer's FFN; without values if the model is on disk."""
        return self.job.arch.view(self.job.layers[self.index])

    @property
    def routing(self) -> RoutingFunction:
        """Routing function of a layer that routes, ready to decide on recorded logits.

        Its layer may be closed.
        """
        view, job = self.view, self.job
        assert isinstance(view, MoEFFN)
        start, routing = f"{job.arch.layer_prefix(self.index)}{job.arch.inside}", view.routing
        routing.fill(lambda name, _: job.naming.read(start + name))
        if routing.bias_E is not None and self.stats is not None and "bias_E" in self.stats:
            routing.bias_E = self.stats["bias_E"]
        return routing


class LayerMethod(Method[C, A], Generic[C, A, S]):
    """Base class of methods that decide one layer after the other."""

    words: ClassVar[str] = "Deciding layers"
    """Label of the progress bar."""

    # --- what a method defines -------------------------------------------------------------------

    @abstractmethod
    def sizes(self, job: Job[A]) -> Mapping[int, Sequence[S]]:
        """Return the sizes that each decided layer may have; only shapes are read.

        Raises:
            MoesaicError: the request cannot be met.
        """

    @property
    @abstractmethod
    def needs(self) -> Collection[str]:
        """Names of the statistics that :meth:`decide` reads: of :mod:`moesaic.observation.stats`,
        and those of :meth:`observe`; ``tokens`` for the layer with all its tokens."""

    @property
    def gram_bytes(self) -> int:
        """Memory for the Gram matrices of one layer's experts."""
        return 0

    def statistics_bytes(self, view: FFN, tokens: int) -> int:
        """Return the bytes of a layer's statistics over some tokens, from its shapes."""
        return bytes_of(self.needs, view, tokens, self.gram_bytes)

    def observe(self, site: LayerTokens[Any], tally: Tally) -> None:
        """Add the method's own statistics of a layer's tokens; comparisons share them.

        Args:
            site: the layer, and this process's tokens.
            tally: statistics of the layer.
        """

    @abstractmethod
    def decide(self, case: LayerCase[A], sizes: Sequence[S]) -> Decided[S]:
        """Return the plan of a layer at each size.

        Args:
            case: the layer. If statistics are missing, any plan of the same size is returned.
            sizes: of :meth:`sizes`.
        """

    def allocate(self, losses: Mapping[int, Mapping[S, float]]) -> Mapping[int, S]:
        """Return the size that each layer gets.

        Args:
            losses: ``relative_loss`` by layer and size; 0 if a method gives none.
        """
        return {i: next(iter(of_layer)) for i, of_layer in losses.items()}

    def alternatives(self) -> Mapping[str, LayerMethod[C, A, S]]:
        """Simpler alternatives with the same budget, by name.

        All are compared by KL on held-out windows. This method's result is used only if every
        alternative is :func:`~moesaic.losses.significantly_worse`; otherwise the best
        alternative is."""
        return {}

    def tag(self, size: S) -> str:
        """Return a size as part of a file's name."""
        return str(size)

    def summary(self, job: Job[A], losses: Mapping[int, Mapping[S, float]]) -> JSON:
        """Return observations about the whole model, as plain JSON."""
        return {}

    # --- the run ---------------------------------------------------------------------------------

    def _option(self, name: str) -> bool:
        """Return True if the config has an option of this name and it is on."""
        return bool(getattr(self.config, name, False))

    @torch.no_grad()
    def run(self, job: Job[A]) -> Decision:
        config = self.config
        methods: Mapping[str, LayerMethod[C, A, S]]
        alternatives = self.alternatives()
        held_out = job.held_back() if alternatives else None
        methods = {RESULT: self, **alternatives, **self.compared(job.args.compare)}
        sizes = {name: method.sizes(job) for name, method in methods.items()}
        needs = {name for method in methods.values() for name in method.needs}
        gram_bytes = max(method.gram_bytes for method in methods.values())
        observation = Observation(job, needs, gram_bytes, self.observe)
        calibration, refit = observation.calibration, self._option("refit")
        text = calibration or (job.tokens.fingerprint if refit else "")
        request = {
            **job.request_of(config),
            "compare": list(job.args.compare),
            "stats": observation.file,
            "text": job.text if refit or observation.reads_text else {"fingerprint": calibration},
        }
        finished = Progress(job.args.resume_from, job.request(request))
        self._decide(job, methods, sizes, observation, finished)
        plans, analyses, losses = {}, {}, {}
        for name, method in methods.items():
            decided = {
                i: {size: finished[method._key(name, size), i] for size in options}
                for i, options in sizes[name].items()
            }
            losses[name] = _losses(decided)
            chosen = {i: decided[i][size] for i, size in method.allocate(losses[name]).items()}
            layers = {i: layer for i, (layer, _) in chosen.items()}
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
            names = [RESULT, *alternatives]
            stream = job.stream(list(sizes[RESULT]), job.arch.view, held_out)
            kl_CN = divergences(stream, [plans[name].layers for name in names], job.track)
            kls = dict(zip(names, kl_CN.mean(1).tolist(), strict=True))
            if not all(significantly_worse(rival_N, kl_CN[0]) for rival_N in kl_CN[1:]):
                best = min(alternatives, key=lambda name: kls[name])
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
        finished: Progress,
    ) -> None:
        """Decide every unfinished layer, for all comparisons and sizes."""
        missing: dict[int, list[str]] = {}
        for name, method in methods.items():
            for i, options in sizes[name].items():
                if any((method._key(name, size), i) not in finished for size in options):
                    missing.setdefault(i, []).append(name)
        if not missing:
            return
        refit, follow = self._option("refit"), self._option("progressive")

        def decided(observed: Observed) -> tuple[int, dict[str, tuple[LayerPlan, JSON]]]:
            i, stats, site = observed
            results: dict[str, tuple[LayerPlan, JSON]] = {}
            case = LayerCase(i, job, stats, site)
            for name in missing.get(i, ()):
                method, options = methods[name], sizes[name][i]
                for size, decision in method.decide(case, options).items():
                    results[method._key(name, size)] = decision
                    # nothing changes it later, and its tokens are in memory
                    once = len(options) == 1 and not follow
                    if refit and once and observation.shows_tokens:
                        assert site is not None
                        results[_refit_name(name)] = decision[0].refit(site)
            if follow and site is not None:
                key = self._key(RESULT, sizes[RESULT][i][0])
                layer, _ = results[key] if key in results else finished[key, i]
                site.change = layer_replacement(site.layer, job.arch, layer)
            return i, results

        def source(layers: Sequence[int]) -> Iterator[Observed]:
            return observation.layers(layers, follow)

        indices = sorted(sizes[RESULT] if follow else missing)
        shared = observation.whole and not follow
        for i, results in job.each_layer(indices, source, decided, self.words, shared=shared):
            for name, (layer, analysis) in results.items():
                finished.add(name, i, layer, analysis)

    def _key(self, name: str, size: S) -> str:
        """Return the name under which a layer's decision at a size is stored."""
        return f"{name}-{self.tag(size)}"

    # --- the outline -----------------------------------------------------------------------------

    @torch.no_grad()
    def outline(self, job: Job[A]) -> Outline:
        """Outline a run by :meth:`decide` on layers of which only the shapes are known."""
        sizes = self.sizes(job)
        decided = {i: self.decide(LayerCase(i, job, None), options) for i, options in sizes.items()}
        # sizes will differ by layer: assume that each layer's loss is above that of the one before
        losses = {
            i: {size: loss * (1 + n) for size, loss in of_layer.items()}
            for n, (i, of_layer) in enumerate(_losses(decided).items())
        }
        chosen = self.allocate(losses)
        layers = {i: decided[i][size][0] for i, size in chosen.items()}
        views, tokens = [job.arch.view(job.layers[i]) for i in sizes], job.planned_tokens
        held = (self.statistics_bytes(view, tokens) for view in views)
        return Outline(
            Plan(self.config.name, job.base, layers, asdict(self.config)),
            exact=all(len(options) == 1 for options in sizes.values()),
            statistics=max(held, default=0),
        )


def _losses(decided: Mapping[int, Decided[S]]) -> dict[int, dict[S, float]]:
    """Return the ``relative_loss`` of every layer and size, 0 if a decision has none."""
    return {
        i: {
            size: float(analysis.get("relative_loss", 0.0))
            for size, (_, analysis) in of_layer.items()
        }
        for i, of_layer in decided.items()
    }
