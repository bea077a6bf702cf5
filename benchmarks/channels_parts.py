"""Is it the score or the share of each projection that `--gradients` gains by? One draw, SmolLM2.

    python benchmarks/channels_parts.py --data wikitext2-valid.txt

Channels by WINA's score or by the gradients' one, above thresholds that leave each projection the
same share, or the share that gradients give it; all from one calibration (32 windows of 256 tokens
of the text that ships). Perplexity, and the divergence from the dense model in nats a token, on
4,096 tokens, windows of 512. Writes benchmarks/channels_parts.json; rows that are there stay.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import moesaic
from moesaic.data.text import evaluation_tokens
from moesaic.io.source import resolve
from moesaic.layers.channels import ChannelsLayer
from moesaic.methods.channels import method
from moesaic.methods.channels.config import WINAConfig
from moesaic.methods.channels.scores import Scores, one_threshold
from moesaic.metrics.forward import runner
from moesaic.metrics.measure import environment
from moesaic.metrics.score import scores_beside
from moesaic.nn.channels import ChannelLinear, Cut
from moesaic.observation.job import Finished, Job

OUT = Path(__file__).with_suffix(".json")
RATIOS = (0.8, 0.7, 0.6)
KINDS = {
    "WINA's score, one share": ("norm", "one"),
    "gradients' score, one share": ("gradients", "one"),
    "WINA's score, gradients' shares": ("norm", "gradients"),
    "gradients' score and shares": ("gradients", "gradients"),
}
"""By label: whose score, and whose shares."""


class Both(method.Channels):
    """Keeps the scores of both kinds on its way."""

    factors: dict[str, dict[str, torch.Tensor]]
    seen: dict[str, dict[str, Scores]]
    weights: dict[str, float]
    outputs: dict[str, float]

    def decided_at_once(
        self, job: Job[Any], wanted: method.Wanted, share: float, finished: Finished
    ) -> Iterator[tuple[int, ChannelsLayer]]:
        sizes = self._gradients(job, wanted, finished)
        for part in (kept := type(self)).__annotations__:
            setattr(kept, part, {})
        for kind in ("norm", "gradients"):
            kept.factors[kind], kept.seen[kind] = {}, {}
        for block in self._blocks(job, wanted):
            i, found = block.index, wanted[block.index]
            factors: dict[str, dict[str, Any]] = {
                "norm": {p.path: self._factor(block.layer, p, job.arch) for p in found},
                "gradients": {p.path: sizes[i, p.path] for p in found},
            }
            for kind, those in factors.items():
                kept.seen[kind] |= {f"{i}.{k}": v for k, v in block.scored(found, those).items()}
                kept.factors[kind] |= {f"{i}.{k}": v for k, v in those.items()}
            kept.weights |= {f"{i}.{p.path}": p.run for p in found}
            kept.outputs |= {f"{i}.{p.path}": float(p.outputs) for p in found}
            block.pass_on()
        yield from super().decided_at_once(job, wanted, share, finished)


def shares_of(kind: str, active: float) -> Mapping[str, float]:
    """The share of each projection."""
    if kind == "one":
        return dict.fromkeys(Both.weights, active)
    seen = Both.seen["gradients"]
    thresholds = one_threshold(seen, Both.weights, Both.outputs, active)
    return {name: seen[name].share(threshold) for name, threshold in thresholds.items()}


def main(names: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="a second text to measure on")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS])
    parser.add_argument("--ratios", nargs="+", type=float, default=RATIOS)
    given = parser.parse_args(names)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = json.loads(OUT.read_text())["rows"] if OUT.exists() else []
    done: Collection[tuple[str, float]] = {(row["kind"], row["ratio"]) for row in rows}
    source = resolve("smollm2")
    dense = source.load("cpu", torch.float32)
    files = {"shipped": "", **({Path(given.data).stem: given.data} if given.data else {})}
    texts = {n: evaluation_tokens(f, source.tokenizer, 512, 4096) for n, f in files.items()}
    setattr(method, "Channels", Both)  # noqa: B010
    model = moesaic.carve(
        dense,
        WINAConfig(active=0.8, gradients=True),
        tokenizer=source.tokenizer,
        samples=32,
        length=256,
    ).model
    modules = {
        f"{i}.{name}": module
        for i, layer in enumerate(model.model.layers)
        for name, module in layer.named_modules()
        if isinstance(module, ChannelLinear)
    }
    for ratio in given.ratios:
        for kind in given.kinds:
            if (kind, ratio) in done:
                continue
            score, shares = KINDS[kind]
            for name, share in shares_of(shares, ratio).items():
                threshold = Both.seen[score][name].threshold(share)
                modules[name].cut = Cut(share, threshold=threshold)
                modules[name].scale = Both.factors[score][name].float().flatten()
            row: dict[str, Any] = {"kind": kind, "ratio": ratio}
            for text, tokens in texts.items():
                found, _ = scores_beside(runner(model), runner(dense), tokens)
                row[text] = {
                    "perplexity": found.perplexity,
                    "kl": found.kl,
                    "active": found.active_ratio,
                }
            rows.append(row)
            record = {"model": "smollm2", "environment": environment(), "rows": rows}
            OUT.write_text(json.dumps(record, indent=1) + "\n")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
