"""How much text must choose among fit's candidates, and by which figure.

    python benchmarks/fit_text.py MODEL SHARE     adds a row to benchmarks/fit_text.json

The best candidates of a search are measured window by window, on windows apart from those that
calibrate and on held-out text. Disjoint draws of so many windows then choose, by KL (``kl``), by
the rise of the next-token loss (``loss``), by both together (``sum``), or by KL the fewest steps
within one standard error of the best (``fewest``): ``mean`` and ``worst`` of what the choice loses
on the held-out text, over what the best single step does.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.config import Calibration
from moesaic.data.text import evaluation_tokens
from moesaic.fitting.config import FitConfig
from moesaic.fitting.search import Search, apart, settled
from moesaic.foreign import JSON, Model
from moesaic.io.source import Source
from moesaic.metrics.divergence import kl
from moesaic.metrics.measure import environment
from moesaic.recipe import Recipe

OUT = Path(__file__).with_suffix(".json")
NEAR = 1.3
"""Candidates whose KL is at most so many times the least."""
DRAWS = (8, 16, 32, 64)
HELD = 32768


class Kept(Search):
    """A search whose results stay."""

    @contextmanager
    def _opened(self, made: Path) -> Iterator[Source]:
        yield Source("candidate", made)


@torch.no_grad()
def by_window(models: list[Model], windows: Tensor) -> tuple[Tensor, Tensor]:
    """KL from the first model, and the rise of the next-token loss, of each other and window."""
    kls, rises = [], []
    for ids in windows.split(4):
        logits = [model(input_ids=ids, use_cache=False).logits[:, :-1] for model in models]
        loss = torch.stack(
            [
                F.cross_entropy(q.float().transpose(1, 2), ids[:, 1:], reduction="none").mean(1)
                for q in logits
            ]
        )
        flat = logits[0].flatten(0, 1)
        kls += [torch.stack([kl(flat, q.flatten(0, 1)).view(len(ids), -1) for q in logits[1:]])]
        rises += [loss[1:] - loss[:1]]
    return torch.cat(kls, 1).mean(2).double(), torch.cat(rises, 1).double()


def simplest(kls: Tensor, steps: list[int]) -> int:
    """The fewest steps of which KL is within one standard error of the best."""
    more = kls - kls[kls.mean(1).argmin()]
    error = more.std(1) / math.sqrt(more.shape[1])
    near = [i for i in range(len(steps)) if more[i].mean() <= error[i]]
    return min(near, key=lambda i: (steps[i], float(kls[i].mean())))


def judged(steps: list[int], choose: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor]) -> JSON:
    """By the number of windows and the rule, what the choice loses over the best single step."""
    lost = held[1].mean(1).exp() - 1
    single = min(float(lost[i]) for i, count in enumerate(steps) if count == 1)
    rules: dict[str, Callable[[Tensor, Tensor], int]] = {
        "kl": lambda k, _: int(k.mean(1).argmin()),
        "loss": lambda _, r: int(r.mean(1).argmin()),
        "sum": lambda k, r: int((k + r).mean(1).argmin()),
        "fewest": lambda k, _: simplest(k, steps),
    }
    found: JSON = {}
    for size in DRAWS:
        parts = [*zip(*(x.split(size, 1) for x in choose), strict=True)]
        for name, rule in rules.items():
            ratios = [float(lost[rule(k, r)]) / single for k, r in parts if k.shape[1] == size]
            mean = sum(ratios) / len(ratios)
            found[f"{size} {name}"] = {"mean": mean, "worst": max(ratios), "draws": len(ratios)}
    return found


def row(forms: list[JSON], choose: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor]) -> JSON:
    """Every candidate's figures, and the choices."""
    best = int(held[0].mean(1).argmin())
    behind = held[0] - held[0][best]
    return {
        "candidates": [
            {
                **form,
                "choosing": {"kl": float(choose[0][i].mean()), "rise": float(choose[1][i].mean())},
                "held": {"kl": float(held[0][i].mean()), "rise": float(held[1][i].mean())},
                "behind": float(behind[i].mean()),
                "error": float(behind[i].std() / math.sqrt(behind.shape[1])),
            }
            for i, form in enumerate(forms)
        ],
        "choices": judged([len(form["steps"]) for form in forms], choose, held),
        "windows": choose[0].shape[1],
        "held_windows": held[0].shape[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("share", type=float)
    options = parser.parse_args()
    torch.set_num_threads(1)
    work = Path(tempfile.gettempdir()) / f"moesaic-fit-text-{options.model}-{options.share:g}"
    work.mkdir(exist_ok=True)
    recipe = Recipe(options.model, "", (), settled(Calibration(samples=32)), None)
    budget = int(options.share * Search(recipe, FitConfig(memory=1), work).original.bytes)
    search = Kept(recipe, FitConfig(memory=budget), work)
    _, tried = search.run()
    least = min(candidate.kl for candidate in tried)
    near = [candidate for candidate in tried if candidate.kl <= NEAR * least]
    made = [Source("candidate", search._made(candidate.steps)).load() for candidate in near]
    models = [search.source.load(), *made]
    windows = apart(search._drawn(32 + 128), search.texts[0]).input_ids
    held = evaluation_tokens("", search.source.tokenizer, windows.shape[1], HELD).input_ids
    forms = [{"form": c.form, "steps": c.as_json()["steps"]} for c in near]
    kept: JSON = json.loads(OUT.read_text()) if OUT.exists() else {"rows": {}}
    found = row(forms, by_window(models, windows), by_window(models, held))
    kept["rows"][f"{options.model} {options.share:g}"] = found
    kept["environment"] = environment()
    OUT.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
