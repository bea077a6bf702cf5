"""Reader of text: any source as rows, in order or shuffled, for one use.

Rows for training or calibration and rows for evaluation never overlap: they are different splits of
a data set if it has them, otherwise some rows are held out for evaluation.
"""

from __future__ import annotations

import json
import mmap
import random
from abc import ABC, abstractmethod
from array import array
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from moesaic.data.rows import Row
from moesaic.data.text_source import DOMAINS, SHIPPED, TextSource
from moesaic.errors import MoesaicError, how_to_install
from moesaic.types import JSON, Values

if TYPE_CHECKING:
    from datasets import DatasetInfo, IterableDataset

T = TypeVar("T")
Use = Literal["calibration", "evaluation"]
"""Use of text; calibration and training are one use."""

MEASURED = ("test", "validation", "valid", "val", "dev")
"""Splits for evaluation; the first that exists is used."""
FILES = (".txt", ".jsonl", ".json", ".parquet", ".safetensors")
HELD_OUT = 5_000
"""Most rows held out for evaluation of a data set without such a split; at most 5 % of it."""
AT_HAND = 1 << 30
"""Bytes up to which a data set is read whole instead of streamed."""
OPEN, BUFFER = 16, 10_000
"""Shards of a stream that are read at a time, and rows in the buffer that they are drawn from."""
PIECE = 65_536
"""Characters of the pieces that a long document is cut into for training."""


INLINE = "given"
"""Source name of texts that are passed directly."""


@dataclass(frozen=True)
class RowRange:
    """Range of rows that were opened."""

    source: str
    split: str = ""
    start: int = 0
    stop: int | None = None
    """Row that the range ends before; None if the end is unknown."""
    held_out: bool = False
    """True if these rows are held out for evaluation, because the data set has no split for it."""

    @property
    def never_shared(self) -> bool:
        """True for text that ships, of which each use has its own, or that has no name."""
        return self.source in ("", SHIPPED, *DOMAINS, INLINE)

    def meets(self, other: RowRange) -> bool:
        """Return True if some row is in both ranges."""
        if (self.source, self.split) != (other.source, other.split):
            return False
        ends = (float("inf") if t.stop is None else t.stop for t in (self, other))
        return max(self.start, other.start) < min(ends)

    def as_json(self) -> JSON:
        """Return the source, split and rows as JSON.

        Returns:
            ``source``; ``split`` if there are several; ``rows``, first and one past the last, if
            they are not all; ``held_out`` if true.
        """
        values: JSON = {"source": self.source or "shipped"}
        if self.split:
            values["split"] = self.split
        if self.start or self.stop is not None:
            values["rows"] = [self.start, self.stop]
        return {**values, "held_out": True} if self.held_out else values

    @classmethod
    def of(cls, values: Values) -> RowRange:
        """Return the range from the output of :meth:`as_json`."""
        start, stop = values.get("rows") or (0, None)
        return cls(str(values.get("source", "")), str(values.get("split", "")), start, stop)


class Rows(ABC):
    """Base class of the rows of one source."""

    taken: RowRange
    at_hand: ClassVar[bool]
    """True if all rows can be read at once."""

    @abstractmethod
    def __iter__(self) -> Iterator[Row]:
        """Yield all rows in order."""

    @abstractmethod
    def shuffled(self, seed: str) -> Iterator[Row]:
        """Yield all rows once in an order that is the same for the same seed."""


class IndexedRows(Rows):
    """Rows that can be read in any order."""

    at_hand = True

    def __init__(self, rows: Sequence[Row], taken: RowRange, where: str = "") -> None:
        stop = len(rows) if taken.stop is None else taken.stop
        self.taken, self._rows, self._where = taken, rows, where or taken.source
        self._range = range(taken.start, stop)

    def __iter__(self) -> Iterator[Row]:
        return self._read(self._range)

    def shuffled(self, seed: str) -> Iterator[Row]:
        """Yield all rows once, in a uniformly random order; long documents in pieces."""
        rng = random.Random(seed)
        rows = self._read(rng.sample(self._range, len(self._range)))
        if len(self._range) > 1:
            return rows
        cut = [piece for row in rows for piece in _pieces(row)]
        return iter(rng.sample(cut, len(cut)))

    def _read(self, order: Iterable[int]) -> Iterator[Row]:
        with _readable(self._where):
            for i in order:
                yield self._rows[i]


