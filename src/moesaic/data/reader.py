"""Rows of a source of text, in order or shuffled, for one use.

Rows for training or calibration and rows for evaluation never overlap: they are different splits of
a data set if it has them, otherwise some rows are held out for evaluation.

``datasets`` reads Parquet, folders and the hub. The lines of a .jsonl are read by Python's json,
since Arrow has one type for each column: its reader makes dates and numbers of texts, which changes
the arguments of tool calls, and refuses columns that begin late in a file.
"""

from __future__ import annotations

import glob
import json
import random
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import chain, islice, product, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moesaic.data.rows import Row
from moesaic.data.sources import DOMAINS, MIXES, SHIPPED, JsonLines, TextSource, Use, sources_of
from moesaic.errors import MoesaicError
from moesaic.types import JSON, Values

if TYPE_CHECKING:
    from datasets import DatasetInfo, IterableDataset

T = TypeVar("T")
MEASURED = ("test", "validation", "valid", "val", "dev")
"""Splits for evaluation; the first that exists is used."""
FILES = (".json", ".jsonl", ".parquet", ".safetensors", ".txt")
HELD_OUT = 5_000
"""Most rows held out for evaluation of a data set without such a split; at most 5 % of it."""
TABLES = (".csv", ".tsv", ".xls", ".xlsx")
"""Files of columns, which would be taken for plain text."""
AT_HAND = 1 << 30
"""Bytes up to which a data set or a Parquet file is read whole instead of streamed."""
OPEN, BUFFER = 16, 10_000
"""Shards of a stream that are read at a time, and rows in the buffer that they are drawn from."""
PIECE = 65_536
"""Characters of the pieces that a long document is cut into for training."""
PATIENCE = 5.0
"""Seconds that the hub has to answer."""
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
    mix: str = ""
    """Named mix that the source is a part of."""
    windows: int | None = None
    """Number of windows that were made of these rows; None if none were yet."""

    def meets(self, other: RowRange) -> bool:
        """Return True if some row is in both ranges.

        No row of the text that ships is, which has parts of its own for each use, nor of texts
        without a name.
        """
        if self.source in ("", SHIPPED, *DOMAINS, INLINE):
            return False
        ends = (float("inf") if each.stop is None else each.stop for each in (self, other))
        same = (self.source, self.split) == (other.source, other.split)
        return same and max(self.start, other.start) < min(ends)

    def as_json(self) -> JSON:
        """Return the source, split and rows as JSON.

        Returns:
            ``source``; ``split`` if there are several; ``rows``, first and one past the last, if
            they are not all; ``held_out`` if true; ``mix`` for a part of a named mix; ``windows``.
        """
        values: JSON = {"source": self.source or SHIPPED}
        if self.split:
            values["split"] = self.split
        if self.start or self.stop is not None:
            values["rows"] = [self.start, self.stop]
        more = {"held_out": self.held_out, "mix": self.mix}
        values |= {name: value for name, value in more.items() if value}
        return values if self.windows is None else {**values, "windows": self.windows}

    @classmethod
    def of(cls, values: Values) -> RowRange:
        """Return the range from the output of :meth:`as_json`."""
        start, stop = values.get("rows") or (0, None)
        return cls(str(values.get("source", "")), str(values.get("split", "")), start, stop)


