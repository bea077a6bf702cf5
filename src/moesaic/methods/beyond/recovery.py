"""Plans of mixtures recovered in closed form.

One more pass over the layers: how many experts stay, or which layers are condensed, is known only
after all were looked at. Carved layers are refitted as they are decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from moesaic.methods.beyond.refit import refitted
from moesaic.plan import Plan
from moesaic.progress import Track
from moesaic.result import Finished, Job
from moesaic.surgery import applied


@torch.no_grad()
def recover(
    job: Job,
    plans: Mapping[str, Plan],
    finished: Finished,
    track: Track,
    *,
    propagate: bool = False,
) -> tuple[dict[str, Plan], dict[int, dict[str, Any]]]:
    """Refit every layer of some plans of one model; see :mod:`moesaic.methods.beyond.refit`.

    Where there are several processes each does all of it, with the same result.

    Args:
        job: the model and the calibration tokens.
        plans: by name; "result" is the one that matters.
        finished: layers that were refitted before, and where new ones are kept.
        track: shows progress.
        propagate: fit each layer on what the converted layers before it pass on; of one plan.

    Returns:
        the plans, and what was recovered of each layer of "result".

    Raises:
        MoesaicError: the request cannot be met.
    """
    layers = sorted({i for plan in plans.values() for i in plan.layers})
    wanted = {(name, i) for name, plan in plans.items() for i in plan.layers}
    if not all((f"{name}-refit", i) in finished for name, i in wanted):
        for site in track(job.stream(layers, follow=propagate), "Refitting layers", len(layers)):
            i = site.index
            for name, plan in plans.items():
                if (name, i) in wanted and (f"{name}-refit", i) not in finished:
                    layer, found = refitted(plan.layers[i], site)
                    finished.add(f"{name}-refit", i, layer, found)
            if propagate:
                site.change = applied(site.layer, job.arch, finished["result-refit", i][0])
    refit = {
        name: replace(plan, layers={i: finished[f"{name}-refit", i][0] for i in plan.layers})
        for name, plan in plans.items()
    }
    return refit, {i: finished["result-refit", i][1] for i in plans["result"].layers}
