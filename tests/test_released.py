"""Published models, small: every verb leaves alone what none of their tokens need."""

import json
from typing import Any

import pytest
import torch
from builders import OLD, inside, loaded, nightly
from released import PUBLISHED, rebuilt

from moesaic import (
    CondenseConfig,
    MoesaicError,
    MoREConfig,
    PruneConfig,
    Recipe,
    SlimConfig,
    Tokens,
    TopKConfig,
)
from moesaic.api import evaluate, inspect
from moesaic.api import verb as verb_of
from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.io.source import Source
from moesaic.sizes import estimate, weight_bytes

TEXT = Tokens(torch.randint(1, 290, (8, 16), generator=torch.Generator().manual_seed(1)))
HALVED: list[tuple[str, Any]] = [("prune", PruneConfig(keep=4)), ("slim", SlimConfig(keep=0.5))]
CHANGED: list[tuple[str, Any]] = [
    ("skip", TopKConfig(top_k=1)),
    ("condense", CondenseConfig(count=1, keep="attention")),
]
OF_DENSE: list[tuple[str, Any]] = [
    ("carve", MoREConfig(active=0.9, experts=2, top_k=1, layers="all", multiple=8))
]
TIED = {"Hunyuan-A13B", "Jamba-Mini-1.5", "Llama-4-Scout"}
"""Experts, and dense layers or shared experts, have their width from one attribute."""
NEVER = {"Llama-4-Scout": {"skip"}}
"""Verbs that a model has no use for: it runs one expert a token."""


@torch.no_grad()
def logits(folder):
    model = Source(folder.name, folder).load(dtype=torch.float32)
    return model(TEXT.input_ids, use_cache=False).logits


def config_of(folder):
    said = json.loads((folder / "config.json").read_text())
    text = said.get("text_config")
    return text if isinstance(text, dict) else said


NEW = {"Qwen2.5-VL-7B", "Mistral-Small-4", "Aria-text"}
"""Models that older transformers has in no form that a rule finds."""
NAMES = [n if n == "gpt-oss-20b" else nightly(n) for n in PUBLISHED if not (OLD and n in NEW)]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_never_used_is_what_is_removed(name, tmp_path):
    """Half of the experts and of the neurons, with no logit changed, in the estimated size."""
    base = tmp_path / "base"
    rebuilt(PUBLISHED[name], base)
    arch, wanted = base_arch(Source("base", base).config), logits(base)
    mixture = isinstance(arch, MoEArch)
    assert inspect(str(base))["model_type"] == arch.model_type
    whole, streamed = (evaluate(str(base), data=TEXT, stream=s).perplexity for s in (False, True))
    assert streamed == pytest.approx(whole, rel=1e-5)
    rounded = "quantization_config" in PUBLISHED[name]
    for verb, config in [*(HALVED if mixture else HALVED[1:]), *(CHANGED if mixture else OF_DENSE)]:
        if verb in NEVER.get(name, ()):
            continue
        out = verb_of(verb, str(base), config, text=TEXT).save(tmp_path / verb)
        error = ((logits(out) - wanted).norm() / wanted.norm()).item()
        if verb in ("prune", "slim"):
            assert error < (0.05 if rounded and verb == "slim" else 1e-4), verb
            native = config_of(out)["model_type"] == arch.model_type
            assert native != (verb == "slim" and name in TIED), verb
        else:
            assert error > 1e-5, verb
        if not (rounded or Source("base", base).beside):
            loaded(out)
        sizes = estimate(Recipe(str(base), "out", (config,), evaluation=None))
        # which layers are condensed moves offsets in the header, which is padded to 64
        assert abs(sizes.output_bytes - weight_bytes(out)) <= 64 * (verb == "condense"), verb
        assert "config.json" in inside(out)


@pytest.mark.parametrize(
    "name", ["gpt-oss-20b", *map(nightly, ("Granite-4.0-H-Tiny", "ERNIE-4.5-21B-A3B"))]
)
def test_keys_that_are_kept_are_spelled_as_they_were(name, tmp_path):
    base = tmp_path / "base"
    rebuilt(PUBLISHED[name], base)
    out = verb_of("prune", str(base), PruneConfig(keep=4, score="frequency"), text=TEXT)
    before, after = config_of(base), config_of(out.save(tmp_path / "out"))
    counts = {"num_local_experts", "num_experts", "moe_num_experts", "n_routed_experts"}
    gone = {"num_nextn_predict_layers"}  # there are none in the files
    kept = before.keys() - counts - gone
    assert {k: after.get(k) for k in kept} == {k: before[k] for k in kept}
    assert {after[k] for k in counts & after.keys()} == {4}


