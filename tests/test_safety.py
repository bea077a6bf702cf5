"""Nothing is replaced, deleted, followed or run that is not ours."""

import ast
import contextlib
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from builders import contents, edited, inside
from filelock import FileLock
from huggingface_hub.errors import StrictDataclassError
from shrunken import TYPES
from transformers.models.auto import CONFIG_MAPPING

import moesaic
from moesaic import MoesaicError, PruneConfig
from moesaic.config import ExportArgs
from moesaic.exports import llamacpp
from moesaic.io import outputs
from moesaic.io.outputs import (
    GGUF,
    check_out,
    check_out_file,
    output_lock,
    scratch_folder,
    whole_file,
    whole_folder,
)
from moesaic.io.source import resolve
from moesaic.io.trust import check_counts
from moesaic.plans.cut import CutLayer

Command = Callable[..., tuple[int, str, str]]
SRC = Path(moesaic.__file__).parent
PRUNE = ("--keep", 6, "--score", "aimer", "--no-refit", "--no-eval", "--overwrite")
"""Without a refit, so that no text is read."""


def pruned(folder, keep=6):
    """A result of which no text is read."""
    return moesaic.prune(str(folder), PruneConfig(keep=keep, score="aimer", refit=False))


@pytest.fixture
def mine(moe_folder, tmp_path):
    """A model of the user's, beside a thesis and in a folder with a config.json."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "thesis.txt").write_text("precious")
    shutil.copytree(moe_folder, tmp_path / "m")
    return tmp_path / "m"


# --- what may be replaced ------------------------------------------------------------------------


def test_out_is_never_what_is_read(refused, mine, monkeypatch):
    """Not even with --overwrite: neither the model, nor a folder that holds it or a text."""
    home = mine.parent
    before = contents(home)
    text = home / "out" / "t.txt"
    (home / "link").symlink_to(mine)
    monkeypatch.chdir(home)
    places = (mine, home, "m", "m/", "./m/../m", home / "link", ".", "..", "/")
    lines = [("prune", mine, place, *PRUNE) for place in places]
    lines += [
        ("prune", home / "link", mine, *PRUNE),
        ("slim", mine, mine, "--keep", 0.5, "--overwrite", "--no-eval"),
        ("export", mine, mine, "--overwrite"),
        ("export", mine, home, "--overwrite"),
        ("fit", mine, home, "--memory", "1GB", "--overwrite"),
        ("apply", "tiny-moe", mine, mine, "--overwrite"),
        ("tune", "tiny-moe", mine, "--teacher", mine, "--overwrite", "--no-eval"),
        ("observe", mine, mine / "config.json", "--overwrite"),
    ]
    for line in lines:
        refused("", *line)
        assert contents(home) == before, line
    assert not text.exists()


def test_out_never_holds_a_text_or_statistics_that_are_read(command, refused, moe_folder, tmp_path):
    out = tmp_path / "out"
    assert command("prune", moe_folder, out, *PRUNE)[0] == 0
    (out / "t.txt").write_text("precious " * 500)
    for option in ("--calibration", "--data", "--stats"):
        refused("exists", "prune", moe_folder, out, "--keep", 6, option, out / "t.txt")
        line = ("prune", moe_folder, out, "--keep", 6, option, out / "t.txt", "--overwrite")
        refused("and is read", *line)
    again = pruned(out, keep=5)
    with pytest.raises(MoesaicError, match="and is read"):
        again.save(out, overwrite=True)
    assert (out / "t.txt").exists()


def test_a_run_starts_anew_only_in_a_folder_of_its_own(refused, moe_folder, tmp_path):
    """OUT.partial is removed when a run starts anew: it may be anybody's, or hold the model."""
    thesis = tmp_path / "out.partial" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("precious")
    refused("thesis.txt", "prune", moe_folder, tmp_path / "out", *PRUNE)
    thesis.unlink()
    shutil.copytree(moe_folder, tmp_path / "out.partial" / "m")
    refused("and is read", "prune", tmp_path / "out.partial" / "m", tmp_path / "out", *PRUNE)


