"""Speed of SmolLM2-135M carved and with channels skipped, beside the dense model, by CPU time.

    python benchmarks/frontier.py --work DIR ...     converts the models
    python benchmarks/petals_speed.py --work DIR     writes benchmarks/petals_speed.json
    python benchmarks/petals_speed.py --work DIR --rows fast --prompt 512    adds to it

One thread; CPU time instead of the clock's, since others work on the machine, and the models in
turn within each round: a prompt of 128 tokens, then 16 greedy steps. ``fast`` is made by
benchmarks/llamacpp.py; ``24 of 32`` was it while its petals were so many. Ratios are medians of the
rounds' own, with the lowest and the highest; ``ideal`` is what the parameters that a token uses
would allow, routers, embeddings and head included. ``router`` is the router's share of a prompt.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

import torch

from moesaic.config import parse_dtype
from moesaic.foreign import Model
from moesaic.io.source import resolve
from moesaic.metrics.measure import environment
from moesaic.metrics.size import model_size
from moesaic.nn import Router

OUT = Path(__file__).with_suffix(".json")
DENSE = "dense"
ROWS = ("fine petals 0.8", "MoRE, as published 0.8", "static, refit 0.8", "WINA 0.8")
STEPS = 16


@torch.inference_mode()
def once(model: Model, prompt: torch.Tensor) -> dict[str, float]:
    """Seconds of a prompt and of its continuation."""
    started = thread_time()
    out = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
    read = thread_time()
    for _ in range(STEPS):
        token = out.logits[:, -1:].argmax(-1)
        out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
    return {"prefill": read - started, "decode": thread_time() - read}


@torch.inference_mode()
def routing(model: Model, prompt: torch.Tensor) -> float:
    """Seconds that the routers alone take of a prompt."""
    spent = [0.0]
    handles = []
    for module in model.modules():
        if isinstance(module, Router):
            begin = module.register_forward_pre_hook(
                lambda *_: spent.__setitem__(0, spent[0] - thread_time())
            )
            end = module.register_forward_hook(
                lambda *_: spent.__setitem__(0, spent[0] + thread_time())
            )
            handles += [begin, end]
    spent[0] = 0.0
    model(input_ids=prompt, use_cache=True, logits_to_keep=1)
    for handle in handles:
        handle.remove()
    return spent[0]


def main(names: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="of frontier.py")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--rows", nargs="+", default=ROWS)
    given = parser.parse_args(names)
    torch.set_num_threads(1)
    prompt = torch.randint(5, 20_000, (1, given.prompt), generator=torch.Generator().manual_seed(0))
    found: dict[str, Any] = json.loads(OUT.read_text("utf-8")) if OUT.exists() else {}
    found["environment"] = environment()
    added = "" if tuple(given.rows) == ROWS else f", {', '.join(given.rows)}, {given.prompt} tokens"
    for name in ("float32", "bfloat16"):
        places = {DENSE: "smollm2", **{row: str(given.work / row) for row in given.rows}}
        models = {
            row: resolve(place).load("cpu", parse_dtype(name)).eval()
            for row, place in places.items()
        }
        for model in models.values():
            once(model, prompt)  # compiles, and turns weights
        times: dict[str, list[dict[str, float]]] = {row: [] for row in models}
        load = os.getloadavg()
        for _ in range(given.rounds):
            for row, model in models.items():
                times[row].append(once(model, prompt))
        whole = model_size(models[DENSE]).active_parameters
        rows: dict[str, Any] = {}
        for row, model in models.items():
            rows[row] = {"ideal": whole / model_size(model).active_parameters}
            for part in ("prefill", "decode"):
                pairs = zip(times[DENSE], times[row], strict=True)
                ratios = [dense[part] / own[part] for dense, own in pairs]
                rows[row][part] = {
                    "ratio": median(ratios),
                    "spread": [min(ratios), max(ratios)],
                    "seconds": median(own[part] for own in times[row]),
                }
            routers = [routing(model, prompt) for _ in range(3)]
            rows[row]["router"] = median(routers) / rows[row]["prefill"]["seconds"]
            print(name, row, json.dumps(rows[row]), flush=True)
        found[name + added] = {"load": load, "rounds": given.rounds, "rows": rows}
        OUT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
