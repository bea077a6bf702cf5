"""Export of carved layers as the experts of a native architecture: one table entry each.

A carved layer is a backbone that every token runs and petals of which it runs one, with weight one
(MoRE, Eq. 12). A target holds it as a shared expert and routed experts: the softmax over a single
chosen logit is one. All layers have one size there; smaller ones are padded with zeros, which
changes no value and costs time and memory.

If a token runs k petals, each has weight one, while native routers give weights that sum to one:
about 1 / k each if the logits are small. So logits are made small and down projections k times as
large: weights are then within :data:`SMALL` of one, nearly exact. With much smaller logits weights
would be more even, but engines that compare probabilities could not distinguish them.

Shape suffixes beside those of :mod:`moesaic.arch.dense`::

    S neurons of the shared expert    P neurons of a routed expert    E routed experts
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.auto import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from moesaic.arch.dense import Arch, DenseFFN, assembled_ffn
from moesaic.errors import MoesaicError
from moesaic.exports.native import Export, base_config, head_dim_of, multiple_of_8
from moesaic.io.checkpoint import Checkpoint, ShardWriter
from moesaic.io.models import skeleton_of
from moesaic.io.source import Source
from moesaic.plans.base import Header
from moesaic.surgery import base_shape
from moesaic.types import JSON, Config

SMALL = 2.0**-6
"""Largest logit of a router that chooses several petals; most are far below."""

Tensors = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class PetalSizes:
    """Sizes that one config gives to all layers."""

    shared: int
    """Neurons that every token runs."""
    experts: int
    width: int
    """Neurons of one expert."""
    top_k: int = 1


@dataclass(frozen=True)
class Layer:
    """Carved FFN that a target is to hold."""

    ffn: DenseFFN
    """FFN in carved order."""
    backbone: int
    petals: tuple[int, ...]
    router_RD: Tensor | None
    norm_D: Tensor
    """Weight of the norm before the FFN."""

    def shared(self, sizes: PetalSizes) -> DenseFFN:
        """Return the backbone, padded to S neurons."""
        return _filled(self.ffn.neurons(0, self.backbone), sizes.shared)

    def experts(self, sizes: PetalSizes) -> list[DenseFFN]:
        """Return the petals, padded to P neurons, and to E petals by repeating the first.

        Whichever of a petal and its repetition is chosen, the output is the same.
        """
        ends = accumulate(self.petals or (0,), initial=self.backbone)
        real = [_filled(self.ffn.neurons(*place), sizes.width) for place in pairwise(ends)]
        real = [replace(e, down_DM=e.down_DM * sizes.top_k) for e in real]
        return real + real[:1] * (sizes.experts - len(real))

    def router(self, sizes: PetalSizes) -> Tensor:
        """Return one row per expert (E, D), float32, scaled so that no logit exceeds :data:`SMALL`
        if a token runs several."""
        if self.router_RD is None:
            return torch.zeros(sizes.experts, self.ffn.up_MD.shape[1])
        missing = sizes.experts - len(self.petals)
        router_ED = torch.cat([self.router_RD, self.router_RD[:1].expand(missing, -1)])
        limit = math.inf if sizes.top_k == 1 else SMALL
        return router_ED * _scale_of(router_ED, self.norm_D, limit)


# --- sizes ---------------------------------------------------------------------------------------


def _backbone_of(header: Header | None, width: int) -> int:
    """Return the neurons that every token runs: all of them if the layer was not carved."""
    return width if header is None else header["backbone"]


def smallest(headers: Sequence[Header | None], widths: Sequence[int]) -> PetalSizes:
    """Return the smallest sizes that all layers fit in."""
    carved = [header for header in headers if header is not None]
    petals = [p for header in carved for p in header["petals"]]
    return PetalSizes(
        shared=max(map(_backbone_of, headers, widths)),
        experts=max((len(header["petals"]) for header in carved), default=0),
        width=multiple_of_8(max(petals, default=0)),
        top_k=max((header["top_k"] for header in carved), default=0) or 1,
    )


# --- tensors by target ---------------------------------------------------------------------------


def _both(ffn: DenseFFN) -> Tensor:
    assert ffn.gate_MD is not None
    return torch.cat([ffn.gate_MD, ffn.up_MD])


def _granite_tensors(prefix: str, layer: Layer, sizes: PetalSizes) -> Tensors:
    """Yield GraniteMoeShared's tensors: gate and up in one matrix, all experts in one tensor."""
    block, experts = f"{prefix}block_sparse_moe.", layer.experts(sizes)
    if sizes.shared:
        shared = layer.shared(sizes)
        yield f"{prefix}shared_mlp.input_linear.weight", _both(shared)
        yield f"{prefix}shared_mlp.output_linear.weight", shared.down_DM
    yield f"{block}input_linear.weight", torch.stack([_both(e) for e in experts])
    yield f"{block}output_linear.weight", torch.stack([e.down_DM for e in experts])
    yield f"{block}router.layer.weight", layer.router(sizes)


