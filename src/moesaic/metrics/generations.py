"""Repetition and loops in a model's continuations of fixed prompts at three temperatures.

A pruned model can keep its perplexity and yet repeat itself endlessly, which shows only when it
reads its own output.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from statistics import fmean

import torch
from jinja2 import TemplateError

from moesaic.config import checked_place
from moesaic.data.rows import rendered
from moesaic.data.text import encoded, positions
from moesaic.errors import MoesaicError, quote
from moesaic.io.models import leaves_untouched
from moesaic.io.source import Source, source_or_model, tokenizer_of
from moesaic.io.trust import reading
from moesaic.metrics.gguf_engine import Engine
from moesaic.types import JSON, Model, Named, Tokenizer, Track, expand_home, silent

PROMPTS = (
    "The old lighthouse keeper climbed the stairs one last time and",
    "To repair a bicycle tyre, first remove the wheel. Then",
    "The three main causes of the river's flooding were",
    "Dear neighbours, I am writing to you because",
    "Photosynthesis is the process by which",
    'def is_prime(n):\n    """Return whether n is a prime number."""\n',
    "Question: Why is the sky dark at night?\nAnswer:",
    "Ingredients: two onions, a litre of stock, stale bread.\n\nMethod: 1.",
    "In the year 1640 the harbour town had four hundred inhabitants. By 1700",
    "She opened the letter, read it twice, and said to her brother:",
    "import json\n\nclass Inventory:\n    def __init__(self):\n",
    "The committee met on Tuesday to discuss the new library. The chair",
)
"""Beginnings of prose, instructions, reference, dialogue and code; our own."""
TEMPERATURES = (0.0, 0.7, 1.0)
"""Greedy, and two at which tokens are drawn from all of the distribution."""
GREEDY = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0}
"""Settings of greedy decoding, which override a model's own generation config."""
NEW_TOKENS = 128
REPEATS, LEAST = 3, 16
"""Fewest repetitions of a loop at the end of a text, and fewest tokens that they fill."""


def distinct(tokens: Sequence[int], n: int) -> float:
    """Return the number of different n-grams over that of all (distinct-n); 1 if there are none.

    >>> distinct([1, 2, 1, 2, 1], 2), distinct([1, 2, 3], 1)
    (0.5, 1.0)
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def loops(tokens: Sequence[int]) -> bool:
    """Return True if a text ends in a loop: one piece repeated at least :data:`REPEATS` times.

    >>> loops([7, 8, 9] + [1, 2, 3, 4] * 4), loops([1, 2, 3, 4] * 2 + [5]), loops([1] * 15)
    (True, False, False)
    """
    for period in range(1, len(tokens) // REPEATS + 1):
        length = max(REPEATS * period, LEAST)
        if length <= len(tokens):
            end = tokens[-length:]
            if all(end[i] == end[i - period] for i in range(period, length)):
                return True
    return False


@torch.no_grad()
def generations(
    model: Model,
    tokenizer: Tokenizer,
    new_tokens: int = NEW_TOKENS,
    seed: int = 0,
    track: Track = silent,
) -> dict[str, JSON]:
    """Measure how a model's continuations of :data:`PROMPTS` repeat themselves.

    Args:
        model: loaded.
        tokenizer: its own.
        new_tokens: most tokens of a continuation.
        seed: of sampling; the caller's random state is kept.
        track: shows progress.

    Returns:
        by temperature: ``repetition`` (4-grams that came before, over all 4-grams), ``looping``
        (the share of continuations that end in a loop), ``distinct_1`` to ``distinct_3``, each a
        mean over the continuations; ``n``, their number, and ``tokens``, their mean length.
    """
    figures = {}
    for temperature in track(TEMPERATURES, "Generations", len(TEMPERATURES)):
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            texts = _continued(model, tokenizer, new_tokens, temperature)
        figures[f"{temperature:g}"] = {
            "repetition": fmean(1 - distinct(text, 4) for text in texts),
            "looping": fmean(float(loops(text)) for text in texts),
            **{f"distinct_{n}": fmean(distinct(text, n) for text in texts) for n in (1, 2, 3)},
            "tokens": fmean(map(len, texts)),
            "n": len(texts),
        }
    return figures


def _continued(
    model: Model, tokenizer: Tokenizer, new_tokens: int, temperature: float
) -> list[list[int]]:
    """Return the new tokens of each prompt up to the end of its text; all prompts are one batch."""
    rows = [encoded(tokenizer, text, add_special_tokens=True)["input_ids"] for text in PROMPTS]
    longest = max(map(len, rows))
    stops = _stops(tokenizer, model.generation_config.eos_token_id)
    filling = tokenizer.pad_token_id
    filling = next(iter(stops), 0) if filling is None else filling
    ids = torch.tensor([[filling] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    out = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=new_tokens,
        pad_token_id=filling,
        **{**GREEDY, **(sampling if temperature else {})},
    )
    return [[*takewhile(lambda t: t not in stops, row[longest:].tolist())] for row in out]


def _stops(tokenizer: Tokenizer, ends: int | list[int] | None) -> set[int]:
    """Return the tokens that end a text: the tokenizer's, and those that a config names."""
    return {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}


