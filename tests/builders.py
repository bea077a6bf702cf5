"""Tiny random models, plans and files that tests are made of. Nothing is downloaded."""

from __future__ import annotations

import atexit
import copy
import io
import json
import multiprocessing
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import fields
from functools import cache
from io import BufferedReader
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto import CONFIG_MAPPING

from moesaic import exports, hub
from moesaic.arch.dense import Arch
from moesaic.arch.lookup import base_arch
from moesaic.carving.carved_layer import CarvedLayer
from moesaic.data.reader import Use, open_rows, shipped_texts
from moesaic.data.rows import text_of
from moesaic.data.sources import sources_of
from moesaic.exports.native import NEAR, Export, decide, write
from moesaic.exports.quantiser import FileTensor, begin_file, fill_file
from moesaic.fitting.candidates import Form, forms
from moesaic.io.checkpoint import Checkpoint
from moesaic.io.source import Source, resolve
from moesaic.modules.running import always_routing
from moesaic.observation.files import FILED
from moesaic.observation.stats import Stats, tally_of
from moesaic.observation.stream import LayerStream
from moesaic.plan import Plan
from moesaic.plans.base import LayerPlan
from moesaic.plans.condensed import CondensedLayer
from moesaic.result import save_applied
from moesaic.surgery import apply_plan, base_shape

TESTS = Path(__file__).parent
VOCAB = 384
OLD = Version(transformers.__version__) < Version("5.23")
"""True of transformers that lacks some types, and some language models alone."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of the normal distribution, the same of the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


DENSE = (
    "gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo2", "phi", "phi3", "qwen2",
    "qwen3",
)  # fmt: skip
"""Dense architectures that the suites run over; ``test_contract.py`` runs over all."""

# --- dense models --------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
EXTRA: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 8, "sliding_window": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8}, "qwen3": {"head_dim": 8},
    "llama": {"mlp_bias": True},
    "granite": {"residual_multiplier": 0.5, "embedding_multiplier": 2.0},
}  # fmt: skip


def tiny_config(model_type: str, **changes: Any) -> Any:
    """The config of a tiny model of an architecture."""
    return CONFIG_MAPPING[model_type](**{**SMALL, **EXTRA.get(model_type, {}), **changes})


def tiny_model(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """A random model whose weights are large enough for neurons to differ."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


# --- mixtures of experts -------------------------------------------------------------------------

MOE_SMALL: dict[str, Any] = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"} | {
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 16,
}

COUNT: dict[str, str] = {
    "mixtral": "num_local_experts", "qwen2_moe": "num_experts", "qwen3_moe": "num_experts",
    "olmoe": "num_experts", "deepseek": "n_routed_experts", "deepseek_v2": "n_routed_experts",
    "deepseek_v3": "n_routed_experts", "glm4_moe": "n_routed_experts",
    "ernie4_5_moe": "moe_num_experts", "granitemoe": "num_local_experts",
    "granitemoeshared": "num_local_experts", "gpt_oss": "num_local_experts",
    "phimoe": "num_local_experts",
}  # fmt: skip
MOE = tuple(COUNT)
"""Mixtures of experts that the suites run over; ``test_contract.py`` runs over all."""
MLA = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 1,
    "moe_intermediate_size": 16, "routed_scaling_factor": 2.5,
}  # fmt: skip
MOE_EXTRA: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1],
    },
    "qwen3_moe": {"moe_intermediate_size": 16, "head_dim": 8, "norm_topk_prob": True},
    "deepseek": {"moe_intermediate_size": 16, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "deepseek_v2": {
        **MLA, "n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy",
        "n_shared_experts": 1,
    },
    "deepseek_v3": {**MLA, "n_group": 2, "topk_group": 1, "n_shared_experts": 1},
    "glm4_moe": {
        "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "head_dim": 8, "first_k_dense_replace": 1,
    },
    "ernie4_5_moe": {
        "moe_intermediate_size": 16, "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
        "moe_k": 2,
    },
    "granitemoeshared": {"shared_intermediate_size": 24},
    "gpt_oss": {"head_dim": 8, "sliding_window": 8},
    "phimoe": {"router_jitter_noise": 0.01, "input_jitter_noise": 0.0},
}  # fmt: skip


