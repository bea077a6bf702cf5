"""Every method of the registry, with settings that a test can afford and a model it takes.

A new entry of the registry is in every suite of laws by itself. Its quick settings are found by
the names of its options; its model is the first of the tiny ones that it does not refuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from builders import VOCAB, loaded, tiny_model, tiny_moe, tiny_tokenizer

from moesaic import MoesaicError, Plan, Tokens, hub
from moesaic.api import verb
from moesaic.config import MethodConfig, about, choices
from moesaic.io.names import PLAN, our_path
from moesaic.methods import METHODS, VERBS, implementation

QUICK: dict[str, Any] = {"steps": 3, "batch": 2, "lr": 1e-2, "save_every": 1, "length": 32}
"""Settings of options that decide how long a method takes, where it has them."""
OPTIONS: dict[str, dict[str, Any]] = {
    "carve.tomoe": {"active": 0.7, "experts": 3},
    "carve.dsmoe": {"experts": 4, "active": 0.8},
    "skip.top-k": {"top_k": 1},
    "tune.sft": {"what": "condensed"},
}
"""Settings that tiny models need."""
MIXTURES = ("slim",)
"""Verbs that take dense models too, and are tried on a mixture here."""
AFTER = {"tune": "condense"}
"""Verbs that start from another one's result, whose config is the default one."""


def many_tokens() -> Tokens:
    """Three batches of a stream: enough for two processes to share, and little to run."""
    ids = torch.randint(1, VOCAB, (96, 64), generator=torch.Generator().manual_seed(1))
    return Tokens(ids)


def config_of(key: str, **options: Any) -> MethodConfig:
    """A method's quick config; without further options its defaults otherwise."""
    names = {field.name for field in fields(METHODS[key])}
    quick = {name: value for name, value in QUICK.items() if name in names}
    return METHODS[key](**{**quick, **OPTIONS.get(key, {}), **options})


DECISIVE = ("carve.variant", "prune.score", "condense.keep", "tune.what")
"""Options whose values are methods of their own."""


def variants(key: str) -> Iterator[MethodConfig]:
    """The default, what is a method of its own, with and without refit, and all that is beyond.

    Options that need another one are tried with it; impossible ones are left out.
    """
    config = config_of(key)
    names = {field.name for field in fields(config)}
    yield config
    for field in fields(config):
        default, values = getattr(config, field.name), choices(type(config), field.name)
        if about(field).beyond or f"{config.verb}.{field.name}" in DECISIVE:
            others = (not default,) if isinstance(default, bool) else values
            for value in (v for v in others if v != default):
                alone = {field.name: value}
                tried = [_possible(key, alone, {"refit": True}, {"teacher": "teacher"})]
                if field.name in ("variant", "keep") and "refit" in names:
                    tried.append(_possible(key, {**alone, "refit": True}))
                yield from filter(None, tried)


def _possible(key: str, options: dict[str, Any], *more: dict[str, Any]) -> MethodConfig | None:
    """The config of these options, with the first further ones by which it is possible."""
    for further in ({}, *more):
        try:
            return config_of(key, **options, **further)
        except (MoesaicError, TypeError):
            continue
    return None


def make_start(key: str, folder: Path) -> Path:
    """Write the tiny model that a method starts from, as a user would have it."""
    name = key.partition(".")[0]
    if name in AFTER:
        before = next(k for k in METHODS if k.startswith(f"{AFTER[name]}."))
        start = make_start(before, folder.with_name(f"{folder.name}-before"))
        saved: Path = result_of(before, str(start)).save(folder)
        return saved
    method = implementation(config_of(key))
    models = [tiny_model("llama"), tiny_moe("qwen2_moe")]
    for model in models[1:] if name in MIXTURES else models:
        try:
            method.find(model.config)  # type: ignore[attr-defined]
        except MoesaicError:
            continue
        folder.mkdir(parents=True)
        hub.save_live(model, tiny_tokenizer(), folder)
        return folder
    raise AssertionError(f"{key} takes none of the tiny models")


def model_of(start: Path, live: bool) -> dict[str, Any]:
    """A model as a verb takes it: by name, or loaded together with the plan that made it."""
    if not live:
        return {"model": str(start)}
    plan = Plan.load(start) if our_path(start, PLAN).exists() else None
    return {"model": loaded(start), "plan": plan}


def result_of(key: str, model: Any, config: MethodConfig | None = None, **options: Any) -> Any:
    """What a method makes of a model that is given live, or by the name of its folder."""
    config = config or config_of(key)
    return verb(config.verb, model, config, calibration=many_tokens(), **options)


def request_of(config: MethodConfig) -> dict[str, Any]:
    """A config as JSON, from which ``METHODS[key](**request)`` makes it again."""
    return asdict(config)


KEYS = tuple(METHODS)
assert set(VERBS) == {key.partition(".")[0] for key in KEYS}
