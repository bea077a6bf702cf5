"""Every mixture of experts takes every verb: as computed here by hand, or refused by its name.

A tiny random model of each architecture. What a plan should compute is worked out on the original
itself: neurons are set to zero, routers go without the experts that left, blocks give the sums of
Eq. 3, layers pass on what they are given. ``-m nightly`` tries more, ``-m slow`` all architectures.
"""

import copy
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property

import pytest
import torch
from builders import drawn_ids, equal, loaded, logits, nightly, same_model
from shrunken import small_model

from moesaic import CondenseConfig, MoesaicError, Recipe, SkipConfig, Tokens, TopKConfig
from moesaic.api import verb as verb_of
from moesaic.arch import support_table
from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.arch.routing import set_top_k
from moesaic.io.source import Source
from moesaic.methods.prune.config import CRITERIA, PruneConfig
from moesaic.methods.slim.config import SCORES, SlimConfig
from moesaic.metrics.score import model_size
from moesaic.plans.condensed import CondensedLayer, DroppedLayer, cache_leaders
from moesaic.plans.cut import CutLayer
from moesaic.sizes import estimate, weight_bytes

SOME = (
    "afmoe",  # a norm after the block, a choice bias of its own
    "axk1",  # a norm that ends the block
    "deepseek_v4",  # layers whose experts a table gives to each token
    "deepseek_v3",  # router groups, a choice bias, a shared path that is counted
    "ernie4_5_moe",  # a router that is kept in float32 beside weights of fewer bits
    "gpt_oss",  # biases, a clamped gate
    "granitemoehybrid",  # a shared path beside the block, which every layer calls
    "hy_v4",  # a clamped gate, several residual streams, layers that hand on
    "inkling_text",  # shared experts that the router weighs, dense layers with a factor
    "llama4_text",  # scores scale what experts are given
    "lfm2_moe",  # dense layers without an activation module, no hidden_act
    "nemotron_h",  # no gates, layers without FFN
    "qwen2_moe",  # a gated shared path
)
OTHERS = sorted({*support_table()["moe"]} - {*SOME})
WHOLE = {"dots3_note", "gemma4", "llama4", "qwen3_5_moe", "qwen4_exp"}
"""They have parts beside text; their language models are others of the list."""


def types(*by_day):
    """All architectures, marked by when they are tried."""
    rest = (name for name in SOME if name not in by_day)
    others = (name for name in OTHERS if name not in WHOLE)
    return [
        *by_day,
        *map(nightly, rest),
        *(pytest.param(name, marks=pytest.mark.slow) for name in others),
    ]


TEXT = Tokens(drawn_ids(8, 16))

BIASED, TURNED, UNGATED = {"gpt_oss"}, {"aria_text", "gpt_oss", "llama4_text"}, {"nemotron_h"}
OWN_GATE = {"deepseek_v4", "gpt_oss", "hy_v4", "inkling2_text"}
OWN_SHARED = {"deepseek_v4"}
MERGED = {"minimax_m3_vl_text"}
NORMED = {"axk1"}
HANDING_ON = {"glm_moe_dsa", "hy_v4"}
INWARD, IN_LAYER = {"llama4_text"}, {"gemma4_text"}
ONE_NUMBER = {"phimoe"}
ONE_WIDTH = {"jamba"}
"""What sets architectures apart, by ``model_type``."""


