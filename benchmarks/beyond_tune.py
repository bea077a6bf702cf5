"""What training adds to carved models: routers distilled, low-rank updates.

    python benchmarks/beyond_tune.py [--model MODEL] [--active RATIO] [--steps N] [--text FILE ...]

Writes benchmarks/beyond_tune.json. Carved on 100 windows of 256 tokens of the shipped calibration
text; then trained on others of it, every time from the carved model, towards the original's
next-token distribution: STEPS steps of 4 windows. Measured on the shipped evaluation text and on
each FILE, 8,192 tokens at 512 a window. What is there is not measured again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Literal

import torch

import moesaic
from moesaic import MoREConfig, Tokens, TuneConfig
from moesaic.data.text import calibration_tokens, evaluation_tokens
from moesaic.io.source import resolve
from moesaic.metrics.measure import environment
from moesaic.metrics.perplexity import perplexity

LENGTH, BATCH = 256, 4
RATES: dict[Literal["routers", "lora"], float] = {"routers": 1e-4, "lora": 3e-4}
OUT = Path(__file__).with_suffix(".json")


def configs(active: float) -> dict[str, MoREConfig]:
    best = MoREConfig(active=active, experts=256, top_k=0, layers="all", router="ridge", refit=True)
    static = MoREConfig(active=active, layers="all", variant="static", refit=True)
    return {"published": MoREConfig(active=active), "best": best, "static, refit": static}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny-dense")
    parser.add_argument("--active", type=float, default=0.6)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="*", default=["published", "best", "static, refit"])
    parser.add_argument("--text", nargs="*", default=[])
    given = parser.parse_args()
    source = resolve(given.model)
    base = source.load("cpu", torch.float32)
    texts = {"shipped": "", **{Path(t).stem: t for t in given.text}}
    held = {n: evaluation_tokens(t, source.tokenizer, 512, 8192) for n, t in texts.items()}
    count = 100 + given.steps * BATCH
    windows = calibration_tokens("", source.tokenizer, count, LENGTH).input_ids
    calibration, training = windows[:100], windows[100:]
    record: dict[str, Any] = json.loads(OUT.read_text()) if OUT.exists() else {"results": {}}
    record["environment"] = environment("cpu")
    title = f"{given.model} at {given.active:g}, {len(training) * LENGTH:,} tokens"
    results = record["results"].setdefault(title, {})

    def keep(name: str, model: Any, **more: Any) -> None:
        found = {text: perplexity(model, tokens).perplexity for text, tokens in held.items()}
        results[name] = {"perplexity": found, **more}
        OUT.write_text(json.dumps(record, indent=1) + "\n")
        print(title, name, results[name], flush=True)

    if "original" not in results:
        keep("original", base)
    for name in given.only:
        wanted = [what for what in RATES if name != "static, refit" or what == "lora"]
        if all(known in results for known in (name, *(f"{name}, {what}" for what in wanted))):
            continue
        carved = moesaic.carve(base, configs(given.active)[name], calibration=calibration).model
        if name not in results:
            keep(name, carved)
        for what in wanted:
            if f"{name}, {what}" in results:
                continue
            config = TuneConfig(
                what=what, teacher=given.model, steps=given.steps, batch=BATCH, lr=RATES[what]
            )
            started = time.perf_counter()
            tuned = moesaic.tune(carved, config, text=Tokens(training), teacher=base)
            keep(
                f"{name}, {what}",
                tuned.model,
                seconds=time.perf_counter() - started,
                trained_parameters=tuned.summary["training"]["trained_parameters"],
                lr=RATES[what],
            )


if __name__ == "__main__":
    main()
