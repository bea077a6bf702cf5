"""Channel skipping: what is chosen, what is computed, what is counted, what is said."""

from __future__ import annotations

import copy
import json
import logging
import sys
from dataclasses import replace

import pytest
import torch
from builders import VOCAB, converted, loaded, tiny_model, tiny_moe
from cases import many_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from shrunken import small_model
from torch import nn

import moesaic
from moesaic import MoesaicError
from moesaic.arch.lookup import base_arch
from moesaic.data.text import Tokens
from moesaic.layers.base import same
from moesaic.layers.channels import ChannelsLayer, column_norms
from moesaic.layers.pruned import PrunedLayer
from moesaic.methods.channels import method
from moesaic.methods.channels.config import TEALConfig, WINAConfig
from moesaic.methods.channels.gradients import _size, gradient_sizes
from moesaic.methods.channels.method import cut_of, top
from moesaic.methods.channels.projections import Projection, projections
from moesaic.methods.channels.thresholds import Scores, one_threshold
from moesaic.metrics.score import score
from moesaic.metrics.size import model_size
from moesaic.nn import kernels
from moesaic.nn.channel_linear import ChannelExperts, ChannelLinear, Cut
from moesaic.nn.phase import Phase, set_mode
from moesaic.observation.stream import LayerStream
from moesaic.observation.tap import Squares
from moesaic.surgery import applied


def prompt(rows=2, length=10, seed=0):
    return torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def skipping(model, calibration=None, **options):
    """A model whose layers all skip by WINA at one share."""
    return moesaic.carve(model, WINAConfig(**options), calibration=calibration).model.eval()


@torch.no_grad()
def steps(model, ids):
    """Logits of a prompt but its last token, and of that one, decoded."""
    first = model(ids[:, :-1], use_cache=True)
    return first.logits, model(ids[:, -1:], past_key_values=first.past_key_values).logits


# --- what is chosen ------------------------------------------------------------------------------


def test_channels_of_the_highest_scores_are_chosen():
    x, scale = torch.tensor([[3.0, -2.0, 1.0, 0.5]]), torch.tensor([1.0, 1.0, 5.0, 1.0])
    assert kernels.chosen(x, None, 2, 0.0).tolist() == [[True, True, False, False]]
    assert kernels.chosen(x, scale, 2, 0.0).tolist() == [[True, False, True, False]]
    assert kernels.chosen(x, scale, -1, 2.5).tolist() == [[True, False, True, False]]
    assert kernels.chosen(x, scale, -1, 2.0).tolist() == [[True, False, True, False]]


def test_column_norms_are_of_inputs_whichever_way_a_weight_lies():
    weight = torch.tensor([[3.0, 1.0], [4.0, 0.0]])
    assert column_norms(weight).tolist() == [5.0, 1.0]
    assert column_norms(weight.T.contiguous(), transposed=True).tolist() == [5.0, 1.0]


# --- what is computed ----------------------------------------------------------------------------

