"""Laws of every method: the same result from memory and from disk, in one go or not, by one or two.

They hold for methods that other files never heard of: see :mod:`cases`.
"""

import json
import logging
import os
import random
import warnings
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import carry_out
import pytest
import torch
from builders import equal, launch, loaded, logits, nightly, same, weights
from cases import KEYS, OPTIONS, config_of, make_start, many_tokens, model_of, request_of, result_of
from safetensors.torch import load_file, save_file

import moesaic
from moesaic import MoesaicError, Plan, Tokens
from moesaic.api import verb
from moesaic.config import MethodConfig, about
from moesaic.methods import METHODS, VERBS, implementation
from moesaic.methods.base import Method
from moesaic.metrics.score import model_size
from moesaic.observation.files import StatsFile
from moesaic.recipe import Recipe, step_config
from moesaic.sizes import estimate, weight_bytes

MODES = ("disk", "memory")
KILLED = ("prune.naee", "tune.sft")
"""One that decides layer by layer and one that trains; ``make test-all`` tries the others."""
SHARED = [
    *((key, {}) for key in KEYS),
    ("prune.naee", {"progressive": True}),  # tokens that earlier layers changed
    ("slim.neurons", {"refit": True}),  # each process solves for layers of its own
]
"""What several processes make."""
TEXT_DECIDES = ("carve.tomoe",)
"""Methods whose results' sizes follow from the text that they look at."""


@cache
def whole(key, mode, folder, accumulate, **options):
    """A result that was made in this process in one go, written to a folder with its logits."""
    out = folder / f"{key}-{mode}-{accumulate}-{'-'.join(options)}"
    config = config_of(key, **options)
    if accumulate > 1 and learns(key):
        config = replace(config, accumulate=accumulate)
    result = made(key, mode, folder, config=config)
    write(result, out)
    save_file({"logits": logits(result.model, many_tokens().rows(slice(2)))}, out / "logits")
    return out


def write(result, out):
    """A result's files, and its summary beside them."""
    out.mkdir()
    result.write(out)
    (out / "summary.json").write_text(json.dumps(dict(result.summary)))


@cache
def start_of(key, folder):
    """The folder of the model that a method starts from."""
    return make_start(key, folder / f"{key}-start")


def made(key, mode, folder, **options):
    """What a method makes of its tiny model, given live or by its folder."""
    return result_of(key, **model_of(start_of(key, folder), mode == "memory"), **options)


def learns(key):
    """Whether a method trains: it accumulates gradients."""
    return any(of.name == "accumulate" for of in fields(METHODS[key]))


def losses(folder):
    found = json.loads((folder / "summary.json").read_text())
    return found.get("training", {}).get("losses", [])


def check_same(found, wanted, exact=True):
    """Two results: their plans, their tensors, their losses."""
    for ours, theirs in zip(losses(found), losses(wanted), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert (found / "moesaic/plan.json").exists() == (wanted / "moesaic/plan.json").exists()
    if (wanted / "moesaic/plan.json").exists():
        a, b = Plan.load(found), Plan.load(wanted)
        assert a.base == b.base
        assert a.layers.keys() == b.layers.keys()
        if exact:
            assert all(same(layer, b.layers[i]) for i, layer in a.layers.items())
    ours, theirs = weights(found), weights(wanted)
    assert ours.keys() == theirs.keys()
    if exact:
        assert equal(ours, theirs)
    else:
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-4)


# --- what a method says of itself ----------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS)
def test_a_method_says_what_it_is(key):
    config = METHODS[key]
    verb, _, name = key.partition(".")
    assert issubclass(config, MethodConfig)
    assert (config.verb, config.name) == (verb, name)
    assert config.verb in VERBS
    assert config.title
    assert issubclass(resolve_name(config.implementation), Method)
    for of in fields(config):
        assert about(of).help, f"{of.name} has no help text"
    assert isinstance(implementation(config()), Method)


