"""Quality at measured speed: SmolLM2-135M made sparser in every way, and in llama.cpp.

    python benchmarks/frontier.py --work DIR --data wikitext2-valid.txt     makes and measures
    python benchmarks/frontier.py --work DIR --rounds 9                     times, all in one run

Perplexity and KL from the dense model, nats a token, in windows of 512 tokens, every token as at
decoding, on the text that ships and on ``--data``; ``of_prompts`` is perplexity with none so. Rows
that are there are not made again. Speeds of all rows that are kept in ``--work`` are taken in turn,
round by round: a prompt of 128 tokens, 32 greedy steps, float32; timing replaces all speeds, so
that they are of one run, and needs a machine that nobody else uses. GGUF files want $LLAMA_CPP (see
``make test-llamacpp``). Writes benchmarks/frontier.json.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F

from moesaic.api import export, verb
from moesaic.config import MethodConfig
from moesaic.data.text import Tokens, evaluation_tokens
from moesaic.io.gguf import packaged_file
from moesaic.io.source import resolve
from moesaic.methods import METHODS
from moesaic.metrics.forward import InMemory, Pass
from moesaic.metrics.gguf_engine import Engine
from moesaic.metrics.score import Quality, Score, model_size, qualities, scores
from moesaic.metrics.speed import Timed, against, environment, interleaved, one_round

HERE = Path(__file__).parent
OUT = HERE / "frontier.json"
MODEL, DENSE, INT8, WINDOW = "smollm2", "dense", "int8 in torch", 512
STATIC = {"active": 0.8, "layers": "all", "refit": True}
KINDS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "static pruning, refitted": ("carve.more", {**STATIC, "variant": "static"}),
    "slim": ("slim.neurons", {"keep": 1128 / 1536, "multiple": 8}),
    "MoRE": ("carve.more", {"active": 0.8}),
    "fine petals": ("carve.more", {**STATIC, "experts": 256, "top_k": 0, "router": "ridge"}),
}
"""By label: the method and its options, with which a token uses 0.8 of the projections."""
FILES = {f"llama.cpp, {type}": type for type in ("f32", "q8_0", "q6_k", "q4_k_m", "q4_1")}
"""By label, the type of a GGUF file of the dense model; q4_1 is the file that it comes in."""


def configs() -> dict[str, tuple[str, MethodConfig]]:
    """By row: its kind and its config."""
    return {f"{kind} 0.8": (kind, METHODS[key](**given)) for kind, (key, given) in KINDS.items()}


def rows() -> dict[str, str]:
    """By row: its kind."""
    converted = {name: kind for name, (kind, _) in configs().items()}
    return {name: name for name in (DENSE, *FILES, INT8)} | converted


def prepare(work: Path, name: str) -> None:
    """Make a row's model or file, where ``work`` lacks it."""
    type, (_, config) = FILES.get(name), configs().get(name, ("", None))
    if config is not None and not (work / name).exists():
        result = verb(config.verb, MODEL, config, samples=32, length=256, dtype=torch.float32)
        result.save(work / name)
    elif type == "q4_1" and not (file := work / f"{name}.gguf").exists():
        file.symlink_to(packaged_file(MODEL))
    elif type is not None and not (file := work / f"{name}.gguf").exists():
        export(MODEL, file, to="gguf", type=type)


def int8(model: Any) -> Any:
    """The model with linear layers in torch's own int8, a scale for each row of a matrix;
    activations are rounded as they come."""
    kinds = {torch.nn.Linear: torch.ao.quantization.per_channel_dynamic_qconfig}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torchao takes its place
        return torch.ao.quantization.quantize_dynamic(model, kinds)


class InLlamaCpp:
    """A GGUF file, run by llama.cpp itself with keys and values in float32."""

    def __init__(self, file: Path) -> None:
        self._engine = Engine(file, WINDOW + 8, exact=True)

    def run(self, batches: Sequence[Tokens], track: Any = None, label: str = "") -> Pass:
        """As :meth:`moesaic.metrics.forward.Runner.run`."""
        return Pass(
            (torch.stack([self._engine.logits(ids) for ids in batch.input_ids]), batch)
            for batch in batches
        )


@torch.no_grad()
def of_prompts(model: Any, tokens: Tokens) -> float:
    """Perplexity where no token is as at decoding."""
    ids = tokens.input_ids
    logits = torch.cat([model(input_ids=row[None], use_cache=False).logits for row in ids])
    loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
    return float(loss.exp())