def _scale_of(router_ED: Tensor, norm_D: Tensor, limit: float) -> float:
    """Return the power of two that keeps |logits| <= limit for every output of an RMSNorm.

    Its output is norm * u with |u| <= sqrt(D). A power of two changes no comparison.
    """
    largest = float((router_ED * norm_D.float()).norm(dim=1).max()) * math.sqrt(len(norm_D))
    return 2.0 ** math.floor(math.log2(limit / largest)) if largest > limit else 1.0


def _mixtral_tensors(prefix: str, layer: Layer, sizes: PetalSizes) -> Tensors:
    """Yield Mixtral's tensors: experts only; w1 is the gate, w3 up, w2 down."""
    block = f"{prefix}block_sparse_moe."
    for e, expert in enumerate(layer.experts(sizes)):
        assert expert.gate_MD is not None
        yield f"{block}experts.{e}.w1.weight", expert.gate_MD
        yield f"{block}experts.{e}.w3.weight", expert.up_MD
        yield f"{block}experts.{e}.w2.weight", expert.down_DM
    yield f"{block}gate.weight", layer.router(sizes)


# --- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PetalTarget:
    """Architecture that can hold carved layers."""

    model_type: str
    bases: Collection[str]
    """Dense architectures whose attention, norms and embeddings it has under the same names."""
    settings: Callable[[Config, PetalSizes], JSON]
    """Function that returns its own config attributes, from the base's config."""
    tensors: Callable[[str, Layer, PetalSizes], Tensors]
    lacks: Callable[[Config, PetalSizes], str | None]
    """Function that returns the part of the config or sizes that it cannot hold, or None."""


def _granite_settings(config: Config, sizes: PetalSizes) -> JSON:
    return {
        "intermediate_size": sizes.width,
        "shared_intermediate_size": sizes.shared,
        "num_local_experts": sizes.experts,
        "num_experts_per_tok": sizes.top_k,
        "head_dim": head_dim_of(config),
        "attention_bias": getattr(config, "attention_bias", False),
        "attention_multiplier": getattr(
            config, "attention_multiplier", head_dim_of(config) ** -0.5
        ),
        **{
            name: getattr(config, name, 1.0)
            for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")
        },
    }


def _mixtral_settings(config: Config, sizes: PetalSizes) -> JSON:
    return {
        "intermediate_size": sizes.width,
        "num_local_experts": sizes.experts,
        "num_experts_per_tok": sizes.top_k,
        "sliding_window": getattr(config, "sliding_window", None),
        "head_dim": head_dim_of(config),
    }


def _granite_lacks(config: Config, sizes: PetalSizes) -> str | None:
    window = getattr(config, "sliding_window", None)
    used = getattr(config, "use_sliding_window", True)
    windowed = used and window and window < config.max_position_embeddings
    return "sliding-window attention" if windowed else None


def _mixtral_lacks(config: Config, sizes: PetalSizes) -> str | None:
    if sizes.shared:
        return "a backbone that every token runs"
    return "attention biases" if getattr(config, "attention_bias", False) else None


TARGETS: tuple[PetalTarget, ...] = (
    PetalTarget(
        "mixtral",
        bases=("llama", "mistral"),
        settings=_mixtral_settings,
        tensors=_mixtral_tensors,
        lacks=_mixtral_lacks,
    ),
    PetalTarget(
        "granitemoeshared",
        bases=("llama", "mistral", "granite"),
        settings=_granite_settings,
        tensors=_granite_tensors,
        lacks=_granite_lacks,
    ),
)
"""Targets in order of preference."""


def _filled(ffn: DenseFFN, width: int) -> DenseFFN:
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


# --- export --------------------------------------------------------------------------------------


_SHARED_SETTINGS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range",
    "rms_norm_eps", "use_cache", "tie_word_embeddings", "attention_dropout", "pad_token_id",
    "bos_token_id", "eos_token_id", "rope_parameters", "dtype",
)  # fmt: skip
"""Config attributes with the same meaning in every architecture of :data:`TARGETS`."""


