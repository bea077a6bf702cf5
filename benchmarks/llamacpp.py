"""SmolLM2 carved into petals, exported as GraniteMoeShared, beside the dense model, in llama.cpp.

    LLAMA_CPP=folder python benchmarks/llamacpp.py            writes benchmarks/llamacpp.json
    LLAMA_CPP=folder python benchmarks/llamacpp.py --way fast --types f16 q8_0 q4_k_m --threads 1
    LLAMA_CPP=folder python benchmarks/llamacpp.py --shapes --types f16 --threads 1

``half``: four petals of which a token runs one, in every layer, at 0.625. ``fast``: ``carve
--recipe fast`` at 0.8, calibrated on 32 windows of 256 tokens of the text that ships; ``24 of 32``:
the same with ``--experts 24``. Speeds are of
512 tokens of prompt and 64 new ones, interleaved; ratios are carved over dense, round by round, and
the ideal one follows from active parameters. The same comparison in our own execution, float32 and
bfloat16. ``--perplexity``: of 4,096 held-out tokens of the text that ships, windows of 512, ours
and of every file by llama.cpp's own logits. ``--busy``: CPU time of llama.cpp instead of the
clock's, on one thread, where others work on the machine. What was not asked for (``--types`` and
``--dtypes`` may be empty) stays as it was in the file. ``--shapes``: the speed of other numbers and
widths of petals, by CPU time, of models with random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch.nn import functional as F
from transformers import GraniteMoeSharedConfig, GraniteMoeSharedForCausalLM

from moesaic import MoREConfig, bench, carve, export
from moesaic.data.text import Tokens, evaluation_tokens
from moesaic.exports.llamacpp import convert, find_converter
from moesaic.exports.targets import TARGETS, Sizes
from moesaic.io.source import resolve
from moesaic.metrics.llamacpp import Engine, gguf_parameters
from moesaic.metrics.measure import environment, speed_json
from moesaic.metrics.score import score
from moesaic.metrics.speed import against, interleaved

OUT = Path(__file__).with_suffix(".json")
FAST = {"active": 0.8, **MoREConfig.bundles["fast"]}
WAYS: dict[str, tuple[MoREConfig, dict[str, int]]] = {
    "half": (MoREConfig(active=0.625, layers="all"), {"samples": 40}),
    "fast": (MoREConfig(**FAST), {"samples": 32, "length": 256}),
    "24 of 32": (MoREConfig(**{**FAST, "experts": 24}), {"samples": 32, "length": 256}),
}
"""By name: the method's options, and those of the calibration."""
TOKENS, WINDOW = 4096, 512


def held_out() -> Tokens:
    """What perplexity is measured on."""
    return evaluation_tokens("", resolve("smollm2").tokenizer, WINDOW, TOKENS)


def of_file(file: Path, tokens: Tokens) -> float:
    """The perplexity of a GGUF file, by llama.cpp's logits."""
    losses = []
    with Engine(file, WINDOW + 8, exact=True) as engine:
        for ids in tokens.input_ids:
            losses.append(F.cross_entropy(engine.logits(ids)[:-1], ids[1:]))
    return torch.stack(losses).mean().exp().item()


SHAPES = {"24 of 32, top-11": (24, 11, 32), "12 of 64, top-6": (12, 6, 64)}
SHAPES |= {"6 of 128, top-3": (6, 3, 128), "4 of 128, top-1": (4, 1, 128)}
"""Petals of SmolLM2 at 0.8: how many, of a token, neurons of each."""


class Busy(Engine):
    """A model in llama.cpp whose seconds are those of the CPU; on one thread."""

    def __call__(self, prompt: torch.Tensor, new_tokens: int) -> tuple[float, float]:
        self._llama.reset()
        started = process_time()
        token = self._next(prompt[0].tolist())
        read = process_time()
        for _ in range(new_tokens):
            token = self._next([token])
        return read - started, process_time() - read


def by_cpu(files: Mapping[str, Path], new_tokens: int, rounds: int) -> dict[str, Any]:
    """As :func:`moesaic.bench`, by CPU time."""
    with ExitStack() as opened:
        engines = {
            name: opened.enter_context(Busy(file, WINDOW + new_tokens + 1))
            for name, file in files.items()
        }
        speeds = interleaved(engines, held_out().input_ids[:1], new_tokens, rounds)
    active = {name: gguf_parameters(file)[1] for name, file in files.items()}
    found: dict[str, Any] = {name: speed_json(speed) for name, speed in speeds.items()}
    found["ratio"] = {
        name: against(speed, speeds["against"], active["against"] / active[name])
        for name, speed in speeds.items()
        if name != "against"
    }
    return {**found, "time": "CPU"}


