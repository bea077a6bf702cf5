"""Prune and slim a mixture of 100 GB in FP8 from disk: memory, bytes, a kill on the way, and speed.

The checkpoint has the shapes of GLM-4.5-Air (106 B parameters) and is sparse: its codes are zeros
that take no room. Statistics are made up, so that nothing is run: what is timed is reading,
choosing and writing. Beside it ``cp`` copies as many bytes of the source, whose holes it need not
read, and the result, which it must. ``--layers 3`` is a dry run.

    python benchmarks/prune_100gb.py --work /somewhere/with/40GB --out benchmarks/prune_100gb.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import Glm4MoeConfig

from moesaic.io.checkpoint import INDEX_NAME, Checkpoint, skeleton
from moesaic.io.source import resolve
from moesaic.methods.naee.observed import plain
from moesaic.metrics.measure import environment
from moesaic.observation.experts import ExpertStats, join, layer_file, save_layer
from moesaic.observation.neurons import no_stats
from moesaic.surgery import base_shape

BLOCK = 128
SHARD = 4 << 30
SIZES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
Entry = tuple[str, str, tuple[int, ...]]


def config_of(layers: int) -> Glm4MoeConfig:
    """GLM-4.5-Air."""
    return Glm4MoeConfig(
        vocab_size=151_552,
        hidden_size=4096,
        intermediate_size=10_944,
        moe_intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=96,
        num_key_value_heads=8,
        head_dim=128,
        n_routed_experts=128,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        attention_bias=True,
        num_nextn_predict_layers=0,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["Glm4MoeForCausalLM"],
    )


def entries(model: Any) -> Iterator[Entry]:
    """Name, type and shape of every tensor on disk."""
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        if name.endswith("experts.gate_up_proj"):
            start = name.removesuffix("gate_up_proj")
            for e in range(shape[0]):
                for part in ("gate_proj", "up_proj"):
                    yield from packed(f"{start}{e}.{part}.weight", (shape[1] // 2, shape[2]))
        elif name.endswith("experts.down_proj"):
            for e in range(shape[0]):
                yield from packed(
                    f"{name.removesuffix('down_proj')}{e}.down_proj.weight", shape[1:]
                )
        elif len(shape) == 2 and "proj" in name:
            yield from packed(name, shape)
        else:
            yield name, "F32" if name.endswith("correction_bias") else "BF16", shape


def packed(name: str, shape: tuple[int, ...]) -> Iterator[Entry]:
    """A matrix in FP8 with its scales."""
    yield name, "F8_E4M3", shape
    yield f"{name}_scale_inv", "F32", tuple(-(-n // BLOCK) for n in shape)


def write_sparse(config: Glm4MoeConfig, folder: Path) -> None:
    """Headers and holes, in shards; the scales are ones."""
    folder.mkdir(parents=True)
    shards: list[list[Entry]] = [[]]
    held = 0
    for entry in entries(skeleton(config, torch.bfloat16)):
        size = nbytes(entry)
        if held + size > SHARD:
            shards.append([])
            held = 0
        shards[-1].append(entry)
        held += size
    places = {}
    for number, shard in enumerate(shards):
        file = folder / f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        header: dict[str, dict[str, Any]] = {}
        at = 0
        for entry in shard:
            name, kind, shape = entry
            end = at + nbytes(entry)
            header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, end]}
            places[name], at = file.name, end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with file.open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + at)
            for name, _, shape in (e for e in shard if e[0].endswith("_scale_inv")):
                out.seek(8 + len(text) + header[name]["data_offsets"][0])
                out.write(torch.ones(shape).numpy().tobytes())
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    said = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"}
    config.quantization_config = {**said, "activation_scheme": "dynamic"}
    config.save_pretrained(folder)


def nbytes(entry: Entry) -> int:
    """Bytes of a tensor."""
    size = SIZES[entry[1]]
    for n in entry[2]:
        size *= n
    return size


def write_stats(folder: Path, out: Path) -> None:
    """Statistics of no text: calls and energies at random."""
    from moesaic.arch.lookup import moe_arch

    source = resolve(str(folder))
    arch, model = moe_arch(source.config), skeleton(source.config)
    base = plain(base_shape(model, arch))
    base |= {"weights": source.fingerprint, "name": source.name, "dtype": "torch.bfloat16"}
    layers, draw = arch.moe_layers(model), torch.Generator().manual_seed(0)
    header: dict[str, Any] = {
        "base": base,
        "dtype": "torch.bfloat16",
        "layers": layers,
        "calibration": "none",
    }
    header |= {"tokens": 64, "gram": 0}
    parts = out.with_suffix(".partial")
    for i in layers:
        view = arch.mixture(arch.layers(model)[i])
        count = view.count
        neurons = no_stats(count, view.width, view.shared_width)
        energy_EM = torch.rand(count, view.width, generator=draw, dtype=torch.float64)
        one, none = torch.ones(count, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
        stats = ExpertStats(
            calls_E=torch.randint(1, 999, (count,), generator=draw),
            gate_E=one.clone(),
            norm_E=one.clone(),
            square_E=one.clone(),
            gated_E=one.clone(),
            pair_EE=torch.zeros(count, count, dtype=torch.float64),
            spread_E=one.clone(),
            bias_E=torch.zeros(count),
            batch_T=torch.zeros(64, dtype=torch.int64),
            logits_TE=torch.randn(64, count, generator=draw),
            sampled_T=torch.zeros(64, dtype=torch.bool),
            gram_SP=none.float(),
            cross_SE=none.clone(),
            delta_S=none.clone(),
            neurons=replace(
                neurons,
                energy_EM=energy_EM,
                reach_EM=energy_EM.clone(),
                size_EM=energy_EM.clone(),
                shared_reach_S=neurons.shared_reach_S.clone(),
                shared_size_S=neurons.shared_size_S.clone(),
            ),
        )
        save_layer(stats, parts, i, header)
    join({i: layer_file(parts, i) for i in layers}, out, header)
    shutil.rmtree(parts)


# --- measured ------------------------------------------------------------------------------------


def written(out: Path) -> int:
    """Bytes so far of a result that is being made."""
    return sum(
        file.stat().st_size
        for folder in out.parent.glob(f".{out.name}.*.writing")
        for file in folder.glob("*.safetensors")
    )


def run(command: list[str], out: Path, kill_at: int = 0) -> dict[str, float]:
    """Run a command to its end, or until it has written so many bytes; its time and its memory."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "moesaic.cli", *command])
    while process.poll() is None:
        if kill_at and written(out) >= kill_at:
            process.send_signal(signal.SIGKILL)
        time.sleep(0.05)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert process.returncode == (-9 if kill_at else 0), process.returncode
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_seconds": used, "peak_resident_bytes": after.ru_maxrss * 1024}


