"""Adding things from another package, as ARCHITECTURE.md says, and using them by command.

A toy package on the path adds a carving method in 2 files, with a statistic of its own and named
beforehand, a criterion in 1, a layer kind in 2, an architecture in 1 and a verb in 2. Nothing of
Moesaic is changed for it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders import SMALL, pages, stored
from transformers import AutoModelForCausalLM
from transformers.models.auto import CONFIG_MAPPING

from moesaic.arch.lookup import EXCEPTIONS

METHOD = {
    "toys/halves/config.py": '''
from dataclasses import dataclass

from moesaic.config import MethodConfig, option


@dataclass(frozen=True)
class HalvesConfig(MethodConfig):
    """Options of Halves."""

    verb, name, title = "carve", "halves", "Halves"
    paper = "Doe, Half a Network Is Enough"
    implementation = "toys.halves.method:Halves"

    share: float = option(0.5, "The share of the neurons to keep.", minimum=0)
''',
    "toys/halves/method.py": '''
import torch

from moesaic.arch.lookup import dense_arch
from moesaic.carving.carved_layer import CarvedLayer
from moesaic.methods.base import Summary
from moesaic.methods.layered import LayerMethod


class Halves(LayerMethod):
    """Keeps some neurons of every layer, by a statistic of its own."""

    kind = "split"
    needs = ("loud_M", "calls_E")

    def find(self, config):
        return dense_arch(config)

    def sizes(self, job):
        return {i: [round(n * self.config.share)] for i, n in enumerate(job.base.widths)}

    def observe(self, site, tally):
        for _, h_TM in site.activations():
            tally.add("loud_M", h_TM.abs().sum(0))

    def decide(self, case, sizes):
        stats = case.stats or {"loud_M": torch.zeros(case.view.width), "calls_E": 1}
        mean_M = stats["loud_M"] / stats["calls_E"]
        order_M = mean_M.argsort(descending=True, stable=True)
        analysis = {"least": mean_M.min().item()}
        return {n: (CarvedLayer(order_M[:n].sort().values, n), analysis) for n in sizes}

    def title_and_text(self, layers, decision, active):
        return Summary(f"cut by {self.config.label}", "Every layer keeps its loudest neurons.")
''',
}
CRITERION = {
    "toys/loudest.py": """
from moesaic.methods.prune.config import Criterion

QUIETEST = Criterion(
    name="quietest",
    title="quietness",
    help="minus the tokens that an expert is routed",
    paper="Doe, Let the Quiet Ones Stay",
    score=lambda case: -case.stats["calls_E"].double(),
)
""",
}
LAYER = {
    "toys/dampened.py": '''
from dataclasses import dataclass

from moesaic.arch.dense import put
from moesaic.plans.base import Description, LayerPlan
from toys.dampened_nn import DampenedFFN


@dataclass(frozen=True)
class DampenedLayer(LayerPlan):
    """An FFN whose output is scaled."""

    kind = "dampened"
    factor: object
    """float32 (1,)."""

    def header(self):
        return {"kind": self.kind}

    def tensors(self):
        return {"factor": self.factor}

    @classmethod
    def load(cls, header, tensors):
        return cls(tensors["factor"])

    def check(self, sizes):
        if self.factor.shape != (1,):
            raise ValueError("one factor scales an FFN")

    def sources(self, arch):
        return (f"{arch.ffn_path}.",)

    def convert(self, arch, state):
        for stored, _ in state.stored(*self.sources(arch)):
            yield stored, state.read(stored)
        yield f"{arch.ffn_path}.factor", self.factor

    @classmethod
    def install(cls, layers, index, arch, header):
        put(layers[index], arch.ffn_path, DampenedFFN(arch.ffn_of(layers[index]), arch.ffn))

    def describe(self, experts):
        return Description(f"its output times {self.factor.item():g}")
''',
    "toys/dampened_nn.py": '''
import torch
from torch import nn

from moesaic.arch.dense import dense_ffn


class DampenedFFN(nn.Module):
    """An FFN's own projections, and a factor."""

    def __init__(self, ffn, names):
        super().__init__()
        for name, child in ffn.named_children():
            self.add_module(name, child)
        self.names = names
        self.factor = nn.Parameter(torch.empty(1, device="meta"))

    def forward(self, x):
        view = dense_ffn(self, self.names)
        return self.factor * view.output(view.hidden(x))
