"""Other tools and ours: the same mixture, the same calibration tokens, one thread, one measurement.

    python benchmarks/peers.py --peer reap=ENV/bin/python:CHECKOUT \\
        --peer llm-compressor=ENV/bin/python        writes peers.json

A peer is its own released code, imported from a checkout or an environment that you give; none of
it is here. ENV has what it asks for: transformers 4.55.0 for reap, 4.51.3 for heapr and camera,
4.36.2 for naee, 5.2.0 for ream, its own for llm-compressor. An adapter below hands a peer a folder
and windows of tokens, with its published defaults otherwise; where a peer only changes weights in
memory, they are saved as they are, which the row says.

Every row is a process of its own: CPU seconds (user and system, imports too), peak of memory, the
machine's load. Its folder is measured by :func:`moesaic.evaluate` on the held-out text that ships,
against the original, and read by transformers without Moesaic. What cannot be run says why. Rows
that the JSON has already are not made again. A folder that lies where this runs is a model too:
peers_memory.json is of qwen3-moe-1b, as shapes.py writes it with random values.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from run import apart, circumstances, commit, read, write
from tables import OURS

HERE = Path(__file__).parent
LENGTH = 256
"""Tokens of a window that calibrates."""
LOADING = """import json, sys
from transformers import AutoModelForCausalLM
folder = sys.argv[1]
try:
    read = AutoModelForCausalLM.from_pretrained
    _, report = read(folder, output_loading_info=True, trust_remote_code=False)
    wrong = ", ".join(f"{len(keys)} {what}" for what, keys in report.items() if keys)
except Exception as error:
    wrong = str(error).replace(folder, "OUT").partition(". ")[0][:200]
print(json.dumps(wrong or True))"""
"""Without Moesaic: true where transformers finds exactly the tensors that it needs, or why not."""


@dataclass(frozen=True)
class Job:
    """What a peer is asked for."""

    peer: str
    checkout: str
    base: str
    """The original's folder."""
    tokens: str
    """A file of ``input_ids``, windows (N, L), and ``logits`` (L, V) of the first."""
    keep: float
    """The share of the experts' parameters that is kept."""
    out: str

    @property
    def mended(self) -> str:
        """Where a folder that transformers cannot read lies once more, so that it can."""
        return f"{self.out}-mended"

    def windows(self) -> tuple[Any, dict[str, Any]]:
        """The windows (N, L) alone, and with a mask as models take them."""
        ids = import_module("safetensors.torch").load_file(self.tokens)["input_ids"]
        return ids, {"input_ids": ids, "attention_mask": ids**0}

    def batches(self, size: int = 8) -> list[dict[str, Any]]:
        """So many windows at once."""
        both = [values.split(size) for values in self.windows()[1].values()]
        return [{"input_ids": i, "attention_mask": m} for i, m in zip(*both, strict=True)]

    def model(self, **options: Any) -> Any:
        """The model in the peer's transformers, once it is seen to compute the same there."""
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.base, **options).eval()
        logits_LV = import_module("safetensors.torch").load_file(self.tokens)["logits"]
        with torch.no_grad():
            output_LV = model(self.windows()[0][:1]).logits[0]
        assert torch.allclose(output_LV, logits_LV, atol=1e-2), "its logits are not the original's"
        return model


def reap(job: Job) -> None:
    """Lasby et al.; the settings of its experiments/pruning-cli.sh."""
    for never_called in ("main", "data", "cluster", "eval"):  # and so need not be installed
        sys.modules[f"reap.{never_called}"] = MagicMock()
    names = ("reap.observer", "reap.prune", "reap.model_util")
    observer, prune, model_util = (import_module(name) for name in names)
    model = job.model()
    name = type(model).__name__
    if name == "Qwen2MoeForCausalLM":  # laid out as Qwen3-MoE, which it knows
        hooks = observer.Qwen3MoEObserverHookConfig()
        hooks.module_class_name_to_hook_regex = "Qwen2MoeSparseMoeBlock"
        model_util.MODEL_ATTRS[name] = model_util.MODEL_ATTRS["Qwen3MoeForCausalLM"]
    else:
        hooks = observer.OBSERVER_CONFIG_REGISTRY[name]()
    hooks.record_pruning_metrics_only = True
    hooks.renormalize_router_weights = getattr(model.config, "norm_topk_prob", False)
    watching = observer.MoETransformerObserver(model, hooks)
    with import_module("torch").no_grad():
        for batch in job.batches():
            with watching.set_attention_mask(batch["attention_mask"]):
                model(**batch)
    stats = watching.report_state()
    watching.close_hooks()
    experts = len(next(iter(stats.values()))["expert_frequency"])
    args = prune.PruneArgs(prune_method="reap")
    prune.prune(stats, model, args, int(experts * (1 - job.keep)), Path(job.out))