# --- carved layers as experts --------------------------------------------------------------------


def as_experts(source: Source, arch: Arch, headers: Sequence[Header | None], target: str) -> Export:
    """Return the export to the first architecture of :data:`TARGETS` that holds all layers.

    Args:
        source: the carved model.
        arch: its architecture.
        headers: headers by layer, None for layers that were not carved.
        target: the only one to consider, if given.

    Raises:
        MoesaicError: no architecture does; the message names what each lacks.
    """
    config = base_config(source.config, arch)
    widths = base_shape(skeleton_of(source.config), arch).widths
    candidates = [t for t in TARGETS if not target or t.model_type == target]
    if not candidates:
        raise MoesaicError(
            f"--target {target!r} is none of {', '.join(t.model_type for t in TARGETS)}."
        )
    sizes = smallest(headers, widths)
    lacks = [_lacks(t, config, sizes) or _repeats(headers, sizes) for t in candidates]
    if all(lacks):
        reasons = (f"{t.model_type} lacks {x}" for t, x in zip(candidates, lacks, strict=True))
        raise MoesaicError(f"No architecture holds this model exactly: {'; '.join(reasons)}.")
    chosen = candidates[lacks.index(None)]
    shared = {k: getattr(config, k) for k in _SHARED_SETTINGS if hasattr(config, k)}
    settings = {**copy.deepcopy(shared), **chosen.settings(config, sizes)}
    native = CONFIG_MAPPING[chosen.model_type](**settings)
    native.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(native)].__name__]
    return Export(
        native,
        lambda writer: _write_carved(source.checkpoint, arch, headers, chosen, sizes, writer),
        _costs(headers, widths, sizes),
        exact=sizes.top_k == 1,
    )


def _repeats(headers: Sequence[Header | None], sizes: PetalSizes) -> str | None:
    """Return why several petals per token do not fit; None if they do."""
    chosen = {(len(h["petals"]), h["top_k"]) for h in headers if h and h["petals"]}
    if sizes.top_k == 1 or chosen == {(sizes.experts, sizes.top_k)}:
        return None
    petals = ", ".join(f"{k} of {count}" for count, k in sorted(chosen))
    return f"room for {petals} petals a token beside {sizes.top_k} of {sizes.experts} experts"


def _lacks(target: PetalTarget, config: Config, sizes: PetalSizes) -> str | None:
    if config.model_type not in target.bases:
        return f"the attention of {config.model_type}"
    if getattr(config, "mlp_bias", False):
        return "biases in experts"
    return target.lacks(config, sizes)


def _costs(headers: Sequence[Header | None], widths: Sequence[int], sizes: PetalSizes) -> JSON:
    """Return the neurons stored and run in all layers, before and after padding."""
    before = sum(map(_backbone_of, headers, widths))
    run = before + sum(h["top_k"] * max(h["petals"]) for h in headers if h and h["petals"])
    stored = before + sum(sum(h["petals"]) for h in headers if h)
    each = sizes.shared + sizes.experts * sizes.width
    active = sizes.shared + (sizes.top_k * sizes.width if sizes.experts else 0)
    return {
        "active_neurons": [run, len(widths) * active],
        "stored_neurons": [stored, len(widths) * each],
        "experts": [max(len(h["petals"]) for h in headers if h), sizes.experts],
    }


def _write_carved(
    checkpoint: Checkpoint,
    arch: Arch,
    headers: Sequence[Header | None],
    target: PetalTarget,
    sizes: PetalSizes,
    writer: ShardWriter,
) -> None:
    blocks = {arch.ffn_prefix(i): i for i in range(len(headers))}
    for name in checkpoint.names():
        if not any(name.startswith(prefix) for prefix in blocks):
            writer.add(name, checkpoint.tensor(name))
    for prefix, index in blocks.items():
        state = checkpoint.under(prefix)
        weights = {name: state[f"{name}.weight"] for name in arch.ffn.projections}
        biases = {name: state.get(f"{name}.bias") for name in arch.ffn.projections}
        ffn = assembled_ffn(arch.ffn, weights, biases, nn.Identity())
        router_RD = state.get("router.weight")
        header, start = headers[index], arch.layer_prefix(index)
        layer = Layer(
            ffn,
            _backbone_of(header, ffn.width),
            tuple(header["petals"]) if header else (),
            None if router_RD is None else router_RD.float(),
            checkpoint.tensor(f"{start}post_attention_layernorm.weight"),
        )
        for name, tensor in target.tensors(start, layer, sizes):
            writer.add(name, tensor)
    writer.close()
