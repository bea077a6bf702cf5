"""Export of carved layers as the experts of a native architecture."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import Tensor, nn
from transformers.models.auto import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from moesaic.arch.dense import Arch, DenseFFN, FFNNames, assembled
from moesaic.carving.targets import (
    TARGETS,
    Layer,
    Sizes,
    Target,
    backbone_of,
    smallest,
)
from moesaic.errors import MoesaicError
from moesaic.exports.native import Export, base_config
from moesaic.io.checkpoint import Checkpoint, Writer
from moesaic.io.models import shape_of
from moesaic.io.source import Source
from moesaic.plans.base import Header
from moesaic.surgery import base_shape
from moesaic.types import JSON, Config, Values

_SHARED_SETTINGS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range",
    "rms_norm_eps", "use_cache", "tie_word_embeddings", "attention_dropout", "pad_token_id",
    "bos_token_id", "eos_token_id", "rope_parameters", "dtype",
)  # fmt: skip
"""Config attributes with the same meaning in every architecture of :data:`TARGETS`."""


# --- carved layers as experts --------------------------------------------------------------------


def as_experts(source: Source, arch: Arch, headers: Sequence[Header | None], target: str) -> Export:
    """Return the export to the architecture that holds all layers with the fewest active neurons.

    Args:
        source: the carved model.
        arch: its architecture.
        headers: headers by layer, None for layers that were not carved.
        target: the only one to consider, if given.

    Raises:
        MoesaicError: no architecture does; the message names what each lacks.
    """
    config = base_config(source.config, arch)
    widths = base_shape(shape_of(source.config), arch).widths
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
    """Return why several petals per token do not fit; None if they do."""
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
    """Return the neurons stored and run in all layers, before and after padding."""
    before = sum(map(backbone_of, headers, widths))
    run = before + sum(h["top_k"] * max(h["petals"]) for h in headers if h and h["petals"])
    stored = before + sum(sum(h["petals"]) for h in headers if h)
    each = sizes.shared + sizes.experts * sizes.width
    return {
        "active_neurons": [run, active],
        "stored_neurons": [stored, len(widths) * each],
        "experts": [max(len(h["petals"]) for h in headers if h), sizes.experts],
    }


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


def _read_ffn(
    checkpoint: Checkpoint, prefix: str, names: FFNNames
) -> tuple[DenseFFN, Tensor | None]:
    """Return a dense or carved FFN on disk as three matrices, and its router rows if any."""
    state = checkpoint.under(prefix)
    weights = {name: state[f"{name}.weight"] for name in names.projections}
    biases = {name: state.get(f"{name}.bias") for name in names.projections}
    return assembled(names, weights, biases, nn.Identity()), state.get("router.weight")