def test_only_what_we_wrote_is_replaced_and_it_is_said(
    command, refused, moe_folder, tmp_path, caplog
):
    out = tmp_path / "out"
    said = f"{out}, made before, will be replaced."
    for times in (0, 1):
        assert command("prune", moe_folder, out, *PRUNE)[0] == 0
        assert caplog.messages.count(said) == times
    for foreign in ("notes.txt", "moesaic/notes.txt", ".git/HEAD", "model-2.safetensors"):
        (out / foreign).parent.mkdir(exist_ok=True)
        (out / foreign).write_text("precious")
        before = contents(out)
        refused(f"holds {foreign}, which Moesaic did not write", "prune", moe_folder, out, *PRUNE)
        assert contents(out) == before
        (out / foreign).unlink()
    (out / "link").symlink_to(tmp_path)
    assert command("prune", moe_folder, out, *PRUNE)[0] == 2
    (out / "link").unlink()
    assert command("prune", moe_folder, out, *PRUNE)[0] == 0


def test_a_model_of_somebody_elses_is_not_replaced(refused, moe_folder, llama_folder, tmp_path):
    shutil.copytree(llama_folder, tmp_path / "theirs")
    before = contents(tmp_path / "theirs")
    for line in (("prune", moe_folder), ("export", moe_folder), ("carve", llama_folder)):
        given = PRUNE if line[0] == "prune" else ("--overwrite",)
        refused("was not made by Moesaic", *line, tmp_path / "theirs", *given)
    assert contents(tmp_path / "theirs") == before
    (tmp_path / "study").mkdir()
    for name in ("result.json", "README.md", "LICENSE"):
        (tmp_path / "study" / name).write_text('{"accuracy": 1}')
    with pytest.raises(MoesaicError, match="was not made by Moesaic"):
        check_out(tmp_path / "study", overwrite=True)


def test_a_folder_that_became_foreign_meanwhile_is_kept(tmp_path):
    """A run takes hours: what its OUT holds is checked again before it is removed."""
    out = tmp_path / "out"
    with whole_folder(out):
        pass
    with pytest.raises(MoesaicError, match=r"holds thesis\.txt"):  # noqa: SIM117
        with whole_folder(out, overwrite=True):
            (out / "thesis.txt").write_text("precious")
    assert (out / "thesis.txt").read_text() == "precious"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_old_result_comes_back_if_the_new_one_gets_no_name(tmp_path, monkeypatch):
    out, renamed = tmp_path / "out", Path.rename

    def fails(self, target):
        if self.name.endswith(".writing"):
            raise OSError(5, "Input/output error")
        return renamed(self, target)

    with whole_folder(out) as folder:
        (folder / "config.json").write_text("1")
    monkeypatch.setattr(Path, "rename", fails)
    monkeypatch.setattr(outputs, "_exchanged", lambda *_: False)
    with pytest.raises(OSError, match="Input/output"), whole_folder(out, overwrite=True):
        pass
    assert (out / "config.json").read_text() == "1"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


# --- one run at a time, and names that nobody foresees -------------------------------------------


def test_a_second_run_of_one_out_is_refused_at_once(command, moe_folder, tmp_path):
    out = tmp_path / "deep" / "out"
    with output_lock(out):
        codes, line = [], ("prune", moe_folder, out, *PRUNE)
        held = threading.Thread(target=lambda: codes.append(command(*line)))
        held.start()
        held.join()
        ((code, _, err),) = codes
        assert (code, f"Another run is writing {out}" in err) == (2, True), err
    assert not [*tmp_path.iterdir()], "a lock, or a folder around it, was left"
    assert command(*line)[0] == 0
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_a_lock_whose_file_its_holder_removes_meanwhile_is_acquired_anew(tmp_path, monkeypatch):
    """A file that was removed once it was opened locks nothing: others make one of that name."""
    out, acquire, removed = tmp_path / "out", FileLock.acquire, list[Path]()

    def removing(lock, *args, **options):
        held = acquire(lock, *args, **options)
        if not removed:
            removed.append(Path(lock.lock_file))
            removed[0].unlink()
        return held

    def other():
        with pytest.raises(MoesaicError, match="Another run is writing"), output_lock(out):
            pass
        refused.append(True)

    refused = []
    monkeypatch.setattr(FileLock, "acquire", removing)
    with output_lock(out):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert removed
    assert refused
    assert not [*tmp_path.iterdir()]


