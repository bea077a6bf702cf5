"""fit beside the best single verb at the same bytes, on text that neither saw.

    python benchmarks/fit.py      writes benchmarks/fit.json; goes on where it stopped
    LLAMA_CPP=folder python benchmarks/fit.py --bits      tiny-moe once more, as GGUF files
    python benchmarks/fit.py --tune 50     the rows that are there once more, the best forms trained

With ``--tune`` the search goes on from what a row has tried; ``single_tuned`` is the best single
verb of that row after the same training.

Each verb alone is made with care (a refit, the score that measures best) at the largest size within
the budget; the one that loses least on the held-out text is the best single verb, so that the
comparison favours it. ``loss`` is the rise of perplexity over the original's, relative.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moesaic.config import Calibration, Evaluation
from moesaic.data.text import evaluation_tokens
from moesaic.fitting.candidates import families
from moesaic.fitting.config import FitConfig
from moesaic.fitting.costs import told
from moesaic.fitting.search import Search, fit, searched, settled
from moesaic.foreign import JSON
from moesaic.io.source import Source
from moesaic.methods.sft.config import TuneConfig
from moesaic.metrics.forward import Layerwise, Whole
from moesaic.metrics.measure import environment
from moesaic.metrics.score import scores_beside
from moesaic.recipe import Recipe, step_config

OUT = Path(__file__).with_suffix(".json")
MODELS = ("tiny-shared-moe", "tiny-moe")
SHARES = (0.5, 0.35, 0.75)
TYPES = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m")
MEASURED = Evaluation(max_tokens=8192, rounds=0)


def singles(search: Search, config: FitConfig, measured: Any) -> dict[str, JSON]:
    """Every verb alone within a budget, by its form."""
    found: dict[str, JSON] = {}
    for family in families(search.source, config):
        if len(family.rough(family.shares[-1])) > 1:
            continue
        share = search.share(family, config)
        if share is None:
            continue
        for make in (family.rough, *family.fine):
            steps = make(share)
            weight = search.costs.of(steps)
            assert weight is not None
            name = json.dumps(told(steps))
            found[name] = {"memory": weight.memory, **measured(search._made(steps))}
    return found


def rounded(model: str, share: float, drawn: Calibration, windows: int) -> dict[str, Any]:
    """fit with bits, within a share of the original's bytes."""
    work = Path(tempfile.gettempdir()) / f"moesaic-fit-{model}-{share:g}-bits"
    work.mkdir(exist_ok=True)
    recipe = Recipe(model, str(work / "out"), (), drawn, MEASURED)
    budget = int(share * Search(recipe, FitConfig(memory=1), work / "size").original.bytes)
    start = time.process_time()
    record = fit(recipe, FitConfig(memory=budget, windows=windows, types=TYPES), overwrite=True)
    assert record is not None
    return {
        "budget": budget,
        "chosen": record.measured["chosen"],
        "tried": record.measured["tried"],
        **{k: record.measured["gguf"][k] for k in ("bytes", "perplexity", "loss", "kl")},
        "cpu_seconds": {"fit": time.process_time() - start},
    }


def tuned(row: dict[str, Any], recipe: Recipe, config: FitConfig, measured: Any) -> dict[str, Any]:
    """fit with training, from what a row has tried; and the best single verb, trained as well."""
    work = searched(recipe.out)
    work.mkdir(parents=True, exist_ok=True)
    search = Search(recipe, config, work)
    for of in row["tried"]:
        file = work / f"tried-{search._key([of['steps'], of['stage']])}.json"
        if not file.exists():
            score = {name: of[name] for name in ("perplexity", "loss", "kl", "tokens")}
            file.write_text(json.dumps(score))
    start = time.process_time()
    record = fit(recipe, config, resume=True)
    assert record is not None
    seconds = time.process_time() - start
    scores, chosen = record.measured["scores"], record.measured["chosen"]
    loss, kl = _loss(scores), scores["result"]["kl"]
    found: dict[str, Any] = {"loss": loss, "kl": kl, "chosen": chosen}
    name, single = min(row["singles"].items(), key=lambda item: float(item[1]["loss"]))
    rate = chosen["steps"][-1].get("tune", {}).get("lr", TuneConfig.lr)
    steps = [step_config(*item) for step in json.loads(name) for item in step.items()]
    work.mkdir()
    taught = measured(search._made((*steps, search.training(rate))))
    shutil.rmtree(work)
    return {
        **found,
        "tried": [c for c in record.measured["tried"] if c["stage"] == "confirm"],
        "best_single": single,
        "single_tuned": taught,
        "of_best_single": {"loss": loss / single["loss"], "kl": kl / single["kl"]},
        "of_single_tuned": {"loss": loss / taught["loss"], "kl": kl / taught["kl"]},
        "steps": config.tune,
        "cpu_seconds": {"fit": seconds},
        "load": os.getloadavg()[1],
    }


