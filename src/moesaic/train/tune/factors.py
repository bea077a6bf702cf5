"""Fixed weights g of condensed layers, kept out of ``down_proj`` while it trains.

CD-MoE (Cao et al., Eq. 3) trains E_i of ``g_i E_i(x)`` and keeps g_i fixed. With g folded into the
down projection, a step of AdamW, which changes every weight by about the same amount, would change
E_i 1/g_i times as much. So while a layer trains, its down projection is without g, and its input is
multiplied by g; in the end they are folded again. The function is the same all the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from moesaic.arch.dense import Arch, weight_of
from moesaic.arch.mixture import MoEArch
from moesaic.exports.quantiser import Model
from moesaic.plan import Plan
from moesaic.plans.condensed import CondensedLayer
from moesaic.plans.cut import CutLayer
from moesaic.types import Config


def _fixed_weights(layer: CondensedLayer, shared: int, expert: int) -> Tensor:
    """Return the factor of every neuron of a condensed layer (M,), float32; ``shared`` and
    ``expert`` are the widths of the shared path and of a routed expert."""
    scales = torch.tensor(layer.shared_scale).flatten()
    scale = scales.repeat_interleave(shared // len(scales))[: shared if layer.shared else 0]
    g_K = layer.gates_K.float().repeat_interleave(expert)
    padding = torch.ones(layer.width - len(scale) - len(g_K))
    return torch.cat([scale, g_K, padding])


def factors(arch: Arch, config: Config, plan: Plan | None) -> dict[int, Tensor]:
    """Return the factors (M,) of condensed layers, by layer, if any differs from 1.

    Args:
        arch: the architecture.
        config: the model's config.
        plan: the plan that made it, with those before it; None if unknown.
    """
    fixed: dict[int, Tensor] = {}
    for step in reversed((*plan.earlier, plan) if plan else ()):
        for i, layer in step.layers.items():
            if isinstance(layer, CutLayer) and layer.shared_S is not None:
                return fixed  # shared paths have another width since
            if not isinstance(layer, CondensedLayer) or not step.base.experts_of(i):
                continue  # it was dense, and is only padded
            assert isinstance(arch, MoEArch)
            expert = step.base.widths[i]
            g_M = _fixed_weights(layer, arch.shared_width_in(config, expert), expert)
            if (g_M != 1).any():
                fixed[i] = g_M
    return fixed


@contextmanager
def outside(model: Model, arch: Arch, factors: Mapping[int, Tensor]) -> Iterator[None]:
    """Divide down projections by their factors, and multiply their inputs, while the context lasts.

    Args:
        model: a live model; its down projections are float32 meanwhile.
        arch: its architecture.
        factors: factors by layer (M,), none of them 0.
    """
    handles, scaled = [], []

    def multiply(g_M: Tensor, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return ((args[0].float() * g_M.to(args[0].device)).to(args[0].dtype),)

    for i, g_M in factors.items():
        ffn = arch.ffn_of(arch.layers(model)[i])
        down = getattr(ffn, arch.ffn.down)
        scaled.append((down, weight_of(ffn, arch.ffn.down).dtype, g_M))
        down.weight.data = down.weight.data.float() / g_M.to(down.weight.device)
        handles.append(down.register_forward_pre_hook(partial(multiply, g_M)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for down, dtype, g_M in scaled:
            down.weight.data = (down.weight.data.float() * g_M.to(down.weight.device)).to(dtype)
