"""Router that skips experts of little weight (NAEE, Sec. 3.3 and App. A.2)."""

from __future__ import annotations

from functools import wraps

import torch
from torch import Tensor, nn

from moesaic.arch.mixture import Experts
from moesaic.arch.routing import in_order
from moesaic.dynamic import Dynamic, remade

RULES = ("top2", "tail")


def survivors(weights_TK: Tensor, beta: float, rule: str) -> Tensor:
    """Return the kept experts of a token, for weights in falling order (T, K), bool.

    ``top2``: the second is skipped if w_2 < beta w_1 (Sec. 3.3). ``tail``: the first i are kept,
        for
    the smallest i for which the others sum to less than beta times the sum of all (App. A.2).

    >>> w = torch.tensor([[0.6, 0.4], [0.9, 0.1]])
    >>> survivors(w, 0.5, "top2").tolist(), survivors(w, 1 / 3, "tail").tolist()
    ([[True, True], [True, False]], [[True, True], [True, False]])
    """
    if rule == "top2":
        stays_TK = torch.ones_like(weights_TK, dtype=torch.bool)
        stays_TK[:, 1] = weights_TK[:, 1] >= beta * weights_TK[:, 0]
        return stays_TK
    tail_TK = weights_TK.flip(-1).cumsum(-1).flip(-1)  # the weight of the experts from here on
    stays_TK = tail_TK >= beta * tail_TK[:, :1]
    stays_TK[:, 0] = True
    return stays_TK


def skip(
    weights_TK: Tensor, chosen_TK: Tensor, beta: float, rule: str, count: int
) -> tuple[Tensor, Tensor]:
    """Return the weights and indices of the kept experts, heaviest first.

    Kept experts take over the weight of the skipped ones, in proportion. A skipped place has weight
    0 and the index ``count``, which no expert has.

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
    """Mixin for a router's class: same weights, same names, and some experts skipped."""

    beta: float
    rule: str

    def forward(self, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, ...]:
        out = super().forward(*args, **kwargs)
        logits, weights, chosen, *shared = in_order(out)
        kept = skip(weights, chosen, self.beta, self.rule, logits.shape[-1])
        return in_order((logits, *kept, *shared), like=out)


@remade
def _skipping(base: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a router's class that skips."""

    @wraps(base.forward)  # other code reads a router's arguments from its signature
    def forward(self: Skipping, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, ...]:
        return Skipping.forward(self, *args, **kwargs)

    name, parents = f"Skipping{base.__name__}", (Skipping, base)
    return Dynamic(name, parents, {"forward": forward})  # type: ignore[return-value]


def make_skipping(router: nn.Module, beta: float, rule: str, experts: Experts) -> None:
    """Make a router skip, in place, and let its experts accept skipped places."""
    if rule not in RULES:
        raise ValueError(f"rule {rule!r} is not one of {RULES}")
    router.__class__ = _skipping(type(router))
    vars(router).update(beta=beta, rule=rule)
    # transformers' flag for chosen experts that are elsewhere, whose index is the count
    experts._is_expert_parallel = True
