"""Fixed weights g of condensed layers, kept out of ``down_proj`` while it trains.

CD-MoE (Cao et al., Eq. 3) trains E_i of ``g_i E_i(x)`` and leaves g_i alone. Folded into the down
projection, a step of AdamW, which moves every weight about as far, would move E_i 1/g_i times as
far. So while a layer trains its down projection is without g, and what enters it is multiplied by
g; in the end they are folded again. The function is the same all the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from moesaic.arch.dense import Arch, weight_of
from moesaic.arch.mixture import MoEArch
from moesaic.plan import Plan
from moesaic.plans.condensed import CondensedLayer
from moesaic.plans.slimmed import SlimmedLayer
from moesaic.types import Config, Model


def _fixed_weights(layer: CondensedLayer, shared: int, expert: int) -> Tensor:
    """The factor of every neuron of a condensed layer (M,), float32, by the widths of the shared
    path and of a routed expert."""
    scales = torch.tensor(layer.shared_scale).flatten()
    scale = scales.repeat_interleave(shared // len(scales))[: shared if layer.shared else 0]
    g_K = layer.gates_K.float().repeat_interleave(expert)
    padding = torch.ones(layer.width - len(scale) - len(g_K))
    return torch.cat([scale, g_K, padding])


def factors(arch: Arch, config: Config, plan: Plan | None) -> dict[int, Tensor]:
    """The factors (M,) of condensed layers that have other ones than 1, by layer.

    Args:
        arch: the architecture.
        config: of the model.
        plan: the plan that it was made by, with those before it; None where it is not known.
    """
    fixed: dict[int, Tensor] = {}
    for step in reversed((*plan.earlier, plan) if plan else ()):
        for i, layer in step.layers.items():
            if isinstance(layer, SlimmedLayer) and layer.shared_S is not None:
                return fixed  # the config says another width of shared paths since
            if not isinstance(layer, CondensedLayer) or not step.base.experts_of(i):
                continue  # or it was dense, and is only filled up
            assert isinstance(arch, MoEArch)
            expert = step.base.widths[i]
            g_M = _fixed_weights(layer, arch.shared_width_in(config, expert), expert)
            if (g_M != 1).any():
                fixed[i] = g_M
    return fixed


@contextmanager
def outside(model: Model, arch: Arch, factors: Mapping[int, Tensor]) -> Iterator[None]:
    """Inside, down projections are without their factors, and what enters them has them.

    Args:
        model: live; its down projections are held in float32 meanwhile.
        arch: its architecture.
        factors: by layer (M,), none of them 0.
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
