"""The library as Python callers meet it: calls, types, files, notebooks, other processes."""

import copy
import inspect
import json
import pickle
import subprocess
import sys
from dataclasses import fields, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import inside, launch, loaded, logits, pages, tiny_model, tiny_moe, tiny_tokenizer
from rich.console import Console
from safetensors.torch import save_file
from torch.nn.utils import parametrize, prune
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import moesaic
from moesaic import MoesaicError, SlimConfig, api
from moesaic.config import RunArgs, parse_bytes
from moesaic.io.source import resolve
from moesaic.methods import VERBS, methods_of
from moesaic.recipe import load_recipe

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

FEW = {"samples": 8, "length": 64, "progress": False, "calibration": pages("calibration")}


@pytest.fixture(scope="module")
def name(moe_folder):
    return str(moe_folder)


@pytest.fixture(scope="module")
def slimmed(name):
    """The result of the first call that a reader makes, of little text."""
    return moesaic.slim(name, keep=0.5, **FEW)


# --- calls ---------------------------------------------------------------------------------------


def test_options_are_given_by_name(slimmed, name):
    assert slimmed.method.config.keep == 0.5
    assert slimmed.job.args.calibration.samples == 8
    by_config = moesaic.slim(name, SlimConfig(keep=0.5), **FEW)
    assert by_config.plan.fingerprint == slimmed.plan.fingerprint
    other = moesaic.slim(name, SlimConfig(score="energy"), keep=0.75, refit=False, **FEW)
    config = other.method.config
    assert (config.keep, config.score, config.refit) == (0.75, "energy", False)


def test_method_and_recipe_choose_the_config(monkeypatch):
    asked = []
    monkeypatch.setattr("moesaic.pipeline.convert", lambda config, args: asked.append(config))
    moesaic.carve("tiny-dense", method="dsmoe", steps=3)
    moesaic.slim("tiny-moe", recipe="paper", keep=0.25)
    moesaic.prune("tiny-moe", seed=3)
    moesaic.carve("tiny-dense", method="tomoe", recipe="paper", length=512)
    moesaic.carve("tiny-dense", method="more", length=512)
    dsmoe, paper, seeded, shorter, more = asked
    assert (dsmoe.name, dsmoe.steps) == ("dsmoe", 3)
    assert (paper.score, paper.keep) == ("energy", 0.25)
    assert seeded.seed == 3
    assert (shorter.name, shorter.length, more.name) == ("tomoe", 512, "more")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: moesaic.slim("tiny-moe", 0.5), 'moesaic.slim("tiny-moe", keep=0.5)'),
        (lambda: moesaic.prune("tiny-moe", {"keep": 6}), 'moesaic.prune("tiny-moe", keep=6)'),
        (lambda: moesaic.fit("tiny-moe", "9MB"), "memory='9MB'"),
        (lambda: moesaic.slim("tiny-moe", kep=0.5), "Did you mean 'keep'"),
        (lambda: moesaic.slim("tiny-moe", track=list), "'track'"),
        (lambda: moesaic.slim("tiny-moe", progress="folder"), "resume_from"),
        (lambda: moesaic.slim("tiny-moe", moesaic.PruneConfig()), "prune, not of slim"),
        (lambda: moesaic.fit("tiny-moe", memory=1, stats="x"), "fit() has no option 'stats'"),
        (lambda: moesaic.observe("tiny-moe", "out", stats="x"), "observe() has no option 'stats'"),
    ],
)
def test_a_wrong_call_shows_the_right_one(call, words):
    with pytest.raises(TypeError) as caught:
        call()
    assert words in str(caught.value).replace("'tiny-moe'", '"tiny-moe"')


OBSERVED = "calibration=Tensor chooses text, and the statistics were observed on text already"


