"""Fitting: every alternative priced once, apart texts, the best within a budget is chosen."""

import itertools
import json
import math
import re
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from builders import nightly, pages, predicting, quantised_experts, stored, tiny_moe, weights
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from shrunken import small_model

import moesaic
from moesaic import CondenseConfig, FitConfig, PruneConfig, SlimConfig, pipeline
from moesaic.api import verb
from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.cli import app
from moesaic.config import Calibration, Evaluation, ExportArgs, parse_bytes
from moesaic.data.text import Tokens, calibration_tokens, without_overlap
from moesaic.errors import MoesaicError, how_to_install
from moesaic.exports.allocation import (
    Layout,
    Price,
    choice,
    least,
    least_of_all,
    mixed_terms,
    of_all_experts,
    prices_in,
)
from moesaic.exports.quantiser import FileTensor
from moesaic.families import Family, Shape
from moesaic.fitting import gguf_files, run, search, trials
from moesaic.fitting import prices as prices_module
from moesaic.fitting.candidates import Candidate, Form, ending, forms, simplest
from moesaic.fitting.prices import IMPOSSIBLE, Prices, key_of, priced_configs
from moesaic.fitting.run import search_and_make as fit
from moesaic.fitting.search import Search
from moesaic.fitting.trials import Texts, Trials
from moesaic.io.formats import Mxfp4Experts
from moesaic.io.source import resolve
from moesaic.methods import METHODS
from moesaic.methods.slim.method import Slimmer
from moesaic.observation.changes import PricedPart
from moesaic.recipe import Recipe, load_recipe
from moesaic.report import contents, facts
from moesaic.sizes import RecipeSizes, ResultSize, Skeleton, steps_as_json

ORIGINAL = Skeleton(resolve("tiny-moe").config, None)


def recipe_of(out, model="tiny-moe", samples=4):
    calibration = Calibration(pages("calibration"), samples=samples, length=64)
    evaluation = Evaluation(pages("evaluation"), max_tokens=512, rounds=0, new_tokens=2)
    return Recipe(model, str(out), (), calibration, evaluation)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A random mixture, smaller than those that ship, where what is tried needs no trained one."""
    return stored(tiny_moe("mixtral"), tmp_path_factory.mktemp("small") / "mixtral")


def smaller_than(folder):
    """A search for a model of four fifths the size."""
    return FitConfig(memory=int(0.8 * Skeleton(resolve(str(folder)).config, None).bytes), windows=4)


def form_of(name, configs, careful=lambda config: config):
    return Form(Family(name, [*configs], careful))


@pytest.fixture
def looking(tmp_path, monkeypatch):
    """Makes a search, of these forms alone where some are given."""

    def made(config, *some, model="tiny-moe", **options):
        if some:
            monkeypatch.setattr(search, "forms", lambda *_: [*some])
        return Search(recipe_of(tmp_path / "out", str(model)), config, tmp_path / "work", **options)

    return made


def price(kl):
    """Of one window, whose KL is given."""
    return Price(np.full((1, 1), kl**0.5))


def scored(form, steps, kl_N, loss=0.0, native=True):
    """A candidate of so many steps, with the KL of each window."""
    score = {"loss": loss, "kl": sum(kl_N) / len(kl_N), "kl_N": kl_N}
    size = ResultSize(1, 1, 1, native, exact=True)
    return Candidate(form, (PruneConfig(keep=4),) * steps, size).with_score(score)


def few(*_):
    """Three forms that are quick to make."""
    energy, random = (partial(SlimConfig, score=s, refit=False) for s in ("energy", "random"))
    return [
        form_of("prune", (PruneConfig(keep=n, score="reap", refit=False) for n in (4, 6))),
        form_of("slim", (energy(keep=s) for s in (0.25, 0.5, 1.0))),
        form_of("random", (random(keep=s) for s in (0.25, 0.5, 1.0))),
    ]


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["moe_folder", "llama_folder"])
@pytest.mark.parametrize("native", [False, True])
def test_every_form_can_be_carried_out_and_grows(model, native, request, looking):
    """Its smallest is smaller than the original; made with care it is as small."""
    config = FitConfig(memory=1, native=native)
    looking = looking(config, model=request.getfixturevalue(model))
    known = forms(looking.source, config)
    assert len({form.name for form in known}) == len(known)
    for form in known:
        low, high = 0, form.count // 2
        small = looking.sizes.of(form.steps(low))
        assert small is not None, form.name
        assert small.memory < looking.original.bytes
        assert small.native or not native, form.name
        if form.single:
            large = looking.sizes.of(form.steps(high))
            assert (small.memory < large.memory) == (low < high)
            assert looking.sizes.of(form.steps(low, careful=True)) == small


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: tiny_moe("glm4_moe").save_pretrained(folder),
        lambda folder: predicting(tiny_moe("glm4_moe", num_nextn_predict_layers=1), folder),
        lambda folder: quantised_experts(
            tiny_moe("gpt_oss", hidden_size=64, intermediate_size=64),
            folder,
            Mxfp4Experts({"quant_method": "mxfp4"}),
        ),
    ],
    ids=["tables", "MTP layers", "a storage format"],
)
def test_bytes_of_results_are_those_that_are_stored(make, tmp_path):
    """Also where the model's class lacks some, or its type is not theirs."""
    make(folder := tmp_path / "base")
    (tmp_path / "headers").mkdir()
    sizes = RecipeSizes(recipe_of(tmp_path / "out", str(folder)), tmp_path / "headers")
    drop = PruneConfig(keep=6, score="random", refit=False)
    thin = SlimConfig(keep=0.5, score="random", refit=False)
    for steps in ((), (drop,), (thin,)):
        made, text = folder, Tokens(torch.arange(1, 65)[None])
        for step in steps:
            made = tmp_path / step.verb
            verb(step.verb, str(folder), step, calibration=text).save(made)
        size = sizes.of(steps)
        assert size.memory == sum(tensor.nbytes for tensor in weights(made).values())


