"""Text to train on: whole where it is at hand, streamed where it is a mix or has no end."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from torch import Tensor
from torch.utils.data import IterableDataset

from moesaic.data.mixes import sources_of
from moesaic.data.packing import Example, PackedText, answered
from moesaic.data.reader import GIVEN, Held, Rows, Taken, open_rows, shipped_texts
from moesaic.data.rows import Row, asked, text_of
from moesaic.data.source import text_sources
from moesaic.data.text import IGNORED, Tokens, token_file, windows
from moesaic.errors import MoesaicError
from moesaic.foreign import Config, Tokenizer

Examples = Sequence[Example] | IterableDataset[Example]


class Texts(Sequence[Example]):
    """Texts to learn from, of which the first tokens may not be predicted; four bytes a token."""

    def __init__(self) -> None:
        self._ids, self._prompts = array("i"), array("i")
        self._starts = array("q", [0])

    def add(self, ids: Sequence[int], prompt: int = 0) -> None:
        """Add a text.

        Args:
            ids: its tokens.
            prompt: how many of them, at the start, are not predicted.
        """
        self._ids.extend(ids)
        self._prompts.append(prompt)
        self._starts.append(len(self._ids))

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        ids = self._ids[self._starts[at] : self._starts[at + 1]].tolist()
        prompt = self._prompts[at]
        return {"input_ids": ids, "labels": [IGNORED] * prompt + ids[prompt:]}


def training_text(
    given: str | Sequence[Any] | Tokens | Tensor,
    tokenizer: Tokenizer | None,
    length: int,
    *,
    steps: int | None = None,
    seed: int = 0,
    answers: bool = False,
    stream: bool = False,
    config: Config | None = None,
) -> Examples:
    """Texts to train on, whatever they are given as.

    Args:
        given: a source; texts, or rows with columns as in :mod:`moesaic.data.rows`; mappings with
            input_ids and labels; or tokens (N, L).
        tokenizer: for text.
        length: tokens of a text at most.
        steps: where it is known that training ends, mixes and data sets stream in.
        seed: of the order of a stream.
        answers: only the answers of rows with a prompt are learned, each row for itself; without
            it rows are text like any other.
        stream: stream all text.
        config: the model's, which token ids are checked against.

    Returns:
        ``input_ids`` and ``labels`` of each text.

    Raises:
        MoesaicError: there is no such text, no tokenizer for it, a token that the model does not
            know, or a mix and no ``steps``.
    """
    if isinstance(given, str):
        sources = sources_of(given, "calibration")
        if len(sources) == 1 and sources[0].tokenised:
            given = token_file(Path(sources[0].name))
    if isinstance(given, Tensor):
        given = Tokens(given)
    if isinstance(given, Tokens):
        if config is not None:
            given.check(config)
        return given.examples()
    if not isinstance(given, str):
        if len(given) > 0 and isinstance(given[0], Mapping) and "labels" in given[0]:
            return list(given)
        return training_examples(given, _needed(tokenizer), length, answers)
    tokenizer = _needed(tokenizer)
    if len(sources) > 1 and steps is None:
        raise MoesaicError(f"{given!r} is a mix, which has no end: say how many steps.")
    if stream or len(sources) > 1:
        return PackedText(given, tokenizer, length, seed, answers=answers)
    rows = open_rows(sources[0], "calibration")
    if steps is not None and not rows.at_hand:
        return PackedText(given, tokenizer, length, seed, answers=answers)
    return _whole(rows, tokenizer, length, answers)


def foretold_tokens(source: str) -> int | None:
    """About as many tokens as a text has, told without reading it: four bytes each.

    Args:
        source: as for :func:`moesaic.data.source.text_sources`.

    Returns:
        None where the text does not lie here.
    """
    sources = text_sources(source)
    files = [Path(part.name) for part in sources]
    if not all(part.shipped or file.is_file() for part, file in zip(sources, files, strict=True)):
        return None
    sizes = [
        sum(map(len, shipped_texts("calibration", part.domain)))
        if part.shipped
        else file.stat().st_size // (2 if part.tokenised else 1)
        for part, file in zip(sources, files, strict=True)
    ]
    return sum(sizes) // 4


def training_examples(
    rows: Sequence[Row], tokenizer: Tokenizer, length: int, answers: bool = True
) -> Texts:
    """Rows to learn from, as input_ids and labels; IGNORED where nothing is to be predicted.

    With ``answers``, rows with a prompt and an answer are one example each, their prompt not
    predicted; all other text becomes windows of ``length`` tokens.

    Raises:
        MoesaicError: there is not enough text for one example, or columns are not known.
    """
    return _whole(Held(rows, Taken(GIVEN)), tokenizer, length, answers)


def _whole(rows: Rows | Iterable[Row], tokenizer: Tokenizer, length: int, answers: bool) -> Texts:
    examples, texts = Texts(), []
    for row in rows:
        pair = asked(row, tokenizer) if answers else None
        if pair is None:
            texts.append(text_of(row, tokenizer))
            continue
        example = answered(pair, tokenizer, length)
        if example is not None:
            examples.add(example["input_ids"], example["labels"].count(IGNORED))
    for window in windows(texts, tokenizer, length) if texts else ():
        examples.add(window.tolist())
    if not examples:
        raise MoesaicError(f"length {length}: the text does not fill one window; lower it.")
    return examples


def _needed(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise MoesaicError("Training text needs a tokenizer: pass tokenizer=, or token ids.")
    return tokenizer
