"""Results as checkpoints and files that other engines load; exact or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

from moesaic.config import ExportArgs
from moesaic.types import JSON, Track, at_home, silent

FORMS = {
    "native": "moesaic.exports.native:export_native",
    "gguf": "moesaic.exports.llamacpp:export_gguf",
}


def export(
    model: str,
    out: str | Path,
    to: str = "native",
    *,
    overwrite: bool = False,
    track: Track = silent,
    **options: object,
) -> JSON:
    """Write a model in the form that other engines load.

    Args:
        model: a name for :func:`moesaic.io.source.resolve`.
        out: the folder, or the GGUF file, to make.
        to: ``native`` (:func:`moesaic.exports.native.export_native`) or ``gguf``
            (:func:`moesaic.exports.llamacpp.export_gguf`).
        overwrite: replace ``out`` if it exists.
        track: shows progress of what looks at text.
        options: the other fields of :class:`moesaic.config.ExportArgs`.

    Raises:
        MoesaicError: the form is unknown, or cannot hold the model.
    """
    args = ExportArgs(to=to, **options)  # type: ignore[arg-type]
    form: Callable[..., JSON] = resolve_name(FORMS[args.to])
    shown = {"track": track} if args.to == "gguf" else {}
    return form(at_home(model), Path(out).expanduser(), args, overwrite, **shown)
