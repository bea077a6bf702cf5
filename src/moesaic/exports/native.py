"""Native exports: checkpoints of known architectures; exact or refused."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.config import ExportArgs
from moesaic.data.text import evaluation_tokens, positions
from moesaic.errors import MoesaicError
from moesaic.exports.form import Export, run_script
from moesaic.exports.reduced import narrowed, reduced
from moesaic.hub import write_config
from moesaic.io.checkpoint import ShardWriter
from moesaic.io.outputs import check_out, whole_folder
from moesaic.io.quantised import quantization_of
from moesaic.io.source import Source, resolve
from moesaic.io.trust import copy_side_files, settle_tokenizer
from moesaic.plans.base import KINDS
from moesaic.surgery import headers_of
from moesaic.types import JSON

TOLERANCE = 1e-4
"""Largest difference of logits that rounding explains, relative to the largest logit."""
NEAR = 5e-2
"""Allowed difference as root mean squares, if several petals have nearly the right weight. A token
of which two petals are nearly tied may take the other one; with hundreds of petals some always are,
and any change in rounding does the same."""


def export_native(
    model: str, out: str | Path, args: ExportArgs | None = None, overwrite: bool = False
) -> JSON:
    """Write a converted model as a checkpoint that loads without this package.

    The export is loaded in plain transformers, in a process of its own, and its logits are
    compared with the source's in float32 before it gets its name.

    Args:
        model: a name for :func:`moesaic.io.source.resolve`.
        out: the folder to write.
        args: its ``target`` names an architecture, or is empty for the one with the fewest active
            neurons; its ``type`` is not used.
        overwrite: replace ``out`` if it exists.

    Returns:
        ``out``, ``model_type``, ``exact``, the differences from :func:`verify`, and ``costs``.

    Raises:
        MoesaicError: no architecture holds the model; nothing is left at ``out``.
    """
    source = resolve(model)
    check_out(Path(out), overwrite, [model])
    args = args or ExportArgs()
    export = decide(source, args.target)
    with whole_folder(Path(out), overwrite, [model]) as folder:
        write(source, export, folder)
        differences = verify(source, folder, export.exact)
    return {
        "out": str(out),
        "model_type": export.model_type,
        "exact": export.exact,
        **differences,
        "costs": dict(export.costs),
    }


def decide(source: Source, target: str = "") -> Export:
    """Return the architecture that holds a model, and the function to write it.

    Raises:
        MoesaicError: no architecture does; the message names what each lacks.
    """
    config = source.config
    if quantization_of(config):
        raise MoesaicError(
            "Quantised checkpoints are not exported; results of prune and slim are native as "
            "they are. Make the result with a dtype to export it."
        )
    arch, stacks = base_arch(config), headers_of(config)
    for header in (header for stack in stacks.values() for header in stack):
        obstacle = KINDS[header["kind"]].obstacle(header)
        if obstacle is not None:
            raise MoesaicError(obstacle)
    if isinstance(arch, MoEArch):
        if target not in ("", arch.model_type):
            raise MoesaicError(f"target {target!r}: a mixture stays what it is: {arch.model_type}.")
        return reduced(source, arch, stacks)
    if source.beside:
        raise MoesaicError(f"{source.name} has parts beside text and is native as it is.")
    layers = [stacks[i][-1] if i in stacks else None for i in range(config.num_hidden_layers)]
    ways = [KINDS[header["kind"]].exporter(header) for header in layers if header]
    export: Callable[..., Export] = next(filter(None, ways), narrowed)
    return export(source, arch, layers, target)


def write(source: Source, export: Export, folder: Path) -> None:
    """Write a decided export into an existing folder, unverified."""
    writer = ShardWriter(folder)
    export.write(writer)
    write_config(export.config, folder)
    copy_side_files(source.folder, folder)
    settle_tokenizer(source.folder, folder)


# --- is it the same model? -----------------------------------------------------------------------


def verify(source: Source, folder: Path, exact: bool = True, tokens: int = 128) -> dict[str, float]:
    """Return differences of logits in float32 between the source and its export in plain
    transformers.

    The export is loaded in a process of its own.

    Returns:
        ``largest_difference``, relative to the largest logit; ``mean_difference``, the root mean
        square relative to that of the logits; ``same_next_token``, the share of tokens after which
        both predict the same.

    Raises:
        MoesaicError: the export does not load, or differs by more than rounding explains.
    """
    ids = _text(source, tokens)
    with torch.inference_mode():
        expected = source.load(dtype=torch.float32)(ids).logits
    with tempfile.TemporaryDirectory(prefix="moesaic-") as place:
        ids_file, logits_file = Path(place) / "ids.safetensors", Path(place) / "logits.safetensors"
        save_file({"input_ids": ids}, ids_file)
        request = json.dumps([str(folder), str(ids_file), str(logits_file)])
        trouble = run_script("plain.py", request, HF_MODULES_CACHE=place)
        if trouble is not None:
            raise MoesaicError(f"The export does not load in plain transformers: {trouble}")
        logits = load_file(logits_file)["logits"]
    change = logits - expected
    largest = float(change.abs().max() / expected.abs().max())
    mean = float(change.norm() / expected.norm())
    if exact and not largest <= TOLERANCE:
        raise MoesaicError(
            f"The export's logits differ from the model's by {largest:.1e} of the largest, more "
            f"than rounding explains ({TOLERANCE:.0e}). Nothing was kept."
        )
    if not exact and not mean <= NEAR:
        raise MoesaicError(
            f"The export's logits differ from the model's by {mean:.1e} in root mean square, more "
            f"than weights that are nearly even explain ({NEAR:.0e}). Nothing was kept."
        )
    same = (logits.argmax(-1) == expected.argmax(-1)).float().mean().item()
    return {"largest_difference": largest, "mean_difference": mean, "same_next_token": same}


def _text(source: Source, tokens: int) -> Tensor:
    """Return real text (1, L), or random tokens without a tokenizer."""
    length = min(tokens, positions(source.config) or tokens)
    try:
        return evaluation_tokens("", source.tokenizer, length, length).input_ids
    except MoesaicError:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(source.config.vocab_size, (1, length), generator=generator)