WAYS = ["numba", "masked"]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Products by numba and, as of many rows and under gradients, dense and masked."""
    if request.param == "masked":
        monkeypatch.setattr("moesaic.nn.channel_linear.here", lambda *_: False)
    return request.param


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows_type", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 7, 5), (8, 33, 64), (3, 128, 17)])
def test_a_product_is_that_of_the_chosen_channels(
    threads, rows_type, dtype, tokens, inputs, outputs, monkeypatch
):
    monkeypatch.setattr(kernels, "APART", 0)
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(tokens, inputs, generator=generator).to(dtype)
    rows = torch.randn(3, inputs, outputs, generator=generator).to(rows_type)
    scale = torch.rand(3, inputs, generator=generator) + 0.1
    group = torch.randint(0, 3, (tokens,), generator=generator)
    torch.set_num_threads(threads)
    try:
        for keep, threshold in ((inputs // 2, 0.0), (1, 0.0), (inputs, 0.0), (-1, 0.5), (-1, 1e9)):
            on = kernels.chosen(x, scale[group], keep, threshold)
            wanted = torch.einsum("ti,tio->to", (x * on).float(), rows[group].float())
            found = kernels.Product(rows, scale, keep, threshold)(x, group)
            assert found.dtype == dtype
            close = 1e-5 if dtype == torch.float32 else 0.02
            torch.testing.assert_close(found.float(), wanted, rtol=close, atol=10 * close)
    finally:
        torch.set_num_threads(1)


def test_a_product_of_a_type_that_kernels_do_not_know_is_refused():
    with pytest.raises(TypeError, match="float16 on cpu"):
        kernels.Product(torch.ones(4, 2).half(), None, 2, 0.0)


@pytest.mark.parametrize("matrices", [(), (3,)])
@pytest.mark.parametrize("outputs", [2048, 2016])
def test_rows_of_whole_pages_are_set_apart(matrices, outputs):
    weight = nn.Parameter(torch.randn(*matrices, outputs, 5).bfloat16(), requires_grad=False)
    before = weight.clone()
    rows = kernels.rows_of(weight)
    assert rows.stride(-2) == (2080 if outputs == 2048 else outputs)
    assert kernels.rows_of(weight).data_ptr() == rows.data_ptr()  # once
    assert torch.equal(weight, before)
    group = torch.tensor([2, 0]) if matrices else None
    x = torch.randn(2, 5).bfloat16()
    found = kernels.Product(rows, None, 5, 0.0)(x, group)
    matrix = before.float() if group is None else before[group].float()
    wanted = torch.einsum("ti,...toi->to" if matrices else "ti,oi->to", x.float(), matrix)
    torch.testing.assert_close(found.float(), wanted, rtol=0.01, atol=0.01)


def test_a_product_is_rounded_as_torch_rounds():
    """To the nearest bfloat16, of two to the even one; what is not finite stays so."""
    numbers = torch.arange(0x3F7F_0000, 0x3F81_0000, 0x1000, dtype=torch.int32).view(torch.float32)
    numbers = torch.cat([numbers, -numbers, torch.tensor([0.0, torch.inf, torch.nan, 3e38])])
    half = torch.tensor([[1.0]], dtype=torch.bfloat16)
    found = kernels.Product(numbers[None], None, 1, 0.0)(half)
    torch.testing.assert_close(found[0], numbers.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_threads_are_torchs_own_and_where_it_has_others_one_does_it_all(monkeypatch):
    from moesaic.nn.kernels import cpu

    run = cpu._torch_threads()
    assert run is not None or sys.platform != "linux"
    calls = []
    monkeypatch.setattr(kernels, "APART", 0)
    x, rows = torch.randn(2, 3, 20), torch.randn(20, 100)
    torch.set_num_threads(2)
    try:
        for way in (run and (lambda *given: calls.append(given[2]) or run(*given)), None):
            monkeypatch.setattr(cpu, "_torch_threads", lambda way=way: way)
            found = kernels.Product(rows, None, 20, 0.0)(x)
            torch.testing.assert_close(found, x @ rows)
    finally:
        torch.set_num_threads(1)
    assert calls == ([2] if run else [])


def test_a_product_is_laid_out_anew_where_its_weight_was_moved():
    linear = nn.Linear(6, 4, bias=False)
    vars(linear).update(cut=Cut(0.5, keep=3), phase=Phase(), tallies={}, product=None)
    linear.__class__ = ChannelLinear
    linear.register_buffer("scale", torch.rand(6) + 0.1)
    linear.phase.single = True
    x = torch.randn(1, 1, 6)

    def right(module):
        on = kernels.chosen(x.to(module.weight.dtype), module.scale, 3, 0.0)
        wanted = (x * on) @ module.weight.float().mT
        torch.testing.assert_close(
            module(x.to(module.weight.dtype)).float(), wanted, rtol=0.02, atol=0.02
        )

    with torch.no_grad():
        right(linear)
        laid = linear.product
        right(linear)
        assert linear.product is laid, "once"
        linear.weight.mul_(2)
        right(linear)
        assert linear.product is laid, "its values are read where they are"
        linear.weight.data = torch.randn(4, 6)
        right(linear)
        linear.scale = torch.rand(6) + 0.1
        right(linear)
        other = copy.deepcopy(linear)
        assert other.product is None, "no second copy of a weight is kept"
        linear.weight.zero_()
        right(other)
        other.bfloat16()
        assert other.product is None
        right(other)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=40), st.data()
)
def test_of_equal_scores_the_first_are_taken_by_numba_and_by_torch(values, data):
    """Ties and zeros: so many channels, the highest ones, and the same ones."""
    keep = data.draw(st.integers(0, len(values)))
    x = torch.tensor([values])
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))
    wanted = sorted(order[:keep])
    assert kernels.chosen(x, None, keep, 0.0)[0].nonzero().flatten().tolist() == wanted
    taken = torch.zeros(len(values))
    taken[wanted] = x[0, wanted]
    assert torch.equal(kernels.Product(torch.eye(len(values)), None, keep, 0.0)(x)[0], taken)


def test_bfloat16_tokens_of_equal_scores_give_the_same_with_and_without_kernels():
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = torch.eye(512).bfloat16()
    for keep in (100, 256, 400):
        on = kernels.chosen(x, None, keep, 0.0)
        assert torch.equal(kernels.Product(rows, None, keep, 0.0)(x), x * on), keep


@pytest.fixture
def without_numba(monkeypatch):
    """As where no wheel of numba fits."""
    monkeypatch.setitem(sys.modules, "moesaic.nn.kernels.cpu", None)
    monkeypatch.delattr(kernels, "cpu", raising=False)
    kernels.fast.cache_clear()
    yield
    kernels.fast.cache_clear()


def test_without_numba_it_is_said_before_anything_is_computed(without_numba, caplog, monkeypatch):
    from moesaic.methods.channels.method import Channels

    said = []
    monkeypatch.setattr(Channels, "run", lambda *_: said.append(list(caplog.messages)) or 1 / 0)
    with caplog.at_level(logging.WARNING, "moesaic"), pytest.raises(ZeroDivisionError):
        skipping(tiny_model("llama"), active=0.6)
    ((before,),) = said
    assert before.startswith("No compiled functions for cpu here (")
    assert "decoding leaves out no channels" in before


MODELS = [lambda: tiny_model("llama"), lambda: tiny_moe("mixtral")]


@pytest.mark.parametrize("make", MODELS)
def test_without_numba_a_result_is_not_slower_than_its_original(make, without_numba):
    """It does what the original does, operation by operation."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Listed(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            done.append(function)
            return function(*args, **(kwargs or {}))

    found = []
    for model in (make(), skipping(make(), active=0.6)):
        done = []
        with Listed():
            logits = steps(model, prompt())
        found.append((done, logits))
    (before, wanted), (after, logits) = found
    assert before == after
    assert all(map(torch.equal, logits, wanted))


