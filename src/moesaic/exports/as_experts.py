"""Carved layers as the experts of a native architecture, or as narrower dense layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.models.auto import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from moesaic.arch.dense import Arch, DenseFFN, FFNNames, assembled
from moesaic.arch.lookup import base_arch
from moesaic.errors import MoesaicError
from moesaic.exports.form import Export, base_config
from moesaic.exports.targets import (
    TARGETS,
    Header,
    Layer,
    Sizes,
    Target,
    backbone_of,
    filled,
    smallest,
)
from moesaic.io.checkpoint import Checkpoint, Writer, skeleton
from moesaic.io.source import Source
from moesaic.types import JSON, Config, Values

_SHARED_SETTINGS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range",
    "rms_norm_eps", "use_cache", "tie_word_embeddings", "attention_dropout", "pad_token_id",
    "bos_token_id", "eos_token_id", "rope_parameters", "dtype",
)  # fmt: skip
"""Config attributes that mean the same in every architecture of the table."""


# --- carved layers as experts --------------------------------------------------------------------


def as_experts(source: Source, arch: Arch, headers: Sequence[Header | None], target: str) -> Export:
    """The target that holds all layers with the fewest active neurons.

    Args:
        source: the carved model.
        arch: its architecture.
        headers: of every layer, None for those that were not carved.
        target: the only one to consider, if given.

    Raises:
        MoesaicError: none does; the message says what each lacks.
    """
    config = base_config(source.config, arch)
    widths = _source_widths(source)
    candidates = [t for t in TARGETS if not target or t.model_type == target]
    if not candidates:
        raise MoesaicError(
            f"--target {target!r} is none of {', '.join(t.model_type for t in TARGETS)}."
        )
    options: list[tuple[int, int, Target, Sizes]] = []
    reasons: list[str] = []
    for candidate in candidates:
        sizes = smallest(headers, widths)
        lacks = _lacks(candidate, config, sizes) or _repeats(headers, sizes)
        if lacks:
            reasons.append(f"{candidate.model_type} lacks {lacks}")
        else:
            options.append((len(widths) * sizes.active_width, len(options), candidate, sizes))
    if not options:
        raise MoesaicError(f"No architecture holds this model exactly: {'; '.join(reasons)}.")
    active, _, chosen, sizes = min(options, key=lambda option: option[:2])
    settings = {**_shared_settings(config), **chosen.settings(config, sizes)}
    return Export(
        _config(chosen.model_type, settings),
        lambda writer: _write_carved(source.checkpoint, arch, headers, chosen, sizes, writer),
        _costs(headers, widths, active, sizes),
        exact=sizes.top_k == 1,
    )


def _repeats(headers: Sequence[Header | None], sizes: Sizes) -> str | None:
    """Several petals: a repeated one could be chosen twice, and all layers choose as many."""
    chosen = {(len(h["petals"]), h["top_k"]) for h in headers if h and h["petals"]}
    if sizes.top_k == 1 or chosen == {(sizes.experts, sizes.top_k)}:
        return None
    petals = ", ".join(f"{k} of {count}" for count, k in sorted(chosen))
    return f"room for {petals} petals a token beside {sizes.top_k} of {sizes.experts} experts"


def _lacks(target: Target, config: Config, sizes: Sizes) -> str | None:
    if config.model_type not in target.bases:
        return f"the attention of {config.model_type}"
    if getattr(config, "mlp_bias", False):
        return "biases in experts"
    return target.lacks(config, sizes)


def _shared_settings(config: Config) -> JSON:
    settings = {k: getattr(config, k) for k in _SHARED_SETTINGS if hasattr(config, k)}
    return copy.deepcopy(settings)


def _config(model_type: str, settings: Values) -> Config:
    config = CONFIG_MAPPING[model_type](**settings)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    return config


def _costs(
    headers: Sequence[Header | None], widths: Sequence[int], active: int, sizes: Sizes
) -> JSON:
    """Neurons stored and run in all layers, before and after filling up."""
    before = sum(map(backbone_of, headers, widths))
    run = before + sum(h["top_k"] * max(h["petals"]) for h in headers if h and h["petals"])
    stored = before + sum(sum(h["petals"]) for h in headers if h)
    each = sizes.shared + sizes.experts * sizes.width
    return {
        "active_neurons": [run, active],
        "stored_neurons": [stored, len(widths) * each],
        "experts": [max(len(h["petals"]) for h in headers if h), sizes.experts],
    }


def _source_widths(source: Source) -> list[int]:
    """The FFN width of every layer, as stored."""
    model = skeleton(source.config)
    arch = base_arch(source.config)
    return [
        int(getattr(arch.ffn_of(layer), arch.ffn.down).weight.shape[1])
        for layer in arch.layers(model)
    ]


def _read_ffn(
    checkpoint: Checkpoint, prefix: str, names: FFNNames
) -> tuple[DenseFFN, Tensor | None]:
    """A dense or carved layer's FFN on disk as three matrices, and its router rows if any."""
    state = checkpoint.under(prefix)
    weights = {name: state[f"{name}.weight"] for name in names.projections}
    biases = {name: state.get(f"{name}.bias") for name in names.projections}
    return assembled(names, weights, biases, nn.Identity()), state.get("router.weight")


