"""Slimming against every other way to make a mixture smaller, at the same parameters.

    python benchmarks/slim.py --data wikitext2-valid.txt      writes benchmarks/slim.json

For each of three draws of the calibration text and each share of routed-expert parameters that
stays: perplexity and KL from the original (nats a token) on the held-out text that ships and on
``--data``. ``condense`` takes as many layers as come nearest to the same size, for the first draw.
Results are written as they come; a run that is started again goes on.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers.utils import logging

import moesaic
from moesaic import CondenseConfig, PruneConfig, SlimConfig, api
from moesaic.arch.lookup import moe_arch
from moesaic.data.text import Tokens, evaluation_tokens
from moesaic.io.source import resolve
from moesaic.metrics.measure import environment

HERE = Path(__file__).parent
Config = SlimConfig | PruneConfig | CondenseConfig
PLAIN: dict[str, Any] = {"score": "energy", "refit": False}
"""What a row of ``slim`` is unless it says otherwise."""
SLIM: dict[str, dict[str, Any]] = {
    "slim energy": {},
    "slim energy, refit": {"refit": True},
    "slim surgeon, refit": {"score": "surgeon", "refit": True},
    "slim uneven": {"uneven": True},
    "slim uneven surgeon, refit": {"uneven": True, "score": "surgeon", "refit": True},
    "slim heapr": {"score": "heapr"},
    "slim random": {"score": "random"},
    "slim spread": {"spread": "sensitivity"},
    "slim uneven spread surgeon, refit": {
        "uneven": True,
        "spread": "sensitivity",
        "score": "surgeon",
        "refit": True,
    },
    "slim experts auto": {"experts": "auto"},
}
PRUNE: dict[str, dict[str, Any]] = {
    "prune reconstruction, refit": {"refit": True},
    "prune reap, refit": {"criterion": "reap", "refit": True},
    "prune reap": {"criterion": "reap"},
    "prune weighted-ean, refit": {"criterion": "weighted-ean", "refit": True},
    "prune weighted-ean": {"criterion": "weighted-ean"},
    "prune reconstruction": {},
    "prune frequency": {"criterion": "frequency"},
}
OTHERS = ("pairwise", "random", "gate", "ean", "man", "msan", "aimer")
PRUNE |= {f"prune {name}": {"criterion": name} for name in OTHERS}
FIRST = (
    "slim uneven spread surgeon, refit",
    "slim uneven surgeon, refit",
    "slim surgeon, refit",
    "slim uneven",
    "slim energy, refit",
    "prune reconstruction, refit",
    "slim energy",
)
THEN = (
    "prune reap, refit",
    "prune reconstruction",
    "prune reap",
    "prune weighted-ean, refit",
    "prune weighted-ean",
    "slim heapr",
    "slim random",
    "prune frequency",
)
HALF = (
    *("slim spread", "slim experts auto"),
    *(f"prune {name}" for name in OTHERS),
)
"""Tried at the first of the shares only."""


@torch.no_grad()
def logits_of(model: Any, tokens: Tokens) -> torch.Tensor:
    """Logits of all windows (N, T, V), float32."""
    batches = tokens.input_ids.split(4)
    return torch.cat([model(input_ids=ids, use_cache=False).logits.float() for ids in batches])


def figures(
    found_NTV: torch.Tensor, tokens: Tokens, original_NTV: torch.Tensor
) -> dict[str, float]:
    """Perplexity, and KL(original || model) in nats a token."""
    found, original = (x[:, :-1].log_softmax(-1) for x in (found_NTV, original_NTV))
    nll = F.nll_loss(found.flatten(0, 1), tokens.input_ids[:, 1:].flatten())
    kl = (original.exp() * (original - found)).sum(-1).mean()
    return {"perplexity": nll.exp().item(), "kl": kl.item()}


class Model:
    """A model that ships, the texts it is measured on, and what it makes of them."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, source = Path(name).name, resolve(name)
        self.tokenizer = source.tokenizer
        self.model = source.load(dtype=getattr(torch, args.dtype))
        arch = moe_arch(self.model.config)
        self.layers = len(arch.moe_layers(self.model))
        self.experts = arch.mixture(arch.layers(self.model)[arch.moe_layers(self.model)[0]]).count
        texts = {"ships": "", **({"data": args.data} if args.data else {})}
        self.texts = {
            key: evaluation_tokens(text, self.tokenizer, args.length, args.max_tokens)
            for key, text in texts.items()
        }
        self.original = {key: logits_of(self.model, t) for key, t in self.texts.items()}

    def measured(self, model: Any) -> dict[str, Any]:
        """Figures of a model on every text, and its parameters."""
        found: dict[str, Any] = {
            key: figures(logits_of(model, t), t, self.original[key])
            for key, t in self.texts.items()
        }
        found["parameters"] = sum(p.numel() for p in model.parameters())
        return found

    def run(self, config: Config, draw: int, args: argparse.Namespace) -> dict[str, Any]:
        """What a verb makes of it, measured."""
        start = time.process_time()
        result = api.verb(
            config.verb,
            self.model,
            config,
            tokenizer=self.tokenizer,
            samples=args.samples,
            length=args.window,
            seed=draw,
        )
        model = result.model
        found = self.measured(model)
        found["cpu_seconds"] = time.process_time() - start
        refit = [a["refit"]["recovered"] for a in result.analyses.values() if "refit" in a]
        return {**found, **({"recovered": refit} if refit else {})}

    def forward_seconds(self, draw: int, args: argparse.Namespace) -> dict[str, float]:
        """CPU seconds of slim without a refit, and of one forward pass over the same tokens."""
        from moesaic.data.text import calibration_tokens

        tokens = calibration_tokens("", self.tokenizer, args.samples, args.window, draw)
        plain = SlimConfig(**PLAIN)
        _ = moesaic.slim(self.model, plain, text=tokens).plan  # warm
        start = time.process_time()
        with torch.no_grad():
            for batch in tokens.batches(2048):
                self.model.base_model(input_ids=batch.input_ids, use_cache=False)
        middle = time.process_time()
        _ = moesaic.slim(self.model, plain, text=tokens).plan
        return {"forward": middle - start, "slim": time.process_time() - middle}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "slim.json")
    parser.add_argument("--models", nargs="+", default=["tiny-shared-moe", "tiny-moe"])
    parser.add_argument("--dtype", default="float32", help="type that models are made and run in")
    parser.add_argument("--data", default="", help="a second text to measure on")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.5, 0.75, 0.25])
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--labels", nargs="+", help="these rows alone")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=4096)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    record: dict[str, Any] = {
        "benchmark": "slim",
        "arguments": {k: str(Path(v).name) if k == "data" else v for k, v in vars(args).items()},
        "environment": environment(),
        "original": {},
        "seconds": {},
        "results": {},
    }
    del record["arguments"]["out"], record["arguments"]["labels"]
    if args.out.exists():
        earlier = json.loads(args.out.read_text())
        record |= {key: earlier[key] for key in ("original", "seconds", "results")}

    def note(part: str, key: str, make: Callable[[], Any]) -> None:
        if key not in record[part]:
            record[part][key] = make()
            args.out.write_text(json.dumps(record, indent=1) + "\n")
            print(key, record[part][key], flush=True)

    models = [Model(name, args) for name in args.models]
    for one in models:
        note("original", one.name, partial(one.measured, one.model))
        note("seconds", one.name, partial(one.forward_seconds, 0, args))
    for labels in (FIRST, THEN, HALF):
        for keep, one in product(args.keep[:1] if labels is HALF else args.keep, models):
            for draw, label in product(range(args.draws), labels):
                if args.labels and label not in args.labels:
                    continue
                if label in SLIM:
                    config: Config = SlimConfig(keep=keep, **{"seed": draw, **PLAIN, **SLIM[label]})
                else:
                    said = {"seed": draw, "refit": False, **PRUNE[label]}
                    config = PruneConfig(keep=round(keep * one.experts), **said)
                key = f"{one.name} | {keep:g} | {label} | {draw}"
                note("results", key, partial(one.run, config, draw, args))
            if labels is THEN and (not args.labels or "condense" in args.labels):
                layers = max(1, round((1 - keep) * one.layers))
                shared = one.model.config.model_type != "mixtral"
                stays: Any = "shared" if shared else "shared+routed"
                config = CondenseConfig(layers=layers, keep=stays, refit=False)
                key = f"{one.name} | {keep:g} | condense | 0"
                note("results", key, partial(one.run, config, 0, args))


if __name__ == "__main__":
    main()
