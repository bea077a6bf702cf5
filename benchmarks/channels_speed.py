"""Decoding speed when channels or petals are skipped, beside the dense model in the same rounds.

    python benchmarks/channels_speed.py --work DIR --make   what is timed, kept in a folder
    python benchmarks/channels_speed.py --work DIR          writes benchmarks/channels_speed.json
    python benchmarks/channels_speed.py --work DIR --prompt 512    adds prompts of that length
    python benchmarks/channels_speed.py --layers     adds single layers, on a busy machine, too

SmolLM2-135M, and a made-up Llama of three layers with d 2048 and M 8192; float32 and bfloat16; by
one thread and by two. A prompt of 128 tokens, 16 greedy steps a round (one after other prompts);
ratios are medians of the rounds' own, with the lowest and the highest. ``ideal`` is what the bytes
that a token reads would allow, embeddings and head included; routers are float32. Petals here are
for speed: no refit, since it changes no shape. All models are loaded alike, from files. The
machine's load before each part is kept with the figures; parts that are there are kept.

Layers: fourteen of SmolLM2's shape, random, dense and with channels skipped, in turn, so that none
is in the cache; of each kind the tenth percentile of a layer's time by the clock, short enough that
others rarely disturb it, and its ratio to the dense one's, with the lowest and the highest ratio at
the fifth and the twenty-fifth percentile.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import moesaic
from moesaic.data.text import Tokens, calibration_tokens
from moesaic.foreign import Model
from moesaic.hub import save_live
from moesaic.io.source import resolve
from moesaic.methods import METHODS
from moesaic.methods.more.config import FAST
from moesaic.metrics.measure import environment, speed_json
from moesaic.metrics.size import model_size
from moesaic.metrics.speed import against, compare_speed

OUT = Path(__file__).with_suffix(".json")
DENSE = "dense"
LENGTH, STEPS = 128, 16
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RIDGE = {"layers": "all", "router": "ridge"}
ROWS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "WINA 0.8": ("carve.wina", {"active": 0.8}),
    "WINA 0.6": ("carve.wina", {"active": 0.6}),
    "256 petals 0.8": ("carve.more", {"active": 0.8, "experts": 256, "top_k": 0, **RIDGE}),
    "32 petals 0.8": ("carve.more", {"active": 0.8, "experts": 32, "top_k": 16, **RIDGE}),
    "6 petals 0.8": ("carve.more", {**FAST, "refit": False}),
    "4 petals 0.8": ("carve.more", {"active": 0.8}),
}
LARGE = LlamaConfig(
    vocab_size=32_000,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=3,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)

LAYERS = LlamaConfig(
    vocab_size=1000,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=14,
    num_attention_heads=9,
    num_key_value_heads=3,
)


def small() -> tuple[Model, Tokens]:
    """SmolLM2, and text."""
    source = resolve("smollm2")
    return source.load("cpu", torch.bfloat16), calibration_tokens("", source.tokenizer, 8, 256, 0)


def large() -> tuple[Model, Tokens]:
    """A model of few wide layers, random, and random tokens."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LARGE).to(torch.bfloat16).eval()
    text = calibration_tokens("", resolve("tiny-dense").tokenizer, 8, 256, 0)
    return model, text


MODELS = {"SmolLM2-135M": small, "d 2048, M 8192": large}


def keep(work: Path, name: str) -> None:
    """Write a model, and what is made of it, as checkpoints; those that are there stay."""
    dense, text = MODELS[name]()
    rows = {DENSE: dense}
    for row, (key, options) in ROWS.items():
        if not (work / name / row).exists():
            rows[row] = moesaic.carve(dense, METHODS[key](**options), text=text).model
    for row, model in rows.items():
        save_live(model, None, work / name / row)
        print(name, row, flush=True)


def read(model: Model) -> float:
    """Bytes that a token reads; what is not of the model's type is all read."""
    plain = model.dtype.itemsize
    more = sum(p.nbytes - plain * p.numel() for p in model.parameters() if p.dtype != model.dtype)
    return plain * model_size(model).active_parameters + more


