"""The price table: the estimated KL of every alternative of a model, kept in a file.

Alternatives are configs of methods, each with the layers that it would make, and types of groups
of tensors. All are estimated in one pass forward and one backward
(:mod:`moesaic.observation.changes`), with one layer in memory, and answer any budget.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moesaic.arch.dense import Arch
from moesaic.config import MethodConfig
from moesaic.errors import MoesaicError
from moesaic.exports.allocation import Price
from moesaic.exports.quantised_model import QuantisedModel
from moesaic.fitting.candidates import Form, places_priced
from moesaic.io.outputs import whole_file
from moesaic.io.trust import mapping_of, reading
from moesaic.observation.changes import PRICED_AT_ONCE, Change, draws_for, estimates
from moesaic.observation.job import Job
from moesaic.sizes import steps_as_json
from moesaic.types import JSON, Track

TABLE = re.compile(rb'\{"request"')
"""Start of a file of prices."""


IMPOSSIBLE = Price(np.full((1, 1), np.inf))
"""Price of changes that the model cannot have."""


@dataclass
class Prices:
    """Prices of alternatives of one model on one text."""

    request: JSON
    """Weights, text and type that the prices depend on."""
    steps: dict[str, Price] = field(default_factory=dict)
    """Prices by config as JSON."""
    types: dict[str, dict[str, Price]] = field(default_factory=dict)
    """Prices by type of tensors, then by group; substitutes of types have some of the groups."""

    @classmethod
    def load(cls, file: Path, request: JSON) -> Prices:
        """Read the table of a file; an empty one where there is no file, or an empty one.

        Raises:
            MoesaicError: the file is of another model or text, or damaged.
        """
        if not file.is_file() or not file.stat().st_size:
            return cls(request)
        held = mapping_of(file)
        with reading(file, "Remove it, and the table is made anew."):
            other = [name for name, value in request.items() if held["request"].get(name) != value]
            steps = {key: _read(price) for key, price in held["steps"].items()}
            types = {
                type: {group: _read(price) for group, price in of_type.items()}
                for type, of_type in held["types"].items()
            }
            of_types = [price for of_type in types.values() for price in of_type.values()]
            priced = [p for p in [*steps.values(), *of_types] if p is not IMPOSSIBLE]
            if len({price.v_KN.shape for price in priced}) > 1:
                raise ValueError("its prices are of different numbers of windows")
            every = {group for of in types.values() for group in of}
            if IMPOSSIBLE in of_types or (
                types and all(of.keys() != every for of in types.values())
            ):
                raise ValueError("a group of tensors has no price")
        if other:
            raise MoesaicError(
                f"{file} holds prices of other {' and '.join(other)}: name another file, or "
                "remove this one."
            )
        return cls(request, steps, types)

    def save(self, file: Path) -> None:
        """Write the table, whole or not at all."""
        steps = {key: _written(price) for key, price in self.steps.items()}
        types = {
            type: {group: _written(price) for group, price in of_type.items()}
            for type, of_type in self.types.items()
        }
        with whole_file(file) as partial:
            table = {"request": self.request, "steps": steps, "types": types}
            partial.write_text(json.dumps(table), "utf-8")

    def of(self, form: Form, place: int) -> Price:
        """Return the price of a form's recipe, interpolated between priced configs."""
        family = form.family
        every = {n: self.steps[key_of(family.configs[n])] for n in places_priced(family)}
        known = [n for n, price in every.items() if price is not IMPOSSIBLE]
        below = [n for n in known if n <= place]
        if not below or (form.first is not None and self.steps[key_of(form.first)] is IMPOSSIBLE):
            return IMPOSSIBLE
        low, high = below[-1], next((n for n in known if n > place), below[-1])
        share = (place - low) / max(high - low, 1)
        v_KN = (1 - share) * every[low].v_KN + share * every[high].v_KN
        price = Price(v_KN, (1 - share) * every[low].apart + share * every[high].apart)
        return price if form.first is None else self.steps[key_of(form.first)] + price

    @torch.no_grad()
    def add(
        self,
        job: Job[Arch],
        plans: Mapping[MethodConfig, Change],
        types: Sequence[str],
        quantised: QuantisedModel | None,
        track: Track,
        folder: Path | None = None,
    ) -> None:
        """Estimate the prices of changes and types, and add them to the table.

        Args:
            job: the model, and the tokens to estimate on.
            plans: by config the layers that it makes.
            types: of tensors.
            quantised: the model with its tensors in types; None without types.
            track: shows progress.
            folder: keeps what is found of each layer until all is; another call with the same
                request continues from there.
        """
        changes = quantised.changes(types, filled=True) if quantised is not None and types else []
        stream = job.stream((), lambda layer: layer, tokens_per_batch=PRICED_AT_ONCE)
        draws = draws_for(stream.model)
        if folder is not None:
            asked_for = [self.request, types, [*map(key_of, plans)], draws]
            name = hashlib.sha256(json.dumps(asked_for).encode()).hexdigest()[:16]
            folder /= name
        found = estimates(stream, [*changes, *plans.values()], draws, track=track, folder=folder)
        prices = map(Price, found.per_token.numpy(), found.head_C.tolist())
        if changes and quantised is not None:
            of_types = quantised.prices(types, islice(prices, len(changes)), filled=True)
            for type, of_type in of_types.items():
                self.types[type] = self.types.get(type, {}) | of_type
        self.steps |= zip(map(key_of, plans), prices, strict=True)


def _read(held: Any) -> Price:
    if held is None:
        return IMPOSSIBLE
    price = Price(np.array(held["v"], float), float(held["apart"]))
    with np.errstate(over="ignore"):
        if price.v_KN.ndim != 2 or not price.kl_S.size or not np.isfinite(price.kl_S).all():
            raise ValueError("a price is no table of numbers")
    if price.kl < 0:
        raise ValueError(f"a price is {price.kl:g}")
    return price


def _written(price: Price) -> JSON | None:
    return None if price is IMPOSSIBLE else {"v": price.v_KN.tolist(), "apart": price.apart}


def key_of(config: MethodConfig) -> str:
    """Return a config as a key of the table."""
    return json.dumps(steps_as_json((config,))[0])


def priced_configs(forms: Sequence[Form]) -> list[MethodConfig]:
    """Return the configs that a table holds for some forms, each once."""
    configs = {key_of(c): c for form in forms for c in [form.first] if c is not None}
    for family in {id(form.family): form.family for form in forms}.values():
        configs |= {key_of(c): c for c in (family.configs[n] for n in places_priced(family))}
    return [*configs.values()]