''',
}
ARCHITECTURE = {
    "toys/seed.py": """
from moesaic.arch.dense import Arch

SEED = Arch("seed_oss")
""",
}
VERB = {
    "toys/dampen/config.py": '''
from dataclasses import dataclass

from moesaic.config import MethodConfig, Verb, option

DAMPEN = Verb("dampen", "Make layers quieter.", "moesaic dampen tiny-dense out", calibrates=False)


@dataclass(frozen=True)
class DampenConfig(MethodConfig):
    """Options of dampening."""

    verb, name, title, paper = "dampen", "plain", "dampening", ""
    implementation = "toys.dampen.method:Dampener"

    factor: float = option(0.5, "What outputs are multiplied with.")
    refit: bool = option(False, "Nothing yet.", beyond="nothing yet")
''',
    "toys/dampen/method.py": '''
from dataclasses import asdict

import torch

from moesaic.arch.lookup import dense_arch
from moesaic.methods.base import Decision, Method, Summary
from moesaic.plan import Plan
from toys.dampened import DampenedLayer


class Dampener(Method):
    """Dampens every layer."""

    def find(self, config):
        return dense_arch(config)

    def run(self, job):
        factor = torch.tensor([self.config.factor])
        layers = {i: DampenedLayer(factor.clone()) for i in range(len(job.base.widths))}
        return Decision(Plan(self.config.name, job.base, layers, asdict(self.config)))

    def title_and_text(self, layers, decision, active):
        return Summary("dampened", "The outputs of its FFNs are scaled.", {"factor": 0.5})