def test_a_kernel_that_cannot_be_built_is_done_without(monkeypatch, caplog):
    from moesaic.nn.kernels import cpu

    def broken(*_, **__):
        raise RuntimeError("no such target\nand much more")

    monkeypatch.setattr(cpu, "sums", broken)
    kernels.fast.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "moesaic"):
            assert [kernels.fast() for _ in range(2)] == [None, None]
        (said,) = caplog.messages
        assert said.startswith("No compiled functions for cpu here (no such target): ")
    finally:
        kernels.fast.cache_clear()


def test_where_triton_cannot_compile_nothing_is_left_out(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "moesaic.nn.kernels.gpu", None)
    kernels.fast.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "moesaic"):
            found = [
                kernels.reads_rows(torch.device(d), torch.float32)
                for d in ("cuda", "cuda", "meta", "cpu")
            ]
        assert found == [False, False, False, True]
        (said,) = caplog.messages
        assert said.startswith("No compiled functions for cuda here (")
    finally:
        kernels.fast.cache_clear()


@pytest.mark.parametrize("model_type", ["llama", "phi", "phi3", "gemma2"])
def test_prompts_run_dense_and_decoding_skips(way, model_type):
    model, ids = tiny_model(model_type), prompt()
    plain_prompt, plain_step = steps(model, ids)
    skips = skipping(model, active=0.6)
    found_prompt, found_step = steps(skips, ids)
    assert torch.equal(found_prompt, plain_prompt)
    with set_mode(skips, "never"):
        torch.testing.assert_close(steps(skips, ids)[1], plain_step)
    assert (found_step - plain_step).abs().max() > 1e-3


