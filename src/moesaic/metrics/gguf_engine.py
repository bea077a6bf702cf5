"""A GGUF file in llama.cpp, through llama-cpp-python: logits, greedy text, speed."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.errors import MoesaicError
from moesaic.types import Tokenizer

F32 = 0  # ggml's number of the type
_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
"""Instead of llama.cpp's log; kept, or it would be collected while in use."""


def library() -> ModuleType:
    """llama-cpp-python, silent.

    Raises:
        MoesaicError: it is not there, or cannot be loaded.
    """
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        raise MoesaicError(
            f"This needs llama-cpp-python, which is not usable here ({error}): "
            "pip install llama-cpp-python."
        ) from error
    llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p(0))
    return llama_cpp


def _opened(file: Path, **options: Any) -> Any:
    """A GGUF file in llama.cpp.

    Raises:
        MoesaicError: it cannot be loaded.
    """
    llama = library()
    try:
        return llama.Llama(str(file), verbose=False, **options)
    except (ValueError, RuntimeError, OSError) as error:
        raise MoesaicError(f"llama.cpp cannot load {file}: {error}") from error


class Engine:
    """One model, loaded. Use as a context, so that its memory is given back.

    Args:
        file: a GGUF file.
        context: tokens that prompt and continuation may have together.
        exact: keep keys and values in float32, as transformers does; llama.cpp's own default is
            float16.
    """

    def __init__(self, file: Path, context: int, exact: bool = False) -> None:
        threads = torch.get_num_threads()
        kinds = {"type_k": F32, "type_v": F32} if exact else {}
        self._llama = _opened(
            file,
            n_ctx=context,
            n_batch=512,
            n_threads=threads,
            n_threads_batch=threads,
            logits_all=exact,
            **kinds,
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._llama.close()

    @property
    def vocabulary(self) -> int:
        """Tokens it knows."""
        return int(self._llama.n_vocab())

    def _next(self, ids: Sequence[int]) -> int:
        """The greedy token after these, which are added to what was read."""
        self._llama.eval(ids)
        pointer = self._llama._ctx.get_logits_ith(-1)
        return int(np.ctypeslib.as_array(pointer, shape=(self.vocabulary,)).argmax())

    def logits(self, ids: Tensor) -> Tensor:
        """Logits (L, V) of a prompt (L,); needs ``exact``."""
        self._llama.reset()
        self._llama.eval(ids.tolist())
        return torch.from_numpy(self._llama.scores[: len(ids)].copy())

    def greedy(self, ids: Tensor, new_tokens: int) -> list[int]:
        """The greedy continuation of a prompt (L,)."""
        self._llama.reset()
        tokens = [self._next(ids.tolist())]
        while len(tokens) < new_tokens:
            tokens.append(self._next(tokens[-1:]))
        return tokens

    def __call__(self, prompt: Tensor, new_tokens: int) -> tuple[float, float]:
        """Seconds for a prompt (1, L), and for ``new_tokens`` greedy steps after it."""
        self._llama.reset()
        ids = prompt[0].tolist()
        start = time.perf_counter()
        token = self._next(ids)
        prefilled = time.perf_counter()
        for _ in range(new_tokens):
            token = self._next([token])
        return prefilled - start, time.perf_counter() - prefilled


def split_otherwise(file: Path, tokenizer: Tokenizer, texts: Sequence[str]) -> int:
    """How many of some texts llama.cpp splits into other tokens than a model's tokenizer does.

    Raises:
        MoesaicError: it cannot load the file.
    """
    engine = _opened(file, vocab_only=True)
    split = [engine.tokenize(text.encode(), add_bos=True, special=True) for text in texts]
    engine.close()
    wanted = [tokenizer(text)["input_ids"] for text in texts]
    return sum(ids != right for ids, right in zip(split, wanted, strict=True))