class Streamed(Rows):
    """Rows of a data set that is too large to be read whole.

    Args:
        data: a streaming data set.
        taken: the range of its rows.
        first_shard: True if that range counts within its first shard.
    """

    at_hand = False

    def __init__(self, data: IterableDataset, taken: RowRange, first_shard: bool) -> None:
        self.taken, self._data, self._first = taken, data, first_shard

    def __iter__(self) -> Iterator[Row]:
        return chain.from_iterable(self._shards())

    def shuffled(self, seed: str) -> Iterator[Row]:
        """Yield all rows once: some shards at a time, rows drawn from a buffer."""
        rng = random.Random(seed)
        shards = self._shards()
        rng.shuffle(shards)
        return drawn_from(interleaved(shards, rng), rng, BUFFER)

    def _shards(self) -> list[Iterator[Row]]:
        start, stop, data = self.taken.start, self.taken.stop, self._data
        count = data.num_shards if self._first else 1
        first, *others = [data.shard(count, i) for i in range(count)] if count > 1 else [data]
        if start:
            first = first.skip(start)
        shards = [first, *others] if stop is None else [first.take(stop - start)]
        return [*map(self._guarded, shards)]

    def _guarded(self, data: Iterable[Row]) -> Iterator[Row]:
        """Yield rows, with errors turned into ours."""
        with _reached(self.taken.source):
            yield from data


def interleaved(shards: Sequence[Iterable[Row]], rng: random.Random) -> Iterator[Row]:
    """Yield rows of all shards, each from a shard drawn from a few that are open."""
    waiting = iter(shards)
    active = [iter(shard) for shard in islice(waiting, OPEN)]
    while active:
        place = rng.randrange(len(active))
        for row in active[place]:
            yield row
            break
        else:
            following = next(waiting, None)
            if following is None:
                active.pop(place)
            else:
                active[place] = iter(following)


def drawn_from(rows: Iterator[T], rng: random.Random, size: int) -> Iterator[T]:
    """Yield the same rows, each drawn from a buffer."""
    buffer = list(islice(rows, size))
    for row in rows:
        place = rng.randrange(len(buffer))
        yield buffer[place]
        buffer[place] = row
    rng.shuffle(buffer)
    yield from buffer


def _pieces(row: Row) -> Iterator[Row]:
    """Yield a long text cut at line ends; anything else unchanged."""
    if not isinstance(row, str):
        yield row
        return
    start = 0
    while start < len(row):
        stop = min(len(row), start + PIECE)
        if stop < len(row):
            stop = row.rfind("\n", start, stop) + 1 or stop
        yield row[start:stop]
        start = stop


# --- opening -------------------------------------------------------------------------------------


def open_rows(source: TextSource, use: Use) -> Rows:
    """Return a source's rows for one use.

    Args:
        source: the source of text.
        use: text that ships and data sets with several splits have different rows for each.

    Raises:
        MoesaicError: the source does not exist or cannot be read.
    """
    path = Path(source.name)
    if source.shipped:
        domain = source.domain
        return _held(_shipped_rows(use, domain), replace(source, config=""), domain)
    check_there(source)
    if path.is_file():
        return _held(_file_rows(path), source, str(path.resolve()), str(path))
    return _data_set(source, use)


def check_there(source: TextSource) -> None:
    """Refuse a file that is missing, empty, or does not begin with text; the hub is not asked.

    Raises:
        MoesaicError: names the file.
    """
    path = Path(source.name)
    if source.shipped or path.is_dir():
        return
    if path.is_file():
        if path.stat().st_size == 0:
            raise MoesaicError(f"{source.name} is empty.")
        if path.suffix not in (".parquet", ".safetensors"):
            with _readable(source.name), path.open("rb") as file:
                getincrementaldecoder("utf-8")().decode(file.read(4096))
        return
    stray = path.suffix and "/" not in source.name  # a data set has its owner before a slash
    if path.suffix in FILES or source.name.startswith((".", "/")) or stray:
        raise MoesaicError(f"No text file at {source.name}.")


