"""Laws of every architecture of the tables, and of any that a new entry adds."""

import copy
import json

import pytest
import torch
import transformers
from builders import DENSE, MOE, any_model, converted, equal, logits, saved, tiny_model, whole_plan
from contract import STEPS
from transformers import AutoConfig
from transformers.models.auto import CONFIG_MAPPING

from moesaic.arch import support_table
from moesaic.arch.dense import PREFIX
from moesaic.arch.lookup import architectures, base_arch, dense_arch, moe_arch
from moesaic.hub import _engine_keys
from moesaic.io.checkpoint import Checkpoint
from moesaic.io.naming import NEXT, Naming
from moesaic.io.source import Source
from moesaic.observation.stream import LayerStream
from moesaic.plans.cut import CutLayer
from moesaic.surgery import base_shape

KEEP = 6


@pytest.fixture(params=sorted({*DENSE, *MOE}))
def any_type(request):
    return request.param


def some_layers(model, keep=KEEP):
    """Layers as a method may leave them: experts of every routed layer, or neurons of some."""
    arch = base_arch(model.config)
    if not base_shape(model, arch).routed:
        return dict(whole_plan(model, arch, top_k=1).layers)
    return {i: CutLayer(torch.arange(keep)) for i in arch.moe_layers(model)}


def first_view(model):
    arch = moe_arch(model.config)
    return arch.mixture(arch.layers(model)[arch.moe_layers(model)[0]])


# --- all -----------------------------------------------------------------------------------------


def test_every_entry_is_registered():
    known = architectures()
    assert {*DENSE} <= {*known["dense"]}
    assert {*MOE} <= {*known["moe"]}
    types = {*known["dense"], *known["moe"]}
    if transformers.__version__ != support_table()["transformers"]:  # an older one lacks some
        types &= {*CONFIG_MAPPING}
    for model_type in types:
        assert PREFIX + model_type in CONFIG_MAPPING


def test_config_round_trips_key_for_key(any_type, tmp_path):
    """A result's config is the base's own and what was changed, saved once or twice."""
    model = any_model(any_type)
    model.config.save_pretrained(tmp_path / "base")
    saved(tmp_path / "out", model, some_layers(model))
    config = AutoConfig.from_pretrained(tmp_path / "out")
    config.save_pretrained(tmp_path / "again")
    files = (tmp_path / name / "config.json" for name in ("base", "out", "again"))
    base, out, again = (json.loads(file.read_text()) for file in files)
    out.pop("architectures"), again.pop("architectures", None), base.pop("architectures", None)
    for alias, name in config.attribute_map.items():  # transformers writes one of two names
        if name in out:
            assert out.pop(alias) == out[name]
    for name, value in _engine_keys(config).items():  # for engines; transformers writes no such
        if name not in base:
            assert out.pop(name) == value
            again.pop(name, None)
    for rotary in (out, again):  # rope_scaling, read back, brings the older name of its kind
        (rotary.get("rope_parameters") or {}).pop("type", None)
    assert out == again
    if any_type in MOE:
        changed = {name for name in out if out[name] != base.get(name)} - {"dtype"}
        if NEXT in changed:  # a live model has no such layers
            changed.remove(NEXT)
            assert out[NEXT] == 0
        assert {out[name] for name in changed} == {KEEP}
    else:
        added = {"moesaic", "auto_map", "model_type", "dtype"}
        ours, theirs = ({k: v for k, v in x.items() if k not in added} for x in (out, base))
        assert ours == theirs


def test_every_step_of_the_contract(any_type):
    """Live, saved and from disk; whole, with fewer experts or neurons, or fewer experts a token."""
    model = any_model(any_type)
    arch = base_arch(model.config)
    for name, step in STEPS.items():
        if name != "slim" or any_type in MOE:
            torch.manual_seed(0)
            step(copy.deepcopy(model), arch)


def test_names_on_disk_and_in_memory_cover_each_other(any_type, tmp_path):
    model = any_model(any_type)
    model.save_pretrained(tmp_path)
    naming = Naming(Checkpoint(tmp_path), any_type)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    state = {name: t for name, t in model.state_dict().items() if name not in tied}
    assert set(naming.in_memory.values()) == set(state)
    for name, tensor in state.items():
        assert torch.equal(naming.read(name), tensor), name


@torch.no_grad()
def test_reading_from_disk_is_loading(any_type, tokens, tmp_path):
    """bfloat16, where some tensors are kept wide."""
    any_model(any_type).save_pretrained(tmp_path / "base", max_shard_size="50KB")
    source = Source("base", tmp_path / "base")
    model = source.load(dtype=torch.bfloat16)
    arch = base_arch(model.config)
    given = source.checkpoint, model.config, arch, tokens
    for site in LayerStream.from_disk(*given, view=lambda layer: layer, dtype=model.dtype):
        wanted, found = arch.layers(model)[site.index].state_dict(), site.layer.state_dict()
        assert equal(wanted, found)
        assert all(found[name].dtype == tensor.dtype for name, tensor in wanted.items())


# --- dense ---------------------------------------------------------------------------------------


def test_all_experts_are_the_dense_model(model_type, tokens):
    dense = tiny_model(model_type).double()
    carved = copy.deepcopy(dense)
    converted(carved, dict(whole_plan(dense, dense_arch(dense.config)).layers))
    found, wanted = (logits(model, tokens) for model in (carved, dense))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_weights_are_the_bases_own_only_permuted(model_type):
    dense = tiny_model(model_type)
    arch = dense_arch(dense.config)
    plan = whole_plan(dense, arch)
    carved = converted(copy.deepcopy(dense), dict(plan.layers))
    for i, layer in plan.layers.items():
        old = arch.dense(arch.layers(dense)[i])
        new = arch.ffn_of(arch.layers(carved)[i]).view()
        assert torch.equal(new.up_MD, old.up_MD[layer.order_M])
        assert torch.equal(new.down_DM, old.down_DM[:, layer.order_M])
        if old.gate_MD is not None:
            assert torch.equal(new.gate_MD, old.gate_MD[layer.order_M])


# --- mixtures of experts -------------------------------------------------------------------------


@torch.no_grad()
def test_an_experts_weights_are_its_output(moe):
    x_TD = torch.randn(8, 32)
    view = first_view(moe)
    gate, up, down = view.weights_of(3)
    if moe.config.model_type == "gpt_oss":  # biases and a clamped gate besides
        assert (gate.shape, up.shape, down.shape) == ((16, 32), (16, 32), (32, 16))
        return
    y_TD = (view.experts.act_fn(x_TD @ gate.T) * (x_TD @ up.T)) @ down.T
    torch.testing.assert_close(y_TD, view.expert(3, x_TD))


def test_candidate_sets_can_share_one_call(moe):
    """Choice biases are masked row by row, too."""
    view = first_view(moe)
    groups = view.arch.group_count(moe.config)
    logits_TE = torch.randn(16, 8)
    draws = torch.rand(4, groups, 8 // groups, generator=torch.Generator().manual_seed(0))
    sets_CE = (draws.argsort(-1).argsort(-1) < KEEP // groups).flatten(1)
    every_TE = logits_TE.repeat_interleave(len(sets_CE), 0)
    together = view.routing.weights(every_TE, sets_CE.repeat(16, 1)).view(16, len(sets_CE), 8)
    for c, kept_E in enumerate(sets_CE):
        alone = view.routing.weights(logits_TE, kept_E.expand_as(logits_TE))
        assert torch.equal(together[:, c], alone)