''',
}
ENTRIES = """
[moesaic.methods]
carve.halves = toys.halves.config:HalvesConfig
dampen.plain = toys.dampen.config:DampenConfig

[moesaic.criteria]
quietest = toys.loudest:QUIETEST

[moesaic.plans]
dampened = toys.dampened:DampenedLayer

[moesaic.architectures]
seed_oss = toys.seed:SEED

[moesaic.verbs]
dampen = toys.dampen.config:DAMPEN
"""
FILES = {
    "a carving method": (METHOD, 2),
    "a criterion": (CRITERION, 1),
    "a layer kind": (LAYER, 2),
    "an architecture": (ARCHITECTURE, 1),
    "a verb": (VERB, 2),
}
COMMANDS = """
import io, json, sys
from contextlib import redirect_stdout
from moesaic import cli

said = []
for arguments in json.load(open(sys.argv[1])):
    sys.argv = ["moesaic", *arguments]
    code = 0
    with redirect_stdout(io.StringIO()) as out:
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
    said.append([code, out.getvalue()])

import torch
from transformers import AutoModelForCausalLM

losses = {}
for name in ("halves", "quietest", "seed", "dampen", "applied", "carved-seed"):
    model = AutoModelForCausalLM.from_pretrained(f"./{name}").eval()
    ids = torch.arange(1, 33)[None]
    with torch.no_grad():
        losses[name] = model(input_ids=ids, labels=ids).loss.item()
print(json.dumps({"said": said, "losses": losses}))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The toy package's place, as pip would leave it."""
    place = tmp_path_factory.mktemp("site")
    for files, _ in FILES.values():
        for name, text in files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text.lstrip())
    info = place / "toys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    return place


@pytest.fixture(scope="module")
def done(package, llama_folder, moe_folder, tmp_path_factory):
    """What every command said, and the losses of what they made, by the folder's name."""
    folder = tmp_path_factory.mktemp("adding")
    seed = AutoModelForCausalLM.from_config(CONFIG_MAPPING["seed_oss"](**SMALL, head_dim=8))
    stored(seed, folder / "seed")
    brief = ["--max-tokens", "256", "-o", "rounds=0", "-o", "new_tokens=2", "--json"]
    text = ["--samples", "8", "--length", "32", "--calibration", pages("calibration")]
    once = [*text, "--no-eval", "--json"]
    text += ["--data", pages("evaluation")]
    dense, mixture = str(llama_folder), str(moe_folder)
    beforehand = ["--dry-run", "--json"]
    commands = [
        ["carve", dense, "halves", "--method", "halves", "--share", "0.75", *text, *brief],
        ["prune", mixture, "quietest", "--keep", "6", "--score", "quietest", "--no-refit", *once],
        ["carve", "seed", "carved-seed", "--method", "more", "--layers", "all", *once],
        ["dampen", dense, "dampen", "--factor", "0.5", *brief],
        ["apply", dense, "dampen", "applied"],
        ["inspect", "dampen", "--json"],
        ["carve", dense, "none", "--method", "halves", "--share", "0.75", *beforehand],
        ["--help"],
        ["carve", "--method", "halves", "--help"],
        ["dampen", "--help-all"],
    ]
    (folder / "commands.json").write_text(json.dumps(commands))
    path = os.pathsep.join([str(package), *filter(None, sys.path)])
    found = subprocess.run(
        [sys.executable, "-c", COMMANDS, "commands.json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    out = json.loads(found.stdout.splitlines()[-1])
    assert [code for code, _ in out["said"]] == [0] * len(commands), found.stderr
    return folder, [text for _, text in out["said"]], out["losses"]


@pytest.mark.parametrize("what", FILES)
def test_it_takes_no_more_files_than_that(what):
    files, count = FILES[what]
    assert len(files) == count
    said = (Path(__file__).parent.parent / "ARCHITECTURE.md").read_text()
    _, _, adding = said.partition("## Adding things")
    row = next(line for line in adding.splitlines() if what.removeprefix("a carving ") in line)
    assert f"| {count}" in row, row


def test_the_architecture_is_not_in_our_table():
    assert "seed_oss" not in EXCEPTIONS


CARDS = {
    "halves": ("cut by Halves", "Every layer keeps its loudest neurons", "Half a Network"),
    "quietest": ("pruned by quietness to 6 of 8 experts", "Let the Quiet Ones Stay"),
    "carved-seed": ("MoRE",),
    "dampen": ("dampened", "The outputs of its FFNs are scaled"),
}


@pytest.mark.parametrize("name", CARDS)
def test_checkpoint_card_and_page(name, done):
    folder, _, losses = done
    card, page = ((folder / name / f).read_text() for f in ("README.md", "moesaic/report.html"))
    for words in CARDS[name]:
        assert words in card
    assert CARDS[name][0] in page
    assert losses[name] > 0
    record = json.loads((folder / name / "moesaic/result.json").read_text())
    if name in ("halves", "dampen"):
        assert record["scores"]["result"]["perplexity"] > 1


def test_a_new_layer_kind_is_what_it_says(done):
    """Saved, applied from its plan and inspected; its words are in the record."""
    folder, said, losses = done
    assert losses["applied"] == losses["dampen"]
    config = json.loads((folder / "dampen" / "config.json").read_text())
    assert config["model_type"] == "moesaic_llama"
    record = json.loads((folder / "dampen" / "moesaic/result.json").read_text())
    assert {layer["kind"] for layer in record["layers"]} == {"dampened"}
    assert {layer["text"] for layer in record["layers"]} == {"its output times 0.5"}
    assert json.loads(said[3])["factor"] == 0.5
    assert json.loads(said[5])["layers"]


def test_what_it_makes_is_told_beforehand(done):
    """Nothing of it is a method's own: the outline is its ``decide`` on shapes alone."""
    folder, said, _ = done
    sizes = json.loads(said[6])["estimate"]
    record = json.loads((folder / "halves" / "moesaic/result.json").read_text())
    assert sizes["output_parameters"] == record["scores"]["result"]["total_parameters"]
    assert not (folder / "none").exists()
    assert all(layer["analysis"]["least"] > 0 for layer in record["layers"])


def test_the_command_line_knows_them(done):
    everything, carve, dampen = done[1][-3:]
    for said, words in ((everything, "dampen"), (everything, "Make layers quieter"),
                        (carve, "halves"), (carve, "--share"), (dampen, "--factor")):  # fmt: skip
        assert words in said
    assert "--samples" not in dampen
