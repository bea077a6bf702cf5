"""Laws of several steps: what one step made, the next one keeps, saved and loaded again or live."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from builders import equal, loaded, logits
from cases import KEYS, config_of, given, make_start, result_of

from moesaic.errors import MoesaicError
from moesaic.surgery import headers_of

DENSE = "carve"
"""The verb that takes dense models; others take what it makes, or mixtures of experts."""
SECOND = {"prune.naee": {"keep": 4}, "tune.sft": {"what": "all"}}
"""Settings of a second step that do something after any first."""
FIRST_TOO = {
    "prune.naee, counts differ": ("prune.naee", {"uniform": False, "keep": 5.5}),
    "prune.naee, refitted": ("prune.naee", {"refit": True}),
    "condense.cd-moe, layers gone": ("condense.cd-moe", {"keep": "nothing"}),
    "condense.cd-moe, native": ("condense.cd-moe", {"shared_gate": "mean"}),
}
"""Further first steps, whose results are of other classes or hold other layer kinds."""
REFUSED = {
    ("skip", "prune"), ("skip", "skip"), ("skip", "condense"),
    ("condense", "prune"), ("condense", "condense"),
}  # fmt: skip
"""Pairs of verbs that say what to start from instead, where the first result is not native."""
FIRST = [key for key in KEYS if not key.startswith("tune.")]


def verbs(*keys: str) -> tuple[str, ...]:
    return tuple(key.partition(".")[0] for key in keys)


PAIRS = [
    (first, second)
    for first, second in product(FIRST, KEYS)
    if not second.startswith(f"{DENSE}.")
    and verbs(first, second) not in REFUSED
    and (not first.startswith(f"{DENSE}.") or second.startswith("tune."))
]
PAIRS += [(first, "skip.naee") for first in FIRST_TOO]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("steps")


@cache
def first_step(name: str, place: Path) -> Path:
    key, options = FIRST_TOO.get(name, (name, {}))
    start = make_start(key, place / f"{name}-start")
    return result_of(key, str(start), config_of(key, **options)).save(place / name)


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=[" then ".join(p) for p in PAIRS])
def test_saved_and_loaded_again_is_live_bitwise(first, second, place, tokens, tmp_path):
    """From memory and from disk the same model, in which the first step is still there."""
    config = config_of(second, **SECOND.get(second, {}))
    before = first_step(first, place)
    live = result_of(second, config=config, **given(before, live=True))
    disk = result_of(second, str(before), config)
    wanted = logits(live.model, tokens)
    assert not torch.equal(wanted, logits(loaded(before), tokens)), "the second step did nothing"
    for name, result in (("live", live), ("disk", disk)):
        again = loaded(result.save(tmp_path / name))
        assert equal(dict(again.state_dict()), dict(live.model.state_dict()))
        assert torch.equal(logits(again, tokens), wanted)
    stacks, made = headers_of(loaded(before).config), headers_of(again.config)
    for i, stack in stacks.items():
        assert made[i][: len(stack)] == stack, "the first step's layers are still said to be so"


@pytest.mark.parametrize(("first", "second"), sorted(REFUSED))
def test_what_cannot_follow_says_what_to_start_from(first, second, place):
    one, two = (next(k for k in KEYS if verbs(k) == (verb,)) for verb in (first, second))
    for live in (True, False):
        with pytest.raises(MoesaicError, match="already; .*(original|start from)"):
            result_of(two, **given(first_step(one, place), live=live))


@pytest.mark.parametrize("second", [k for k in KEYS if k.startswith(f"{DENSE}.")])
@pytest.mark.parametrize("first", FIRST)
def test_what_is_converted_is_not_carved(first, second, place):
    with pytest.raises(MoesaicError, match="carve|already|original"):
        result_of(second, str(first_step(first, place)))
