"""All methods and their baselines judged by more than perplexity: tiny models, SmolLM2, a mixture.

Of every row: perplexity, KL(original || result) and top-1 agreement on held-out text, accuracy of
local multiple-choice files with standard errors and recovery, and how often continuations loop.
Rows that the output has already are not made again.

    python benchmarks/methods_by_tasks.py --data FOLDER --rows tiny-moe --out FILE.json

FOLDER holds FILE.jsonl of questions (``question``, ``choices``, ``answer``), or FILE.json as
LLM-Adapters has them, lists of ``instruction`` and ``answer``, such as ARC-Easy-train.json. The
first ``--limit`` questions of each are asked.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import moesaic
from moesaic.io.source import resolve
from moesaic.methods import METHODS
from moesaic.metrics.measure import environment

TEXT = {"samples": 64, "length": 256}
"""Calibration windows of the text that ships."""
STEPS = {"steps": 300, "batch": 2, "length": 256}
FINE = {"experts": 256, "top_k": 0, "layers": "all", "router": "ridge", "refit": True}
"""Training of the methods that train: far less than their papers'."""
MIXTURE = "build/smollm2-mixture"
"""As scripts/train_mixture.py makes it."""
ROWS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tiny-moe, NAEE": ("tiny-moe", "prune.naee", {"keep": 6}),
    "tiny-moe, NAEE, half": ("tiny-moe", "prune.naee", {"keep": 4}),
    "tiny-moe, frequency, half": ("tiny-moe", "prune.naee", {"keep": 4, "criterion": "frequency"}),
    **{
        f"tiny-moe, random {seed}, half": (
            "tiny-moe",
            "prune.naee",
            {"keep": 4, "criterion": "random", "seed": seed},
        )
        for seed in range(3)
    },
    "tiny-moe, skipping, median": ("tiny-moe", "skip.naee", {}),
    **{
        f"tiny-shared-moe, {verb}{' refitted' if refit else ''}, half": (
            "tiny-shared-moe",
            key,
            {**options, "refit": refit},
        )
        for verb, key, options in (
            ("pruned", "prune.naee", {"keep": 16}),
            ("slimmed", "slim.neurons", {"keep": 0.5, "score": "surgeon"}),
            (
                "slimmed unevenly",
                "slim.neurons",
                {"keep": 0.5, "score": "surgeon", "uneven": True},
            ),
        )
        for refit in (False, True)
    },
    "tiny-shared-moe, CD-MoE-S": ("tiny-shared-moe", "condense.cd-moe", {"layers": 2}),
    "tiny-shared-moe, CD-MoE-SR": (
        "tiny-shared-moe",
        "condense.cd-moe",
        {"layers": 2, "keep": "shared+routed"},
    ),
    "tiny-shared-moe, Layer Drop": (
        "tiny-shared-moe",
        "condense.cd-moe",
        {"layers": 2, "keep": "attention", "layer_search": "cosine"},
    ),
    "tiny-shared-moe, Block Drop": (
        "tiny-shared-moe",
        "condense.cd-moe",
        {"layers": 2, "keep": "nothing", "layer_search": "cosine"},
    ),
    "tiny-dense, MoRE": ("tiny-dense", "carve.more", {"active": 0.8}),
    "tiny-dense, static pruning": (
        "tiny-dense",
        "carve.more",
        {"active": 0.8, "variant": "static"},
    ),
    "tiny-dense, ToMoE": ("tiny-dense", "carve.tomoe", {"active": 0.8, **STEPS}),
    "tiny-dense, DSMoE": ("tiny-dense", "carve.dsmoe", {"active": 0.8, **STEPS}),
    "smollm2, MoRE": ("smollm2", "carve.more", {"active": 0.8}),
    "smollm2, static pruning": ("smollm2", "carve.more", {"active": 0.8, "variant": "static"}),
    "smollm2, MoRE, best": ("smollm2", "carve.more", {"active": 0.8, **FINE}),
    "mixture, pruned, half": (MIXTURE, "prune.naee", {"keep": 4}),
    "mixture, slimmed, half": (MIXTURE, "slim.neurons", {"keep": 0.5, "score": "energy"}),
    "mixture, pruned, quarter": (MIXTURE, "prune.naee", {"keep": 2}),
}
"""By label: model, method, options."""
ANSWER = re.compile(r"(?:Answer|Option|Solution|Ending)(\d+): ?")


def questions(folder: Path, names: list[str], into: Path) -> list[Path]:
    """Files of questions as ``--tasks`` reads them."""
    found = []
    for name in names:
        file = folder / name
        if file.suffix == ".jsonl":
            found.append(file)
            continue
        rows = []
        for row in json.loads(file.read_text("utf-8")):
            told = row["instruction"].partition("\n\nAnswer format")[0]
            asked, *parts = ANSWER.split(told.partition(": ")[2])
            choices = [choice.strip() for choice in parts[1::2]] or ["true", "false"]
            answer = row["answer"].lower()
            if answer not in choices:
                answer = choices[int(re.sub(r"\D", "", answer)) - 1]
            right = choices.index(answer)
            rows.append({"question": asked.strip(), "choices": choices, "answer": right})
        found.append(into / f"{file.stem}.jsonl")
        found[-1].write_text("\n".join(json.dumps(row) for row in rows) + "\n", "utf-8")
    return found


def made(label: str) -> Any:
    """The live model of a row."""
    name, key, options = ROWS[label]
    verb = getattr(moesaic, key.partition(".")[0])
    plain = {"refit": False} if key.partition(".")[0] in ("prune", "slim", "condense") else {}
    return verb(name, METHODS[key](**{**plain, **options}), **TEXT).model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--files",
        nargs="+",
        default=["ARC-Easy-train.json", "ARC-Challenge-train.json", "openbookqa-train.json"],
    )
    parser.add_argument("--rows", nargs="+", default=[""], help="starts of labels")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    asked = {"files": args.files, "limit": args.limit, "max_tokens": args.max_tokens, **TEXT}
    record: dict[str, Any] = {
        "benchmark": "methods_by_tasks",
        "arguments": asked,
        "environment": environment(),
    }
    record |= {"originals": {}, "rows": {}}
    if args.out.exists():
        known = json.loads(args.out.read_text("utf-8"))
        assert known["arguments"] == asked, "the output holds rows of other settings"
        record = known
    with tempfile.TemporaryDirectory() as folder:
        tasks = ",".join(map(str, questions(args.data, args.files, Path(folder))))
        for label, (name, key, options) in ROWS.items():
            if label in record["rows"] or not label.startswith(tuple(args.rows)):
                continue
            start = time.process_time()
            model, source = made(label), resolve(name)
            found = moesaic.evaluate(
                model,
                against=source.load(),
                tokenizer=source.tokenizer,
                max_tokens=args.max_tokens,
                tasks=tasks,
                limit=args.limit,
                generations=True,
            ).as_json()
            record["originals"][name] = found.pop("against")
            record["rows"][label] = {
                "model": name,
                "method": key,
                "options": options,
                "cpu_seconds": time.process_time() - start,
                **found,
            }
            args.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
            print(label, f"{found['perplexity']:.2f}", f"KL {found['kl']:.3f}", flush=True)


if __name__ == "__main__":
    main()
