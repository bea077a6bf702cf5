"""A router that leaves out experts of little weight (NAEE, Sec. 3.3 and App. A.2)."""

from __future__ import annotations

from functools import wraps

import torch
from torch import Tensor, nn

from moesaic.arch.mixture import Experts
from moesaic.dynamic import Dynamic, remade

RULES = ("top2", "tail")


def survivors(weights_TK: Tensor, beta: float, rule: str) -> Tensor:
    """The experts of a token that stay, for weights in falling order (T, K), bool.

    ``top2``: the second goes when w_2 < beta w_1 (Sec. 3.3). ``tail``: the smallest i stay for
    which the sum of the others is below beta times the sum of all (App. A.2).

    >>> w = torch.tensor([[0.6, 0.4], [0.9, 0.1]])
    >>> survivors(w, 0.5, "top2").tolist(), survivors(w, 1 / 3, "tail").tolist()
    ([[True, True], [True, False]], [[True, True], [True, False]])
    """
    if rule == "top2":
        stays_TK = torch.ones_like(weights_TK, dtype=torch.bool)
        stays_TK[:, 1] = weights_TK[:, 1] >= beta * weights_TK[:, 0]
        return stays_TK
    tail_TK = weights_TK.flip(-1).cumsum(-1).flip(-1)  # what goes if the experts from here on go
    stays_TK = tail_TK >= beta * tail_TK[:, :1]
    stays_TK[:, 0] = True
    return stays_TK


def skip(
    weights_TK: Tensor, chosen_TK: Tensor, beta: float, rule: str, count: int
) -> tuple[Tensor, Tensor]:
    """The weights and experts that are left, heaviest first.

    Survivors take over the weight of those that go, in proportion. A skipped place has weight 0
    and the number ``count``, which no expert has.

    >>> skip(torch.tensor([[0.1, 0.9]]), torch.tensor([[4, 2]]), 0.5, "top2", 8)
    (tensor([[1., 0.]]), tensor([[2, 8]]))
    """
    weights_TK, order_TK = weights_TK.sort(dim=-1, descending=True, stable=True)
    chosen_TK = chosen_TK.gather(-1, order_TK)
    exact_TK = weights_TK.float()
    stays_TK = survivors(exact_TK, beta, rule)
    left_TK = exact_TK.masked_fill(~stays_TK, 0)
    scale_T1 = exact_TK.sum(-1, keepdim=True) / left_TK.sum(-1, keepdim=True)
    whole_T1 = stays_TK.all(-1, keepdim=True)
    left_TK = torch.where(whole_T1, weights_TK, (left_TK * scale_T1).to(weights_TK.dtype))
    return left_TK, chosen_TK.masked_fill(~stays_TK, count)


class Skipping(nn.Module):
    """Mixed into a router's class: same weights, same names, and some experts skipped."""

    beta: float
    rule: str

    def forward(self, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, ...]:
        logits, weights, chosen, *shared = super().forward(*args, **kwargs)
        return logits, *skip(weights, chosen, self.beta, self.rule, logits.shape[-1]), *shared


@remade
def _skipping(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a router that skips."""

    @wraps(base.forward)  # what a router is handed beside hidden states is read off its signature
    def forward(self: Skipping, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, ...]:
        return Skipping.forward(self, *args, **kwargs)

    name, parents = f"Skipping{base.__name__}", (Skipping, base)
    return Dynamic(name, parents, {"forward": forward})  # type: ignore[return-value]


def make_skipping(router: nn.Module, beta: float, rule: str, experts: Experts) -> None:
    """Let a router skip, in place, and let the experts know that it may."""
    if rule not in RULES:
        raise ValueError(f"rule {rule!r} is not one of {RULES}")
    router.__class__ = _skipping(type(router))
    vars(router).update(beta=beta, rule=rule)
    # transformers' word for: some chosen experts may not be here; their number is the count
    experts._is_expert_parallel = True
