"""Training text: read whole if it is small, streamed if it is a mix or has no end.

Streamed text is packed into windows without padding, mixed by weights.
"""

from __future__ import annotations

import hashlib
import json
import random
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from moesaic.data.reader import INLINE, IndexedRows, RowRange, Rows, open_rows, shuffle_buffer
from moesaic.data.rows import PromptAnswer, Row, RowError, pair_of, text_of, usable_rows
from moesaic.data.sources import SHIPPED, sources_of
from moesaic.data.text import (
    IGNORED,
    Text,
    Tokens,
    beginning,
    check_length,
    encoded,
    token_file,
    window_places,
    windows,
)
from moesaic.errors import MoesaicError
from moesaic.types import Config, Tokenizer, Values

Example = dict[str, list[int]]
"""``input_ids`` and ``labels`` of one text."""
Examples = Sequence[Example] | IterableDataset[Example]
AT_ONCE = 1_000_000
"""Characters that are tokenised at a time."""
SAMPLED = 8
"""Windows of each source that a fingerprint covers."""

EXAMPLES = 64
"""Training texts of an endless stream that its fingerprint covers."""


class TrainingTexts(Sequence[Example]):
    """Texts to learn from, whose first tokens may be excluded from the loss."""

    def __init__(self) -> None:
        self._texts: list[tuple[array[int], int]] = []

    def add(self, ids: Sequence[int], prompt: int) -> None:
        """Add a text of which the first ``prompt`` tokens are not predicted."""
        self._texts.append((array("i", ids), prompt))

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]  # no slices
        ids, prompt = self._texts[index]
        return {"input_ids": [*ids], "labels": [IGNORED] * prompt + [*ids[prompt:]]}


class PackedText(IterableDataset[Example]):
    """Endless windows of tokens, the same for the same seed.

    Documents are joined by the tokenizer's end of text, or a blank line if it has none; windows
    begin with BOS if the tokenizer begins text with it, which is not predicted. A source that ends
    starts again, in another order. Rows come in a random order: uniform for files and small data
    sets; for large ones, several shards are read at a time and rows are drawn from a buffer.
    Windows are drawn from a buffer too, so that neighbours in a document are no neighbours in
    training. A resumed run reads the same windows again.

    Args:
        source: as for :func:`moesaic.data.sources.text_sources`; the weights of a mix are
            shares of the windows.
        tokenizer: the model's tokenizer.
        length: tokens of a window.
        seed: seed of every draw.
        buffer: windows in each source's buffer.
        answers: True if each row with a prompt is an example, of which only the answer is learned.

    Raises:
        MoesaicError: a source cannot be read, or has no text.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        length: int,
        seed: int = 0,
        buffer: int = 1000,
        answers: bool = False,
    ) -> None:
        sources = sources_of(source, "calibration")
        self.weights = {str(part): part.weight for part in sources}
        self.tokenizer, self.length = tokenizer, length
        self.seed, self.buffer, self.answers = seed, buffer, answers
        self.begin = beginning(tokenizer)
        if length <= len(self.begin):
            raise MoesaicError(f"length {length} has no room for text after BOS; raise it.")
        if tokenised := next((part for part in sources if part.tokenised), None):
            raise MoesaicError(f"{tokenised}: a file of token ids cannot be part of a stream.")
        self._rows = {str(part): open_rows(part, "calibration") for part in sources}
        for name, rows in self._rows.items():  # fail now, not in the middle of training
            if next(self._usable(name, rows, warn=False), None) is None:
                raise MoesaicError(f"{name or 'The text that ships'} has no text in it.")

    @property
    def fingerprint(self) -> str:
        """Hash of the sources, their shares, the draws, and the first windows of each."""
        digest = hashlib.sha256(repr((self.weights, self.length, self.seed, self.answers)).encode())
        for name in self.weights:
            digest.update(repr(list(islice(self._examples(name, warn=False), SAMPLED))).encode())
        return digest.hexdigest()[:16]

    def __iter__(self) -> Iterator[Example]:
        rng = random.Random(self.seed)
        names = list(self.weights)
        streams = {
            name: shuffle_buffer(
                self._examples(name), random.Random(self._seed_of(name)), self.buffer
            )
            for name in names
        }
        while True:
            (name,) = rng.choices(names, list(self.weights.values()))
            yield next(streams[name])

    def _seed_of(self, name: str) -> str:
        """Return the seed of a source's draws: the same wherever its file lies."""
        return f"{self.seed} {Path(name).name}"

    def _usable(self, name: str, rows: Iterable[Row], warn: bool) -> Iterator[str | Example]:
        """Yield the text of each row that can be used, or an example of its own."""
        read = partial(_learned, self.tokenizer, self.begin, self.length, self.answers)
        return (item for _, item in usable_rows(rows, read, name or SHIPPED, warn))

    def _examples(self, name: str, warn: bool = True) -> Iterator[Example]:
        end, ignored = self.tokenizer.eos_token_id, [IGNORED] * len(self.begin)
        between = self._ids("\n\n") if end is None else [end]
        rest: list[int] = []
        passes = 0
        while True:
            has_text = False
            order = self._rows[name].shuffled(f"{self._seed_of(name)} {passes}")
            for item in self._usable(name, order, warn and not passes):
                has_text = has_text or bool(item)
                if isinstance(item, dict):
                    yield item
                    continue
                if not item:
                    continue
                for start in range(0, len(item), AT_ONCE):
                    rest += self._ids(item[start : start + AT_ONCE])
                rest += between
                taken = 0
                for place_L in window_places(torch.tensor(rest), self.begin, self.length).tolist():
                    taken = place_L[-1] + 1
                    ids = rest[place_L[0] : taken]
                    yield {"input_ids": self.begin + ids, "labels": ignored + ids}
                del rest[:taken]
            if not has_text:
                raise MoesaicError(f"{name or 'The text that ships'} has no text in it.")
            passes += 1

    def _ids(self, text: str) -> list[int]:
        return list(encoded(self.tokenizer, text)["input_ids"])