def check_rows(used: Iterable[TextSource], measured: Iterable[TextSource]) -> None:
    """Refuse evaluation on rows that are used for calibration or training.

    Args:
        used: sources of calibration and training.
        measured: sources of evaluation.

    Raises:
        MoesaicError: some row is in both, or a source cannot be read.
    """
    ours = [source for source in used if not source.shipped]
    for theirs in measured:
        for source in ours:
            if _place(source) == _place(theirs) and _overlap(source, theirs):
                raise MoesaicError(
                    f"{theirs} is to be measured on, and rows of it are calibrated or trained on "
                    f"too ({source}). Measure on another text or split, or on a slice, such as "
                    f"{_example(theirs, '[:10%]')} here and {_example(source, '[10%:]')} there."
                )


def _example(source: TextSource, rows: str) -> str:
    return str(replace(source, split=f"{source.split_name}{rows}"))


def _place(source: TextSource) -> tuple[str, str, str]:
    path = Path(source.name)
    name = str(path.resolve()) if path.exists() else source.name
    return name, source.config, source.data_dir


def _overlap(source: TextSource, theirs: TextSource) -> bool:
    if source.tokenised:
        return True
    taken = open_rows(source, "calibration").taken
    return taken.meets(open_rows(theirs, "evaluation").taken)


def _shipped_rows(split: Use, domain: str = "") -> list[JSON]:
    """Return documents that ship, of one domain or all in turn: ``text``, ``domain``."""
    lines = files("moesaic").joinpath(f"assets/{split}.jsonl").read_text("utf-8").splitlines()
    return [row for row in map(json.loads, lines) if domain in ("", row["domain"])]


def shipped_texts(split: Use, domain: str = "") -> list[str]:
    """Return the texts of :func:`_shipped_rows`."""
    return [row["text"] for row in _shipped_rows(split, domain)]


def _held(rows: Sequence[Row], source: TextSource, name: str, where: str = "") -> IndexedRows:
    if source.config or source.data_dir or source.split_name not in ("", "train"):
        raise MoesaicError(
            f"{source}: a file has no config, data_dir or splits; name rows as "
            f"{source.name}:::[:90%]."
        )
    start, stop = source.rows(len(rows)) if source.sliced else (0, None)
    return IndexedRows(rows, RowRange(name, "", start, stop), where=where)


# --- files ---------------------------------------------------------------------------------------


