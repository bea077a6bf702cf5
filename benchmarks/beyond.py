"""What goes beyond the papers, on a dense model: each option alone and together.

    python benchmarks/beyond.py [--model MODEL] [--group NAME ...] [--seed N] [--text FILE ...]

Writes benchmarks/beyond-MODEL.json. Calibrated on the shipped calibration text, whose windows the
seed draws; measured on the shipped evaluation text and, but for options alone, on each FILE, 8,192
tokens at 512 a window. What is there is not measured again, and an interrupted pass continues
behind its last finished layer. Configurations of a group share one pass over the model:
"shared_seconds" is that pass and its sums, "seconds" what a configuration takes beside it, refit
included; neither is told of a pass that was interrupted. "peak_gb" is of the process meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moesaic.arch.dense import Arch
from moesaic.arch.lookup import dense_arch
from moesaic.config import Calibration, RunArgs, chosen_layers
from moesaic.data.text import evaluation_tokens
from moesaic.io.source import resolve
from moesaic.methods.base import Decision
from moesaic.methods.beyond.spread import losses
from moesaic.methods.budget import layer_sizes
from moesaic.methods.more.config import MoREConfig
from moesaic.methods.more.formulas import MoREStats
from moesaic.methods.more.method import MoRE
from moesaic.metrics.measure import environment
from moesaic.metrics.memory import forget_peak, peak_resident
from moesaic.metrics.score import score
from moesaic.observation.job import Finished, Job
from moesaic.plan import Plan
from moesaic.result import Result
from moesaic.surgery import applied

TOKENS = 8192
BEST: dict[str, Any] = {
    "experts": 256,
    "top_k": 0,
    "layers": "all",
    "router": "ridge",
    "refit": True,
}
"""Fine petals."""
MIDDLE: dict[str, Any] = {"experts": 64, "top_k": 32, "layers": "all"}
ALONE = (
    "weighted",
    "router=ridge",
    "router=backbone",
    "refit",
    "bias",
    "all layers",
    "256 petals",
)
"""Options by themselves: measured on the shipped text only."""
BASE = ", before refit"
"""A configuration's name with this: the same plan without what was refitted."""


def together(active: float = 0.8, **more: Any) -> dict[str, MoREConfig]:
    shared: dict[str, Any] = {**BEST, "active": active, **more}
    return {
        "together": MoREConfig(**shared),
        "static, refit": MoREConfig(**{**shared, "router": "cosine", "variant": "static"}),
    }


def ratio(active: float) -> tuple[int, dict[str, MoREConfig]]:
    """MoRE as published, each option added to it alone, and all together.

    Half of the layers cannot go below 0.719: from 0.7 on every layer is carved.
    """
    published = MoREConfig(active=active, layers="last-half" if active > 0.72 else "all")
    configs = {
        "published": published,
        "weighted": replace(published, weighted=True),
        "router=ridge": replace(published, router="ridge"),
        "router=backbone": replace(published, router="backbone"),
        "refit": replace(published, refit=True),
        "bias": replace(published, bias=True),
        "all layers": replace(published, layers="all"),
        "256 petals": replace(published, layers="all", experts=256, top_k=0),
        **together(active),
    }
    if published.layers == "all":
        del configs["all layers"]
    return 100, configs


GROUPS: dict[str, tuple[int, dict[str, MoREConfig]]] = {
    **{f"{active}": ratio(active) for active in (0.9, 0.8, 0.7, 0.6)},
    "propagate": (100, {"together": MoREConfig(**BEST, propagate=True)}),
    "static propagate": (
        100,
        {"static": MoREConfig(layers="all", variant="static", refit=True, propagate=True)},
    ),
    "backbone": (
        100,
        {"backbone": MoREConfig(**{**BEST, "router": "backbone"})},
    ),
    "middle": (
        100,
        {
            "64 petals": MoREConfig(**MIDDLE, router="ridge", refit=True),
            "64 petals, backbone": MoREConfig(**MIDDLE, router="backbone", refit=True),
            "64 petals, cosine": MoREConfig(**MIDDLE, refit=True),
        },
    ),
    "coarse": (100, {"4 petals": MoREConfig(layers="all", router="ridge", refit=True)}),
    "spread": (100, together(spread="sensitivity")),
    "0.6 spread": (100, together(0.6, spread="sensitivity")),
    "32 windows": (32, together()),
    "256 windows": (256, together()),
    "1000 windows": (1000, together()),
}
"""By name: calibration windows of 256 tokens, and configurations that one pass serves."""


