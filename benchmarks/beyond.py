"""What goes beyond the papers, on SmolLM2-135M: each option alone and together.

    python benchmarks/beyond.py [--group NAME ...] [--only NAME ...] [--text FILE ...]

Writes benchmarks/beyond.json.

Calibrated on the shipped calibration text; measured on the shipped evaluation text and on each
FILE, 8,192 tokens at 512 a window. Results that are there are not measured again. Configurations
of the same layers and calibration share one pass over the model.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import moesaic
from moesaic.budget import layer_sizes
from moesaic.data import evaluation_tokens
from moesaic.hub import resolve
from moesaic.measure import environment
from moesaic.methods import MoRE, MoREConfig
from moesaic.methods.refit import refitted
from moesaic.metrics.score import score
from moesaic.plan import Plan
from moesaic.result import Job

OUT = Path(__file__).with_suffix(".json")
TOKENS = 8192
FINE = {"experts": 256, "top_k": 120, "layers": "all"}
LAST = {"experts": 64, "top_k": 16, "layers": "last-half"}


def more(**options: Any) -> MoREConfig:
    return MoREConfig(active=0.8, **options)


GROUPS: dict[str, tuple[int, dict[str, MoREConfig]]] = {
    "all": (
        100,
        {
            "fine petals, ridge, refit": more(**FINE, router="ridge", refit=True),
            "fine petals, ridge": more(**FINE, router="ridge"),
            "fine petals, backbone, refit": more(**FINE, router="backbone", refit=True),
            "static, refit": more(**FINE, variant="static", refit=True),
        },
    ),
}
"""By name: calibration windows of 256 tokens, and configurations that one pass serves."""


@torch.no_grad()
def decide(job: Job, configs: dict[str, MoREConfig]) -> tuple[dict[str, Plan], dict[str, Any]]:
    """The plans of configurations that share layers, and what was seen of each layer."""
    methods = {name: MoRE(config) for name, config in configs.items()}
    sizes = layer_sizes(job.shape, job.arch)
    budgets = {name: method.choose(sizes) for name, method in methods.items()}
    layers: dict[str, dict[int, Any]] = {name: {} for name in methods}
    seen: dict[str, dict[int, Any]] = {name: {} for name in methods}
    observer = next(iter(methods.values()))
    for site in job.stream(next(iter(budgets.values())).keys()):
        i, stats = site.index, observer.observe(site)
        for name, method in methods.items():
            config = configs[name]
            layers[name][i] = method.decide(stats, site, budgets[name][i])
            if config.refit or config.bias:
                layers[name][i], seen[name][i] = refitted(
                    layers[name][i], site, config.refit, config.bias
                )
                print(name, i, seen[name][i], flush=True)
    plans = {
        name: Plan("more", job.base, layers[name], asdict(config), job.tokens.fingerprint)
        for name, config in configs.items()
    }
    return plans, seen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--text", nargs="*", default=[])
    parser.add_argument("--group", nargs="*", default=list(GROUPS))
    given = parser.parse_args()
    record: dict[str, Any] = json.loads(OUT.read_text()) if OUT.exists() else {}
    source = resolve("smollm2")
    texts = {"shipped": "", **{Path(t).name: t for t in given.text}}
    tokens = {n: evaluation_tokens(t, source.tokenizer, 512, TOKENS) for n, t in texts.items()}

    def measured(model: Any) -> dict[str, Any]:
        scores = {name: score(model, some).as_json() for name, some in tokens.items()}
        found = next(iter(scores.values()))
        keys = ("total_parameters", "active_parameters", "active_ratio", "router_parameters")
        return {
            "perplexity": {name: s["perplexity"] for name, s in scores.items()},
            **{key: found[key] for key in keys if key in found},
        }

    def keep(name: str, result: dict[str, Any]) -> None:
        record[name] = result
        OUT.write_text(json.dumps(record, indent=1) + "\n")
        print(name, result["perplexity"], flush=True)

    record["environment"] = environment("cpu")
    if "dense" not in record:
        keep("dense", measured(source.load("cpu")))
    for group in given.group:
        samples, configs = GROUPS[group]
        missing = {
            name: config
            for name, config in configs.items()
            if name not in record and (not given.only or name in given.only)
        }
        if not missing:
            continue
        options = {"samples": samples, "length": 256, "seed": 0, "tokenizer": None}
        job = Job.open("smollm2", moesaic.arch.dense_arch, "", **options, device="cpu", dtype=None)
        started = time.perf_counter()
        plans, seen = decide(job, missing)
        seconds = time.perf_counter() - started
        for name, plan in plans.items():
            result = measured(job.result(plan, {}).build(plan))
            shared = {"calibration_tokens": samples * 256, "seconds_of_the_pass": seconds}
            keep(name, {**result, **shared, "config": plan.config, "layers": seen[name]})
            gc.collect()


if __name__ == "__main__":
    main()
