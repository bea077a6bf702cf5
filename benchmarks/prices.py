"""The function of prices.yaml: estimated KL of every alternative of a model beside measured KL."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from moesaic.arch.lookup import base_arch
from moesaic.config import Calibration
from moesaic.errors import MoesaicError
from moesaic.fitting.candidates import KINDS, QUANTISE
from moesaic.fitting.config import FitConfig
from moesaic.fitting.prices import key_of, priced_configs
from moesaic.fitting.search import Search
from moesaic.observation.changes import divergences
from moesaic.observation.job import Job
from moesaic.recipe import Recipe

TYPES = ("q8_0", "q4_k_m", "q3_k_m", "q2_k", "iq2_xxs")
WINDOWS = 16


def compared(model: str, out: str) -> dict[str, dict[str, object]]:
    """By kind of change how estimates of a model's alternatives compare with measured KL."""
    work = Path(out)
    work.mkdir()
    recipe = Recipe(model, str(work / "out"), (), Calibration(samples=64, length=256))
    search = Search(recipe, FitConfig(memory=1 << 40), work)
    with suppress(MoesaicError):  # llama.cpp may be missing, or not know the model
        search = Search(recipe, FitConfig(memory=1 << 40, types=TYPES), work)
    prices, plans = search.prices, search.trials.plans(priced_configs(search.forms))
    found = [(KINDS[c.verb], prices.steps[key_of(c)].kl, plan) for c, plan in plans.items()]
    if search.files:
        quantised = search.files.original.quantised
        kls = (prices.types[t][group].kl for group in quantised.groups for t in prices.types)
        changes = quantised.changes([*prices.types])
        found += [(QUANTISE, kl, change) for kl, change in zip(kls, changes, strict=True)]
    text = search.texts.both[1].rows(slice(WINDOWS))
    job = Job(replace(search.trials.args(), text=text), base_arch)
    stream = job.stream((), lambda layer: layer)
    measured = divergences(stream, [change for *_, change in found]).mean(1).tolist()
    pairs = defaultdict[str, list[tuple[float, float]]](list)
    for (kind, estimate, _), kl in zip(found, measured, strict=True):
        if kl > 0 < estimate < np.inf:
            pairs[kind].append((estimate, kl))
            pairs["all"].append((estimate, kl))
    return {kind: summary(np.array(of)) for kind, of in pairs.items()}


def summary(pairs_N2: np.ndarray) -> dict[str, object]:
    """Count, correlation and ratios of pairs of estimated and measured KL."""
    ratio_N = pairs_N2[:, 0] / pairs_N2[:, 1]
    low, median, high = np.quantile(ratio_N, [0.1, 0.5, 0.9]).tolist()
    r = float(np.corrcoef(np.log(pairs_N2).T)[0, 1])
    largest = float(pairs_N2[:, 1].max())
    return {"count": len(ratio_N), "r": r, "ratio": [low, median, high], "largest": largest}
