"""How much of a perfect router's advantage over static pruning each router regains, layer by layer.

    python benchmarks/routers.py [--layers N ...] [--petals 64:32 256:120]

SmolLM2-135M at active ratio 0.8 in all layers, before any refit: squared error of a layer's output
relative to the output. Fitted on the shipped calibration text, tested on the shipped evaluation
text. "oracle" knows every petal's weighted energy; a router's score is (static - router) / (static
- oracle). Writes benchmarks/routers.json, layer by layer.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.arch.dense import DenseFFN
from moesaic.arch.lookup import dense_arch
from moesaic.config import Calibration, RunArgs
from moesaic.data.text import Tokens, evaluation_tokens
from moesaic.layers.regression import Ridge
from moesaic.methods.beyond.routers import neuron_weights, petal_energies
from moesaic.methods.budget import layer_sizes
from moesaic.methods.more.config import MoREConfig
from moesaic.methods.more.formulas import memberships, prototypes
from moesaic.methods.more.method import MoRE
from moesaic.metrics.measure import environment
from moesaic.nn.routers import running
from moesaic.observation.job import Job
from moesaic.observation.stream import Site

LENGTH, FITTED, TESTED = 256, 100, 16
RANKS = (16, 32, 64)
Scores = Callable[[Tensor, Tensor], Tensor]
"""From x and the backbone's h to a score for each petal."""


@dataclass
class Part:
    """Some batches of a site, as a method sees it."""

    site: Site[DenseFFN]
    start: int
    stop: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.site, name)

    @property
    def tokens(self) -> int:
        return sum(len(x_TD) for x_TD, _ in self.activations())

    def activations(self) -> Iterator[tuple[Tensor, Tensor]]:
        return islice(self.site.activations(), self.start, self.stop)


class Question:
    """One layer and its petals: what routers are fitted to, and what they are worth."""

    def __init__(self, fit: Part, test: Part, backbone: Tensor, petals: list[Tensor], top_k: int):
        self.fit, self.test, self.backbone, self.petals, self.top_k = (
            fit, test, backbone, petals, top_k,
        )  # fmt: skip
        self.norm_M = neuron_weights(fit.view)
        self.order_M = torch.cat([backbone, *petals])
        self.sizes = tuple(len(p) for p in petals)

    def energies(self, h_TM: Tensor) -> Tensor:
        return petal_energies(h_TM, self.norm_M, self.petals)

    def features(self, x_TD: Tensor, h_TM: Tensor, backbone: bool, constant: bool) -> Tensor:
        parts = [x_TD.float()]
        parts += [h_TM[:, self.backbone].float()] * backbone
        parts += [x_TD.new_ones(len(x_TD), 1).float()] * constant
        return torch.cat(parts, dim=1)

    def ridge(self, backbone: bool = False, constant: bool = True) -> tuple[Tensor, Tensor]:
        """Weights, and the sums of the fitted tokens' features."""
        ridge = None
        for x_TD, h_TM in self.fit.activations():
            x_TF = self.features(x_TD, h_TM, backbone, constant)
            ridge = ridge or Ridge(x_TF.shape[1], len(self.petals), free=int(constant))
            ridge.add(x_TF, self.energies(h_TM))
        assert ridge is not None
        return ridge.solve().weight_FO, ridge.fit.gram_FF + ridge.held.gram_FF

    def linear(self, weight_FR: Tensor, backbone: bool = False, constant: bool = True) -> Scores:
        return lambda x, h: self.features(x, h, backbone, constant) @ weight_FR.float()

    def cosine(self) -> Scores:
        member_MR = memberships(self.backbone, self.petals, self.fit.view.width)
        rows_RD = prototypes(self.fit, member_MR, 0.5)  # type: ignore[arg-type]
        return lambda x, h: x.float() @ rows_RD.T

    def trained(self, hidden: int, steps: int = 1500, batch: int = 1024) -> Scores:
        """Two layers trained on cached inputs, to the energies standardised petal by petal."""
        torch.manual_seed(0)
        x_TD = torch.cat([x.float() for x, _ in self.fit.activations()])
        y_TR = torch.cat([self.energies(h) for _, h in self.fit.activations()])
        scale = y_TR.std()
        net = nn.Sequential(
            nn.Linear(x_TD.shape[1], hidden), nn.SiLU(), nn.Linear(hidden, y_TR.shape[1])
        )
        mean_D, spread_D = x_TD.mean(0), x_TD.std(0) + 1e-6
        optimiser = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        with torch.enable_grad():
            for _ in range(steps):
                at = torch.randint(len(x_TD), (batch,))
                loss = F.mse_loss(net((x_TD[at] - mean_D) / spread_D), y_TR[at] / scale)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                schedule.step()
        return lambda x, h: net((x.float() - mean_D) / spread_D)

    def error(self, scores: Scores | None, static_M: Tensor | None = None) -> float:
        """Of the layer's output on tested tokens; by the energies themselves where no scores."""
        left = whole = 0.0
        down_DM = self.fit.view.down_DM.float()
        for x_TD, h_TM in self.test.activations():
            h_TM = h_TM.float()
            if static_M is not None:
                missing_TM = h_TM.index_fill(1, static_M, 0)
            else:
                score_TR = self.energies(h_TM) if scores is None else scores(x_TD, h_TM)
                chosen_TK = score_TR.topk(self.top_k).indices
                on_TM = running(chosen_TK, len(self.backbone), self.sizes)
                missing_TM = torch.empty_like(h_TM)
                missing_TM[:, self.order_M] = h_TM[:, self.order_M] * (1 - on_TM)
            left += (missing_TM @ down_DM.T).double().square().sum().item()
            whole += (h_TM @ down_DM.T).double().square().sum().item()
        return left / whole