@torch.no_grad()
def decide(job: Job[Arch], configs: Mapping[str, MoREConfig], work: Path) -> dict[str, Any]:
    """The plans of configurations that share layers, and what was recovered of each layer.

    The options that decide how tokens are counted or spread must be the same within a group, or be
    named for the configuration that stands alone ("weighted").
    """
    methods = {name: MoRE(config) for name, config in configs.items()}
    sizes = layer_sizes(job.shape, job.arch)
    config = next(iter(configs.values()))
    if config.spread == "sensitivity":
        chosen = chosen_layers(config.layers, len(sizes))
        lost_M = {site.index: losses(site) for site in job.stream(chosen, job.arch.dense)}
    else:
        lost_M = None
    budgets = {name: method.choose(sizes, lost_M) for name, method in methods.items()}
    text = {"calibration": job.tokens.fingerprint}
    finished = {
        name: Finished(work / name, job.request({"config": asdict(c), **text}))
        for name, c in configs.items()
    }
    whole = {n for n, budget in budgets.items() if not any((n, i) in finished[n] for i in budget)}
    union = sorted({i for budget in budgets.values() for i in budget})
    if config.propagate:  # a layer's inputs hang on what became of those before it
        missing = (
            union if any((n, i) not in finished[n] for n in methods for i in budgets[n]) else []
        )
    else:
        missing = [
            i for i in union if any(i in budgets[n] and (n, i) not in finished[n] for n in methods)
        ]
    seconds: defaultdict[str, float] = defaultdict(float)
    began = time.perf_counter()
    stream = job.stream(missing, job.arch.dense, follow=config.propagate)
    for site in stream if missing else ():
        i = site.index
        shared: dict[bool, MoREStats] = {}
        for name, method in methods.items():
            config, found = configs[name], dict[str, Any]()
            if i not in budgets[name] or ((name, i) in finished[name] and not config.propagate):
                continue
            if config.weighted not in shared:
                shared[config.weighted] = method.observe(site)
            started = time.perf_counter()
            if (name, i) not in finished[name]:
                layer = method.decide(shared[config.weighted], site, budgets[name][i])
                if config.refit or config.bias:
                    layer, found = layer.refit(site, weights=config.refit, biases=config.bias)
                finished[name].add(name, i, layer, found)
            if config.propagate:
                site.change = applied(site.layer, job.arch, finished[name][name, i][0])
            seconds[name] += time.perf_counter() - started
            print(f"layer {i} {name} {found}", flush=True)
    common = time.perf_counter() - began - sum(seconds.values())
    decided: dict[str, Any] = {}
    for name, budget in budgets.items():
        kept = {i: finished[name][name, i] for i in budget}
        layers = {i: layer for i, (layer, _) in kept.items()}
        plan = Plan("more", job.base, layers, asdict(configs[name]))
        took = {"seconds": seconds[name], "shared_seconds": common} if name in whole else {}
        decided[name] = plan, {i: found for i, (_, found) in kept.items()}, took
    return decided


REFITTED = ("down_DM", "bias_RD", "down_DW", "bias_D")
"""What a refit brings, of carved layers and of narrower ones."""


def without_refit(plan: Plan) -> Plan:
    layers = {}
    for i, layer in plan.layers.items():
        given: Any = layer
        refitted = {name: None for name in REFITTED if hasattr(given, name)}
        layers[i] = replace(given, **refitted)
    return replace(plan, layers=layers)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", nargs="*", default=[])
    parser.add_argument("--group", nargs="*", default=["dense", "0.8"], choices=["dense", *GROUPS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--before", action="store_true", help="also measure plans before the refit")
    parser.add_argument("--only", nargs="*", help="configurations of the groups; without: all")
    given = parser.parse_args()
    out = Path(__file__).with_name(f"beyond-{given.model}.json")
    record: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    record["environment"] = environment("cpu")
    results = record.setdefault("results", {})
    source = resolve(given.model)
    texts = {"shipped": "", **{Path(t).stem: t for t in given.text}}

    def missing(name: str) -> list[str]:
        known = results.get(name, {}).get("perplexity", {})
        alone = any(f": {option}" in name for option in ALONE)
        return [text for text in texts if text not in known and not (alone and text != "shipped")]

    def measure(name: str, build: Callable[[], Any], **more: Any) -> None:
        model = build() if missing(name) else None
        for text in missing(name):
            tokens = evaluation_tokens(texts[text], source.tokenizer, 512, TOKENS)
            found = score(model, tokens).as_json()
            result = results.setdefault(name, {"perplexity": {}, **more})
            result["perplexity"][text] = found["perplexity"]
            keys = ("total_parameters", "active_parameters", "active_ratio", "router_parameters")
            result |= {key: found[key] for key in keys if key in found}
            out.write_text(json.dumps(record, indent=1) + "\n")
            print(name, result["perplexity"], flush=True)
        gc.collect()

    for group in given.group:
        if group == "dense":
            measure("dense", partial(source.load, "cpu"))
            continue
        samples, configs = GROUPS[group]
        configs = {
            f"{group}: {name}" + (f", seed {given.seed}" if given.seed else ""): config
            for name, config in configs.items()
            if given.only is None or name in given.only
        }
        configs = {name: config for name, config in configs.items() if missing(name)}
        if not configs:
            continue
        drawn = Calibration(samples=samples, length=256, seed=given.seed)
        job = Job(RunArgs(given.model, calibration=drawn), dense_arch)
        work = Path("build/beyond") / given.model / f"{group}-{given.seed}"
        forget_peak()
        decided = decide(job, configs, work)
        more = {"calibration_tokens": samples * 256, "peak_gb": peak_resident() / 1e9}
        for name, (plan, found, took) in decided.items():
            result = Result(MoRE(configs[name]), job, Decision(plan))
            more = more | took
            measure(name, partial(result.build, plan), config=plan.config, **more, layers=found)
            if given.before and configs[name].refit:
                measure(name + BASE, partial(result.build, without_refit(plan)), **more)


if __name__ == "__main__":
    main()
