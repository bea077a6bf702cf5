"""Losses of next-token predictions, of logits.

Shape suffixes: B windows of a batch, L tokens, V vocabulary, T predicted tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.data.text import IGNORED

CHUNK, ACCELERATED = 1 << 20, 1 << 26
"""Log-probabilities that :func:`in_chunks` makes at a time on a CPU, 4 MB, and elsewhere."""


def predicting(labels_BL: Tensor) -> Tensor:
    """True for tokens that are followed by one to be predicted (B, L).

    >>> predicting(torch.tensor([[-100, -100, 5, 6]])).tolist()
    [[False, True, True, False]]
    """
    return F.pad(labels_BL[:, 1:] != IGNORED, (0, 1))


def next_token_loss(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """Sum of the cross-entropy of the next token, over the tokens that have a label."""
    logits, labels = logits_BLV[:, :-1].flatten(0, 1).float(), labels_BL[:, 1:].flatten()
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)


def log_probabilities(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """Log-probabilities of the next token (T, V), float32, where it has a label."""
    return logits_BLV[:, :-1][labels_BL[:, 1:] != IGNORED].float().log_softmax(-1)


def in_chunks(logits_BLV: Tensor, labels_BL: Tensor) -> Iterator[Tensor]:
    """:func:`log_probabilities`, a few tokens at a time and in order.

    What is made of them then fits into a processor's cache: summing up a vocabulary of 262,144
    takes a third of the time that it takes at once.
    """
    chunk = CHUNK if logits_BLV.device.type == "cpu" else ACCELERATED
    places_T2 = (labels_BL[:, 1:] != IGNORED).nonzero()
    for some_T2 in places_T2.split(max(1, chunk // logits_BLV.shape[-1])):
        yield logits_BLV[some_T2.unbind(1)].float().log_softmax(-1)


def divergence(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    """KL(p || q) of each token in nats (T), float64, of log-probabilities."""
    # what p never predicts adds nothing, even where q never does either
    difference_TV = (p_TV - q_TV).masked_fill_(p_TV == -torch.inf, 0)
    return (p_TV.exp() * difference_TV).double().sum(-1)