def llm_compressor(job: Job) -> str | None:
    """vLLM's; the package, not a checkout."""
    from datasets import Dataset
    from safetensors.torch import load_file, save_file

    model, (ids, batch) = job.model(), job.windows()
    import_module("llmcompressor").oneshot(
        model=model,
        dataset=Dataset.from_dict({name: values.tolist() for name, values in batch.items()}),
        recipe=import_module("llmcompressor.modifiers.pruning").REAPPruningModifier(
            sparsity=1 - job.keep
        ),
        num_calibration_samples=len(ids),
        max_seq_length=ids.shape[1],
        moe_calibrate_all_experts=False,
    )
    model.save_pretrained(job.out)
    if model.config.model_type != "mixtral":
        return None
    mended = f"{shutil.copytree(job.out, job.mended)}/model.safetensors"
    tensors = load_file(mended)
    for theirs, name in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
        tensors = {key.replace(theirs, name): tensor for key, tensor in tensors.items()}
    save_file(tensors, mended, {"format": "pt"})
    return "names Mixtral's experts as transformers does not: measured renamed"


def heapr(job: Job) -> str:
    """Li et al.; all neurons ranked together, one window at a time, as by default."""
    model, (ids, batch) = job.model(), job.windows()
    if "qwen" not in model.config.model_type:
        raise NotImplementedError("it knows the modules of Qwen-MoE and DeepSeek-MoE only")
    args = Namespace(model_name=model.config.model_type, cali_data="given", cali_nsamples=len(ids))
    args.cali_batch_size, args.compress_ratio = 1, 1 - job.keep
    import_module("pruning.pruning_global").pruning_global(model, batch, model.config, args)
    pad = import_module("torch").nn.functional.pad
    for layer in model.model.layers:
        for expert in layer.mlp.experts:  # their widths differ now, which no config can say
            lost = model.config.moe_intermediate_size - len(expert.up_proj.weight)
            for linear in (expert.gate_proj, expert.up_proj):
                linear.weight.data = pad(linear.weight.data, (0, 0, 0, lost))
            expert.down_proj.weight.data = pad(expert.down_proj.weight.data, (0, lost))
    model.save_pretrained(job.out)
    return "writes no folder: measured with its widths filled up with zeros"


def camera(job: Job) -> str:
    """Xu et al.; the share of the largest squares is that of its run.sh."""
    mixtral: Any = import_module("mixtral")
    model, (ids, _) = job.model(), job.windows()
    if model.config.model_type != "mixtral":
        raise NotImplementedError("its qwen2.py takes the shared expert for eight experts wide")
    args = Namespace(nsamples=len(ids), calib_length=ids.shape[1], chunk_size=8, func="prune")
    args.pratio, args.reduce_ratio = 1 - job.keep, 0.9
    mixtral.args = args
    mixtral.mix_importance(model, [(row_L[None],) for row_L in ids], model.device)
    model.save_pretrained(job.out)
    return "writes a state dict of the old size: measured with its zeros"


def ream(job: Job) -> None:
    """Samsung's merging; its defaults."""
    model, (ids, batch) = job.model(attn_implementation="eager"), job.windows()  # needs a mask
    count, length = ids.shape
    Path("data").mkdir()
    import_module("torch").save(batch, f"data/given_b{count}_seq{length}_qwen3_seed42.pt")
    experts = getattr(model.config, "num_experts", None) or model.config.num_local_experts
    merger = import_module("ream").Merger(
        model,
        merge_size=round(job.keep * experts),
        dataset="given",
        mix_ratio="1",
        calibration_data_size=count,
        calibration_data_seq_len=length,
    )
    merger.fit().save_pretrained(job.out)


def naee(job: Job) -> None:
    """Lu et al.; progressive pruning, for its layer-wise one names two GPUs."""
    model, methods = job.model(), import_module("method").METHODS
    args = Namespace(r=round(job.keep * model.config.num_local_experts))
    methods["progressive_pruning"](model, job.batches(), args)[0].save_pretrained(job.out)


def cd_moe(job: Job) -> None:
    """Cao et al.; named and not tried."""
    raise NotImplementedError(
        "scripts for 27 layers of 64 experts of DeepSeek-MoE-16B, in a fork of transformers"
    )


PEERS: dict[str, Callable[[Job], str | None]] = {
    peer.__name__.replace("_", "-"): peer
    for peer in (reap, llm_compressor, heapr, camera, ream, naee, cd_moe)
}


def work(job: Job) -> None:
    """In the peer's process: prints its figures as the last line."""
    sys.path[:1] = [job.checkout, f"{job.checkout}/src"]
    try:
        outcome = {"note": PEERS[job.peer](job)}
    except Exception as error:
        outcome = {"cannot": f"{type(error).__name__}: {error}".partition("\n")[0][:200]}
    print("\n" + json.dumps(outcome))


