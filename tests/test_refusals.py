"""Requests that cannot be met, each with the words that say why or what would work."""

from functools import cache
from typing import Any

import pytest
from builders import DENSE, MOE, configured, tiny_model, tiny_moe
from cases import many_tokens
from shrunken import small_model

from moesaic.api import verb
from moesaic.errors import MoesaicError
from moesaic.methods import METHODS

Case = tuple[str, dict[str, Any], str]
"""A model's type, perhaps with its experts a token after a colon; options; words."""
REFUSED: dict[str, list[Case]] = {
    "prune.naee": [
        ("mixtral", {"keep": 1}, "needs at least 2"),
        ("mixtral", {"keep": 9}, "has 8 experts"),
        ("mixtral", {"keep": 5.5}, "not a whole number"),
        ("mixtral", {"score": "magic"}, "score 'magic' is none of reconstruction"),
        ("deepseek_v3", {"keep": 5}, "not a multiple of the 2 router groups"),
        ("deepseek_v3", {"keep": 2}, "needs at least 4"),
        ("mixtral", {"allocate": "layers", "score": "random"}, "no loss by which"),
        ("mixtral", {"allocate": "layers", "progressive": True}, "drop|needs all"),
        ("llama", {}, "no routed experts"),
    ],
    "slim.neurons": [
        ("mixtral", {"keep": 0.4, "multiple": 8}, "keep 0.4 .* nearest that works is 0.5"),
        ("mixtral", {"keep": 0.5, "multiple": 32}, "multiple 32 is out of reach: there are 16"),
        ("mixtral", {"keep": 0.5, "experts": "3"}, "experts 3 .* needs at least 4"),
        ("deepseek_v3", {"keep": 0.5, "experts": "5"}, "multiple of 2 router groups"),
        ("llama", {"keep": 0.5, "experts": "4"}, "dense: it has no experts"),
        ("llama", {"keep": 0.5, "shared": 0.5}, "dense: it has no shared"),
        ("llama", {"keep": 0.5, "allocate": "experts"}, "a dense model has none"),
        ("gpt_oss", {"allocate": "experts"}, "impossible for gpt_oss: its experts have biases"),
        ("mixtral", {"keep": 1, "multiple": 8}, "multiple 8 adds nothing"),
        ("mixtral", {"keep": 1, "multiple": 64}, "multiple 64 .*: 16 neurons become at most 32"),
        ("mixtral", {"keep": 1, "multiple": 12, "refit": True}, "leave refit and experts out"),
        ("mixtral", {"keep": 0}, "keep"),
        ("mixtral", {"keep": 1.5}, "keep"),
        ("mixtral", {"shared": 0}, "shared"),
        ("mixtral", {"experts": "many"}, "experts"),
        ("mixtral", {"experts": "auto", "allocate": "layers"}, "experts"),
        ("mixtral", {"experts": "4", "allocate": "layers"}, "experts"),
        ("mixtral", {"experts": "4", "allocate": "experts"}, "experts"),
        ("mixtral", {"score": "luck"}, "score"),
    ],
    "skip.naee": [
        ("mixtral:1", {}, "nothing to skip"),
        ("mixtral:4", {"rule": "top2"}, "for two experts"),
        ("mixtral", {"calls": 3}, "runs 2 experts now"),
        ("mixtral", {"calls": 0.5}, "at least 1"),
        ("mixtral", {"quantile": 1.5}, "at most 1"),
        ("mixtral", {"betas": (0.5, 0.5)}, "2 numbers for 3 layers"),
        ("mixtral", {"betas": (0.5,), "calls": 1.5}, "betas are given"),
        ("mixtral", {"calls": 1.5, "quantile": 0.3}, "leave quantile out"),
        ("mixtral", {"betas": (-1.0,)}, "at least 0"),
        ("mixtral", {"rule": "best"}, "rule 'best' is none of"),
    ],
    "skip.top-k": [
        ("mixtral", {"top_k": 3}, "runs 2 experts now; from 1 to 2 works"),
        ("mixtral", {"top_k": 1.5}, "whole number"),
        ("mixtral", {"top_k": 0}, "at least 1"),
        ("phimoe", {"top_k": 1}, "runs 2 experts a token, whatever"),
    ],
    "condense.cd-moe": [
        ("mixtral", {"count": 1}, "no shared experts"),
        ("deepseek_v2", {"count": 9}, "2 layers can be condensed"),
        ("deepseek_v2", {"count": 1, "candidates": (0,)}, "not layers that route"),
        ("deepseek_v2", {"count": 1, "keep": "shared+routed", "experts": 99}, "has 8"),
        ("gpt_oss", {"count": 1, "keep": "shared+routed"}, "biases. keep=attention or nothing"),
        ("deepseek_v2", {"memory": 10}, "out of reach"),
        ("qwen2_moe", {"count": 1, "memory": 5}, "memory"),
        ("qwen2_moe", {"count": -1}, "count"),
        ("qwen2_moe", {"count": 1, "keep": "some"}, "keep"),
        ("qwen2_moe", {"count": 1, "metric": "mse"}, "metric"),
        ("qwen2_moe", {"count": 1, "experts": 2}, "experts"),
        ("llama", {"count": 1}, "no routed experts"),
    ],
    "carve.more": [
        ("llama", {"active": 0.2}, r"out of reach.*can go down to 0\.750 \(0\.500 with layers=all"),
        ("llama", {"active": 1.5}, "active 1.5 must be at most 1"),
        ("llama", {"top_k": 4}, "below experts 4"),
        ("llama", {"layers": "9"}, "from 0 to 3"),
        ("llama", {"layers": "some"}, "none of all, last-half"),
        ("llama", {"variant": "best"}, "variant 'best' is none of"),
        ("llama", {"router": "magic"}, "none of cosine, ridge"),
        ("llama", {"share": 0.97}, "leaves 2 of"),
        ("llama", {"share": 0.5, "active": 0.7}, "share"),
        ("llama", {"share": 0.0}, "share"),
        ("llama", {"share": 1.0}, "share"),
        ("llama", {"share": 0.5, "variant": "naive"}, "share"),
        ("llama", {"share": 0.5, "top_k": 0}, "share"),
    ],
    "carve.tomoe": [
        ("llama", {"active": 0.0}, "active"),
        ("llama", {"attention": "some"}, "attention"),
        ("llama", {"experts": 0}, "experts"),
        ("llama", {"tau": 0.0}, "tau"),
        ("lfm2", {"active": 0.7}, "can be cut by heads: carve with method=more"),
        ("gpt_bigcode", {"active": 0.7}, "can be cut by heads: carve with method=more"),
        ("persimmon", {"active": 0.7}, "this persimmon has queries, keys and values head by head"),
    ],
    "carve.dsmoe": [
        ("llama", {"experts": 5}, "64 neurons"),
        ("llama", {"active": 0.3, "experts": 4}, "out of reach"),
        ("llama", {"variant": "top-k"}, "needs active"),
        ("llama", {"variant": "some"}, "variant"),
        ("llama", {"tau": 1.0}, "tau"),
        ("llama", {"active": 1.5}, "active"),
        ("llama", {"batch": 0}, "batch"),
        ("llama", {"steps": 0}, "steps"),
    ],
    "tune.sft": [
        ("llama", {"what": "some"}, "what"),
        ("llama", {"what": "routers"}, "teacher"),
        ("llama", {"warmup": 1.5}, "warmup"),
        ("llama", {"batch": 0}, "batch"),
        ("mixtral", {}, "no condensed layers.*what=lora, what=routers or what=all"),
        ("llama", {}, "no condensed layers"),
    ],
}


@cache
def model(name):
    """A tiny model, which nothing changes: refusals come before."""
    model_type, _, top_k = name.partition(":")
    if model_type in MOE:
        return tiny_moe(model_type, top_k=int(top_k or 2))
    return tiny_model(model_type) if model_type in DENSE else small_model(model_type)


@pytest.mark.parametrize(
    ("key", "name", "options", "words"),
    [
        pytest.param(key, *case, id=f"{key}-{case[0]}-{case[1]}")
        for key, cases in REFUSED.items()
        for case in cases
    ],
)
def test_what_cannot_be_done_is_said(key, name, options, words):
    def request():
        config = configured(METHODS[key], **options)
        verb(config.verb, model(name), config, calibration=many_tokens())

    with pytest.raises(MoesaicError, match=words):
        request()