def low_rank(weight_FR: Tensor, gram_FF: Tensor, rank: int) -> Tensor:
    """The best weights of that rank for the same regression: reduced-rank regression."""
    fitted_RR = weight_FR.T @ gram_FF @ weight_FR
    basis_RK = torch.linalg.eigh(fitted_RR)[1][:, -rank:]
    return weight_FR @ basis_RK @ basis_RK.T


def answers(question: Question, static_M: Tensor) -> dict[str, Any]:
    """By router: relative error, seconds to fit, parameters."""
    found: dict[str, Any] = {}
    petals, inputs = len(question.petals), question.fit.view.up_MD.shape[1]

    def add(name: str, make: Callable[[], Scores], parameters: int) -> None:
        started = time.perf_counter()
        scores = make()
        seconds = time.perf_counter() - started
        found[name] = {
            "error": question.error(scores), "seconds": seconds, "parameters": parameters,
        }  # fmt: skip

    found["static"] = {"error": question.error(None, static_M)}
    found["oracle"] = {"error": question.error(None)}
    add("cosine", question.cosine, petals * inputs)
    (weight_FR, gram_FF) = question.ridge()
    add("ridge", lambda: question.linear(question.ridge()[0]), petals * (inputs + 1))
    add(
        "ridge without bias",
        lambda: question.linear(question.ridge(constant=False)[0], constant=False),
        petals * inputs,
    )
    for rank in RANKS:
        if rank < petals:
            weights = low_rank(weight_FR, gram_FF, rank)
            count = rank * (petals + inputs + 1)
            add(f"ridge of rank {rank}", lambda w=weights: question.linear(w), count)  # type: ignore[misc]
    add(
        "backbone",
        lambda: question.linear(question.ridge(backbone=True)[0], backbone=True),
        petals * (inputs + len(question.backbone) + 1),
    )
    for hidden in (64, 256):
        count = hidden * (inputs + petals + 2)
        add(f"trained, {hidden} hidden", lambda n=hidden: question.trained(n), count)  # type: ignore[misc]
    static, oracle = found["static"]["error"], found["oracle"]["error"]
    for answer in found.values():
        answer["regained"] = (static - answer["error"]) / (static - oracle)
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", nargs="*", type=int, default=[4, 14, 24])
    parser.add_argument("--petals", nargs="*", default=["64:32", "256:120"])
    given = parser.parse_args()
    out = Path(__file__).with_suffix(".json")
    record: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"results": {}}
    record["environment"] = environment("cpu")
    drawn = Calibration(samples=FITTED, length=LENGTH)
    job = Job(RunArgs("smollm2", calibration=drawn), dense_arch)
    tested = evaluation_tokens("", job.tokenizer, LENGTH, LENGTH * TESTED)
    both = Tokens(torch.cat([job.tokens.input_ids, tested.input_ids]), None)
    sizes = layer_sizes(job.shape, job.arch)
    for site in job.stream(given.layers, job.arch.dense, both):
        ends = torch.tensor([len(x_TD) for x_TD in site.inputs()]).cumsum(0)
        cut = int((ends <= FITTED * LENGTH).sum())  # a batch that holds both sorts is left out
        first = cut + int(ends[cut - 1] < FITTED * LENGTH)
        fit, test = Part(site, 0, cut), Part(site, first, len(site))
        stats = MoRE(MoREConfig()).observe(fit)  # type: ignore[arg-type]
        for count in given.petals:
            experts, top_k = map(int, count.split(":"))
            config = MoREConfig(active=0.8, experts=experts, top_k=top_k, layers="all")
            methods = MoRE(config), MoRE(MoREConfig(**{**vars(config), "variant": "static"}))
            budget = methods[0].choose(sizes)[site.index]
            backbone, petals = methods[0].structure(stats, fit, budget)  # type: ignore[arg-type]
            static = methods[1].decide(stats, fit, budget)  # type: ignore[arg-type]
            static_M = static.tensors()["order"]
            name = f"layer {site.index}, {experts} petals, top-{top_k}"
            found = answers(Question(fit, test, backbone, petals, top_k), static_M)
            record["results"][name] = found
            out.write_text(json.dumps(record, indent=1) + "\n")
            for router, answer in found.items():
                told = f"{answer['error']:.4f} {answer['regained']:+.3f}"
                print(f"{name} {router:20} {told}", flush=True)


if __name__ == "__main__":
    main()
