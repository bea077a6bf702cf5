"""What pruning and skipping cost in perplexity, criterion by criterion.

On models that ship, or any folder: held-out text that ships, per domain. Part one prunes by every
criterion at each size. Part two calibrates on one domain and measures on each. Part three
restricts a fine-grained model to 12 experts and reports how far greedy removal with swaps is from
the best of all sets. Part four skips, against running fewer experts for every token; part five
gives each layer its own number of them.

    python benchmarks/prune_quality.py --out benchmarks/prune_quality.json
    python benchmarks/prune_quality.py --parts by_layer --samples 64 --out benchmarks/fewer.json
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moesaic
from moesaic import LExIConfig, PruneConfig, SkipConfig
from moesaic.data.text import evaluation_tokens
from moesaic.io.source import resolve
from moesaic.methods.naee.criteria import CRITERIA
from moesaic.metrics.measure import environment
from moesaic.metrics.perplexity import perplexity

DOMAINS = ("prose", "reference", "code")


def measured(model: Any, tokenizer: Any, args: argparse.Namespace) -> dict[str, float]:
    """Perplexity on all the held-out text and on each domain of it; mean experts a token."""
    found = {}
    for name in ("", *DOMAINS):
        tokens = evaluation_tokens(name, tokenizer, args.length, args.max_tokens)
        quality = perplexity(model, tokens)
        found[name or "all"] = quality.perplexity
        if not name:
            layers = quality.routing.values()
            found["calls"] = sum(r.calls for r in layers) / max(1, len(layers))
    return found


def by_criterion(name: str, sizes: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """Every criterion at every size, from one file of statistics."""
    source = resolve(name)
    tokenizer = source.tokenizer
    found: dict[str, Any] = {"original": measured(source.load(), tokenizer, args)}
    with tempfile.TemporaryDirectory() as folder:
        stats = Path(folder) / "stats"
        start = time.perf_counter()
        moesaic.observe(name, stats, samples=args.samples, length=args.window)
        found["seconds_observing"] = time.perf_counter() - start
        for size in sizes:
            for criterion in CRITERIA:
                seeds = range(args.seeds) if criterion == "random" else [0]
                for seed in seeds:
                    config = PruneConfig(keep=size, criterion=criterion, seed=seed, refit=False)
                    start = time.perf_counter()
                    result = moesaic.prune(name, config, stats=str(stats))
                    seconds = time.perf_counter() - start
                    label = f"{criterion}-{seed}" if criterion == "random" else criterion
                    found.setdefault(str(size), {})[label] = {
                        **measured(result.model, tokenizer, args),
                        "seconds_deciding": seconds,
                        "greedy_gap": [a.get("greedy_gap") for a in result.analyses.values()],
                    }
            config = PruneConfig(keep=size, progressive=True, refit=False)
            result = moesaic.prune(name, config, samples=args.samples, length=args.window)
            found[str(size)]["progressive"] = measured(result.model, tokenizer, args)
    return found


def by_domain(name: str, size: int, args: argparse.Namespace) -> dict[str, Any]:
    """Calibrated on one domain, measured on each."""
    tokenizer, found = resolve(name).tokenizer, {}
    for domain in ("prose", "shipped:code", "shipped:code=1,prose=1"):
        result = moesaic.prune(
            name,
            PruneConfig(keep=size, refit=False),
            calibration=domain,
            samples=args.samples,
            length=args.window,
        )
        found[domain] = measured(result.model, tokenizer, args)
    return found


def gaps(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Greedy removal with swaps against the best of all sets, at 12 experts."""
    small = moesaic.prune(
        name,
        PruneConfig(keep=12, criterion="frequency", refit=False),
        samples=args.samples,
        length=args.window,
    )
    tokenizer, found = resolve(name).tokenizer, {}
    for size in (10, 8, 6):
        result = moesaic.prune(
            small.model,
            PruneConfig(keep=size, refit=False),
            tokenizer=tokenizer,
            samples=args.samples,
            length=args.window,
        )
        found[str(size)] = [a["greedy_gap"] for a in result.analyses.values()]
    return found


def skipping(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The paper's median; and as many experts a token, in the mean, as a lower top-k runs."""
    source = resolve(name)
    tokenizer = source.tokenizer
    top_k = source.config.num_experts_per_tok
    options = {"samples": args.samples, "length": args.window}
    found: dict[str, Any] = {
        "median": measured(moesaic.skip(name, **options).model, tokenizer, args)
    }
    for calls in range(1, top_k):
        skips = moesaic.skip(name, SkipConfig(calls=calls), **options).model
        fewer = source.load()
        fewer.config.num_experts_per_tok = calls
        for module in fewer.modules():
            if hasattr(module, "top_k"):
                module.top_k = calls
        found[str(calls)] = {
            "skipping": measured(skips, tokenizer, args),
            "fewer_experts_per_token": measured(fewer, tokenizer, args),
        }
    return found


def by_layer(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Half the experts a token: each layer's own number, against one for all, by draws of text."""
    source = resolve(name)
    held_out = evaluation_tokens("", source.tokenizer, args.length, args.max_tokens)
    found: dict[str, Any] = {"load": os.getloadavg()[0]}
    mean = source.config.num_experts_per_tok // 2
    one = moesaic.skip(name, LExIConfig(experts_per_token=mean)).model
    found |= {"mean": mean, "one_for_all": perplexity(one, held_out).perplexity, "by_layer": []}
    for seed in range(args.seeds):
        result = moesaic.skip(
            name,
            LExIConfig(experts_per_token=mean, by_layer=True),
            samples=args.samples,
            length=args.window,
            seed=seed,
        )
        score = perplexity(result.model, held_out).perplexity
        numbers = [seen["calls_per_token"] for seen in result.analyses.values()]
        found["by_layer"].append({"seed": seed, "perplexity": score, "experts": numbers})
        print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--coarse", default="tiny-moe")
    parser.add_argument("--fine", default="tiny-shared-moe")
    parser.add_argument("--sizes", type=int, nargs="+", default=[6, 4])
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=16_384)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", help="criteria, domains, skipping ...; default all")
    args = parser.parse_args()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "criteria": lambda: by_criterion(args.coarse, args.sizes, args),
        "domains": lambda: by_domain(args.coarse, min(args.sizes), args),
        "skipping": lambda: skipping(args.coarse, args),
        "gaps_at_12_experts": lambda: gaps(args.fine, args),
        "by_layer": lambda: by_layer(args.fine, args),
        "skipping_fine": lambda: skipping(args.fine, args),
    }
    record: dict[str, Any] = {
        "benchmark": "prune_quality",
        "arguments": {k: v for k, v in vars(args).items() if k != "out"},
        "environment": environment(),
    }
    for name in args.parts or parts:
        record[name] = parts[name]()
        if args.out:
            args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
