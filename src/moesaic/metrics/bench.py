"""Speed, memory and file size of a model beside another, in transformers or in llama.cpp."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from moesaic.data.text import evaluation_tokens, shipped_texts
from moesaic.errors import MoesaicError
from moesaic.export.llamacpp import export_gguf
from moesaic.hub import Source, base_arch_or_any, resolve
from moesaic.metrics.measure import memory, speed_json
from moesaic.metrics.llamacpp import Engine, gguf_parameters
from moesaic.metrics.size import model_size
from moesaic.metrics.speed import Speed, against, compare_speed, interleaved, peak_memory
from moesaic.progress import Track, silent

ENGINES = ("transformers", "llamacpp")


def bench(
    models: Mapping[str, str],
    *,
    engine: str = "transformers",
    type: str = "f32",
    length: int = 512,
    new_tokens: int = 32,
    rounds: int = 5,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    track: Track = silent,
) -> dict[str, dict[str, Any]]:
    """Speed of models in one interleaved run, the peak memory of each in its own process.

    Args:
        models: names for :func:`moesaic.hub.resolve` by column; ``model`` is compared with
            ``against`` where both are there.
        engine: transformers, or llamacpp, which takes GGUF files too and converts other models.
        type: what the weights of converted models are stored as.
        length: prompt tokens.
        new_tokens: greedy decoding steps a round.
        rounds: counted rounds.
        device: for transformers.
        dtype: floating-point type for transformers; None for the checkpoint's own.

    Returns:
        by column its figures, and under ``ratio`` those of :func:`moesaic.metrics.speed.against`.

    Raises:
        MoesaicError: the engine is unknown or not there, or a model cannot be loaded.
    """
    if engine not in ENGINES:
        raise MoesaicError(f"--engine {engine!r} is none of {', '.join(ENGINES)}.")
    if engine == "llamacpp":
        speeds, figures = _llamacpp(models, type, length, new_tokens, rounds, track)
    else:
        speeds, figures = _transformers(models, length, new_tokens, rounds, device, dtype, track)
    found = {name: {**speed_json(speeds[name]), **figures[name]} for name in models}
    if {"model", "against"} <= speeds.keys():
        theirs, ours = (figures[name]["active_parameters"] for name in ("against", "model"))
        found["ratio"] = against(speeds["model"], speeds["against"], theirs / ours)
    return found


Found = tuple[dict[str, Speed], dict[str, dict[str, Any]]]


def _transformers(
    models: Mapping[str, str],
    length: int,
    new_tokens: int,
    rounds: int,
    device: str,
    dtype: torch.dtype | None,
    track: Track,
) -> Found:
    sources = {name: resolve(model) for name, model in models.items()}
    loaded = {name: source.load(device, dtype) for name, source in sources.items()}
    speeds = compare_speed(loaded, _prompt(sources, length), new_tokens, rounds, track)
    active = {name: _active(model) for name, model in loaded.items()}
    loaded.clear()
    return speeds, {
        name: {
            "peak_memory_bytes": memory(source, length, new_tokens, device, dtype),
            "active_parameters": active[name],
            "file_bytes": source.checkpoint.nbytes(),
        }
        for name, source in sources.items()
    }


def _prompt(sources: Mapping[str, Source], length: int) -> torch.Tensor:
    first = next(iter(sources.values()))
    return evaluation_tokens("", first.tokenizer, length, length).input_ids


def _active(model: Any) -> int:
    if base_arch_or_any(model.config) is None:
        return sum(p.numel() for p in model.parameters())
    return model_size(model).active_parameters


def _llamacpp(
    models: Mapping[str, str],
    type: str,
    length: int,
    new_tokens: int,
    rounds: int,
    track: Track,
) -> Found:
    context = length + new_tokens + 1
    with tempfile.TemporaryDirectory(prefix="moesaic-") as place:
        files = {n: _gguf(model, Path(place) / f"{n}.gguf", type) for n, model in models.items()}
        with ExitStack() as opened:
            engines = {n: opened.enter_context(Engine(f, context)) for n, f in files.items()}
            first = next(iter(engines.values()))
            prompt = first.tokens("\n\n".join(shipped_texts("evaluation")), length)
            speeds = interleaved(engines, prompt, new_tokens, rounds, track)
        return speeds, {
            name: {
                "peak_memory_bytes": peak_memory(file, length, new_tokens, "cpu", "auto"),
                "active_parameters": gguf_parameters(file)[1],
                "file_bytes": file.stat().st_size,
            }
            for name, file in files.items()
        }


def _gguf(model: str, file: Path, type: str) -> Path:
    """The model's GGUF file: itself, or one made for the occasion."""
    if model.endswith(".gguf"):
        if not Path(model).is_file():
            raise MoesaicError(f"No file at {model}.")
        return Path(model)
    export_gguf(model, file, type=type)
    return file
