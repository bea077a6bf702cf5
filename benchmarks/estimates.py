"""What dry runs tell, beside what came: bytes, peak memory, time.

    python benchmarks/estimates.py           writes estimates.json; goes on where it stopped
    python benchmarks/estimates.py --tell    the same runs told anew, beside what came before
    python benchmarks/estimates.py --large   well-known models to half: what dry runs tell
    python benchmarks/estimates.py --big DIR runs on 28 GB of Qwen1.5-MoE-A2.7B's shapes, random
                                             values; DIR needs 46 GB, the checkpoint is deleted

Each run is a process of its own, by the command line, measurement of the result included; memory is
the peak of its resident set. Ratios are what was told over what came.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moesaic.metrics.measure import environment

OUT = Path(__file__).with_suffix(".json")
SHORT = ["--samples", "32", "--max-tokens", "4096"]
TWO_STEPS = """
model: tiny-moe
out: out
steps:
  - prune: {keep: 6, refit: false}
  - slim: {keep: 0.5, score: energy, refit: false}
calibration: {samples: 32}
evaluation: {max_tokens: 4096}
"""
PLAIN = ["--score", "energy", "--no-refit"]
RUNS: dict[str, list[str]] = {
    "prune, tiny-moe": ["prune", "tiny-moe", "--keep", "6", "--no-refit", *SHORT],
    "prune --refit, tiny-shared-moe": [
        *["prune", "tiny-shared-moe", "--keep", "16", "--criterion", "reap", "--refit", *SHORT]
    ],
    "slim, tiny-moe": ["slim", "tiny-moe", "--keep", "0.5", *PLAIN, *SHORT],
    "slim --refit, tiny-shared-moe": [
        "slim",
        "tiny-shared-moe",
        "--keep",
        "0.5",
        "--score",
        "energy",
        *SHORT,
    ],
    "condense, tiny-shared-moe": [
        "condense",
        "tiny-shared-moe",
        "--layers",
        "2",
        "--no-refit",
        *SHORT,
    ],
    "skip, tiny-moe": ["skip", "tiny-moe", *SHORT],
    "carve, tiny-dense": ["carve", "tiny-dense", "--method", "more", *SHORT],
    "skip, tiny-shared-moe": ["skip", "tiny-shared-moe", *SHORT],
    "tune, tiny-moe": ["tune", "tiny-moe", "--what", "all", "--steps", "20", *SHORT[2:]],
    "carve teal, tiny-dense": ["carve", "tiny-dense", "--method", "teal", *SHORT],
    "carve dsmoe, tiny-dense": [
        *["carve", "tiny-dense", "--method", "dsmoe", "-o", "steps=10", "-o", "batch=2", *SHORT]
    ],
    "carve tomoe, tiny-dense": [
        *["carve", "tiny-dense", "--method", "tomoe", "-o", "steps=20", *SHORT]
    ],
    "prune, then slim, tiny-moe": ["run", TWO_STEPS],
    "carve wina, smollm2": ["carve", "smollm2", "--method", "wina", *SHORT],
    "slim, smollm2": ["slim", "smollm2", "--keep", "0.8", *PLAIN, *SHORT],
    "carve, smollm2": ["carve", "smollm2", "--method", "more", *SHORT],
    "tune, smollm2": [
        *["tune", "smollm2", "--what", "all", "--steps", "2", "--batch", "1", "--no-eval"]
    ],
}
BIG = "Qwen1.5-MoE-A2.7B's shapes"
FEW = ["--samples", "4", "--no-eval"]
BIG_RUNS: dict[str, list[str]] = {
    "prune by frequency, 28 GB": [
        "prune",
        BIG,
        "--keep",
        "30",
        "--criterion",
        "frequency",
        "--no-refit",
        *FEW,
    ],
    "slim, 28 GB": ["slim", BIG, "--keep", "0.5", *PLAIN, *FEW],
}
"""The results are not measured. ``condense`` would take days."""
LARGE_OUT = OUT.with_name("estimates_large.json")
DEEP = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def shapes(model_type: str, *sizes: int, **more: Any) -> dict[str, Any]:
    """A config of hidden size, layers, heads, key-value heads and vocabulary."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    said = dict(zip((*names, "vocab_size"), sizes, strict=True))
    return {"model_type": model_type, **said, "tie_word_embeddings": False, **more}