@pytest.mark.parametrize(
    ("verb", "options", "words"),
    [
        ("prune", {"model": None}, "loaded PreTrainedModel.*NoneType"),
        ("prune", {"model": 7}, "loaded PreTrainedModel.*int"),
        ("prune", {"model": torch.nn.Linear(2, 2)}, "loaded PreTrainedModel.*Linear"),
        ("prune", {"config": {"keep": "six"}}, "keep must be a number; got 'six'"),
        ("prune", {"config": {"refit": 1}}, "refit must be True or False; got 1"),
        ("prune", {"config": {"seed": -1}}, "seed -1 must be at least 0"),
        ("skip", {"seed": -1}, "seed -1 must be at least 0"),
        ("prune", {"samples": "4"}, "samples must be a whole number; got '4'"),
        ("prune", {"tokenizer": "x"}, "tokenizer must be a tokenizer or None; got 'x'"),
        ("prune", {"dtype": 3}, "dtype must be one of .*float16, or None; got 3"),
        ("prune", {"stats": 3}, "stats"),
        ("prune", {"resume_from": 3}, "is named by a str or a Path; got 3"),
        ("prune", {"resume_from": __file__}, "resume_from .*test_python.py is a file; name a fol"),
        ("prune", {"compare": "rep"}, "compare 'rep' is none of"),
        ("prune", {"stats": "x", "calibration": torch.ones(1, 4).long()}, OBSERVED),
        ("prune", {"calibration": "hf://datasets/you/it"}, "is an address, which is not read"),
        ("prune", {"calibration": torch.rand(2, 16)}, "whole numbers.*float32"),
        ("prune", {"calibration": torch.full((1, 4), 384)}, "Token id 384 is beyond .* 384"),
        ("prune", {"calibration": 7}, "calibration is a source, texts, or token ids.*int"),
        ("prune", {"calibration": {"input_ids": []}}, r"moesaic\.Tokens\(input_ids.*dict"),
        ("prune", {"calibration": "prose", "length": 300}, "length 300 is beyond .* 256 positions"),
        ("evaluate", {"dtype": torch.float64}, "dtype must be one of .* got torch.float64"),
        ("evaluate", {"dtype": "float8"}, "dtype must be one of .* got 'float8'"),
        ("evaluate", {"tokenizer": "x"}, "tokenizer must be a tokenizer or None; got 'x'"),
        ("evaluate", {"data": torch.zeros(0, 8).long()}, "no token that is not padding"),
        ("evaluate", {"device": 3}, "device '3' is none of"),
        ("evaluate", {"data": 3}, "data is a source, texts or token ids"),
        ("evaluate", {"tasks": ["boolq"]}, "tasks are names with commas between"),
        ("bench", {"dtype": 3}, "dtype must be one of .*float16, or None; got 3"),
        ("generate", {"prompt": "a", "tokenizer": "x"}, "tokenizer must be a tokenizer or None"),
        ("generate", {"prompt": "a", "new_tokens": 0}, "new_tokens must be a whole number from 1"),
        ("generate", {"prompt": "a", "new_tokens": "9"}, "new_tokens must be a whole number"),
    ],
)
def test_arguments_of_other_types_are_refused_in_words(name, verb, options, words):
    """As the command line does."""

    def call(config=None, **given):
        given |= {"config": moesaic.PruneConfig(**config)} if config else {}
        getattr(moesaic, verb)(**{"model": name, **given})

    with pytest.raises(moesaic.MoesaicError, match=words):
        call(**options)


def test_token_ids_are_cut_and_drawn_as_a_text_is(name, tmp_path):
    """72539f03 ignored samples, length and max_tokens there."""
    ids = torch.arange(320).view(10, 32)
    some = moesaic.evaluate(name, data=ids, length=16, max_tokens=64, progress=False)
    assert some.perplexity == moesaic.evaluate(name, data=ids[:2].view(4, 16)).perplexity
    file = tmp_path / "ids.safetensors"
    save_file({"input_ids": ids}, file)
    options = {"keep": 6, "samples": 3, "length": 16}
    one, other = (moesaic.prune(name, calibration=text, **options) for text in (ids, str(file)))
    assert one.plan.fingerprint == other.plan.fingerprint


def test_none_is_the_best_method_and_its_best_options(name):
    options = {"keep": 6, "score": "aimer", "refit": False, "progress": False}
    one = moesaic.prune(name, method=None, recipe=None, **options)
    assert one.method.config == moesaic.prune(name, **options).method.config


def test_a_dtype_may_be_given_by_its_name(name):
    def perplexity(dtype):
        settings = {"length": 32, "max_tokens": 64, "progress": False}
        return moesaic.evaluate(name, dtype=dtype, **settings).perplexity

    assert perplexity("float32") == perplexity(torch.float32) != perplexity("bfloat16")


