"""What a refit gives back to pruned and condensed layers of tiny-shared-moe.

    python benchmarks/beyond_mixtures.py         writes benchmarks/beyond_mixtures.json

Calibrated on 64 windows of 256 tokens of the shipped calibration text, drawn by three seeds, and
for one configuration on 8k to 256k tokens; measured on the shipped evaluation text, 8,192 tokens
at 512 a window. "seconds" are of one run, the model being loaded and its measurement left out;
"peak_gb" is of the process meanwhile. What is there is not measured again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import moesaic
from moesaic import CondenseConfig, PruneConfig
from moesaic.data.text import evaluation_tokens
from moesaic.io.source import resolve
from moesaic.metrics.measure import environment
from moesaic.metrics.memory import forget_peak, peak_resident
from moesaic.metrics.perplexity import perplexity

MODEL, LENGTH, SAMPLES = "tiny-shared-moe", 256, 64
SEEDS = (0, 1, 2)
SIZES = (32, 128, 512, 1024)
"""Windows: 8k to 256k tokens."""


def asked(experts: int) -> Iterator[tuple[str, Any, int, Sequence[int]]]:
    """What to make, from how many windows, with which seeds."""
    for ratio in (0.5, 0.75):
        config: Any = PruneConfig(keep=round(ratio * experts), criterion="frequency", refit=False)
        yield f"prune to {ratio:.0%} by frequency", config, SAMPLES, SEEDS
    for count in (1, 2):
        for keep in ("shared", "shared+routed"):
            config = CondenseConfig(layers=count, keep=keep, layer_search="rank", refit=False)
            yield f"condense {count} layers to {keep}", config, SAMPLES, SEEDS
    for windows in SIZES:
        config = PruneConfig(keep=round(0.5 * experts), criterion="frequency", refit=False)
        yield f"prune to 50% by frequency, {windows * LENGTH:,} tokens", config, windows, (0,)
    for ratio in (0.5, 0.75):  # the search over sets takes minutes
        config = PruneConfig(keep=round(ratio * experts), criterion="reconstruction", refit=False)
        yield f"prune to {ratio:.0%} by reconstruction", config, SAMPLES, SEEDS


def main() -> None:
    source = resolve(MODEL)
    tokens = evaluation_tokens("", source.tokenizer, 512, 8192)
    model = source.load("cpu")
    out = Path(__file__).with_suffix(".json")
    record: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"results": {}}
    record["environment"] = environment("cpu")
    results = record["results"]
    if "original" not in results:
        results["original"] = perplexity(model, tokens).perplexity
    for name, config, windows, seeds in asked(source.config.num_experts):
        verb: Any = moesaic.prune if isinstance(config, PruneConfig) else moesaic.condense
        for refit in (False, True):
            label = f"{name}, refit" if refit else name
            if label in results:
                continue
            found, seconds = [], 0.0
            forget_peak()
            for seed in seeds:
                text = {"samples": windows, "length": LENGTH, "seed": seed}
                started = time.perf_counter()
                result = verb(
                    model, replace(config, refit=refit), tokenizer=source.tokenizer, **text
                )
                seconds += time.perf_counter() - started
                found.append(perplexity(result.model, tokens).perplexity)
            results[label] = {
                "perplexity": found,
                "mean": mean(found),
                "spread": stdev(found) if len(found) > 1 else None,
                "seconds": seconds / len(seeds),
                "peak_gb": peak_resident() / 1e9,
            }
            print(label, results[label], flush=True)
            out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
