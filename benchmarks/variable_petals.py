"""A fixed number of petals beside a variable one at the same mean: perplexity of SmolLM2-135M.

    python benchmarks/frontier.py --work DIR ...                                carves the model
    python benchmarks/variable_petals.py --work DIR --data wikitext2-valid.txt

``variable``: thresholds, one a layer, are put into a model that was carved into 256 petals with a
fixed number, from 16 windows of 256 tokens of the text that ships; nothing is refitted. ``variable,
refitted`` is carved with thresholds from the beginning (``-o variable=true``), on 32 windows of 256
tokens, as the fixed one was. 4,096 tokens, windows of 512. Writes benchmarks/variable_petals.json;
rows that are there are kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import moesaic
from moesaic.data.text import calibration_tokens, evaluation_tokens
from moesaic.foreign import Model
from moesaic.io.source import resolve
from moesaic.methods.more.config import MoREConfig
from moesaic.metrics.measure import environment
from moesaic.metrics.score import score
from moesaic.nn import Router

OUT = Path(__file__).with_suffix(".json")
ROW = "fine petals 0.8"
REFITTED = "variable, refitted"
KINDS = ("fixed", "variable", REFITTED)
FINE: Mapping[str, Any] = {
    "active": 0.8,
    "layers": "all",
    "experts": 256,
    "top_k": 0,
    "router": "ridge",
    "refit": True,
    "variable": True,
}


@torch.inference_mode()
def set_thresholds(model: Model, ids: torch.Tensor) -> None:
    """Let every router run the petals above a threshold, as many in the mean as it ran."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    seen: dict[Router, list[torch.Tensor]] = {router: [] for router in routers}
    handles = [
        router.register_forward_hook(
            lambda module, args, out: seen[module].append(module.scores(*args).flatten())
        )
        for router in routers
    ]
    for rows in ids.split(2):
        model(input_ids=rows, use_cache=False)
    for handle in handles:
        handle.remove()
    for router, scores in seen.items():
        every = torch.cat(scores)
        above = int(len(every) * router.top_k / len(router.weight))
        router.threshold = every.kthvalue(len(every) - above).values.item()


def main(names: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="of frontier.py")
    parser.add_argument("--data", help="a second text to measure on")
    given = parser.parse_args(names)
    torch.set_num_threads(1)
    source = resolve(str(given.work / ROW))
    tokenizer = source.tokenizer
    files = {"shipped": "", **({Path(given.data).stem: given.data} if given.data else {})}
    texts = {name: evaluation_tokens(file, tokenizer, 512, 4096) for name, file in files.items()}
    found: dict[str, Any] = json.loads(OUT.read_text()) if OUT.exists() else {}
    rows: dict[str, Any] = found.get("rows", {})
    for kind in KINDS:
        if kind in rows:
            continue
        if kind == REFITTED:
            dense = resolve("smollm2").load("cpu", torch.float32)
            text = calibration_tokens("", tokenizer, 32, 256, 0)
            model = moesaic.carve(dense, MoREConfig(**FINE), text=text).model.eval()
        else:
            model = source.load("cpu", torch.float32).eval()
        if kind == "variable":
            set_thresholds(model, calibration_tokens("", tokenizer, 16, 256, 0).input_ids)
        row = {}
        for name, tokens in texts.items():
            told = score(model, tokens)
            petals = mean(layer.calls for layer in told.routing.values())
            row[name] = {"perplexity": told.perplexity, "petals": petals}
        rows[kind] = row
        print(kind, json.dumps(row), flush=True)
        record = {**found, "model": "smollm2", "environment": environment(), "rows": rows}
        OUT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