def test_a_lock_of_a_killed_run_holds_nobody(tmp_path):
    out = tmp_path / "out"
    (tmp_path / ".out.lock").touch()
    left = tmp_path / f".out.{'0' * 16}.writing"
    left.mkdir()
    (tmp_path / ".out.thesis.writing").mkdir()
    with whole_folder(out):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == [".out.thesis.writing", "out"]


def test_what_killed_runs_left_is_removed_but_never_the_only_result(tmp_path):
    """Where names cannot be exchanged, a run may be killed when neither folder has the name."""
    out, old = tmp_path / "out", tmp_path / f".out.{'0' * 16}.replaced"
    with scratch_folder(out) as left:
        pass
    old.mkdir()
    (old / "config.json").write_text("old")
    left.mkdir()
    with scratch_folder(out) as work:
        assert {p.name for p in tmp_path.iterdir()} == {"out", work.name, ".out.lock"}
    assert (out / "config.json").read_text() == "old"
    old.mkdir()
    with scratch_folder(out) as work:
        assert {p.name for p in tmp_path.iterdir()} == {"out", work.name, ".out.lock"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_files_in_the_place_of_a_lock_or_a_run_are_refused(tmp_path, refused):
    """A pipe would be waited for."""
    ask = "slim", "tiny-moe", tmp_path / "out", "--keep", 0.5, "--no-eval"
    (tmp_path / "out.partial").touch()
    for more in ((), ("--resume",)):
        refused("is no folder of an unfinished run", *ask, *more)
    (tmp_path / "out.partial").unlink()
    os.mkfifo(tmp_path / ".out.lock")
    refused("No such device", *ask)


@pytest.mark.parametrize("unfinished", [outputs.run_folder, outputs.search_folder])
def test_an_unfinished_run_is_removed_whole_and_swept_if_that_was_killed(
    unfinished, tmp_path, monkeypatch
):
    """Its layers without the request would be taken for those of another."""
    out = tmp_path / "out"
    unfinished(out).mkdir()
    (unfinished(out) / "layer-0000-x.safetensors").touch()
    with monkeypatch.context() as killed:
        killed.setattr(outputs.shutil, "rmtree", lambda *_, **__: None)
        outputs.discard(unfinished(out))
    assert not unfinished(out).exists()
    with outputs.output_lock(out):
        assert [p.name for p in tmp_path.iterdir()] == [".out.lock"]


def test_what_is_made_on_the_way_is_swept_if_a_run_was_killed(tmp_path, monkeypatch):
    """Of a GGUF file it is as large as the model."""
    out = tmp_path / "out"

    def look(*_):
        assert [*tmp_path.glob(".out.*.writing")]
        raise KeyboardInterrupt

    monkeypatch.setattr(llamacpp, "find_converter", lambda: tmp_path)
    monkeypatch.setattr(llamacpp, "convert", look)
    with pytest.raises(KeyboardInterrupt):
        llamacpp.export_gguf("tiny-moe", out, ExportArgs(to="gguf", type="f16"))
    assert not [*tmp_path.iterdir()]


def test_nothing_is_replaced_that_came_to_be_meanwhile(tmp_path):
    out, file = tmp_path / "out", tmp_path / "file"
    with pytest.raises(MoesaicError, match="exists"), whole_folder(out):  # noqa: PT012
        out.mkdir()
        (out / "thesis.txt").write_text("precious")
    file.write_text("precious")
    (tmp_path / "work").write_text("new")
    with pytest.raises(MoesaicError, match="exists"):
        outputs.put_file(tmp_path / "work", file, overwrite=False)
    (tmp_path / "work").unlink()
    assert inside(tmp_path) == {"out/thesis.txt", "file"}
    assert file.read_text() == "precious"


def test_no_link_is_written_through(tmp_path, monkeypatch):
    """Nobody can foresee the name that is written to; a link that has it is refused."""
    precious, file = tmp_path / "precious", tmp_path / "x.html"
    precious.write_text("mine")
    with whole_file(file) as one, whole_file(file) as other:
        assert one != other
        assert one.lstat().st_size == 0
    monkeypatch.setattr(outputs.secrets, "token_hex", lambda _: "0" * 16)
    (tmp_path / f".x.html.{'0' * 16}.writing").symlink_to(precious)
    with pytest.raises(FileExistsError), whole_file(file):
        pass
    (tmp_path / ".out.lock").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic"), output_lock(tmp_path / "out"):
        pass
    assert precious.read_text() == "mine"


def test_a_link_is_not_replaced_by_a_folder(refused, moe_folder, tmp_path):
    (tmp_path / "there").mkdir()
    for name, target in (("link", "there"), ("dangling", "nowhere")):
        (tmp_path / name).symlink_to(tmp_path / target)
        refused("is a link", "prune", moe_folder, tmp_path / name, *PRUNE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dangling", "link", "there"]


# --- single files --------------------------------------------------------------------------------


def test_a_page_replaces_no_file_but_a_page_of_ours(command, refused, carved_folder, tmp_path):
    for name in ("thesis.html", "thesis.txt", "thesis", "model.safetensors", "thesis.svg"):
        (tmp_path / name).write_text("<html>precious</html>")
        refused("", "report", carved_folder, "--out", tmp_path / name)
        assert (tmp_path / name).read_text() == "<html>precious</html>"
    page = tmp_path / "page.html"
    for _ in range(2):
        assert command("report", carved_folder, "--out", page)[0] == 0
    page.unlink()
    page.symlink_to(tmp_path / "thesis.html")
    for out in (page, tmp_path / "page.txt"):
        refused("", "report", carved_folder, "--out", out)


def test_a_file_is_replaced_by_one_of_its_kind_alone(refused, moe_folder, tmp_path, tokens):
    stats, empty, gguf = tmp_path / "a.stats", tmp_path / "empty", tmp_path / "a.gguf"
    empty.touch()
    for out in (stats, empty, stats):
        moesaic.observe(str(moe_folder), out, calibration=tokens, gram_mb=0, overwrite=True)
    gguf.write_bytes(b"GGUF, and what follows")
    check_out_file(gguf, GGUF, overwrite=True)
    thesis = tmp_path / "thesis.md"
    thesis.write_text("precious")
    shutil.copy(next(moe_folder.glob("*.safetensors")), tmp_path / "weights")
    for out in (thesis, gguf, tmp_path / "weights"):
        content = out.read_bytes()
        refused("no file such as this command makes", "observe", moe_folder, out, "--overwrite")
        assert out.read_bytes() == content
    for out in (thesis, stats):
        line = ("export", moe_folder, out, "--to", "gguf", "--overwrite")
        refused("no file such as this command makes", *line)


# --- models of strangers -------------------------------------------------------------------------

EVIL = "import pathlib\npathlib.Path({!r}).touch()\n"


@pytest.mark.parametrize("kind", ["config", "tokenizer"])
def test_no_code_of_a_model_is_run(command, theirs, monkeypatch, kind):
    """transformers would ask on stdout, and take a y from whatever stdin is."""
    ran = theirs.parent / "ran"
    (theirs / "evil.py").write_text(EVIL.format(str(ran)))
    if kind == "config":
        auto = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
        edited(theirs / "config.json", auto_map=auto, model_type="evil")
    else:
        (theirs / "tokenizer.json").unlink()
        auto = {"AutoTokenizer": ["evil.T", "evil.T"]}
        edited(theirs / "tokenizer_config.json", auto_map=auto, tokenizer_class="T")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    lines = [("prune", theirs, theirs.parent / "out", "--keep", 6)]
    lines += [("eval", theirs), ("observe", theirs, theirs.parent / "stats")]
    lines += [("inspect", theirs), ("export", theirs, "x")] if kind == "config" else []
    for line in lines:
        code, said, err = command(*line)
        assert (code, said) == (2, ""), (line, err)
        assert "needs Python code that comes with it, which Moesaic never runs" in err, (line, err)
    assert not ran.exists()


def test_a_result_names_no_code_that_it_has_not(theirs, tmp_path):
    """Of an architecture that transformers knows the source's code is not needed, nor copied."""
    (theirs / "evil.py").write_text(EVIL.format("ran"))
    (theirs / "tokenizer_evil.py").write_text("")
    edited(theirs / "config.json", auto_map={"AutoConfig": "evil.C"})
    edited(theirs / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", None]})
    out = pruned(theirs).save(tmp_path / "out")
    for file in ("config.json", "tokenizer_config.json"):
        assert "auto_map" not in json.loads((out / file).read_text())
    assert not [*out.rglob("*.py")]


def test_every_auto_class_is_told_to_run_no_code():
    """One that is not asks whoever is there, and a word is enough."""
    for file in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            of = ast.unparse(node.func.value)
            if node.func.attr == "from_pretrained" and of.lower().startswith("auto"):
                given = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert given.get("trust_remote_code") == "False", (file.name, node.lineno)


def test_a_config_has_nothing_fetched(refused, theirs):
    edited(theirs / "config.json", attn_implementation="evil/kernel")
    refused("code of the hub", "inspect", theirs)
    edited(theirs / "config.json", attn_implementation="sdpa")
    edited(theirs / "adapter_config.json", base_model_name_or_path="/elsewhere", peft_type="LORA")
    refused("adapter", "inspect", theirs)


def test_no_link_is_followed_out_of_a_model(command, theirs, tmp_path, caplog):
    secret = tmp_path / "secret"
    secret.write_text("{}")
    for name in ("LICENSE", "LICENSE.txt"):
        (theirs / name).symlink_to(secret)
    (theirs / "NOTICE").symlink_to("/etc/passwd")
    assert command("prune", theirs, tmp_path / "out", *PRUNE)[0] == 0
    assert not [*(tmp_path / "out").glob("LICENSE*")]
    assert any("LICENSE is a link elsewhere" in said for said in caplog.messages)


def test_links_within_a_model_are_followed(theirs, moe_folder, tmp_path):
    """What the hub's library lays into its cache is in test_sharing."""
    (theirs / "tokenizer.json").rename(theirs / "other.json")
    (theirs / "tokenizer.json").symlink_to("other.json")
    out = pruned(theirs).save(tmp_path / "out")
    assert (out / "tokenizer.json").read_bytes() == (moe_folder / "tokenizer.json").read_bytes()
    assert not any(path.is_symlink() for path in out.rglob("*"))


# --- plans of strangers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kept",
    [[-5, -4, 1, 2, 3, 4], [0, 1, 2, 99], [0, 1, *[-1] * 3_000_000]],
    ids=["below", "beyond", "bomb"],
)
def test_a_plan_takes_no_experts_that_are_not_there(moe_folder, tmp_path, kept):
    """24 MB of padding became 400 GB of copies; a number below 0 a model that nothing loads."""
    plan = pruned(moe_folder).plan
    layers = {i: CutLayer(torch.tensor(kept)) for i in plan.layers}
    (tmp_path / "plan").mkdir()
    replace(plan, layers=layers).save(tmp_path / "plan")
    with pytest.raises(MoesaicError, match="The plan of layer 0 does not fit the model"):
        moesaic.apply(str(moe_folder), tmp_path / "plan", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["plan"]


def test_a_plan_that_names_no_weights_is_said(moe_folder, tmp_path, caplog):
    plan = pruned(moe_folder).plan
    (tmp_path / "plan").mkdir()
    replace(plan, base=replace(plan.base, weights="")).save(tmp_path / "plan")
    moesaic.apply(str(moe_folder), tmp_path / "plan", tmp_path / "out")
    assert any("names no weights that it was made from" in said for said in caplog.messages)


@pytest.mark.usefixtures("little_memory")
def test_a_config_of_any_size_is_answered_without_memory(command, theirs, tmp_path):
    """20,000 layers took minutes, a million experts 98 GB, and a real model more than there was."""
    asked = {
        "num_hidden_layers": 20_000, "num_experts": 10**6, "vocab_size": 10**12,
        "hidden_size": 2**20, "moe_intermediate_size": 2**30,
    }  # fmt: skip
    folder = tmp_path / "m"
    folder.mkdir()
    for key, value in asked.items():
        shutil.copyfile(theirs / "config.json", folder / "config.json")
        edited(folder / "config.json", **{key: value})
        lines = [("inspect", folder)]
        if value < 2**20:  # an empty file of that size is mapped
            lines.append(("prune", folder, "out", "--keep", 6, "--dry-run"))
        for line in lines:
            code, _, err = command(*line)
            assert code in (0, 2), (key, err)
            assert "allocate" not in err
            assert "disk" not in err


def test_no_known_type_is_too_large():
    """Doge's class says 16,384 experts, also of dense models."""
    for model_type in TYPES:
        with contextlib.suppress(StrictDataclassError):  # has no defaults
            check_counts(CONFIG_MAPPING[model_type]().to_dict())


# --- files that are opened -----------------------------------------------------------------------

OPENED = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "spiece.model"),
    *("preprocessor_config.json", "hf_quant_config.json", "config.4.0.0.json", "emoji.json"),
    *("model.safetensors.index.json", "additional_chat_templates/tool.jinja"),
    *("moesaic/plan.json", "moesaic/plan.safetensors", "moesaic/result.json"),
)


@pytest.mark.parametrize("kind", ["link", "loop", "pipe", "pointer"])
def test_every_file_that_is_opened_lies_in_the_folder_and_ends(
    command, refused, theirs, tmp_path, kind
):
    """A pipe is never opened: that would wait for ever."""
    (tmp_path / "secret").write_text("{}")
    said = {"link": "link out of", "loop": "link", "pipe": "no ordinary file", "pointer": "lfs"}
    (theirs / "LICENSE").symlink_to(tmp_path / "secret")
    (theirs / "pytorch_model.bin").symlink_to(tmp_path / "secret")
    for name in OPENED:
        file, before = theirs / name, None
        if file.exists():
            before = file.read_bytes()
            file.unlink()
        file.parent.mkdir(exist_ok=True)
        if kind == "pipe":
            os.mkfifo(file)
        elif kind == "pointer":
            file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
        else:
            file.symlink_to(tmp_path / "secret" if kind == "link" else file)
        for line in (("inspect", theirs), ("prune", theirs, tmp_path / "never", *PRUNE)):
            assert file.name in refused(said[kind], *line)
        file.unlink()
        if before is not None:
            file.write_bytes(before)
        elif file.parent != theirs:
            file.parent.rmdir()
    assert command("inspect", theirs)[0] == 0


@pytest.mark.parametrize("shard", ["weights-1.safetensors", "w.bin", "model-1.safetensors"])
def test_weights_that_the_index_names_lie_in_the_folder(
    refused, theirs, moe_folder, tmp_path, shard
):
    """Whatever they are called: a link, a pipe, a pointer, or nothing at all."""
    index = json.loads((theirs / "model.safetensors.index.json").read_text())
    first = next(iter(index["weight_map"].values()))
    places = {k: shard if v == first else v for k, v in index["weight_map"].items()}
    edited(theirs / "model.safetensors.index.json", weight_map=places)
    (theirs / first).unlink()
    makers = {
        "link out of its folder": lambda file: file.symlink_to(moe_folder / first),
        "no ordinary file": os.mkfifo,
        "git lfs pull": lambda file: file.write_text("version https://git-lfs.github.com/spec/v1"),
        "missing": lambda file: None,
    }
    for words, make in makers.items():
        make(theirs / shard)
        for line in (("inspect", theirs), ("prune", theirs, tmp_path / "never", *PRUNE)):
            assert shard in refused(words, *line)
        (theirs / shard).unlink(missing_ok=True)
    for odd in ("../moe/w.safetensors", str(moe_folder / first), "..", "a/../../w"):
        places = {k: odd if v == shard else v for k, v in places.items()}
        edited(theirs / "model.safetensors.index.json", weight_map=places)
        refused("no file's name", "inspect", theirs)
        places = {k: shard if v == odd else v for k, v in places.items()}
    assert not (tmp_path / "never").exists()


def test_a_folder_of_ours_is_no_link_out(refused, theirs, carved_folder, llama_folder, tmp_path):
    """Neither plans, records nor templates are read from elsewhere."""
    for name in ("moesaic", "additional_chat_templates"):
        (theirs / name).symlink_to(carved_folder / "moesaic")
        for line in (
            ("report", theirs, "--out", tmp_path / "page.html"),
            ("apply", llama_folder, theirs, tmp_path / "out"),
            ("inspect", theirs),
        ):
            refused(f"{name} is a link out of", *line)
        (theirs / name).unlink()
    plan = tmp_path / "plan"
    plan.mkdir()
    shutil.copyfile(carved_folder / "moesaic" / "plan.json", plan / "plan.json")
    (plan / "plan.safetensors").symlink_to(carved_folder / "moesaic" / "plan.safetensors")
    for path in (plan, plan / "plan.json"):
        refused("plan.safetensors is a link out of", "apply", llama_folder, path, tmp_path / "out")


def test_what_a_config_asks_for_is_computed_by_torch(done, theirs, tmp_path, monkeypatch):
    """With the package kernels, transformers would fetch code for these names."""
    from transformers.integrations import hub_kernels

    def fetch(*_, **__):
        raise AssertionError("compiled code was asked for")

    for name in ("get_kernel", "load_and_register_attn_kernel"):
        monkeypatch.setattr(hub_kernels, name, fetch)
    for kind in ("flash_attention_2", "flash_attention_3", "paged|eager", "flex_attention"):
        for key in ("attn_implementation", "_attn_implementation"):
            edited(theirs / "config.json", **{key: kind, "_experts_implementation": "deepgemm"})
            source = resolve(str(theirs))
            assert source.config._attn_implementation is None
            model = source.load()
            assert model.config._attn_implementation in ("eager", "sdpa")
            assert model.config._experts_implementation in ("eager", "grouped_mm")
    edited(theirs / "config.json", use_kernels=True, attn_implementation="eager")
    edited(theirs / "config.json", _attn_implementation="eager")
    assert resolve(str(theirs)).load().config._attn_implementation == "eager"
    done("prune", theirs, tmp_path / "out", *PRUNE)


def test_a_folder_that_has_a_known_models_name_is_said(
    command, refused, moe_folder, tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    for name in ("tiny-moe", "smollm2"):
        for out in (name, f"./{name}", tmp_path / name):
            refused("in the place of the model of that name", "prune", moe_folder, out, *PRUNE)
        shutil.copytree(moe_folder, name)
        caplog.clear()
        assert command("inspect", name)[0] == 0
        assert any(f"{name} is the folder {tmp_path / name} here" in m for m in caplog.messages)
    (tmp_path / "deep").mkdir()
    assert command("prune", moe_folder, "deep/tiny-moe", *PRUNE)[0] == 0


# --- killed --------------------------------------------------------------------------------------


def killed_after(steps, out, exchanges):
    """Whether a process that replaces a folder was killed, after so many calls that touch files."""
    child = os.fork()
    if child == 0:
        done = 0

        def count(event, _):
            nonlocal done
            if event != "os.kill" and event.startswith(("os.", "shutil.", "open", "ctypes.")):
                done += 1
                if done > steps:
                    os.kill(os.getpid(), signal.SIGKILL)

        code = 1
        try:
            if not exchanges:
                outputs._exchanged = lambda *_: False
            sys.addaudithook(count)
            with whole_folder(out, overwrite=True) as work:
                (work / "config.json").write_text("new")
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status != 0


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_run_that_is_killed_leaves_the_old_or_the_new(tmp_path, exchanges):
    """At every step; and the next run leaves nothing of it, even if it is refused."""
    out, found = tmp_path / "out", []
    killed, steps = True, 0
    while killed:
        with whole_folder(out, overwrite=True) as work:
            (work / "config.json").write_text("old")
        assert [p.name for p in tmp_path.iterdir()] == ["out"]
        killed = killed_after(steps, out, exchanges)
        steps += 1
        if exchanges:
            found.append((out / "config.json").read_text())
        with contextlib.suppress(MoesaicError):
            check_out(out)
        assert [p.name for p in tmp_path.iterdir()] == ["out"], steps
        assert contents(out).keys() == {"config.json", "moesaic/files.json"}
        found.append((out / "config.json").read_text())
    assert set(found) == {"old", "new"}
    assert sorted(found, reverse=True) == found
    assert steps > 10


def test_an_empty_folder_is_taken(tmp_path, monkeypatch):
    out = tmp_path / "o ut"
    out.mkdir()
    check_out(out)
    with whole_folder(out) as work:
        (work / "config.json").write_text("new")
    assert (out / "config.json").read_text() == "new"
    with pytest.raises(MoesaicError, match="exists"):
        check_out(out)
    monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "a b")
    (tmp_path / "a b").mkdir()
    with pytest.raises(MoesaicError, match="exists"):
        check_out(tmp_path / "a b")


# --- what a result takes over --------------------------------------------------------------------


def test_every_file_of_a_tokenizer_and_processor_is_taken_over(theirs, tmp_path):
    taken = {
        "additional_chat_templates/tool.jinja": "{{ tools }}",
        "chat_template.json": "{}",
        "chat_template.jsonl": "{}",
        "chat_template.jinja": "{{ messages }}",
        "processor_config.json": "{}",
        "preprocessor_config.json": "{}",
        "video_preprocessor_config.json": "{}",
    }
    words = ("qwen.tiktoken", "tekken.json", "tiktoken.model", "spiece.model")
    taken |= dict.fromkeys(words, "words")
    for name, text in taken.items():
        (theirs / name).parent.mkdir(exist_ok=True)
        (theirs / name).write_text(text)
    out = pruned(theirs).save(tmp_path / "out")
    moesaic.export(str(out), tmp_path / "native", to="native")
    for folder in (out, tmp_path / "native"):
        assert {name: (folder / name).read_text() for name in taken} == taken
        assert resolve(str(folder)).tokenizer.chat_template["tool"] == "{{ tools }}"


def test_a_tokenizer_that_is_dead_in_the_result_is_said(command, done, theirs, tmp_path, caplog):
    """As a warning and on the card; one that needs no code names none."""
    auto = {"AutoTokenizer": ["evil.T", None]}
    edited(theirs / "tokenizer_config.json", auto_map=auto)
    said = "The tokenizer cannot be loaded from the result"
    code, _, err = command("prune", theirs, tmp_path / "out", *PRUNE)
    assert (code, said in caplog.text) == (0, False), err
    assert "auto_map" not in json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert resolve(str(tmp_path / "out")).tokenizer.get_vocab()
    (theirs / "tokenizer.json").write_text("{}")
    done("prune", theirs, tmp_path / "out", *PRUNE)
    assert caplog.text.count(f"{said}: it needs Python code") == 1
    (theirs / "tokenizer.json").rename(theirs / "tiktoken.model")
    edited(theirs / "tokenizer_config.json", auto_map=auto, tokenizer_class="T")
    done("prune", theirs, tmp_path / "out", *PRUNE)
    assert caplog.text.count(said) == 2
    assert said in (tmp_path / "out" / "README.md").read_text()


def test_an_unfinished_run_hides_no_wrong_request(command, refused, theirs, tmp_path):
    work = tmp_path / "out.partial"
    work.mkdir()
    (work / "layer-0000-x.safetensors").touch()
    said = {"verb": "slim", "method": "neurons", "config": {"keep": 0.75}, "text": {"samples": 7}}
    edited(work / "request.json", **said, base={"name": "tiny-moe"})
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    run = ("prune", theirs, tmp_path / "out", "--no-eval")
    wrong = {
        "keep": (*run, "--keep", 99),
        "a.png": (*run, "--keep", 6, "--calibration", tmp_path / "a.png"),
        "holds an unfinished run": (*run, "--keep", 6),
    }
    for words, line in wrong.items():
        err = refused(words, *line)
        assert (words == "holds an unfinished run") == ("holds an unfinished run" in err), err
    command_of_it = f"(moesaic slim tiny-moe {tmp_path / 'out'} --keep 0.75 --samples 7, 1 layers"
    assert command_of_it in err, err
    assert (work / "layer-0000-x.safetensors").exists()
    assert command(*run, "--keep", 6, "--dry-run")[0] == 0
