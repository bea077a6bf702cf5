"""Divergences between two sets of hidden states or two outputs, which CD-MoE's searches minimise.

The released code turns each hidden state into a distribution by a softmax over the hidden
dimension, in float32, and takes natural logarithms; so do we.

Shape suffixes: N any number of tokens or candidates, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from moesaic.data.text import Tokens
from moesaic.losses import next_token_loss, predicting
from moesaic.observation.branches import Metric
from moesaic.observation.stream import valid

TINY = torch.finfo(torch.float32).tiny
"""Lower bound of a mean of two probabilities, so that the logarithm of two zeros is finite."""


def js(p_ND: Tensor, q_ND: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence of softmax(p) and softmax(q) over D (N,); 0 to ln 2.

    JS = (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2. Arguments broadcast to the shape of the
    second, since a search scores many q against one p. Temporaries are reused in place.

    >>> js(torch.tensor([[100.0, 0.0]]), torch.tensor([[0.0, 100.0]]))
    tensor([0.6931])
    """
    log_p, log_q = (x.float().log_softmax(-1) for x in (p_ND, q_ND))
    p, q = log_p.exp(), log_q.exp()
    log_m = torch.add(p / 2, q, alpha=0.5).clamp_(min=TINY).log_()
    q_part = log_q.sub_(log_m).mul_(q)
    return q_part.addcmul_(p, log_m.neg_().add_(log_p)).sum(-1).clamp(min=0) / 2


def kl(p_ND: Tensor, q_ND: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence KL(softmax(p) || softmax(q)) over D (N,)."""
    log_p, log_q = (x.float().log_softmax(-1) for x in (p_ND, q_ND))
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0)


def cosine(p_ND: Tensor, q_ND: Tensor) -> Tensor:
    """Return 1 - cos(p, q) (N,), a module's importance in He et al. (2024), Eq. 3."""
    return 1 - torch.cosine_similarity(p_ND.float(), q_ND.float(), dim=-1)


DIVERGENCES = {"js": js, "kl": kl}
"""Divergences of hidden states, by name."""


def _of_states(
    divergence: Callable[[Tensor, Tensor], Tensor], before_1LD: Tensor, window: Tokens
) -> Callable[[Tensor], Tensor]:
    mask = window.attention_mask
    before_TD = valid(before_1LD, mask)
    return lambda after_1LD: divergence(before_TD, valid(after_1LD, mask))


def _of_perplexity(before_1LV: Tensor, window: Tokens) -> Callable[[Tensor], Tensor]:
    labels = window.labels.to(before_1LV.device)
    count = predicting(labels).sum().clamp(min=1)
    before = (next_token_loss(before_1LV, labels) / count).exp()
    return lambda logits: ((next_token_loss(logits, labels) / count).exp() - before)[None]


METRICS: dict[str, Metric] = {
    **{name: partial(_of_states, divergence) for name, divergence in DIVERGENCES.items()},
    "ppl": _of_perplexity,
}
"""Changes of a window's output by name: of the hidden states after the final norm by token, or of
the perplexity (Tab. 8)."""
