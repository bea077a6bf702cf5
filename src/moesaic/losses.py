"""Losses of next-token predictions, computed from logits, and the test that compares two.

Shape suffixes: B windows of a batch, L tokens, V vocabulary, T predicted tokens, N windows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.data.text import IGNORED

CHUNK, ACCELERATED = 1 << 20, 1 << 26
"""Log-probabilities that :func:`in_chunks` computes at a time on a CPU (4 MB), and elsewhere."""
SURE = 2.0
"""Standard errors of the mean difference above which one choice is significantly worse."""


def predicting(labels_BL: Tensor) -> Tensor:
    """Return True for tokens that are followed by one to be predicted (B, L).

    >>> predicting(torch.tensor([[-100, -100, 5, 6]])).tolist()
    [[False, True, True, False]]
    """
    return F.pad(labels_BL[:, 1:] != IGNORED, (0, 1))


def next_token_loss(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """Return the sum of the cross-entropy of the next token, over the tokens that have a label."""
    logits, labels = logits_BLV[:, :-1].flatten(0, 1).float(), labels_BL[:, 1:].flatten()
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)


def log_probabilities(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """Return log-probabilities of the next token (T, V), float32, for tokens that have a label."""
    return logits_BLV[:, :-1][labels_BL[:, 1:] != IGNORED].float().log_softmax(-1)


def in_chunks(logits_BLV: Tensor, labels_BL: Tensor) -> Iterator[Tensor]:
    """Yield :func:`log_probabilities`, a few tokens at a time and in order.

    Temporaries then fit into a processor's cache: a sum over a vocabulary of 262,144 takes a third
    of the time that it takes at once.
    """
    chunk = CHUNK if logits_BLV.device.type == "cpu" else ACCELERATED
    places_T2 = (labels_BL[:, 1:] != IGNORED).nonzero()
    for some_T2 in places_T2.split(max(1, chunk // logits_BLV.shape[-1])):
        yield logits_BLV[some_T2.unbind(1)].float().log_softmax(-1)


def divergence(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    """Return KL(p || q) of each token in nats (T,), float64, from log-probabilities (T, V)."""
    # tokens with p = 0 add nothing, even if q = 0 too
    difference_TV = (p_TV - q_TV).masked_fill_(p_TV == -torch.inf, 0)
    return (p_TV.exp() * difference_TV).double().sum(-1)


def significantly_worse(losses_N: Tensor, best_N: Tensor, errors: float = SURE) -> bool:
    """Return True if ``losses_N`` is higher than ``best_N`` by more than ``errors`` standard
    errors.

    Args:
        losses_N: losses of one change, by window or token.
        best_N: losses of another change on the same windows, which pairs them.
        errors: standard errors of the mean difference. One window has no error: False.

    >>> best_N = torch.tensor([2.0, 3.0, 4.0])
    >>> significantly_worse(best_N + 1, best_N)
    True
    >>> significantly_worse(best_N.flip(0), best_N), significantly_worse(best_N, best_N)
    (False, False)
    """
    difference_N = losses_N - best_N
    if len(difference_N) < 2:
        return False
    error = difference_N.std() / len(difference_N) ** 0.5
    return bool(difference_N.mean() > errors * error)
