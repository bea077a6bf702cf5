"""A mixture's shared path and chosen experts folded into one dense MLP, live or from disk.

Shape suffixes: E routed experts, K chosen ones, M neurons, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.arch import FFNNames
from moesaic.errors import MoesaicError
from moesaic.moe import MoEArch, MoEFFN
from moesaic.nn import CondensedFFN, PassThrough
from moesaic.plan import CondensedLayer, DroppedLayer

Part = tuple[Tensor, Tensor, Tensor, float]
"""gate (M, D), up (M, D), down (D, M), and what its output is multiplied with."""

NO_FFN = CondensedLayer(torch.empty(0, dtype=torch.int64), torch.empty(0), 0, shared=False)
"""Nothing of the block stays: Block Drop."""


def fold(parts: list[Part], hidden_size: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up and down of one MLP that is the weighted sum of its parts.

    sum_i g_i down_i h_i = [g_1 down_1, g_2 down_2, ...] [h_1; h_2; ...]; neurons beyond the
    parts' own are zero.

    >>> one = torch.ones(1, 1)
    >>> fold([(one, one, one, 1.0), (one, one, one, 0.5)], 1, 3)[2]
    tensor([[1.0000, 0.5000, 0.0000]])
    """
    like = parts[0][0] if parts else torch.empty(0, hidden_size)
    gate_MD = torch.cat([gate for gate, _, _, _ in parts] or [like])
    up_MD = torch.cat([up for _, up, _, _ in parts] or [like])
    scaled = [(down.float() * scale).to(down.dtype) for _, _, down, scale in parts]
    down_DM = torch.cat(scaled or [like.T], dim=1)
    rest = width - gate_MD.shape[0]
    pad = (0, 0, 0, rest)
    return F.pad(gate_MD, pad), F.pad(up_MD, pad), F.pad(down_DM, (0, rest))


def sources(arch: MoEArch) -> tuple[str, ...]:
    """Where the tensors are that a condensed layer is made of, relative to the decoder layer."""
    return tuple(f"{at}." for at in (arch.ffn_path, arch.beside) if at)


def _projections(state: Mapping[str, Tensor], at: str, names: FFNNames) -> list[Tensor]:
    if any(f"{at}.{name}.bias" in state for name in names.projections):
        raise MoesaicError(f"{at} has biases; only MLPs without them can be condensed.")
    up_MD, down_DM = (state[f"{at}.{name}.weight"] for name in (names.up, names.down))
    if names.fused:
        return [*up_MD.chunk(2), down_DM]
    return [state[f"{at}.{names.gate}.weight"], up_MD, down_DM]


def condensed_tensors(
    plan: CondensedLayer, arch: MoEArch, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The condensed FFN's tensors from a decoder layer's; names relative to the layer."""
    path = arch.ffn_path
    experts = f"{path}.{arch.experts}."
    is_dense = f"{experts}down_proj" not in state
    parts: list[Part] = []
    if plan.shared and is_dense:
        gate, up, down = _projections(state, path, arch.ffn)
        parts.append((gate, up, down, 1.0))
    elif plan.shared and arch.shared_at is not None:
        gate, up, down = _projections(state, arch.shared_at, arch.shared_names)
        parts.append((gate, up, down, plan.shared_scale))
    for i, scale in zip(plan.experts, plan.gates_K.tolist(), strict=True):
        gate, up = state[f"{experts}gate_up_proj"][i].chunk(2)
        parts.append((gate, up, state[f"{experts}down_proj"][i], scale))
    like = state[f"{path}.down_proj.weight" if is_dense else f"{experts}down_proj"]
    hidden_size = like.shape[0 if is_dense else 1]
    tensors = dict(
        zip(
            ("gate_proj", "up_proj", "down_proj"), fold(parts, hidden_size, plan.width), strict=True
        )
    )
    if plan.down_DM is not None:  # narrower where the layer was widened since
        rest = plan.width - plan.down_DM.shape[1]
        tensors["down_proj"] = F.pad(plan.down_DM.to(like.device), (0, rest))
    if plan.gated:
        tensors["shared_gate"] = state[f"{path}.{arch.shared_gate}.weight"]
    return {f"{path}.{n}.weight": t.to(like).contiguous() for n, t in tensors.items()}


# --- live layers ---------------------------------------------------------------------------------


def _state(layer: nn.Module, arch: MoEArch) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in layer.named_parameters() if n.startswith(sources(arch))}


def _hidden_size(layer: nn.Module) -> int:
    return int(attrgetter("post_attention_layernorm.weight")(layer).shape[0])


def empty(layer: nn.Module, arch: MoEArch, header: Mapping[str, Any]) -> nn.Module:
    """What stands in a layer's place, without its values: an FFN, or a layer passed through."""
    if header["kind"] == DroppedLayer.kind:
        return PassThrough(_hidden_size(layer), arch.ffn_path)
    view = arch.view(layer)
    act = view.experts.act_fn if isinstance(view, MoEFFN) else view.act
    norm = attrgetter("post_attention_layernorm.weight")(layer)
    options = {"dtype": norm.dtype, "device": norm.device}
    return CondensedFFN(_hidden_size(layer), header["width"], act, header["gated"], **options)


def replacement(layer: nn.Module, arch: MoEArch, plan: CondensedLayer | DroppedLayer) -> nn.Module:
    """What stands in a layer's place, values and all."""
    new = empty(layer, arch, plan.header())
    if isinstance(plan, CondensedLayer):
        prefix = f"{arch.ffn_path}."
        tensors = condensed_tensors(plan, arch, _state(layer, arch))
        new.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items()}, assign=True)
    return new.train(layer.training)


def put(layers: nn.ModuleList, index: int, arch: MoEArch, new: nn.Module) -> None:
    """Put a replacement into a model, and let go of what it replaces."""
    if isinstance(new, PassThrough):
        layers[index] = new
        return
    layer = layers[index]
    owner, _, leaf = arch.ffn_path.rpartition(".")
    setattr(attrgetter(owner)(layer) if owner else layer, leaf, new)
    if arch.beside is not None:
        setattr(layer, arch.beside, None)


@contextmanager
def condensed(
    layer: nn.Module, arch: MoEArch, plan: CondensedLayer | DroppedLayer
) -> Iterator[nn.Module]:
    """The layer as the plan will have it; afterwards it is as it was."""
    new = replacement(layer, arch, plan)
    if isinstance(new, PassThrough):
        yield new
        return
    kept = {name: attrgetter(name)(layer) for name in (arch.ffn_path, arch.beside) if name}
    put(nn.ModuleList([layer]), 0, arch, new)
    try:
        yield layer
    finally:
        for name, module in kept.items():
            setattr(layer, name, module)
