"""What changes of layers do to a model's output, measured and estimated, and weighed inputs."""

import copy
import weakref
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from builders import MOE, any_model, equal, stream_of, tiny_model, tiny_moe
from torch import Tensor, nn

from moesaic.arch.lookup import base_arch
from moesaic.exports.quantised_model import importance, means
from moesaic.io.source import resolve
from moesaic.losses import divergence, log_probabilities, predicting
from moesaic.metrics.forward import InMemory
from moesaic.metrics.score import qualities
from moesaic.observation.changes import branches, divergences, estimates, priced_layers, window_sums
from moesaic.observation.changes import layer_replacement as changed_by
from moesaic.observation.stats import Tally
from moesaic.observation.stream import BEFORE, LayerStream
from moesaic.plans.condensed import DroppedLayer
from moesaic.plans.cut import CutLayer
from moesaic.surgery import apply_layer, base_shape, converted_copy


def narrower(model_type, width, shift=0):
    order = torch.arange(shift, shift + width)
    if model_type in MOE:
        return CutLayer(torch.arange(8), order.repeat(8, 1), 16)
    return CutLayer(None, order[None], 64)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mixtral", "olmoe"])
def test_divergences_are_those_of_whole_models(model_type, padded):
    """Of one layer, of several, of one layer in two ways, of a layer dropped, and of none."""
    model = any_model(model_type, num_hidden_layers=3)
    arch, shared = base_arch(model.config), narrower(model_type, 8)
    changes = [
        {1: shared},
        {0: narrower(model_type, 4), 1: shared, 2: narrower(model_type, 12)},
        {1: narrower(model_type, 8, shift=4)},
        {1: shared, 2: DroppedLayer()},
        {},
    ]
    kl_CN = divergences(stream_of(model, padded), changes)
    assert kl_CN.shape == (len(changes), len(padded.input_ids))
    found = kl_CN.mean(1).tolist()
    for change, kl in zip(changes, found, strict=True):
        changed = copy.deepcopy(model)
        for i, plan in sorted(change.items(), reverse=True):
            apply_layer(arch.layers(changed), i, arch, plan)
        wanted = qualities([InMemory(changed), InMemory(model)], padded)[0].kl
        assert kl == pytest.approx(wanted, rel=1e-3, abs=1e-6)
    assert len({round(kl, 6) for kl in found}) == len(found)


def test_divergences_are_by_window(padded):
    """Each window's is that of the window alone, weighed by its tokens."""
    model = tiny_moe("mixtral", num_hidden_layers=2)
    changes = [{0: narrower("mixtral", 8)}]
    found = divergences(stream_of(model, padded), changes)[0]
    every = [padded.rows(slice(n, n + 1)) for n in range(len(padded.input_ids))]
    alone = [divergences(stream_of(model, w), changes).item() for w in every]
    counts = torch.stack([predicting(window.labels).sum() for window in every]).double()
    assert len({*counts.tolist()}) > 1
    wanted = torch.tensor(alone) * counts / counts.mean()
    torch.testing.assert_close(found, wanted.double(), rtol=1e-4, atol=1e-8)


def test_logits_are_of_one_window_at_a_time(tokens):
    """Those of a whole batch would take gigabytes of a vocabulary of today's size. Changes
    that come to the same model meet the head once."""
    model = tiny_moe("mixtral", num_hidden_layers=2)
    rows = list[int]()

    def made(_, __, out):
        rows.append(len(out))

    model.lm_head.register_forward_hook(made)
    stream = stream_of(model, tokens, tokens_per_batch=1 << 20)
    one, other = narrower("mixtral", 8), narrower("mixtral", 4)
    kl_CN = divergences(stream, [{0: one}, {}, {0: other}, {0: one}, {}])
    assert kl_CN.shape == (5, len(tokens.input_ids))
    assert torch.equal(kl_CN[[0, 1]], kl_CN[[3, 4]])
    assert kl_CN[:3].mean(1).unique().numel() == 3
    assert rows == [1] * 4 * len(tokens.input_ids)  # of the original and of three

    rows.clear()
    (original,) = branches(stream, [{}])
    sums_CN, tokens_N = window_sums(stream, [{0: one}, {}], original=original)
    assert torch.equal(sums_CN / tokens_N.mean(), kl_CN[:2])
    assert rows == [1] * 3 * len(tokens.input_ids)