def test_a_device_may_be_one_of_torchs(name):
    here, settings = torch.device("cpu"), {"length": 16, "max_tokens": 64, "progress": False}
    moesaic.prune(name, keep=6, score="aimer", refit=False, device=here)
    moesaic.generate(name, "a", new_tokens=1, device=here)
    assert moesaic.evaluate(name, device=here, **settings).tokens == 60


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: moesaic.load_recipe(3), "named by a str or a Path; got 3"),
        (lambda: moesaic.load_recipe("x" * 300), "cannot be read"),
        (lambda: moesaic.run_recipe("recipe.yaml"), "takes a Recipe, .* got 'recipe.yaml'"),
        (lambda: moesaic.estimate(None), "takes a Recipe, .* got None"),
        (lambda: moesaic.Recipe(None, "out", ()), "A recipe names its model by a str; got None"),
        (lambda: moesaic.apply("tiny-moe", None, "out"), "A plan is a folder, .* got None"),
        (lambda: moesaic.inspect("x" * 300), "No model at x+: File name too long"),
        (lambda: moesaic.slim(tiny_model("phi").model), "PhiModel has no language-modelling head"),
        (lambda: moesaic.slim("", keep=0.5), "name is empty"),
        (lambda: moesaic.slim(" ", keep=0.5), "name is empty"),
        (lambda: parse_bytes("9" * 400), "is not a number of bytes"),
    ],
)
def test_recipes_and_names_of_other_kinds_are_refused(call, words):
    with pytest.raises(moesaic.MoesaicError, match=words):
        call()


def test_an_output_is_named_by_a_path(name):
    result = moesaic.prune(name, keep=6, score="aimer", refit=False)
    for out in (None, 3, b"out", "a\0b", []):
        for call in (
            lambda out=out: result.save_pretrained(out),
            lambda out=out: moesaic.export(name, out),
            lambda out=out: moesaic.observe(name, out),
        ):
            with pytest.raises(moesaic.MoesaicError, match="is named by a str or a Path; got"):
                call()


def test_the_stub_is_the_configs():
    from api_stub import STUB, stub

    assert STUB.read_text("utf-8") == stub(), "make docs-tables"


@pytest.mark.parametrize("verb", VERBS)
def test_a_signature_names_every_option(verb):
    parameters = inspect.signature(getattr(moesaic, verb)).parameters
    for config in methods_of(verb).values():
        assert {field.name for field in fields(config)} <= parameters.keys()
    assert {"calibration", "samples", "progress", "resume_from", "revision"} <= parameters.keys()
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values())
    assert "function" not in str(inspect.signature(getattr(moesaic, verb)))


@pytest.mark.slow
def test_types_are_checked(tmp_path):
    """mypy refuses an option that there is not and one of another type, and takes the right one."""
    (tmp_path / "calls.py").write_text(
        "import moesaic\n"
        'moesaic.slim("tiny-moe", keep=0.5).save_pretrained("out")\n'
        'moesaic.slim("tiny-moe", kep=0.5)\n'
        'moesaic.slim("tiny-moe", keep="half")\n'
        'moesaic.fit("tiny-moe", memory="9MB").generate("The")\n'
    )
    line = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", "cache"]
    env = {"MYPYPATH": str(Path(moesaic.__file__).parents[1]), "PATH": ""}
    there = {"cwd": tmp_path, "env": env}
    done = subprocess.run([*line, "calls.py"], capture_output=True, text=True, check=False, **there)
    found = done.stdout
    lines = [line for line in found.splitlines() if "error" in line and "calls.py" in line]
    assert [line.split(":")[1] for line in lines] == ["3", "4"], found


def test_progress_is_shown_unless_not_wanted(capsys, name):
    """And transformers' own bars are what they were."""
    moesaic.slim(name, keep=0.5, samples=4, length=32)
    assert "Slimming layers" in capsys.readouterr().err
    logging.enable_progress_bar()
    try:
        moesaic.slim(name, keep=0.5, samples=4, length=32, progress=False)
        assert logging.is_progress_bar_enabled()
    finally:
        logging.disable_progress_bar()
    assert capsys.readouterr().err == ""
    labels = []

    def shown(items, label, total=None):
        labels.append(label)
        return items

    moesaic.slim(name, keep=0.5, samples=4, length=32, progress=shown)
    assert labels
    assert RunArgs.of(name).track is not RunArgs.of(name, progress=False).track