@pytest.mark.parametrize(
    "make",
    [lambda: tiny_model("llama"), lambda: tiny_moe("gpt_oss"), lambda: tiny_moe("qwen2_moe")],
)
def test_a_step_is_what_masking_every_input_gives(way, make):
    """Decoded by rows, and computed densely with what is left out set to zero."""
    skips, ids = skipping(make(), active=0.7), prompt(3)
    by_rows = steps(skips, ids)[1]
    first = skips(ids[:, :-1], use_cache=True)
    with set_mode(skips, "always"):
        masked = skips(ids[:, -1:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(by_rows, masked, rtol=1e-4, atol=1e-5)


def test_a_row_of_a_batch_is_decoded_as_alone(way):
    skips, ids = skipping(tiny_model("llama"), active=0.6), prompt(12)  # more than FEW
    together = steps(skips, ids)[1]
    alone = torch.cat([steps(skips, row[None])[1] for row in ids])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_weights_are_turned_in_memory_and_stored_as_they_were(way, tmp_path):
    model = tiny_model("llama")
    result = moesaic.carve(model, WINAConfig(active=0.7))
    skips, ids = result.model.eval(), prompt()
    linear = skips.model.layers[0].mlp.up_proj
    assert isinstance(linear, ChannelLinear)
    before = linear.weight.data_ptr()
    steps(skips, ids)
    assert linear.weight.shape == (64, 32)
    assert linear.weight.stride() == ((1, 64) if way == "numba" else (32, 1))
    assert (linear.weight.data_ptr() != before) == (way == "numba")
    assert torch.equal(linear.weight, model.model.layers[0].mlp.up_proj.weight)
    again = loaded(result.save(tmp_path / "out"))
    assert again.model.layers[0].mlp.up_proj.weight.stride() == (32, 1)
    for a, b in zip(steps(again, ids), steps(skips, ids), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_weight_that_changes_in_place_is_read_as_it_is(way):
    """No copy is kept that could be stale: an adapter that is merged counts at once."""
    skips, ids = skipping(tiny_model("llama"), active=0.7), prompt()
    before = steps(skips, ids)[1]
    skips.model.layers[0].mlp.up_proj.weight.data += 1.0
    assert (steps(skips, ids)[1] - before).abs().max() > 1e-3


def test_gradients_pass_where_somebody_trains(way):
    skips, ids = skipping(tiny_model("llama"), active=0.7), prompt()
    with set_mode(skips, "always"):
        skips(ids, labels=ids).loss.backward()
    weight = skips.model.layers[0].mlp.up_proj.weight
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0
    first = skips(ids[:, :-1], use_cache=True)
    step = skips(ids[:, -1:], past_key_values=first.past_key_values)
    step.logits.sum().backward()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's
def test_adapters_go_around_projections_that_skip(way, tmp_path):
    peft = pytest.importorskip("peft")
    skips, ids = skipping(tiny_model("llama"), active=0.7), prompt()
    before = steps(skips, ids)
    settings_ = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(skips, settings_).eval()
    with_adapter = steps(adapted, ids)
    assert (with_adapter[1] - before[1]).abs().max() > 1e-3
    assert 0 < model_size(adapted.base_model.model).active_ratio < 1
    merged = adapted.merge_and_unload().eval()
    torch.testing.assert_close(steps(merged, ids)[0], with_adapter[0], rtol=1e-3, atol=1e-4)


def test_a_batch_with_padding_generates_what_each_row_does_alone(way):
    skips = skipping(tiny_model("llama"), active=0.7)
    ids = prompt(2, 8)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids[1:, 3:]], 1)
    both = torch.cat([ids[:1], padded])
    mask = torch.ones_like(both)
    mask[1, :3] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    together = skips.generate(both, attention_mask=mask, **options)
    first = skips.generate(ids[:1], attention_mask=torch.ones(1, 8, dtype=torch.long), **options)
    second = skips.generate(
        ids[1:, 3:], attention_mask=torch.ones(1, 5, dtype=torch.long), **options
    )
    assert torch.equal(together[0], first[0])
    assert torch.equal(together[1, 3:], second[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@torch.no_grad()
def test_a_compiled_step_is_the_same():
    skips, ids = skipping(tiny_model("llama"), active=0.7), prompt()
    wanted = steps(skips, ids)
    torch._dynamo.reset()
    found = steps(torch.compile(skips, backend="eager"), ids)
    torch._dynamo.reset()
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", MODELS)
def test_nothing_waits_for_the_host_where_masks_decide(make, monkeypatch):
    """Away from CPU no step asks for a value: tensors without values do, and CUDA graphs could."""
    monkeypatch.setattr("moesaic.nn.phase.reads_rows", lambda *_: True)
    monkeypatch.setattr("moesaic.nn.channel_linear.here", lambda *_: False)
    skips = skipping(make(), active=0.7).to("meta")
    layer = skips.model.layers[0]
    x = torch.empty(2, 1, 32, device="meta")
    place = torch.zeros(2, 1, dtype=torch.long, device="meta")
    with torch.no_grad():
        out = layer(x, position_embeddings=skips.model.rotary_emb(x, place))
    assert out.shape == x.shape
    assert next(m.phase for m in layer.modules() if isinstance(m, ChannelLinear)).single


# --- what is counted -----------------------------------------------------------------------------


def test_active_is_the_share_that_a_token_reads_by_hand():
    model = tiny_model("llama")
    skips = skipping(model, active=0.6, where="ffn")
    sizes = [p.numel() for n, p in model.named_parameters() if "_proj.weight" in n]
    read = 0
    for name, module in skips.named_modules():
        if isinstance(module, nn.Linear) and name.endswith("_proj"):
            share = module.cut.keep / module.in_features if isinstance(module, ChannelLinear) else 1
            read += share * module.weight.numel()
            assert isinstance(module, ChannelLinear) == ("mlp" in name)
    assert model_size(skips).active_ratio == pytest.approx(read / sum(sizes))
    assert model_size(skips).active_ratio == pytest.approx(0.6, abs=0.01)


def test_what_thresholds_read_is_counted_on_the_text():
    result = moesaic.carve(
        tiny_model("llama"), WINAConfig(active=0.7, choice="threshold"), calibration=many_tokens()
    )
    found = score(result.model, many_tokens())
    assert found.nominal_active_ratio == pytest.approx(0.7, abs=1e-6)
    assert found.active_ratio == pytest.approx(0.7, abs=0.01)
    assert found.active_ratio != found.nominal_active_ratio
    module = result.model.model.layers[0].mlp.up_proj
    assert module.phase.mode == "decoding"
    assert module.tallies["weight"].all == 0


@pytest.mark.parametrize("make", MODELS)
def test_padding_is_not_counted_whatever_token_it_is(make, padded):
    """The windows alone, without their padding, read the same share."""
    skips = skipping(make(), active=0.6, choice="threshold", calibration=padded)
    ids, mask = padded.input_ids, padded.attention_mask
    found = [score(skips, Tokens(ids.masked_fill(~mask, pad), mask)) for pad in (0, 7)]
    assert found[0].active_ratio == found[1].active_ratio
    with torch.no_grad(), set_mode(skips, "always"):
        for row, real in zip(ids, mask, strict=True):
            skips(row[None, real])
        assert found[0].active_ratio == pytest.approx(model_size(skips).active_ratio, abs=1e-4)


def test_skipping_inside_experts_counts_those_that_a_token_runs():
    model = tiny_moe("mixtral")
    before, after = model_size(model), model_size(skipping(model, active=0.75))
    assert after.active_ratio == pytest.approx(0.75 * before.active_ratio, rel=0.01)
    assert after.layers[0].top_k == before.layers[0].top_k


def test_experts_that_skip_nothing_are_read_whole():
    """Those of Nemotron-H have no gates, and are left as they are beside a shared path that skips.

    What is asked for is the mean over both.
    """
    model = small_model("nemotron_h")
    before, after = model_size(model), model_size(skipping(model, active=0.9))
    assert after.active_ratio == pytest.approx(0.9 * before.active_ratio, rel=0.01)


def test_evaluation_measures_decoding():
    model, tokens = tiny_model("llama"), many_tokens()
    skips = skipping(model, active=0.5)
    found = score(skips, tokens).perplexity
    assert found != score(model, tokens).perplexity
    with set_mode(skips, "never"):  # perplexity says how every token is measured
        assert score(skips, tokens).perplexity == found


# --- what is decided -----------------------------------------------------------------------------


def test_wina_looks_at_no_text():
    model = tiny_model("llama")
    result = moesaic.carve(model, WINAConfig(active=0.8))
    assert result.plan.calibration == ""
    assert {
        cut.keep / p
        for layer in result.plan.layers.values()
        for path, cut in layer.cuts.items()
        for p in (64 if "down" in path else 32,)
    } == {26 / 32, 51 / 64}


def test_thresholds_are_quantiles_of_scores():
    scores = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0)).abs()
    seen = Scores()
    for part in scores.split(700):
        seen.add(part)
    for share in (0.1, 0.5, 0.9):
        wanted = scores.flatten().quantile(1 - share).item()
        assert seen.threshold(share) == pytest.approx(wanted, rel=0.011)
        assert seen.share(seen.threshold(share)) == pytest.approx(share, abs=1e-3)
    assert seen.threshold(1.0) == 0
    assert seen.share(0.0) == 1


def test_one_threshold_meets_the_share_and_pays_by_the_column():
    generator = torch.Generator().manual_seed(0)
    values = {
        "a": torch.rand(5000, generator=generator),
        "b": 3 * torch.rand(5000, generator=generator),
    }
    scores = {}
    for name, value in values.items():
        scores[name] = Scores()
        scores[name].add(value)
    weights, prices = {"a": 10.0, "b": 30.0}, {"a": 4.0, "b": 16.0}
    found = one_threshold(scores, weights, prices, 0.6)
    read = sum(weights[n] * (values[n] > found[n]).float().mean().item() for n in values)
    assert read / 40 == pytest.approx(0.6, abs=0.01)
    assert found["b"] / found["a"] == pytest.approx(2)  # the root of what a column is longer


def test_gradient_sizes_are_those_of_a_perturbed_input():
    """E[g_i^2], with g by central differences of one projection's input alone."""
    model = tiny_model("llama").double()
    arch, ids = base_arch(model.config), prompt(1, 5)
    path, i = "mlp.up_proj", 2
    wanted = {i: [Projection(path, 32, 64, 1.0, False)]}
    tokens = many_tokens()
    tokens = type(tokens)(ids)
    stream = LayerStream(model, arch, tokens, view=arch.ffn_of)
    (found,) = gradient_sizes(stream, wanted, lambda items, *_: items).values()
    module = model.model.layers[i].mlp.up_proj

    @torch.no_grad()
    def loss(at, channel, step):
        def move(_, args):
            x = args[0].clone()
            x[0, at, channel] += step
            return (x,)

        handle = module.register_forward_pre_hook(move)
        logits = model(ids).logits[:, :-1].float().double()
        handle.remove()
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
        ).item()

    for channel in (0, 7):
        slopes = [(loss(t, channel, 1e-2) - loss(t, channel, -1e-2)) / 2e-2 for t in range(5)]
        wanted_size = (sum(g * g for g in slopes) / 5) ** 0.5
        assert found[channel].item() == pytest.approx(wanted_size, rel=0.02)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_gradient_sizes_of_experts_are_means_over_their_own_tokens(model_type, padded):
    """With zeros added to what each expert's projections take in, whose gradients are asked for."""
    model, i = tiny_moe(model_type), 1
    arch, mask = base_arch(model.config), padded.attention_mask.bool()
    layer = model.model.layers[i]
    view, module = arch.mixture(layer), arch.mixture(layer).experts
    path = f"{arch.ffn_path}.{arch.experts}"
    sizes = {"gate_up_proj": 32, "down_proj": view.width}
    wanted = {i: [Projection(f"{path}.{n}", s, 1, 1.0, False, True) for n, s in sizes.items()]}
    stream = LayerStream(model, arch, padded, view=arch.ffn_of)
    found = gradient_sizes(stream, wanted, lambda items, *_: items)
    zeros = {n: torch.zeros(8, mask.numel(), s, requires_grad=True) for n, s in sizes.items()}
    ran = torch.zeros(8, mask.numel(), dtype=torch.bool)

    def forward(x, chosen, weights):
        shape, x = x.shape, x.flatten(0, -2)
        out = 0
        for e in range(8):
            w = (weights * (chosen == e)).sum(-1, keepdim=True)
            ran[e] = (chosen == e).any(-1) & mask.flatten()
            h = view.hidden(e, x + zeros["gate_up_proj"][e]) + zeros["down_proj"][e]
            out = out + w * view.written(e, h)
        return out.view(shape)

    module.forward = forward
    ids = padded.input_ids
    logits = model(ids, attention_mask=mask.long()).logits[:, :-1]
    labels = ids[:, 1:].masked_fill(~mask[:, 1:], -100)
    nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    del module.forward
    calls = ran.sum(1)
    assert 0 < calls.min() < calls.max()
    for name in sizes:
        expected = (zeros[name].grad.square().sum(1) / calls[:, None]).sqrt()
        torch.testing.assert_close(found[i, f"{path}.{name}"], expected, rtol=1e-3, atol=1e-7)


