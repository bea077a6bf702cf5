"""Laws of several steps: what one step made, the next one keeps, saved and loaded again or live."""

import re
from functools import cache
from itertools import product

import pytest
import torch
from builders import equal, loaded, logits
from cases import KEYS, config_of, make_start, model_of, result_of

from moesaic.errors import MoesaicError
from moesaic.surgery import headers_of

SECOND = {"prune.naee": {"keep": 4}, "skip.top-k": {"top_k": 1}, "tune.sft": {"what": "all"}}
"""Settings of a second step that do something after any first."""
FIRST_TOO = {
    "prune.naee, counts differ": ("prune.naee", {"allocate": "layers", "keep": 5.5}),
    "prune.naee, refitted": ("prune.naee", {"refit": True}),
    "condense.cd-moe, layers gone": ("condense.cd-moe", {"keep": "nothing"}),
    "condense.cd-moe, native": ("condense.cd-moe", {"shared_gate": "mean"}),
}
"""Further first steps, whose results are of other classes or hold other layer kinds."""
MUST = {
    ("prune", "skip"), ("prune", "condense"), ("prune", "tune"), ("condense", "skip"),
    ("condense", "tune"), ("carve", "tune"), ("skip", "tune"),
}  # fmt: skip
"""Pairs of verbs whose second takes what the first makes; others may say why they do not."""


def verbs(*keys):
    return tuple(key.partition(".")[0] for key in keys)


FIRST = [key for key in KEYS if verbs(key) != ("tune",)]
PAIRS = [*product(FIRST, KEYS), *((first, "skip.naee") for first in FIRST_TOO)]
PAIRS.remove(("skip.top-k", "skip.top-k"))  # from one expert a token there is no fewer
BY_DAY = {
    ("prune.naee", "skip.naee"), ("prune.naee", "skip.top-k"), ("prune.naee", "condense.cd-moe"),
    ("prune.naee", "tune.sft"), ("condense.cd-moe", "skip.naee"), ("condense.cd-moe", "tune.sft"),
    ("carve.more", "tune.sft"), ("skip.naee", "tune.sft"), ("prune.naee", "slim.neurons"),
    ("slim.neurons", "prune.naee"), ("carve.more", "prune.naee"),
    ("prune.naee, counts differ", "skip.naee"),
}  # fmt: skip
"""Pairs of verbs; the others are tried by ``make test-all``."""


def tried(pair):
    marks = () if pair in BY_DAY else pytest.mark.nightly
    return pytest.param(*pair, id=" then ".join(pair), marks=marks)


@cache
def first_step(name, place):
    key, options = FIRST_TOO.get(name, (name, {}))
    start = make_start(key, place / f"{name}-start")
    return result_of(key, str(start), config_of(key, **options)).save(place / name)


@pytest.mark.parametrize(("first", "second"), [tried(pair) for pair in PAIRS])
def test_saved_and_loaded_again_is_live_bitwise(first, second, place, tokens, tmp_path):
    """From memory and from disk the same model, in which the first step is still there."""
    config = config_of(second, **SECOND.get(second, {}))
    before = first_step(first, place)
    try:
        live = result_of(second, config=config, **model_of(before, live=True))
    except MoesaicError as error:
        if verbs(first, second) in MUST:
            raise
        with pytest.raises(MoesaicError, match=re.escape(str(error))):
            result_of(second, str(before), config)
        return
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
