"""An architecture's own routing function: logits in, experts and their weights out.

Routing is never written down a second time here. A :class:`RoutingFunction` is the architecture's
own router with its projection taken off: the code that runs in the model decides over the logits it
is given, so softmax or sigmoid, normalised or not, scaled, grouped and biased routers are right by
construction, and a set of allowed experts is scored exactly as it will be deployed.

Shape suffixes: N rows of logits, E routed experts, K experts a token runs.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn


def _floor(dtype: torch.dtype) -> float:
    """A logit whose softmax and sigmoid are exactly zero, and that stays finite in products."""
    return torch.finfo(dtype).min / 4


class RoutingFunction:
    """A router without its projection: logits in, the true combine weights out.

    Args:
        router: the module; not changed, and nothing of its weights is kept but the choice bias.
        choice_bias: the name of that bias inside the router.
    """

    def __init__(self, router: nn.Module, choice_bias: str | None = None) -> None:
        self._router = _unbound(router)
        self._forward = type(router).forward
        self._choice_bias = choice_bias
        self.count = int(attrgetter("weight")(router).shape[0])
        self.bias_E: Tensor | None = None
        if choice_bias is not None:
            self.bias_E = attrgetter(choice_bias)(router).detach().flatten()
            for part in choice_bias.split(".")[:-1]:
                self._router._modules[part] = _unbound(getattr(router, part))

    @torch.no_grad()
    def choose(self, logits_NE: Tensor, allowed_NE: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The weights and the numbers of each token's experts (N, K).

        Args:
            logits_NE: router logits, one row a token.
            allowed_NE: bool; the experts that are there. None: all.
        """
        bias_E = self.bias_E
        if allowed_NE is not None:
            logits_NE = logits_NE.masked_fill(~allowed_NE, _floor(logits_NE.dtype))
            if bias_E is not None:
                bias_E = bias_E.to(logits_NE.device).masked_fill(~allowed_NE, float("-inf"))
        self._set("weight", torch.eye(self.count, dtype=logits_NE.dtype, device=logits_NE.device))
        if self._router._parameters.get("bias") is not None:
            self._set("bias", logits_NE.new_zeros(self.count))
        if self._choice_bias is not None and bias_E is not None:
            self._set(self._choice_bias, bias_E.to(logits_NE.device))
        _, weights_NK, chosen_NK = self._forward(self._router, logits_NE)
        return weights_NK, chosen_NK

    def weights(self, logits_NE: Tensor, allowed_NE: Tensor | None = None) -> Tensor:
        """w, the combine weight of every expert, zero for those not chosen (N, E), float32."""
        weights_NK, chosen_NK = self.choose(logits_NE, allowed_NE)
        w_NE = torch.zeros(
            len(logits_NE), self.count + 1, device=logits_NE.device
        )  # one place more: a skipped expert's number is the count
        return w_NE.scatter_(1, chosen_NK, weights_NK.float())[:, :-1]

    def _set(self, name: str, tensor: Tensor) -> None:
        owner, _, leaf = name.rpartition(".")
        module = self._router.get_submodule(owner)
        places = module._buffers if leaf in module._buffers else module._parameters
        places[leaf] = tensor


def _unbound(module: Any) -> Any:
    """A shallow copy with tables of tensors and modules of its own, and no hooks."""
    twin = copy.copy(module)
    for table in ("_parameters", "_buffers", "_modules"):
        twin.__dict__[table] = dict(module.__dict__[table])
    for table in ("_forward_hooks", "_forward_pre_hooks"):
        twin.__dict__[table] = OrderedDict()
    if hasattr(twin, "hidden_dim"):
        twin.hidden_dim = module.weight.shape[0]
    return twin