def _learned(
    tokenizer: Tokenizer, begin: Sequence[int], length: int, answers: bool, row: Row
) -> str | Example:
    """Return the text of a row, or an example whose prompt is not predicted.

    Raises:
        RowError: the row has no text, or the cut leaves nothing of its answer.
    """
    pair = pair_of(row, tokenizer) if answers else None
    if pair is None:
        return text_of(row, tokenizer)
    return answered(pair, tokenizer, length, begin)


def answered(
    pair: PromptAnswer, tokenizer: Tokenizer, length: int, begin: Sequence[int] = ()
) -> Example:
    """Return an example of which only the answer is learned.

    Args:
        pair: the texts.
        tokenizer: its end of text ends the answer.
        length: tokens at which the example is cut.
        begin: tokens that the tokenizer puts before any text.

    Raises:
        RowError: the cut leaves nothing of the answer.
    """
    ids, count = _tokens_of(pair, tokenizer)
    written = len(begin) if ids[: len(begin)] == [*begin] else 0  # by a chat template
    prompt, answer = [*begin, *ids[written:count]], ids[max(count, written) :]
    end = [] if _ended(answer, tokenizer) else [tokenizer.eos_token_id]
    ids = (prompt + answer + end)[:length]
    labels = ([IGNORED] * len(prompt) + answer + end)[:length]
    if all(label == IGNORED for label in labels[1:]):
        raise RowError(f"length {length}: after a prompt nothing of its answer is left; raise it.")
    return {"input_ids": ids, "labels": labels}


def _tokens_of(pair: PromptAnswer, tokenizer: Tokenizer) -> tuple[list[int], int]:
    """Return the tokens of a prompt and its answer, and how many are the prompt's alone.

    Both are one text, as in the model's use: by itself an answer may have other tokens, since many
    tokenizers put a space before any text.
    """
    whole = pair.prompt + pair.answer
    if tokenizer.is_fast:
        found = encoded(tokenizer, whole, return_offsets_mapping=True)
        return found["input_ids"], sum(
            end <= len(pair.prompt) for _, end in found["offset_mapping"]
        )
    ids, alone = (encoded(tokenizer, text)["input_ids"] for text in (whole, pair.prompt))
    same = takewhile(lambda both: both[0] == both[1], zip(ids, alone, strict=False))
    return ids, sum(1 for _ in same)