class Tried:
    """A model, what its blocks are given, and what results should compute."""

    def __init__(self, model_type):
        self.model_type, self.model = model_type, small_model(model_type)
        arch = base_arch(self.model.config)
        assert isinstance(arch, MoEArch)
        self.arch, self.layers = arch, arch.moe_layers(self.model)

    def refused(self, verb, config, why, **options):
        """A verb's result; None where it refuses, which it must ``why``, for these types alone."""
        if not (why if isinstance(why, bool) else self.model_type in why):
            return verb_of(verb, self.model, config, text=TEXT, **options)
        with pytest.raises(MoesaicError, match=self.model_type):
            verb_of(verb, self.model, config, text=TEXT, **options)
        return None

    def view(self, i, model=None):
        return self.arch.mixture(self.arch.layers(model or self.model)[i])

    @cached_property
    def inputs(self):
        """By layer that routes what enters its block (T, D)."""
        found = {}
        with ExitStack() as hooks:
            for i in self.layers:

                def hook(_, args, i=i):
                    found[i] = args[0].flatten(0, -2)

                block = self.arch.ffn_of(self.arch.layers(self.model)[i])
                entry = block if self.arch.entry is None else getattr(block, self.arch.entry)
                hooks.callback(entry.register_forward_pre_hook(hook).remove)
            logits(self.model, TEXT)
        return found

    def handing(self, i):
        """Inside, a block is handed what belongs to those inputs beside them."""
        block = self.arch.ffn_of(self.arch.layers(self.model)[i])
        return self.arch.handing(block, {"input_ids": TEXT.input_ids}, torch.flatten)

    @torch.no_grad()
    def written(self, i, layer=None):
        """What a block and the path beside it write on those inputs, before a norm (T, D)."""
        layer = self.arch.layers(self.model)[i] if layer is None else layer
        block, seen = self.arch.ffn_of(layer), []
        if self.model_type in IN_LAYER:  # no block is run that is not the whole layer
            _, w_TK, chosen_TK = block.router(self.inputs[i])
            given_TD = getattr(block, self.arch.before)(self.inputs[i])
            return block.experts(given_TD, chosen_TK, w_TK)
        norm = getattr(block, self.arch.after) if self.arch.after else None
        if norm is not None:
            handle = norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        with self.handing(i):
            made = block(self.inputs[i][None], **self.view(i).handed)
        made = made[0] if isinstance(made, tuple) else made
        if norm is not None:
            handle.remove()
            made = seen[0]
        if self.arch.beside is not None:
            made = made + getattr(layer, self.arch.beside)(self.inputs[i][None])
        return made.view_as(self.inputs[i])

    def error(self, i, model):
        """How far a result's block is from the original's on the tokens of the text."""
        layer = self.arch.layers(model)[i]
        return (self.written(i, layer) - self.written(i)).norm().item()

    @contextmanager
    def by_hand(self, layers):
        """The original, made to compute what a plan's layers should."""
        twin = copy.deepcopy(self.model)
        with ExitStack() as stack:
            for i, plan in layers.items():
                layer = self.arch.layers(twin)[i]
                if isinstance(plan, DroppedLayer):
                    layer.register_forward_hook(_given_back)
                    continue
                view = self.arch.mixture(layer) if i in self.layers else None
                if isinstance(plan, CutLayer) and plan.kept_E is not None:
                    kept_E = torch.zeros(view.count, dtype=torch.bool)
                    kept_E[plan.experts] = True
                    stack.enter_context(view.restricted(kept_E))
                    _without_neurons(view, plan)
                elif isinstance(plan, CondensedLayer):
                    _summed(self.arch, layer, view, plan)
                elif isinstance(plan, CutLayer) and plan.beta is not None:
                    _skipping(view, plan)
                elif isinstance(plan, CutLayer):
                    set_top_k(view.router, self.arch.parts, plan.top_k)
            yield twin

    def check(self, layers, model):
        """A result computes what was worked out by hand, and something else than the original."""
        with self.by_hand(layers) as twin:
            wanted, found = logits(twin, TEXT), logits(model, TEXT)
        assert torch.isfinite(found).all()
        assert (found - wanted).norm() < 1e-4 * wanted.norm()
        assert (wanted - logits(self.model, TEXT)).norm() > 1e-3 * wanted.norm()


def _given_back(_, args, out):
    return args[0]


@torch.no_grad()
def _without_neurons(view, plan):
    if plan.neurons_EW is None:
        return
    for place, i in enumerate(plan.kept):
        gone = torch.ones(view.width, dtype=torch.bool)
        gone[plan.neurons_of(place, view.width)] = False
        view.weights_of(i)[-1][:, gone] = 0
    if plan.shared_S is not None:
        gone = torch.ones(view.shared_width, dtype=torch.bool)
        gone[plan.shared_S[plan.shared_S >= 0]] = False
        if view.parts.always:
            view.shared_module.down_proj.transpose(1, 2)[gone.view(view.parts.always, -1)] = 0
        else:
            view.shared_ffn.down_DM[:, gone] = 0


def _summed(arch, layer, view, plan):
    """Eq. 3: the shared path, and chosen experts with fixed weights."""

    def hook(_, args, out):
        x_TD = args[0].flatten(0, -2)
        y_TD = torch.zeros_like(x_TD)
        if plan.shared and arch.beside is None:
            gate = 1.0
            if arch.shared_gate is not None:
                gate = torch.sigmoid(getattr(view.block, arch.shared_gate)(x_TD))
                gate = gate if plan.gated else plan.shared_scale
            if arch.parts.always:
                weights_TS = torch.tensor(plan.shared_scale).expand(len(x_TD), -1)
                y_TD = view.shared_module(x_TD, weights_TS)
            else:
                y_TD = gate * view.shared_module(x_TD)
        for i, g in zip(plan.experts, plan.gates_K.tolist(), strict=True):
            y_TD = y_TD + g * view.expert(i, x_TD)
        y = y_TD.view(args[0].shape)
        return (y, None) if isinstance(out, tuple) else y

    view.block.register_forward_hook(hook)
    if arch.beside is not None and not plan.shared:
        getattr(layer, arch.beside).register_forward_hook(lambda _, args, out: 0 * out)


