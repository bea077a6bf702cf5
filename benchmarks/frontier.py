"""Quality at measured speed: SmolLM2-135M made sparser in every way, on one picture.

    python benchmarks/frontier.py --work DIR --data wikitext2-valid.txt     makes and measures
    python benchmarks/frontier.py --work DIR --rounds 7                     times, all in one run
    python benchmarks/frontier.py --draw                                    docs/images/frontier.svg

Perplexity and KL from the dense model, nats a token, in windows of 512 tokens, every token as at
decoding, on the text that ships and on ``--data``; ``of_prompts`` is perplexity with none so.
Speeds of all rows are taken in turn, round by round: a prompt of 128 tokens, 32 greedy steps,
float32. Writes benchmarks/frontier.json; rows that are there are not made again, and timing
replaces all speeds, so that they are of one run.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from moesaic.api import verb
from moesaic.config import MethodConfig
from moesaic.data.text import Tokens, evaluation_tokens
from moesaic.io.source import resolve
from moesaic.methods import METHODS
from moesaic.metrics.forward import Whole
from moesaic.metrics.measure import environment, speed_json
from moesaic.metrics.score import score, scores_beside
from moesaic.metrics.size import model_size
from moesaic.metrics.speed import against, compare_speed

HERE = Path(__file__).parent
OUT = HERE / "frontier.json"
MODEL, DENSE = "smollm2", "dense"
FINE = {"experts": 256, "top_k": 0, "layers": "all", "router": "ridge", "refit": True}
KINDS: dict[str, tuple[str, Mapping[str, Any], tuple[float, ...]]] = {
    "static, refit": ("carve.more", {"variant": "static", "refit": True}, (0.8,)),
    "slim, refit": ("slim.neurons", {"keep": 1128 / 1536, "multiple": 8, "refit": True}, (0.8,)),
    "MoRE, as published": ("carve.more", {}, (0.8,)),
    "fine petals": ("carve.more", FINE, (0.8,)),
    "WINA": ("carve.wina", {}, (0.8, 0.6)),
    "TEAL": ("carve.teal", {}, (0.8, 0.6)),
    "channels by threshold": ("carve.wina", {"choice": "threshold"}, (0.8, 0.6)),
    "channels by gradients": ("carve.wina", {"gradients": True}, (0.8, 0.6)),
}
"""By label: the method, its options, the active ratios."""
COLOURS = (
    "#000000",
    "#7d858c",
    "#e69f00",
    "#009e73",
    "#56b4e9",
    "#cc79a7",
    "#0072b2",
    "#d55e00",
    "#8c564b",
)


def configs() -> dict[str, tuple[str, MethodConfig]]:
    """By row: its kind and its config."""
    return {
        f"{kind} {active:g}": (kind, METHODS[key](**options, **aim(key, active)))
        for kind, (key, options, ratios) in KINDS.items()
        for active in ratios
    }


def aim(key: str, active: float) -> Mapping[str, Any]:
    """The option that makes a token use so much of the projections."""
    return {} if key == "slim.neurons" else {"active": active}


def make(record: dict[str, Any], work: Path, data: str, tokens: int) -> None:
    """Convert and measure what is not there yet."""
    source = resolve(MODEL)
    texts = {"shipped": "", **({Path(data).stem: data} if data else {})}
    windows = {n: evaluation_tokens(t, source.tokenizer, 512, tokens) for n, t in texts.items()}
    for name, (kind, config) in {DENSE: (DENSE, None), **configs()}.items():
        if name in record["rows"]:
            continue
        model = source.load("cpu", torch.float32)
        if config is not None:
            result = verb(
                config.verb,
                model,
                config,
                tokenizer=source.tokenizer,
                samples=32,
                length=256,
                inplace=True,
            )
            result.save(work / name)
            model = result.model
        row: dict[str, Any] = {"kind": kind}
        for text, rows in windows.items():
            found = score(model.eval(), rows)
            row[text] = {"perplexity": found.perplexity, "active_ratio": found.active_ratio}
        record["rows"][name] = row
        record["tokens"] = tokens
        keep(record)
        print(name, json.dumps(row), flush=True)


@torch.no_grad()
def of_prompts(model: Any, tokens: Tokens) -> float:
    """Perplexity where no token is as at decoding."""
    ids = tokens.input_ids
    logits = torch.cat([model(input_ids=row[None], use_cache=False).logits for row in ids])
    loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
    return float(loss.exp())


def diverge(record: dict[str, Any], work: Path, data: str) -> None:
    """Add the divergence of every row that is kept in ``work`` and lacks it, and its prompts'."""
    source = resolve(MODEL)
    dense = Whole(source.load("cpu", torch.float32).eval())
    texts = {"shipped": "", **({Path(data).stem: data} if data else {})}
    for name, row in record["rows"].items():
        if name == DENSE or "of_prompts" in row["shipped"]:
            continue
        model = Whole(resolve(str(work / name)).load("cpu", torch.float32).eval())
        for text, where in texts.items():
            tokens = evaluation_tokens(where, source.tokenizer, 512, record["tokens"])
            row[text]["of_prompts"] = of_prompts(model.shape, tokens)
            if "kl" not in row[text]:
                found, _ = scores_beside(model, dense, tokens)
                row[text] |= {"kl": found.kl, "top1_agreement": found.top1_agreement}
        keep(record)
        print(name, json.dumps(row), flush=True)


