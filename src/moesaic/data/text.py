"""Text to token windows, with a fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from moesaic.errors import MoesaicError
from moesaic.foreign import Tokenizer

DOMAINS = ("prose", "reference", "code")
"""Domains of the text that ships with the package; each can be named instead of a file."""

TEXT_KEYS = ("text", "content", "instruction", "input", "question", "output", "answer", "response")


IGNORED = -100
"""The label of a token that is not predicted: a prompt's, or padding."""


@dataclass(frozen=True)
class Tokens:
    """Token windows ready for a model."""

    input_ids: Tensor
    """int64 (N, L)."""
    attention_mask: Tensor | None = None
    """bool (N, L), False on padding; None where there is no padding."""

    @property
    def count(self) -> int:
        """Tokens, padding left out."""
        mask = self.attention_mask
        return self.input_ids.numel() if mask is None else int(mask.sum())

    @cached_property
    def fingerprint(self) -> str:
        """Changes when any token changes."""
        digest = hashlib.sha256(repr(tuple(self.input_ids.shape)).encode())
        digest.update(self.input_ids.numpy().tobytes())
        if self.attention_mask is not None:
            digest.update(self.attention_mask.numpy().tobytes())
        return digest.hexdigest()[:16]

    def examples(self) -> list[dict[str, list[int]]]:
        """Windows to learn from, as input_ids and labels; padding is not predicted."""
        ids, mask = self.input_ids, self.attention_mask
        labels = ids if mask is None else ids.where(mask, IGNORED)
        pairs = zip(ids.tolist(), labels.tolist(), strict=True)
        return [{"input_ids": row, "labels": own} for row, own in pairs]

    def batches(self, tokens_per_batch: int = 2048) -> Iterator[Tokens]:
        """Consecutive groups of windows of at most about ``tokens_per_batch`` tokens."""
        rows = max(1, tokens_per_batch // self.input_ids.shape[1])
        masks = None if self.attention_mask is None else self.attention_mask.split(rows)
        for i, ids in enumerate(self.input_ids.split(rows)):
            yield Tokens(ids, None if masks is None else masks[i])


def shared_out(
    tokens: Tokens, number: int, of: int, tokens_per_batch: int = 2048
) -> tuple[Tokens, list[int]]:
    """Every ``of``-th batch from ``number`` on, and the numbers of those batches.

    Raises:
        MoesaicError: there are fewer batches than processes.
    """
    batches = list(tokens.batches(tokens_per_batch))
    if len(batches) < of:
        raise MoesaicError(
            f"{of} processes cannot share {len(batches)} calibration batches; give more text."
        )
    mine = list(range(number, len(batches), of))
    masks = [batches[i].attention_mask for i in mine]
    ids = torch.cat([batches[i].input_ids for i in mine])
    return Tokens(ids, None if masks[0] is None else torch.cat(masks)), mine  # type: ignore[arg-type]


def shipped_texts(split: Literal["calibration", "evaluation"], domain: str = "") -> list[str]:
    """Documents that ship with the package, of one domain or all in turn."""
    lines = files("moesaic").joinpath(f"assets/{split}.jsonl").read_text("utf-8").splitlines()
    documents = map(json.loads, lines)
    return [d["text"] for d in documents if domain in ("", d["domain"])]


def load_texts(source: str, split: Literal["calibration", "evaluation"]) -> list[str]:
    """Documents of a source; see :func:`stream_rows`."""
    return [_text_of(row) for row in load_rows(source, split)]


def stream_texts(source: str, split: Literal["calibration", "evaluation"]) -> Iterator[str]:
    """Documents of a source one by one; see :func:`stream_rows`."""
    return map(_text_of, stream_rows(source, split))


def load_rows(source: str, split: Literal["calibration", "evaluation"]) -> list[Any]:
    """Rows of a source, of a hub dataset the first 10,000; see :func:`stream_rows`."""
    return list(stream_rows(source, split, hub_limit=10_000))


def stream_rows(
    source: str, split: Literal["calibration", "evaluation"], hub_limit: int | None = None
) -> Iterator[Any]:
    """Rows of a source one by one: a file, a hub dataset id, or text that ships.

    Args:
        source: ``""`` for all the text that ships, one of :data:`DOMAINS`, a ``.txt``, ``.jsonl``,
            ``.json`` or ``.parquet`` file, or a hub dataset id, ``name`` or ``name:config``.
        split: which part of the shipped text.
        hub_limit: rows of a hub dataset at most.

    Yields:
        texts, or mappings with texts in them.

    Raises:
        MoesaicError: the source does not exist or cannot be read.
    """
    if source == "" or source in DOMAINS:
        yield from shipped_texts(split, source)
        return
    path = Path(source)
    if not path.is_file():
        if path.suffix or path.exists() or source.startswith((".", "/")):
            raise MoesaicError(f"No text file at {source}.")
        yield from _hub_rows(source, split, hub_limit)
        return
    try:
        if path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as lines:
                yield from (json.loads(line) for line in lines if line.strip())
        elif path.suffix == ".json":
            rows = json.loads(path.read_text("utf-8"))
            yield from rows if isinstance(rows, list) else [rows]
        elif path.suffix == ".parquet":
            yield from _datasets().Dataset.from_parquet(str(path))
        else:
            yield path.read_text("utf-8")
    except (ValueError, OSError) as error:
        raise MoesaicError(
            f"{source} cannot be read as {path.suffix or 'text'}: {error}"
        ) from error


def _text_of(row: Any) -> str:
    if isinstance(row, str):
        return row
    parts = (
        [row[k] for k in TEXT_KEYS if isinstance(row.get(k), str)] if hasattr(row, "get") else []
    )
    if not parts:
        raise MoesaicError(f"A row has no text under any of {', '.join(TEXT_KEYS)}: {row!r:.80}")
    return parts[0] if "text" in row else "\n".join(parts)


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MoesaicError("This source needs: pip install 'moesaic[datasets]'") from error
    return datasets


def _hub_rows(source: str, use: str, limit: int | None) -> Iterator[Any]:
    """Rows of a hub dataset: of its train split, or its test split to evaluate."""
    name, _, config = source.partition(":")
    try:
        datasets = _datasets()
        splits = datasets.get_dataset_split_names(name, config or None)
        order = ("test", "validation") if use == "evaluation" else ("train",)
        split = next((s for s in order if s in splits), splits[0])
        rows = datasets.load_dataset(name, config or None, split=split, streaming=True)
        yield from rows if limit is None else rows.take(limit)
    except MoesaicError:
        raise
    except Exception as error:
        raise MoesaicError(
            f"{source!r} is neither a file nor a data set that can be reached "
            f"({type(error).__name__}). Pass a local .txt, .jsonl, .json or .parquet file."
        ) from error


def windows(texts: Sequence[str], tokenizer: Tokenizer, length: int) -> Tensor:
    """Non-overlapping windows (N, length) of the texts joined by blank lines.

    No BOS or other special token is added; the last partial window is dropped.
    """
    ids = tokenizer("\n\n".join(texts), add_special_tokens=False, verbose=False)["input_ids"]
    whole = len(ids) // length
    return torch.tensor(ids[: whole * length], dtype=torch.int64).view(whole, length)


def evaluation_tokens(
    source: str | Sequence[str],
    tokenizer: Tokenizer,
    length: int = 512,
    max_tokens: int | None = None,
) -> Tokens:
    """The first windows of a text, in order.

    Raises:
        MoesaicError: the text does not fill one window.
    """
    if isinstance(source, str) and source.endswith(".safetensors"):
        return _tokenised(Path(source))
    texts = load_texts(source, "evaluation") if isinstance(source, str) else source
    ids = windows(texts, tokenizer, length)
    if max_tokens is not None:
        ids = ids[: max(1, max_tokens // length)]
    if len(ids) == 0:
        raise MoesaicError(
            f"The evaluation text is shorter than one window of {length} tokens; lower --length."
        )
    return Tokens(ids)


def calibration_tokens(
    source: str | Sequence[str],
    tokenizer: Tokenizer,
    samples: int = 100,
    length: int = 256,
    seed: int = 0,
) -> Tokens:
    """``samples`` windows of ``length`` tokens, drawn without replacement.

    Raises:
        MoesaicError: the text is empty or does not fill that many windows.
    """
    if isinstance(source, str) and source.endswith(".safetensors"):
        return _tokenised(Path(source))
    if isinstance(source, str) and "=" in source and not Path(source).is_file():
        return _mixed(source, tokenizer, samples, length, seed)
    texts = load_texts(source, "calibration") if isinstance(source, str) else source
    ids = windows(texts, tokenizer, length)
    if len(ids) < samples:
        remedy = f"pass --samples {len(ids)}" if len(ids) else "lower --length"
        raise MoesaicError(
            f"The calibration text fills {len(ids)} windows of {length} tokens, {samples} were "
            f"asked for; {remedy}, or give more text."
        )
    chosen = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))[:samples]
    return Tokens(ids[chosen])


def _mixed(source: str, tokenizer: Tokenizer, samples: int, length: int, seed: int) -> Tokens:
    """Windows of several sources in proportion to their weights, such as ``code=3,prose=1``."""
    weights = mix_weights(source)
    shares = split_evenly(samples, list(weights.values()))
    parts = [
        calibration_tokens(name, tokenizer, share, length, seed).input_ids
        for name, share in zip(weights, shares, strict=True)
        if share
    ]
    return Tokens(torch.cat(parts))


def mix_weights(source: str) -> dict[str, float]:
    """Sources and their weights, of a mix such as ``code=3,prose=1``.

    >>> mix_weights("code=3,prose=1")
    {'code': 3.0, 'prose': 1.0}
    """
    weights: dict[str, float] = {}
    for pair in source.split(","):
        name, _, weight = pair.rpartition("=")
        try:
            weights[name.strip()] = float(weight)
        except ValueError:
            weights[name.strip()] = 0.0
    if "" in weights or min(weights.values()) <= 0:
        raise MoesaicError(
            f"{source!r} is not a mix such as code=3,prose=1: a source and its "
            "weight, above 0, for each part."
        )
    return weights


def split_evenly(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that add up to ``total``, in proportion to ``weights`` as near as can be.

    >>> split_evenly(10, [2.0, 1.0])
    [7, 3]
    """
    exact = [total * w / sum(weights) for w in weights]
    parts = [int(e) for e in exact]
    rest = sorted(range(len(parts)), key=lambda i: parts[i] - exact[i])
    for i in rest[: total - sum(parts)]:
        parts[i] += 1
    return parts


ANSWER_KEYS = ("output", "answer", "response", "completion")
PROMPT_KEYS = ("prompt", "instruction", "input", "question")


def training_examples(
    source: str | Sequence[Any], tokenizer: Tokenizer, length: int
) -> list[dict[str, list[int]]]:
    """Texts to learn from, as input_ids and labels; IGNORED where nothing is to be predicted.

    Rows with a prompt and an answer (:data:`PROMPT_KEYS`, :data:`ANSWER_KEYS`) are one example
    each, their prompt not predicted; all other text becomes windows of ``length`` tokens.

    Raises:
        MoesaicError: there is not enough text for one example.
    """
    if isinstance(source, str) and source.endswith(".safetensors"):
        return _tokenised(Path(source)).examples()
    rows = load_rows(source, "calibration") if isinstance(source, str) else source
    examples, texts = [], []
    for row in rows:
        prompt, answer = _conversation(row)
        if answer is None:
            texts.append(_text_of(row))
            continue
        asked, told = (
            tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            for text in (f"{prompt}\n", answer)
        )
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        ids = (asked + told + end)[:length]
        labels = ([IGNORED] * len(asked) + told + end)[:length]
        if any(label != IGNORED for label in labels[1:]):
            examples.append({"input_ids": ids, "labels": labels})
    whole = windows(texts, tokenizer, length).tolist() if texts else []
    examples += [{"input_ids": ids, "labels": ids} for ids in whole]
    if not examples:
        raise MoesaicError(f"The text does not fill one window of {length} tokens; lower --length.")
    return examples


def _conversation(row: Any) -> tuple[str, str | None]:
    """The prompt and the answer of a row; no answer where the row is plain text."""
    if isinstance(row, str) or "text" in row:
        return "", None
    prompt = "\n".join(row[k] for k in PROMPT_KEYS if isinstance(row.get(k), str) and row[k])
    answer = next((row[k] for k in ANSWER_KEYS if isinstance(row.get(k), str)), None)
    return prompt, answer if prompt else None


def _tokenised(path: Path) -> Tokens:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise MoesaicError(f"No file at {path}.")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise MoesaicError(f"{path} is not a safetensors file: {error}") from error
    ids = tensors.get("input_ids")
    if ids is None or ids.dtype != torch.int64 or ids.dim() != 2 or ids.numel() == 0:
        raise MoesaicError(f"{path} must hold input_ids, int64 of shape (N, T), not empty.")
    mask = tensors.get("attention_mask")
    return Tokens(ids, None if mask is None else mask.bool())
