"""Functions of frontier.yaml: SmolLM2-135M, and what is made of it, measured and timed.

A model is a folder, a GGUF file, ``smollm2``, or ``int8``: the same with torch's own int8.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F

from moesaic.data.text import Tokens, evaluation_tokens
from moesaic.io.gguf import packaged_file
from moesaic.io.source import resolve
from moesaic.metrics.forward import InMemory, Pass
from moesaic.metrics.gguf_engine import Engine
from moesaic.metrics.score import model_size, qualities
from moesaic.metrics.speed import Timed, against, interleaved, one_round

MODEL, DENSE, INT8, WINDOW = "smollm2", "dense", "int8", 512
PROMPT, STEPS, ROUNDS = 128, 32, 9


def loaded(model: str) -> Any:
    """A model in float32, or its int8."""
    live = resolve(MODEL if model == INT8 else model).load("cpu", torch.float32).eval()
    if model != INT8:
        return live
    kinds = {torch.nn.Linear: torch.ao.quantization.per_channel_dynamic_qconfig}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torchao takes its place
        return torch.ao.quantization.quantize_dynamic(live, kinds)


class InLlamaCpp(Engine):
    """A GGUF file that llama.cpp itself runs, to be measured or timed."""

    def run(self, batches: Sequence[Tokens], track: Any = None, label: str = "") -> Pass:
        """As :meth:`moesaic.metrics.forward.InMemory.run`."""
        return Pass(
            (torch.stack([self.logits(ids) for ids in batch.input_ids]), batch) for batch in batches
        )

    def __call__(self, prompt: torch.Tensor, new_tokens: int) -> tuple[float, float]:
        """Seconds for a prompt (1, L), and for ``new_tokens`` greedy steps after it."""
        self._reset()
        ids = prompt[0].tolist()
        start = perf_counter()
        token = self._next(ids)
        prefilled = perf_counter()
        for _ in range(new_tokens):
            token = self._next([token])
        return prefilled - start, perf_counter() - prefilled


@torch.no_grad()
def of_prompts(model: Any, tokens: Tokens) -> float:
    """Perplexity where no token is as at decoding."""
    ids = tokens.input_ids
    logits = torch.cat([model(input_ids=row[None], use_cache=False).logits for row in ids])
    loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
    return float(loss.exp())


def measured(model: str, data: str, tokens: int) -> dict[str, float | None]:
    """Perplexity on a text, the one that ships if it is empty, and divergence from the dense."""
    text = evaluation_tokens(data, resolve(MODEL).tokenizer, WINDOW, int(tokens))
    if model.endswith(".gguf"):  # keys and values in float32, too
        runner: Any = InLlamaCpp(Path(model), WINDOW + 8)
    else:
        runner = InMemory(loaded(model))
    score = qualities([runner, InMemory(loaded(MODEL))], text)[0]
    figures = {"perplexity": score.perplexity, "active_ratio": 1.0}
    if isinstance(runner, InMemory) and model != INT8:
        figures["active_ratio"] = model_size(runner.shape, score.routing).active_ratio
        figures["of_prompts"] = of_prompts(runner.shape, text)
    return {**figures, "kl": score.kl, "top1_agreement": score.top1_agreement}


def size(model: str) -> dict[str, int]:
    """Bytes of its weights on disk; of what has no file of its own, in memory."""
    if model not in (MODEL, INT8):
        path = Path(model)
        files = [path] if path.is_file() else path.glob("*.safetensors")
        return {"bytes": sum(file.stat().st_size for file in files)}
    live = loaded(MODEL)
    every = sum(p.numel() for p in live.parameters())
    linear = sum(m.weight.numel() for m in live.modules() if isinstance(m, torch.nn.Linear))
    tied = live.config.tie_word_embeddings * live.lm_head.weight.numel()
    return {"bytes": 4 * every if model == MODEL else 4 * (every - linear + tied) + linear}


def packaged(file: str) -> dict[str, str]:
    """Let the file that the dense model comes in be a row's, too."""
    Path(file).symlink_to(packaged_file(MODEL))
    return {"from": packaged_file(MODEL).name}


def timed(made: Mapping[str, Path]) -> dict[str, Any]:
    """Speeds of all rows that are kept, by name; in turn, beside the dense model."""
    folders = {name: str(path) for name, path in made.items() if path.exists()}
    models = {name: loaded(folder) for name, folder in {DENSE: MODEL, **folders}.items()}
    runners: dict[str, Timed] = {name: partial(one_round, live) for name, live in models.items()}
    runners["int8 in torch"] = partial(one_round, loaded(INT8))
    files = {name: Path(f"{path}.gguf") for name, path in made.items()}
    runners |= {n: InLlamaCpp(f, PROMPT + STEPS + 8) for n, f in files.items() if f.exists()}
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(5, 20_000, (1, PROMPT), generator=draw)
    speeds = interleaved(runners, prompt, STEPS, ROUNDS)
    active = {name: model_size(live).active_parameters for name, live in models.items()}
    return {
        name: {
            **speed.as_json(),
            **against(speed, speeds[DENSE], active[DENSE] / active.get(name, active[DENSE])),
        }
        for name, speed in speeds.items()
    }