LARGE: dict[str, tuple[dict[str, Any], int]] = {
    "OLMoE-1B-7B": (
        shapes("olmoe", 2048, 16, 16, 16, 50304, intermediate_size=1024)
        | {"num_experts": 64, "num_experts_per_tok": 8},
        64,
    ),
    "Qwen1.5-MoE-A2.7B": (
        shapes("qwen2_moe", 2048, 24, 16, 16, 151936, intermediate_size=5632)
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
        | {"num_experts": 60, "num_experts_per_tok": 4},
        60,
    ),
    "Qwen3-30B-A3B": (
        shapes("qwen3_moe", 2048, 48, 32, 4, 151936, head_dim=128, intermediate_size=6144)
        | {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
        128,
    ),
    "Mixtral-8x7B": (
        shapes("mixtral", 4096, 32, 32, 8, 32000, intermediate_size=14336)
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
        8,
    ),
    "GLM-4.5-Air": (
        shapes("glm4_moe", 4096, 46, 96, 8, 151552, head_dim=128, intermediate_size=10944)
        | {"moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1}
        | {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
        | {"attention_bias": True, "num_nextn_predict_layers": 0},
        128,
    ),
    "gpt-oss-120b": (
        shapes("gpt_oss", 2880, 36, 64, 8, 201088, head_dim=64, intermediate_size=2880)
        | {"num_local_experts": 128, "num_experts_per_tok": 4},
        128,
    ),
    "Qwen3-235B-A22B": (
        shapes("qwen3_moe", 4096, 94, 64, 4, 151936, head_dim=128, intermediate_size=12288)
        | {"moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8},
        128,
    ),
    "DeepSeek-V3": (
        shapes("deepseek_v3", 7168, 61, 128, 128, 129280, intermediate_size=18432)
        | {"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1}
        | {"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3}
        | {"num_nextn_predict_layers": 0, **DEEP},
        256,
    ),
}
"""Shapes of well-known mixtures, by hand as their published configs have them, and their experts.
Parameters counted from them are those that the models' cards tell."""
CODE = """
import json, sys, time
start = time.perf_counter()
sys.argv = ["moesaic", *json.loads(sys.argv[1])]
from moesaic import cli
code = 0
try:
    cli.main()
except SystemExit as stop:
    code = stop.code or 0
import resource
from moesaic.metrics.memory import peak_resident  # which imports torch: not before the command
children = resource.getrusage(resource.RUSAGE_CHILDREN)
cpu = time.process_time() + children.ru_utime + children.ru_stime
took = {"wall": time.perf_counter() - start, "cpu": cpu}
print("TOOK", json.dumps({**took, "peak": peak_resident()}), file=sys.stderr)
sys.exit(code)
"""


def command(arguments: Sequence[str]) -> tuple[Any, dict[str, float]]:
    """What a command prints as JSON, and what it took."""
    run = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps([*arguments, "--json"])],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(run.stderr[-2000:])
    took = next(line for line in run.stderr.splitlines() if line.startswith("TOOK "))
    return json.loads(run.stdout), json.loads(took.removeprefix("TOOK "))


def arguments(name: str, work: str) -> list[str]:
    """A run's command line, whose result is in a folder's ``out``."""
    verb, model, *options = (RUNS | BIG_RUNS)[name]
    out = str(Path(work) / "out")
    if model == BIG:
        return [verb, str(Path(work).parent / "source"), out, *options]
    if verb != "run":
        return [verb, model, out, *options]
    recipe = Path(work) / "recipe.yaml"
    recipe.write_text(model)
    return [verb, str(recipe), f"out={out}"]


def ratios(estimate: dict[str, Any], took: dict[str, float]) -> dict[str, float]:
    """What was told over what came."""
    return {
        "output_bytes": estimate["output_bytes"] / took["output_bytes"],
        "peak_memory": estimate["peak_memory_bytes"] / took["peak"],
        "seconds": estimate["seconds"] / took["wall"],
        "cpu_seconds": estimate["seconds"] / took["cpu"],
    }


def told_anew(name: str, row: dict[str, Any], folder: Path | None = None) -> dict[str, Any]:
    """A run that was measured before, with what a dry run tells of it now."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        told, asking = command([*arguments(name, work), "--dry-run"])
    estimate = told["estimate"]
    return {
        **row,
        "told": estimate,
        "asking": asking,
        "ratios": ratios(estimate, row["came"]),
        "load_while_told": os.getloadavg()[0],
    }


def measured(name: str, folder: Path | None = None) -> dict[str, Any]:
    """One run, told and carried out, in a folder of its own inside this one."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        out = Path(work) / "out"
        given = arguments(name, work)
        told, asking = command([*given, "--dry-run"])
        load = os.getloadavg()[0]
        start = time.time()
        record, took = command(given)
        files = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
        written = sum(f.stat().st_size for f in out.glob("model*.safetensors*"))
    estimate = told["estimate"]
    came = {**took, "output_bytes": written, "folder_bytes": files}
    return {
        "told": estimate,
        "came": came,
        "asking": asking,
        "ratios": ratios(estimate, came),
        "load": load,
        "at": start,
        "native": record["native"],
    }


def write_big(folder: Path) -> None:
    """The checkpoint of the large runs: random values, and the tokenizer of a small model."""
    from prune_large import model_config, write_checkpoint

    from moesaic.io.source import resolve

    write_checkpoint(model_config(24), folder)
    for file in resolve("tiny-moe").folder.glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)


def large(name: str) -> dict[str, Any]:
    """What each verb would make of a model of these shapes, in bfloat16, and what it would take."""
    from moesaic.errors import MoesaicError
    from moesaic.estimates import Built, estimate
    from moesaic.io.source import resolve
    from moesaic.recipe import Recipe, step_config

    said, experts = LARGE[name]
    found: dict[str, Any] = {"config": said}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({**said, "dtype": "bfloat16"}))
        whole = Built(resolve(folder).config, None)
        found["original"] = {
            "bytes": whole.bytes,
            "parameters": whole.size.total_parameters,
            "active_parameters": whole.size.active_parameters,
        }
        steps: dict[str, dict[str, Any]] = {
            "prune": {"keep": experts // 2},
            "slim": {"keep": 0.5},
            "condense": {"layers": len(whole.size.layers) // 2},
            "skip": {"experts_per_token": max(u.top_k for u in whole.size.layers) // 2},
        }
        for verb, options in steps.items():
            more: list[dict[str, Any]] = (
                [{}, {"keep": "shared+routed"}] if verb == "condense" else [{}]
            )
            for further in more:
                step = step_config(verb, {**options, **further})
                try:
                    told = estimate(Recipe(folder, "out", (step,), evaluation=None))
                except MoesaicError as error:
                    found[verb] = {"refused": str(error)}
                else:
                    found[verb] = {"options": {**options, **further}, **told.as_json()}
                    break
    return found


def main(names: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="runs whose names contain this")
    parser.add_argument("--tell", action="store_true", help="runs that were measured, told anew")
    parser.add_argument("--large", action="store_true", help="the table of well-known models")
    parser.add_argument("--big", type=Path, help="runs on 28 GB, in this folder")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint of --big there")
    options = parser.parse_args(names)
    if options.large:
        shown: dict[str, Any] = {"environment": environment(), "load": os.getloadavg()[0]}
        for name in LARGE:
            start = time.process_time()
            shown[name] = large(name)
            shown[name]["cpu_seconds_to_tell"] = time.process_time() - start
            told = {v: shown[name][v].get("seconds") for v in ("prune", "slim", "condense")}
            print(name, shown[name]["original"], told, flush=True)
            LARGE_OUT.write_text(json.dumps(shown, indent=1) + "\n")
        return
    kept: dict[str, Any] = json.loads(OUT.read_text()) if OUT.exists() else {}
    kept["environment"] = environment()
    rows = kept.setdefault("runs", {})
    source = None if options.big is None else options.big / "source"
    if source is not None and not source.exists():
        write_big(source)
    for name in RUNS if source is None else BIG_RUNS:
        if (name in rows) != options.tell or options.only not in name:
            continue
        folder = options.big
        rows[name] = told_anew(name, rows[name], folder) if options.tell else measured(name, folder)
        OUT.write_text(json.dumps(kept, indent=1) + "\n")
        print(name, json.dumps(rows[name]["ratios"]), flush=True)
    if source is not None and not options.keep:
        shutil.rmtree(source)


if __name__ == "__main__":
    main()