@pytest.mark.parametrize("native", [False, True])
def test_fewer_experts_a_token_serve_active_parameters_alone(native, looking):
    """As many weights, of which a token uses fewer the smaller the share."""
    config = FitConfig(active_parameters=1, native=native)
    looking = looking(config, model="tiny-shared-moe")
    known = {form.name: form for form in forms(looking.source, config)}
    form = known["experts a token"]
    assert form.count == 3
    sizes = [looking.sizes.of(form.steps(place)) for place in (0, 2)]
    assert all(size.memory == looking.original.bytes for size in sizes if size)
    active = [size.active_parameters for size in sizes if size]
    assert active == sorted(set(active))
    assert all(size.native for size in sizes if size) or not native
    pair = known[f"experts a token 2, slim{'' if native else ' by layer and expert'}"]
    both = looking.sizes.of(pair.steps(pair.count // 2))
    assert both.memory < looking.original.bytes
    others = forms(looking.source, replace(config, memory=1))
    assert "experts a token" not in {form.name for form in others}


# --- files ---------------------------------------------------------------------------------------

WIDE, NARROW = "q8_0", "q2_k"


class PlainFiles:
    """Instead of GGUF files, safetensors folders; a file of one type is a tenth larger."""

    def __init__(self, source, *_):
        whole, self.name = Skeleton(source.config, None), source.name
        self.original = SimpleNamespace(layout=self.layout(whole), quantised=None)

    def layout(self, built):
        size = built.size.total_parameters // 256
        shapes = {"blk.0.attn_q.weight": (256, 64), "blk.0.ffn_up.weight": (256, size - 64)}
        tensors = {name: FileTensor("q8_0", shape) for name, shape in shapes.items()}
        return Layout(tensors, header=0, layers=1)

    def prices(self):
        wide = {"attn 0": price(0.0), "gate-up 0": price(0.0)}
        return {WIDE: wide, NARROW: {"attn 0": price(1.0), "gate-up 0": price(0.1)}}

    def size(self, built, file):
        return file.memory or round(1.1 * self.layout(built).least([file.type]))

    def quantised(self, result, built):
        source = resolve(str(result) if result else self.name)
        layout = self.layout(built)
        return SimpleNamespace(source=source, layout=layout, change=lambda _: None, weights={})

    def make(self, result, out, file, types=None, weights=None):
        source = resolve(str(result) if result else self.name)
        out.write_text(f"{source.folder}\n")
        size = self.size(Skeleton(source.config, None), file)
        with out.open("r+b") as stream:
            stream.truncate(size)
        return {"bytes": size, "types": types or {file.type: 1}}

    def uniform(self, result, type, weights=None):
        source = resolve(str(result) if result else self.name)
        return {}, self.size(Skeleton(source.config, None), ExportArgs(to="gguf", type=type))


@pytest.fixture
def plain(monkeypatch):
    """A search makes these instead of GGUF files."""
    files = PlainFiles(resolve("tiny-moe"))
    monkeypatch.setattr(search, "Files", lambda *_: files)
    monkeypatch.setattr(trials, "tensors_of", lambda _: {})
    return files


def test_forms_of_files_are_native_and_of_whole_blocks():
    config = FitConfig(memory=9, types=(WIDE, NARROW))
    found = forms(resolve("tiny-moe"), config)
    slim = next(form for form in found if form.name == "slim")
    assert [c.keep for c in slim.family.configs] == [1 / 3, 2 / 3, 1.0]
    assert not any("uneven" in form.name for form in found)
    assert ending(config) == ExportArgs(to="gguf", memory=9, among=(WIDE, NARROW))
    one = ending(FitConfig(memory=9, types=("f32", WIDE)))
    assert one == ExportArgs(to="gguf", type="f32")
    prune = next(form for form in found if form.name == "prune")
    wanted = {"prune": {"method": "naee", "keep": 4, "refit": True}}
    assert steps_as_json(prune.steps(2, careful=True)) == [wanted]


@pytest.mark.parametrize("model_type", ["granitemoeshared", "deepseek_v3"])
def test_results_in_files_route_wherever_the_original_does(model_type, tmp_path, looking, plain):
    """llama.cpp loads no condensed layer; at 553055c2 their tensors had no rows."""
    folder = stored(tiny_moe(model_type), tmp_path / "base")
    looking = looking(FitConfig(memory=9, types=(WIDE, NARROW)), model=folder)
    arch, alone = base_arch(looking.source.config), replace(looking.config, native=True, types=())
    assert any("condense" in form.name for form in forms(looking.source, alone))

    def routed(steps):
        return [*map(arch.is_moe, arch.layers(looking.sizes.skeleton(steps).model))]

    assert all(routed(form.steps(0)) == routed(()) for form in looking.forms)


def test_a_file_of_types_by_layer_is_as_large_as_the_budget(tmp_path, plain):
    last = ExportArgs(to="gguf", memory=9, among=("q8_0", "q4_k_m"))
    sizes = RecipeSizes(recipe_of(tmp_path / "out"), tmp_path, plain.size)
    size, alone = sizes.of((last,)), sizes.of((ExportArgs(to="gguf", type="q8_0"),))
    assert size.memory == 9 < alone.memory


def test_bits_are_allocated_by_their_kl(plain):
    """Within the budget, and the same once read back."""
    prices, layout = plain.prices(), plain.original.layout
    types, groups = (WIDE, NARROW), ("attn 0", "gate-up 0")
    fixed, bytes_GC = layout.bytes(groups, types)
    wide, narrow = fixed + bytes_GC.sum(0)
    ways = [dict(zip(groups, way, strict=True)) for way in itertools.product(types, repeat=2)]
    assert choice(prices, layout, wide) == ways[0]
    assert choice(prices, layout, wide - 1) == ways[1]
    assert choice(prices, layout, layout.size(ways[1]) - 1) == ways[3]
    assert [layout.size(ways[n]) for n in (0, 3)] == [wide, narrow]
    with pytest.raises(MoesaicError, match="out of reach: the least is"):
        choice(prices, layout, narrow - 1)


def effects(generator, alike, groups=6, samples=500):
    """Return v_GCS of three types; ``alike``: what part of each type's errors all groups share."""
    own_GCS, of_all_S = generator.normal(size=(groups, 3, samples)), generator.normal(size=samples)
    scale_GC1 = np.array([0.1, 0.5, 1.0])[:, None] * generator.uniform(0.5, 2, (groups, 1, 1))
    return scale_GC1 * (own_GCS + np.array(alike)[:, None] * of_all_S)


def test_effects_of_pairs_count_where_they_are_significant():
    v_GCS = effects(np.random.default_rng(0), [0, 0, 3])
    mixed_GCGC = mixed_terms(v_GCS).reshape(6, 3, 6, 3)
    both, exact = mixed_GCGC[1, 2, 4, 2], (v_GCS[1, 2] * v_GCS[4, 2]).mean()
    assert both == mixed_GCGC[4, 2, 1, 2] == pytest.approx(exact, rel=0.02)
    assert np.abs(mixed_GCGC[1, :2, 4, :2]).max() < 0.03 * both
    assert not np.einsum("gcgd->gcd", mixed_GCGC).any()  # a group has one type


@pytest.mark.parametrize(("alike", "sampled"), [(0, 8), (0.3, 8), (0.3, 5), (3, 8)])
def test_all_experts_are_priced_by_two_halves_of_some(alike, sampled):
    """KL of one group and of all together, whether errors of all experts are alike or not."""
    generator, groups, experts, samples = np.random.default_rng(1), 12, 32, 2000
    of_all_S = alike * generator.normal(size=samples)
    v_GES = 0.1 * (generator.normal(size=(groups, experts, samples)) + of_all_S)
    a, b = sampled // 2, sampled - sampled // 2
    halves = [(Price(v_ES[None, :a].sum(1)), Price(v_ES[None, a:sampled].sum(1))) for v_ES in v_GES]
    found = of_all_experts([(*half, (a, b), experts) for half in halves])
    for price, v_ES in zip(found, v_GES, strict=True):
        assert price.kl == pytest.approx(np.square(v_ES.sum(0)).mean(), rel=0.15)
    together = np.square(v_GES.sum((0, 1))).mean()
    assert Price.together(found).kl == pytest.approx(together, rel=0.15)


@pytest.mark.parametrize("share", [0.45, 0.6, 0.7])
@pytest.mark.parametrize("seed", range(4))
def test_types_are_chosen_for_the_kl_of_all_groups_together(seed, share):
    """Found by linear programs, and by trying all that is small enough."""
    generator = np.random.default_rng(seed)
    v_GCS = effects(generator, [0, 1.5, 0.3])
    bytes_GC = np.array([8.0, 5.0, 3.0]) * generator.uniform(0.5, 2, (6, 1))
    kl_GC, mixed_XX = np.square(v_GCS).mean(-1), mixed_terms(v_GCS)
    budget, groups = share * bytes_GC[:, 0].sum(), np.arange(6)

    def kl(chosen):
        x_X = np.eye(3)[[*chosen]].ravel()
        return x_X @ kl_GC.ravel() + x_X @ mixed_XX @ x_X

    every = map(list, itertools.product(range(3), repeat=6))
    small = [chosen for chosen in every if bytes_GC[groups, chosen].sum() <= budget]
    found = least_of_all(kl_GC, mixed_XX, bytes_GC, budget)
    assert found in small
    assert kl(found) <= 1.01 * min(map(kl, small))
    assert kl(found) <= kl(least(kl_GC, bytes_GC, budget))
    assert least_of_all(kl_GC, 0 * mixed_XX, bytes_GC, budget) == least(kl_GC, bytes_GC, budget)


@pytest.mark.parametrize(
    ("original", "result", "more"),
    [(256, 256, 0), (320, 256, 4.5 - 2.625), (256, 320, 2.625 - 4.5)],
)
def test_types_that_only_a_results_rows_allow_cost_what_their_bits_do(
    looking, plain, original, result, more
):
    """Rows of 320 fit no block of 256: they have four bits where q2_k was asked for."""

    def layout(row):
        tensors = {"blk.0.ffn_up.weight": FileTensor("q8_0", (row, 10240 // row * 64))}
        return Layout(tensors, header=0, layers=1)

    plain.original.layout, plain.layout = layout(original), lambda _: layout(result)
    looking = looking(FitConfig(memory=layout(result).least([NARROW]), types=(WIDE, NARROW)))
    looking.prices = Prices({}, {}, {t: {"gate-up 0": price(0.1)} for t in (WIDE, NARROW)})
    types, kl_S = looking._types(())
    assert types == {"gate-up 0": NARROW}
    assert kl_S == pytest.approx(0.1 * 4**more)


def test_groups_cost_what_the_types_of_their_tensors_do():
    """q4_0 of rows that it does not divide is f16; wider or narrower ones have q4_0."""

    def layout(width):
        tensors = {"blk.0.ffn_down.weight": FileTensor("q8_0", (width, 64))}
        return Layout(tensors, header=0, layers=1)

    table = {"q4_0": {"down 0": price(0.1)}, "f16": {"down 0": price(0.001)}}
    table = {type: of | {"attn 0": price(0.0)} for type, of in table.items()}
    del table["f16"]["attn 0"]
    attention = {"blk.0.attn_q.weight": FileTensor("q8_0", (64, 64))}
    layouts = {
        width: replace(layout(width), tensors=layout(width).tensors | attention)
        for width in (64, 80, 96)
    }
    for width, type in ((80, "f16"), (64, "q4_0"), (96, "q4_0")):
        found = prices_in(table, layouts[80], layouts[width])
        assert [*found] == ["q4_0"]
        assert found["q4_0"]["down 0"] is table[type]["down 0"]
        assert found["q4_0"]["attn 0"] is table["q4_0"]["attn 0"]


def test_experts_may_be_widened_to_whole_blocks(looking, plain):
    """tiny-moe's of 96 neurons are whole blocks of 32; 256 would be too many."""
    config = FitConfig(memory=9, types=(WIDE, NARROW))
    assert not any("widen" in form.name for form in forms(resolve("tiny-moe"), config))
    shape = Shape(2, 80, 32, experts=8, top_k=2, blocks=(32, 256), native=True)
    families = {family.name: family for family in SlimConfig.families(shape)}
    widen, narrow = families["widen to blocks of 32"], Form(families["slim"])
    (wider,) = widen.configs
    assert steps_as_json((widen.careful(wider),)) == [
        {"slim": {"method": "neurons", "keep": 1, "multiple": 32, "refit": False}}
    ]
    form, config = Form(widen), FitConfig(memory=9, types=(WIDE, NARROW))
    looking = looking(config, form)
    looking.sizes = SimpleNamespace(of=lambda _: SimpleNamespace(native=True))
    assert [*looking._places(form, config, ending(config))] == [0]
    assert [*looking._places(narrow, config, ending(config))] == [0, 1]
    assert narrow.steps(1)[0].keep == 64 / 80
    candidate = Candidate(form.name, form.steps(0), looking.original.size)
    assert candidate.kind == "widen"


def keeping(*counts):
    configs = [PruneConfig(keep=n, score="reap", refit=False) for n in counts]
    return form_of("prune", configs, lambda config: replace(config, refit=True))


def test_sizes_between_priced_ones_are_candidates_where_types_differ(looking, plain):
    """Their prices are interpolated."""
    drop = keeping(*range(2, 9))
    form = replace(drop, family=replace(drop.family, priced=2))
    config = FitConfig(memory=9, types=(WIDE, NARROW))
    assert [*looking(config)._places(form, config, ending(config))] == [0, 1, 2, 3, 4, 5]


def test_weights_and_bits_share_one_budget(looking, plain):
    """Estimates add up; where measuring says otherwise, it is chosen anew by scaled ones."""
    drop = keeping(*range(2, 9))
    config = FitConfig(memory=9, types=(WIDE, NARROW), confirm=1)
    looking = looking(config, drop)
    layout = [plain.layout(looking.sizes.skeleton(drop.steps(n))) for n in range(7)]
    wide = {n + 2: of.least([WIDE]) for n, of in enumerate(layout)}
    made = []

    def found(estimates, kls, memory, **more):
        """The experts that are kept, by estimates of steps and the measured KL of files."""
        made.clear()

        def measured(candidate):
            if not candidate.conversions:
                raise MoesaicError("the original's own file cannot be measured")
            keep = int(candidate.conversions[0].keep)
            made.append(keep)
            return candidate.with_score({"kl": kls[keep], "loss": 0.0, "kl_N": ()})

        looking.config = replace(config, memory=memory, **more)
        steps = {key_of(c): price(estimates[c.keep]) for c in drop.family.configs}
        looking.prices = Prices({}, steps, plain.prices())
        looking.trials = SimpleNamespace(measure=measured, refused={}, refuse=lambda *_: None)
        chosen, _ = looking.run()
        assert chosen.form == "prune, mixed"
        assert steps_as_json(chosen.steps)[1]["export"]["among"] == (WIDE, NARROW)
        assert chosen.conversions[0].refit
        return chosen.conversions[0].keep

    # six of eight experts at most fit in the wide type; with more, 0.1 of types is added
    kls = {n: 0.02 * (8 - n) for n in range(2, 9)}
    assert found(kls, kls | {7: 0.12}, wide[6]) == 6
    kls = {n: 0.2 * (8 - n) for n in range(2, 9)}
    assert found(kls, kls | {7: 0.3}, wide[6]) == 7
    # dropping has twice the KL that was estimated: with fewer dropped, in fewer bits, it has less
    estimates = {n: 0.07 * (8 - n) for n in range(2, 9)}
    assert found(estimates, {6: 0.28, 7: 0.24}, wide[6]) == 7
    assert made == [6, 7]
    with pytest.raises(MoesaicError, match="out of reach: the least that works is"):
        found(kls, kls, layout[0].least([NARROW]) - 1)
    assert made == []
    assert found({**kls, 2: 0.5}, {2: 0.3}, layout[0].least([NARROW])) == 2
    few = looking.sizes.of(drop.steps(2))
    assert found(kls, kls, wide[8], parameters=few.parameters) == 4
    assert made == [4]


def test_a_converter_that_refuses_is_asked_once(looking, monkeypatch):
    asked = []

    def refuse(*arguments):
        asked.append(arguments)
        raise MoesaicError("The converter refused.")

    monkeypatch.setattr(gguf_files, "find_converter", lambda: None)
    monkeypatch.setattr(gguf_files, "converting", refuse)
    with pytest.raises(MoesaicError, match="converter refused"):
        looking(FitConfig(memory=9, types=(WIDE,))).run()
    assert len(asked) == 1


def test_a_file_out_of_reach_is_refused_before_anything_is_priced(looking, plain, monkeypatch):
    monkeypatch.setattr(Search, "prices", None)
    with pytest.raises(MoesaicError, match="out of reach: the least that works is"):
        looking(FitConfig(memory=9, types=(WIDE, NARROW)), keeping(4, 6, 8)).run()


def test_what_cannot_win_is_not_made(looking, plain):
    """Quantising has a small part of the KL of any other step: only that is made, and shown."""
    drop = keeping(4, 6, 8)
    budget = plain.original.layout.least([WIDE]) - 1
    config, shown = FitConfig(memory=budget, types=(WIDE, NARROW)), list[str]()
    looking = looking(config, drop, notify=shown.append)
    made = []

    def measured(candidate):
        made.append(candidate.form)
        return candidate.with_score({"kl": 0.1, "loss": 0.0, "kl_N": ()})

    steps = {key_of(c): price(1.95 - c.keep / 8) for c in drop.family.configs}
    looking.prices = Prices({}, steps, plain.prices())
    looking.trials = SimpleNamespace(measure=measured, refused={}, refuse=lambda *_: None)
    chosen, _ = looking.run()
    assert not chosen.conversions
    assert made == [NARROW, "mixed"], "one type for all is always measured"
    assert len(shown) == 1
    assert shown[0].endswith(": quantise 0.1, drop 1.2.")


def table(steps=(), types=()):
    steps = {str(n): price for n, price in enumerate(steps)}
    return json.dumps({"request": {}, "steps": steps, "types": dict(types)})


ONE, TWO = ({"v": [[0.1] * windows], "apart": 0.0} for windows in (1, 2))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (table([{"v": [[math.inf]], "apart": 0}]), "no table of numbers"),
        (table([{"v": [[1e308]], "apart": 0}]), "no table of numbers"),
        (table([{"v": [], "apart": 0}]), "no table of numbers"),
        (table([{"v": 0.5, "apart": 0}]), "no table of numbers"),
        (table([{"v": [[0]], "apart": math.nan}]), "no table of numbers"),
        (table([{"v": [[0]], "apart": -5}]), "a price is -5"),
        (table([ONE, TWO]), "different numbers of windows"),
        (table([ONE], {"q8_0": {"head": TWO}}), "different numbers of windows"),
        (table([None], {"q8_0": {"head": None}}), "a group of tensors has no price"),
        (table([], {"q8_0": {"head": ONE}, "q4_0": {"down 0": ONE}}), "has no price"),
        ('{"request": {}}', "it has no 'steps'"),
    ],
)
def test_a_table_of_prices_that_is_damaged_is_refused(text, reason, tmp_path):
    file = tmp_path / "prices.json"
    file.write_text(text)
    with pytest.raises(MoesaicError, match=f"cannot be read: .*{reason}.* the table is made anew"):
        Prices.load(file, {})
    file.write_text("")
    assert Prices.load(file, {}) == Prices({})


@pytest.mark.parametrize("model", ["small", "llama_folder"])
def test_alternatives_are_priced_once(model, request, looking, tmp_path, monkeypatch):
    """Whichever search asks again for the same model and text, from a file that is named."""
    configs = [SlimConfig(keep=s, score="energy", refit=False) for s in (0.5, 0.75, 1.0)]
    form, folder = form_of("slim", configs), request.getfixturevalue(model)
    config = FitConfig(memory=1, windows=8, prices=str(tmp_path / "prices.json"))

    def prices(model=folder, **options):
        found = looking(replace(config, **options), form, model=model)
        return found.prices, found.trials

    found, trials_of = prices()
    half, most, whole = (found.of(form, place).kl for place in range(3))
    assert 0 < most < half
    assert whole == pytest.approx(0, abs=1e-9)
    size = trials_of.sizes.of((configs[0],))
    assert size is not None
    kl = trials_of.measure(Candidate("slim", (configs[0],), size)).kl
    assert kl / 3 < half < 2 * kl
    monkeypatch.setattr(prices_module, "estimates", None)
    again = prices()[0]
    assert [again.of(form, place).kl for place in range(3)] == [half, most, whole]
    with pytest.raises(MoesaicError, match="holds prices of other text: name another file"):
        prices(windows=7)
    with pytest.raises(MoesaicError, match="holds prices of other weights"):
        prices(model="tiny-dense" if model == "llama_folder" else "tiny-moe")
    (tmp_path / "prices.json").write_text("{}")
    for place, message in (
        ("", "is a folder"),
        ("prices.json", "is no file such as this command makes; it will not be overwritten"),
        ("out/prices.json", "lies in OUT"),
        ("out.search/prices.json", "lies in OUT or beside"),
        ("out.partial/prices.json", "lies in OUT or beside"),
    ):
        with pytest.raises(MoesaicError, match=message):
            looking(replace(config, prices=str(tmp_path / place)), form, model=folder).run()


def test_between_priced_configs_kl_is_interpolated():
    configs = [PruneConfig(keep=n, refit=False) for n in range(2, 12)]
    form = Form(Family("prune", configs, lambda c: c, priced=4))
    prices = {n: Price(np.array([[v]])) for n, v in ((5, 0.9), (8, 0.3), (11, 0.0))}
    prices[2] = IMPOSSIBLE
    steps = {key_of(PruneConfig(keep=n, refit=False)): price for n, price in prices.items()}
    found = [Prices({}, steps).of(form, place) for place in range(10)]
    assert found[:3] == [IMPOSSIBLE] * 3
    changes = [float(price.v_KN.item()) for price in found[3:]]
    assert changes == pytest.approx([0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.0])


def test_steps_interact_and_estimates_know_their_error():
    """What two steps do to each window is added up; what differs by chance alone is not far."""
    drop = PruneConfig(keep=4, refit=False)
    first, second = (Family(c.verb, [c], lambda c: c) for c in (drop, SlimConfig()))
    v_KN = np.array([[0.3, -0.2, 0.1, 0.4]])
    steps = {key_of(drop): Price(v_KN), key_of(second.configs[0]): Price(-0.5 * v_KN)}
    prices = Prices({}, steps)
    alone, pair = (prices.of(form, 0).kl for form in (Form(first), Form(second, first, drop)))
    assert pair == pytest.approx(alone / 4)

    def candidate(*kl_S):
        return Candidate("", (), ResultSize(1, 1, 1, True, True), steps_S=np.array(kl_S))

    best = candidate(1.0, 1.2, 0.8, 1.0)
    assert candidate(1.8, 2.0, 1.6, 1.9).far(best)
    assert not candidate(0.1, 4.9, 0.4, 1.0).far(best)
    assert not candidate(1.5, 1.6, 1.2, 1.4).far(best)
    assert candidate(1.6).far(candidate(1.0))


def test_files_are_made_of_what_fits(looking, small, plain, tmp_path):
    """Of one type, the largest share whose file does; the file lies beside the result."""
    drop, plain.name = keeping(2, 4, 8), str(small)
    out, config = tmp_path / "out", FitConfig(memory=9, types=(WIDE,), windows=4, confirm=1)
    looking = looking(config, drop, model=small)
    half = plain.size(looking.sizes.skeleton(drop.steps(1)), ExportArgs(to="gguf", type=WIDE))
    recipe = recipe_of(out, str(small))
    recipe = replace(recipe, evaluation=replace(recipe.evaluation, rounds=1))
    record = fit(recipe, replace(config, memory=half + 1))
    chosen, file = record.measured["chosen"], out / "moesaic/model-q8_0.gguf"
    assert chosen["steps"][0]["prune"]["keep"] == 4
    assert chosen["memory"] == file.stat().st_size == record.measured["gguf"]["bytes"] == half
    assert record.measured["gguf"]["kl"] == pytest.approx(record.measured["scores"]["result"]["kl"])
    assert "speed" not in record.measured, "of the checkpoint beside the file, which nobody runs"


def test_one_type_is_estimated_by_the_types_of_its_tensors(looking, plain):
    """Of types with the same blocks, that of the file with more bits."""
    config = FitConfig(memory=plain.original.layout.least([WIDE]), types=(WIDE, "q4_k_s", "q4_k_m"))
    looking, every = looking(config), plain.prices()[NARROW]
    looking.prices = Prices({}, {}, {"q8_0": every, "q4_k": every})
    looking.files.uniform = lambda _, type: (
        {"blk.0.ffn_up.weight": "q6_k"} if type == "q4_k_m" else {},
        1,
    )
    small, medium = (looking._of_one_type(type).mean() for type in ("q4_k_s", "q4_k_m"))
    assert small == pytest.approx(1.1 + 2 * (1.0 * 0.1) ** 0.5)
    grown = 2 ** (4.5 - 6.5625) * 0.1**0.5
    assert medium == pytest.approx((1.0 + grown) ** 2)


def test_one_type_for_all_is_always_measured(looking, plain, monkeypatch):
    """Its estimate is too high where llama.cpp gives some tensors of a group wider types."""
    config = FitConfig(memory=plain.original.layout.least([WIDE]), types=(WIDE, NARROW), confirm=1)
    config = replace(config, windows=4, memory=round(0.5 * config.memory))
    monkeypatch.setattr(search, "forms", lambda *_: [])
    looking = looking(config)
    looking.prices = Prices({}, {}, plain.prices())
    alone, mixed = sorted(looking._options(config), key=lambda option: option.types is not None)
    assert alone.plain
    assert alone.far(mixed)
    measured = []
    monkeypatch.setattr(looking, "_measure", lambda option, *_: not measured.append(option))
    looking._measure_best(config)
    assert [option.plain for option in measured[:2]] == [True, False]


def test_the_original_alone_may_be_best(small, plain, tmp_path, monkeypatch):
    """Then the folder holds its file, and the record says that nothing else was done."""
    monkeypatch.setattr(search, "forms", lambda *_: [keeping(4, 8)])
    plain.name, out = str(small), tmp_path / "out"
    budget = 2 * plain.layout(Skeleton(resolve(plain.name).config, None)).least([WIDE])
    config = FitConfig(memory=budget, types=(WIDE,), windows=4, confirm=1)
    record = fit(recipe_of(out, plain.name), config)
    assert record.measured["chosen"]["steps"] == [{"export": {"to": "gguf", "type": "q8_0"}}]
    assert record.measured["gguf"]["kl"] == pytest.approx(0, abs=1e-6)
    assert [file.name for file in out.iterdir()] == ["moesaic"]
    assert {f.name for f in (out / "moesaic").iterdir()} >= {"model-q8_0.gguf", "result.json"}
    said = contents.outcome(record)
    assert re.match(r"moesaic/model-q8_0.gguf: \d+\s% smaller on disk, .*on this text \(", said)
    assert facts.names(facts.scores(record)) == ["original", facts.FILE]


# --- text ----------------------------------------------------------------------------------------


def test_what_chooses_shares_no_text_with_what_calibrates(tmp_path):
    config = FitConfig(memory=1, windows=6)
    looking = Search(recipe_of(tmp_path / "out"), config, tmp_path)
    first, second = looking.texts.both
    assert len(first.input_ids) == 4
    assert 3 <= len(second.input_ids) <= 6
    assert len(without_overlap(second, first).input_ids) == len(second.input_ids)
    moved = torch.cat([torch.zeros(20, dtype=torch.int64), first.input_ids[2, :44]])
    assert len(without_overlap(Tokens(moved[None]), first).input_ids) == 0


def test_padding_is_no_text_that_documents_share():
    """Nor does it matter how long the longest document of either is."""

    def documents(*rows):
        ids = torch.nn.utils.rnn.pad_sequence([*map(torch.tensor, rows)], batch_first=True)
        return Tokens(ids, ids > 0)

    ours = documents([1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11, 12])
    others = documents([9, 4, 5, 9, 1, 2], [9], [1, 1])
    assert without_overlap(ours, others, 4).unpadded() == [[1, 2, 3], [6, 7, 8, 9, 10, 11, 12]]
    assert without_overlap(ours, documents([5, 4], [9]), 4).unpadded() == ours.unpadded()
    assert not without_overlap(ours, ours, 4).unpadded()


@pytest.mark.parametrize(
    ("windows", "samples", "divided"),
    [
        (128, None, (96, 32)),
        (40, None, (30, 10)),
        (40, 33, (33, 7)),
        (12, None, (8, 4)),
        (5, None, (1, 4)),
    ],
)
def test_windows_of_a_file_are_divided(windows, samples, divided, tmp_path):
    """All decide or choose where nobody said how many; the recipe draws those that decided."""
    file = tmp_path / "ids.safetensors"
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 4096, (windows, 48), generator=generator)
    save_file({"input_ids": ids}, file)
    recipe = replace(recipe_of(tmp_path / "out"), calibration=Calibration(str(file), samples))
    looking = Search(recipe, FitConfig(memory=1), tmp_path)
    first, second = looking.texts.both
    assert (len(first.input_ids), len(second.input_ids)) == divided
    rows = [*first.input_ids.tolist(), *second.input_ids.tolist()]
    assert len({*map(tuple, rows)}) == sum(divided)
    drawn = looking.recipe.calibration
    again = calibration_tokens(drawn.source, None, drawn.samples, drawn.length, drawn.seed)
    assert torch.equal(again.input_ids, first.input_ids)


def test_text_is_divided_and_too_little_is_refused(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(str(n) for n in range(500)), "utf-8")
    recipe = replace(recipe_of(tmp_path / "out"), calibration=Calibration(str(text), length=32))
    looking = Search(recipe, FitConfig(memory=1), tmp_path)
    first, second = (len(part.input_ids) for part in looking.texts.both)
    assert 2 * second <= first < 60
    assert second >= 4
    text.write_text(" ".join(str(n) for n in range(60)), "utf-8")
    for samples in (None, 2, 100):  # no number of windows that calibrate would do
        few = replace(recipe, calibration=replace(recipe.calibration, samples=samples))
        with pytest.raises(MoesaicError, match=r"windows that choose.*Give more text, lower samp"):
            Search(few, FitConfig(memory=1), tmp_path).run()
    text.write_text("1 2 3", "utf-8")
    with pytest.raises(MoesaicError, match=r"^The calibration text fills 0 windows"):
        _ = Search(recipe, FitConfig(memory=1), tmp_path)
    recipe = replace(recipe_of(tmp_path / "out"), evaluation=Evaluation(str(text)))
    for find in (Search.run, lambda looking: looking.frontier([looking.config])):
        with pytest.raises(MoesaicError, match=r"^The evaluation text is shorter than one window"):
            find(Search(recipe, FitConfig(memory=1), tmp_path))


def test_windows_are_as_the_model_can_read_them(tmp_path):
    """No longer than its positions by default; what it cannot read is refused before all else."""
    folder, file = tmp_path / "base", tmp_path / "ids.safetensors"
    stored(tiny_moe("mixtral", max_position_embeddings=64), folder)
    save_file({"input_ids": torch.arange(20 * 65).view(20, 65)}, file)
    source = resolve(str(folder))
    assert Texts(Calibration(pages("calibration")), source, 4).drawn.length == 64
    for length, message in ((65, "beyond the model's 64 positions"), (8, "beyond the model's voc")):
        with pytest.raises(MoesaicError, match=message):
            _ = Texts(Calibration(str(file), length=length), source, 4).both


# --- the search ----------------------------------------------------------------------------------


def test_the_best_is_chosen_and_written(small, tmp_path, monkeypatch):
    shared = form_of("shared", [CondenseConfig(count=1, keep="shared")])
    monkeypatch.setattr(search, "forms", lambda *_: [*few()[:2], shared])
    out, budget = tmp_path / "out", int(0.8 * Skeleton(resolve(str(small)).config, None).bytes)
    config = FitConfig(memory=budget, windows=4)
    record = fit(recipe_of(out, str(small)), config)
    tried, chosen = record.measured["tried"], record.measured["chosen"]
    assert {c["form"] for c in tried} <= {"prune", "slim"}
    assert all(c["estimated_kl"] > 0 for c in tried)
    assert chosen["kl"] == min(c["kl"] for c in tried)
    ((form, reason),) = (said.values() for said in record.measured["refused"])
    assert form == "condense"
    assert "shared" in reason
    assert f"Not possible: condense ({reason})" in record.log["warnings"]
    assert all(c["memory"] <= budget for c in tried)
    saved = Skeleton(resolve(str(out)).config, None)
    assert saved.bytes == chosen["memory"]
    assert saved.size.total_parameters == chosen["parameters"]
    assert json.loads((out / "moesaic/result.json").read_text())["chosen"] == chosen
    assert list(tmp_path.iterdir()) == [out]


def test_a_search_continues_only_with_its_own_weights_and_text(tmp_path):
    """A model of the same shape, tokenizer and text gets none of another one's figures."""
    text = tmp_path / "text.txt"
    recipe = recipe_of(tmp_path / "out")
    recipe = replace(recipe, calibration=replace(recipe.calibration, source=str(text)))
    config = FitConfig(memory=ORIGINAL.bytes // 2, windows=4)
    text.write_text("\n\n".join(f"Chapter {n} tells of {n} ships." for n in range(400)))
    run.open_search(recipe, config)
    run.open_search(recipe, config, resume=True)
    other = shutil.copytree(resolve(recipe.model).folder, tmp_path / "other")
    for file in other.glob("*.safetensors"):
        save_file({n: t + 0.01 for n, t in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(MoesaicError, match="weights"):
        run.open_search(replace(recipe, model=str(other)), config, resume=True)
    text.write_text(text.read_text().replace("ships", "sheep"))
    with pytest.raises(MoesaicError, match="the text is another"):
        run.open_search(recipe, config, resume=True)


def test_a_resumed_search_that_fails_keeps_its_work(tmp_path, monkeypatch):
    recipe, config = recipe_of(tmp_path / "out"), FitConfig(memory=ORIGINAL.bytes // 2, windows=4)

    def failing(_):
        raise MoesaicError("nothing fits")

    monkeypatch.setattr(Search, "run", failing)
    work = tmp_path / "out.search"
    with pytest.raises(MoesaicError, match="nothing fits"):
        fit(recipe, config)
    assert not work.exists()
    run.open_search(recipe, config)
    (work / "figures.json").write_text("{}")
    with pytest.raises(MoesaicError, match="nothing fits"):
        fit(recipe, config, resume=True)
    assert (work / "figures.json").is_file()


def test_alternatives_decide_on_little_text(tmp_path, monkeypatch):
    """With statistics or without: what condenses runs the model for each alternative."""
    asked_on = []

    def converted(config, args):
        asked_on.append(args.text.count)
        raise MoesaicError("enough")

    monkeypatch.setattr(trials, "convert", converted)
    found = run.open_search(recipe_of(tmp_path / "out", samples=100), FitConfig(memory=1 << 23))
    found.trials.plans([CondenseConfig(count=1), CondenseConfig(count=2)])
    assert asked_on == [trials.DECIDING] * 2


def test_layers_of_the_chosen_candidate_are_not_decided_again(small, tmp_path, monkeypatch):
    recipe, config = recipe_of(tmp_path / "out", str(small)), smaller_than(small)
    found, steps = run.open_search(recipe, config), (SlimConfig(keep=0.5),)
    found.trials.result(steps)
    assert found.trials.hand_over(steps, recipe.out)
    monkeypatch.setattr(Slimmer, "decide", lambda *_: pytest.fail("a layer is decided again"))
    chosen = replace(found.recipe, steps=steps, evaluation=None)
    assert pipeline.run_recipe(chosen, resume=True) is not None


def test_a_killed_search_resumes_to_the_same_answer(small, tmp_path, monkeypatch):
    """What is finished is not measured again."""
    monkeypatch.setattr(search, "forms", lambda *_: few()[:2])
    config = replace(smaller_than(small), confirm=3)
    real, left, seen = trials.scores, [99], list[int]()

    def scores(*given):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        seen.append(1)
        return real(*given)

    def found(out, resume=False):
        seen.clear()
        return run.open_search(recipe_of(out, str(small)), config, resume=resume).run()[0]

    monkeypatch.setattr(trials, "scores", scores)
    whole, left[0] = found(tmp_path / "whole"), 1
    wanted = len(seen)
    with pytest.raises(KeyboardInterrupt):
        found(tmp_path / "out")
    recipe, left[0] = recipe_of(tmp_path / "out", str(small)), 99
    with pytest.raises(MoesaicError, match="unfinished"):
        fit(recipe, config)
    with pytest.raises(MoesaicError, match="seed was 0, is 1"):
        fit(replace(recipe, calibration=replace(recipe.calibration, seed=1)), config, resume=True)
    assert found(tmp_path / "out", resume=True) == whole
    assert len(seen) == wanted - 1 > 0
    monkeypatch.setattr(trials, "convert", None)
    kept = []
    monkeypatch.setattr(run, "run_recipe", lambda best, **_: kept.append(best))
    fit(recipe, config, resume=True)
    assert len(kept[0].steps) == 1


def test_a_killed_pricing_resumes_to_the_same_table(small, tmp_path, monkeypatch):
    """The alternatives of finished layers are not run again, and what is left can be discarded."""
    monkeypatch.setattr(search, "forms", lambda *_: few()[:1])
    config = smaller_than(small)
    real, left, seen = PricedPart.directional, [99], list[int]()

    def directional(self, stand_in):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        seen.append(self.place)
        return real(self, stand_in)

    def table(out, resume=False):
        seen.clear()
        prices = run.open_search(recipe_of(out, str(small)), config, resume=resume).prices
        return {key: price.kl for key, price in prices.steps.items()}

    monkeypatch.setattr(PricedPart, "directional", directional)
    whole = table(tmp_path / "whole")
    alternatives, layers = seen.count(0), max(seen) + 1
    left[0] = 2 * alternatives + 1
    with pytest.raises(KeyboardInterrupt):
        table(tmp_path / "out")
    assert {*seen} == {layers - 1, layers - 2, layers - 3}
    left[0] = 99
    assert table(tmp_path / "out", resume=True) == whole
    assert seen == [i for i in range(layers - 3, -1, -1) for _ in range(alternatives)]
    run.open_search(recipe_of(tmp_path / "out", str(small)), config, overwrite=True)


def test_half_of_a_folder_is_never_taken_for_it(tmp_path, monkeypatch):
    """Killed while a candidate's result is removed."""

    def killed(*_, **__):
        raise KeyboardInterrupt

    making = Search(recipe_of(tmp_path / "out"), FitConfig(memory=1), tmp_path).trials
    checkpoint = SimpleNamespace(tensor_bytes=lambda: 1)
    monkeypatch.setattr(trials, "convert", lambda *_: SimpleNamespace(write=lambda _: None))
    monkeypatch.setattr(trials, "Source", lambda *_: SimpleNamespace(checkpoint=checkpoint))
    monkeypatch.setattr(trials, "Layerwise", lambda *_: None)
    steps = (PruneConfig(keep=4, score="random"),)
    opened = making.open(Candidate("", steps, ResultSize(1, 1, 1, True, True)))
    opened.__enter__()
    assert [*tmp_path.glob("made-*")]
    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        opened.__exit__(None, None, None)
    assert not [*tmp_path.glob("made-*")]


@pytest.mark.parametrize("confirm", [1, 9])
def test_what_may_come_out_best_is_measured(confirm, tmp_path, monkeypatch):
    """Of each form the best; nothing of many times the best estimate, unless measuring turns it."""
    estimates = {"a": 1.1, "b": 1.0, "c": 1.2, "d": 9.0}
    every = [form_of(name, [PruneConfig(keep=ord(name))]) for name in estimates]
    seen = []

    def measured(_, option):
        seen.append(option.form)
        kl = option.estimate() - 0.5 * (option.form == "a")
        return replace(option, score={"loss": 0.0, "kl": kl})

    monkeypatch.setattr(search, "forms", lambda *_: every)
    monkeypatch.setattr(Search, "_places", lambda *_: [0])
    monkeypatch.setattr(Trials, "measure", measured)
    monkeypatch.setattr(
        RecipeSizes, "of", lambda _, steps: ResultSize(1 if steps else 10, 1, 1, True, True)
    )
    looking = Search(recipe_of(tmp_path / "out"), FitConfig(memory=9, confirm=confirm), tmp_path)
    steps = {key_of(form.family.configs[0]): price(estimates[form.name]) for form in every}
    looking.prices = Prices({}, steps)
    chosen, _ = looking.run()
    assert seen == ["b", "a", "c"][:confirm]
    assert chosen.form == ("b" if confirm == 1 else "a")


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ((0.9, 0.7, 1.0, 0.7), "one"),  # by .04 on average, not on every window
        ((0.9, 0.9, 0.8, 0.9), "two"),
        ((1.4, 0.4, 1.2, 0.6), "two"),  # by .1, which so few windows cannot show
        ((), "two"),  # of one window no error is known
    ],
)
def test_the_simpler_candidate_is_chosen_unless_it_is_significantly_worse(others, expected):
    one = scored("one", 1, (1.1, *others))
    two = scored("two", 2, (1.0, *(0.8 for _ in others)))
    odd = scored("odd", 1, two.kl_N, native=False)
    assert simplest([odd, two, one]) == (one if expected == "one" else two)
    assert simplest([]) is None
    assert one.as_json().keys().isdisjoint({"kl_N"})


def test_what_is_plainer_keeps_the_loss(tmp_path):
    """Perplexity may rise further where KL differs by nothing."""
    one, two = scored("", 1, (0.1, 0.3), loss=0.3), scored("", 2, (0.1, 0.3), loss=0.1)
    for limit, expected in ((None, one), (0.3, one), (0.2, two), (0.05, two)):
        config = FitConfig(memory=9, max_loss=limit)
        looking = Search(recipe_of(tmp_path / "out"), config, tmp_path)
        assert looking._simplest([two, one]) == expected
    looking._best = lambda *_: looking._simplest([two, one])
    with pytest.raises(MoesaicError, match="raises perplexity by 0.1. A larger"):
        looking.run()


def test_the_smallest_within_a_loss(tmp_path, monkeypatch):
    """Losses that fall with size, as a formula: 0.05 is kept from 0.62 of the bytes on."""

    def best(self, config):
        assert config.memory is not None
        share = config.memory / self.original.bytes
        size = ResultSize(config.memory, 0, 0, native=True, exact=True)
        return Candidate("", (), size, {"loss": 0.05 + 0.62 - share, "kl": 0.0})

    monkeypatch.setattr(Search, "_best", best)
    looking = Search(recipe_of(tmp_path / "out"), FitConfig(max_loss=0.05), tmp_path)
    chosen, _ = looking.run()
    assert chosen.size.memory / looking.original.bytes == pytest.approx(0.625, abs=1e-3)
    tight = Search(recipe_of(tmp_path / "out"), FitConfig(max_loss=0.05, memory=9), tmp_path)
    with pytest.raises(MoesaicError, match="max_loss 0.05 is out of reach"):
        tight.run()


# --- estimates -----------------------------------------------------------------------------------


def test_what_was_condensed_before_may_be_slimmed_to_a_budget(tokens, tmp_path):
    config = CondenseConfig(count=1, keep="shared+routed", refit=False)
    moesaic.condense(tiny_moe("mixtral"), config, text=tokens).save(tmp_path / "condensed")
    folder = tmp_path / "headers"
    folder.mkdir()
    sizes = RecipeSizes(recipe_of(tmp_path, str(tmp_path / "condensed")), folder)
    thin = SlimConfig(keep=0.5, score="energy", refit=False)
    assert sizes.of((thin,)).memory < sizes.of(()).memory


def test_few_first_steps_are_tried_before_another_and_are_decided_quickly():
    shape = Shape(layers=4, width=96, multiple=8, experts=8, fewest=2, top_k=4, uneven=True)
    found = {f.name: f for m in METHODS.values() for f in m.families(shape)}
    assert [c.keep for c in found["prune"].configs] == [2, 3, 4, 5, 6, 7, 8]
    assert [c.keep for c in found["prune"].first] == [7, 6, 4, 2]
    assert [c.top_k for c in found["experts a token"].first] == [2, 3]
    quick = {"prune": "pairwise", "slim": "energy", "slim by layer and expert": "energy"}
    for name, score in quick.items():
        assert {(c.score, c.refit) for c in found[name].configs} == {(score, False)}


def test_many_layers_are_chosen_in_one_pass_over_the_text():
    """Where a few are, each is tried in every round."""

    def searches(layers):
        found = CondenseConfig.families(Shape(layers, 96, 8, experts=8, fewest=2, top_k=2))
        return {family.careful(family.configs[0]).layer_search for family in found}

    assert (searches(8), searches(9)) == ({"racing"}, {"cosine"})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tiny-moe", "Give a budget"),
        ("tiny-moe --memory 100KB", "--memory 100KB is out of reach: the least that works is"),
        ("tiny-moe --parameters 10", "--parameters 10 is out of reach"),
        ("tiny-moe --parameters 10 --memory 1TB", "--parameters 10 is out of reach"),
        ("tiny-moe --memory 1TB", "tiny-moe is within this budget as it is (memory 11.57MB)"),
        ("tiny-moe --memory 1TB --parameters 1e9", "(memory 11.57MB, parameters 5782784)"),
        ("tiny-moe --memory 9MB --samples 5000", "samples"),
        ("tiny-moe --memory 3MB --type q9", "'q9' is none of f32, f16"),
        ("tiny-moe --parameters 4e6 --type q8_0", "--type needs a budget of bytes (memory)"),
        ("tiny-moe --memory 3MB --type q8_0", how_to_install("gguf")),
        ("tiny-shared-moe --memory 3MB --type q8_0", "llama.cpp"),
    ],
)
def test_what_cannot_be_is_refused(words, said, tmp_path, monkeypatch):
    """Also files, where their converter is not there."""
    monkeypatch.setattr(search, "forms", lambda *_: [keeping(2)])
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setattr("moesaic.exports.llamacpp.installed", lambda *_: [])
    model, *options = words.split()
    given = ["fit", model, str(tmp_path / "out"), *options]
    with pytest.raises(MoesaicError) as raised:
        CliRunner().invoke(app, given, catch_exceptions=False)
    assert said in str(raised.value)
    assert "1TB is" not in str(raised.value)  # a budget that is met
    assert not any(tmp_path.iterdir())


def test_the_least_size_is_told_before_anything_is_tried_and_works(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "forms", few)
    labels = []

    def track(items, label, total=None):
        labels.append(label)
        return items

    for name, tiny in (("memory", "1KB"), ("parameters", "1000")):
        config = FitConfig(**{name: parse_bytes(tiny)})
        with pytest.raises(MoesaicError, match=f"{name} {tiny} is out of reach") as raised:
            Search(recipe_of(tmp_path / "out"), config, tmp_path / name, track).run()
        least = str(raised.value).partition("works is ")[2].partition(" ")[0].removesuffix(".")
        enough = FitConfig(**{name: parse_bytes(least)})
        looking = Search(recipe_of(tmp_path / "out"), enough, tmp_path / name)
        assert any(looking._places(form, enough, None) for form in few())
    assert set(labels) == {"Looking for what fits"}


def test_an_interrupted_search_leaves_the_best_recipe_so_far(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(search, "forms", few)
    losses, steps = iter([0.3, 0.1]), {key_of(c): price(0.1) for c in priced_configs(few())}
    monkeypatch.setattr(Search, "prices", Prices({}, steps))

    def measured(_, candidate):
        loss = next(losses, None)
        if loss is None:
            raise KeyboardInterrupt
        return candidate.with_score({"kl": loss, "loss": loss, "kl_N": ()})

    monkeypatch.setattr(Trials, "measure", measured)
    with pytest.raises(KeyboardInterrupt):
        fit(recipe_of(tmp_path / "out"), FitConfig(memory=ORIGINAL.bytes - 1))
    left = load_recipe(tmp_path / "out.search" / "best.yaml")
    assert (len(left.steps), left.calibration.samples) == (1, 4)
    assert f"has the least KL so far. Its recipe is in {tmp_path}" in caplog.text
    assert "resume=" not in caplog.text, "the command line prints it as it is"


def test_mixtures_have_forms_of_two_steps():
    source = resolve("tiny-shared-moe")
    assert isinstance(base_arch(source.config), MoEArch)
    found = forms(source, FitConfig(memory=1))
    verbs = {tuple(step.verb for step in form.steps(0)) for form in found}
    assert {("prune",), ("slim",), ("condense",), ("prune", "slim"), ("condense", "slim")} == verbs


def test_an_unfinished_run_of_out_is_replaced_only_where_that_is_asked_for(tmp_path, monkeypatch):
    def begun(*_, **__):
        raise MoesaicError("begun")

    (tmp_path / "out.partial").mkdir()
    monkeypatch.setattr(run, "open_search", begun)
    for asked, message in (({}, "unfinished run"), ({"overwrite": True}, "begun")):
        with pytest.raises(MoesaicError, match=message):
            fit(Recipe("tiny-moe", str(tmp_path / "out"), ()), FitConfig(memory=1), **asked)


ODD = ("minimax", "kimi_linear", "inkling_text", "granitemoehybrid", "llama4_text", "deepseek_v4")
ODD += ("phimoe", "glm4_moe", "ernie4_5_moe", "falcon", "olmo2", "lfm2")


@pytest.mark.parametrize(
    ("number", "model_type"), [(0, "gpt_oss"), *(nightly(n, t) for n, t in enumerate(ODD))]
)
def test_whole_searches_run_on_architectures_that_do_not_ship(number, model_type, tmp_path):
    """With all forms; one budget after the other."""
    base = stored(small_model(model_type), tmp_path / "base")
    whole = Skeleton(resolve(str(base)).config, None).size
    budgets = (
        {"parameters": 0.75 * whole.total_parameters},
        {"parameters": 0.75 * whole.total_parameters, "native": True},
        {"active_parameters": 0.85 * whole.active_parameters},
    )
    config = FitConfig(windows=4, confirm=1, **budgets[number % len(budgets)])
    texts = Calibration(samples=4, length=32), Evaluation(length=32, max_tokens=128, rounds=0)
    record = fit(Recipe(str(base), str(tmp_path / "out"), (), *texts), config)
    made = Skeleton(resolve(str(tmp_path / "out")).config, None).size
    assert made.total_parameters <= (config.parameters or math.inf)
    assert made.active_parameters <= (config.active_parameters or math.inf)
    assert record.measured["tried"]