def tiny_moe(model_type: str, experts: int = 8, top_k: int = 2, **changes: Any) -> Any:
    """A random model whose routers send tokens everywhere and whose choice biases matter."""
    extra = {**MOE_EXTRA.get(model_type, {}), COUNT[model_type]: experts}
    key = "moe_k" if model_type == "ernie4_5_moe" else "num_experts_per_tok"
    settings = {**MOE_SMALL, "tie_word_embeddings": False, **extra, key: top_k, **changes}
    model = tiny_model(model_type, **settings)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            router = ".gate.weight" in name or ".router.weight" in name
            if router or name.endswith(("router.bias", "e_score_correction_bias")):
                scale = 0.5 if router else 0.3
                tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=scale)
    return model


def any_model(model_type: str, **changes: Any) -> Any:
    """A tiny model of a dense architecture or of a mixture of experts."""
    return (tiny_moe if model_type in MOE else tiny_model)(model_type, **changes)


def nightly(*values: Any) -> Any:
    """Values of a test that ``make test-all`` tries alone."""
    return pytest.param(*values, marks=pytest.mark.nightly)


BEHIND, APART = "model.layers.{number}.", "mtp.layers.{depth}."
PREDICTING = {
    BEHIND: ("eh_proj", "enorm", "hnorm", "shared_head.norm"),
    APART: ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
}
"""Of layers that predict further tokens, by the start of their names: what joins token and hidden
state, the norms of both, and the last one; within the layer, or by their whole names."""


def predicting(model: Any, folder: Path, count: int = 1, start: str = BEHIND) -> Path:
    """Save a model with MTP layers after it, as its publishers would.

    They are like the last layer, their values at random.
    """
    model.save_pretrained(folder)
    file, last = folder / "model.safetensors", model.config.num_hidden_layers - 1
    tensors = load_file(file)
    like = {n: t for n, t in tensors.items() if n.startswith(f"model.layers.{last}.")}
    width = model.config.hidden_size
    draw = torch.Generator().manual_seed(11)
    for depth in range(count):
        prefix = start.format(number=last + 1 + depth, depth=depth)
        join, *norms = (part if start == APART else prefix + part for part in PREDICTING[start])
        more = {n.replace(f"model.layers.{last}.", prefix): t for n, t in like.items()}
        shapes = {n: (tuple(t.shape), t.dim() == 1) for n, t in more.items()}
        shapes |= {f"{join}.weight": ((width, 2 * width), False)}
        shapes |= {f"{norm}.weight": ((width,), True) for norm in norms}
        for name, (shape, vector) in shapes.items():
            values = torch.randn(shape, generator=draw)
            tensors[name] = 1 + 0.1 * values if vector else 0.3 * values
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


# --- text ----------------------------------------------------------------------------------------


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer, trained on a little of the text that ships."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(shipped_texts("calibration", "prose")[:5], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|endoftext|>")


def stored(model: Any, folder: Path, **options: Any) -> Path:
    """Save a model as a user would have it, with a tokenizer; its folder."""
    model.save_pretrained(folder, **options)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@cache
