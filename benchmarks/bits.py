"""Fewer neurons, fewer bits, or both: perplexity over the bytes of a GGUF file, in llama.cpp.

    LLAMA_CPP=folder python benchmarks/bits.py [MODEL ...]      writes benchmarks/bits.json

Every file is made by ``moesaic export`` (k-quants with an importance matrix of the text that ships
for calibration) and read by llama.cpp, which makes the logits: 4,096 held-out tokens of the text
that ships, windows of 512. One draw. Rows that are there are not made again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import moesaic
from moesaic import PruneConfig, SlimConfig
from moesaic.data.text import Tokens, evaluation_tokens
from moesaic.io.source import resolve
from moesaic.metrics.llamacpp import Engine
from moesaic.metrics.measure import environment

OUT = Path(__file__).with_suffix(".json")
TYPES = ("f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k")
SLIM: dict[str, Any] = {"score": "surgeon", "refit": True}
WAYS: dict[str, dict[str, PruneConfig | SlimConfig | None]] = {
    "tiny-moe": {
        "original": None,
        "prune 6 of 8": PruneConfig(keep=6, refit=True),
        "prune 4 of 8": PruneConfig(keep=4, refit=True),
        "slim 72 of 96": SlimConfig(keep=0.75, multiple=8, **SLIM),
        "slim 64 of 96": SlimConfig(keep=2 / 3, multiple=32, **SLIM),
        "slim 48 of 96": SlimConfig(keep=0.5, multiple=8, **SLIM),
        "slim 32 of 96": SlimConfig(keep=1 / 3, multiple=32, **SLIM),
    },
}


def perplexity(file: Path, tokens: Tokens) -> float:
    """Of a GGUF file, by llama.cpp's logits."""
    losses = []
    with Engine(file, tokens.input_ids.shape[1] + 8, exact=True) as engine:
        for ids in tokens.input_ids:
            losses.append(F.cross_entropy(engine.logits(ids)[:-1], ids[1:]))
    return torch.stack(losses).mean().exp().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", default=list(WAYS), metavar="MODEL")
    parser.add_argument("--types", nargs="+", default=TYPES)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=64)
    given = parser.parse_args()
    record: dict[str, Any] = {"benchmark": "bits", "tokens": given.tokens, "rows": {}}
    if OUT.exists():
        record = json.loads(OUT.read_text("utf-8"))
    record["environment"] = environment()
    for name in given.models:
        source = resolve(name)
        tokens = evaluation_tokens("", source.tokenizer, 512, given.tokens)
        for way, config in WAYS[name].items():
            left = [t for t in given.types if f"{name} | {way} | {t}" not in record["rows"]]
            if not left:
                continue
            with tempfile.TemporaryDirectory() as place:
                model = name
                if config is not None:
                    verb = getattr(moesaic, config.verb)
                    result = verb(name, config, samples=given.samples, length=256)
                    model = str(result.save(Path(place) / "model"))
                for type in left:
                    file = Path(place) / f"{type}.gguf"
                    said = moesaic.export(model, file, to="gguf", type=type)
                    row = {"bytes": said["bytes"], "types": said["types"]}
                    row["perplexity"] = perplexity(file, tokens)
                    record["rows"][f"{name} | {way} | {type}"] = row
                    OUT.write_text(json.dumps(record, indent=1) + "\n")
                    print(name, way, row, flush=True)
                    file.unlink()


if __name__ == "__main__":
    main()