def random_model(shape: tuple[int, int, int], work: Path, file: Path, type: str) -> None:
    """A GGUF file of SmolLM2's sizes with so many petals, its weights random."""
    petals, top_k, width = shape
    source = resolve("smollm2")
    target = next(t for t in TARGETS if t.model_type == "granitemoeshared")
    whole = source.config.intermediate_size
    sizes = Sizes(0, whole - petals * width, petals, width, top_k)
    config = source.config.to_dict()
    del config["model_type"]
    config |= target.settings(source.config, sizes)
    model = GraniteMoeSharedForCausalLM(GraniteMoeSharedConfig(**config))
    model.save_pretrained(work / "random")
    source.tokenizer.save_pretrained(work / "random")
    convert(find_converter(), work / "random", file, type)


def of_shapes(given: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Speeds of all shapes and of the dense model in turn, by type."""
    found: dict[str, Any] = {"environment": environment(), "rounds": given.rounds}
    for type in given.types:
        files = {"against": work / f"dense-{type}.gguf"}
        if not files["against"].exists():
            export("smollm2", files["against"], to="gguf", type=type)
        for name, shape in SHAPES.items():
            files[name] = work / f"{name}-{type}.gguf"
            if not files[name].exists():
                random_model(shape, work, files[name], type)
        load = os.getloadavg()
        found[type] = {"load": load, **by_cpu(files, 64, given.rounds)}
    return found


def measured(given: argparse.Namespace, work: Path) -> Iterator[dict[str, Any]]:
    """A row for every type in llama.cpp, then one for every dtype in transformers."""
    models = {"model": str(work / given.way), "against": "smollm2"}
    asked = {"new_tokens": 64, "rounds": given.rounds}
    if not (work / given.way).exists():
        config, calibration = WAYS[given.way]
        carve("smollm2", config, **calibration).save(work / given.way)
    for type in given.types:
        files = {"model": work / f"{given.way}-{type}.gguf", "against": work / f"dense-{type}.gguf"}
        row: dict[str, Any] = {"engine": "llamacpp", "type": type}
        for name, file in files.items():
            if not file.exists():
                said = export(models[name], file, to="gguf", type=type)
                file.with_suffix(".json").write_text(json.dumps(said["types"]))
        if given.perplexity:
            row["weights"] = {
                name: json.loads(file.with_suffix(".json").read_text())
                for name, file in files.items()
            }
            tokens = held_out()
            row["perplexity"] = {name: of_file(file, tokens) for name, file in files.items()}
        if given.rounds and given.busy:
            row |= {"load": os.getloadavg(), **by_cpu(files, 64, given.rounds)}
            row["ratio"] = row["ratio"]["model"]
        elif given.rounds:
            names = {name: str(file) for name, file in files.items()}
            row |= {"load": os.getloadavg(), **bench(names, engine="llamacpp", **asked)}
        yield row
    for name in given.dtypes:
        row = {"engine": "transformers", "type": name}
        dtype = getattr(torch, name)
        if given.perplexity:
            tokens = held_out()
            row["perplexity"] = {
                key: score(resolve(model).load("cpu", dtype).eval(), tokens).perplexity
                for key, model in models.items()
            }
        if given.rounds:
            row |= {"load": os.getloadavg(), **bench(models, dtype=dtype, **asked)}
        yield row


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=list(WAYS), default="half")
    parser.add_argument("--rounds", type=int, default=9, help="0 leaves speeds as they are")
    parser.add_argument("--perplexity", action="store_true", help="measure it, too")
    parser.add_argument("--shapes", action="store_true", help="of random weights, nothing else")
    parser.add_argument("--busy", action="store_true", help="CPU time instead of the clock's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--types", nargs="*", default=["f32", "bf16", "q8_0"], help="llama.cpp's")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"], help="our own")
    parser.add_argument("--work", type=Path, help="keep the carved model and GGUF files here")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    record = json.loads(OUT.read_text()) if OUT.exists() else {"results": []}
    rows = {(r.get("way", "half"), r["engine"], r["type"]): r for r in record["results"]}
    with tempfile.TemporaryDirectory() as place:
        if given.shapes:
            record["shapes"] = of_shapes(given, given.work or Path(place))
            OUT.write_text(json.dumps(record, indent=1) + "\n")
            print(json.dumps({t: record["shapes"][t]["ratio"] for t in given.types}))
            raise SystemExit
        for row in measured(given, given.work or Path(place)):
            key = given.way, row["engine"], row["type"]
            if given.rounds:
                row |= {"environment": environment(), "rounds": given.rounds}
            rows[key] = {**rows.get(key, {}), "way": given.way, **row}
            print(*key, json.dumps({k: row.get(k) for k in ("perplexity", "weights", "ratio")}))
            record |= {"benchmark": "llamacpp", "results": list(rows.values())}
            OUT.write_text(json.dumps(record, indent=1) + "\n")
