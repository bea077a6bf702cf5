"""The story from end to end on tiny models: carve, save, load, measure, fail, resume."""

import json
import logging
import shutil
import warnings
from dataclasses import replace

import psutil
import pytest
import torch
from builders import edited, equal, inside, pages, stored, tiny_moe, weights
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import moesaic
from moesaic import (
    Calibration,
    Evaluation,
    MoesaicError,
    MoREConfig,
    Plan,
    PruneConfig,
    RunArgs,
    SkipConfig,
    SlimConfig,
    TopKConfig,
    pipeline,
)
from moesaic.arch.lookup import base_arch
from moesaic.carving.more.method import MoRE
from moesaic.data.text import calibration_tokens, evaluation_tokens
from moesaic.io.source import Source
from moesaic.metrics import measurement as measuring
from moesaic.pipeline import run_recipe
from moesaic.plan import Progress
from moesaic.plans.cut import CutLayer
from moesaic.progress import Log
from moesaic.recipe import Recipe, step_config
from moesaic.surgery import apply_plan

CONFIG = MoREConfig(active=0.8, layers="all")
MEASURED = {"data": pages("evaluation"), "length": 64, "max_tokens": 512, "new_tokens": 4}
QUICK = {"calibration": pages("calibration"), "samples": 12, "length": 32}


def recipe(folder, out, **changes):
    settings = {
        "model": str(folder),
        "out": str(out),
        "steps": (CONFIG,),
        "calibration": Calibration(QUICK["calibration"], 12, 32),
        "evaluation": Evaluation(
            pages("evaluation"), length=64, max_tokens=512, rounds=0, new_tokens=4
        ),
    }
    return Recipe(**{**settings, **changes})