def test_an_expert_that_no_token_runs_weighs_its_channels_as_the_others_do():
    squares, key = Squares(), (0, "mlp.experts.down_proj")
    squares.add(key, torch.tensor([[1.0, 3.0]]), 0, 3)
    squares.add(key, torch.tensor([[12.0, 4.0], [0, 0], [0, 0], [0, 0]]).sqrt(), 2, 3)
    expected = torch.tensor([[1.0, 9.0], [2.0, 5.0], [3.0, 1.0]]).sqrt()
    torch.testing.assert_close(_size(squares, key, True).float(), expected)


def test_gradients_lead_to_mixtures_that_skip(way, tmp_path):
    """Slimmed before: shares of attention, experts and shared path by one threshold."""
    slim = moesaic.slim(tiny_moe("qwen2_moe"), moesaic.SlimConfig(keep=0.5), text=many_tokens())
    config = WINAConfig(active=0.7, gradients=True)
    result = moesaic.carve(slim.model, config, calibration=many_tokens())
    skips, ids = result.model.eval(), prompt()
    experts = skips.model.layers[2].mlp.experts
    assert experts.down_proj_scale.shape == (8, 8)
    found = score(result.model, many_tokens())
    before = model_size(slim.model).active_ratio
    assert found.active_ratio == pytest.approx(0.7 * before, rel=0.05)
    again = loaded(result.save(tmp_path / "out"))
    for a, b in zip(steps(again, ids), steps(skips, ids), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_gradients_decide_how_many_and_the_choice_whether_tokens_differ():
    config = WINAConfig(active=0.7, gradients=True)
    plans = [
        moesaic.carve(tiny_model("llama"), replace(config, choice=choice), text=many_tokens()).plan
        for choice in ("top-k", "threshold")
    ]
    shares = set()
    for fixed, open_ in zip(*(plan.layers.values() for plan in plans), strict=True):
        for path, cut in fixed.cuts.items():
            inputs = len(fixed.factors[path])
            assert torch.equal(fixed.factors[path], open_.factors[path])
            assert cut.keep == max(1, round(open_.cuts[path].share * inputs))
            assert open_.cuts[path].keep < 0 < open_.cuts[path].threshold
            shares.add(cut.share)
    assert len(shares) > 4


@pytest.mark.parametrize(
    "options",
    [
        {"choice": "threshold"},
        {"choice": "threshold", "shares": "greedy", "steps": 2},
        {"gradients": True},
    ],
)
def test_a_resumed_run_decides_what_is_missing_alone(options, tmp_path, monkeypatch):
    model, config = tiny_model("llama"), WINAConfig(active=0.7, **options)
    folder = tmp_path / "progress"
    run = {"calibration": many_tokens(), "progress": folder}
    first = moesaic.carve(model, config, **run).plan
    (folder / "layer-0002-result.safetensors").unlink()
    weighed, own = [], method.scored

    def watched(turn, *arguments):
        weighed.append(turn.block.index)
        return own(turn, *arguments)

    monkeypatch.setattr(method, "scored", watched)
    monkeypatch.setattr("moesaic.methods.channels.method.gradient_sizes", None)
    again = moesaic.carve(model, config, **run).plan
    assert weighed == ([0, 1, 2, 3] if options.get("gradients") else [2])
    for i, layer in first.layers.items():
        assert same(layer, again.layers[i])


def test_greedy_takes_each_step_where_the_output_changes_least():
    """Against a search that computes every trial anew, in plain tensors."""
    model = tiny_model("llama")
    options = TEALConfig(active=0.7, choice="top-k", steps=3)
    result = moesaic.carve(model, options, calibration=many_tokens())
    arch = base_arch(model.config)
    layer = model.model.layers[0]
    use = arch.use(layer)
    found = projections(layer, arch, use, "all")
    total = sum(p.run for p in found)
    tokens = many_tokens()
    inputs = {}
    handle = layer.register_forward_pre_hook(
        lambda _, a, k: inputs.update(x=a[0], k=k), with_kwargs=True
    )
    with torch.no_grad():
        model(tokens.input_ids[:8], use_cache=False)  # a batch of 512 tokens
    handle.remove()
    shares, left, step, now = {p.path: 1.0 for p in found}, 0.3 * total, 0.1 * total, 0.0
    with torch.no_grad():
        target = layer(inputs["x"], **inputs["k"])
        while left > 1e-6 * total:
            trials = []
            for p in found:
                taken = min(step, left, shares[p.path] * p.run)
                if taken < 1e-9 * total:
                    continue
                trial = {**shares, p.path: shares[p.path] - taken / p.run}
                plan = ChannelsLayer({q.path: top(q, trial[q.path]) for q in found}, "size")
                with applied(layer, arch, plan) as twin, set_mode(twin, "always"):
                    error = (twin(inputs["x"], **inputs["k"]) - target).square().sum().item()
                trials.append(((error - now) / taken, error, taken, trial))
            _, now, taken, shares = min(trials, key=lambda t: t[0])
            left -= taken
    decided = result.plan.layers[0].cuts
    assert {p.path: decided[p.path].keep for p in found} == {
        p.path: top(p, shares[p.path]).keep for p in found
    }
    assert len({round(s, 3) for s in shares.values()}) > 1


def test_padding_does_not_count(padded):
    """Thresholds from windows with padding are those of their real tokens."""
    model = tiny_model("llama", num_hidden_layers=1)
    arch = base_arch(model.config)
    seen = []
    model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda _, a: seen.append(a[0]))
    with torch.no_grad():
        model(padded.input_ids, attention_mask=padded.attention_mask.long())
    (x,) = seen
    values = x[padded.attention_mask].abs().flatten()
    plan = moesaic.carve(model, TEALConfig(active=0.6, shares="uniform"), calibration=padded).plan
    threshold = plan.layers[0].cuts["self_attn.q_proj"].threshold
    assert threshold == pytest.approx(values.quantile(0.4).item(), rel=0.02)
    assert isinstance(arch.model_type, str)


