"""Windows of tokens, with a fingerprint, from sources of text."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from moesaic.data.reader import INLINE, IndexedRows, RowRange, Rows, open_rows
from moesaic.data.rows import DOMAIN, Row, text_of, usable_rows
from moesaic.data.sources import SHIPPED, Use, sources_of, text_sources
from moesaic.errors import MoesaicError, is_panic
from moesaic.types import Config, Tokenizer

POOL = 20_000_000
"""Characters of a larger source that windows are drawn from, in a random order of its rows."""

SAMPLES, LENGTH = 100, 512
"""Default number of calibration windows, and default tokens of an evaluation window."""
RUN = 32
"""Number of consecutive tokens by which a window is known to share text with another."""

BETWEEN = "\n\n"
"""Separator of two texts of one source."""
IGNORED = -100
"""Label of a token that is not predicted: in a prompt, or padding."""
NO_TOKEN = "The text has no token that is not padding."
"""Error message for windows of nothing but padding."""


@dataclass(frozen=True)
class Tokens:
    """Windows of tokens ready for a model.

    Raises:
        MoesaicError: ids are no integers of at least 0, or the mask has another shape or holds more
            than 0 and 1.
    """

    input_ids: Tensor
    """Token ids, int64 (N, L); other integer types are converted."""
    attention_mask: Tensor | None = None
    """Mask, bool (N, L), False on padding; None without padding. 0 and 1 are converted."""
    origins: tuple[RowRange, ...] = ()
    """Sources of the windows, one after the other; empty if unknown."""
    parts: tuple[str, ...] = ()
    """Kinds of text that are also measured by themselves: sources of a mix, domains of rows."""
    part_NL: Tensor | None = None
    """Kind of each token's text as an index into ``parts``, int64 (N, L)."""
    begun: int = 0
    """Tokens at the start of every window that the tokenizer adds (BOS), which are not predicted; 0
    if it adds none, and for given token ids."""

    def __post_init__(self) -> None:
        ids, mask = self.input_ids, self.attention_mask
        for name, tensor in (("input_ids", ids), ("attention_mask", ids if mask is None else mask)):
            if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.is_complex():
                kind = getattr(tensor, "dtype", type(tensor).__name__)
                raise MoesaicError(
                    f"{name} must be a tensor of whole numbers, such as int64; got {kind}."
                )
        if ids.dtype == torch.bool:
            raise MoesaicError("input_ids are True and False: that is a mask.")
        if ids.dim() != 2:
            raise MoesaicError(
                f"input_ids must be of shape (windows, tokens); got {tuple(ids.shape)}."
            )
        # torch compares no unsigned ones, which other tools write
        ids = ids.to("cpu", torch.int64)
        if bool((ids < 0).any()):
            raise MoesaicError(f"input_ids must be at least 0; got {int(ids.min())}.")
        object.__setattr__(self, "input_ids", ids)
        if mask is None:
            return
        if mask.shape != ids.shape:
            raise MoesaicError(
                f"attention_mask must have the shape of input_ids, {tuple(ids.shape)}; "
                f"got {tuple(mask.shape)}."
            )
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise MoesaicError("attention_mask must hold 1 (or True) for tokens, 0 for padding.")
        object.__setattr__(self, "attention_mask", mask.to("cpu", torch.bool))

    def check(self, config: Config) -> None:
        """Refuse windows without a token, or longer than a model's positions, and ids outside its
        vocabulary."""
        check_length(self.input_ids.shape[1], config)
        vocabulary = config.get_text_config().vocab_size
        if self.count == 0:
            raise MoesaicError(NO_TOKEN)
        greatest = int(self.input_ids.max())
        if greatest >= vocabulary:
            raise MoesaicError(
                f"Token id {greatest} is beyond the model's vocabulary of {vocabulary:,}: the text "
                "was made into tokens for another model."
            )

    @property
    def real(self) -> Tensor:
        """Mask of real tokens, bool (N, L), False on padding."""
        mask = self.attention_mask
        return torch.ones_like(self.input_ids, dtype=torch.bool) if mask is None else mask

    @property
    def labels(self) -> Tensor:
        """Labels, int64 (N, L): ids, but ``IGNORED`` on padding, after it, and on BOS."""
        real = self.real
        follows = torch.nn.functional.pad(real[:, :-1], (1, 0), value=True)
        follows[:, : self.begun] = False
        return self.input_ids.where(real & follows, IGNORED)

    @property
    def count(self) -> int:
        """Number of tokens, padding left out."""
        return int(self.real.sum())

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the ids and the mask."""
        digest = hashlib.sha256(repr(tuple(self.input_ids.shape)).encode())
        digest.update(self.input_ids.numpy().tobytes())
        if self.attention_mask is not None:
            digest.update(self.attention_mask.numpy().tobytes())
        return digest.hexdigest()[:16]

    def rows(self, chosen: slice | Tensor) -> Tokens:
        """Return some of the windows; origins are kept only if there is one."""
        ids = self.input_ids[chosen]
        mask, part = (
            None if tensor is None else tensor[chosen]
            for tensor in (self.attention_mask, self.part_NL)
        )
        single = len(self.origins) == 1
        origins = tuple(replace(o, windows=len(ids)) for o in self.origins if single)
        return Tokens(ids, mask, origins, self.parts, part, self.begun)

    def cut(self, length: int | None) -> Tokens:
        """Return windows of fewer tokens, cut from these; None for the same ones.

        The rest of a window is left out, and windows of nothing but padding.

        Raises:
            MoesaicError: the windows are shorter.
        """
        stored = self.input_ids.shape[1]
        if length is None or length == stored:
            return self
        if length > stored:
            source = self.origins[0].source if self.origins else "the text"
            raise MoesaicError(
                f"length {length}: {source} has windows of {stored} tokens; pass length={stored} "
                "or less."
            )
        kept = stored // length * length
        mask, part = (
            None if tensor is None else tensor[:, :kept].reshape(-1, length)
            for tensor in (self.attention_mask, self.part_NL)
        )
        ids = self.input_ids[:, :kept].reshape(-1, length)
        shorter = Tokens(ids, mask, self.origins, self.parts, part)
        return shorter.rows(shorter.real.any(1))

    def unpadded(self) -> list[list[int]]:
        """Return the ids of each window, padding left out."""
        return [ids[real].tolist() for ids, real in zip(self.input_ids, self.real, strict=True)]

    def examples(self) -> list[dict[str, list[int]]]:
        """Return windows to learn from, as input_ids and labels; padding is left out."""
        rows = zip(self.input_ids, self.labels, self.real, strict=True)
        return [
            {"input_ids": ids[real].tolist(), "labels": targets[real].tolist()}
            for ids, targets, real in rows
            if real.any()
        ]

    def batches(self, tokens_per_batch: int = 2048) -> Iterator[Tokens]:
        """Yield consecutive groups of windows of at most about ``tokens_per_batch`` tokens."""
        rows = max(1, tokens_per_batch // self.input_ids.shape[1])
        unlabelled = replace(self, origins=())
        for first in range(0, len(self.input_ids), rows):
            yield unlabelled.rows(slice(first, first + rows))


Text: TypeAlias = str | Sequence[Row] | Tokens | Tensor
"""Text as verbs accept it: a source, texts or rows, or token ids (N, L)."""


def positions(config: Config) -> int | None:
    """Return the most tokens that a model takes; None if its config has no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def check_length(length: int, config: Config) -> None:
    """Refuse windows that are longer than a model's positions."""
    most = positions(config)
    if most is not None and most < 1:
        raise MoesaicError(f"max_position_embeddings {most} in config.json leaves no positions.")
    if most is not None and length > most:
        raise MoesaicError(
            f"length {length} is beyond the model's {most:,} positions; pass length={most} or less."
        )