def pages(name: str) -> str:
    """A text file of a few pages of prose to calibrate on, or to measure on.

    Args:
        name: ``calibration`` or ``evaluation``, whose pages differ.
    """
    folder = Path(tempfile.mkdtemp(prefix="moesaic-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = folder / f"{name}.txt"
    file.write_text("".join(shipped_texts(name, "prose"))[:40_000], "utf-8")  # type: ignore[arg-type]
    return str(file)


# --- plans ---------------------------------------------------------------------------------------


def whole_plan(model: Any, arch: Arch, top_k: int = 3, seed: int = 0) -> Plan:
    """Experts in a random order, of which ``top_k`` of 3 are run; with 3 every neuron is."""
    generator = torch.Generator().manual_seed(seed)
    base = base_shape(model, arch)
    layers = {}
    for i in (1, 3):
        layers[i] = CarvedLayer(
            order_M=torch.randperm(base.widths[i], generator=generator),
            backbone=base.widths[i] - 3 * 16,
            petals=(16, 16, 16),
            top_k=top_k,
            router_RD=torch.randn(3, base.hidden_size, generator=generator),
        )
    return Plan("test", base, layers)


def carved_layer(backbone: int, petals: Any, seed: int = 0, **changes: Any) -> CarvedLayer:
    """A layer of a tiny model with neurons and routers at random."""
    width, hidden = SMALL["intermediate_size"], SMALL["hidden_size"]
    generator = torch.Generator().manual_seed(seed)
    router = torch.randn(len(petals), hidden, generator=generator)
    options = {
        "top_k": min(1, len(petals)),
        "router_RD": router / router.norm(dim=1, keepdim=True) if petals else None,
        **changes,
    }
    order = torch.randperm(width, generator=generator)[: backbone + sum(petals)]
    return CarvedLayer(order, backbone, tuple(petals), **options)


EQUAL = dict.fromkeys(range(4), (32, (8, 8, 8, 8)))
LAST_HALF = dict.fromkeys((2, 3), (32, (8, 8, 8, 8)))
BARE = dict.fromkeys(range(4), (0, (16, 16, 16, 16)))
UNEVEN = {0: (30, (12, 10, 12)), 1: (24, (8, 16, 8, 8)), 2: (40, (12, 12)), 3: (32, (8, 8, 8, 8))}
"""Arguments of :func:`carved_layer` by layer."""


def condensed_layer(experts: list[int], width: int, **changes: Any) -> CondensedLayer:
    """Half of each of these experts in one MLP."""
    gates = torch.full((len(experts),), 0.5)
    return CondensedLayer(torch.tensor(experts), gates, width, **changes)


def converted(model: Any, layers: dict[int, LayerPlan]) -> Any:
    """A model with these layers converted, in place."""
    arch = base_arch(model.config)
    plan = Plan("test", base_shape(model, arch), layers)
    apply_plan(model, arch, plan)
    hub.convert_class(model, arch, plan)
    return model


def carved_model(model_type: str = "llama", **changes: Any) -> Any:
    """Two of four layers carved, of which tokens run one expert in three."""
    model = tiny_model(model_type, **changes)
    return converted(model, dict(whole_plan(model, base_arch(model.config), top_k=1).layers))


def saved(folder: Path, model: Any, layers: dict[int, LayerPlan]) -> Source:
    """A model with these layers converted, saved as a user would have it."""
    hub.save_live(converted(model, layers), None, folder)
    return resolve(str(folder))


def applied(
    base: Any, model: Any, layers: dict[int, LayerPlan], out: Path, **options: Any
) -> Source:
    """A checkpoint with layers converted from disk to disk.

    Args:
        base: its folder, or source.
        model: the same in memory.
        layers: what is converted.
        out: a new folder.
        options: of ``save_applied``.
    """
    source = base if isinstance(base, Source) else Source(base.name, base)
    plan = Plan("test", base_shape(model, base_arch(model.config)), layers)
    out.mkdir()
    save_applied(source, plan, out, **options)
    return Source(out.name, out)


# --- few bits ------------------------------------------------------------------------------------


def int4_config(group: int) -> dict[str, Any]:
    """The ``quantization_config`` of experts in groups of int4, as llm-compressor writes it."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*mlp\\.gate$", "re:.*self_attn.*"],
    }


def blank(form: Any, tensor: Tensor) -> dict[str, Tensor]:
    """A weight of the same shape in a format, without values."""
    parts = {form.ends[0]: tensor, form.ends[1]: torch.zeros(1, 1)}
    if form.method == "compressed-tensors":
        rows, columns = tensor.shape
        (group,) = form._group_sizes()
        parts[form.ends[0]] = torch.zeros(rows, columns // form.each, dtype=torch.int32)
        parts[form.ends[1]] = torch.zeros(rows, columns // group, dtype=torch.bfloat16)
        parts[form.ends[2]] = torch.tensor([rows, columns])
    return parts


def quantise(folder: Path, form: Any, chosen: Callable[[str, Tensor], bool]) -> Path:
    """Store the matrices of a checkpoint in a format, as its publishers would."""
    file = folder / "model.safetensors"
    tensors, out = load_file(file), {}
    for name, tensor in tensors.items():
        if chosen(name, tensor):
            parts = form.parts(tensor, blank(form, tensor))
            out |= {name + end: part for end, part in parts.items()}
        else:
            out[name] = tensor.to(torch.bfloat16)
    save_file(out, file, metadata={"format": "pt"})
    edited(folder / "config.json", quantization_config=form.config, dtype="bfloat16")
    return folder


def quantised_experts(model: Any, folder: Path, form: Any) -> Path:
    """Store a mixture whose experts alone are in a format."""
    model.save_pretrained(folder)
    return quantise(folder, form, lambda name, _: ".experts." in name and "bias" not in name)


# --- files ---------------------------------------------------------------------------------------


def edited(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file, or begin one."""
    before = json.loads(file.read_text("utf-8")) if file.exists() else {}
    file.write_text(json.dumps({**before, **changes}), "utf-8")


@contextmanager
def opened(folder: Path) -> Iterator[dict[str, Tensor]]:
    """The tensors of a folder's one file, which are written again at the end."""
    tensors = load_file(folder / "model.safetensors")
    yield tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def with_others(source: Path, out: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of a model's folder with other tensors in its one file."""
    shutil.copytree(source, out)
    with opened(out) as tensors:
        change(tensors)
    return out


def altered(name: str, change: Callable[[Any], Any] | None = None) -> Callable[..., None]:
    """Changes one of some tensors by name; without a change that one is gone."""

    def alter(tensors: dict[str, Any]) -> None:
        before = tensors.pop(name, None)
        if change is not None:
            tensors[name] = change(before)

    return alter


def finish(writer: Any) -> None:
    """Write a GGUF file of which all is added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- layers with their tokens --------------------------------------------------------------------


def stream_of(model: Any, tokens: Any, layers: Any = None, **options: Any) -> LayerStream[Any]:
    """A model's layers with the tokens that reach them, one after the other; some, or all."""
    arch = base_arch(model.config)
    return LayerStream(model, arch, tokens, layers, view=arch.view, **options)


def routed_sites(model: Any, tokens: Any, **options: Any) -> LayerStream[Any]:
    """The layers that route."""
    routed = base_shape(model, base_arch(model.config)).routed
    return stream_of(model, tokens, [*routed], **options)


def site_of(model: Any, tokens: Any, index: int | None = None, **options: Any) -> Any:
    """A layer with the tokens that reach it: if no other is asked for the first that routes, of a
    dense model the first."""
    if index is None:
        index = next(iter(base_shape(model, base_arch(model.config)).routed), 0)
    layers = iter(stream_of(model, tokens, [index], **options))
    site: Any = next(layers)
    site.stream = layers  # which clears the site's tokens when it ends
    return site


# --- comparisons ---------------------------------------------------------------------------------


def weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name."""
    checkpoint = Checkpoint(Path(folder))
    return {name: checkpoint.tensor(name) for name in checkpoint.names()}


def inside(folder: Path) -> set[str]:
    """The files under a folder, by their paths in it."""
    return {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}


def contents(folder: Path) -> dict[str, bytes]:
    """The files under a folder with what they hold."""
    return {name: (folder / name).read_bytes() for name in inside(folder)}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two sets of tensors are the same, bitwise."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@torch.no_grad()
def logits(model: nn.Module, tokens: Any) -> Tensor:
    """The logits (N, T, V) of a model that is loaded, every token as at decoding."""
    with always_routing(model):
        logits_BTV: Tensor = model(tokens.input_ids).logits
    return logits_BTV


def loaded(folder: Path) -> Any:
    """The model of a folder, as a user loads it, with every weight found and none left over."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    return model.eval()


def directions(tensor: Tensor) -> list[Tensor]:
    """Rows of a tensor, and its columns, of length one and their largest entry positive."""
    values = tensor.detach().double()
    sides = (
        [values.flatten(0, -2), values.mT.flatten(0, -2)] if tensor.dim() > 1 else [values[None]]
    )
    out = []
    for side in sides:
        rows = side[side.norm(dim=1) > 0]
        sign = rows.gather(1, rows.abs().argmax(1, keepdim=True)).sign()
        out.append(rows / rows.norm(dim=1, keepdim=True) * sign)
    return out


def is_own(tensor: Tensor, base: list[Tensor]) -> bool:
    """Whether all rows, or all columns, of a tensor are the base's, scaled by constants."""
    base_rows = [part for tensor in base for part in directions(tensor)]
    for rows in directions(tensor):
        same_size = [k for k in base_rows if k.shape[1] == rows.shape[1]]
        if not len(rows):
            return True
        if same_size and (torch.cdist(rows, torch.cat(same_size)).min(1).values < 1e-5).all():
            return True
    return False


def same(a: LayerPlan, b: LayerPlan) -> bool:
    """Return True if two layers' plans are identical, tensors bitwise."""
    ta, tb = a.tensors(), b.tensors()
    return (
        a.header() == b.header()
        and ta.keys() == tb.keys()
        and all(torch.equal(ta[k], tb[k]) for k in ta)
    )


def same_model(source: Source, folder: Path, tokens: Any, **options: Any) -> tuple[Export, Any]:
    """Export a model; it must load as a class of transformers and compute what the source does."""
    decided = decide(source, **options)
    folder.mkdir()
    write(source, decided, folder)
    model = loaded(folder)
    assert type(model).__module__.startswith("transformers.")
    wanted, actual = logits(source.load(), tokens), logits(model, tokens)
    if decided.exact:
        assert (actual - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    else:
        assert 0 < (actual - wanted).norm() <= NEAR * wanted.norm()
    return decided, model


def losses_of(result: Any) -> list[dict[str, float]]:
    """What was noted of every step of a training."""
    losses: list[dict[str, float]] = result.summary["training"]["losses"]
    return losses


def few_forms(*given: Any) -> list[Form]:
    """Two forms of those that a search looks at, where it does not matter which it offers."""
    return [form for form in forms(*given) if form.name in ("slim", "prune")]


# --- processes -----------------------------------------------------------------------------------


def examples(count: int = 16, length: int = 20, seed: int = 3) -> list[dict[str, list[int]]]:
    """Tokens to train on, all of which are predicted."""
    ids = torch.randint(1, VOCAB, (count, length), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in ids.tolist()]


def documents(source: str, use: Use = "calibration") -> list[str]:
    """All texts of a source, in order."""
    return [text_of(row) for part in sources_of(source, use) for row in open_rows(part, use)]


def python(*arguments: Any, **env: str) -> subprocess.Popen[bytes]:
    """Python with these arguments, which finds ``builders`` and what is on this one's path."""
    path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **env},
        stderr=subprocess.PIPE,
    )


SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["moesaic.pipeline", "moesaic.train.loop", "transformers.trainer"])


def launch(
    work: Callable[..., None], *arguments: Any, count: int = 2, ends: bool = False
) -> list[tuple[int, str]]:
    """Call a function in several CPU processes to its end, with what a launcher gives them.

    They are forks of one process that has imported what takes long. None may fail, or, with
    ``ends``, it is said how each ended.

    Returns:
        the exit code of each, and what it said on stderr.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    variables |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(i) for i in range(count)]
        running = [
            SERVER.Process(
                target=called,
                args=({**os.environ, **variables, "RANK": str(i), "LOCAL_RANK": str(i)}, files[i]),
                kwargs={"work": work, "arguments": arguments},
            )
            for i in range(count)
        ]
        for process in running:
            process.start()
        while any(p.exitcode is None for p in running):
            if not ends and any(p.exitcode for p in running):
                break
            time.sleep(0.05)
        failed = [i for i, p in enumerate(running) if p.exitcode]
        for process in running:
            if process.exitcode is None:  # it waits for one that is gone
                process.kill()
            process.join()
        assert ends or not failed, files[failed[0]].read_text()
        said = [file.read_text() if file.exists() else "" for file in files]
        return [(p.exitcode or 0, text) for p, text in zip(running, said, strict=True)]


def called(
    environment: dict[str, str], errors: Path, work: Callable[..., None], arguments: Sequence[Any]
) -> None:
    """Call a function in this process with these variables; stderr is a file."""
    os.environ.update(environment)
    os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY), 2)
    torch.set_num_threads(1)
    work(*arguments)


def quantised_file(
    file: Path, out: Path, type: str, weights: Any, chosen: Any = None
) -> dict[str, FileTensor]:
    """Quantise a GGUF file in f32; its tensors then."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    tensors = begin_file(reader, out, type, weights, chosen)
    with values_in(file) as values:
        fill_file(out, tensors, reader, values, weights)
    return tensors


@contextmanager
def values_in(file: Path) -> Iterator[BufferedReader]:
    """The values of a GGUF file, as the converter yields them."""
    from gguf import GGUFReader  # a converter, in a process of its own, brings another one

    with file.open("rb") as values:
        values.seek(min(int(tensor.data_offset) for tensor in GGUFReader(file).tensors))
        yield values


def scripted(name: str, request: str, *output: Connection) -> None:
    """A script of exports, in a process of its own."""
    for end in output:
        os.dup2(end.fileno(), 1)
    sys.argv = [name, request]
    with redirect_stdout(io.StringIO()):
        runpy.run_path(str(Path(exports.__file__).with_name(name)), run_name="__main__")


def run_script(name: str, request: str, output: int | None = None, **_: str) -> str | None:
    """Stand-in of :func:`moesaic.exports.run_script`, whose process imports torch each time."""
    ends = [] if output is None else [Connection(os.dup(output), readable=False)]
    ((code, said),) = launch(scripted, name, request, *ends, count=1, ends=True)
    return (said.strip().splitlines()[-1:] or ["no message"])[0] if code else None


@cache
def local_tasks(_: bool = False) -> Any:
    """Stand-in of :func:`moesaic.metrics.tasks.task_manager`: it reads none of thousands of files,
    and knows no task by name."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=False)


def run_command(*arguments: Any) -> None:
    """The command line with these arguments, in a process of its own."""
    from moesaic import cli

    sys.argv = ["moesaic", *map(str, arguments)]
    cli.main()


# --- carved modules ------------------------------------------------------------------------------


class Wrapped(nn.Linear):
    """A projection of a class of its own, as adapters and quantisers put into models."""


def masked(ffn: nn.Module) -> nn.Module:
    """A twin of a carved block that calls its projections and sets idle neurons to zero."""
    twin = copy.deepcopy(ffn)
    for module in twin.children():
        if type(module) is nn.Linear:
            module.__class__ = Wrapped
    return twin


@torch.no_grad()
def running(ffn: Any, x_TD: Tensor) -> Tensor:
    """What enters a carved block's down projection, neuron by neuron, idle ones zero (T, M)."""
    h_TM = ffn.view().hidden(x_TD)
    on_TM = torch.zeros_like(h_TM)
    on_TM[:, : ffn.backbone] = 1
    for t, given_R in enumerate(ffn.router(x_TD)):
        active = given_R.nonzero().flatten().tolist()
        for e in active:
            place = ffn.experts[e] if hasattr(ffn, "experts") else slice(*ffn.slices[e])
            on_TM[t, place] = given_R[e].to(h_TM) * (len(given_R) / len(active)) ** ffn.weighs
    return h_TM * on_TM


# --- several experts a token ---------------------------------------------------------------------

WAYS = {
    "every neuron": {"CROWDED": -1},
    "petal by petal": {"NARROW": 0, "LAUNCHED": 0, "CROWDED": 2},
}
"""How several experts run, forced."""


def force(monkeypatch: Any, way: str) -> None:
    """Run several experts that way, whatever is faster."""
    for name, value in WAYS[way].items():
        monkeypatch.setattr(f"moesaic.carving.carved_layer.{name}", value)


def configured(cls: type[Any], **options: Any) -> Any:
    """A config of a method; what is no option of it takes the place of a constant of its class."""
    names = {entry.name for entry in fields(cls)}
    constants = {name: value for name, value in options.items() if name not in names}
    chosen = {name: value for name, value in options.items() if name in names}
    return type(cls.__name__, (cls,), constants)(**chosen)


def statistics(site: Any, **options: Any) -> Stats:
    """All statistics of a mixture's layer that a file holds."""
    return tally_of(site, FILED, **options).stats()


def drawn_ids(*shape: int, seed: int = 1) -> Tensor:
    """Token ids at random, none of which is padding, the same of the same seed."""
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))
