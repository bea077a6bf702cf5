"""Results in the engines that serve them: the same log-probabilities, the same greedy text.

``make test-vllm``, ``make test-mlx`` and ``make test-llamacpp`` set an engine up and run this file
for it. All models of an engine are answered by one process (``ask.py``), since most of the
time is spent on its imports.
"""

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES, FORMATS, REFUSED, make

from moesaic.io.source import resolve

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]

HERE = Path(__file__).parent
BUILD, SOURCE = HERE.parents[1] / "build", HERE.parents[1] / "src"
ENGINES = {
    "transformers": Path(sys.executable),
    "vllm": BUILD / "vllm/bin/python",
    "mlx": BUILD / "mlx/bin/python",
    "llamacpp": Path(sys.executable),
}
"""The Python that has each."""
PROMPT = torch.randint(3, 384, (40,), generator=torch.Generator().manual_seed(2)).tolist()
NEW = 16
CLOSE = 1e-3
"""The largest difference of log-probabilities."""
NEAR = 0.1
"""The largest mean difference, where weights are of few bits and engines round activations, too."""
ROUGH = {("llamacpp", "gemma4_text")}
"""So is its GELU there, from a table in 16 bits."""
RECORD = "ENGINES_JSON"
"""The file that outcomes are written into."""
KNOWN = HERE.parents[1] / "benchmarks/engines.json"
"""Outcomes of the last time."""
HERE_ALONE = {
    "requires AMX": "FP8 on a CPU needs AMX, which this machine lacks",
    "No MXFP4 MoE backend supports": "MXFP4 on a CPU needs AMX, which this machine lacks",
    "No WNA16 MoE backend supports": "experts in int4 need a GPU, which this machine lacks",
}
"""Errors that say something of the machine, and what."""


def absent(engine):
    """Why an engine cannot be tried here; empty if it can."""
    if not ENGINES[engine].exists():
        return f"make test-{engine} sets it up"
    if engine == "llamacpp" and not (
        importlib.util.find_spec("llama_cpp") and "LLAMA_CPP" in os.environ
    ):
        return "make test-llamacpp sets it up"
    return ""


def asked(engine, folders, place):
    """An engine's version, and its answers by name; one for those that ended its process, too."""
    request, lines = place / "request.json", place / "answers.jsonl"
    answers = {}
    version = ""
    while left := {name: str(folder) for name, folder in folders.items() if name not in answers}:
        request.write_text(json.dumps({"models": left, "prompt": PROMPT, "new_tokens": NEW}))
        lines.write_text("")
        script = HERE / "ask.py"
        more = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(place)}
        environment = {**os.environ, **more}
        if engine == "vllm":  # for results of our own classes, which it finds in the checkpoint
            paths = (str(SOURCE), os.environ.get("PYTHONPATH", ""))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        run = subprocess.run(
            [ENGINES[engine], script, engine, request, lines],
            env=environment,
            capture_output=True,
            text=True,
        )
        found = [json.loads(line) for line in lines.read_text().splitlines()]
        assert found, run.stderr[-3000:]
        version = found[0]["version"]
        answers |= {line["name"]: line for line in found[1:]}
        if run.returncode:
            said = run.stderr.strip().splitlines()[-1:]
            first = next((name for name in left if name not in answers), "")
            answers.setdefault(first, {"error": f"its process ended ({run.returncode}): {said}"})
    return version, answers


@torch.inference_mode()
def reference(made):
    """What the result itself answers, by our own code where it is of no architecture's class."""
    model = resolve(str(made.source)).load(dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    found = model(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    new = model.generate(
        ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return {"logprobs": found.tolist(), "greedy": new[0, len(PROMPT) :].tolist()}


class Trial:
    """Results by case, and what every engine answers to those that a session asks for."""

    def __init__(self, wanted, place):
        self.wanted, self.place = wanted, place
        self.answers: dict[str, Any] = {}
        self.versions: dict[str, str] = {}
        self.outcomes: dict[tuple[str, str, str], str] = {}
        self.made = cache(partial(make, place=place))
        self.reference = cache(lambda model, verb: reference(self.made(model, verb)))

    def answer(self, engine, model, verb):
        if engine not in self.answers:
            cases = sorted(case[1:] for case in self.wanted if case[0] == engine)
            folders = {" ".join(c): f for c in cases if (f := self.made(*c).folder_for(engine))}
            place = self.place / engine
            place.mkdir()
            self.versions[engine], self.answers[engine] = asked(engine, folders, place)
        return self.answers[engine][f"{model} {verb}"]

    def write(self, file):
        """Add what was found to what other sessions found."""
        record = json.loads(file.read_text("utf-8")) if file.exists() else {}
        record["made_by"] = "make test-vllm test-mlx test-llamacpp"
        record["versions"] = {**record.get("versions", {}), **self.versions}
        cells = record.setdefault("outcomes", {})
        for engine, model, verb in self.wanted:
            line = cells.setdefault(model, {}).setdefault(verb, {})
            line[engine] = self.outcomes.get((engine, model, verb), "failed")
        file.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", "utf-8")


@pytest.fixture(scope="session")
def trial(request, tmp_path_factory):
    wanted = {
        tuple(item.callspec.params[name] for name in ("engine", "model", "verb"))
        for item in request.session.items
        if "engine" in getattr(getattr(item, "callspec", None), "params", {})
    }
    trial = Trial(
        {case for case in wanted if not absent(case[0])}, tmp_path_factory.mktemp("engines")
    )
    yield trial
    if RECORD in os.environ:
        trial.write(Path(os.environ[RECORD]))


def trouble(engine, model, answer, wanted):
    """What is wrong with an answer; empty if nothing is."""
    if "error" in answer:
        return str(answer["error"])
    pairs = zip(answer["logprobs"], wanted["logprobs"], strict=True)
    differences = [abs(a - b) for a, b in pairs]
    largest, mean = max(differences), sum(differences) / len(differences)
    if model in FORMATS or (engine, model) in ROUGH:
        return "" if mean < NEAR else f"log-probabilities differ by {mean:.1e} in the mean"
    if not largest < CLOSE:
        return f"log-probabilities differ by {largest:.1e} at most, {mean:.1e} in the mean"
    return "" if answer["greedy"] == wanted["greedy"] else "the greedy text differs"


@pytest.mark.parametrize(("model", "verb"), CASES)
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_computes_what_the_result_does(engine, model, verb, trial):
    """Or it lacks something that the last record says of it, too."""
    if why := absent(engine):
        pytest.skip(why)
    made = trial.made(model, verb)
    assert bool(made.refusal) == (model in REFUSED.get(verb, ())), made.refusal
    if made.folder_for(engine) is None:
        trial.outcomes[engine, model, verb] = f"refused: {made.refusal}"
        return
    found = trouble(engine, model, trial.answer(engine, model, verb), trial.reference(model, verb))
    machine = [why for words, why in HERE_ALONE.items() if words in found]
    known = json.loads(KNOWN.read_text("utf-8"))["outcomes"][model][verb][engine]
    lacks = known.startswith("lacks: ")
    if machine:
        trial.outcomes[engine, model, verb] = f"machine: {machine[0]}"
        pytest.skip(machine[0])
    trial.outcomes[engine, model, verb] = known if found and lacks else found or "same"
    assert bool(found) == lacks, found or f"the record says that it {known}"