def test_changes_of_one_kind_run_together(tokens):
    """The layers before a change, and those that changes share, run once for all."""
    model = tiny_moe("mixtral", num_hidden_layers=3)
    arch, calls = base_arch(model.config), [0, 0, 0]
    for i, layer in enumerate(arch.layers(model)):

        def count(_, __, i=i):
            calls[i] += 1

        layer.mlp.register_forward_pre_hook(count)
    one, other = narrower("mixtral", 8), narrower("mixtral", 4)
    stream = stream_of(model, tokens, tokens_per_batch=1 << 20)
    found = branches(stream, [{0: one}, {0: one, 2: other}, {0: one, 2: one}, {0: one}])
    assert calls == [1, 1, 3]
    assert found[0] is found[3]
    assert len({id(states) for states in found}) == 3


@contextmanager
def noisy(layer, share):
    """The layer with noise of ``share`` of their spread on the FFN's down projections."""
    generator = torch.Generator().manual_seed(3)
    matrices = {p: p.detach().clone() for name, p in layer.named_parameters() if "down" in name}
    assert matrices
    with torch.no_grad():
        for p, before in matrices.items():
            p += share * before.std() * torch.randn(before.shape, generator=generator)
        yield layer
        for p, before in matrices.items():
            p.copy_(before)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mixtral", "deepseek_v3"])
def test_small_changes_are_estimated_as_measured(model_type, padded):
    """Of each layer alone and of all together, interactions included. Of mixtures whose routers
    are random only the last layer: after any other, experts change by chance."""
    model = any_model(model_type, num_hidden_layers=3)
    stream = stream_of(model, padded)
    changes = [{i: partial(noisy, share=0.1)} for i in range(3)]
    changes += [{0: changes[0][0], 1: changes[1][1], 2: changes[2][2]}, {}]
    measured = divergences(stream, changes).mean(1)
    found = estimates(stream, changes, draws=128).kl_CN.mean(1)
    assert found[-1] == 0
    some = slice(2, 3) if model_type in MOE else slice(4)
    assert measured[some].min() > 1e-7
    torch.testing.assert_close(found[some], measured[some], rtol=0.25, atol=1e-8)


def test_larger_changes_are_in_the_measured_order(tokens):
    model = tiny_moe("mixtral", num_hidden_layers=3)
    stream = stream_of(model, tokens)
    plans = [narrower("mixtral", width) for width in (4, 8, 12)]
    changes = [{i: plan} for i in range(3) for plan in plans]
    measured, found = (
        divergences(stream, changes).mean(1),
        estimates(stream, changes, 8).kl_CN.mean(1),
    )
    logs = torch.stack([measured.log(), found.log()])
    assert torch.corrcoef(logs)[0, 1] > 0.95
    for layer in found.view(3, 3):
        assert layer.argsort(descending=True).tolist() == [0, 1, 2]


def test_layers_come_from_last_to_first_and_are_read_twice(tokens):
    model = tiny_moe("mixtral", num_hidden_layers=3)
    opened = []

    @contextmanager
    def opening(i):
        if i in range(3):  # a layer
            opened.append(i)
        yield

    stream = stream_of(model, tokens, opening=opening)
    assert [part.place for part in priced_layers(stream)] == [2, 1, 0, BEFORE]
    assert opened == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_a_masked_layer_computes_what_a_converted_one_does(model_type, tokens):
    """No copy is made of what is only left out; the layer is as it was afterwards."""
    model = any_model(model_type, num_hidden_layers=2)
    arch, shape = base_arch(model.config), base_shape(model, base_arch(model.config))
    width, count = shape.widths[1], shape.experts_of(1)
    narrow = torch.arange(1, width, 2).expand(max(1, count), -1)
    few = torch.arange(0, count, 2)
    plans = [CutLayer(few), CutLayer(few, narrow[few], width)] if count else []
    plans = plans or [CutLayer(None, narrow, width)]
    stream = stream_of(model, tokens)
    states, kwargs = stream.record()
    for block in stream.blocks(kwargs):
        before = copy.deepcopy(block.layer.state_dict())
        for plan in plans if block.index == 1 else []:
            masked = plan.masked(arch, block.layer)
            assert masked is not None
            with masked as layer:
                found = torch.cat([*block.outputs(states, layer)])
            with converted_copy(block.layer, arch, plan) as layer:
                torch.testing.assert_close(torch.cat([*block.outputs(states, layer)]), found)
            assert not torch.equal(torch.cat([*block.outputs(states)]), found)
            assert equal(block.layer.state_dict(), before)
        block.run(states)