def process_share(
    tokens: Tokens, number: int, processes: int, tokens_per_batch: int = 2048
) -> tuple[Tokens, list[int]]:
    """Return every ``processes``-th batch from ``number`` on, and the indices of those batches.

    Raises:
        MoesaicError: there are fewer batches than processes.
    """
    rows = max(1, tokens_per_batch // tokens.input_ids.shape[1])
    batches = torch.arange(len(tokens.input_ids)).split(rows)
    if len(batches) < processes:
        raise MoesaicError(
            f"{processes} processes cannot share {len(tokens.input_ids)} windows, which they take "
            f"{rows} at a time: raise samples, or run fewer."
        )
    own = torch.cat(batches[number::processes])
    return replace(tokens, origins=()).rows(own), list(range(number, len(batches), processes))


def beginning(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that a tokenizer puts before any text: BOS, or none.

    They are found by tokenising a text, since configs are often wrong about BOS.
    """
    ids, plain = (tokenizer.encode("a", add_special_tokens=special) for special in (True, False))
    ends = (n for n in range(len(ids)) if ids[n : n + len(plain)] == plain)
    return ids[: next(ends, 0)]


def windows(texts: Sequence[str], tokenizer: Tokenizer, length: int) -> Tensor:
    """Return non-overlapping windows (N, length) of the texts joined by blank lines.

    If the tokenizer begins text with BOS each window begins with it, and has one token less of the
    text. No other special token is added; the last partial window is dropped.

    Raises:
        MoesaicError: the texts are blank, or only BOS would fit into a window.
    """
    if not any(text.strip() for text in texts):
        raise MoesaicError("The text is nothing but blanks; give text that has some words.")
    begin, (ids_T, _) = beginning(tokenizer), _tokenised(BETWEEN.join(texts), tokenizer)
    place_NL = window_places(ids_T, begin, length)
    first_N1 = torch.tensor(begin, dtype=torch.int64).expand(len(place_NL), -1)
    return torch.cat([first_N1, ids_T[place_NL]], 1)


def window_places(ids_T: Tensor, begin: Sequence[int], length: int) -> Tensor:
    """Return the indices of each window's tokens in a text (N, length less BOS).

    A BOS that a chat template wrote there is skipped: each window has one already.

    Raises:
        MoesaicError: windows are too short for more than BOS.
    """
    body = length - len(begin)
    if body < 1:
        raise MoesaicError(
            f"length {length}: the tokenizer begins each window with {len(begin)} tokens of its "
            "own; raise it."
        )
    if not begin:
        return torch.arange(len(ids_T) // body * body).view(-1, body)
    written, starts, at = torch.tensor(begin), [], 0
    while at + body <= len(ids_T):
        while torch.equal(ids_T[at : at + len(begin)], written):
            at += len(begin)
        if at + body <= len(ids_T):
            starts.append(at)
        at += body
    return torch.tensor(starts, dtype=torch.int64)[:, None] + torch.arange(body)


_KEPT: dict[tuple[str, Hashable], tuple[Tensor, Tensor]] = {}
"""Cache of the last two tokenised texts, one to calibrate and one to measure on."""


def encoded(tokenizer: Tokenizer, text: str, **options: Any) -> Any:
    """Return what a tokenizer makes of a text, without special tokens unless they are asked for.

    Raises:
        MoesaicError: it fails over this text, as one with odd rules may.
    """
    try:
        return tokenizer(text, verbose=False, **{"add_special_tokens": False, **options})
    except BaseException as error:
        if not is_panic(error):
            raise
        raise MoesaicError(f"This model has no usable tokenizer: {error!s:.300}") from error


def _tokenised(text: str, tokenizer: Tokenizer, placed: bool = False) -> tuple[Tensor, Tensor]:
    """Return a text's tokens (T,) and, if ``placed``, the characters where they begin (T,).

    Cached by the tokenizer's rules.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    by_object: Hashable = (tokenizer, len(tokenizer))
    key = text, backend.to_str() if backend is not None else by_object
    if key not in _KEPT or (placed and not len(_KEPT[key][1])):
        more = {"return_offsets_mapping": True} if placed else {}
        found = encoded(tokenizer, text, **more)
        starts = [start for start, _ in found["offset_mapping"]] if placed else []
        for old in [*_KEPT][:-1]:
            del _KEPT[old]
        _KEPT[key] = torch.tensor(found["input_ids"]).long(), torch.tensor(starts).long()
    return _KEPT[key]


def _domains(
    rows: Sequence[Row], texts: Sequence[str], tokenizer: Tokenizer, length: int
) -> tuple[tuple[str, ...], Tensor | None]:
    """Return the domains of rows, and the domain of each token of their windows (N, length).

    Empty if all rows have one domain, or one has none, or if the tokenizer cannot map tokens to
    characters.
    """
    given = (row.get(DOMAIN) if isinstance(row, Mapping) else None for row in rows)
    of_rows = [name if isinstance(name, str) else "" for name in given]
    names = tuple(dict.fromkeys(of_rows))
    if len(names) < 2 or "" in names or not tokenizer.is_fast:
        return (), None
    ids_T, start_T = _tokenised(BETWEEN.join(texts), tokenizer, placed=True)
    ends = torch.tensor([len(text) + len(BETWEEN) for text in texts]).cumsum(0)
    row_T = torch.bucketize(start_T, ends, right=True)
    domain_R = torch.tensor([names.index(name) for name in of_rows])
    begin = beginning(tokenizer)
    parts = domain_R[row_T][window_places(ids_T, begin, length)]
    return names, torch.cat([parts[:, :1].expand(-1, len(begin)), parts], 1)


def needs_tokenizer(text: object) -> bool:
    """Return True if a text must be tokenised: a source, texts or rows, but no token ids."""
    if isinstance(text, str):
        return not all(source.tokenised for source in text_sources(text))
    if isinstance(text, Sequence) and text and isinstance(text[0], Mapping):
        return "labels" not in text[0]
    return not isinstance(text, Tokens | Tensor)


# --- sources to tokens ---------------------------------------------------------------------------


def without_overlap(windows: Tokens, others: Tokens, run: int = RUN) -> Tokens:
    """Return the windows that share no run of ``run`` consecutive tokens with others.

    Windows shorter than that must not occur in others as a whole. Padding is ignored.

    >>> others = Tokens(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))
    >>> windows = Tokens(torch.tensor([[9, 2, 3, 9], [2, 9, 4, 6]]))
    >>> without_overlap(windows, others, 2).input_ids.tolist()
    [[2, 9, 4, 6]]
    """

    def pieces(row: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
        return (tuple(row[i : i + size]) for i in range(len(row) - size + 1))

    rows, taken = windows.unpadded(), others.unpadded()
    sizes = {min(run, len(row)) for row in rows}
    known = {size: {piece for row in taken for piece in pieces(row, size)} for size in sizes}
    apart = (
        known[size].isdisjoint(pieces(row, size)) for row in rows for size in [min(run, len(row))]
    )
    return windows.rows(torch.tensor([*apart], dtype=torch.bool).nonzero().flatten())


def _shared(
    text: Text, use: Use, total: int | None, usual: int | None = None
) -> Iterator[tuple[Rows | Tokens, int | None]]:
    """Yield the rows, or the token ids, of each source of a text, with its share of a total; mixes
    share ``usual`` without one."""
    if isinstance(text, Tokens | Tensor):
        tokens = text if isinstance(text, Tokens) else Tokens(text)
        if not tokens.count:
            raise MoesaicError(NO_TOKEN)
        yield tokens, total
        return
    if not isinstance(text, str):
        yield IndexedRows(text, RowRange(INLINE)), total
        return
    sources = sources_of(text, use)
    total = usual if total is None and len(sources) > 1 else total
    weights = [source.weight for source in sources]
    shares = [None] * len(sources) if total is None else split_evenly(total, weights)
    for source, share in zip(sources, shares, strict=True):
        tokenised = source.tokenised
        yield token_file(Path(source.name)) if tokenised else open_rows(source, use), share


def evaluation_tokens(
    source: Text,
    tokenizer: Tokenizer | None,
    length: int | None = None,
    max_tokens: int | None = None,
    config: Config | None = None,
) -> Tokens:
    """Return the first windows of a text, in order; for a mix, of each source in turn.

    Args:
        source: as for :func:`moesaic.data.sources.text_sources`, rows, or token ids.
        tokenizer: the model's tokenizer; not used for token ids.
        length: tokens of a window; None for 512 (at most ``max_tokens``), or that of token ids.
        max_tokens: most tokens in all; 0 or None for the whole text. A mix shares it by its
            weights.
        config: the model's config, to check the tokens; the default length is then at most its
            positions.

    Raises:
        MoesaicError: a source cannot be read, does not fill one window, or does not fit the model;
            or ``max_tokens`` is less than one window.
    """
    usual = LENGTH if config is None else min(LENGTH, positions(config) or LENGTH)
    found = []
    for rows, share in _shared(source, "evaluation", max_tokens or None):
        window = length or min(usual, share or usual)
        if share is not None and share < (least := max(window, 2)):
            of_it = "" if share == max_tokens else f", of which a source gets {share},"
            raise MoesaicError(
                f"max_tokens {max_tokens}{of_it} is less than one window of {least} tokens."
            )
        if isinstance(rows, Tokens):
            tokens = rows.cut(length)
            if share is not None and int(tokens.real[0].sum()) > share:
                tokens = rows.cut(share)
        else:
            limit = None if share is None else max(POOL // 10, 32 * share)
            read, texts = _some(rows, rows.taken, tokenizer, limit)
            parts, part_NL = _domains(read, texts, tokenizer, window)
            tokens = _windows(texts, rows, tokenizer, window)
            if not tokens.count:
                raise MoesaicError(
                    f"The evaluation text is shorter than one window of {window} tokens; give more "
                    "text, or lower length."
                )
            tokens = replace(tokens, parts=parts, part_NL=part_NL)
        if share is not None:
            so_far = tokens.real.sum(1).cumsum(0)
            tokens = tokens.rows(slice(int((so_far <= share).sum())))
        found.append(tokens)
    tokens = concat(found)
    if config is not None:
        tokens.check(config)
    return tokens


def calibration_tokens(
    source: Text,
    tokenizer: Tokenizer | None,
    samples: int | None = None,
    length: int | None = None,
    seed: int = 0,
    *,
    documents: bool = False,
    window: int = 256,
) -> Tokens:
    """Return windows drawn without replacement; for a mix, in proportion to its weights.

    Args:
        source: as for :func:`moesaic.data.sources.text_sources`, rows, or token ids.
        tokenizer: the model's tokenizer; not used for token ids.
        samples: number of windows; None for 100, or for all of token ids.
        length: tokens of a window, or most tokens of a document; None for ``window``, or for that
            of token ids.
        seed: seed of the draw.
        documents: True if each window is one document with the tokenizer's special tokens, cut at
            ``length`` and padded, instead of a piece of all text.
        window: default length of a window.

    Raises:
        MoesaicError: the text is empty or does not fill that many windows.
    """
    found = []
    for rows, share in _shared(source, "calibration", samples, SAMPLES):
        if share == 0:
            continue
        if isinstance(rows, Tokens):
            if documents:
                raise MoesaicError("documents is for text: token ids are windows already.")
            tokens = rows.cut(length)
        else:
            share = SAMPLES if share is None else share
            texts = _pool(rows, share * (length or window), seed, tokenizer)
            if documents:
                found.append(_documents(texts, rows, tokenizer, length or window, share, seed))
                continue
            tokens = _windows(texts, rows, tokenizer, length or window)
        count, each = tokens.input_ids.shape
        if share is not None and not (isinstance(rows, Tokens) and share == count):
            has = f"fills {{}} windows of {each} tokens"
            tokens = tokens.rows(_drawn(count, share, seed, has))
        found.append(tokens)
    return concat(found)


def _windows(texts: Sequence[str], rows: Rows, tokenizer: Tokenizer, length: int) -> Tokens:
    ids = windows(texts, tokenizer, length)
    return Tokens(
        ids, None, (replace(rows.taken, windows=len(ids)),), begun=len(beginning(tokenizer))
    )


def _documents(
    pool: Sequence[str], rows: Rows, tokenizer: Tokenizer, length: int, samples: int, seed: int
) -> Tokens:
    begin = beginning(tokenizer)
    start = "".join(tokenizer.convert_ids_to_tokens(begin))  # from a template; added again below
    texts = [text.removeprefix(start) for text in pool if text.strip()]
    cut = {"add_special_tokens": True, "truncation": True, "max_length": length}
    ids_N = [
        encoded(tokenizer, texts[i], **cut)["input_ids"]
        for i in _drawn(len(texts), samples, seed, "has {} documents")
    ]
    longest = max(map(len, ids_N))
    filling = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    rows_NL = [row + [filling] * (longest - len(row)) for row in ids_N]
    ids = torch.tensor(rows_NL, dtype=torch.int64)  # also where no document has a token
    mask = torch.arange(longest) < torch.tensor([*map(len, ids_N)])[:, None]
    origins = (replace(rows.taken, windows=samples),)
    return Tokens(ids, None if bool(mask.all()) else mask, origins, begun=len(begin))


def _drawn(count: int, samples: int, seed: int, has: str) -> Tensor:
    """Return indices of some of the windows in a random order."""
    if not count:
        raise MoesaicError(
            f"The calibration text {has.format(count)}; lower length, or give more text."
        )
    if count < samples:
        raise MoesaicError(
            f"samples {samples}: the calibration text {has.format(count)}; pass samples={count}, "
            "or give more text."
        )
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:samples]


def _pool(rows: Rows, tokens: int, seed: int, tokenizer: Tokenizer) -> list[str]:
    """Return the texts to draw from: all in order, or some of a large source in a random order."""
    limit = max(POOL, 16 * tokens)
    if rows.at_hand:
        _, texts = _some(rows, rows.taken, tokenizer, limit)
        if sum(map(len, texts)) < limit:
            return texts
    return _some(rows.shuffled(str(seed)), rows.taken, tokenizer, limit)[1]


def _some(
    rows: Iterable[Row], taken: RowRange, tokenizer: Tokenizer, limit: int | None
) -> tuple[list[Row], list[str]]:
    """Return the first usable rows and their texts, until these have ``limit`` characters."""
    read, texts, count = [], [], 0
    name = taken.source or SHIPPED
    for row, text in usable_rows(rows, partial(text_of, tokenizer=tokenizer), name):
        read.append(row)
        texts.append(text)
        count += len(text)
        if limit is not None and count >= limit:
            break
    return read, texts


def concat(parts: Sequence[Tokens]) -> Tokens:
    """Return the windows of all parts (at least one); the shorter ones are padded."""
    if len(parts) == 1:
        return parts[0]
    length = max(part.input_ids.shape[1] for part in parts)
    fill = torch.nn.functional.pad
    rooms = [(0, length - part.input_ids.shape[1]) for part in parts]
    ids = torch.cat([fill(part.input_ids, room) for part, room in zip(parts, rooms, strict=True)])
    mask = torch.cat([fill(part.real, room) for part, room in zip(parts, rooms, strict=True)])
    origins = tuple(origin for part in parts for origin in part.origins)
    names = [", ".join(o.source or SHIPPED for o in part.origins) for part in parts]
    kinds = tuple(dict.fromkeys(names))  # slices of one source are one kind of text
    counts = torch.tensor([len(part.input_ids) for part in parts])
    kind_N = torch.tensor([kinds.index(name) for name in names]).repeat_interleave(counts)
    part_NL = kind_N[:, None].expand_as(ids).contiguous()
    masked = not bool(mask.all()) or any(part.attention_mask is not None for part in parts)
    begun = max(part.begun for part in parts)
    return Tokens(ids, mask if masked else None, origins, kinds, part_NL, begun)


def split_evenly(total: int, weights: Sequence[float]) -> list[int]:
    """Return integers that add up to ``total``, as nearly in proportion to ``weights`` as possible.

    >>> split_evenly(10, [2.0, 1.0])
    [7, 3]
    """
    exact = [total * w / sum(weights) for w in weights]
    parts = [int(e) for e in exact]
    rest = sorted(range(len(parts)), key=lambda i: parts[i] - exact[i])
    for i in rest[: total - sum(parts)]:
        parts[i] += 1
    return parts


def token_file(path: Path) -> Tokens:
    """Return the windows of a ``.safetensors`` file.

    Args:
        path: file with ``input_ids``, int64 (N, L), and ``attention_mask`` (N, L) if there is
            padding.

    Raises:
        MoesaicError: there is no such file, or it holds no token.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise MoesaicError(f"No file at {path}.")
    try:
        tensors = load_file(path)
        tokens = Tokens(tensors["input_ids"], tensors.get("attention_mask"))
    except (SafetensorError, OSError) as error:
        raise MoesaicError(f"{path} is not a safetensors file: {error}") from error
    except KeyError:
        raise MoesaicError(f"{path} must hold input_ids, int64 of shape (N, T).") from None
    except MoesaicError as error:
        raise MoesaicError(f"{path}: {error}") from error
    if tokens.count == 0:
        raise MoesaicError(f"{path} holds no token.")
    mask = tokens.attention_mask
    mask = None if mask is None or bool(mask.all()) else mask
    ids = tokens.input_ids
    return Tokens(ids, mask, (RowRange(str(path.resolve()), windows=len(ids)),))