def _ended(answer: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Return True if an answer ends in the tokenizer's end of text already, as some chat templates
    write it, or if there is none."""
    end = tokenizer.eos_token_id
    if end not in answer:
        return end is None
    after = answer[::-1].index(end)
    return not tokenizer.decode(answer[len(answer) - after :]).strip()


def training_text(
    text: Text,
    tokenizer: Tokenizer | None,
    length: int,
    *,
    steps: int | None = None,
    seed: int = 0,
    answers: bool = False,
    stream: bool = False,
    config: Config | None = None,
) -> Examples:
    """Return texts to train on, from any form of text.

    Args:
        text: a source; texts, or rows with columns as in :mod:`moesaic.data.rows`; mappings with
            input_ids and labels; or tokens (N, L).
        tokenizer: needed for text.
        length: most tokens of a text.
        steps: optimizer steps; with it, mixes and large data sets are streamed.
        seed: seed of the order of a stream.
        answers: True to learn only the answers of rows with a prompt, one example per row; else
            rows are plain text.
        stream: True to stream all text.
        config: the model's config, to check token ids.

    Returns:
        ``input_ids`` and ``labels`` of each text.

    Raises:
        MoesaicError: there is no such text, no tokenizer for it, a token outside the vocabulary, or
            a mix without ``steps``.
    """
    sources = sources_of(text, "calibration") if isinstance(text, str) else ()
    if isinstance(text, Tensor):
        text = Tokens(text)
    elif len(sources) == 1 and sources[0].tokenised:
        text = token_file(Path(sources[0].name))
    if isinstance(text, Tokens):
        if config is not None:
            text.check(config)
        return text.examples()
    if not sources and text and isinstance(text[0], Mapping) and "labels" in text[0]:
        examples = list(cast("Sequence[Example]", text))
        if config is not None:
            check_length(max(len(example["input_ids"]) for example in examples), config)
        return examples
    if tokenizer is None:
        raise MoesaicError("Training text needs a tokenizer: pass tokenizer=, or token ids.")
    if not isinstance(text, str):
        return _whole(IndexedRows(text, RowRange(INLINE)), tokenizer, length, answers)
    if len(sources) > 1 and steps is None:
        raise MoesaicError(f"{text!r} is a mix, which has no end: give a number of steps.")
    rows = None if stream or len(sources) > 1 else open_rows(sources[0], "calibration")
    if rows is None or (steps is not None and not rows.at_hand):
        return PackedText(text, tokenizer, length, seed, answers=answers)
    return _whole(rows, tokenizer, length, answers)


def _whole(rows: Rows, tokenizer: Tokenizer, length: int, answers: bool) -> TrainingTexts:
    """Return rows to learn from: with ``answers`` those with a prompt are one example each, whose
    prompt is not predicted; all other text becomes windows of ``length`` tokens.

    Raises:
        MoesaicError: there is not enough text for one example, or columns are not known.
    """
    examples, texts = TrainingTexts(), []
    begin = beginning(tokenizer)
    read = partial(_learned, tokenizer, begin, length, answers)
    for _, item in usable_rows(rows, read, rows.taken.source or SHIPPED):
        if isinstance(item, str):
            texts.append(item)
        else:
            examples.add(item["input_ids"], item["labels"].count(IGNORED))
    for window in windows(texts, tokenizer, length) if any(map(str.strip, texts)) else ():
        examples.add(window.tolist(), len(begin))
    if not examples:
        raise MoesaicError(f"length {length}: the text does not fill one window; lower it.")
    return examples


def examples_fingerprint(examples: Iterable[Values]) -> str:
    """Return the fingerprint of training texts, given as token ids and labels.

    A stream may have an attribute ``fingerprint``; else its first :data:`EXAMPLES` texts count.
    """
    fingerprint = getattr(examples, "fingerprint", None)
    if fingerprint is not None:
        return str(fingerprint)
    digest = hashlib.sha256()
    sized = hasattr(examples, "__len__")
    for example in examples if sized else islice(examples, EXAMPLES):
        plain = {name: list(map(int, ids)) for name, ids in sorted(example.items())}
        digest.update(json.dumps(plain).encode())
    return digest.hexdigest()[:16]
