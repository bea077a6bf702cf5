"""Layers whose experts a table gives to each token, beside what every mixture is tried for."""

import copy
import json

import pytest
import torch
from builders import equal, loaded, logits, statistics, stream_of, weights
from released import deepseek_v4
from safetensors.torch import save_file
from shrunken import small_model
from transformers import AutoConfig

from moesaic import PruneConfig, Tokens, TopKConfig
from moesaic.api import prune, skip
from moesaic.arch.lookup import moe_arch
from moesaic.arch.routing import replace_removed
from moesaic.exports.llamacpp import lacking
from moesaic.plans.cut import CutLayer
from moesaic.surgery import apply_layer

KEEP = 6
TEXT = Tokens(torch.randint(1, 384, (6, 32), generator=torch.Generator().manual_seed(1)))


@pytest.fixture
def model():
    return small_model("deepseek_v4")


def tables(model):
    layers = model.model.layers
    return {
        i: g.tid2eid
        for i, g in enumerate(layer.mlp.gate for layer in layers)
        if hasattr(g, "tid2eid")
    }


def test_experts_that_go_are_replaced_by_the_next_ones(model):
    kept = [0, 1, 3, 4, 6, 7]
    before = copy.deepcopy(tables(model))
    arch = moe_arch(model.config)
    for i in before:
        apply_layer(arch.layers(model), i, arch, CutLayer(torch.tensor(kept)))
    for i, table_VK in tables(model).items():
        for old, new in zip(before[i].tolist(), table_VK.tolist(), strict=True):
            others = ((old[0] + n) % 8 for n in range(1, 9))
            order = [e for e in (*old, *(e for e in others if e not in old)) if e in kept]
            assert [kept[e] for e in new] == (old if {*old} <= {*kept} else order[:2])
        assert {*table_VK.flatten().tolist()} == {*range(KEEP)}


def test_those_that_come_in_share_the_tokens():
    given_NK = torch.rand(4000, 8, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :2]
    allowed_E = torch.tensor([True, False, True, True, True, False, True, True])
    calls_E = replace_removed(given_NK, allowed_E.expand(4000, -1)).flatten().bincount(minlength=8)
    assert not calls_E[~allowed_E].any()
    assert calls_E.max() < 2 * calls_E[allowed_E].min()


def test_fewer_experts_a_token_are_the_first_of_its_row(model):
    before = copy.deepcopy(tables(model))
    arch = moe_arch(model.config)
    for i, table_VK in before.items():
        apply_layer(arch.layers(model), i, arch, CutLayer(top_k=1))
        assert torch.equal(tables(model)[i], table_VK[:, :1])
        assert tables(model)[i].is_contiguous()


def padded_and_short():
    """The same real tokens: windows with padding after them, and windows cut there."""
    mask = torch.ones_like(TEXT.input_ids, dtype=torch.bool)
    mask[:, 24:] = False
    return Tokens(TEXT.input_ids, mask), Tokens(TEXT.input_ids[:, :24])


def test_tokens_keep_their_experts_where_there_is_padding(model):
    """Windows of other lengths, padded: what is observed is that of the real tokens."""
    padded, short = (
        statistics(site) for tokens in padded_and_short() for site in stream_of(model, tokens, [0])
    )
    assert torch.equal(padded["calls_E"], short["calls_E"])
    assert torch.equal(padded["logits_TX"][:, 8:], short["logits_TX"][:, 8:])
    torch.testing.assert_close(padded["logits_TX"], short["logits_TX"])


def test_residual_streams_are_those_of_real_tokens(model):
    """This architecture has several; padding is left out of all of them."""
    padded, short = (
        torch.cat([*site.residuals()])
        for tokens in padded_and_short()
        for site in stream_of(model, tokens, [1])
    )
    assert len(padded) == model.config.hc_mult * TEXT.input_ids[:, :24].numel()
    torch.testing.assert_close(padded, short)


@pytest.fixture
def published(model, tmp_path):
    """A checkpoint under the names of the released ones, and as transformers writes it."""
    model.save_pretrained(tmp_path / "saved")
    model.save_pretrained(tmp_path / "published")
    (file,) = (tmp_path / "published").glob("*.safetensors")
    named = {
        name.removeprefix("model.")
        .replace("embed_tokens.", "embed.")
        .replace("head.hc_", "head_"): t
        for name, t in weights(tmp_path / "published").items()
    }
    named |= {f"mtp.0.{n[9:]}": t.clone() for n, t in named.items() if n.startswith("layers.3.")}
    save_file(named | {"mtp.0.norm.weight": torch.ones(32)}, file, {"format": "pt"})
    config = json.loads((tmp_path / "published/config.json").read_text())
    (tmp_path / "published/config.json").write_text(
        json.dumps(config | {"num_nextn_predict_layers": 1})
    )
    return tmp_path


def test_published_names_are_read_and_written(published):
    """The layer that predicts a further token follows the last one's decision."""
    config = PruneConfig(keep=KEEP, refit=False)
    for name in ("saved", "published"):
        prune(str(published / name), config, text=TEXT).save(published / f"{name}-out")
    ours, theirs = (loaded(published / f"{name}-out") for name in ("saved", "published"))
    assert equal(dict(ours.state_dict()), dict(theirs.state_dict()))
    before, after = (weights(published / name) for name in ("published", "published-out"))
    gone = {n for n in before if ".experts.6." in n or ".experts.7." in n}
    assert after.keys() == before.keys() - gone
    for leaf in ("weight", "bias"):
        last = after[f"layers.3.ffn.gate.{leaf}"]
        assert torch.equal(after[f"mtp.0.ffn.gate.{leaf}"], last)
        assert len(last) == KEEP


def test_llamacpp_takes_only_what_is_packed_as_released(published, tmp_path):
    config = AutoConfig.from_pretrained(published / "published")
    assert "packed" in lacking(config)[0]
    assert not lacking(AutoConfig.from_pretrained(deepseek_v4(tmp_path)))


@pytest.mark.parametrize(
    ("verb", "config"),
    [(prune, PruneConfig(keep=KEEP)), (skip, TopKConfig(top_k=1))],
    ids=["prune", "skip"],
)
def test_a_result_can_be_reduced_again(verb, config, model, tmp_path):
    first = verb(model, config, text=TEXT)
    first.save(tmp_path / "first")
    again = prune(str(tmp_path / "first"), PruneConfig(keep=4), text=TEXT)
    found = logits(loaded(again.save(tmp_path / "again")), TEXT)
    assert torch.equal(found, logits(again.model, TEXT))
    assert (found - logits(first.model, TEXT)).abs().max() > 1e-4