def _loss(scores: JSON) -> float:
    loss: float = scores["result"]["perplexity"] / scores["original"]["perplexity"] - 1
    return loss


def main(names: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--bits", action="store_true")
    parser.add_argument("--tune", type=int, default=0)
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES)
    parser.add_argument("--models", nargs="*", default=MODELS)
    options = parser.parse_args(names)
    torch.set_num_threads(1)
    kept: dict[str, Any] = json.loads(OUT.read_text()) if OUT.exists() else {}
    kept["environment"] = environment()
    rows = kept.setdefault("rows", {})
    drawn = settled(Calibration(samples=options.samples))
    for share in options.shares if options.bits else ():
        key = f"tiny-moe {share:g} bits"
        if key not in rows:
            rows[key] = rounded("tiny-moe", share, drawn, options.windows)
            OUT.write_text(json.dumps(kept, indent=1) + "\n")
            print(key, rows[key]["chosen"]["form"], rows[key]["loss"], rows[key]["kl"], flush=True)
    for share in () if options.bits else options.shares:
        for model in options.models:
            plain = f"{model} {share:g}"
            key = f"{plain} tune {options.tune}" if options.tune else plain
            if key in rows or (options.tune and plain not in rows):
                continue
            work = Path(tempfile.gettempdir()) / f"moesaic-fit-{key.replace(' ', '-')}"
            recipe = Recipe(model, str(work / "out"), (), drawn, MEASURED)
            work.mkdir(exist_ok=True)
            search = Search(recipe, FitConfig(memory=1), work / "singles")
            budget = int(share * search.original.bytes)
            config = FitConfig(memory=budget, windows=options.windows)
            tokens = evaluation_tokens("", search.source.tokenizer, None, MEASURED.max_tokens)
            original = Layerwise(search.source, keep=True)

            def measured(folder: Path, tokens: Any = tokens, original: Any = original) -> JSON:
                ours, theirs = scores_beside(
                    Whole(Source("candidate", folder).load()), original, tokens
                )
                loss = ours.perplexity / theirs.perplexity - 1
                return {"perplexity": ours.perplexity, "loss": loss, "kl": ours.kl}

            if options.tune:
                config = replace(config, tune=options.tune)
                rows[key] = tuned(rows[plain], recipe, config, measured)
                OUT.write_text(json.dumps(kept, indent=1) + "\n")
                print(key, {k: v for k, v in rows[key].items() if "of" in k}, flush=True)
                continue
            start = time.process_time()
            alone = singles(search, config, measured)
            best = min(alone.values(), key=lambda row: float(row["loss"]), default=None)
            single_seconds = time.process_time() - start
            record = fit(recipe, config, resume=True)
            assert record is not None
            scores = record.measured["scores"]
            loss = _loss(scores)
            rows[key] = {
                "budget": budget,
                "singles": alone,
                "best_single": best,
                "chosen": record.measured["chosen"],
                "tried": record.measured["tried"],
                "loss": loss,
                "kl": scores["result"]["kl"],
                "of_best_single": None if best is None else loss / best["loss"],
                "kl_of_best_single": None
                if best is None
                else scores["result"]["kl"] / min(row["kl"] for row in alone.values()),
                "cpu_seconds": {
                    "singles": single_seconds,
                    "fit": time.process_time() - start - single_seconds,
                },
                "samples": options.samples,
                "windows": options.windows,
            }
            OUT.write_text(json.dumps(kept, indent=1) + "\n")
            of = rows[key]["of_best_single"]
            print(key, f"loss {loss:.4f}, of the best single verb's:", of, flush=True)


if __name__ == "__main__":
    main()
