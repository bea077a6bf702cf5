"""Results as checkpoints of architectures that transformers and its kin know: exact or refused."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moesaic.checkpoint import ShardWriter, check_out, whole_folder
from moesaic.data import evaluation_tokens
from moesaic.errors import MoesaicError
from moesaic.exporting.carved import as_experts, narrowed
from moesaic.exporting.engines import limits
from moesaic.exporting.form import Export, run_script
from moesaic.exporting.mixtures import reduced
from moesaic.hub import Source, resolve
from moesaic.moe import MoEArch, base_arch

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TOLERANCE = 1e-4
"""The largest difference of logits that rounding explains, relative to the largest logit."""
NEAR = 5e-2
"""The difference that is allowed, as root mean squares, where several petals have nearly the weight
they should. A token of which two petals are nearly tied may take the other one; of hundreds of
petals some always are, and any change in rounding does the same."""


def export_native(
    model: str,
    out: str | Path,
    *,
    target: str = "",
    ep: int = 1,
    untie: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write a converted model as a checkpoint that loads without this package.

    The export is loaded in plain transformers, in a process of its own, and its logits are
    compared with the source's in float32 before it gets its name.

    Args:
        model: a name for :func:`moesaic.hub.resolve`.
        out: the folder to make.
        target: the architecture, of :data:`moesaic.exporting.targets.TARGETS`; empty for the one
            with the fewest active neurons.
        ep: what the number of experts must be a multiple of (expert-parallel size).
        untie: write the head as a tensor of its own where it is the embedding's.
        overwrite: replace ``out`` if it exists.

    Returns:
        ``model_type``, ``exact``, what :func:`verify` found, ``engines`` (what each lacks),
        ``costs``.

    Raises:
        MoesaicError: no architecture holds the model; nothing is left at ``out``.
    """
    source = resolve(model)
    check_out(Path(out), overwrite)
    export = decide(source, target, ep)
    with whole_folder(Path(out), overwrite) as folder:
        write(source, export, folder, untie)
        differences = verify(source, folder, export.exact)
    return {
        "out": str(out),
        "model_type": export.model_type,
        "exact": export.exact,
        **differences,
        "engines": limits(export.config, ep),
        "costs": dict(export.costs),
    }


def decide(source: Source, target: str = "", ep: int = 1) -> Export:
    """Which architecture holds a model, and how to write it.

    Raises:
        MoesaicError: none does; the message says what each lacks.
    """
    config = source.config
    arch = base_arch(config)
    headers = getattr(config, "moesaic", {}).get("layers", {})
    kinds = {header["kind"] for header in headers.values()}
    if isinstance(arch, MoEArch):
        if target and target != arch.model_type:
            raise MoesaicError(f"A {arch.model_type} stays a {arch.model_type}, not a {target}.")
        return reduced(source, arch, headers, ep)
    if kinds == {"overlapping"}:
        _check_copies(headers.values())
    elif kinds - {"carved"}:
        raise MoesaicError(f"Layers of kind {', '.join(sorted(kinds))} have no native form yet.")
    layers = [headers.get(str(i)) for i in range(config.num_hidden_layers)]
    if any(header and header.get("bias") for header in layers):
        raise MoesaicError("Output biases of petals have no native form: carve without bias.")
    if any(header and header["petals"] for header in layers):
        return as_experts(source, arch, layers, target, ep)
    if target and target != arch.model_type:
        raise MoesaicError(f"Without experts it is exported as {arch.model_type}, not {target}.")
    return narrowed(source, arch, layers)


def _check_copies(headers: Iterable[Mapping[str, Any]]) -> None:
    """Experts with weights of their own, beside an attention that is as it was, are petals."""
    for header in headers:
        partial = header["rows"] or header["head_top_k"] or header["columns"] is not None
        if partial or not header["materialized"]:
            raise MoesaicError(
                "Overlapping experts and partial attention have no native form; carve with "
                "--materialize -o attention=none for one."
            )


def write(source: Source, export: Export, folder: Path, untie: bool = False) -> None:
    """Write what was decided into an existing folder, unverified."""
    writer = ShardWriter(folder)
    if untie and export.config.tie_word_embeddings:
        export.config.tie_word_embeddings = False
        writer.add(HEAD, source.checkpoint.tensor(EMBEDDING).clone())
    export.write(writer)
    export.config.save_pretrained(folder)
    source.checkpoint.copy_side_files(folder)


# --- is it the same model? -----------------------------------------------------------------------


def verify(source: Source, folder: Path, exact: bool = True, tokens: int = 128) -> dict[str, float]:
    """Differences of logits in float32, from the export in transformers alone.

    It is loaded in a process of its own.

    Returns:
        ``largest_difference``, relative to the largest logit; ``mean_difference``, the root mean
        square relative to that of the logits; ``same_next_token``, the share of tokens after which
        both would say the same.

    Raises:
        MoesaicError: it does not load, or differs by more than is explained.
    """
    ids = _text(source, tokens)
    with torch.inference_mode():
        wanted = source.load(dtype=torch.float32)(ids).logits
    with tempfile.TemporaryDirectory(prefix="moesaic-") as place:
        given, found = Path(place) / "ids.safetensors", Path(place) / "logits.safetensors"
        save_file({"input_ids": ids}, given)
        trouble = run_script("plain.py", json.dumps([str(folder), str(given), str(found)]))
        if trouble is not None:
            raise MoesaicError(f"The export does not load in plain transformers: {trouble}")
        logits = load_file(found)["logits"]
    change = logits - wanted
    largest = float(change.abs().max() / wanted.abs().max())
    mean = float(change.norm() / wanted.norm())
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
    same = (logits.argmax(-1) == wanted.argmax(-1)).float().mean().item()
    return {"largest_difference": largest, "mean_difference": mean, "same_next_token": same}


def _text(source: Source, tokens: int) -> Tensor:
    """Real text (1, L), or random tokens where there is no tokenizer."""
    length = min(tokens, source.config.max_position_embeddings)
    try:
        return evaluation_tokens("", source.tokenizer, length, length).input_ids
    except MoesaicError:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(source.config.vocab_size, (1, length), generator=generator)
