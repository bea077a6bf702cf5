"""What a refit gives back to pruned and condensed layers of tiny-shared-moe.

    python benchmarks/beyond_mixtures.py         writes benchmarks/beyond_mixtures.json

Calibrated on 64 windows of 256 tokens of the shipped calibration text; measured on the shipped
evaluation text, 8,192 tokens at 512 a window. What is there is not measured again.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import moesaic
from moesaic.data import evaluation_tokens
from moesaic.hub import resolve
from moesaic.measure import environment
from moesaic.methods import CondenseConfig, PruneConfig
from moesaic.metrics.perplexity import perplexity

MODEL = "tiny-shared-moe"
SEEDS = (0,)


def configs(experts: int) -> dict[str, Any]:
    return {
        **{
            f"prune to {ratio:.0%} by {criterion}": PruneConfig(
                keep=round(ratio * experts), criterion=criterion
            )
            for criterion in ("reconstruction", "frequency")
            for ratio in (0.75, 0.5)
        },
        **{
            f"condense {count} layers to {keep}": CondenseConfig(
                layers=count, keep=keep, layer_search="rank"
            )
            for count in (1, 2)
            for keep in ("shared", "shared+routed")
        },
    }


def main() -> None:
    source = resolve(MODEL)
    tokens = evaluation_tokens("", source.tokenizer, 512, 8192)
    model = source.load("cpu")
    out = Path(__file__).with_suffix(".json")
    record: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"results": {}}
    record |= {"environment": environment("cpu"), "seeds": SEEDS}
    if "original" not in record["results"]:
        record["results"]["original"] = perplexity(model, tokens).perplexity
    count = source.config.num_experts
    for name, config in configs(count).items():
        verb: Any = moesaic.prune if isinstance(config, PruneConfig) else moesaic.condense
        for refit in (False, True):
            label = f"{name}, refit" if refit else name
            if label in record["results"]:
                continue
            found, started = [], time.perf_counter()
            for seed in SEEDS:
                asked = replace(config, refit=refit)
                text = {"samples": 64, "length": 256, "seed": seed}
                result = verb(model, asked, tokenizer=source.tokenizer, **text)
                found.append(perplexity(result.model, tokens).perplexity)
            record["results"][label] = {
                "perplexity": found,
                "mean": mean(found),
                "seconds": (time.perf_counter() - started) / len(SEEDS),
            }
            print(label, record["results"][label], flush=True)
            out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