PAPERS = {
    "carve.more": {"experts": 4, "top_k": 1, "layers": "last-half", "balanced": False},
    "carve.tomoe": {"steps": 10_000, "length": 2048, "lr": 1e-3, "balance": 1.0, "noise": True},
    "carve.dsmoe": {"steps": 305_176, "batch": 32, "length": 1024, "lr": 2e-5, "sparsity": 1.0},
    "prune.naee": {"score": "reconstruction", "refit": False, "progressive": False},
    "slim.neurons": {"score": "energy", "allocate": "experts", "refit": False},
    "skip.naee": {"quantile": 0.5, "rule": "auto", "betas": ()},
    "condense.cd-moe": {"metric": "js", "expert_search": "greedy", "layer_search": "greedy"}
    | {"keep": "shared", "refit": False},
    "tune.sft": {"what": "condensed", "lr": 1e-4, "warmup": 0.1, "teacher": ""},
}
"""What each paper does, in its own text or its authors' code."""


@pytest.mark.parametrize("key", PAPERS)
def test_the_recipe_paper_is_its_papers_own_setting(key):
    """It has no additions; whatever else is beyond the paper says so, unasked or in a bundle."""
    verb, _, name = key.partition(".")
    asked = {"method": name, "recipe": "paper"}
    paper = step_config(verb, asked)
    assert {option: getattr(paper, option) for option in PAPERS[key]} == PAPERS[key]
    for bundle in ({}, *METHODS[key].bundles.values()):
        config = METHODS[key](**{**OPTIONS.get(key, {}), **bundle})
        plain = {of.name: getattr(paper, of.name) for of in fields(config) if about(of).beyond}
        changed = any(getattr(config, option) != value for option, value in plain.items())
        assert bool(config.beyond) == ("beyond" in config.label) == changed, bundle
    assert paper.beyond == ()


# --- one result ----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS)
def test_from_disk_is_from_memory(key, place):
    """What is saved, and what it computes before."""
    disk, memory = (whole(key, mode, place, 1) for mode in MODES)
    check_same(disk, memory)
    assert equal(load_file(disk / "logits"), load_file(memory / "logits"))


DECIDING = {"prune.naee": {"refit": False}, "skip.naee": {}}
DECIDING |= {"slim.neurons": {"score": "energy", "refit": False}}
"""Methods that decide from statistics, and settings by which nothing else is needed."""


@pytest.mark.parametrize("key", [key for key in KEYS if key != "skip.top-k"])  # sees no text
def test_statistics_decide_as_the_model_does(key, place, tmp_path):
    """Other methods say that they take none."""
    start, config = start_of(key, place), config_of(key, **DECIDING.get(key, {}))
    stats = tmp_path / "stats"
    if key not in DECIDING:
        with pytest.raises(MoesaicError, match="takes no statistics"):
            verb(config.verb, str(start), config, stats=str(stats))
        return
    moesaic.observe(str(start), stats, gram_mb=8, calibration=many_tokens())
    found = verb(config.verb, str(start), config, stats=str(stats)).plan.layers
    wanted = result_of(key, str(start), config).plan.layers
    assert found.keys() == wanted.keys()
    assert all(same(layer, wanted[i]) for i, layer in found.items())