def test_calibration_as_texts_tokens_or_tensor(llama_folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(llama_folder).eval()
    drawn = {"samples": 12, "length": 32}
    tokens = calibration_tokens("", tokenizer, **drawn)
    plans = [
        moesaic.carve(
            model, CONFIG, calibration=given, tokenizer=tokenizer, samples=12, length=32
        ).plan
        for given in ("", tokens, tokens.input_ids)
    ]
    assert len({p.calibration for p in plans}) == 1
    with pytest.raises(MoesaicError, match="needs a tokenizer"):
        moesaic.carve(model, CONFIG, calibration=["some text"])


@pytest.mark.parametrize("config", [SkipConfig(quantile=0.5), TopKConfig(top_k=1)])
def test_what_skips_is_another_model_than_what_does_not(moe_folder, tmp_path, config):
    """Though their weights are the same: for a plan, which has both steps, and for statistics."""
    skipping, out, again, stats = (
        tmp_path / name for name in ("skipping", "out", "again", "stats")
    )
    slimming = SlimConfig(keep=0.5, score="energy", refit=False)
    moesaic.skip(str(moe_folder), config, **QUICK).save(skipping)
    moesaic.slim(str(skipping), slimming, **QUICK).save(out)
    for base in (moe_folder, skipping):
        moesaic.apply(str(base), out, again, overwrite=True)
        assert json.loads((again / "config.json").read_text("utf-8")) == json.loads(
            (out / "config.json").read_text("utf-8")
        )
        assert equal(weights(again), weights(out))
    moesaic.observe(str(moe_folder), stats, **QUICK)
    with pytest.raises(MoesaicError, match="observed on another model"):
        moesaic.slim(str(skipping), slimming, stats=stats)
    model = AutoModelForCausalLM.from_pretrained(moe_folder)
    with pytest.raises(MoesaicError, match="skips experts otherwise"):
        apply_plan(model, base_arch(model.config), Plan.load(out))


def test_nothing_that_takes_long_is_done_without_a_line_of_progress(
    llama_folder, tmp_path, monkeypatch
):
    """Loading, generating, and whole processes for the peak of memory."""
    lines, silence = [], []

    def track(items, label, total=None):
        lines.append(label)
        yield from items
        lines.pop()

    def watch(place, name):
        real = getattr(place, name)

        def watched(*given, **more):
            silence.extend([] if lines else [name])
            return real(*given, **more)

        monkeypatch.setattr(place, name, watched)

    for name in ("generate", "peak_memory"):
        watch(measuring, name)
    watch(Source, "load")
    measured = Evaluation(**MEASURED, rounds=1)
    pipeline.run_recipe(recipe(llama_folder, tmp_path / "out", evaluation=measured), track=track)
    assert not silence


def test_recipe_run_leaves_everything(llama_folder, tmp_path):
    measured = Evaluation(**MEASURED, rounds=1, compare=("static",))
    asked = recipe(llama_folder, tmp_path / "out", evaluation=measured)
    record = run_recipe(asked)
    ours = ("plan.json", "plan.safetensors", "recipe.yaml", "report.html", "result.json")
    theirs = ("config.json", "model.safetensors", "modeling_moesaic.py", "tokenizer.json")
    left = {"README.md", *theirs, *(f"moesaic/{name}" for name in ours)}
    assert left <= inside(tmp_path / "out")
    kept = json.loads((tmp_path / "out" / "moesaic/result.json").read_text())
    assert json.loads(json.dumps(record.as_json())) == kept
    assert not (tmp_path / "out.partial").exists()
    assert set(record.measured["scores"]) == {"original", "result", "static"}
    result, static = (record.measured["scores"][name] for name in ("result", "static"))
    assert result["nominal_active_ratio"] == pytest.approx(0.8, abs=0.02)
    assert static["active_ratio"] == pytest.approx(result["nominal_active_ratio"])
    places = {"original": llama_folder, "result": tmp_path / "out"}
    files = {
        name: sum(file.stat().st_size for file in at.glob("*.safetensors"))
        for name, at in places.items()
    }
    assert record.measured["files"] == files
    ratios = record.measured["speed_ratio"]
    for what in ("prefill", "decode"):
        low, high = ratios[f"{what}_spread"]
        assert low <= ratios[what] <= high
    again = moesaic.load_recipe(tmp_path / "out" / "moesaic/recipe.yaml")
    assert again == asked


def test_the_record_holds_the_runs_log(llama_folder, tmp_path, monkeypatch):
    """Stages in the order in which they began, each with what it is a part of; warnings once."""
    real = pipeline.convert

    def convert(config, args):
        for _ in range(2):
            logging.getLogger("moesaic.anything").warning("be %s", "careful")
        warnings.warn("of a library", stacklevel=1)
        return real(config, args)

    monkeypatch.setattr(pipeline, "convert", convert)
    shown = []

    def track(items, label, total=None):
        shown.append(label)
        yield from items

    asked = recipe(llama_folder, tmp_path / "out", evaluation=None)
    with pytest.warns(UserWarning, match="of a library"):
        record = run_recipe(asked, track=track)
    assert record.log["warnings"] == ["be careful", "of a library"]
    stages = record.log["stages"]
    assert [s["stage"] for s in stages] == ["carve", *shown, "write"]
    assert all(s["within"] == "carve" for s in stages[1:-1])
    assert all(s["seconds"] >= 0 and s["cpu_seconds"] >= 0 for s in stages)
    assert stages[0]["seconds"] >= sum(s["seconds"] for s in stages[1:-1]) - 0.01
    assert moesaic.Record.from_json(record.as_json()).log == record.log


def test_measured_ratio_counts_routed_tokens(llama_folder, tokenizer):
    result = moesaic.carve(str(llama_folder), MoREConfig(balanced=False, layers="all"), **QUICK)
    tokens = evaluation_tokens("", tokenizer, 32, 640)
    found = moesaic.evaluate(result.model, data=tokens)
    wanted = 0.0
    for i in found.routing:
        ffn = result.model.model.layers[i].mlp
        seen = []
        handle = ffn.register_forward_pre_hook(lambda _, a, s=seen: s.append(a[0].flatten(0, 1)))
        with torch.no_grad():
            for batch in tokens.batches(1024):
                result.model(batch.input_ids)
        handle.remove()
        chosen = ffn.router(torch.cat(seen)).argmax(dim=-1)
        width = ffn.backbone + torch.tensor(ffn.petals)[chosen].float().mean().item()
        assert found.routing[i].active_width == pytest.approx(width)
        assert sum(found.routing[i].counts) == 640
        wanted += 3 * 32 * width
    attention = 4 * (2 * 32 * 32 + 2 * 32 * 16)
    assert found.active_ratio == pytest.approx((attention + wanted) / (attention + 4 * 3 * 32 * 64))


def test_a_failed_run_continues_only_with_its_own_files(llama_folder, tmp_path, monkeypatch):
    """And its own request: test_identity.py."""
    plain = MoRE.decide

    def breaks(self, case, sizes):
        """Fails at the third layer."""
        if case.index == 2:
            raise RuntimeError("power cut")
        return plain(self, case, sizes)

    monkeypatch.setattr(MoRE, "decide", breaks)
    broken = recipe(llama_folder, tmp_path / "out", evaluation=None)
    with pytest.raises(RuntimeError, match="power cut"):
        run_recipe(broken)
    assert not (tmp_path / "out").exists()
    assert len(list((tmp_path / "out.partial").glob("layer-*"))) == 2
    monkeypatch.setattr(MoRE, "decide", plain)
    with pytest.raises(MoesaicError, match="continue it with resume=True"):
        run_recipe(broken)
    layer = sorted((tmp_path / "out.partial").glob("layer-*"))[0]
    sound = layer.read_bytes()
    layer.write_bytes(sound.replace(b'"analysis\\"', b'"analysts\\"'))
    assert layer.read_bytes() != sound
    with pytest.raises(MoesaicError, match="its checksum differs from the recorded one. Remove it"):
        run_recipe(broken, resume=True)
    layer.write_bytes(sound)
    observed = []
    looks = MoRE.observe

    def noted(self, site, tally):
        observed.append(site.index)
        looks(self, site, tally)

    monkeypatch.setattr(MoRE, "observe", noted)
    run_recipe(broken, resume=True)
    assert observed == [2, 3]  # and the result is that of one run: laws/test_methods.py
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.skipif(not hasattr(psutil.Process().memory_info(), "shared"), reason="of Linux")
def test_decided_layers_take_no_memory(tmp_path):
    """They are mapped to their files: refitted weights of all layers may be the whole model."""

    def own_memory():
        info = psutil.Process().memory_info()
        return info.rss - info.shared

    progress, before = Progress(tmp_path / "run", {}), own_memory()
    for i in range(4):
        progress.add("result", i, CutLayer(torch.arange(8), down_E=torch.ones(8, 1024, 2048)), {})
    assert own_memory() - before < 64 << 20  # one layer; all have 268 MB
    assert all(bool((layer.down_E == 1).all()) for layer, _ in progress.values())


def test_a_warning_is_shown_once_and_noted_by_every_log(capsys, monkeypatch):
    """Where nobody shows warnings of ours, one of a search and of the run inside it does."""
    monkeypatch.setattr(logging.root, "handlers", [])
    outer, inner = Log(), Log()
    with outer.listening(), inner.listening():
        logging.getLogger("moesaic.io").warning("be careful")
    assert outer.warnings == inner.warnings == ["be careful"]
    assert capsys.readouterr().err == "be careful\n"


def test_who_may_read_new_files_may_read_a_result(llama_folder, moe_folder, tokenizer, tmp_path):
    """safetensors writes files that nobody else may read; a server is somebody else."""
    moesaic.carve(str(llama_folder), CONFIG, **QUICK).save(tmp_path / "planned")
    live = AutoModelForCausalLM.from_pretrained(llama_folder)
    moesaic.carve(live, CONFIG, tokenizer=tokenizer, **QUICK).save(tmp_path / "live")
    moesaic.observe(str(moe_folder), tmp_path / "stats.safetensors", **QUICK)
    (tmp_path / "new").touch()
    made = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {file.suffix for file in made} >= {".safetensors", ".json"}
    assert {file.stat().st_mode for file in made} == {(tmp_path / "new").stat().st_mode}


def test_steps_add_up_in_one_record(moe_folder, tmp_path):
    steps = (PruneConfig(keep=5), SkipConfig(quantile=0.5))
    record = run_recipe(recipe(moe_folder, tmp_path / "out", steps=steps, evaluation=None))
    assert [step.verb for step in record.steps] == ["prune", "skip"]
    assert [layer.kind for layer in record.layers] == ["cut", "dense", "cut"]
    first = record.layers[0]
    assert len(first.shape["kept"]) == 5
    assert 0 < first.shape["beta"] < 1
    assert "5 of 8 experts kept; " in first.text
    assert first.analysis.keys() >= {"loss", "calls"}
    assert record.model == str(moe_folder)
    assert not record.native
    assert record.calibration["length"] == 32


def test_what_a_verb_cannot_take_is_refused(moe_folder, llama_folder, tmp_path):
    with pytest.raises(MoesaicError, match="skip has no comparisons"):
        moesaic.skip(str(moe_folder), compare=("top2",))
    for changes, message in (
        ({"evaluation": Evaluation(compare=("best",))}, "compare 'best' is none of"),
        ({"calibration": Calibration(stats="x")}, "takes no statistics"),
    ):
        with pytest.raises(MoesaicError, match=message):
            run_recipe(recipe(llama_folder, tmp_path / "out", **changes))
    assert not any(tmp_path.iterdir())


def test_options_stand_beside_a_calibration():
    given = RunArgs.of("tiny-moe", calibration=Calibration(length=8), samples=5)
    assert given.calibration == Calibration(length=8, samples=5)


@pytest.mark.parametrize("verb", ["carve", "tune"])
def test_without_a_tokenizer_token_ids_will_do(verb, llama_folder, tokens, tmp_path):
    """From a run's calibration to its figures: nothing is asked for that is not used."""
    bare, file = tmp_path / "bare", tmp_path / "ids.safetensors"
    shutil.copytree(llama_folder, bare, ignore=shutil.ignore_patterns("token*", "special*"))
    other = tmp_path / "other.safetensors"
    save_file({"input_ids": tokens.input_ids}, file)
    save_file({"input_ids": tokens.input_ids.flip(0)}, other)
    options = {"tune": {"what": "all", "steps": 2}}.get(verb, {"active": 0.8})
    data = {"train": str(file)} if verb == "tune" else {}
    asked = Recipe(
        str(bare),
        str(tmp_path / "out"),
        (step_config(verb, {**options, **data}),),
        Calibration(str(file)),
        Evaluation(str(other), max_tokens=128, rounds=int(verb == "carve"), new_tokens=2),
    )
    measured = run_recipe(asked).measured
    assert measured["scores"].keys() == {"original", "result"}
    assert ("speed_ratio" in measured) == (verb == "carve")
    found = moesaic.evaluate(bare, data=str(file))
    assert found.tokens > 0
    with pytest.raises(MoesaicError, match="no tokenizer files"):
        run_recipe(replace(asked, out=str(tmp_path / "other"), evaluation=Evaluation()))


def test_nothing_is_continued_with_another_config(tmp_path):
    """Or layers would be decided by two of them."""
    base = stored(tiny_moe("mixtral"), tmp_path / "base")
    text = {"calibration": pages("calibration"), "samples": 2, "length": 16}
    stats = moesaic.observe(base, tmp_path / "model.stats", **text)

    def slim(**options):
        return moesaic.slim(base, keep=0.5, resume_from=tmp_path / "work", **text, **options)

    slim()
    edited(base / "config.json", use_cache=False, transformers_version="4.0")
    slim()
    edited(base / "config.json", rms_norm_eps=0.3)
    with pytest.raises(MoesaicError, match="its config.json is another"):
        slim()
    with pytest.raises(MoesaicError, match="another model than this: its config.json is another"):
        moesaic.prune(base, keep=4, stats=stats)
