"""Fixtures that tests share; what they build with is in :mod:`builders`."""

from __future__ import annotations

import os

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# Laws hold bitwise. MKL may round otherwise where memory is aligned otherwise, unless told not to.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

import gc
import json
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import builders
import psutil
import pytest
import torch
from builders import DENSE, MOE, loaded, pages, stored, tiny_model, tiny_moe, tiny_tokenizer
from hypothesis import settings
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from moesaic.data.text import Tokens
from moesaic.exports import run_script
from moesaic.modules.running import SpilledList

gc.disable()  # until all that stays to the end, as test modules do, is there
logging.disable_progress_bar()
torch.set_num_threads(1)
# The same examples every time: a run that fails, fails again.
settings.register_profile("moesaic", derandomize=True)
settings.load_profile("moesaic")


collect_ignore = ["faults"]
"""Folders of scripts; what tests need of them they import themselves."""
BY_DAY = {"llama", "gemma2", "mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"}
"""Architectures that span the rules; laws are tried on the others by ``make test-all``."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        values = getattr(getattr(item, "callspec", None), "params", {}).values()
        named = {value for value in values if isinstance(value, str)} & {*DENSE, *MOE}
        if named - BY_DAY:
            item.add_marker("nightly")


def pytest_collection_finish() -> None:
    """Keep all that is there by now out of the collector's passes."""
    gc.collect()
    gc.freeze()
    gc.enable()


def _memory(model: Path, length: int, new_tokens: int, device: str, dtype: Any) -> int:
    """Stand-in of :func:`moesaic.metrics.speed.peak_memory`, which starts a process."""
    assert (model / "config.json").is_file()
    return 1 << 26


def _plain(name: str, request: str, **_: str) -> None:
    """Stand-in of ``run_script("plain.py", request)``, which starts a process."""
    assert name == "plain.py"
    folder, ids, out = json.loads(request)
    model = loaded(folder).float()
    assert type(model).__module__.startswith("transformers.")
    with torch.inference_mode():
        save_file({"logits": model(load_file(ids)["input_ids"]).logits.contiguous()}, out)


@pytest.fixture(scope="session", autouse=True)
def _no_fresh_processes() -> Iterator[None]:
    """One takes ten seconds to import torch and transformers; lm-eval starts one that asks pip, and
    reads for longer what tasks there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.utils.collect_env.get_pretty_env_info", str)
        patch.setattr("moesaic.metrics.measurement.peak_memory", _memory)
        patch.setattr("moesaic.exports.native.run_script", _plain)
        patch.setattr("moesaic.exports.llamacpp.run_script", builders.run_script)
        patch.setattr("moesaic.metrics.tasks.task_manager", builders.local_tasks)
        yield


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make and check exports in a process that never imports moesaic, as users do."""
    for module in ("native", "llamacpp"):
        monkeypatch.setattr(f"moesaic.exports.{module}.run_script", run_script)


@pytest.fixture(params=sorted(DENSE))
def model_type(request: pytest.FixtureRequest) -> str:
    """Every dense architecture of the table."""
    return str(request.param)


@pytest.fixture(params=sorted(MOE))
def moe_type(request: pytest.FixtureRequest) -> str:
    """Every mixture-of-experts architecture of the table."""
    return str(request.param)


@pytest.fixture
def moe(moe_type: str) -> Any:
    """A tiny model of every mixture-of-experts architecture."""
    return tiny_moe(moe_type)


@pytest.fixture
def tokens() -> Tokens:
    return Tokens(builders.drawn_ids(6, 24))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all tests of a file share."""
    return tmp_path_factory.mktemp("place")


@pytest.fixture
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are refitted however few held-out tokens gain: of a test's text there are few."""
    monkeypatch.setattr("moesaic.plans.recovery.helps", lambda before, after: True)
    monkeypatch.setattr("moesaic.plans.recovery.LEAST", 1)


@pytest.fixture
def spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is written to mapped files of the CPU."""
    first = SpilledList.__init__
    monkeypatch.setattr(SpilledList, "__init__", lambda self, limit: first(self, 0))


@pytest.fixture
def padded(tokens: Tokens) -> Tokens:
    mask = torch.ones_like(tokens.input_ids, dtype=torch.bool)
    mask[1, 15:] = False
    mask[4, 3:] = False
    return Tokens(tokens.input_ids.masked_fill(~mask, 0), mask)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama as a user would have it: sharded safetensors and a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    return stored(tiny_model("llama"), folder, max_shard_size="60KB")


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture of experts with a shared path, as a user would have it."""
    folder = tmp_path_factory.mktemp("models") / "moe"
    return stored(tiny_moe("qwen2_moe"), folder, max_shard_size="60KB")


@pytest.fixture(scope="session")
def carved_folder(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama carved by a recipe: checkpoint, plan, record, card and page."""
    from moesaic.carving.more.config import MoREConfig
    from moesaic.config import Calibration
    from moesaic.pipeline import run_recipe
    from moesaic.recipe import Recipe

    out = tmp_path_factory.mktemp("carved") / "out"
    text = Calibration(pages("calibration"), samples=12, length=32)
    run_recipe(Recipe(str(llama_folder), str(out), (MoREConfig(layers="all"),), text, None))
    return out


@pytest.fixture
def theirs(moe_folder: Path, tmp_path: Path) -> Path:
    """A model that somebody sent, to be made hostile."""
    return Path(shutil.copytree(moe_folder, tmp_path / "theirs"))


@pytest.fixture
def little_memory() -> Iterator[None]:
    """No more than two gigabytes beside what is there."""
    limits, held = resource.getrlimit(resource.RLIMIT_AS), psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (held + (2 << 30), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


CommandOutcome = tuple[int, str, str]
"""Exit code, stdout and stderr of a command."""


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., CommandOutcome]:
    """Run ``moesaic`` with these arguments; stderr comes on one line."""
    from moesaic import cli

    def call(*arguments: Any) -> CommandOutcome:
        monkeypatch.setattr(sys, "argv", ["moesaic", *map(str, arguments)])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return int(code), captured.out, " ".join(captured.err.split())

    return call


@pytest.fixture
def done(command: Callable[..., CommandOutcome]) -> Callable[..., str]:
    """Run ``moesaic`` with arguments that it must carry out; what it prints."""

    def call(*arguments: Any) -> str:
        code, out, err = command(*arguments)
        assert code == 0, (arguments, err)
        return out

    return call


@pytest.fixture
def refused(command: Callable[..., CommandOutcome]) -> Callable[..., str]:
    """Run ``moesaic`` with arguments that it must refuse in these words, or that end with another
    code and them; its whole message."""

    def call(words: str, *arguments: Any, code: int = 2) -> str:
        ended, _, err = command(*arguments)
        assert (ended, words in err) == (code, True), (arguments, err)
        return err

    return call
