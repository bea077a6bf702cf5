"""Text for long training: streamed, packed to windows without padding, mixed by weights."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from itertools import islice

from torch.utils.data import IterableDataset

from moesaic.data.mixes import sources_of
from moesaic.data.reader import Rows, open_rows
from moesaic.data.rows import Asked, Row, asked, text_of
from moesaic.data.text import IGNORED
from moesaic.errors import MoesaicError
from moesaic.foreign import Tokenizer

Example = dict[str, list[int]]
"""input_ids and labels of one text."""

PIECE = 1_000_000
"""Characters that are tokenised at a time."""
SEEN = 8
"""Windows of each source that a fingerprint covers."""


class PackedText(IterableDataset[Example]):
    """Windows of tokens without end, the same for the same seed.

    Documents are joined by the tokenizer's end of text, or a blank line where it has none. A source
    that ends begins anew, in another order. Rows come in a random order: of files and small data
    sets any order is as likely as any other; of large ones, several shards are read at a time and
    rows are drawn from a buffer. Windows are drawn from a buffer too, so that neighbours in a
    document are no neighbours in training. A run that continues reads the same windows again.

    Args:
        source: as for :func:`moesaic.data.source.text_sources`; the weights of a mix are shares of
            the windows.
        tokenizer: of the model.
        length: tokens a window.
        seed: of every draw.
        buffer: windows a source that are drawn from.
        answers: rows with a prompt are an example each, of which only the answer is learned.

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
        self.weights = {str(s): s.weight for s in sources}
        self.tokenizer, self.length = tokenizer, length
        self.seed, self.buffer, self.answers = seed, buffer, answers
        self._rows: dict[str, Rows] = {}
        for part in sources:  # found out now, not in the middle of training
            if part.tokenised:
                raise MoesaicError(f"{part}: a file of token ids cannot be part of a stream.")
            self._rows[str(part)] = rows = open_rows(part, "calibration")
            first = next(iter(rows), None)
            if first is None:
                raise MoesaicError(f"{part.name or 'The text that ships'} has no text in it.")
            text_of(first, tokenizer)

    @property
    def fingerprint(self) -> str:
        """Changes with the sources, their shares, the draws, and the first windows of each."""
        said = hashlib.sha256(repr((self.weights, self.length, self.seed, self.answers)).encode())
        for name in self.weights:
            said.update(repr(list(islice(self._examples(name), SEEN))).encode())
        return said.hexdigest()[:16]

    def __iter__(self) -> Iterator[Example]:
        drawn = random.Random(self.seed)
        names = list(self.weights)
        streams = {
            name: self._shuffled(name, random.Random(f"{self.seed} {name}")) for name in names
        }
        while True:
            (name,) = drawn.choices(names, list(self.weights.values()))
            yield next(streams[name])

    def _shuffled(self, name: str, drawn: random.Random) -> Iterator[Example]:
        examples = self._examples(name)
        held = [next(examples) for _ in range(self.buffer)]
        while True:
            place = drawn.randrange(len(held))
            yield held[place]
            held[place] = next(examples)

    def _examples(self, name: str) -> Iterator[Example]:
        end = self.tokenizer.eos_token_id
        between = self._ids("\n\n") if end is None else [end]
        rest: list[int] = []
        passes = 0
        while True:
            found = False
            for row in self._rows[name].shuffled(f"{self.seed} {name} {passes}"):
                pair = self._asked(row)
                if pair is not None:
                    example = answered(pair, self.tokenizer, self.length)
                    if example is not None:
                        found = True
                        yield example
                    continue
                text = text_of(row, self.tokenizer)
                if not text:
                    continue
                found = True
                for start in range(0, len(text), PIECE):
                    rest += self._ids(text[start : start + PIECE])
                rest += between
                whole = len(rest) // self.length * self.length
                for start in range(0, whole, self.length):
                    ids = rest[start : start + self.length]
                    yield {"input_ids": ids, "labels": ids}
                del rest[:whole]
            if not found:
                raise MoesaicError(f"{name or 'The text that ships'} has no text in it.")
            passes += 1

    def _asked(self, row: Row) -> Asked | None:
        return asked(row, self.tokenizer) if self.answers else None

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


def answered(pair: Asked, tokenizer: Tokenizer, length: int) -> Example | None:
    """A prompt and its answer of which only the answer is learned; None if none of it is left.

    Args:
        pair: the texts.
        tokenizer: its end of text ends the answer.
        length: tokens at which the example is cut.
    """
    prompt, answer = (
        tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for text in (pair.prompt, pair.answer)
    )
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = (prompt + answer + end)[:length]
    labels = ([IGNORED] * len(prompt) + answer + end)[:length]
    if all(label == IGNORED for label in labels[1:]):
        return None
    return {"input_ids": ids, "labels": labels}
