"""The price table: the estimated KL of every alternative of a model, kept in a file.

Alternatives are configs of methods, each with the layers that it would make, and types of groups
of tensors. All are estimated in one pass forward and one backward
(:mod:`moesaic.observation.estimates`), with one layer in memory, and answer any budget.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moesaic.arch.dense import Arch
from moesaic.config import MethodConfig
from moesaic.errors import MoesaicError
from moesaic.exports.mixed import Sensitivities
from moesaic.exports.rounder import DRAWS, Rounder
from moesaic.families import Family
from moesaic.fitting.forms import Form, places_priced
from moesaic.fitting.sizes import steps_as_json
from moesaic.io.headers import mapping_of, reading
from moesaic.io.outputs import whole_file
from moesaic.observation.branches import Change
from moesaic.observation.estimates import estimated
from moesaic.observation.job import Job
from moesaic.types import JSON, Track


@dataclass
class Prices:
    """Estimated KL, in nats a token, of alternatives of one model on one text."""

    request: JSON
    """The weights, text and type that they depend on."""
    steps: dict[str, float] = field(default_factory=dict)
    """By config as JSON; infinite for those that the model cannot have."""
    types: dict[str, dict[str, float]] = field(default_factory=dict)
    """By type of tensors, then by group."""

    @classmethod
    def load(cls, file: Path, request: JSON) -> Prices:
        """The table in a file; an empty one where there is no file.

        Raises:
            MoesaicError: the file is of another model or text, or damaged.
        """
        if not file.is_file():
            return cls(request)
        held = mapping_of(file)
        with reading(file, "Remove it, and the table is made anew."):
            other = [name for name, value in request.items() if held["request"].get(name) != value]
            steps = {
                key: math.inf if kl is None else float(kl) for key, kl in held["steps"].items()
            }
            prices = cls(request, steps, {t: dict(kl) for t, kl in held["types"].items()})
        if other:
            raise MoesaicError(
                f"{file} holds prices of another {' and '.join(other)}: name another file, or "
                "remove this one."
            )
        return prices

    def save(self, file: Path) -> None:
        """Write the table, whole or not at all."""
        steps = {key: kl if math.isfinite(kl) else None for key, kl in self.steps.items()}
        table = {"request": self.request, "steps": steps, "types": self.types}
        with whole_file(file) as partial:
            partial.write_text(json.dumps(table, indent=1), "utf-8")

    def of(self, form: Form, place: int) -> float:
        """KL of a form's recipe: the sum of its steps', as quickly made."""
        first = 0.0 if form.first is None else self.steps[key_of(form.first)]
        return first + self._of(form.family, place)

    def _of(self, family: Family[Any], place: int) -> float:
        """KL of a family's config, between those that were priced interpolated."""
        places = places_priced(family)
        kls = [self.steps[key_of(family.configs[n])] for n in places]
        known = [(n, kl) for n, kl in zip(places, kls, strict=True) if math.isfinite(kl)]
        if not known or place < known[0][0]:
            return math.inf
        at, kl = zip(*known, strict=True)
        return float(np.interp(float(place), [*map(float, at)], [*kl]))

    def sensitivities(self, types: Sequence[str]) -> Sensitivities:
        """KL by groups of tensors, of some of the types."""
        groups = [*self.types[types[0]]]
        kl_GC = np.array([[self.types[type][group] for type in types] for group in groups])
        return Sensitivities(tuple(groups), tuple(types), kl_GC)

    @torch.no_grad()
    def add(
        self,
        job: Job[Arch],
        plans: Mapping[MethodConfig, Change],
        types: Sequence[str],
        rounder: Rounder | None,
        track: Track,
    ) -> None:
        """Estimate what is not in the table.

        Args:
            job: the model, and the tokens to estimate on.
            plans: by config the layers that it makes.
            types: of tensors.
            rounder: of the model; None where no types are asked for.
            track: shows progress.
        """
        changes = rounder.changes(types) if rounder is not None and types else []
        stream = job.stream((), lambda layer: layer)
        kl_XN = estimated(stream, [*changes, *plans.values()], DRAWS, track=track)
        kls = kl_XN.mean(1).tolist()
        if rounder is not None and types:
            table = rounder.sensitivities(types, kls[: len(changes)])
            for type, kl_G in zip(types, table.kl_GC.T.tolist(), strict=True):
                self.types[type] = dict(zip(table.groups, kl_G, strict=True))
        self.steps |= zip(map(key_of, plans), kls[len(changes) :], strict=True)


def key_of(config: MethodConfig) -> str:
    """A config as a key of the table."""
    return json.dumps(steps_as_json((config,))[0])


def asked(forms: Sequence[Form]) -> list[MethodConfig]:
    """The configs that a table holds for some forms, each once."""
    configs = {key_of(c): c for form in forms for c in [form.first] if c is not None}
    for family in {id(form.family): form.family for form in forms}.values():
        configs |= {key_of(c): c for c in (family.configs[n] for n in places_priced(family))}
    return [*configs.values()]
