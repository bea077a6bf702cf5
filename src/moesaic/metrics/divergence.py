"""How far a result's predictions are from the original's: KL divergence, top-1 agreement.

Both models' logits are compared at every token, over the whole vocabulary: nothing is cut off or
rounded. Of a model that is read from disk only the last layer's outputs and the head are held
meanwhile (see :class:`moesaic.metrics.forward.Layerwise`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.data.text import Tokens
from moesaic.errors import MoesaicError
from moesaic.foreign import Tokenizer, Track, silent
from moesaic.metrics.forward import BATCH, Layerwise, Runner, all_shares, own_share
from moesaic.metrics.perplexity import Losses, Quality, scored


@dataclass(frozen=True)
class Beside:
    """A result beside its original, on the same tokens."""

    result: Quality
    original: Quality
    kl: float
    """Mean of KL(original || result) over the scored tokens, in nats a token."""
    top1_agreement: float
    """Share of them whose most probable next token is the same."""


@torch.no_grad()
def beside(
    result: Runner, original: Runner, tokens: Tokens, track: Track = silent, shared: bool = False
) -> Beside:
    """Measure two models in one pass each.

    Args:
        result: the model.
        original: what it is compared with; it has the same tokenizer.
        tokens: windows of text.
        track: shows progress.
        shared: several processes share the batches, and all of them call this.

    Raises:
        MoesaicError: the vocabularies differ, or logits are not finite.
    """
    batches = own_share(list(tokens.batches(BATCH)), shared)
    # the original's layers first: then nothing of it but its states is kept
    # (a whole model runs in step with the other, whose bar is drawn)
    told = track if isinstance(original, Layerwise) else silent
    before = original.run(batches, told, "Original")
    after = result.run(batches, track)
    losses = Losses(), Losses()
    sums: list[Tensor] = []
    for (theirs, batch), (ours, _) in zip(before.logits, after.logits, strict=True):
        if theirs.shape[-1] != ours.shape[-1]:
            raise MoesaicError(
                f"against: the original predicts {theirs.shape[-1]:,} tokens, the model "
                f"{ours.shape[-1]:,}; measure each by itself."
            )
        for added, logits in zip(losses, (ours, theirs), strict=True):
            added.add(logits, batch)
        sums.append(_compared(theirs, ours.to(theirs.device), batch))
    own, original_quality = (
        added.quality(tokens, found.routing, shared)
        for added, found in zip(losses, (after, before), strict=True)
    )
    kl, agreed = (torch.stack(all_shares(sums, shared)).sum(0) / own.tokens).tolist()
    return Beside(own, original_quality, kl, agreed)


def _compared(theirs: Tensor, ours: Tensor, batch: Tokens) -> Tensor:
    """Sums over the scored tokens of the divergence and of the agreement, float64 (2)."""
    total = torch.zeros(2, dtype=torch.float64)
    for p_LV, q_LV, scored_L in zip(theirs, ours, scored(batch), strict=True):
        chosen = scored_L.to(theirs.device)
        p, q = (x[:-1][chosen].float() for x in (p_LV, q_LV))
        agreed = (p.argmax(-1) == q.argmax(-1)).double()
        total += torch.stack([kl(p, q).sum(), agreed.sum()]).cpu()
    return total


def kl(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    """KL(p || q) of each token in nats (T), float64.

    Args:
        p_TV: logits of the one distribution.
        q_TV: logits of the other.
    """
    log_p, log_q = p_TV.log_softmax(-1), q_TV.log_softmax(-1)
    # what p never predicts adds nothing, even where q never does either
    difference = (log_p - log_q).masked_fill(log_p == -torch.inf, 0)
    return (log_p.exp() * difference).double().sum(-1)


def check_vocabularies(model: Tokenizer, original: Tokenizer) -> None:
    """Refuse to compare models token by token to which a token is not the same.

    Both get the same tokens, so that nothing else need agree: one file's reader may cut text
    otherwise than another's, as of GGUF files, and a vocabulary may be filled up with more.

    Raises:
        MoesaicError: a number stands for two tokens.
    """
    ours, theirs = ({i: token for token, i in of.get_vocab().items()} for of in (model, original))
    other = [i for i in sorted(ours.keys() & theirs.keys()) if ours[i] != theirs[i]]
    if other or not ours.keys() & theirs.keys():
        first = f": {other[0]} is {ours[other[0]]!r}, there {theirs[other[0]]!r}" if other else ""
        raise MoesaicError(
            f"against: its vocabulary differs from the model's{first}. Their predictions cannot be "
            "compared token by token; measure each by itself."
        )