def _write_carved(
    checkpoint: Checkpoint,
    arch: Arch,
    headers: Sequence[Header | None],
    target: Target,
    sizes: Sizes,
    writer: Writer,
) -> None:
    blocks = {arch.ffn_prefix(i): i for i in range(len(headers))}
    for name in checkpoint.names():
        if not any(name.startswith(prefix) for prefix in blocks):
            writer.add(name, checkpoint.tensor(name))
    for prefix, index in blocks.items():
        ffn, router_RD = _read_ffn(checkpoint, prefix, arch.ffn)
        header, start = headers[index], arch.layer_prefix(index)
        layer = Layer(
            ffn,
            backbone_of(header, ffn.width),
            tuple(header["petals"]) if header else (),
            None if router_RD is None else router_RD.float(),
            checkpoint.tensor(f"{start}post_attention_layernorm.weight"),
        )
        for name, tensor in target.tensors(start, layer, sizes):
            writer.add(name, tensor)
    writer.close()


# --- layers that lost neurons: dense, and narrower -----------------------------------------------


def narrowed(source: Source, arch: Arch, headers: Sequence[Header | None], target: str) -> Export:
    """Static pruning and the like: one intermediate size, filled up with zeros.

    Args:
        source: the pruned model.
        arch: its architecture.
        headers: of every layer.
        target: the base's own, or empty.

    Raises:
        MoesaicError: the target is another one.
    """
    widths = _source_widths(source)
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
            ffn, _ = _read_ffn(checkpoint, prefix, arch.ffn)
            for name, tensor in _ffn_tensors(filled(ffn, width), arch.ffn).items():
                writer.add(prefix + name, tensor)
        writer.close()

    neurons = [sum(widths), len(widths) * width]
    costs = {"active_neurons": neurons, "stored_neurons": neurons}
    return Export(config, write, costs)


def _ffn_tensors(ffn: DenseFFN, names: FFNNames) -> dict[str, Tensor]:
    """A block under its architecture's own names; the inverse of :func:`_read_ffn`."""
    kinds = {
        "weight": (ffn.gate_MD, ffn.up_MD, ffn.down_DM),
        "bias": (ffn.gate_bias_M, ffn.up_bias_M, ffn.down_bias_D),
    }
    tensors: dict[str, Tensor] = {}
    for kind, (gate, up, down) in kinds.items():
        for name, tensor in ((names.gate, gate), (names.up, up), (names.down, down)):
            if tensor is not None:
                earlier = tensors.get(f"{name}.{kind}")  # of a fused projection, the gate
                tensors[f"{name}.{kind}"] = (
                    tensor if earlier is None else torch.cat([earlier, tensor])
                )
    return tensors
