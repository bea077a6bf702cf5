"""fit beside the best single verb at the same bytes, on text that neither saw.

    python benchmarks/fit.py      writes benchmarks/fit.json; goes on where it stopped
    LLAMA_CPP=folder python benchmarks/fit.py --models tiny-moe --bits      as GGUF files
    python benchmarks/fit.py --models FOLDER --samples 8 --windows 8 --held 4096

What a search refines is measured on the held-out text, too, when it is made. Verbs alone are those
that the search refined, at the largest size within the budget: all whose KL is within a quarter of
the best one's. The one that loses least on the held-out text is the best single verb, so that the
comparison favours it.
``loss`` is the rise of perplexity over the original's, relative.
With ``--bits`` a share is that of the original's own file in bf16, and ``alone`` the original's
files in each of llama.cpp's types that fit: rounding all to one type is the single verb of these
rows, types layer by layer are what is added.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moesaic.config import Calibration
from moesaic.data.text import Tokens, evaluation_tokens
from moesaic.fitting.config import FitConfig
from moesaic.fitting.costs import told
from moesaic.fitting.search import Candidate, Search, figures, settled
from moesaic.foreign import JSON
from moesaic.io.source import Source
from moesaic.metrics.forward import Layerwise, Whole
from moesaic.metrics.measure import environment
from moesaic.metrics.score import scores_beside
from moesaic.recipe import Recipe

OUT = Path(__file__).with_suffix(".json")
MODELS = ("tiny-shared-moe", "tiny-moe")
SHARES = (0.5, 0.35, 0.75)
WHOLE = "bf16"
"""The type of a file whose bytes are a model's."""
TYPES = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k")


class Watched(Search):
    """A search whose candidates are measured on held-out text, too; that chooses nothing."""

    held: Tokens
    _noting = False

    def measured(self, candidate: Candidate) -> Candidate:
        self._noting = candidate.stage != "rough"
        return super().measured(candidate)

    @contextmanager
    def _opened(self, made: Path) -> Iterator[Source]:
        with super()._opened(made) as source:
            yield source
            file = self._noted(made.stem.removeprefix("made-"))
            if self._noting and not file.exists():
                run = Whole.of(source, self.recipe.device, self.dtype)
                file.write_text(json.dumps(figures(*scores_beside(run, self._other, self.held))))

    @property
    def _other(self) -> Layerwise:
        """The original once more: what it made of one text is kept."""
        if not hasattr(self, "_beside"):
            self._beside = Layerwise(self.source, self.recipe.device, self.dtype, keep=True)
        return self._beside

    def _noted(self, key: str) -> Path:
        return self.work / f"held-{key}.json"

    def noted(self, candidate: Candidate) -> JSON:
        """What a candidate loses on the held-out text; one that was tried roughly is made again."""
        file = self._noted(self._key(told(candidate.steps)))
        self._noting = True
        if not file.exists():
            with self._opened(self._made(candidate.steps)):
                pass
        found: JSON = json.loads(file.read_text())
        return found

    def said(self, candidate: Candidate) -> JSON:
        """A candidate with both figures."""
        return {**candidate.as_json(), "held": self.noted(candidate)}


def row(search: Watched) -> JSON:
    """A search beside the best verb alone."""
    start = time.process_time()
    chosen, tried = search.run()
    seconds = time.process_time() - start
    alone = [c for c in tried if len(c.steps) == 1]
    careful = [c for c in alone if c.stage == ("rough" if search.files else "refined")] or alone
    singles = [search.said(c) for c in careful]
    best = min(singles, key=lambda single: float(single["held"]["loss"]), default=None)
    nearest = min(singles, key=lambda single: float(single["held"]["kl"]), default=None)
    held = search.noted(chosen)
    return {
        "budget": search.config.memory,
        "loss": held["loss"],
        "kl": held["kl"],
        "of_best_single": best and held["loss"] / best["held"]["loss"],
        "kl_of_best_single": nearest and held["kl"] / nearest["held"]["kl"],
        "best_single": best,
        "chosen": search.said(chosen),
        "tried": [c.as_json() if c.stage == "rough" else search.said(c) for c in tried],
        "cpu_seconds": seconds,
        **({"alone": singles} if search.files else {}),
    }


def main(names: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--windows", type=int, default=FitConfig.windows)
    parser.add_argument("--held", type=int, default=32768)
    parser.add_argument("--bits", action="store_true")
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES)
    parser.add_argument("--models", nargs="*", default=MODELS)
    options = parser.parse_args(names)
    torch.set_num_threads(1)
    kept: dict[str, Any] = json.loads(OUT.read_text()) if OUT.exists() else {}
    kept["environment"] = environment()
    rows = kept.setdefault("rows", {})
    drawn = settled(Calibration(samples=options.samples))
    for share in options.shares:
        for model in options.models:
            name = f"{Path(model).name} {share:g}{' bits' if options.bits else ''}"
            if name in rows:
                continue
            work = Path(tempfile.gettempdir()) / f"moesaic-fit-{name.replace(' ', '-')}"
            work.mkdir(exist_ok=True)
            recipe = Recipe(model, str(work / "out"), (), drawn, None)
            config = FitConfig(
                memory=1,
                windows=options.windows,
                types=TYPES if options.bits else (),
            )
            search = Watched(recipe, config, work)
            whole = search.files.bytes(WHOLE, 0) if search.files else search.original.bytes
            search.config = replace(config, memory=int(share * whole))
            search.held = evaluation_tokens("", search.source.tokenizer, 256, options.held)
            found = row(search)
            asked = ("samples", "windows", "held")
            rows[name] = {
                **found,
                **{of: getattr(options, of) for of in asked},
                "load": os.getloadavg()[1],
            }
            OUT.write_text(json.dumps(kept, indent=1) + "\n")
            print(name, found["chosen"]["form"], f"loss {found['loss']:.4f}, KL {found['kl']:.4f}")
            print("  of the best single verb's:", found.get("of_best_single"), flush=True)


if __name__ == "__main__":
    main()
