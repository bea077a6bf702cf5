"""Trainable parameters of a converted model, by the option ``what``.

condensed   Cao et al. (CD-MoE, Sec. 4.3): the projections of the condensed layers; gate values,
            attention and everything else are kept. Rate 1e-4, 10 % warm-up, cosine.
attention   the attention of the same layers, as the paper trains Layer Drop for comparison.
routers     the routers alone, towards the original model's next-token distribution (router
            knowledge distillation); of carved models, too, through the choice (straight-through).
lora        low-rank updates of every linear module of the decoder layers, merged at the end.
all         everything.

The released code of CD-MoE has no effective warm-up and predicts prompts and padding; we do not.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from moesaic.arch.dense import Arch
from moesaic.errors import MoesaicError
from moesaic.exports.quantiser import Model
from moesaic.plan import Plan
from moesaic.surgery import routed_modules


def trainable(
    model: Model, arch: Arch, what: str, plan: Plan | None = None
) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name.

    Args:
        model: a converted model.
        arch: its architecture.
        what: ``condensed``, ``attention``, ``routers`` or ``all``.
        plan: the plan that made it, from which (and from those before it) follow the layers that
            routed before.

    Raises:
        MoesaicError: the model has no such parameters.
    """
    if what == "all":
        return dict(model.named_parameters())
    if what in ("condensed", "attention"):
        parts = tuple(f"{{ffn}}{name}." for name in arch.ffn.apart)
        parts = ("{layer}" + arch.attention_path + ".",) if what == "attention" else parts
        parameters = {} if plan is None else _condensed(model, arch, plan, parts)
        if not parameters:
            raise MoesaicError(
                "This model has no condensed layers"
                + (" with attention" if what == "attention" else "")
                + ": condense it first, or train others with what=lora, what=routers or what=all."
            )
        return parameters
    routers = {
        id(parameter)
        for routed in routed_modules(model, arch).values()
        if getattr(routed.router, "learns", True)
        for parameter in routed.router.parameters(recurse=False)
    }
    parameters = {name: p for name, p in model.named_parameters() if id(p) in routers}
    if not parameters:
        raise MoesaicError("This model has no routers that learn.")
    return parameters


def _condensed(
    model: Model, arch: Arch, plan: Plan, parts: Sequence[str]
) -> dict[str, nn.Parameter]:
    """Return parameters, by name, of layers that routed before and no longer do.

    Args:
        model: a converted model.
        arch: its architecture.
        plan: the plan that made it.
        parts: prefixes of their names, ``{layer}`` or ``{ffn}`` standing for the prefix of the
            decoder layer or of its FFN.
    """
    routed = routed_modules(model, arch)
    starts = tuple(
        part.format(layer=arch.layer_prefix(i), ffn=arch.ffn_prefix(i))
        for step in (*plan.earlier, plan)
        for i in step.layers
        if step.base.experts_of(i) and i not in routed
        for part in parts
    )
    named = model.named_parameters()
    return {name: p for name, p in named if name.startswith(starts or "\0") and p.numel()}
