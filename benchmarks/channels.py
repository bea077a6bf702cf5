"""Perplexity when channels are skipped: WINA, TEAL, and gradients.

    python benchmarks/channels.py --data wikitext2-valid.txt      writes benchmarks/channels.json
    python benchmarks/channels.py --model gemma3-270m ...         channels_gemma3-270m.json

SmolLM2-135M unless said; windows begin with the token that the tokenizer begins a text with, if
there is one. ``kl`` is the divergence from the dense model, in nats a token.

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
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import moesaic
from moesaic.config import MethodConfig
from moesaic.data.text import Tokens, evaluation_tokens
from moesaic.foreign import Model, Tokenizer
from moesaic.io.source import resolve
from moesaic.methods.channels import method
from moesaic.methods.channels.config import TEALConfig, WINAConfig
from moesaic.methods.channels.gradients import gradient_sizes
from moesaic.metrics.forward import runner
from moesaic.metrics.measure import environment
from moesaic.metrics.score import scores_beside

MODEL = "smollm2"
RATIOS = (0.8, 0.6, 0.7, 0.9)


def variants(active: float) -> dict[str, MethodConfig]:
    """What is compared at one ratio."""
    return {
        "WINA by gradients": WINAConfig(active=active, gradients=True),
        "WINA by gradients, thresholds": WINAConfig(
            active=active, gradients=True, choice="threshold"
        ),
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


def windows(source: str, tokenizer: Tokenizer, length: int, tokens: int) -> Tokens:
    """Windows of a text, each begun as the tokenizer begins a text."""
    start = torch.tensor(tokenizer("")["input_ids"], dtype=torch.int64)
    found = evaluation_tokens(source, tokenizer, length - len(start), tokens)
    ids = torch.cat([start.expand(len(found.input_ids), -1), found.input_ids], 1)
    return replace(found, input_ids=ids) if len(start) else found


def figures(model: Model, dense: Model, texts: dict[str, Tokens]) -> dict[str, dict[str, float]]:
    """Perplexity, divergence from the dense model and active ratio on each text."""
    found = {}
    for name, tokens in texts.items():
        measured, _ = scores_beside(runner(model), runner(dense), tokens)
        found[name] = {
            "perplexity": measured.perplexity,
            "kl": measured.kl or 0.0,
            "active": measured.active_ratio,
        }
    return found


def main(names: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="a second text to measure on")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--methods", nargs="+", default=[*variants(1.0)], help="these alone")
    parser.add_argument("--ratios", nargs="+", type=float, default=RATIOS, help="these alone")
    parser.add_argument("--model", default=MODEL)
    options = parser.parse_args(names)
    torch.set_num_threads(1)
    gradients_once()
    source = resolve(options.model)
    told = "" if options.model == MODEL else f"_{options.model}"
    out = Path(__file__).with_name(f"channels{told}.json")
    model = source.load("cpu", torch.float32)
    tokenizer = source.tokenizer
    texts = {"shipped": windows("", tokenizer, 512, options.tokens)}
    if options.data:
        texts[Path(options.data).stem] = windows(options.data, tokenizer, 512, options.tokens)
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"] if out.exists() else []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        said = {"model": options.model, "tokens": options.tokens, "environment": environment()}
        out.write_text(json.dumps({**said, "rows": rows}, indent=1) + "\n")
        print(json.dumps(row), flush=True)

    done = {(row["method"], row.get("ratio"), row.get("draw")) for row in rows}
    if ("dense", None, None) not in done:
        keep({"method": "dense", "texts": figures(model, model, texts)})
    for draw in range(options.draws):
        for name in options.methods:
            for ratio in options.ratios:
                config = variants(ratio)[name]
                calibrated = config.calibrates  # type: ignore[attr-defined]
                if (name, ratio, draw) in done or (draw and not calibrated):
                    continue
                start = time.process_time()
                result = moesaic.carve(
                    model,
                    config,
                    tokenizer=tokenizer,
                    samples=32,
                    length=256,
                    documents=bool(tokenizer("")["input_ids"]),
                    seed=draw,
                )
                took = time.process_time() - start
                keep(
                    {
                        "method": name,
                        "ratio": ratio,
                        "draw": draw,
                        "texts": figures(result.model, model, texts),
                        "cpu_seconds": round(took, 1),
                    }
                )


if __name__ == "__main__":
    main()
