"""Small parts of the command line and of files, each by itself: what larger tests pass by."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
import torch
import typer
from builders import tiny_model, tiny_moe
from cases import many_tokens
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import moesaic
from moesaic import MoesaicError, bars, pipeline
from moesaic.arch.lookup import moe_arch
from moesaic.cli import commands, conversions, entry, fitting, guide, measure, results
from moesaic.cli.options import Option, option
from moesaic.config import Calibration, Evaluation, ExportArgs, check_device
from moesaic.fitting.config import FitConfig
from moesaic.io import names, source
from moesaic.io.fingerprint import of_examples
from moesaic.io.headers_only import headers_of_model
from moesaic.io.outputs import check_inputs
from moesaic.io.restore import forward_replaced, leaves_untouched
from moesaic.io.trust import check_links, side_files
from moesaic.observation import expert_stats, files
from moesaic.observation import job as observing
from moesaic.observation import processes as sharing
from moesaic.observation.job import Job
from moesaic.observation.neuron_stats import NeuronStats, observe_neurons
from moesaic.observation.stats import Observation
from moesaic.observation.stream import LayerStream

# --- commands ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "wanted"),
    [
        (fitting, {"fit": {"memory", "max_loss", "source", "data", "max_tokens", "device"}}),
        (guide, {"guide": {"memory", "max_loss", "native", "samples", "data"}}),
        (measure, {"eval": {"tasks", "limit", "length"}, "bench": {"rounds", "device"}}),
        (results, {"export": {"to", "type", "target"}}),
        (conversions, {"observe": {"source", "samples", "gram_mb"}, "tune": {"train", "lr"}}),
    ],
)
def test_commands_have_their_options_and_an_example(module, wanted, monkeypatch):
    made: dict[str, Any] = {}

    def register(name, run, example, options=(), seldom=(), hidden=False):
        assert callable(run)
        made[name] = example, {o.name for o in options}

    monkeypatch.setattr(module, "register", register)
    module.commands()
    for name, (example, _) in made.items():
        assert example.startswith("moesaic " if name == "guide" else f"moesaic {name} ")
    for name, options in wanted.items():
        assert options <= made[name][1], made[name][1]


def test_a_command_has_its_own_help_and_example(monkeypatch):
    app = typer.Typer(cls=commands.Guided, rich_markup_mode=None)
    monkeypatch.setattr(commands, "app", app)

    def first(**given: Any) -> None:
        """Do the first thing; it is short."""

    def second(**given: Any) -> None:
        """Do the second."""

    told = Option("size", "--size", int, "How much.", common=True)
    commands.register("first", first, "moesaic first 7", [told])
    commands.register("second", second, "moesaic second")
    run = CliRunner()

    def told_by(word: str) -> str:
        monkeypatch.setattr("sys.argv", ["moesaic", "first", word])
        return run.invoke(app, ["first", word]).output

    brief, whole = told_by("--help"), told_by("--help-all")
    assert "Example: moesaic first 7" in brief
    assert "  --size " not in brief
    assert "  --size " in whole
    assert "No such option" in run.invoke(app, ["second", "--help-all"]).output
    listed = run.invoke(app, ["--help"]).output
    assert "Do the first thing" in listed
    assert "it is short" not in listed


def test_what_stands_behind_an_option():
    memory, rounds = option(FitConfig, "memory"), option(ExportArgs, "type")
    assert memory.metavar == ""
    assert rounds.kind is str
    stats = option(Calibration, "stats")
    assert stats.metavar == "FILE"
    assert option(Evaluation, "tasks").hidden is False


def test_a_seed_is_that_of_text_and_method(command, monkeypatch, tmp_path):
    asked: list[Any] = []
    monkeypatch.setattr(pipeline, "run_recipe", lambda recipe, **_: asked.append(recipe))
    command("prune", "tiny-moe", tmp_path / "out", "--keep", "6", "--seed", "3")
    (recipe,) = asked
    assert (recipe.calibration.seed, recipe.steps[0].seed) == (3, 3)


def test_architectures_are_listed(command):
    code, out, _ = command("architectures")
    assert code == 0
    assert "mixtures of experts\n" in out
    assert "mixtral" in out.partition("dense models")[0]
    assert "llama" in out.partition("dense models")[2]
    assert {"moe", "dense", "unsupported"} <= json.loads(
        command("architectures", "--json")[1]
    ).keys()


def test_a_device_whose_package_is_not_here_is_refused_by_name():
    with pytest.raises(MoesaicError, match="device 'hpu' cannot be used here"):
        check_device("hpu")


# --- what is shown -------------------------------------------------------------------------------


def shown(view: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(view)
    return console.file.getvalue()


def test_candidates_come_in_the_order_of_what_they_lose():
    def candidate(form: str, kl: float) -> dict[str, Any]:
        sizes = {"memory": 2**20, "active_parameters": 1000}
        return {"form": form, "kl": kl, "loss": 0.1, "estimated_kl": 0.2, **sizes}

    text = shown(fitting.tried([candidate("worse", 0.5), candidate("better", 0.25)]))
    assert text.index("better") < text.index("worse")
    row = next(line for line in text.splitlines() if "better" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "better", "1.05\u00a0MB", "1,000", "10.0%", "0.2500", "0.2000",
    ]  # fmt: skip


def test_bars_show_steps_and_the_time_left(monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(bars, "err_console", console)
    assert list(bars.bars([1, 2], "Weighing", 2)) == [1, 2]
    text = console.file.getvalue()
    assert "Weighing" in text
    assert "2/2" in text
    assert "left" in text
    assert "0:00:00" in text


def test_yes_and_no_and_nothing():
    assert [commands.figure(v) for v in (True, False, None, [1, 2])] == ["yes", "no", "", "1 - 2"]


def test_what_was_exported_is_told():
    text = shown(
        results.exported({"out": "x.gguf", "type": "q8_0", "mean_difference": 0.125, "bytes": 9})
    )
    for word in ("x.gguf", "q8_0", "mean difference", "0.125"):
        assert word in text


def test_a_model_beside_itself_has_two_columns():
    assert measure.beside("a", "b") == "b"
    assert measure.beside("a", "a") == "a, again"


def test_a_dry_run_tells_bytes_in_their_units(command, tmp_path):
    _, out, _ = command("prune", "tiny-moe", tmp_path / "out", "--keep", "6", "--dry-run")
    row = next(line for line in out.splitlines() if "peak memory" in line)
    assert re.search(r"\d\s[MG]B", row)


def test_a_dense_layer_has_no_experts_in_the_table(command):
    _, out, _ = command("inspect", "tiny-dense")
    row = next(line for line in out.splitlines() if line.startswith("│     0"))
    assert [cell.strip() for cell in row.strip("│").split("│")][-2:] == ["", ""]


# --- what becomes of errors ----------------------------------------------------------------------


class OutOfMemoryError(RuntimeError):
    """As torch calls it."""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OutOfMemoryError("3 GiB"), 1, "Out of memory on the device; try --device cpu"),
        (MemoryError(), 1, "Out of memory; try a narrower --dtype"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, "Out of memory; try a"),
        (BrokenPipeError(), 1, ""),
        (KeyboardInterrupt(), 130, "Interrupted."),
        (MoesaicError("no such thing"), 2, "Error: no such thing"),
        (OSError(28, "No space left on device"), 2, "The disk is full"),
        (
            PermissionError(13, "Permission denied", "m/a"),
            2,
            "Error: m/a may not be read or written",
        ),
        (
            FileNotFoundError(2, "No such file or directory", "/proc/.o.lock"),
            2,
            "/proc/.o.lock may",
        ),
        (KeyError("k"), 1, "This is a fault of moesaic"),
    ],
)
def test_errors_have_their_own_codes(error, code, said, capsys, monkeypatch):
    monkeypatch.delenv("MOESAIC_DEBUG", raising=False)
    with pytest.raises(SystemExit) as left, entry.explained():
        raise error
    assert left.value.code == code
    assert said in " ".join(capsys.readouterr().err.split())


# --- models and files ----------------------------------------------------------------------------


def test_a_verb_leaves_the_models_that_it_is_given_as_they_were():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)

    @leaves_untouched
    def verb(model: nn.Module, teacher: nn.Module) -> bool:
        return model.training or teacher.training

    assert not verb(first, teacher=second)
    assert first.training
    assert second.training


def test_a_forward_that_a_hook_put_there_comes_back():
    module, own = nn.Linear(1, 1), lambda x: x
    module.forward = own
    with forward_replaced(module, lambda x: -x):
        assert module(torch.ones(1)) == -1
    assert vars(module)["forward"] is own
    plain = nn.Linear(1, 1)
    with forward_replaced(plain, lambda x: -x):
        pass
    assert "forward" not in vars(plain)


def test_examples_are_known_by_their_own_fingerprint():
    class Stream(list[Any]):
        fingerprint = "mine"

    rows = [{"input_ids": [1, 2]}]
    assert of_examples(Stream(rows)) == "mine" != of_examples(rows)


def test_a_model_in_the_place_of_a_command_is_looked_at(tmp_path):
    (tmp_path / "model").mkdir()
    yes = ["tiny-moe", "smollm2", "you/model", "x.gguf", "you/m.odel", str(tmp_path / "model")]
    no = ["sculpt", "-v", "tiny-mo", "./nothing", "~/nothing", "-o/x", ""]
    assert [names.names_model(word) for word in [*yes, *no]] == [True] * 6 + [False] * 7


def test_a_folder_is_foretold_by_what_it_holds(moe_folder, tmp_path):
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


@pytest.mark.parametrize(("inside", "said"), [(".", "is"), ("a/b", "lies in")])
def test_what_is_read_is_not_written_over(inside, said, tmp_path):
    out = tmp_path / "out"
    (out / inside).mkdir(parents=True, exist_ok=True)
    with pytest.raises(MoesaicError, match=rf" {said} .*, and is read"):
        check_inputs(out, [out / inside])


def test_names_are_found_where_they_are(tmp_path, monkeypatch):
    found: list[Any] = []
    monkeypatch.setattr(source, "packaged_file", lambda name: found.append(name) or tmp_path / "p")
    monkeypatch.setattr(source, "folder_of", lambda file: tmp_path / f"of-{file.name}")
    monkeypatch.setattr(source, "from_hub", lambda name, *_: found.append(name) or tmp_path)
    assert source.resolve("smollm2").folder == tmp_path / "of-p"
    assert found.pop() == "smollm2"
    assert (source.resolve("tiny-moe").folder / "config.json").is_file()
    there = source.resolve("you/there")
    assert (there.name, there.folder) == ("you/there", tmp_path)
    assert found.pop() == "you/there"


def test_links_out_of_a_folder_are_left_out_one_by_one(tmp_path, caplog):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "model"
    elsewhere.mkdir()
    folder.mkdir()
    (elsewhere / "text").write_text("x")
    (folder / "LICENSE").symlink_to(elsewhere / "text")
    (folder / "tokenizer.json").write_text("{}")
    check_links(folder)  # a licence is not read
    assert [file.name for file in side_files(folder)] == ["tokenizer.json"]
    assert f"{folder / 'LICENSE'} is a link elsewhere and left out." in caplog.messages
    (folder / "config.json").symlink_to(elsewhere / "text")
    with pytest.raises(MoesaicError, match=r"config\.json is a link out"):
        check_links(folder)


# --- statistics ----------------------------------------------------------------------------------


def test_neurons_of_two_token_sets_add_up():
    model, tokens = tiny_moe("qwen2_moe"), many_tokens()
    arch = Job(moesaic.RunArgs(model), lambda config: moesaic_arch(config)).arch

    def of(rows: slice) -> NeuronStats:
        first = arch.moe_layers(model)[:1]
        stream = LayerStream(model, arch, tokens.rows(rows), first, view=arch.mixture)
        (stats,) = [observe_neurons(site) for site in stream]
        return stats

    whole, merged = of(slice(None)), NeuronStats.merged([of(slice(0, 3)), of(slice(3, None))])
    assert merged.tokens == whole.tokens
    assert torch.equal(merged.calls_E, whole.calls_E)
    assert merged.calls_E.sum() > merged.tokens
    torch.testing.assert_close(merged.energy_EM, whole.energy_EM)
    torch.testing.assert_close(merged.shared_energy_S, whole.shared_energy_S)
    assert torch.equal(merged.reach_EM, whole.reach_EM)


def moesaic_arch(config: Any) -> Any:
    from moesaic.arch.lookup import base_arch

    return base_arch(config)


def test_layers_are_shared_among_processes_and_everybody_gets_all(monkeypatch):
    job: Any = Job(moesaic.RunArgs(tiny_moe("mixtral")), moesaic_arch)
    opened: list[list[int]] = []

    def source_of(layers):
        opened.append([*layers])
        return iter(layers)

    def each(number, world, shared_out, others):
        monkeypatch.setattr(sharing, "process", lambda: (number, world))
        turn = iter(others)
        monkeypatch.setattr(sharing, "gathered", lambda own: [own, next(turn)])
        return [
            *sharing.each_layer(
                job, [2, 0, 1], source_of, lambda i: 10 * i, "Working", shared=shared_out
            )
        ]

    assert each(0, 2, True, [[10], []]) == [0, 10, 20]
    assert each(1, 2, True, [[0], [20]]) == [10, 0, 20]
    assert each(1, 2, False, []) == [0, 10, 20]
    assert opened == [[0, 2], [1], [0, 1, 2]]


def test_tokens_beside_statistics_of_experts_are_all_in_every_process(monkeypatch):
    tokens = many_tokens()
    job: Any = Job(moesaic.RunArgs(tiny_moe("mixtral"), text=tokens), moe_arch)
    monkeypatch.setattr(observing, "process", lambda: (0, 2))
    monkeypatch.setattr(expert_stats, "gathered", lambda own: [own, own])
    for _, stats, site in Observation(job, {"router", "tokens"}).layers([0, 1]):
        assert site is not None
        assert site.tokens == stats.experts.tokens == tokens.count


def test_nobody_returns_from_observe_before_the_file_is_there(monkeypatch, tmp_path):
    """Nor looks for finished layers before the first process has dropped what is left of others."""
    waited: list[bool] = []
    left, options = tmp_path / "out.partial", {"calibration": many_tokens(), "overwrite": True}
    left.mkdir()
    monkeypatch.setattr(files, "process", lambda: (1, 2))
    monkeypatch.setattr(files, "wait_for_all", lambda: waited.append(left.exists()))
    moesaic.observe(tiny_moe("mixtral"), tmp_path / "out", gram_mb=0, **options)
    assert waited == [True, True]  # which is for the first process to do


def test_an_unfinished_observation_is_in_the_way_until_it_is_dropped(tmp_path):
    out, model, tokens = tmp_path / "model.stats", tiny_moe("mixtral"), many_tokens()
    left = tmp_path / "model.stats.unfinished"
    from moesaic.io.outputs import unfinished

    left = unfinished(out)
    left.mkdir()
    with pytest.raises(MoesaicError, match="unfinished"):
        moesaic.observe(model, out, calibration=tokens, gram_mb=0)
    moesaic.observe(model, out, calibration=tokens, gram_mb=0, overwrite=True)
    assert out.is_file()
    assert not left.exists()


def test_a_jobs_own_type_and_tokenizer(moe_folder):
    found = Job(moesaic.RunArgs(str(moe_folder)), moesaic_arch)
    assert found.base.dtype == "torch.float32"
    asked = moesaic.RunArgs.of(str(moe_folder), dtype=torch.bfloat16)
    assert Job(asked, moesaic_arch).base.dtype == "torch.bfloat16"
    assert found.tokenizer_for(many_tokens()) is None
    assert found.tokenizer_for(["text"]) is not None