def time(record: dict[str, Any], work: Path, rounds: int) -> None:
    """Time all rows in turn."""
    models = {DENSE: resolve(MODEL).load("cpu", torch.float32).eval()}
    for name in record["rows"]:
        if name != DENSE:
            models[name] = resolve(str(work / name)).load("cpu", torch.float32).eval()
    prompt = torch.randint(5, 20_000, (1, 128), generator=torch.Generator().manual_seed(0))
    load = os.getloadavg()
    speeds = compare_speed(models, prompt, 32, rounds)
    whole = model_size(models[DENSE]).active_parameters
    for name, speed in speeds.items():
        ideal = whole / model_size(models[name]).active_parameters
        record["rows"][name]["speed"] = {
            **speed_json(speed),
            **against(speed, speeds[DENSE], ideal),
        }
    record["speeds"] = {"rounds": rounds, "load": load, "environment": environment()}
    keep(record)
    for name, row in record["rows"].items():
        print(f"{name:28}", {k: round(row["speed"][k]["ratio"], 3) for k in ("prefill", "decode")})


def keep(record: dict[str, Any]) -> None:
    """Write what there is."""
    OUT.write_text(json.dumps(record, indent=1) + "\n")


def picture(record: dict[str, Any], file: Path) -> None:
    """Perplexity and divergence over decoding speed, beside the dense model."""
    from matplotlib import pyplot as plt

    base = record["rows"][DENSE]["shipped"]["perplexity"]
    points: dict[str, list[tuple[float, float, float]]] = {}
    for row in record["rows"].values():
        here, speed = row["shipped"], row["speed"]["decode"]["ratio"]
        more = 100 * (here["perplexity"] / base - 1)
        points.setdefault(row["kind"], []).append((speed, more, here.get("kl", 0.0)))
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "moesaic", "font.size": 10})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.4, 4.2), layout="constrained")
    for colour, (kind, row) in zip(COLOURS, points.items(), strict=True):
        speeds, more, kl = zip(*sorted(row), strict=True)
        left.plot(speeds, more, "o-", color=colour, label=kind)
        right.plot(speeds, kl, "o-", color=colour)
    left.set_yscale("symlog", linthresh=2)
    left.set_yticks([0, 1, 2, 5, 10, 20, 50], ["0", "1", "2", "5", "10", "20", "50"])
    left.set_ylim(bottom=-0.6)
    left.set_title("perplexity above the dense model's, %")
    right.set_yscale("symlog", linthresh=0.02)
    ticks = [0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5]
    right.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    right.set_ylim(bottom=-0.004)
    right.set_title("divergence from it, KL in nats a token")
    for axes in (left, right):
        axes.set_xlabel("tokens a second at decoding, dense = 1")
        axes.grid(alpha=0.3)
    figure.suptitle("SmolLM2-135M: quality at measured speed; right and low is better")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(file, metadata={"Date": None})


def main(names: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help="keeps the converted models")
    parser.add_argument("--data", default="", help="a second text to measure on")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--draw", action="store_true")
    given = parser.parse_args(names)
    torch.set_num_threads(given.threads)
    record: dict[str, Any] = {"model": MODEL, "environment": environment(), "rows": {}}
    if OUT.exists():
        record = json.loads(OUT.read_text("utf-8"))
    if given.draw:
        picture(record, HERE.parent / "docs" / "images" / "frontier.svg")
        return
    if given.work is None:
        parser.error("--work DIR keeps the converted models")
    if given.rounds:
        time(record, given.work, given.rounds)
    else:
        make(record, given.work, given.data, given.tokens)
        diverge(record, given.work, given.data)


if __name__ == "__main__":
    main()
