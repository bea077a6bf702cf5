"""Refit of plans of mixtures in closed form, after all layers were decided.

Needed if a layer's plan depends on all layers, as the number of kept experts or the choice of
condensed layers may; it takes one more pass. Other layers are refitted as they are decided.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from moesaic.arch.dense import Arch
from moesaic.arch.mixture import FFN
from moesaic.modules.running import LayerTokens
from moesaic.observation.job import Finished, Job
from moesaic.plan import Plan
from moesaic.plans.base import LayerPlan
from moesaic.surgery import applied
from moesaic.types import JSON


@torch.no_grad()
def recover(
    job: Job[Arch],
    plans: Mapping[str, Plan],
    finished: Finished,
    *,
    propagate: bool = False,
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
        the refitted plans, and by plan and layer ``lost``, ``recovered`` and ``strength``.

    Raises:
        MoesaicError: layers of some plan's kind cannot be refitted.
    """
    layers = sorted({i for plan in plans.values() for i in plan.layers})
    missing = {
        i: [
            name
            for name, plan in plans.items()
            if i in plan.layers and (refit_name(name), i) not in finished
        ]
        for i in layers
    }

    def refitted(site: LayerTokens[FFN]) -> tuple[int, dict[str, tuple[LayerPlan, JSON]]]:
        i = site.index
        results = {name: plans[name].layers[i].refit(site) for name in missing[i]}
        if propagate:
            layer = results["result"] if "result" in results else finished[refit_name("result"), i]
            site.change = applied(site.layer, job.arch, layer[0])
        return i, results

    def source(indices: Sequence[int]) -> Iterable[LayerTokens[FFN]]:
        return job.stream(indices, job.arch.view, follow=propagate)

    if any(missing.values()):
        indices = layers if propagate else [i for i in layers if missing[i]]
        words, shared = "Refitting layers", not propagate
        for i, results in job.each_layer(indices, source, refitted, words, shared=shared):
            for name, (layer, figures) in results.items():
                finished.add(refit_name(name), i, layer, figures)
    recovered = {
        name: replace(plan, layers={i: finished[refit_name(name), i][0] for i in plan.layers})
        for name, plan in plans.items()
    }
    return recovered, {
        name: {i: finished[refit_name(name), i][1] for i in plan.layers}
        for name, plan in plans.items()
    }


def refit_name(name: str) -> str:
    """Return the key of a plan's refitted layers."""
    return f"{name}-refit"
