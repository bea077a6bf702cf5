"""Export of dense layers with fewer neurons, as narrower layers of the base's own architecture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.arch.dense import Arch, DenseFFN, FFNNames, assembled
from moesaic.arch.lookup import base_arch
from moesaic.errors import MoesaicError
from moesaic.exports.form import Export, base_config
from moesaic.io.checkpoint import Checkpoint, Writer, skeleton
from moesaic.io.source import Source
from moesaic.plans.base import Header


def narrowed(source: Source, arch: Arch, headers: Sequence[Header | None], target: str) -> Export:
    """Return the export of narrower dense layers: one intermediate size, padded with zeros.

    Args:
        source: the pruned model.
        arch: its architecture.
        headers: headers by layer.
        target: the base's own architecture, or empty.

    Raises:
        MoesaicError: the target is another architecture.
    """
    widths = source_widths(source)
    config = base_config(source.config, arch)
    config.intermediate_size = max(widths)
    if target not in ("", arch.model_type):
        raise MoesaicError(f"Without experts it is exported as {arch.model_type}, not {target}.")
    width = max(widths)

    def write(writer: Writer) -> None:
        checkpoint = source.checkpoint
        blocks = tuple(arch.ffn_prefix(i) for i in range(len(widths)))
        for name in checkpoint.names():
            if not name.startswith(blocks):
                writer.add(name, checkpoint.tensor(name))
        for prefix in blocks:
            ffn, _ = read_ffn(checkpoint, prefix, arch.ffn)
            for name, tensor in _ffn_tensors(filled(ffn, width), arch.ffn).items():
                writer.add(prefix + name, tensor)
        writer.close()

    neurons = [sum(widths), len(widths) * width]
    costs = {"active_neurons": neurons, "stored_neurons": neurons}
    return Export(config, write, costs)


def _ffn_tensors(ffn: DenseFFN, names: FFNNames) -> dict[str, Tensor]:
    """Return a block's tensors by its architecture's names; the inverse of :func:`read_ffn`."""
    kinds = {
        "weight": (ffn.gate_MD, ffn.up_MD, ffn.down_DM),
        "bias": (ffn.gate_bias_M, ffn.up_bias_M, ffn.down_bias_D),
    }
    tensors: dict[str, Tensor] = {}
    for kind, (gate, up, down) in kinds.items():
        for name, tensor in ((names.gate, gate), (names.up, up), (names.down, down)):
            if tensor is not None:
                earlier = tensors.get(f"{name}.{kind}")  # the gate of a fused projection
                tensors[f"{name}.{kind}"] = (
                    tensor if earlier is None else torch.cat([earlier, tensor])
                )
    return tensors


def source_widths(source: Source) -> list[int]:
    """Return the FFN width of every layer, as stored."""
    model = skeleton(source.config)
    arch = base_arch(source.config)
    return [
        int(getattr(arch.ffn_of(layer), arch.ffn.down).weight.shape[1])
        for layer in arch.layers(model)
    ]


def read_ffn(
    checkpoint: Checkpoint, prefix: str, names: FFNNames
) -> tuple[DenseFFN, Tensor | None]:
    """Return a dense or carved FFN on disk as three matrices, and its router rows if any."""
    state = checkpoint.under(prefix)
    weights = {name: state[f"{name}.weight"] for name in names.projections}
    biases = {name: state.get(f"{name}.bias") for name in names.projections}
    return assembled(names, weights, biases, nn.Identity()), state.get("router.weight")


def filled(ffn: DenseFFN, width: int) -> DenseFFN:
    """Return the same block, padded with zero neurons to ``width``."""
    missing = width - ffn.width

    def rows(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not missing:
            return tensor
        return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing))

    up_MD = rows(ffn.up_MD)
    assert up_MD is not None
    return replace(
        ffn,
        up_MD=up_MD,
        down_DM=F.pad(ffn.down_DM, (0, missing)),
        gate_MD=rows(ffn.gate_MD),
        up_bias_M=rows(ffn.up_bias_M),
        gate_bias_M=rows(ffn.gate_bias_M),
    )