def _skipping(view, plan):
    """Of two experts the lighter one is left out below beta; the other takes over its weight."""

    def hook(_, args, out):
        scores, w_TK, chosen_TK, *shared = out
        first_T1 = w_TK.argmax(-1, keepdim=True)
        heavy_T1, light_T1 = w_TK.gather(-1, first_T1), w_TK.gather(-1, 1 - first_T1)
        skipped_T1 = light_T1 < plan.beta * heavy_T1
        alone_TK = torch.zeros_like(w_TK).scatter(-1, first_T1, heavy_T1 + light_T1)
        return scores, torch.where(skipped_T1, alone_TK, w_TK), chosen_TK, *shared

    view.router.register_forward_hook(hook)


@pytest.fixture(params=types("deepseek_v3", "gpt_oss", "qwen2_moe"), scope="module")
def seen(request):
    return Tried(request.param)


def test_prune_by_every_criterion(seen):
    """Eq. 3's loss is that of the block as it is pruned, and no other criterion has a lower one."""
    names = tuple(name for name in CRITERIA if name != "reconstruction")
    result = seen.refused("prune", PruneConfig(keep=6, refit=False), set(), compare=names)
    seen.check(result.plan.layers, result.model)
    found = {name: result.build(plan) for name, plan in result.comparisons.items()}
    assert {*found} == {*names}
    for i in seen.layers:
        least = seen.error(i, result.model)
        size = 1e-5 * seen.written(i).norm().item()
        assert result.analyses[i]["loss"] == pytest.approx(least, rel=1e-3, abs=size)
        assert all(least <= seen.error(i, model) * 1.001 + size for model in found.values())


@torch.no_grad()
def test_criteria_by_hand(seen):
    """Frequency, gate, EAN and REAP from the experts' module itself, one expert at a time."""
    names = ("frequency", "gate", "ean", "reap")
    configs = {name: PruneConfig(keep=6, score=name, refit=False) for name in names}
    made = {name: seen.refused("prune", configs[name], set()) for name in names}
    for i in seen.layers:
        x_TD, view = seen.inputs[i], seen.view(i)
        with seen.handing(i):
            w_TE = view.routing.weights(view.logits(x_TD))
        one = torch.ones(len(x_TD), 1)
        if seen.model_type in INWARD:  # all at once, each of what its scores make of x: w f(x)
            every = view.experts((w_TE.T[..., None] * x_TD).flatten(0, 1)).view(-1, *x_TD.shape)
            norms = [*(every.norm(dim=-1) / w_TE.T.clamp(min=1e-9))]
        else:
            given_TD = view.before(x_TD)
            chosen = (torch.full((len(x_TD), 1), e) for e in range(view.count))
            each = (view.experts(given_TD, chosen_T1, one) for chosen_T1 in chosen)
            norms = [y_TD.norm(dim=-1) for y_TD in each]
        norm_TE, calls_E = torch.stack(norms, 1) * (w_TE != 0), (w_TE != 0).sum(0)
        wanted = {
            "frequency": calls_E.float(),
            "gate": w_TE.sum(0),
            "ean": norm_TE.sum(0),
            "reap": (w_TE * norm_TE).sum(0) / calls_E.clamp(min=1),
        }
        for name, score_E in wanted.items():
            score = torch.tensor(made[name].analyses[i]["scores"], dtype=torch.float32)
            score, score_E = (s / s.sum() for s in (score, score_E))
            torch.testing.assert_close(score, score_E, rtol=2e-3, atol=1e-5)


@pytest.mark.usefixtures("short_text")
@pytest.mark.parametrize(
    "options",
    [{}, nightly({"progressive": True}), nightly({"allocate": "layers"})],
    ids=["", "progressive", "layers"],
)
def test_a_refit_never_raises_the_error_of_pruning(options, seen):
    plain, refit = (
        seen.refused("prune", PruneConfig(keep=4, refit=r, **options), set()) for r in (False, True)
    )
    check_refit(seen, plain, refit, options)


def check_refit(seen, plain, refit, options):
    seen.check(plain.plan.layers, plain.model)
    last = seen.layers[0] if options else seen.layers[-1]  # after it tokens are others
    for i in seen.layers:
        if i <= last:
            before, after = (seen.error(i, result.model) for result in (plain, refit))
            assert after <= before * 1.0001
            analysis = refit.analyses[i]["refit"]
            assert analysis["recovered"] >= 0