def tensor_bytes(folder: Path) -> int:
    """Bytes of all tensors, headers left out."""
    found = Checkpoint(folder)
    names = ((n, found._types[n], found._shapes[n]) for n in found._files)
    return sum(nbytes(entry) for entry in names)


def kept_bytes(folder: Path, share: float) -> int:
    """Bytes of the source that a result keeps: all but experts, and their share."""
    found = Checkpoint(folder)
    total = 0
    for name in found._files:
        size = nbytes((name, found._types[name], found._shapes[name]))
        counted = ".experts." in name or ".mlp.gate." in name
        total += round(size * share) if counted else size
    return total


def copied(folder: Path, out: Path, limit: int) -> dict[str, float]:
    """``cp`` of about as many bytes of the same files, holes written out."""
    out.mkdir()
    files: list[str] = []
    size = 0
    for file in sorted(folder.glob("*.safetensors")):
        if files and size + file.stat().st_size > limit:
            break
        files.append(str(file))
        size += file.stat().st_size
    start = time.perf_counter()
    subprocess.run(["cp", "--sparse=never", *files, str(out)], check=True)
    seconds = time.perf_counter() - start
    shutil.rmtree(out)
    return {"bytes": size, "seconds": seconds, "mb_per_second": size / seconds / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--layers", type=int, default=46)
    parser.add_argument("--keep", type=int, default=16, help="experts of 128 that prune keeps")
    parser.add_argument("--width", type=int, default=128, help="neurons of 1408 that slim keeps")
    parser.add_argument(
        "--kill", type=int, default=1, help="GiB written when it is killed; 0: never"
    )
    parser.add_argument("--verbs", default="prune,slim")
    args = parser.parse_args()
    work = args.work / "moesaic-100gb"
    folder, stats, out = work / "source", work / "stats.safetensors", work / "result"
    shutil.rmtree(work, ignore_errors=True)
    asked = {
        "prune": ["--criterion", "frequency", "--keep", str(args.keep)],
        "slim": ["--score", "energy", "--keep", str(args.width / 1408)],
    }
    record: dict[str, Any] = {
        "benchmark": "prune_100gb",
        "arguments": {k: getattr(args, k) for k in ("layers", "keep", "width", "kill")},
        "environment": environment(),
    }
    try:
        write_sparse(config_of(args.layers), folder)
        write_stats(folder, stats)
        record["source_bytes"] = tensor_bytes(folder)
        for verb in args.verbs.split(","):
            common = [verb, str(folder), str(out), "--stats", str(stats), "--no-eval", *asked[verb]]
            found: dict[str, Any] = {}
            if args.kill:
                found["killed"] = run(common, out, kill_at=args.kill << 30)
                assert not out.exists()
                common.append("--resume")
            found["whole"] = run(common, out)
            found["result_bytes"] = made = tensor_bytes(out)
            found["mb_per_second"] = made / found["whole"]["seconds"] / 1e6
            if verb == "prune":
                found["kept_bytes"] = kept_bytes(folder, args.keep / 128)
            found["cp_of_result"] = copied(out, work / "copy", 2 * made)
            shutil.rmtree(out)
            found["cp"] = copied(folder, work / "copy", made)
            record[verb] = found
            print(json.dumps({verb: found}, indent=1), flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    text = json.dumps(record, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
