"""A mixture of experts observed once, for any number of decisions: observe()."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from moesaic.arch.lookup import moe_arch
from moesaic.config import RunArgs, takes_options
from moesaic.data.source import read_by
from moesaic.distributed import process
from moesaic.errors import MoesaicError
from moesaic.foreign import JSON, Model
from moesaic.io.caller import leaves_untouched
from moesaic.io.outputs import alone, check_file, discard, unfinished
from moesaic.methods.naee.observed import observed, plain
from moesaic.observation.experts import StatsFile, join, layer_file, save_layer
from moesaic.observation.job import Job
from moesaic.plan import differing


@takes_options()
@leaves_untouched
def observe(
    model: Model | str | Path,
    out: str | Path,
    *,
    gram_mb: int = 256,
    overwrite: bool = False,
    resume: bool = False,
    **options: Any,
) -> Path:
    """Observe a mixture of experts once; ``prune`` and ``skip`` then decide without the model.

    The file serves every criterion and size of ``prune``, and ``skip``. Files of the same model on
    different tokens merge (:func:`moesaic.observation.experts.merge_files`).

    Args:
        model: a loaded PreTrainedModel, or a name.
        out: the file to write.
        gram_mb: MiB for one layer's Gram matrices; 0 leaves them out, and reconstruction with
            them.
        overwrite: replace ``out`` if it exists.
        resume: continue an unfinished run of the same.
        options: of :meth:`moesaic.config.RunArgs.of`: calibration, samples, device and so on.

    Returns:
        the file.

    Raises:
        MoesaicError: the request cannot be met.
    """
    out, args = Path(out).expanduser(), RunArgs.of(model, **options)
    names = [model] if isinstance(model, str | Path) else []
    check_file(out, overwrite, [*names, *read_by(args.calibration)])
    with alone(out) if process()[0] == 0 else nullcontext():
        return _observe(args, out, gram_mb, overwrite, resume)


def _observe(args: RunArgs, out: Path, gram_mb: int, overwrite: bool, resume: bool) -> Path:
    job = Job(args, moe_arch)
    layers = job.arch.moe_layers(job.shape)
    request: JSON = {
        **job.request({"base": plain(job.base)}),
        "layers": layers,
        "calibration": job.tokens.fingerprint,
        "tokens": job.tokens.count,
        "gram": gram_mb,
    }
    folder = unfinished(out)
    if folder.exists() and not resume:
        if not overwrite:
            raise MoesaicError(
                f"{folder} holds an unfinished run: continue it with resume=True, or start "
                "anew with overwrite=True."
            )
        discard(folder)
    done = [i for i in layers if layer_file(folder, i).exists()]
    for i in done:
        other = [*differing(StatsFile(layer_file(folder, i)).header, request)]
        if other:
            raise MoesaicError(f"{folder} holds layers of another request: {other[0]}.")
    if len(done) < len(layers):
        share, numbers = job.share
        stream = job.stream(layers, job.arch.mixture, share)
        for site in job.track(stream, "Observing layers", len(layers)):
            if site.index in done:
                continue
            stats = observed(site, job.tokens, numbers, gram_mb << 20)
            if process()[0] == 0:
                save_layer(stats, folder, site.index, request)
    if process()[0] == 0:
        join({i: layer_file(folder, i) for i in layers}, out, request)
        discard(folder)
    return out