def test_the_weights_of_one_layer_are_in_memory_at_a_time(tokens, tmp_path):
    """What remembers a layer's computation would keep its weights, beside those of the next one."""
    tiny_moe("mixtral", num_hidden_layers=3).save_pretrained(tmp_path)
    source = resolve(str(tmp_path))
    arch = base_arch(source.config)
    stream = LayerStream.from_disk(source.checkpoint, source.config, arch, tokens, view=arch.view)
    seen = []
    for part in priced_layers(stream, draws=2):
        assert not any(weight() is not None for weight in seen)
        if part.place != BEFORE:
            seen += map(weakref.ref, arch.layers(stream.model)[part.place].parameters())
        del part


def test_draws_are_repeatable_and_differ(tokens):
    model = tiny_moe("mixtral", num_hidden_layers=2)
    stream = stream_of(model, tokens)
    changes = [{0: narrower("mixtral", 8)}]
    one, again, other = (estimates(stream, changes, seed=seed).kl_CN for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("model_type", ["gemma2", "granite", "mixtral"])
def test_a_gradient_is_that_of_labels_drawn_by_the_model(model_type, padded):
    """Of logits that are capped (gemma2) or scaled (granite), too; draws are shared work."""
    model = any_model(model_type, num_hidden_layers=2)
    draws = torch.Generator().manual_seed(3)
    body, last = model.model, list[Tensor]()
    body.norm.register_forward_pre_hook(lambda _, entering: last.append(entering[0]))
    wanted_KBLD = []
    for n in range(len(padded.input_ids)):
        window = padded.rows(slice(n, n + 1))
        logits = model(window.input_ids, attention_mask=window.attention_mask).logits
        logp_TV = logits[predicting(window.labels)].float().log_softmax(-1)
        below_TV = logp_TV.double().exp().cumsum(-1)
        drawn_TK = torch.rand(len(below_TV), 2, generator=draws).double() * below_TV[:, -1:]
        labels_TK = torch.searchsorted(below_TV.detach(), drawn_TK.detach())
        sums = logp_TV.gather(1, labels_TK).sum(0)
        wanted_KBLD.append([torch.autograd.grad(s, last[-1], retain_graph=True)[0] for s in sums])
    stream = stream_of(model, padded)
    parts = priced_layers(stream, draws=2, seed=3)
    part = next(parts)
    assert part.place == 1
    for spill, wanted in zip(part._gradients, zip(*wanted_KBLD, strict=True), strict=True):
        torch.testing.assert_close(torch.cat([*spill]), torch.cat(wanted), rtol=1e-4, atol=1e-6)


def test_changed_embeddings_are_estimated_and_a_changed_head_is_measured(padded):
    model = tiny_model("llama", num_hidden_layers=2)
    stream = stream_of(model, padded)

    @contextmanager
    def changed(name, whole):
        weight = whole.get_parameter(name)
        before, generator = weight.detach().clone(), torch.Generator().manual_seed(3)
        with torch.no_grad():
            weight += 0.1 * before.std() * torch.randn(before.shape, generator=generator)
            yield whole
            weight.copy_(before)

    def logits():
        mask = padded.attention_mask
        with torch.no_grad():
            found = model(input_ids=padded.input_ids, attention_mask=mask).logits
        return log_probabilities(found, padded.labels)

    places = {"model.embed_tokens.weight": BEFORE, "lm_head.weight": 2}
    changes = [{place: partial(changed, name)} for name, place in places.items()]
    found, original = estimates(stream, changes, draws=128).kl_CN.mean(1), logits()
    for name, kl, tolerance in zip(places, found.tolist(), (0.25, 1e-4), strict=True):
        with changed(name, model):
            measured = divergence(original, logits()).mean().item()
        assert measured > 1e-6
        assert kl == pytest.approx(measured, rel=tolerance)


def test_finished_layers_of_a_killed_pass_are_not_run_again(tokens, tmp_path):
    model = tiny_moe("mixtral", num_hidden_layers=3)
    arch = base_arch(model.config)
    stream = stream_of(model, tokens)
    seen, killed = list[int](), [True]

    @contextmanager
    def narrowed(place, layer):
        if killed[0] and place == 1:
            raise KeyboardInterrupt
        seen.append(place)
        with changed_by(layer, arch, narrower("mixtral", 4 + 4 * place)) as other:
            assert other is not None
            yield other

    changes = [{i: partial(narrowed, i)} for i in range(3)]
    with pytest.raises(KeyboardInterrupt):
        estimates(stream, changes, 2, folder=tmp_path)
    assert seen == [2]
    killed[0] = False
    resumed = estimates(stream, changes, 2, folder=tmp_path)
    assert seen == [2, 1, 0]
    whole = estimates(stream, changes, 2)
    assert torch.equal(resumed.v_CKN, whole.v_CKN)
    assert whole.kl_CN.mean(1).min() > 0


def test_changes_of_several_layers_add_up(tokens):
    """Before they are squared: together they are what one change of all of them is."""
    model = tiny_moe("mixtral", num_hidden_layers=3)
    stream = stream_of(model, tokens)
    changes = [{i: narrower("mixtral", 4)} for i in range(3)]
    found = estimates(stream, [*changes, {i: changes[i][i] for i in range(3)}], 4)
    torch.testing.assert_close(found.v_CKN[:3].sum(0), found.v_CKN[3])
    assert not torch.allclose(found.kl_CN[:3].sum(0), found.kl_CN[3])


def named(module):
    """All but the head, by transformers' names."""
    return module if module.startswith("model.") else None


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["llama", "qwen2_moe", "gpt_oss"])
def test_means_of_squares_of_a_layer_at_a_time_are_those_of_the_whole(model_type, tokens, tmp_path):
    model = any_model(model_type)
    model.save_pretrained(tmp_path / "model")
    found = importance(resolve(str(tmp_path / "model")), tokens, named)
    wanted = {}
    routed = {}

    def entered(name):
        def hook(_, args):
            x_TI = args[0].flatten(0, -2)
            wanted[f"{name}.weight"] = (x_TI.double() ** 2).mean(0).float()

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and named(name):
            module.register_forward_pre_hook(entered(name))
    arch = base_arch(model.config)
    layers = arch.moe_layers(model) if hasattr(arch, "moe_layers") else []
    for i in layers:
        block = arch.mixture(arch.layers(model)[i]).block
        block.register_forward_pre_hook(
            lambda _, args, i=i: routed.__setitem__(i, args[0].flatten(0, -2))
        )
    model.eval()(input_ids=tokens.input_ids)
    for i, x_TD in routed.items():
        view = arch.mixture(arch.layers(model)[i])
        _, _, chosen_TK = view.router(x_TD)
        inputs, hidden = [], []
        for e in range(view.count):
            x_ND = x_TD[[e in chosen for chosen in chosen_TK.tolist()]]
            for rows, x in ((inputs, x_ND), (hidden, view.hidden(e, x_ND))):
                rows.append((x.double() ** 2).mean(0) if len(x) else torch.ones(x.shape[1]))
        wanted[f"blk.{i}.ffn_gate_exps.weight"] = torch.cat(inputs).float()
        wanted[f"blk.{i}.ffn_up_exps.weight"] = torch.cat(inputs).float()
        wanted[f"blk.{i}.ffn_down_exps.weight"] = torch.cat(hidden).float()
    assert found.keys() == wanted.keys()
    for name, mean in wanted.items():
        torch.testing.assert_close(found[name], mean, rtol=1e-4, atol=1e-7)


def test_an_expert_that_no_token_reached_weighs_its_inputs_alike():
    tally = Tally()
    for x_NI in (torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([[2.0, 1.0]])):
        tally.add("a.square_EI", x_NI.square().sum(0), 1, 2)
        tally.add("a.calls_E", torch.tensor(len(x_NI)), 1, 2)
    assert means(tally.stats())["a"].tolist() == pytest.approx([1, 1, 14 / 3, 5 / 3])
