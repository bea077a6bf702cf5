"""Plans of mixtures recovered in closed form.

One more pass over the layers: how many experts stay, or which layers are condensed, is known only
after all were looked at. Carved layers are refitted as they are decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from moesaic.foreign import JSON
from moesaic.plan import Plan
from moesaic.stream.job import Finished, Job
from moesaic.surgery import applied


@torch.no_grad()
def recover(
    job: Job[Any],
    plans: Mapping[str, Plan],
    finished: Finished,
    *,
    propagate: bool = False,
) -> tuple[dict[str, Plan], dict[int, JSON]]:
    """Refit every layer of some plans of one model; see :meth:`LayerPlan.refit`.

    Where there are several processes each does all of it, with the same result.

    Args:
        job: the model and the calibration tokens.
        plans: by name; "result" is the one that matters.
        finished: layers that were refitted before, and where new ones are kept.
        propagate: fit each layer on what the converted layers before it pass on; of one plan.

    Returns:
        the plans, and by layer of "result" ``lost``, ``recovered`` and ``strength`` for the record.

    Raises:
        MoesaicError: layers of some plan's kind are not refitted.
    """

    layers = sorted({i for plan in plans.values() for i in plan.layers})
    wanted = {(name, i) for name, plan in plans.items() for i in plan.layers}
    if not all((f"{name}-refit", i) in finished for name, i in wanted):
        stream = job.stream(layers, job.arch.view, follow=propagate)
        for site in job.args.track(stream, "Refitting layers", len(layers)):
            i = site.index
            for name, plan in plans.items():
                if (name, i) in wanted and (f"{name}-refit", i) not in finished:
                    layer, found = plan.layers[i].refit(site)
                    finished.add(f"{name}-refit", i, layer, found)
            if propagate:
                site.change = applied(site.layer, job.arch, finished["result-refit", i][0])
    refit = {
        name: replace(plan, layers={i: finished[f"{name}-refit", i][0] for i in plan.layers})
        for name, plan in plans.items()
    }
    return refit, {i: finished["result-refit", i][1] for i in plans["result"].layers}