def _without_nulls(value: Any) -> Any:
    """Return a value of Arrow without the nulls that stand in it for fields that only other rows
    have, such as arguments of other functions. A turn's content is kept: templates check for it."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if v is not None or k == "content"}
        return {k: _without_nulls(v) for k, v in kept.items()}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def _of_arrow(row: Values) -> Row:
    """Return a row of Arrow; see :func:`_without_nulls`. Columns themselves may be null."""
    return {name: _without_nulls(value) for name, value in row.items()}


class IndexedRows:
    """Rows that can be read in any order; if Arrow holds them, each has the fields of all."""

    at_hand = True

    def __init__(self, rows: Sequence[Any], taken: RowRange, arrow: bool = False) -> None:
        self.taken, self._rows, self._arrow = taken, rows, arrow
        self._range = range(taken.start, len(rows) if taken.stop is None else taken.stop)

    def __iter__(self) -> Iterator[Row]:
        return self._read(self._range)

    def shuffled(self, seed: str) -> Iterator[Row]:
        """Yield all rows once, in a uniformly random order; a single long document in pieces."""
        rng = random.Random(seed)
        rows = self._read(rng.sample(self._range, len(self._range)))
        if len(self._range) > 1:
            return rows
        cut = [piece for row in rows for piece in _pieces(row)]
        return iter(rng.sample(cut, len(cut)))

    def _read(self, order: Iterable[int]) -> Iterator[Row]:
        with _reading(self.taken.source):
            for i in order:
                yield _of_arrow(self._rows[i]) if self._arrow else self._rows[i]


class _StreamedRows:
    """Rows of a data set that is too large to be read whole.

    With ``first_shard`` their range counts within its first shard.
    """

    at_hand = False

    def __init__(self, data: IterableDataset, taken: RowRange, first_shard: bool) -> None:
        self.taken, self._data, self._first = taken, data, first_shard

    def __iter__(self) -> Iterator[Row]:
        with _reading(self.taken.source):
            yield from chain.from_iterable(self._shards())

    def shuffled(self, seed: str) -> Iterator[Row]:
        """Yield all rows once: some shards in turn, rows drawn from a buffer."""
        rng = random.Random(seed)
        with _reading(self.taken.source):
            shards = self._shards()
            rng.shuffle(shards)
            groups = (shards[i : i + OPEN] for i in range(0, len(shards), OPEN))
            in_turn = chain.from_iterable(chain.from_iterable(zip_longest(*g)) for g in groups)
            yield from shuffle_buffer((row for row in in_turn if row is not None), rng, BUFFER)

    def _shards(self) -> list[Iterable[Row]]:
        start, stop, data = self.taken.start, self.taken.stop, self._data
        count = data.num_shards if self._first else 1
        first, *others = [data.shard(count, i) for i in range(count)] if count > 1 else [data]
        first = first.skip(start) if start else first
        used = [first, *others] if stop is None else [first.take(stop - start)]
        return [map(_of_arrow, shard) for shard in used]


Rows = IndexedRows | _StreamedRows


def shuffle_buffer(rows: Iterator[T], rng: random.Random, size: int) -> Iterator[T]:
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

    Text that ships and data sets with several splits have different rows for each.

    Raises:
        MoesaicError: the source does not exist or cannot be read.
    """
    if source.shipped:
        domain = source.config if source.name == SHIPPED else source.name
        documents = _shipped_rows(use, domain)
        taken = _taken(replace(source, config=""), domain, len(documents))
        return IndexedRows(documents, taken)
    _check_there(source)
    path = Path(source.name)
    if not path.is_file():
        return _data_set(source, use)
    with _reading(source.name):
        if path.suffix == ".parquet" and path.stat().st_size > AT_HAND:
            import datasets
            from pyarrow import parquet

            taken = _taken(source, str(path.resolve()), parquet.read_metadata(path).num_rows)
            files = glob.escape(str(path))
            data = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
            return _StreamedRows(data, taken, first_shard=False)
        if source.sliced and _is_document(source):
            raise MoesaicError(
                f"{source}: a file of text is one document, of which no rows can be named; give "
                "several documents as rows of a .jsonl."
            )
        rows = _file_rows(path)
        taken = _taken(source, str(path.resolve()), len(rows))
        return IndexedRows(rows, taken, arrow=path.suffix == ".parquet")


def _check_there(source: TextSource) -> None:
    """Refuse a file that is missing, empty, or does not begin with text; the hub is not asked."""
    path = Path(source.name)
    if source.shipped or path.is_dir():
        return
    if path.is_file():
        if path.stat().st_size == 0:
            raise MoesaicError(f"{source.name} is empty.")
        if path.suffix not in (".parquet", ".safetensors"):
            with _reading(source.name), path.open("rb") as file:
                getincrementaldecoder("utf-8")().decode(file.read(4096))
        return
    stray = path.suffix and "/" not in source.name  # a data set has its owner before a slash
    if path.suffix in FILES or source.name.startswith((".", "/")) or stray:
        raise MoesaicError(f"No text file at {source.name}.")


def _is_document(source: TextSource) -> bool:
    """Return True if a source is a file of text, which is one row."""
    path = Path(source.name)
    return path.is_file() and path.suffix not in (".json", ".jsonl", ".parquet", ".safetensors")