@pytest.mark.parametrize("key", KEYS)
def test_what_stands_in_padding_changes_nothing(key, place):
    ids, made = many_tokens().input_ids[:16], []
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[::3, 40:], mask[1, 5:] = False, False
    for token in (0, 7):
        text = Tokens(ids.masked_fill(~mask, token), mask)
        options, config = model_of(start_of(key, place), live=True), config_of(key)
        made.append(
            verb(config.verb, config=config, calibration=text, **options).model.state_dict()
        )
    assert made[0].keys() == made[1].keys()
    for name, tensor in made[0].items():
        torch.testing.assert_close(tensor, made[1][name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("key", KEYS)
def test_its_outline_weighs_what_it_makes(key, place):
    """To the byte, before a weight is read; nearly, where text decides."""
    recipe = Recipe(str(start_of(key, place)), "out", (config_of(key),), evaluation=None)
    sizes, out = estimate(recipe), whole(key, "disk", place, 1)
    torch.randn(1)  # whatever was drawn before, the estimate is the same again
    assert estimate(recipe).output_bytes == sizes.output_bytes
    assert sizes.exact or key in TEXT_DECIDES
    off = 0 if sizes.exact else 0.05
    made = model_size(loaded(out)).total_parameters
    assert sizes.output_bytes == pytest.approx(weight_bytes(out), rel=off, abs=0)
    assert sizes.output_parameters == pytest.approx(made, rel=off, abs=0)


@pytest.mark.parametrize("key", KEYS)
def test_saved_is_live_bitwise(key, place):
    """And from memory as from disk: see above."""
    out, tokens = whole(key, "disk", place, 1), many_tokens().rows(slice(2))
    saved, live = logits(loaded(out), tokens), load_file(out / "logits")["logits"]
    assert torch.equal(saved, live)
    assert not torch.equal(saved, logits(loaded(start_of(key, place)), tokens))


@pytest.mark.parametrize("key", KEYS)
def test_the_callers_model_is_changed_where_that_is_asked(key, place):
    options = model_of(start_of(key, place), live=True)
    assert result_of(key, inplace=True, **options).model is options["model"]


NOTHING: dict[str, dict[str, Any]] = {
    "prune.naee": {"keep": 8, "refit": False},
    "slim.neurons": {"keep": 1.0, "refit": False},
    "skip.top-k": {"top_k": 2},
    "condense.cd-moe": {"count": 0},
}
"""Settings by which a method removes nothing."""


@pytest.mark.parametrize("key", NOTHING)
def test_what_removes_nothing_changes_no_bit(key, place):
    """What carves is equal, and not to the bit: test_more.py, test_dsmoe.py, test_tomoe.py."""
    made = result_of(key, str(start_of(key, place)), config_of(key, **NOTHING[key])).model
    base = loaded(start_of(key, place))
    assert type(made) is type(base)
    assert equal(dict(made.state_dict()), dict(base.state_dict()))
    tokens = many_tokens().rows(slice(2))
    assert torch.equal(logits(made, tokens), logits(base, tokens))


def hooked(model):
    """A model in training with a frozen part, each module's forward replaced as accelerate does."""
    model.train()
    model.get_input_embeddings().requires_grad_(False)
    for module in model.modules():
        module.forward = partial(type(module).forward, module)
        module.register_forward_hook(lambda module, args, out: None)
    return model


def surroundings(model):
    """All that a verb finds and must leave: the model, its weights aside, and the process."""
    loggers = [logging.root, *map(logging.getLogger, KNOWN_LOGGERS)]
    return {
        "modes": {name: m.training for name, m in model.named_modules()},
        "forwards": {name: id(vars(m).get("forward")) for name, m in model.named_modules()},
        "hooks": {
            (name, kind): list(hooks)
            for name, m in model.named_modules()
            for kind, hooks in vars(m).items()
            if kind.endswith("_hooks")
        },
        "learning": {n: (p.requires_grad, p.grad) for n, p in model.named_parameters()},
        "config": model.config.to_dict(),
        "class": type(model),
        "environment": dict(os.environ),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "loggers": {
            log.name: (log.level, log.disabled, log.propagate, list(log.handlers))
            for log in loggers
        },
        "random": (random.getstate(), torch.get_rng_state().tolist()),
        "torch": (torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_dtype()),
    }


KNOWN_LOGGERS = "moesaic", "transformers", "transformers.modeling_utils", "datasets", "py.warnings"


def stopping(error):
    """A Track that stops a run at the second item that passes."""

    def track(items, label, total=None):
        for number, item in enumerate(items):
            if number:
                raise error
            yield item

    return track


@pytest.mark.parametrize("key", KEYS)
def test_the_caller_finds_all_as_it_was(key, place):
    """After a run, after one that fails, and after one that is interrupted."""
    options = model_of(start_of(key, place), live=True)
    options["config"] = config_of(key)
    whole(key, "memory", place, 1)  # what libraries do when they are first imported is theirs
    model = hooked(options["model"])
    before = surroundings(model)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert not result_of(key, **options).model.training
    assert surroundings(model) == before
    for error in (MoesaicError, KeyboardInterrupt):
        with pytest.raises(error):
            result_of(key, progress=stopping(error), **options)
        assert surroundings(model) == before
    moesaic.evaluate(model, data=many_tokens().rows(slice(2)))
    assert surroundings(model) == before
    assert equal(kept, dict(model.state_dict()))


@pytest.mark.parametrize(
    ("mode", "keys"),
    [
        ("disk", KILLED),
        nightly("disk", tuple(key for key in KEYS if key not in KILLED)),
        nightly("memory", KEYS),
    ],
    ids=["disk", "others", "memory"],
)
def test_killed_and_resumed_is_whole(mode, keys, place, tmp_path):
    """Every method, killed when it begins to keep its second layer or checkpoint, and again."""
    requests = [
        {
            "key": key,
            "config": request_of(config_of(key)),
            "model": str(start_of(key, place)),
            "live": mode == "memory",
            "out": str(tmp_path / key / "out"),
            "progress": str(tmp_path / key / "progress"),
            "kill": True,
        }
        for key in keys
    ]
    file = tmp_path / "requests.json"
    file.write_text(json.dumps(requests))
    launch(carry_out.main, file, count=1)
    ends = json.loads((tmp_path / "ends.json").read_text())
    for key, (first, second) in ends.items():
        assert first == -9, key
        assert second in (-9, 0), key
    for request in requests:
        key, progress, out = request["key"], Path(request["progress"]), Path(request["out"])
        assert not out.exists()
        kept = {f: f.read_bytes() for f in progress.glob("layer-*.safetensors")}
        result = made(key, mode, place, resume_from=progress)
        assert kept == {f: f.read_bytes() for f in kept}, f"{key}: decided otherwise"
        write(result, out)
        check_same(out, whole(key, mode, place, 1))


@pytest.mark.parametrize(
    ("mode", "count", "shared"),
    [
        ("disk", 2, [(key, {}) for key in KILLED] + SHARED[-1:]),
        nightly("memory", 2, SHARED),
        nightly("disk", 3, SHARED),
    ],
    ids=["two", "in memory", "three"],
)
def test_several_processes_are_one(mode, count, shared, place, tmp_path):
    """Every method, and observe; one that trains does what one process does that accumulates."""
    requests = [
        {
            "key": key,
            "config": request_of(config_of(key, **options)),
            "model": str(start_of(key, place)),
            "live": mode == "memory",
            "out": str(tmp_path / f"{key}{n}"),
        }
        for n, (key, options) in enumerate(shared)
    ]
    mixture, file = start_of("prune.naee", place), tmp_path / "requests.json"
    observing = {"key": "observe", "model": str(mixture), "live": mode == "memory"}
    file.write_text(json.dumps([*requests, {**observing, "out": str(tmp_path / "observed")}]))
    launch(carry_out.main, file, count=count)
    for n, (key, options) in enumerate(shared):
        found, trained = tmp_path / f"{key}{n}", learns(key)
        check_same(found, whole(key, mode, place, count if trained else 1, **options), not trained)
    model = model_of(mixture, mode == "memory")["model"]
    alone = moesaic.observe(model, tmp_path / "alone", gram_mb=1, calibration=many_tokens())
    assert StatsFile(alone).header == StatsFile(tmp_path / "observed").header
    ours, theirs = load_file(tmp_path / "observed"), load_file(alone)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():  # sums of several processes are added in another order
        torch.testing.assert_close(ours[name], tensor, rtol=1e-9, atol=1e-12)