def measure(record: dict[str, Any], work: Path, data: str, tokens: int) -> None:
    """Perplexity of every row that has none, and its divergence from the dense model."""
    source = resolve(MODEL)
    dense = InMemory(source.load("cpu", torch.float32).eval())
    texts = {"shipped": "", **({Path(data).stem: data} if data else {})}
    windows = {n: evaluation_tokens(t, source.tokenizer, WINDOW, tokens) for n, t in texts.items()}
    record["tokens"] = tokens
    results = record["rows"]
    for name, kind in sorted(rows().items(), key=lambda row: row[0] in results):
        prepare(work, name)
        row: dict[str, Any] = results.setdefault(name, {"kind": kind})
        for text, where in windows.items():
            if "perplexity" in row.get(text, {}):
                continue
            score: Quality | Score
            if name in FILES or name == INT8:
                other: Any = (
                    InLlamaCpp(work / f"{name}.gguf")
                    if name in FILES
                    else InMemory(int8(source.load("cpu", torch.float32).eval()))
                )
                score = qualities([other, dense], where)[0]
                row[text] = {"perplexity": score.perplexity, "active_ratio": 1.0}
            else:
                folder = MODEL if name == DENSE else str(work / name)
                model = InMemory(resolve(folder).load("cpu", torch.float32).eval())
                score = scores([model, dense], where)[0]
                row[text] = {"perplexity": score.perplexity, "active_ratio": score.active_ratio}
                row[text]["of_prompts"] = of_prompts(model.shape, where)
            row[text] |= {"kl": score.kl, "top1_agreement": score.top1_agreement}
        row["bytes"] = bytes_of(work, name)
        keep(record)
        print(name, json.dumps(row), flush=True)


def bytes_of(work: Path, name: str) -> int:
    """Of a row's weights on disk; of what has no file of its own, in memory."""
    if name in (DENSE, INT8):
        model = resolve(MODEL).load("cpu", torch.float32)
        linear = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)]
        every = sum(p.numel() for p in model.parameters())
        if name == DENSE:
            return 4 * every
        tied = model.config.tie_word_embeddings * model.lm_head.weight.numel()
        return 4 * (every - sum(linear) + tied) + sum(linear)
    here = [work / f"{name}.gguf"] if name in FILES else [*(work / name).glob("*.safetensors")]
    return sum(file.stat().st_size for file in here)


class TimedEngine(Engine):
    """A GGUF file that llama.cpp runs, and that is timed."""

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


def time(record: dict[str, Any], work: Path, rounds: int) -> None:
    """Time all rows that are kept, in turn."""
    load = os.getloadavg()
    converted = [name for name in configs() if (work / name).exists()]
    models = {DENSE: resolve(MODEL).load("cpu", torch.float32).eval()}
    models |= {n: resolve(str(work / n)).load("cpu", torch.float32).eval() for n in converted}
    runners: dict[str, Timed] = {n: partial(one_round, model) for n, model in models.items()}
    runners[INT8] = partial(one_round, int8(resolve(MODEL).load("cpu", torch.float32).eval()))
    runners |= {name: TimedEngine(work / f"{name}.gguf", 128 + 32 + 8) for name in FILES}
    prompt = torch.randint(5, 20_000, (1, 128), generator=torch.Generator().manual_seed(0))
    speeds = interleaved(runners, prompt, 32, rounds)
    whole = model_size(models[DENSE]).active_parameters
    for row in record["rows"].values():
        row.pop("speed", None)
    for name, speed in speeds.items():
        model = models.get(name, models[DENSE])
        ideal = whole / model_size(model).active_parameters
        measured = {**speed.as_json(), **against(speed, speeds[DENSE], ideal)}
        record["rows"][name]["speed"] = measured
    record["speeds"] = {
        **{"rounds": rounds, "load_before": load, "load_after": os.getloadavg()},
        "environment": environment(),
    }
    keep(record)


def keep(record: dict[str, Any]) -> None:
    """Write what there is."""
    OUT.write_text(json.dumps(record, indent=1) + "\n")


def main(names: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help="keeps the converted models")
    parser.add_argument("--data", default="", help="a second text to measure on")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=0, help="time them; 0: make and measure")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(names)
    torch.set_num_threads(args.threads)
    record: dict[str, Any] = {"model": MODEL, "environment": environment(), "rows": {}}
    if OUT.exists():
        record = json.loads(OUT.read_text("utf-8"))
    if args.work is None:
        parser.error("--work DIR keeps the converted models")
    if args.rounds:
        time(record, args.work, args.rounds)
    else:
        measure(record, args.work, args.data, args.tokens)


if __name__ == "__main__":
    main()