def check_apart(used: Iterable[str], measured: str) -> None:
    """Refuse missing text, and evaluation on rows that are used for calibration or training.

    Raises:
        MoesaicError: some row is in both, or a source cannot be read.
    """
    ours = [source for spec in used for source in sources_of(spec, "calibration")]
    theirs = sources_of(measured, "evaluation")
    for source in (*theirs, *ours):
        _check_there(source)
    for a, b in product(ours, theirs):
        if a.shipped or a.place != b.place:
            continue
        if a.tokenised or open_rows(a, "calibration").taken.meets(open_rows(b, "evaluation").taken):
            here, there = (
                replace(each, split=f"{each.split_name}{rows}")
                for each, rows in ((b, "[:10%]"), (a, "[10%:]"))
            )
            slices = f" or split, or on a slice, such as {here} here and {there} there"
            raise MoesaicError(
                f"{b} is to be measured on, and rows of it are calibrated or trained on too ({a}). "
                f"Measure on another text{'' if _is_document(a) else slices}."
            )


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Refuse what a reader cannot read, with the name of the source."""
    try:
        yield
    except MoesaicError:
        raise
    except Exception as error:
        path, reason = Path(name), " ".join(str(error.__cause__ or error).split())[:200]
        if path.is_file():
            known = path.suffix in FILES or not path.suffix
            kind = path.suffix if known and path.suffix else "text"
            message = f"{name} cannot be read as {kind}: {reason}"
            message += "" if known else f". Give {', '.join(FILES)}."
        elif path.is_dir():
            message = f"{name} is a folder in which no text can be read: {reason}"
        else:
            mix = next((mix for mix in MIXES.values() if name in mix.sources), None)
            files = f"a file: {', '.join(FILES)}"
            message = (
                f"{name!r} is neither a file nor a data set that can be read "
                f"({type(error).__name__}: {reason:.120}). Pass "
                f"{f'text that ships, such as {mix.nearest}' if mix else files}. Without a "
                "network, HF_HUB_OFFLINE=1 reads what is in the cache."
            )
        raise MoesaicError(message) from error


def _shipped_rows(split: Use, domain: str = "") -> list[JSON]:
    """Return documents that ship, of one domain or all in turn: ``text``, ``domain``."""
    lines = files("moesaic").joinpath(f"assets/{split}.jsonl").read_text("utf-8").splitlines()
    return [row for row in map(json.loads, lines) if domain in ("", row["domain"])]


def shipped_texts(split: Use, domain: str = "") -> list[str]:
    """Return the texts of :func:`_shipped_rows`."""
    return [row["text"] for row in _shipped_rows(split, domain)]


def _taken(source: TextSource, name: str, count: int) -> RowRange:
    if source.config or source.data_dir or source.split_name not in ("", "train"):
        raise MoesaicError(
            f"{source}: a file has no config, data_dir or splits; name rows as "
            f"{source.name}:::[:90%]."
        )
    return RowRange(name, "", *(source.rows(count) if source.sliced else (0, None)))


def _file_rows(path: Path) -> Sequence[Row]:
    if path.suffix.lower() in TABLES:
        raise ValueError("tables are not read: make it a .jsonl or .parquet file")
    if path.suffix == ".jsonl":
        return JsonLines(path)
    if path.suffix == ".parquet":  # in memory: no copy of it is written into a cache
        import datasets
        from pyarrow import parquet

        rows: Sequence[Row] = datasets.Dataset(parquet.read_table(path))
        return rows
    text = path.read_text("utf-8-sig")
    if path.suffix == ".json":
        found = json.loads(text)
        return found if isinstance(found, list) else [found]
    if "\0" in text:
        raise ValueError("it holds NUL bytes")
    if not text.strip():
        raise ValueError("there is nothing but blanks in it")
    return [text]


# --- data sets -----------------------------------------------------------------------------------


@cache
def _check_hub() -> None:
    """Raise an error if the hub does not answer, which ``datasets`` would ask for a minute."""
    from huggingface_hub import constants, get_session

    if not constants.HF_HUB_OFFLINE:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)


def _data_set(source: TextSource, use: Use) -> Rows:
    """Return rows of a data set of the hub, or of a folder in the hub's layout."""
    import datasets

    where: JSON = {"data_dir": source.data_dir} if source.data_dir else {}
    place, config = source.place[0], source.config or None
    with _reading(str(replace(source, split=""))):
        name = place
        if (Path(place) / "state.json").is_file():  # as save_to_disk writes it
            name, where = "arrow", {"data_files": f"{glob.escape(place)}/*.arrow"}
        elif not Path(place).is_dir():
            _check_hub()
        splits = datasets.get_dataset_split_names(name, config, **where)
        split, held_out = chosen_split(source, splits, use)
        info = datasets.load_dataset_builder(name, config, **where).info
        at_hand = _size(source, info) <= AT_HAND
        data = datasets.load_dataset(name, config, split=split, streaming=not at_hand, **where)
    known = (info.splits or {}).get(split)
    count = len(data) if at_hand else known and known.num_examples
    taken = RowRange(str(replace(source, name=place, split="")), split, mix=source.mix)
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
    if at_hand:
        return IndexedRows(data, taken, arrow=True)
    return _StreamedRows(data, taken, first_shard=not source.sliced)


def chosen_split(source: TextSource, splits: Sequence[str], use: Use) -> tuple[str, bool]:
    """Return the split to read, and True if rows of a training split are to be held out of it.

    Raises:
        MoesaicError: there is no such split, or the choice is not clear.
    """
    listed, named = ", ".join(splits), source.split_name
    if named:
        if named not in splits:
            raise MoesaicError(f"{source}: there is no split {named!r}; known: {listed}.")
        return named, False
    measured = [name for name in MEASURED if name in splits]
    if use == "evaluation" and measured and len(splits) > 1:
        return measured[0], False
    if split := _default(splits):
        return split, use == "evaluation" and not source.sliced
    example = replace(source, split=splits[0])
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
