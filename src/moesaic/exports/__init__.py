"""Results as checkpoints and files that other engines load; exact or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moesaic.config import ExportArgs
from moesaic.exports.llamacpp import export_gguf
from moesaic.exports.native import export_native
from moesaic.foreign import JSON

FORMS: dict[str, Callable[..., JSON]] = {"native": export_native, "gguf": export_gguf}


def export(
    model: str, out: str | Path, to: str = "native", *, overwrite: bool = False, **options: object
) -> JSON:
    """Write a model in the form that other engines load.

    Args:
        model: a name for :func:`moesaic.io.source.resolve`.
        out: the folder, or the GGUF file, to make.
        to: ``native`` (:func:`moesaic.exports.native.export_native`) or ``gguf``
            (:func:`moesaic.exports.llamacpp.export_gguf`).
        overwrite: replace ``out`` if it exists.
        options: the other fields of :class:`moesaic.config.ExportArgs`.

    Raises:
        MoesaicError: the form is unknown, or cannot hold the model.
    """
    asked = ExportArgs(to=to, **options)  # type: ignore[arg-type]
    return FORMS[asked.to](model, out, asked, overwrite)
