"""Perplexity of SmolLM2-135M when channels are skipped: WINA, TEAL, and one threshold by gradients.

    python benchmarks/channels.py --data wikitext2-valid.txt      writes benchmarks/channels.json

Every token is measured as at decoding, windows of 512. ``active`` is the share of the projections'
parameters that a token read on that text. Calibrated methods see 32 windows of 256 tokens of the
text that ships; gradients are taken once for each draw. ``--data`` is a second text, on which
nothing is calibrated. Rows are written as they come; those that are there are kept, so a run can be
split.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

import moesaic
from moesaic.config import MethodConfig
from moesaic.data.text import Tokens, evaluation_tokens
from moesaic.foreign import Model
from moesaic.io.source import resolve
from moesaic.methods.channels import method
from moesaic.methods.channels.config import TEALConfig, WINAConfig
from moesaic.methods.channels.gradients import gradient_sizes
from moesaic.metrics.measure import environment
from moesaic.metrics.score import score

OUT = Path(__file__).with_suffix(".json")
RATIOS = (0.8, 0.6, 0.7, 0.9)


def variants(active: float) -> dict[str, MethodConfig]:
    """What is compared at one ratio."""
    return {
        "WINA, one threshold by gradients": WINAConfig(active=active, gradients=True),
        "WINA": WINAConfig(active=active),
        "WINA, thresholds": WINAConfig(active=active, choice="threshold"),
        "TEAL, uniform shares": TEALConfig(active=active, shares="uniform"),
        "TEAL": TEALConfig(active=active),
    }


def gradients_once() -> None:
    """Let all ratios of a draw share their gradients."""
    original = gradient_sizes

    @cache
    def known(fingerprint: str, *arguments: Any) -> Any:
        return original(*held[0])

    held: list[Any] = []

    def sizes(*arguments: Any) -> Any:
        held[:] = [arguments]
        tokens: Tokens = arguments[3]
        return known(tokens.fingerprint)

    setattr(method, "gradient_sizes", sizes)  # noqa: B010


def figures(model: Model, texts: dict[str, Tokens]) -> dict[str, dict[str, float]]:
    """Perplexity and active ratio of a live model on each text."""
    found = {}
    for name, tokens in texts.items():
        measured = score(model, tokens)
        found[name] = {"perplexity": measured.perplexity, "active": measured.active_ratio}
    return found


def main(names: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="a second text to measure on")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--methods", nargs="+", default=[*variants(1.0)], help="these alone")
    parser.add_argument("--ratios", nargs="+", type=float, default=RATIOS, help="these alone")
    options = parser.parse_args(names)
    torch.set_num_threads(1)
    gradients_once()
    source = resolve("smollm2")
    model = source.load("cpu", torch.float32)
    tokenizer = source.tokenizer
    texts = {"shipped": evaluation_tokens("", tokenizer, 512, options.tokens)}
    if options.data:
        texts[Path(options.data).stem] = evaluation_tokens(
            options.data, tokenizer, 512, options.tokens
        )
    rows: list[dict[str, Any]] = json.loads(OUT.read_text())["rows"] if OUT.exists() else []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        said = {"model": "smollm2", "tokens": options.tokens, "environment": environment()}
        OUT.write_text(json.dumps({**said, "rows": rows}, indent=1) + "\n")
        print(json.dumps(row), flush=True)

    done = {(row["method"], row.get("ratio"), row.get("draw")) for row in rows}
    if ("dense", None, None) not in done:
        keep({"method": "dense", "texts": figures(model, texts)})
    for draw in range(options.draws):
        for name in options.methods:
            for ratio in options.ratios:
                config = variants(ratio)[name]
                calibrated = config.calibrates  # type: ignore[attr-defined]
                if (name, ratio, draw) in done or (draw and not calibrated):
                    continue
                start = time.process_time()
                result = moesaic.carve(
                    model, config, tokenizer=tokenizer, samples=32, length=256, seed=draw
                )
                took = time.process_time() - start
                keep(
                    {
                        "method": name,
                        "ratio": ratio,
                        "draw": draw,
                        "texts": figures(result.model, texts),
                        "cpu_seconds": round(took, 1),
                    }
                )


if __name__ == "__main__":
    main()