@leaves_untouched
@torch.inference_mode()
def generate(
    model: Named,
    prompt: str,
    *,
    tokenizer: Tokenizer | None = None,
    new_tokens: int = 64,
    chat: bool = False,
    device: str = "cpu",
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> str:
    """Return the greedy continuation of a prompt.

    A GGUF file is run by llama.cpp, if that is installed and knows the architecture, on the CPU
    and in the file's own types; else its weights are read into transformers.

    Args:
        model: a name or folder, a loaded model, or what a verb returned.
        prompt: text to continue.
        tokenizer: for a loaded model, which brings none.
        new_tokens: tokens to add at most; also no more than the model has positions for.
        chat: put the prompt as a user's turn into the tokenizer's chat template.
        device: where to compute, when ``model`` is a name.
        dtype: type or its name, when ``model`` is a name; None for the checkpoint's own.
        revision: branch, tag or commit, when ``model`` is a hub id.
        token: of the hub, when ``model`` is a hub id.

    Raises:
        MoesaicError: the prompt is empty or no text, there is no tokenizer, or it has no chat
            template.
    """
    if not isinstance(prompt, str):
        raise MoesaicError(f"The prompt is text; got {type(prompt).__name__}.")
    device, dtype = checked_place(device, dtype, tokenizer)
    if type(new_tokens) is not int or new_tokens < 1:
        raise MoesaicError(f"new_tokens must be a whole number from 1 on; got {quote(new_tokens)}.")
    opened = source_or_model(model, revision, token)
    tokenizer = tokenizer or tokenizer_of(model, opened)
    if tokenizer is None:
        raise MoesaicError("A loaded model brings no tokenizer: pass tokenizer=.")
    if any("\ud800" <= character <= "\udfff" for character in prompt):  # bytes that are no UTF-8
        raise MoesaicError(f"The prompt is no text in UTF-8: {prompt!a:.60}.")
    if chat:
        if not getattr(tokenizer, "chat_template", None):
            raise MoesaicError("chat: this model has no chat template; leave it out.")
        turns = [{"role": "user", "content": prompt}]
        try:
            text = rendered(tokenizer, turns, add_generation_prompt=True)
        except TemplateError as error:
            raise MoesaicError(f"The chat template refuses the prompt: {error}") from error
        inputs = encoded(tokenizer, text, return_tensors="pt")
    else:
        inputs = encoded(tokenizer, prompt, add_special_tokens=True, return_tensors="pt")
    ids = inputs["input_ids"]
    if ids.numel() == 0:
        raise MoesaicError("The prompt is empty.")
    most = positions(opened.config)
    if most is not None:
        if ids.numel() >= most:
            raise MoesaicError(
                f"A prompt of {ids.numel():,} tokens leaves none of the model's {most:,} positions "
                "for others: shorten it."
            )
        new_tokens = min(new_tokens, most - ids.numel())
    file = Path(expand_home(model)) if isinstance(model, str | Path) else Path()
    if (
        file.suffix.lower() == ".gguf"
        and device == "cpu"
        and dtype is None
        and isinstance(opened, Source)
    ):
        stops = _stops(tokenizer, opened.config.eos_token_id)
        with suppress(MoesaicError), Engine(file, ids.numel() + new_tokens) as engine:
            tokens = engine.greedy(ids[0], new_tokens, stops)
            return tokenizer.decode(tokens, skip_special_tokens=True)
    loaded = opened.load(device, dtype) if isinstance(opened, Source) else opened
    ids = ids.to(loaded.device)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    settings = "generation_config.json of this model", "", "cannot be used"
    with reading(*settings, (TypeError, ValueError)):
        out = loaded.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            pad_token_id=padding,
            **GREEDY,
        )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
