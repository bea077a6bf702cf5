"""Prune or measure a checkpoint that is larger than memory: 60 -> 45 experts, peak memory.

A checkpoint with the shapes of Qwen1.5-MoE-A2.7B (28 GB of bfloat16, random weights) is written
shard by shard, then pruned straight from disk in a process of its own, whose VmHWM is read at the
end. ``--layers 2`` is a dry run. With ``--measure`` it is not pruned: its perplexity is taken layer
by layer.

    python benchmarks/prune_large.py --work /somewhere/with/60GB --out benchmarks/prune_large.json
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import Qwen2MoeConfig

from moesaic.io.checkpoint import Checkpoint, ShardWriter, skeleton
from moesaic.metrics.measure import environment

PRUNE = """
import json, sys, time
import torch
import moesaic
from moesaic import PruneConfig, Tokens
from moesaic.io.source import resolve

folder, out, keep, windows, length = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
torch.manual_seed(0)
ids = torch.randint(resolve(folder).config.vocab_size, (windows, length))
start = time.perf_counter()
config = PruneConfig(keep=keep, refit=False)
result = moesaic.prune(folder, config, calibration=Tokens(ids), tokenizer=object())
decided = time.perf_counter()
result.save(out)
saved = time.perf_counter()
lines = open("/proc/self/status").read().splitlines()
peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
print(json.dumps({
    "peak_resident_bytes": peak,
    "seconds_deciding": decided - start,
    "seconds_writing": saved - decided,
    "analyses": {i: {k: a[k] for k in ("relative_loss", "search", "sets", "tokens")}
                 for i, a in result.analyses.items()},
}))
"""

MEASURE = """
import json, sys, time
import torch
import moesaic
from moesaic import Tokens
from moesaic.io.source import resolve

folder, _, _, windows, length = sys.argv[1:]
torch.manual_seed(0)
ids = torch.randint(resolve(folder).config.vocab_size, (int(windows), int(length)))
start = time.perf_counter()
found = moesaic.evaluate(folder, data=Tokens(ids), tokenizer=object(), stream=True)
seconds = time.perf_counter() - start
lines = open("/proc/self/status").read().splitlines()
peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
print(json.dumps({
    "peak_resident_bytes": peak, "seconds_measuring": seconds, "tokens": found.tokens,
    "perplexity": found.perplexity, "total_parameters": found.total_parameters,
}))
"""


def write_checkpoint(config: Qwen2MoeConfig, folder: Path) -> None:
    """Random bfloat16 tensors under the names on disk, one at a time."""
    folder.mkdir(parents=True)
    writer = ShardWriter(folder, shard_bytes=1 << 30)
    generator = torch.Generator().manual_seed(0)
    pool = (torch.randn(1 << 24, generator=generator) * config.initializer_range).bfloat16()
    twice = pool.repeat(2)  # to draw every weight would take minutes

    def add(name: str, *shape: int) -> None:
        if name.endswith(("norm.weight", "layernorm.weight")):
            writer.add(name, torch.ones(shape, dtype=torch.bfloat16))
            return
        start, count = int(torch.randint(len(pool), (1,), generator=generator)), math.prod(shape)
        values = twice[start:] if count <= len(pool) else pool.repeat(-(-count // len(pool)))
        writer.add(name, values[:count].view(shape).clone())

    model = skeleton(config, torch.bfloat16)
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for e in range(tensor.shape[0]):
                for part in ("gate_proj", "up_proj"):
                    add(f"{prefix}{e}.{part}.weight", tensor.shape[1] // 2, tensor.shape[2])
        elif name.endswith("experts.down_proj"):
            for e in range(tensor.shape[0]):
                add(f"{name.removesuffix('down_proj')}{e}.down_proj.weight", *tensor.shape[1:])
        else:
            add(name, *tensor.shape)
    writer.close()
    config.save_pretrained(folder)


def model_config(layers: int) -> Qwen2MoeConfig:
    """Qwen1.5-MoE-A2.7B's, of so many layers."""
    return Qwen2MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=5632,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_experts=60,
        num_experts_per_tok=4,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["Qwen2MoeForCausalLM"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--keep", type=int, default=45)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--measure", action="store_true", help="perplexity instead of pruning")
    parser.add_argument("--source", action="store_true", help="leave the source in --work")
    args = parser.parse_args()
    config = model_config(args.layers)
    folder, out = args.work / "prune-large-source", args.work / "prune-large-result"
    try:
        if not folder.exists():
            write_checkpoint(config, folder)
        source = Checkpoint(folder)
        shutil.rmtree(out, ignore_errors=True)
        script = MEASURE if args.measure else PRUNE
        run = [sys.executable, "-c", script, str(folder), str(out), str(args.keep)]
        start = time.perf_counter()
        done = subprocess.run(
            [*run, str(args.windows), str(args.length)], check=True, stdout=subprocess.PIPE
        )
        record = {
            "benchmark": "eval_large" if args.measure else "prune_large",
            "arguments": {k: getattr(args, k) for k in ("layers", "keep", "windows", "length")},
            "environment": environment(),
            "source_bytes": source.nbytes(),
            **({} if args.measure else {"result_bytes": Checkpoint(out).nbytes()}),
            "seconds": time.perf_counter() - start,
            **json.loads(done.stdout.splitlines()[-1]),
        }
    finally:
        shutil.rmtree(out, ignore_errors=True)
        if not args.source:
            shutil.rmtree(folder, ignore_errors=True)
    text = json.dumps(record, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
