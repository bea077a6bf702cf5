"""Text for long training: streamed, packed to windows without padding, mixed by weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from torch.utils.data import IterableDataset

from moesaic.data.text import mix_weights, stream_texts
from moesaic.errors import MoesaicError
from moesaic.foreign import Tokenizer

PIECE = 1_000_000
"""Characters that are tokenised at a time."""


class PackedText(IterableDataset[dict[str, list[int]]]):
    """Windows of tokens without end, the same for the same seed.

    Documents are joined by the tokenizer's end of text, or a blank line where it has none. A source
    that ends begins anew. Windows are drawn from a buffer a source, so that neighbours in the text
    are no neighbours in training.

    Args:
        source: as for :func:`moesaic.data.text.stream_texts`, or a mix such as ``code=3,prose=1``:
            sources by the share of tokens that come from each.
        tokenizer: of the model.
        length: tokens a window.
        seed: of every draw.
        buffer: windows a source that are drawn from.

    Raises:
        MoesaicError: a source cannot be read, or has no text.
    """

    def __init__(
        self, source: str, tokenizer: Tokenizer, length: int, seed: int = 0, buffer: int = 1000
    ) -> None:
        mixed = "=" in source and not Path(source).is_file()
        self.weights = mix_weights(source) if mixed else {source: 1.0}
        self.tokenizer, self.length = tokenizer, length
        self.seed, self.buffer = seed, buffer
        for name in self.weights:  # found out now, not in the middle of training
            if next(stream_texts(name, "calibration"), None) is None:
                raise MoesaicError(f"{name or 'The text that ships'} has no text in it.")

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        drawn = random.Random(self.seed)
        names = list(self.weights)
        streams = {
            name: self._shuffled(name, random.Random(f"{self.seed} {name}")) for name in names
        }
        while True:
            (name,) = drawn.choices(names, list(self.weights.values()))
            ids = next(streams[name])
            yield {"input_ids": ids, "labels": ids}

    def _shuffled(self, name: str, drawn: random.Random) -> Iterator[list[int]]:
        windows = self._windows(name)
        held = [next(windows) for _ in range(self.buffer)]
        while True:
            place = drawn.randrange(len(held))
            yield held[place]
            held[place] = next(windows)

    def _windows(self, name: str) -> Iterator[list[int]]:
        end = self.tokenizer.eos_token_id
        between = self._ids("\n\n") if end is None else [end]
        rest: list[int] = []
        while True:
            for text in stream_texts(name, "calibration"):
                for start in range(0, len(text), PIECE):
                    rest += self._ids(text[start : start + PIECE])
                rest += between
                while len(rest) >= self.length:
                    yield rest[: self.length]
                    del rest[: self.length]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids
