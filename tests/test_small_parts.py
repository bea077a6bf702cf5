"""Small parts of the command line and of files, each by itself: what larger tests pass by."""

import io
import json

import pytest
import torch
from builders import tiny_model, tiny_moe
from cases import many_tokens
from rich.console import Console
from safetensors import SafetensorError

import moesaic
from moesaic import exports, pipeline
from moesaic.arch.lookup import base_arch
from moesaic.cli import entry, guide
from moesaic.cli.commands import emit
from moesaic.config import RunArgs
from moesaic.errors import MoesaicError
from moesaic.io import names, source
from moesaic.io.outputs import run_folder
from moesaic.io.source import headers_of_model
from moesaic.methods.skip.config import TopKConfig
from moesaic.metrics.evaluate import text_behind
from moesaic.observation import files
from moesaic.observation.job import Job
from moesaic.plan import Progress
from moesaic.plans.cut import CutLayer

# --- commands ------------------------------------------------------------------------------------


def test_a_seed_is_that_of_text_and_method(command, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(pipeline, "run_recipe", lambda recipe, **_: asked.append(recipe))
    command("prune", "tiny-moe", tmp_path / "out", "--keep", "6", "--seed", "3")
    (recipe,) = asked
    assert (recipe.calibration.seed, recipe.steps[0].seed) == (3, 3)


@pytest.mark.parametrize(("own", "wanted"), [([], 512), (["-o", "length=64"], 64)])
def test_a_length_is_that_of_text_and_of_a_method_that_trains(
    own, wanted, command, monkeypatch, tmp_path
):
    asked = []
    monkeypatch.setattr(pipeline, "run_recipe", lambda recipe, **_: asked.append(recipe))
    tomoe = "--method", "tomoe", "--recipe", "paper"
    command("carve", "tiny-dense", tmp_path / "out", *tomoe, "--length", "512", *own)
    (recipe,) = asked
    assert (recipe.calibration.length, recipe.steps[0].length) == (512, wanted)


# --- what is shown -------------------------------------------------------------------------------


def shown(view):
    console = Console(file=io.StringIO(), width=120)
    console.print(view)
    return console.file.getvalue()


def test_candidates_come_in_the_order_of_their_loss():
    def candidate(form, kl):
        sizes = {"memory": 2**20, "active_parameters": 1000}
        return {"form": form, "kl": kl, "loss": 0.1, "estimated_kl": 0.2, **sizes}

    text = shown(guide.candidates_table([candidate("worse", 0.5), candidate("better", 0.25)]))
    assert text.index("better") < text.index("worse")
    row = next(line for line in text.splitlines() if "better" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "better", "1.05\u00a0MB", "1,000", "10.0%", "0.2500", "0.2000",
    ]  # fmt: skip


# --- what a run keeps ----------------------------------------------------------------------------


def test_a_decided_layer_is_found_again(tmp_path):
    Progress(tmp_path, {"asked": 1}).add("result", 3, CutLayer(top_k=1), {"loss": 2.5})
    layer, analysis = Progress(tmp_path, {"asked": 1})["result", 3]
    assert (layer.top_k, analysis) == (1, {"loss": 2.5})


def test_a_request_holds_options_and_the_type_that_results_have(moe_folder):
    job = Job(RunArgs.of(str(moe_folder)), base_arch)
    narrow = Job(RunArgs.of(str(moe_folder), dtype=torch.bfloat16), base_arch)
    assert job.request_of(TopKConfig(top_k=1))["config"] == {"top_k": 1}
    assert (job.base.dtype, narrow.base.dtype) == ("torch.float32", "torch.bfloat16")


def test_a_result_has_the_requested_type_and_what_its_verb_prints(moe_folder, tokens, tmp_path):
    file = files.observe(str(moe_folder), tmp_path / "stats", calibration=tokens)
    options = {"calibration": tokens, "stats": file, "refit": True, "dtype": torch.bfloat16}
    result = moesaic.prune(str(moe_folder), keep=6, **options)
    assert result.model.dtype == torch.bfloat16
    windows = dict(zip(("samples", "length"), tokens.input_ids.shape, strict=True))
    assert result.record("model", "out").calibration["observed"] == windows
    skipping = moesaic.skip(tiny_moe("mixtral"), calibration=tokens)
    betas = [layer.beta for layer in skipping.plan.layers.values()]
    assert skipping.record("model", "out").output()["beta"] == betas


def test_text_behind_a_result_is_that_of_all_its_steps(tmp_path):
    """Rows of a file by its own run, and what an earlier one read or was trained on."""
    rows = [{"source": name, "rows": [0, n]} for n, name in enumerate("ab", 1)]
    record = {"calibration": {"sources": rows[:1]}, "before": {"sources": rows[1:], "trained": "c"}}
    result = moesaic.skip(tiny_moe("mixtral"), calibration=many_tokens())
    kept = result.record("model", "out").as_json() | record
    (tmp_path / "moesaic").mkdir()
    (tmp_path / "moesaic" / "result.json").write_text(json.dumps(kept))
    found, trained = text_behind(tmp_path)
    assert [(row.source, row.start, row.stop) for row in found] == [("a", 0, 1), ("b", 0, 2)]
    assert trained == ["c"]


# --- what becomes of errors ----------------------------------------------------------------------


class OutOfMemoryError(RuntimeError):
    """As torch calls it."""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OutOfMemoryError("3 GiB"), 1, "Out of memory on the device; try --device cpu"),
        (MemoryError(), 1, "Out of memory; try a narrower --dtype"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, "Out of memory; try a"),
        (RuntimeError("strides should be multiple of 16 bytes"), 2, "take float32"),
        (BrokenPipeError(), 1, ""),
        (KeyboardInterrupt(), 130, "Interrupted."),
        (MoesaicError("no such thing"), 2, "Error: no such thing"),
        (OSError(28, "No space left on device"), 2, "The disk is full"),
        (SafetensorError("I/O error: No space left on device"), 2, "The disk is full"),
        (PermissionError(13, "Denied", "m/a"), 2, "Error: m/a may not be read or written"),
        (FileNotFoundError(2, "No such file", "/proc/.o.lock"), 2, "/proc/.o.lock may"),
        (FileNotFoundError(2, "No such file"), 2, "The current folder is no longer"),
        (KeyError("k"), 1, "This is a fault of moesaic"),
    ],
)
def test_errors_have_their_own_codes(error, code, said, capsys, monkeypatch):
    monkeypatch.delenv("MOESAIC_DEBUG", raising=False)
    with pytest.raises(SystemExit) as left, entry.exit_on_error():
        raise error
    assert left.value.code == code
    assert said in " ".join(capsys.readouterr().err.split())