def test_prune_by_counts_that_differ(seen):
    config = PruneConfig(keep=4.5, allocate="layers", refit=False)
    result = seen.refused("prune", config, set())
    seen.check(result.plan.layers, result.model)


def test_slim_by_every_score(seen):
    scores = tuple(name for name in SCORES if name != "energy")
    config = SlimConfig(keep=0.5, score="energy", refit=False)
    result = seen.refused("slim", config, set(), compare=scores)
    seen.check(result.plan.layers, result.model)
    for plan in result.comparisons.values():
        seen.check(plan.layers, result.build(plan))


@pytest.mark.parametrize(
    "options",
    [
        {"allocate": "experts"},
        {"allocate": "layers+experts"},
        {"allocate": "layers"},
        {"experts": "auto", "keep": 0.75},
        {"experts": "6", "shared": 0.5},
    ],
    ids=["experts", "layers+experts", "layers", "auto", "shared"],
)
def test_slim_by_every_allocation(options, seen):
    why = BIASED | TURNED | UNGATED if "experts" in options.get("allocate", "") else set()
    config = SlimConfig(**{"keep": 0.5, "score": "energy", "refit": False, **options})
    result = seen.refused("slim", config, why)
    if result is not None:
        seen.check(result.plan.layers, result.model)


def test_experts_filled_up_with_zeros_compute_the_same(seen, tmp_path):
    """The original's own class, wider, live and saved."""
    width = max(seen.view(i).width for i in seen.layers)
    result = seen.refused("slim", SlimConfig(keep=1, multiple=width + width // 2), set())
    wanted, found = logits(seen.model, TEXT), logits(result.model, TEXT)
    assert (found - wanted).norm() < 1e-5 * wanted.norm()
    again = loaded(result.save(tmp_path / "out"))
    assert (again.config.model_type == seen.model_type) is (seen.model_type not in ONE_WIDTH)
    assert all(seen.view(i, again).width == width + width // 2 for i in seen.layers)
    assert torch.equal(logits(again, TEXT), found)


@pytest.mark.usefixtures("short_text")
def test_a_refit_never_raises_the_error_of_slimming(seen):
    plain = seen.refused("slim", SlimConfig(keep=0.5, refit=False), set())
    refit = seen.refused("slim", SlimConfig(keep=0.5, refit=True), set())
    check_refit(seen, plain, refit, {})


@pytest.mark.parametrize("keep", ["shared", "shared+routed", "attention", "nothing"])
def test_condense(keep, seen):
    """Eq. 3, or nothing; greedy choices are what running each candidate gives."""
    why = {
        "shared": NORMED | UNGATED | OWN_SHARED if seen.arch.shared_at else True,
        "shared+routed": NORMED | UNGATED | TURNED | BIASED | OWN_GATE,
        "nothing": HANDING_ON,
    }.get(keep, set())
    why = why if why is True else why | IN_LAYER | MERGED
    leaders = cache_leaders(seen.model.config) if keep == "nothing" else set()
    last = max({*seen.layers} - leaders, default=None)
    if last is None:  # generation reads the length of every layer's cache
        with pytest.raises(MoesaicError, match="0 layers can be condensed"):
            verb_of("condense", seen.model, CondenseConfig(count=1, keep=keep), text=TEXT)
        return
    config = CondenseConfig(count=1, keep=keep, candidates=(last,), refit=False)
    result = seen.refused("condense", config, why)
    if result is None:
        return
    layers, analysis = {last: result.plan.layers[last]}, result.analyses[last]
    seen.check(layers, result.build(replace(result.plan, layers=layers)))  # without padding
    if keep == "shared+routed":
        g_E = dict(zip(layers[last].experts, layers[last].gates_K.tolist(), strict=True))
        with seen.handing(last):
            w_TE = seen.view(last).combine_weights(seen.inputs[last])
        for i, g in g_E.items():
            assert g == pytest.approx(w_TE[:, i][w_TE[:, i] != 0].mean().item(), rel=1e-4)
        assert analysis["expert_losses"][-1] == pytest.approx(
            analysis["divergence"]["shared+routed"], rel=2e-3
        )
        refit = seen.refused("condense", replace(config, refit=True), set())
        assert seen.error(last, refit.model) <= seen.error(last, result.model) * 1.0001


def test_skip(seen):
    result = seen.refused("skip", SkipConfig(), INWARD)
    if result is not None:
        seen.check(result.plan.layers, result.model)
    fewer = seen.refused("skip", TopKConfig(top_k=1), ONE_NUMBER)
    if fewer is not None and len(seen.layers) > 1:
        seen.check(fewer.plan.layers, fewer.model)


# --- in the types of releases ---------------------------------------------------------------------


def released(model_type, dtype, folder):
    """A checkpoint in few bits a weight; what the class keeps in float32 is so."""
    model = small_model(model_type).to(dtype)
    wide = model._keep_in_fp32_modules_strict or ()
    for name, parameter in model.named_parameters():
        if any(part in name for part in wide):
            parameter.data = parameter.data.float()
    model.save_pretrained(folder)
    return folder


HALVES = {"ernie4_5_moe", "qwen2_moe"}
"""Tried in float16, too."""


@pytest.mark.parametrize("seen", types("gpt_oss"), indirect=True)
def test_every_verb_in_the_types_of_a_release(seen, tmp_path):
    """From memory and from disk, results are in the model's own types and run."""
    asked = [
        ("prune", PruneConfig(keep=4)),
        ("slim", SlimConfig(keep=0.5)),
        ("condense", CondenseConfig(count=1, keep="attention")),
        ("condense", CondenseConfig(count=1, keep="nothing")),
        ("condense", CondenseConfig(count=1, keep="shared", shared_gate="mean")),
        ("skip", TopKConfig(top_k=1)),
    ]
    for dtype in (torch.bfloat16, torch.float16)[: 1 + (seen.model_type in HALVES)]:
        base = released(seen.model_type, dtype, tmp_path / str(dtype))
        before = {name: t.dtype for name, t in loaded(base).state_dict().items()}
        done = set()
        for number, (verb, config) in enumerate(asked):
            refusal = ""
            try:
                disk = verb_of(verb, str(base), config, text=TEXT)
            except MoesaicError as error:  # which the tests above hold to those that must
                refusal = str(error)
            if refusal:
                assert seen.model_type in refusal or "can be condensed" in refusal
                continue
            live = verb_of(verb, loaded(base), config, text=TEXT).model
            again = loaded(disk.save(tmp_path / f"{dtype}-{number}"))
            for model in (live, again):
                types = {name: t.dtype for name, t in model.state_dict().items()}
                assert all(kind == before.get(name, dtype) for name, kind in types.items()), config
                assert torch.isfinite(logits(model, TEXT)).all(), config
            done.add(verb)
        assert done >= {"prune", "slim"}


# --- from disk, estimated beforehand, exported ---------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        ("prune", {"keep": 4.5, "allocate": "layers", "refit": False}),
        ("slim", {"keep": 0.5, "allocate": "layers", "score": "energy", "refit": False}),
        ("condense", {"count": 1, "keep": "attention"}),
        ("condense", {"count": 1, "keep": "nothing"}),
        ("condense", {"count": 1, "keep": "shared", "shared_gate": "mean"}),
    ],
    ids=["prune", "slim", "attention", "nothing", "shared"],
)
@pytest.mark.parametrize("seen", types("deepseek_v3", "qwen2_moe"), indirect=True)
def test_saved_told_and_exported(verb, options, seen, tmp_path):
    kind = {"prune": PruneConfig, "slim": SlimConfig, "condense": CondenseConfig}[verb]
    base, out, config = tmp_path / "base", tmp_path / "out", kind(**options)
    shared = NORMED | UNGATED | OWN_SHARED
    without = {"shared": shared, "nothing": HANDING_ON}.get(options["keep"], set())
    without = without | IN_LAYER | MERGED if verb == "condense" else without
    if seen.model_type in without or (options["keep"] == "shared" and not seen.arch.shared_at):
        return
    seen.model.save_pretrained(base)
    live = verb_of(verb, seen.model, config, text=TEXT)
    disk = verb_of(verb, str(base), config, text=TEXT)
    again = loaded(disk.save(out))
    assert equal(dict(again.state_dict()), dict(live.model.state_dict()))
    assert torch.equal(logits(again, TEXT), logits(live.model, TEXT))
    sizes = estimate(Recipe(str(base), "out", (config,), evaluation=None))
    if sizes.exact:
        # which layers are condensed moves offsets in the header, which is padded to 64
        assert abs(sizes.output_bytes - weight_bytes(out)) <= 64 * (verb == "condense")
        assert sizes.output_parameters == model_size(again).total_parameters
    refused = ""
    try:
        decided, _ = same_model(Source("out", out), tmp_path / "native", TEXT)
    except MoesaicError as error:
        refused = str(error)
    assert seen.model_type in (refused or decided.model_type)
    assert not (refused and verb == "prune") or seen.arch.never is None