def test_revision_and_token_reach_the_hub(monkeypatch):
    asked = []

    def download(name, **options):
        asked.append((name, options["revision"], options["token"]))
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    at = {"revision": "v2", "token": "hf_x"}
    given = {"slim": (), "evaluate": (), "inspect": (), "bench": (), "fit": ()}
    given |= {"generate": ("The",), "export": ("out",), "observe": ("stats",)}
    for verb, more in given.items():
        goal = {"memory": "1MB"} if verb == "fit" else {}
        with pytest.raises(MoesaicError, match="could not be fetched"):
            getattr(moesaic, verb)("you/name", *more, **goal, **at)
    assert asked == [("you/name", "v2", "hf_x")] * len(given)


@pytest.mark.parametrize("verb", ["evaluate", "bench"])
def test_a_revision_is_of_the_model_and_a_token_of_the_original_too(verb, monkeypatch):
    asked = []

    def download(name, **options):
        asked.append((name, options["revision"], options["token"]))
        if name == "them/original":
            raise OSError("offline")
        return str(resolve("tiny-moe").folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(MoesaicError, match="could not be fetched"):
        getattr(moesaic, verb)("you/name", against="them/original", revision="v2", token="hf_x")
    assert asked[0] == ("you/name", "v2", "hf_x")
    assert asked[-1] == ("them/original", None, "hf_x")


# --- results -------------------------------------------------------------------------------------


def test_saved_as_the_command_saves(slimmed, tmp_path, command, name):
    folder = slimmed.save_pretrained(tmp_path / "python")
    text = ["--samples", "8", "--length", "64", "--calibration", pages("calibration")]
    command("slim", name, tmp_path / "command", *text, "--no-eval")
    assert inside(folder) == inside(tmp_path / "command")
    files = (out / "moesaic/recipe.yaml" for out in (folder, tmp_path / "command"))
    python, command = map(load_recipe, files)
    assert replace(python, out="", steps=()) == replace(command, out="", steps=())
    settled, asked = python.steps[0], command.steps[0]
    assert replace(settled, score=asked.score, refit=asked.refit) == asked
    record = json.loads((folder / "moesaic/result.json").read_text())
    assert record["model"] == name
    assert slimmed.tokenizer("The")["input_ids"]
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(*(model(torch.arange(9)[None]).logits for model in (again, slimmed.model)))
    assert AutoTokenizer.from_pretrained(folder)("The") == slimmed.tokenizer("The")


def test_what_no_recipe_repeats_says_so(tmp_path, tokens):
    model = tiny_moe("mixtral")
    result = moesaic.prune(model, keep=4, calibration=tokens, progress=False)
    folder = result.save_pretrained(tmp_path / "out")
    recipe = (folder / "moesaic/recipe.yaml").read_text()
    assert "loaded in Python" in recipe
    assert "text was given in Python" in recipe


def test_a_result_is_a_model_to_every_function(slimmed, tmp_path, name):
    quick = {"progress": False}
    text = {"max_tokens": 256, "data": pages("evaluation"), **quick}
    score = moesaic.evaluate(slimmed, **text)
    assert score.perplexity == slimmed.evaluate(against=None, **text).perplexity
    assert slimmed.evaluate(**text).kl > 0
    assert moesaic.generate(slimmed, "The", new_tokens=4) == slimmed.generate("The", new_tokens=4)
    assert moesaic.inspect(slimmed) == moesaic.inspect(slimmed.model)
    assert moesaic.export(slimmed, tmp_path / "native", **quick)["exact"]
    assert moesaic.observe(slimmed, tmp_path / "stats", gram_mb=1, **FEW).is_file()
    pruned = moesaic.prune(slimmed, keep=4, **FEW)
    assert pruned.model.config.num_experts == 4
    speed = moesaic.bench(slimmed, name, length=8, new_tokens=2, rounds=1, **quick)
    assert {"model", "against", "ratio"} <= speed.keys()
    out = pruned.save_pretrained(tmp_path / "pruned")
    steps = json.loads((out / "moesaic/result.json").read_text())["steps"]
    assert [step["verb"] for step in steps] == ["slim", "prune"]
    moesaic.apply(name, pruned, tmp_path / "rebuilt")
    again = (loaded(folder) for folder in (out, tmp_path / "rebuilt"))
    assert torch.equal(*(model(torch.arange(9)[None]).logits for model in again))


def test_a_loaded_model_is_one_too(tmp_path):
    model, tokenizer = tiny_moe("mixtral"), tiny_tokenizer()
    model.save_pretrained(tmp_path / "saved")
    before = copy.deepcopy(model.config)
    size = moesaic.inspect(model)
    assert size == moesaic.inspect(str(tmp_path / "saved"))
    assert moesaic.generate(model, "The", tokenizer=tokenizer, new_tokens=2)
    with pytest.raises(MoesaicError, match="tokenizer="):
        moesaic.generate(model, "The")
    brief = {"length": 8, "new_tokens": 2, "rounds": 1, "progress": False}
    speed = moesaic.bench(model, tokenizer=tokenizer, **brief)
    assert speed["model"]["active_parameters"] == size["active_parameters"]
    assert model.config.to_dict() == before.to_dict()


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def every(change):
    """A change of each layer's attention, of modules that every verb keeps."""
    return lambda model: [change(layer.self_attn) for layer in model.model.layers] and None


def squeezed(linear):
    linear.weight = torch.nn.Parameter(linear.weight.data.to(torch.int8), requires_grad=False)


def swap(model):
    model.model.layers[1] = model.model.layers[0]


def tied(model):
    model.lm_head.weight = model.get_input_embeddings().weight


def endless(model):
    model.lm_head.weight.data[0, 0] = float("inf")


def compiled(model):
    model.forward = torch.compile(model.forward, backend="eager")


MORE: dict[str, tuple[Any, str]] = {
    "parametrised": (
        every(lambda a: parametrize.register_parametrization(a.q_proj, "weight", Doubled())),
        r"layers\.0\.self_attn\.q_proj\.weight of this loaded model is not as in a Mixtral",
    ),
    "masked": (
        every(lambda a: prune.random_unstructured(a.o_proj, "weight", 0.5)),
        r"o_proj\.weight of this loaded model is not as",
    ),
    "quantised": (every(lambda a: squeezed(a.q_proj)), r"q_proj\.weight of this loaded model is n"),
    "hooked": (
        every(lambda a: a.q_proj.register_forward_hook(lambda *a: 2 * a[2])),
        "computes som",
    ),
    "set otherwise": (every(lambda a: setattr(a, "scaling", 0.9)), "computes something else"),
    "config set": (lambda model: setattr(model.config, "num_experts_per_tok", 1), "computes some"),
    "shared": (swap, "are one and the same module"),
    "tied": (tied, r"lm_head\.weight of this loaded model is one tensor"),
    "one tensor": (
        every(lambda a: setattr(a.k_proj.weight, "data", a.v_proj.weight.data)),
        r"layers\.0\.self_attn\.v_proj\.weight of this loaded model is one tensor",
    ),
    "infinite": (endless, "lm_head.weight holds a value that is not finite"),
    "a layer less": (
        lambda model: setattr(model.config, "layer_types", ["full_attention"]),
        "config is not valid: .* must be equal to the number of",
    ),
    "compiled": (compiled, r"call model.compile\(\) in place"),
    "of two types": (lambda model: model.lm_head.double() and None, "cannot be run: expected"),
}
"""Changes of a loaded model that its config and weights do not say, and what is said of them."""


@pytest.mark.parametrize("which", MORE)
def test_a_loaded_model_that_is_more_than_is_saved_is_refused(which, tokens):
    model, (change, message) = tiny_moe("mixtral"), MORE[which]
    change(model)
    with pytest.raises(MoesaicError, match=message):
        moesaic.prune(model, keep=2, calibration=tokens)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # checkpointing has a new name
@pytest.mark.parametrize(
    "change",
    [
        every(lambda a: a.q_proj.register_forward_hook(lambda *_: None)),
        lambda model: model.requires_grad_(False) and None,
        lambda model: model.train().gradient_checkpointing_enable(),
        lambda model: model.compile(backend="eager"),
        every(lambda a: setattr(a, "attention_dropout", 0.5)),
        torch.inference_mode()(every(lambda a: setattr(a.q_proj.weight, "data", +a.q_proj.weight))),
    ],
)
def test_what_changes_no_logits_changes_no_result(change, tokens):
    wanted = moesaic.prune(tiny_moe("mixtral"), keep=2, calibration=tokens).model
    model = tiny_moe("mixtral")
    change(model)
    found = moesaic.prune(model, keep=2, calibration=tokens).model
    assert torch.equal(found.eval()(tokens.input_ids).logits, wanted(tokens.input_ids).logits)


@pytest.mark.parametrize("on_disk", [True, False])
def test_what_is_changed_after_a_verb_is_not_saved_in_its_place(on_disk, tokens, tmp_path):
    """Weights that were trained otherwise were left out of the file without a word."""
    model = tiny_moe("mixtral")
    model.save_pretrained(tmp_path / "base")
    first = moesaic.skip(str(tmp_path / "base") if on_disk else model, top_k=1)
    later = moesaic.skip(model, top_k=1)
    first.model.lm_head.weight.data.mul_(2)
    with pytest.raises(MoesaicError, match="was changed since it was made"):
        first.save_pretrained(tmp_path / "out")
    model.half()
    with pytest.raises(MoesaicError, match="was changed since: its weights are others"):
        later.save_pretrained(tmp_path / "out")


def test_settings_that_transformers_does_not_save_are_said(tmp_path):
    model = tiny_moe("mixtral")
    model.generation_config.do_sample, model.generation_config.temperature = False, 0.3
    result = moesaic.skip(model, top_k=1)
    with pytest.raises(MoesaicError, match="cannot be saved by transformers: GenerationConfig is"):
        result.save_pretrained(tmp_path / "out")
    result.model.generation_config.temperature = None
    assert (result.save_pretrained(tmp_path / "out") / "config.json").is_file()


def test_shown_in_one_line_and_never_as_an_empty_box(name):
    result = moesaic.slim(name, keep=0.5, **FEW)
    assert repr(result).startswith("<Result: moe, slimmed to 8 of 16 neurons an expert")
    page, before = result._repr_html_(), moesaic.inspect(name)["total_parameters"]
    assert f"(before: {before:,})" in page
    assert "layer 0" in page
    result.evaluation = moesaic.Tokens(torch.randint(1, 300, (2, 32)))
    assert result.scores["result"].kl > 0
    assert f"result {result.scores['result'].perplexity:.4g}, original " in repr(result)
    shown = Console(width=120, file=StringIO())
    shown.print(result)
    assert "slimmed to" in shown.file.getvalue()
    assert "perplexity" in result._repr_html_()
    for value in (result, result.plan, result.scores, result.scores["result"]):
        assert "\n" not in repr(value)
        assert len(repr(value)) < 400
    assert "kl" in repr(result.scores).lower()


@pytest.mark.nightly
def test_a_search_returns_a_result(tmp_path, name):
    text = {"samples": 8, "length": 32, "progress": False}
    memory = 3 * resolve(name).checkpoint.nbytes() // 4
    result = moesaic.fit(name, memory=memory, windows=4, confirm=1, **text)
    assert sum(p.nbytes for p in result.model.parameters()) <= memory
    assert result.save_pretrained(tmp_path / "out").is_dir()


# --- other processes -----------------------------------------------------------------------------


def unpickled(file):
    """In another process, which has made no such classes."""
    *models, tokens, wanted = pickle.loads(file.read_bytes())
    for model, expected in zip(models, wanted, strict=True):
        assert torch.equal(logits(model, tokens), expected)


def test_pickled_for_another_process(tmp_path, tokens):
    """Of experts whose widths differ and of routers that skip, whose classes are made here."""
    model = tiny_moe("mixtral")
    uneven = moesaic.slim(model, allocate="experts", calibration=tokens, progress=False).model
    skipping = moesaic.skip(model, calibration=tokens, progress=False).model
    wanted = [logits(each, tokens) for each in (uneven, skipping)]
    (tmp_path / "models").write_bytes(pickle.dumps((uneven, skipping, tokens, wanted)))
    launch(unpickled, tmp_path / "models", count=1)


def test_every_name_is_there():
    assert {*api.__all__} <= {*dir(moesaic), "verb"}


def test_a_misspelt_option_is_named_before_a_budget_is_missed():
    with pytest.raises(TypeError, match=r"unknown option memroy"):
        moesaic.fit("tiny-moe", memroy="8MB")
    with pytest.raises(TypeError, match=r"unknown option devise.* Did you mean 'device'\?"):
        moesaic.observe("tiny-moe", "stats", devise="cpu")
