"""How alike layers, models and texts are in what FFNs activate: CKA (MoRE, App. E.2, Tables 7-9).

A row of X is one text: the mean over its tokens of the FFN's hidden activations. The paper does not
say what a row is, nor sigma. This row pairs what two models make of the same text whatever their
tokenizers; sigma is the median distance between the rows of a matrix (the lower of two).

Shape suffixes: N texts, M neurons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.arch.dense import Arch
from moesaic.arch.lookup import dense_arch
from moesaic.config import RunArgs, takes_options
from moesaic.data.text import Tokens
from moesaic.errors import MoesaicError
from moesaic.foreign import JSON, Model
from moesaic.io.caller import leaves_untouched
from moesaic.observation.job import Job


def kernel(x_NM: Tensor) -> Tensor:
    """K, Eq. 15: exp(-||x_i - x_j||^2 / 2 sigma^2), sigma the median of all distances (N, N).

    >>> kernel(torch.tensor([[0.0], [2.0]])).tolist()[0][1] == torch.tensor(-0.5).exp().item()
    True
    """
    distance_NN = torch.cdist(x_NM, x_NM, compute_mode="donot_use_mm_for_euclid_dist")
    apart = distance_NN[~torch.eye(len(x_NM), dtype=torch.bool)]
    sigma = apart.median()
    return torch.exp(-distance_NN.square() / (2 * sigma.square()))


def cka(k_NN: Tensor, l_NN: Tensor) -> float:
    """CKA of two kernel matrices, Eq. 14: the cosine between them, both centred; 1 where equal.

    >>> eye = torch.eye(3)
    >>> cka(eye, eye)
    1.0
    """
    k, l = (_centred(x.double()) for x in (k_NN, l_NN))
    return ((k * l).sum() / (k.norm() * l.norm())).item()


def _centred(k_NN: Tensor) -> Tensor:
    """H K H with H = I - 1/n."""
    rows = k_NN - k_NN.mean(0, keepdim=True)
    return rows - rows.mean(1, keepdim=True)


def depths(count: int) -> dict[str, int]:
    """The layers that stand for Table 7's three depths: the middle of each third.

    >>> depths(32)
    {'shallow': 5, 'middle': 16, 'deep': 26}
    """
    return {"shallow": count // 6, "middle": count // 2, "deep": count - 1 - count // 6}


@takes_options()
@leaves_untouched
def similarity(
    model: Model | str | Path,
    *,
    against: Model | str | Path | None = None,
    other: str | Sequence[str] | Tokens | None = None,
    **options: Any,
) -> JSON:
    """Centred kernel alignment of what a dense model's FFNs activate.

    Args:
        model: a loaded PreTrainedModel, or a name.
        against: another one, compared with it at the same depths on the same texts (Table 8).
        other: another text, compared layer by layer with the calibration text (Table 9).
        options: of :meth:`moesaic.config.RunArgs.of`: calibration, samples, device and so on.

    Returns:
        ``texts``: their number; ``layers``: CKA of every two layers (Table 7), a list of rows;
        ``depths``: the layers that stand for shallow, middle and deep; ``against`` and ``other``
        where they were asked for: CKA by layer.

    Raises:
        MoesaicError: the request cannot be met.
    """
    args = RunArgs.of(model, **options)
    job = Job(args, dense_arch)
    own = _kernels(job)
    found: JSON = {
        "texts": len(own[0]),
        "layers": [[cka(k, l) for l in own.values()] for k in own.values()],
        "depths": depths(len(own)),
    }
    if against is not None:
        theirs = _kernels(_beside(job, replace(args, model=against)))
        last = max(1, len(own) - 1)
        aligned = [round(i * (len(theirs) - 1) / last) for i in own]
        found["against"] = [cka(own[i], theirs[j]) for i, j in enumerate(aligned)]
    if other is not None:
        if isinstance(other, str):
            drawn = replace(args.calibration, source=other)
            asked = replace(args, calibration=drawn, text=None)
        else:
            asked = replace(args, text=other)
        job = Job(asked, dense_arch)
        if len(job.tokens.input_ids) != found["texts"]:
            raise MoesaicError(
                f"other has {len(job.tokens.input_ids)} texts, the first {found['texts']}: "
                "they are compared one by one; say samples."
            )
        theirs = _kernels(job)
        found["other"] = [cka(own[i], theirs[i]) for i in own]
    return found


def _beside(job: Job[Arch], args: RunArgs) -> Job[Arch]:
    """Another model on the same texts.

    Raises:
        MoesaicError: its tokenizer cuts them at other places.
    """
    other = Job(args, dense_arch)
    ours, theirs = job.tokens.input_ids, other.tokens.input_ids
    if not args.calibration.documents and not torch.equal(ours, theirs):
        raise MoesaicError(
            "against has another tokenizer, whose windows are other texts: documents=True "
            "compares documents, each cut at length tokens."
        )
    return other


def _kernels(job: Job[Arch]) -> Mapping[int, Tensor]:
    """The kernel matrix of every layer (N, N)."""
    tokens = job.tokens
    if len(tokens.input_ids) < 3:
        raise MoesaicError("samples: CKA compares at least three texts.")
    counts = [
        [batch.input_ids.shape[1]] * len(batch.input_ids)
        if batch.attention_mask is None
        else batch.attention_mask.sum(1).tolist()
        for batch in tokens.batches()
    ]
    layers = range(len(job.layers))
    kernels = {}
    for site in job.track(job.stream(layers, job.arch.dense), "Comparing layers", len(layers)):
        texts = [
            row_TM.double().mean(0)
            for (_, h_TM), split in zip(site.activations(), counts, strict=True)
            for row_TM in h_TM.split(split)
        ]
        kernels[site.index] = kernel(torch.stack(texts)).cpu()
    return kernels
