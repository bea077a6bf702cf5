"""Rows of ToMoE's Tab. 13 and Fig. 6c that the package has no switch for: a subclass for each.

==========  ========================================================================================
local       Local Emb: attention has no expert embeddings; it learns by its own modules alone
static      w/o VO Routing: every token uses the same dimensions of values and outputs
heads       Head Pruning: whole groups of heads go, where the method prunes dimensions of all heads
language    the next-token loss instead of the divergence from the dense model
no-union    without R_U
==========  ========================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor

import moesaic
from moesaic.arch.dense import AttentionNames
from moesaic.carving.tomoe import method
from moesaic.carving.tomoe.config import ToMoEConfig
from moesaic.carving.tomoe.masks import MaskingModules
from moesaic.carving.tomoe.method import Logits
from moesaic.carving.tomoe.student import Student
from moesaic.losses import next_token_loss, predicting


class LocalEmbeddings(MaskingModules):
    """Attention's mean expert embedding is zero."""

    def mean_embedding(self, index: int) -> Tensor:
        return torch.zeros_like(super().mean_embedding(index))


class StaticDimensions(MaskingModules):
    """Proj_E is zero and is kept so: V/O dimensions follow from only the mean expert embedding."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for i in range(len(self.mha)):
            torch.nn.init.zeros_(self.mha_modules(i).proj_e.weight)

    def head_logits(self, index: int, x_BLD: Tensor) -> Tensor:
        size = self.shapes[index].heads.size
        return self.static_logits(index)[:size].expand(*x_BLD.shape[:-1], size)


class HeadPruning(MaskingModules):
    """One mask for each group of heads that share keys and values, by Proj_D's first logits."""

    def attention(self, index: int, x_BLD: Tensor) -> Mapping[str, Tensor]:
        heads = self.shapes[index].heads
        logits = self.static_logits(index)[: heads.keys]
        keys = self._dimensions(logits, self.noise).repeat_interleave(heads.size)
        queries = keys.unflatten(0, (heads.keys, 1, -1))
        queries = queries.expand(-1, heads.queries // heads.keys, -1).flatten()
        share = self._dimensions(logits, False).mean()
        width = share * heads.size
        self.measured[index, "mha"] = {"qk": width, "vo": width, "union": share}
        return {"q": queries, "k": keys, "v": keys, "o": queries}


@dataclass(frozen=True)
class ByHead(Logits):
    """``qk`` are the logits of groups of heads."""

    def widths(self, threshold: float) -> tuple[int, int, int]:
        width, _, _ = Logits(self.shape, self.mlp_NM).widths(threshold)
        assert self.qk is not None
        on = method._on(self.qk, threshold).float().mean()
        size = round(float(on) * self.shape.heads.size)
        return width, size, size


def by_head(shape: Any, mlp_NM: Tensor, qk: Tensor, vo_TA: Tensor) -> ByHead:
    """Logits as :func:`moesaic.carving.tomoe.method.learned_logits` has them."""
    return ByHead(shape, mlp_NM, vo_TA[0, : shape.heads.keys], vo_TA)


def pruned_heads(
    masking: MaskingModules, index: int, on: Tensor, vo: int, names: AttentionNames
) -> dict[str, Any]:
    """The rows of the kept groups of heads."""
    heads = masking.shapes[index].heads
    keys = on.bool().repeat_interleave(heads.size).nonzero().flatten()
    group = heads.queries // heads.keys * heads.size
    queries = on.bool().repeat_interleave(group).nonzero().flatten()
    return {"rows": method._rows({"q": queries, "k": keys, "v": keys}, heads, names)}


class Language(Student):
    """Eq. 10 with the next-token loss in the place of the divergence."""

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Any]:
        loss = next_token_loss(self.logits(input_ids, attention_mask), labels)
        loss = loss / predicting(labels).sum().clamp(min=1)
        terms = self.masking.terms()
        return {
            "loss": loss + self.masking.penalty(terms),
            "terms": {"distillation": loss, **terms},
        }


@dataclass(frozen=True)
class WithoutUnion(ToMoEConfig):
    """beta is 0."""

    union: ClassVar[float] = 0.0


MASKS = "moesaic.carving.tomoe.student.MaskingModules"
ROWS: dict[str, dict[str, Any]] = {
    "local": {MASKS: LocalEmbeddings},
    "static": {MASKS: StaticDimensions},
    "heads": {
        MASKS: HeadPruning,
        "moesaic.carving.tomoe.method.Logits": by_head,
        "moesaic.carving.tomoe.method._pruned": pruned_heads,
    },
    "language": {"moesaic.carving.tomoe.method.Student": Language},
    "no-union": {},
}


def carve(
    model: str, out: str, row: str, active: float, calibration: str, device: str = "cpu", **how: Any
) -> dict[str, Any]:
    """A model carved as a row says; ``how``: ``samples``, and numbers of ToMoE's config."""
    samples = int(how.pop("samples"))
    numbers: dict[str, Any] = {
        name: float(v) if name == "lr" else int(v) for name, v in how.items()
    }
    kind = WithoutUnion if row == "no-union" else ToMoEConfig
    config = kind(active=float(active), **numbers)
    with ExitStack() as stack:
        for name, other in ROWS[row].items():
            stack.enter_context(patch(name, other))
        result = moesaic.carve(
            model, config, calibration=calibration, samples=samples, device=device, progress=False
        )
        result.save_pretrained(out)
    return {"active": result.summary["training"]["active"]}