def test_a_number_changes_under_each_of_its_names(tmp_path):
    """Also under those that transformers' class does not know."""
    for name in ("gpt-oss-20b", "Hunyuan-A13B", "LFM2-1.2B"):
        rebuilt(PUBLISHED[name], tmp_path / name)
    skipped = verb_of("skip", str(tmp_path / "gpt-oss-20b"), TopKConfig(top_k=1), text=TEXT)
    said = config_of(skipped.save(tmp_path / "skipped"))
    assert (said["num_experts_per_tok"], said["experts_per_token"]) == (1, 1)
    config = SlimConfig(keep=0.5, shared=0.5)
    slimmed = verb_of("slim", str(tmp_path / "Hunyuan-A13B"), config, text=TEXT)
    said = config_of(slimmed.save(tmp_path / "slimmed"))
    assert said["model_type"] == "hunyuan_v1_moe"
    assert said["moe_intermediate_size"] == [said["intermediate_size"]] * 4 == [16] * 4
    slimmed = verb_of("slim", str(tmp_path / "LFM2-1.2B"), SlimConfig(keep=0.5), text=TEXT)
    said = config_of(slimmed.save(tmp_path / "narrow"))
    assert said["model_type"] == "lfm2"
    assert said["block_ff_dim"] == said["intermediate_size"] == 32
    assert said["block_auto_adjust_ff_dim"] is False


@pytest.mark.skipif(OLD, reason="this transformers has no such language model alone")
def test_keys_beside_those_of_other_parts_become_a_part(tmp_path):
    """Qwen2.5-VL's language model has no config of its own: of its keys nothing stays behind."""
    base = tmp_path / "base"
    rebuilt(PUBLISHED["Qwen2.5-VL-7B"], base)
    slimmed = verb_of("slim", str(base), SlimConfig(keep=0.5), text=TEXT).save(tmp_path / "out")
    before, after = (json.loads((f / "config.json").read_text()) for f in (base, slimmed))
    text = after.pop("text_config")
    assert (text["intermediate_size"], text["model_type"]) == (48, "qwen2_5_vl_text")
    assert {k: v for k, v in before.items() if k in after} == after
    stays = before.keys() - after.keys() - {"intermediate_size"}
    assert "hidden_size" in stays
    assert {k: text[k] for k in stays} == {k: before[k] for k in stays}


@pytest.mark.skipif(OLD, reason="this transformers has no such language model alone")
def test_whether_other_parts_are_written_depends_on_the_layers(tmp_path):
    """They are written with a result of the base's own class, which has leading dense layers."""
    base = tmp_path / "base"
    rebuilt(PUBLISHED["Mistral-Small-4"], base)
    for keep, exact in (("shared", False), ("attention", True)):
        config = CondenseConfig(count=1, keep=keep)
        assert estimate(Recipe(str(base), "out", (config,), evaluation=None)).exact is exact


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "latent experts": (
        {**PUBLISHED["Nemotron-3-Nano"], "moe_latent_size": 1024},
        "experts work on fewer dimensions than the model",
    ),
    "NVFP4": (
        {**PUBLISHED["Qwen3-30B-A3B-FP8"], "quantization_config": {"quant_algo": "NVFP4"}},
        "'modelopt'",
    ),
}


@pytest.mark.parametrize(("published", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_done_is_refused_for_its_reason(published, words, tmp_path):
    base = tmp_path / "base"
    rebuilt(published, base)
    for act in (
        lambda: verb_of("prune", str(base), PruneConfig(keep=4), text=TEXT),
        lambda: verb_of("slim", str(base), SlimConfig(keep=0.5), text=TEXT),
        lambda: evaluate(str(base), data=TEXT, stream=True),
        lambda: estimate(Recipe(str(base), "out", (PruneConfig(keep=4),))),
    ):
        with pytest.raises(MoesaicError, match=words) as refusal:
            act()
        assert "lists those that are" not in str(refusal.value)
