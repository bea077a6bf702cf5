"""Statistics file of ``observe``: a model observed once, for any number of decisions."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from safetensors import safe_open
from safetensors.torch import save_file

from moesaic.arch.dense import Arch
from moesaic.arch.lookup import uncarved_arch
from moesaic.arch.mixture import MoEFFN
from moesaic.config import RunArgs, takes_options
from moesaic.data.text_source import read_by
from moesaic.distributed import gathered, process, wait_for_all
from moesaic.errors import MoesaicError, shown
from moesaic.io.fingerprint import of_stored, stored_in
from moesaic.io.headers import check_fields, header_of, parsed, reading
from moesaic.io.outputs import (
    STATISTICS,
    check_file,
    discard,
    output_lock,
    unfinished,
    whole_file,
)
from moesaic.io.restore import leaves_untouched
from moesaic.observation.expert_stats import ExpertStats, observed
from moesaic.observation.job import Job
from moesaic.observation.neuron_stats import NeuronStats, observe_neurons
from moesaic.observation.stream import LayerTokens
from moesaic.plan import BaseShape, MadeFrom
from moesaic.types import JSON, Named, Values

FORMAT = 4
"""Version of statistics files; others are refused."""


@takes_options()
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
    out, args = Path(out).expanduser(), RunArgs.of(model, **options)
    names = [model] if isinstance(model, str | Path) else []
    check_file(out, STATISTICS, overwrite, [*names, *read_by(args.calibration)])
    with output_lock(out) if process()[0] == 0 else nullcontext():
        return _observe(args, out, gram_mb, overwrite, resume)


def _observe(args: RunArgs, out: Path, gram_mb: int, overwrite: bool, resume: bool) -> Path:
    job = Job(args, partial(uncarved_arch, instead="observe the original"))
    layers = observed_layers(job)
    request: JSON = {
        **job.request({"base": plain(job.base)}),
        "layers": layers,
        "calibration": job.tokens.fingerprint,
        "tokens": job.tokens.count,
        **dict(zip(("samples", "length"), job.tokens.input_ids.shape, strict=True)),
        **({"bos": True} if job.tokens.begun else {}),
        "sources": [origin.as_json() for origin in job.tokens.origins],
        "gram": gram_mb,
    }
    folder = unfinished(out)
    if folder.exists() and not resume:
        if not overwrite:
            raise MoesaicError(
                f"{folder} holds an unfinished run: continue it with resume=True (--resume), or "
                "start anew with overwrite=True (--overwrite)."
            )
        if process()[0] == 0:
            discard(folder)
    wait_for_all()  # or a process would look for finished layers in a folder that is being deleted
    done = [i for i in layers if _layer_file(folder, i).exists()]
    for i in done:
        stored = MadeFrom(StatsFile(_layer_file(folder, i)).header)
        differences = stored.differs(MadeFrom(request))
        if differences:
            raise MoesaicError(f"{folder} holds layers of another request: {differences[0]}.")
    if len(done) < len(layers):
        share, numbers = job.own_tokens
        stream = job.stream(layers, job.arch.view, share)
        for site in job.track(stream, "Observing layers", len(layers)):
            if site.index in done:
                continue
            if isinstance(site.view, MoEFFN):
                routed = cast("LayerTokens[MoEFFN]", site)
                stats = observed(routed, job.tokens, numbers, gram_mb << 20)
            else:
                neurons = NeuronStats.merged(gathered(observe_neurons(site)))
                stats = replace(ExpertStats.none(1), neurons=neurons)
            if process()[0] == 0:
                _save_layer(stats, folder, site.index, request)
    if process()[0] == 0:
        join({i: _layer_file(folder, i) for i in layers}, out, request)
    wait_for_all()  # the file is complete, and all processes have read which layers were done
    if process()[0] == 0:
        discard(folder)
    return out


def observed_layers(job: Job[Arch]) -> list[int]:
    """Return the layers to observe: those that route, or all of a dense model.

    Raises:
        MoesaicError: there is none.
    """
    if not any(job.base.experts):
        return list(range(len(job.base.widths)))
    routed = sorted(job.base.routed)
    if not routed:
        raise MoesaicError("No layer of this model routes.")
    return routed


# --- the file ------------------------------------------------------------------------------------


def from_file(job: Job[Arch], path: str | Path, needs_gram: bool) -> StatsFile:
    """Return the statistics file of this model.

    Raises:
        MoesaicError: the file is of another model, or lacks what is needed.
    """
    file = StatsFile(Path(path))
    job.warn_of_text()
    base = plain(job.base)
    stored = {"base": {"routing": base["routing"], **file.header["base"]}}
    differences = MadeFrom(stored).differs(MadeFrom({"base": base}))
    if differences:
        raise MoesaicError(f"{path} was observed on another model than this: {differences[0]}.")
    if needs_gram and not file.header["gram"]:
        raise MoesaicError(f"{path} holds no Gram matrices, which reconstruction needs.")
    return file


def plain(base: BaseShape) -> JSON:
    """Return a base's shape as JSON reads it back."""
    return json.loads(json.dumps(asdict(base)))


