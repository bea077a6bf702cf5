"""Source of the statistics that methods decide by: the model, or a file that ``observe`` wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moesaic.arch.dense import Arch
from moesaic.arch.lookup import uncarved_arch
from moesaic.arch.mixture import FFN
from moesaic.config import RunArgs, path_to, takes_options
from moesaic.data.sources import read_by
from moesaic.data.text import Tokens
from moesaic.distributed import process, wait_for_all
from moesaic.errors import MoesaicError, quote
from moesaic.io.checkpoint import stored_fingerprint, stored_in, write_shard
from moesaic.io.models import leaves_untouched
from moesaic.io.outputs import (
    STATISTICS,
    check_out_file,
    check_unfinished,
    discard,
    output_lock,
    run_folder,
    whole_file,
)
from moesaic.io.trust import check_fields, header_of, parse_json, reading
from moesaic.modules.running import LayerTokens
from moesaic.observation.job import Job
from moesaic.observation.stats import GRAM, OF_TOKENS, OF_WEIGHTS, Stats, Tally, layer_stats
from moesaic.plan import differences
from moesaic.types import JSON, Named, Values

FORMAT = 5
"""Version of statistics files; others are refused."""
FILED = OF_WEIGHTS | OF_TOKENS
"""Statistics that a file holds of a mixture."""
FILED_DENSE = frozenset({"calls_E", "energy_EM", "reach_EM", "size_EM"})
"""Statistics that a file holds of a dense model."""
UNBOUNDED = frozenset({"logits_TX", "bias_E"})
"""Statistics that may hold infinity, of experts that are never chosen."""
NOT_NEGATIVE = frozenset(
    {"calls_E", "norm_E", "square_E", "energy_EM", "spread_E", "reach_EM", "size_EM"}
)
"""Statistics that are numbers of tokens, norms and sums of squares."""
NO_TEXT = Tokens(torch.zeros(1, 1, dtype=torch.int64))
"""Tokens that pass through the model if only weights are observed."""

Observed = tuple[int, Stats, LayerTokens[FFN] | None]
"""Index of a layer, its statistics, and its tokens if they are in memory."""


class Observation:
    """Source of a run's statistics: the model's activations, or a file.

    Args:
        job: the model, and the calibration tokens or the file of statistics.
        needs: names of statistics (:mod:`moesaic.observation.stats`); also ``tokens`` for the
            layer's tokens themselves, all of them in every process.
        gram_bytes: memory for the Gram matrices of one layer's experts.
        own: adds a method's own statistics of a layer's tokens.

    Raises:
        MoesaicError: the file is of another model, or lacks what is needed.
    """

    def __init__(
        self,
        job: Job[Arch],
        needs: Collection[str],
        gram_bytes: int = 0,
        own: Callable[[LayerTokens[Any], Tally], None] | None = None,
    ) -> None:
        self.job, self.needs, self.gram_bytes = job, frozenset(needs), gram_bytes
        self._file: StatsFile | None = None
        if path := job.args.calibration.stats:
            if lacking := self.needs - FILED:
                raise MoesaicError(
                    f"stats hold no {' and no '.join(sorted(lacking))}: these options need the "
                    "model, and cannot decide from stats."
                )
            file = StatsFile(Path(path))
            job.warn_of_text()
            both = file.header, job.request({})
            seen, now = ({name: of[name] for name in ("base", "settings")} for of in both)
            if others := differences(seen, now):
                raise MoesaicError(f"{path} was observed on another model than this: {others[0]}.")
            if "gram_SP" in self.needs and not file.header["gram"]:
                raise MoesaicError(f"{path} holds no Gram matrices, which reconstruction needs.")
            self._file = file if self.needs else None
        job.observed = self._file.header if self._file is not None else {}
        self.reads_text = self._file is None and not self.needs <= OF_WEIGHTS
        self._own = own if self.reads_text else None

    @property
    def whole(self) -> bool:
        """True if every process sees all tokens of a layer, so that they can share layers."""
        return self._file is None and "tokens" in self.needs

    @property
    def shows_tokens(self) -> bool:
        """True if layers come with all tokens, so that a refit needs no other pass."""
        return self.reads_text and (self.whole or process()[1] == 1)

    @property
    def file(self) -> str:
        """Fingerprint of the file; empty without one."""
        return "" if self._file is None else str(self._file.fingerprint)

    @property
    def calibration(self) -> str:
        """Fingerprint of the text used for the decision; empty if there is none."""
        if self._file is not None:
            return str(self._file.header["calibration"])
        return self.job.tokens.fingerprint if self.reads_text else ""

    def layers(self, layers: Sequence[int], follow: bool = False) -> Iterator[Observed]:
        """Yield layers in turn, observed on the tokens of all processes.

        Args:
            layers: rising indices.
            follow: as for :class:`~moesaic.observation.stream.LayerStream`.
        """
        if self._file is not None or not self.needs:
            for i in layers:
                yield i, {} if self._file is None else self._file.layer(i, self.needs), None
            return
        every, numbers = (self.job.tokens if self.reads_text else NO_TEXT), None
        share = every
        if self.reads_text and not self.whole:
            share, numbers = self.job.own_tokens
        for site in self.job.stream(layers, self.job.arch.view, share, follow=follow):
            stats = layer_stats(site, self.needs, every, numbers, self.gram_bytes, self._own)
            yield site.index, stats, site if self.reads_text else None


@takes_options(without=("stats", "compare", "plan", "teacher", "inplace", "resume_from"))
@leaves_untouched
def observe(
    model: Named,
    out: str | Path,
    *,
    gram_mb: int = 256,
    overwrite: bool = False,
    resume: bool = False,
    **options: Any,
) -> Path:
    """Observe a model once; ``prune``, ``slim`` and ``skip`` then decide without running it.

    The file serves every criterion and size of ``prune``, ``skip``, and the scores of ``slim`` that
    read single neurons; for a dense model only the last.

    Args:
        model: a name or folder, a loaded model, or what a verb returned.
        out: the file to write.
        gram_mb: MiB for the Gram matrices of one layer of experts; 0 leaves them out, and
            reconstruction with them.
        overwrite: replace ``out`` if it exists.
        resume: continue an unfinished run of the same.
        options: those of :meth:`moesaic.config.RunArgs.of`: calibration, samples, device and so on.

    Returns:
        the path of the file.

    Raises:
        MoesaicError: the request cannot be met.
    """
    out, args = path_to(out), RunArgs.of(model, **options)
    names = [model] if isinstance(model, str | Path) else []
    check_out_file(out, STATISTICS, overwrite, [*names, *read_by(args.calibration)])
    with output_lock(out) if process()[0] == 0 else nullcontext():
        return _observe(args, out, gram_mb, overwrite, resume)


def _observe(args: RunArgs, out: Path, gram_mb: int, overwrite: bool, resume: bool) -> Path:
    job = Job(args, partial(uncarved_arch, instead="observe the original"))
    layers = observed_layers(job)
    request: JSON = {
        **job.request({}),
        "layers": layers,
        "calibration": job.tokens.fingerprint,
        "tokens": job.tokens.count,
        **dict(zip(("samples", "length"), job.tokens.input_ids.shape, strict=True)),
        **({"bos": True} if job.tokens.begun else {}),
        "sources": [origin.as_json() for origin in job.tokens.origins],
        "gram": gram_mb,
    }
    folder = run_folder(out)
    check_unfinished(folder, overwrite, resume)
    if not resume and process()[0] == 0:
        discard(folder)
    wait_for_all()  # or a process would look for finished layers in a folder that is being deleted
    files = {i: folder / f"stats-{i:04d}.safetensors" for i in layers}
    done = [i for i in layers if files[i].exists()]
    for i in done:
        if others := differences(StatsFile(files[i]).header, request):
            raise MoesaicError(f"{folder} holds layers of another request: {others[0]}.")
    if len(done) < len(layers):
        names = FILED if any(job.base.experts) else FILED_DENSE
        names = names if gram_mb else names - GRAM
        share, numbers = job.own_tokens
        stream = job.stream(layers, job.arch.view, share)
        for site in job.track(stream, "Observing layers", len(layers)):
            if site.index in done:
                continue
            stats = layer_stats(site, names, job.tokens, numbers, gram_mb << 20)
            if process()[0] == 0:
                tensors = {f"layers.{site.index}.{n}": t.contiguous() for n, t in stats.items()}
                with whole_file(files[site.index]) as partly:
                    save_file(tensors, partly, metadata=_metadata(request))
    if process()[0] == 0:
        join([*files.values()], out, request)
    wait_for_all()  # the file is complete, and all processes have read which layers were done
    if process()[0] == 0:
        discard(folder)
    return out


def observed_layers(job: Job[Arch]) -> list[int]:
    """Return the layers to observe: those that route, or all of a dense model."""
    return sorted(job.base.routed) or list(range(len(job.base.widths)))


# --- the file ------------------------------------------------------------------------------------


_HEADER: Values = {
    "base": dict,
    "settings": str,
    "dtype": str,
    "layers": list[int],
    "gram": int,
    "calibration": str,
    "tokens": int,
    "sources": list[dict[str, object]],
    "samples": int | None,
    "length": int | None,
}
_MUST = ("base", "settings", "dtype", "layers", "gram", "calibration", "tokens")


class StatsFile:
    """Statistics of a whole model in one safetensors file, ``layers.N.NAME``, read layer by layer.

    Raises:
        MoesaicError: the file does not exist, is no statistics file, or has another format version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise MoesaicError(f"No statistics at {path}; moesaic observe MODEL {path} makes them.")
        try:
            header_of(path)
            with reading(path), safe_open(path, framework="pt") as opened:
                header: JSON = parse_json((opened.metadata() or {})["moesaic"], str(path))
                check_fields({"the header": header}, {"the header": dict})
        except MoesaicError as error:
            raise MoesaicError(f"{path} is not a file of moesaic observe: {error}") from error
        version = header.pop("format", None)
        if version != FORMAT:
            raise MoesaicError(
                f"{path} has statistics of format {quote(version or 1)}; this version reads and "
                f"writes format {FORMAT}. Observe the model again."
            )
        with reading(path, "Observe the model again."):
            check_fields({**dict.fromkeys(_MUST), **header}, _HEADER)
        self.header: JSON = header
        """``base``, ``dtype``, ``layers``, ``gram``, and of the text ``calibration``, ``tokens``,
        ``sources``, whether windows begin with BOS (``bos``), their number (``samples``) and
        ``length``, if these are known."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the statistics themselves."""
        return stored_fingerprint(stored_in(self.path))

    @property
    def sources(self) -> list[JSON]:
        """Rows of text that were observed, as in records; empty if unknown."""
        return list(self.header.get("sources", ()))

    def layer(self, index: int, names: Collection[str]) -> Stats:
        """Return some statistics of one layer.

        Raises:
            MoesaicError: they are incomplete or damaged.
        """
        what, start = f"{self.path}: layer {index}", f"layers.{index}."
        with reading(what, "Observe the model again."), safe_open(self.path, "pt") as opened:
            there = {n.removeprefix(start) for n in opened.keys() if n.startswith(start)}
            if missing := sorted({*names} - there):
                raise KeyError(missing[0])
            stats = {n: opened.get_tensor(start + n).clone() for n in names}
            for name, value in stats.items():
                if name not in UNBOUNDED and not bool(value.isfinite().all()):
                    raise ValueError(f"{name} has values that are not finite")
                if name in NOT_NEGATIVE and bool((value < 0).any()):
                    raise ValueError(f"{name} has values below 0")
            sizes = {}
            shapes = {n: opened.get_slice(start + n).get_shape() for n in there}
            if "gram_SP" in there:
                weighed = max(shapes["calls_E"][0], (isqrt(8 * shapes["gram_SP"][1] + 1) - 1) // 2)
                sampled = int(opened.get_tensor(f"{start}sampled_T").sum())
                sizes = {"S": sampled, "P": weighed * (weighed + 1) // 2}
            _check_shapes(shapes, **sizes)
        return stats


def _check_shapes(shapes: Mapping[str, Sequence[int]], **sizes: int) -> None:
    """Refuse statistics of one layer whose axes differ in size.

    Args:
        shapes: shape of each statistic.
        sizes: known sizes of axes.

    Raises:
        ValueError: names one.
    """
    for name, shape in sorted(shapes.items()):
        if name.startswith("shared") or 0 in shape:
            continue
        axes = name.rpartition("_")[2]
        expected = [sizes.setdefault(axis, n) for axis, n in zip(axes, shape, strict=True)]
        if list(shape) != expected:
            raise ValueError(f"{name} is of shape {list(shape)}, not {expected}")


def _metadata(header: JSON) -> dict[str, str]:
    return {"moesaic": json.dumps({"format": FORMAT, **header})}


def join(parts: Sequence[Path], out: Path, header: JSON) -> None:
    """Join layers' files into one, byte by byte, without loading them."""
    stored = {name: place for part in parts for name, place in stored_in(part).items()}
    with whole_file(out) as partly:
        write_shard(partly, stored, metadata=_metadata(header))