def prepared(name: str, work: Path, windows: int) -> dict[str, str]:
    """A model in float32 and its calibration windows, as files that every tool reads."""
    import torch
    from safetensors.torch import save_file

    from moesaic.data.text import calibration_tokens
    from moesaic.io.source import resolve

    source, base = resolve(name), work / name
    model = source.load(dtype=torch.float32)
    shutil.copytree(source.folder, base, ignore=shutil.ignore_patterns("*.safetensors*"))
    model.save_pretrained(base)
    config = base / "config.json"
    settings = json.loads(config.read_text("utf-8"))
    if "qwen" in settings["model_type"] and "num_local_experts" in settings:
        # both transformers 4 and 5 read the older name
        settings["num_experts"] = settings.pop("num_local_experts")
    config.write_text(json.dumps(settings), "utf-8")
    ids = calibration_tokens("", source.tokenizer, windows, LENGTH).input_ids
    with torch.no_grad():
        logits_LV = model(ids[:1]).logits[0]
    save_file({"input_ids": ids}, work / f"{name}.ids.safetensors")
    save_file({"input_ids": ids, "logits": logits_LV}, work / f"{name}.given.safetensors")
    return {"base": str(base), "tokens": str(work / f"{name}.given.safetensors")}


def figures(job: Job, command: Sequence[str], text: Any) -> dict[str, Any]:
    """A row: what the tool made, and what it took."""
    import moesaic

    alone = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as place:
        process, seconds, peak = apart(command, capture_output=True, env=alone, cwd=place)
    last = (process.stderr if process.returncode else process.stdout).rstrip().rpartition("\n")[2]
    if process.returncode:
        return {"cannot": last}
    said = {k: v for k, v in json.loads(last).items() if v} if job.peer in PEERS else {}
    if "cannot" in said:
        return said
    loading = subprocess.check_output([sys.executable, "-c", LOADING, job.out], text=True)
    folder = job.mended if Path(job.mended).exists() else job.out
    score = moesaic.evaluate(folder, against=job.base, data=text).as_json()
    return {
        **said,
        "loads_in_transformers": json.loads(loading),
        "perplexity": score["perplexity"],
        "kl": score["kl"],
        "bytes": sum(file.stat().st_size for file in Path(job.out).glob("*.safetensors")),
        "cpu_seconds": round(seconds, 1),
        "peak_memory_bytes": peak,
        "load": os.getloadavg()[0],
    }


def versions(peer: str, python: str, checkout: str) -> dict[str, str]:
    """What a peer was."""
    packages = ["torch", "transformers", *([] if checkout else [peer.replace("-", "")])]
    code = f"from importlib.metadata import version; print(*map(version, {packages}))"
    output = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    installed = dict(zip(packages, output.split(), strict=True))
    return installed | ({"commit": commit(checkout)} if checkout else {})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peer", nargs="*", action="extend", default=[], metavar="NAME=PYTHON:DIR")
    parser.add_argument("--models", nargs="*", default=["tiny-shared-moe", "tiny-moe"])
    parser.add_argument("--keep", nargs="*", type=float, default=[0.5, 0.25])
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=HERE / "peers.json")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.job:
        work(Job(**json.loads(args.job)))
        return
    from moesaic.data.text import evaluation_tokens
    from moesaic.io.source import resolve

    peers = {}
    for name, _, where in (peer.partition("=") for peer in args.peer):
        if name not in PEERS:
            raise SystemExit(f"--peer {name}: one of {', '.join(PEERS)}")
        python, _, checkout = where.partition(":")
        peers[name] = str(Path(python).absolute()), checkout and str(Path(checkout).absolute())
    record = {"results": [], **read(args.out)}
    words = [f"{name}=ENV/bin/python{place[1] and ':CHECKOUT'}" for name, place in peers.items()]
    words = ["--models", *args.models, "--keep", *map(str, args.keep), "--peer", *words]
    words += ["--windows", str(args.windows), "--max-tokens", str(args.max_tokens)]
    record |= {
        **circumstances("benchmarks/peers.py", *words, "--out", args.out.name),
        "calibration": {"windows": args.windows, "length": LENGTH},
        "peers": record.get("peers", {})
        | {name: versions(name, *place) for name, place in peers.items()},
        "models": [*dict.fromkeys([*record.get("models", []), *args.models])],
        "keep": [*dict.fromkeys([*record.get("keep", []), *args.keep])],
    }
    done = {(row["tool"], row["model"], row["keep"]) for row in record["results"]}
    with tempfile.TemporaryDirectory(prefix="moesaic-peers-") as scratch:
        for name in args.models:
            files = prepared(name, Path(scratch), args.windows)
            text = evaluation_tokens("", resolve(name).tokenizer, max_tokens=args.max_tokens)
            for keep, tool in product(args.keep, (*peers, *OURS)):
                if (tool, name, keep) in done:
                    continue
                python, checkout = peers.get(tool, (sys.executable, ""))
                job = Job(tool, checkout, keep=keep, out=f"{scratch}/out", **files)
                command = [python, str(Path(__file__).absolute())]
                command += ["--job", json.dumps(asdict(job))]
                if tool in OURS:
                    ids = files["tokens"].replace(".given.", ".ids.")
                    command = [python, "-m", "moesaic", *tool.split(), job.base, job.out]
                    command += ["--keep", str(keep), "--no-eval", "--calibration", ids]
                row = {"tool": tool, "model": name, "keep": keep}
                row |= figures(job, command, text)
                record["results"].append(row)
                write(record, args.out)
                print(json.dumps(row), flush=True)
                for folder in (job.out, job.mended):
                    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