class Full(io.StringIO):
    """A stream that takes no more."""

    def write(self, text):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("as_json", [True, False])
def test_a_full_stdout_is_not_called_a_full_disk(as_json, monkeypatch):
    """What the command made is complete then."""
    monkeypatch.setattr("sys.stdout", Full())
    monkeypatch.setattr("moesaic.progress.console", Console(file=Full()))
    with pytest.raises(MoesaicError, match="could not be printed: No space left"):
        emit(as_json, {"figures": 1}, "1")


# --- models and files ----------------------------------------------------------------------------


def test_a_model_in_the_place_of_a_command_is_looked_at(tmp_path):
    (tmp_path / "model").mkdir()
    yes = ["tiny-moe", "smollm2", "you/model", "x.gguf", "you/m.odel", str(tmp_path / "model")]
    yes += ["./nothing", "~/nothing"]  # refused with a better reason than an unknown command
    no = ["sculpt", "-v", "tiny-mo", "-o/x", ""]
    assert [names.names_model(word) for word in [*yes, *no]] == [True] * 8 + [False] * 5


def test_a_folders_format_is_read_from_what_it_holds(moe_folder, tmp_path):
    assert headers_of_model(str(moe_folder), tmp_path).folder == moe_folder
    described, made = tmp_path / "described", tmp_path / "made"
    described.mkdir()
    made.mkdir()
    config = tiny_model("gemma2").config
    assert config.tie_word_embeddings
    config.save_pretrained(described)
    found = headers_of_model(str(described), made)
    assert found.folder == made
    names_there = set(found.checkpoint.names())
    assert "model.embed_tokens.weight" in names_there
    assert "lm_head.weight" not in names_there


def test_the_cache_is_where_the_user_has_caches(monkeypatch, tmp_path):
    monkeypatch.delenv("MOESAIC_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert names.cache_folder() == tmp_path / "moesaic"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(names.Path, "home", lambda: tmp_path / "home")
    assert names.cache_folder() == tmp_path / "home" / ".cache" / "moesaic"


def test_names_are_found_where_they_are(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(source, "packaged_file", lambda name: found.append(name) or tmp_path / "p")
    monkeypatch.setattr(source, "folder_of", lambda file: tmp_path / f"of-{file.name}")
    monkeypatch.setattr(source, "from_hub", lambda name, *_: (found.append(name) or tmp_path, []))
    assert source.resolve("smollm2").folder == tmp_path / "of-p"
    assert found.pop() == "smollm2"
    assert (source.resolve("tiny-moe").folder / "config.json").is_file()
    there = source.resolve("you/there")
    assert (there.name, there.folder) == ("you/there", tmp_path)
    assert found.pop() == "you/there"


# --- statistics ----------------------------------------------------------------------------------


def test_nobody_returns_from_observe_before_the_file_is_there(monkeypatch, tmp_path):
    """Nor looks for finished layers before the first process has dropped what is left of others."""
    waited = []
    left, options = tmp_path / "out.partial", {"calibration": many_tokens(), "overwrite": True}
    left.mkdir()
    monkeypatch.setattr(files, "process", lambda: (1, 2))
    monkeypatch.setattr(files, "wait_for_all", lambda: waited.append(left.exists()))
    moesaic.observe(tiny_moe("mixtral"), tmp_path / "out", gram_mb=0, **options)
    assert waited == [True, True]  # which is for the first process to do


def test_an_unfinished_observation_is_in_the_way_until_it_is_dropped(tmp_path):
    out, model, tokens = tmp_path / "model.stats", tiny_moe("mixtral"), many_tokens()
    left = run_folder(out)
    left.mkdir()
    with pytest.raises(MoesaicError, match="unfinished"):
        moesaic.observe(model, out, calibration=tokens, gram_mb=0)
    moesaic.observe(model, out, calibration=tokens, gram_mb=0, overwrite=True)
    assert out.is_file()
    assert not left.exists()


def test_a_scripts_error_is_found_before_what_is_printed_after_it(monkeypatch, tmp_path):
    (tmp_path / "it.py").write_text(
        "import atexit, sys\natexit.register(lambda: print('Writing: 62%', file=sys.stderr))\n"
        "raise OSError(28, 'No space left on device')\n"
    )
    monkeypatch.setattr(exports, "__file__", str(tmp_path / "__init__.py"))
    assert exports.run_script("it.py", "") == "OSError: [Errno 28] No space left on device"
    (tmp_path / "it.py").write_text("exit('stopped')")
    assert exports.run_script("it.py", "") == "stopped"