def timed(
    folder: Path, dtype: torch.dtype, threads: int, rounds: int, length: int
) -> dict[str, Any]:
    """Speeds of all rows in turn."""
    load = os.getloadavg()
    names = (DENSE, *ROWS)
    models = {row: resolve(str(folder / row)).load("cpu", dtype).eval() for row in names}
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(5, 20_000, (1, length), generator=generator)
    speeds = compare_speed(models, prompt, STEPS if length == LENGTH else 1, rounds)
    torch.set_num_threads(1)
    rows = {}
    for row, speed in speeds.items():
        ideal = read(models[DENSE]) / read(models[row])
        rows[row] = {**speed_json(speed), **against(speed, speeds[DENSE], ideal)}
    return {"load": load, "rounds": rounds, "rows": rows}


@torch.inference_mode()
def layers(dtype: torch.dtype, threads: int, steps: int) -> dict[str, Any]:
    """Times of single layers at decoding, all rows in turn."""
    load = os.getloadavg()
    torch.manual_seed(0)
    dense = LlamaForCausalLM(LAYERS).to(dtype).eval()
    ids = torch.randint(0, LAYERS.vocab_size, (1, 128))
    models: dict[str, Model] = {DENSE: dense}
    for row, (key, options) in ROWS.items():
        if key == "carve.wina":
            models[row] = moesaic.carve(dense, METHODS[key](**options)).model.eval()
    torch.set_num_threads(threads)
    begun: list[float] = []
    caches = {}
    for row, model in models.items():
        caches[row] = model(ids, use_cache=True).past_key_values
        for module in [*model.model.layers, model.model.norm]:
            module.register_forward_pre_hook(lambda *_: begun.append(perf_counter()))
    times: dict[str, list[float]] = {row: [] for row in models}
    for step in range(steps + 2):
        for row, model in models.items():
            for _ in range(2):  # once to have this model's code near, and the other models' far
                begun.clear()
                model(ids[:, :1], past_key_values=caches[row], use_cache=True)
            if step > 1:
                times[row] += [after - before for before, after in pairwise(begun)]
    torch.set_num_threads(1)
    at = {row: quantiles(some, n=20) for row, some in times.items()}
    rows = {}
    for row, of in at.items():
        ratios = [at[DENSE][place] / of[place] for place in (0, 1, 4)]
        spread = [min(ratios), max(ratios)]
        rows[row] = {"seconds": of[1], "ratio": ratios[1], "spread": spread}
    return {"load": load, "steps": steps, "rows": rows}


def main(names: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", action="store_true", help="single layers instead of models")
    parser.add_argument("--work", type=Path, help="folder of what is timed")
    parser.add_argument("--make", action="store_true", help="make what is timed")
    parser.add_argument("--prompt", type=int, default=LENGTH, help="tokens of a prompt")
    given = parser.parse_args(names)
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(OUT.read_text()) if OUT.exists() else {}
    found["environment"] = environment()
    if given.layers:
        for name, threads in product(TYPES, given.threads):
            part = f"layers of SmolLM2's shape | {name} | threads {threads}"
            if part not in found:
                found[part] = layers(TYPES[name], threads, 4 * given.rounds)
                OUT.write_text(json.dumps(found, indent=1) + "\n")
            for row, told in found[part]["rows"].items():
                print(part, "|", row, round(told["ratio"], 2), told["spread"], flush=True)
        return
    if given.make:
        for name in MODELS:
            keep(given.work, name)
        return
    more = "" if given.prompt == LENGTH else f" | prompt {given.prompt}"
    for threads, name, (kind, dtype) in product(given.threads, MODELS, TYPES.items()):
        part = f"{name} | {kind} | threads {threads}{more}"
        if part in found:
            continue
        found[part] = timed(given.work / name, dtype, threads, given.rounds, given.prompt)
        OUT.write_text(json.dumps(found, indent=1) + "\n")
        for row, told in found[part]["rows"].items():
            said = {k: round(told[k]["ratio"], 2) for k in ("prefill", "decode")}
            print(part, "|", row, said, round(told["decode"]["ideal"], 2), flush=True)


if __name__ == "__main__":
    main()