class Lines(Sequence[Row]):
    """Rows of a .jsonl file, read when they are used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts = array("q")
        with path.open("rb") as lines:
            at = 0
            for line in lines:
                if line.strip():
                    self._starts.append(at)
                at += len(line)

    @cached_property
    def _bytes(self) -> mmap.mmap:
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        start = self._starts[index]
        end = self._bytes.find(b"\n", start)
        try:
            return json.loads(self._bytes[start : None if end < 0 else end])
        except (ValueError, RecursionError) as error:
            line = self._bytes[:start].count(b"\n") + 1
            reason = getattr(error, "msg", error)  # without a line, which is always the first here
            raise ValueError(f"line {line}: {reason}") from error


def _file_rows(path: Path) -> Sequence[Row]:
    with _readable(str(path)):
        if path.suffix == ".jsonl":
            return Lines(path)
        if path.suffix == ".json":
            rows = json.loads(path.read_text("utf-8-sig"))
            return rows if isinstance(rows, list) else [rows]
        if path.suffix == ".parquet":
            datasets = _datasets()
            try:
                data: Sequence[Row] = datasets.Dataset.from_parquet(str(path))
            except datasets.exceptions.DatasetsError as error:
                raise ValueError(error.__cause__ or error) from error
            return data
        text = path.read_text("utf-8-sig")
        if "\0" in text:
            raise ValueError("it holds NUL bytes")
        if not text.strip():
            raise ValueError("there is nothing but blanks in it")
        return [text]


@contextmanager
def _readable(where: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError, RecursionError) as error:
        kind = Path(where).suffix or "text"
        if kind != "text" and kind not in FILES:
            kinds = ", ".join(sorted(FILES))
            raise MoesaicError(f"{where} is not text ({error}). Give {kinds}.") from error
        raise MoesaicError(f"{where} cannot be read as {kind}: {error}") from error


# --- data sets -----------------------------------------------------------------------------------


def _datasets() -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        raise MoesaicError(f"This source needs: {how_to_install('datasets')}") from error
    return datasets


@contextmanager
def _reached(name: str) -> Iterator[None]:
    try:
        yield
    except MoesaicError:
        raise
    except Exception as error:
        cause = error.__cause__
        if isinstance(cause, UnicodeDecodeError):
            raise MoesaicError(f"{name!r} holds text that is not UTF-8: {cause}") from error
        raise MoesaicError(
            f"{name!r} is neither a file nor a data set that can be reached "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''!s:.120}). "
            "Pass a local .txt, .jsonl, .json or .parquet file."
        ) from error


def _data_set(source: TextSource, use: Use) -> Rows:
    """Return rows of a data set of the hub, or of a folder in the hub's layout."""
    datasets = _datasets()
    where: JSON = {"data_dir": source.data_dir} if source.data_dir else {}
    config = source.config or None
    place, _, _ = _place(source)
    with _reached(str(source)):
        splits = datasets.get_dataset_split_names(place, config, **where)
        builder = datasets.load_dataset_builder(place, config, **where)
    split, held_out = chosen_split(source, splits, use)
    info = (builder.info.splits or {}).get(split)
    count = info and info.num_examples
    with _reached(str(source)):
        at_hand = _size(source, builder.info) <= AT_HAND
        data = datasets.load_dataset(place, config, split=split, streaming=not at_hand, **where)
    if at_hand:
        count = len(data)
    taken = RowRange(str(replace(source, name=place, split="")), split)
    apart = len(splits) > 1 and any(name in splits for name in MEASURED)
    if source.sliced:
        start, stop = source.rows(count)
        taken = replace(taken, start=start, stop=stop)
    elif not apart and (held_out or split == _default(splits)):
        spared = HELD_OUT if not count else min(HELD_OUT, max(1, count // 20))
        if held_out:
            taken = replace(taken, stop=spared, held_out=True)
        elif use == "calibration":
            taken = replace(taken, start=spared)
    if not at_hand:
        return Streamed(data, taken, first_shard=not source.sliced)
    return IndexedRows(data, taken)


def chosen_split(source: TextSource, splits: Sequence[str], use: Use) -> tuple[str, bool]:
    """Return the split to read, and True if rows of a training split are to be held out of it.

    Raises:
        MoesaicError: there is no such split, or the choice is not clear.
    """
    listed = ", ".join(splits)
    named = source.split_name
    if named:
        if named not in splits:
            raise MoesaicError(f"{source}: there is no split {named!r}; known: {listed}.")
        return named, False
    measured = [name for name in MEASURED if name in splits]
    if use == "evaluation" and measured and len(splits) > 1:
        return measured[0], False
    split = _default(splits)
    if split:
        return split, use == "evaluation" and not source.sliced
    example = str(replace(source, split=splits[0]))
    raise MoesaicError(
        f"{source} has no split named train, but {listed}: name one, such as {example}."
    )


def _default(splits: Sequence[str]) -> str:
    """Return the split to train on if none is named; empty if that is not clear."""
    only = splits[0] if len(splits) == 1 else ""
    return "train" if "train" in splits else only


def _size(source: TextSource, info: DatasetInfo) -> float:
    """Return the bytes of a data set; infinite if unknown."""
    path = Path(source.name)
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    size = info.download_size or info.dataset_size
    return float("inf") if size is None else float(size)