_HEADER: Values = {
    "base": dict,
    "dtype": str,
    "layers": list[int],
    "gram": int,
    "calibration": str,
    "tokens": int,
    "sources": list[dict[str, object]],
    "samples": int | None,
    "length": int | None,
}
_MUST = ("base", "dtype", "layers", "gram", "calibration", "tokens")


class StatsFile:
    """Statistics of a whole model in one safetensors file, read one layer at a time.

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
                header: JSON = parsed((opened.metadata() or {})["moesaic"], str(path))
                check_fields({"the header": header}, {"the header": dict})
        except MoesaicError as error:
            raise MoesaicError(f"{path} is not a file of moesaic observe: {error}") from error
        version = header.pop("format", None)
        if version != FORMAT:
            raise MoesaicError(
                f"{path} has statistics of format {shown(version or 1)}; this version reads and "
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
        return of_stored(stored_in(self.path))

    @property
    def sources(self) -> list[JSON]:
        """Rows of text that were observed, as in records; empty if unknown."""
        return list(self.header.get("sources", ()))

    @property
    def layers(self) -> list[int]:
        """Indices of the observed decoder layers."""
        return list(self.header["layers"])

    def layer(self, index: int) -> ExpertStats:
        """Return one layer's statistics.

        Raises:
            MoesaicError: they are incomplete or damaged.
        """
        what = f"{self.path}: layer {index}"
        with reading(what, "Observe the model again."):
            with safe_open(self.path, framework="pt") as opened:
                start = f"{index}."
                names = [n.removeprefix(start) for n in opened.keys() if n.startswith(start)]
                tensors = {n: opened.get_tensor(start + n).clone() for n in names}
            stats = ExpertStats.of_tensors(tensors)
            stats.check()
        return stats


def _save_layer(stats: ExpertStats, folder: Path, index: int, header: JSON) -> None:
    """Write one layer's statistics to disk, atomically."""
    with whole_file(_layer_file(folder, index)) as partial:
        save_file(stats.tensors(), partial, metadata=_metadata(header))


def _metadata(header: JSON) -> dict[str, str]:
    return {"moesaic": json.dumps({"format": FORMAT, **header})}


def _layer_file(folder: Path, index: int) -> Path:
    """Return the file of one layer's statistics until all layers are observed."""
    return folder / f"stats-{index:04d}.safetensors"


def join(parts: Mapping[int, Path], out: Path, header: JSON) -> None:
    """Join layers' files into one, byte by byte, without loading them."""
    index: JSON = {"__metadata__": _metadata(header)}
    start = 0
    spans: list[tuple[Path, int]] = []
    for layer, path in parts.items():
        part, data = header_of(path)
        for name, entry in part.items():
            moved = [start + offset for offset in entry["data_offsets"]]
            index[f"{layer}.{name}"] = {**entry, "data_offsets": moved}
        spans.append((path, data))
        start += path.stat().st_size - data
    text = json.dumps(index).encode()
    text += b" " * (-len(text) % 8)
    with whole_file(out) as partial, partial.open("wb") as joined:
        joined.write(struct.pack("<Q", len(text)) + text)
        for path, skip in spans:
            with path.open("rb") as file:
                file.seek(skip)
                shutil.copyfileobj(file, joined, 16 << 20)