# --- after other steps ---------------------------------------------------------------------------


def test_experts_that_were_pruned_skip_channels(tmp_path):
    model = converted(tiny_moe("qwen2_moe"), {2: PrunedLayer(torch.tensor([0, 2, 5]))})
    before = model_size(model)
    result = moesaic.carve(model, WINAConfig(active=0.8))
    skips, ids = result.model.eval(), prompt()
    assert isinstance(skips.model.layers[2].mlp.experts, ChannelExperts)
    assert skips.model.layers[2].mlp.experts.gate_up_proj_scale.shape == (3, 32)
    assert model_size(skips).active_ratio == pytest.approx(0.8 * before.active_ratio, rel=0.02)
    again = loaded(result.save(tmp_path / "out"))
    stack = json.loads((tmp_path / "out" / "config.json").read_text())["moesaic"]["layers"]["2"]
    assert [header["kind"] for header in stack] == ["pruned", "channels"]
    for a, b in zip(steps(again, ids), steps(skips, ids), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_experts_that_a_router_skips_are_skipped_here_too(way):
    from moesaic.layers.skipping import SkippingLayer

    model = converted(tiny_moe("mixtral"), {i: SkippingLayer(0.9, "top2") for i in range(3)})
    skips, ids = skipping(model, active=0.8), prompt()
    by_rows = steps(skips, ids)[1]
    first = skips(ids[:, :-1], use_cache=True)
    with set_mode(skips, "always"):
        masked = skips(ids[:, -1:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(by_rows, masked, rtol=1e-4, atol=1e-5)


def test_carved_blocks_are_left_as_they_are():
    from builders import carved_model

    model = carved_model()
    skips = skipping(model, active=0.9)
    assert isinstance(skips.model.layers[1].self_attn.q_proj, ChannelLinear)
    assert type(skips.model.layers[1].mlp.up_proj) is nn.Linear
    assert isinstance(skips.model.layers[0].mlp.up_proj, ChannelLinear)
    assert model_size(skips).active_ratio == pytest.approx(
        0.9 * model_size(model).active_ratio, abs=0.01
    )


# --- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"active": 0.0}, "active 0.0 must be above 0"),
        ({"active": 1.5}, "active 1.5 must be at most 1"),
        ({"gradients": True, "shares": "greedy"}, "gradients give each projection its share"),
    ],
)
def test_wrong_options_are_answered(options, message):
    with pytest.raises(MoesaicError, match=message):
        WINAConfig(**options)


def test_an_active_ratio_out_of_reach_says_what_is_within():
    with pytest.raises(MoesaicError, match=r"out of reach: .* are 0\.\d+ of what a token runs"):
        moesaic.carve(tiny_model("llama"), WINAConfig(active=0.2, where="ffn"))


def test_quantised_models_and_those_that_skip_already_are_refused():
    model = tiny_model("llama")
    skips = skipping(model, active=0.8)
    with pytest.raises(MoesaicError, match="skips channels already"):
        moesaic.carve(skips, WINAConfig())
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(MoesaicError, match="quantised in blocks"):
        moesaic.carve(model, WINAConfig())


def test_a_projection_that_is_quantised_afterwards_is_masked_instead():
    """Its columns cannot be read one by one: the same values, at the cost of all of them."""

    class Quantised(torch.Tensor):
        """A tensor of a class of its own, as quantisers put into models."""

    skips, ids = skipping(tiny_model("llama"), active=0.7), prompt()
    wanted = steps(skips, ids)[1]
    for module in skips.modules():
        if isinstance(module, ChannelLinear):
            data = module.weight.data.contiguous().as_subclass(Quantised)
            module.weight = nn.Parameter(data, requires_grad=False)
    torch.testing.assert_close(
        steps(skips, ids)[1].as_subclass(torch.Tensor), wanted, rtol=1e-4, atol=1e-5
    )


def test_cuts_are_as_near_as_whole_channels_come():
    p = Projection("p", 10, 4, 40.0, False)
    assert top(p, 0.84) == Cut(0.8, 8)
    assert top(p, 0.0) == Cut(0.1, 1)
    assert Cut(0.8, 8).as_json() == {"share": 0.8, "keep": 8}
    assert Cut(0.8, threshold=0.5).as_json() == {"share": 0.8, "threshold": 0.5}
    scores = Scores()
    scores.add(torch.tensor([1.0, 2.0, 4.0, 8.0]))
    assert cut_of(p, 0.5, scores, "threshold").keep < 0


def test_a_saved_model_is_mapped_from_whole_cache_lines(tmp_path):
    """A CPU decodes the same weights up to a tenth slower where their rows lie across lines."""
    out = moesaic.carve(tiny_model("llama"), WINAConfig()).save(tmp_path / "out")
    found = loaded(out)
    assert all(parameter.data_ptr() % 64 == 0 for parameter in found.parameters())
