"""Estimated KL of every alternative of a model beside its measured KL, by kind of change.

    python benchmarks/prices.py tiny-moe tiny-dense FOLDER     writes prices.json

Alternatives are those of `fit`, before any refit; of types only where llama.cpp is there and knows
the model. KL is measured by :func:`moesaic.observation.changes.divergences`, on 16 of the windows
that choose. r is the correlation of logarithms; ratios are estimated over measured: the median and
the tenths. A model that is in the file is not measured again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
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
from moesaic.metrics.speed import environment
from moesaic.observation.changes import divergences
from moesaic.observation.job import Job
from moesaic.recipe import Recipe

OUT = Path(__file__).with_suffix(".json")
TYPES = ("q8_0", "q4_k_m", "q3_k_m", "q2_k", "iq2_xxs")
WINDOWS = 16


def compared(model: str, work: Path) -> dict[str, dict[str, object]]:
    """Return by kind of change how estimates of a model's alternatives compare with measured KL."""
    recipe = Recipe(model, str(work / "out"), (), Calibration(samples=64, length=256))
    search = Search(recipe, FitConfig(memory=1 << 40), work)
    with suppress(MoesaicError):  # llama.cpp may be missing, or not know the model
        search = Search(recipe, FitConfig(memory=1 << 40, types=TYPES), work)
    prices, plans = search.prices, search.trials.plans(priced_configs(search.forms))
    found = [(KINDS[c.verb], prices.steps[key_of(c)].kl, plan) for c, plan in plans.items()]
    if search.files:
        rounder = search.files.original.rounder
        kls = (prices.types[t][group].kl for group in rounder.groups for t in prices.types)
        changes = rounder.changes([*prices.types])
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
    """Return count, correlation and ratios of pairs of estimated and measured KL."""
    ratio_N = pairs_N2[:, 0] / pairs_N2[:, 1]
    low, median, high = np.quantile(ratio_N, [0.1, 0.5, 0.9]).tolist()
    r = float(np.corrcoef(np.log(pairs_N2).T)[0, 1])
    largest = float(pairs_N2[:, 1].max())
    return {"count": len(ratio_N), "r": r, "ratio": [low, median, high], "largest": largest}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="+")
    models = parser.parse_args().models
    record = json.loads(OUT.read_text()) if OUT.is_file() else {"rows": {}}
    record |= {"command": "python benchmarks/prices.py MODEL...", "made_by": environment("cpu")}
    for model in models:
        if (name := Path(model).name) not in record["rows"]:
            with tempfile.TemporaryDirectory() as work:
                record["rows"][name] = compared(model, Path(work))
            OUT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
