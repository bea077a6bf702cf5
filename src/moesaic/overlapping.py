"""The plan of a layer whose experts overlap: index lists into weights that they share.

Shape suffixes: N experts, W neurons of an expert, D hidden size, A size of a head, E embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

EMBED, SHIFT, SCALE, OFFSET, PROJECT = "embed", "shift", "scale", "offset", "project"
HEAD_ROUTER = (EMBED, SHIFT, SCALE, OFFSET, PROJECT)
"""Tensors of the router over head dimensions, in the order in which they are used."""


@dataclass(frozen=True)
class OverlappingLayer:
    """An FFN of which a token runs one expert, and attention of which it uses some dimensions.

    Either may be left as it was.
    """

    kind: ClassVar[str] = "overlapping"

    experts_NW: Tensor | None = None
    """int64: the neurons of each expert, in rising order."""
    router_ND: Tensor | None = None
    """float32: one row an expert."""
    materialized: bool = False
    """Each expert holds a copy of its weights."""
    rows: dict[str, Tensor] = field(default_factory=dict)
    """int64: rows that stay, by attention projection; its other outputs are zero."""
    columns: Tensor | None = None
    """int64: columns that stay of attention's output projection."""
    head_router: dict[str, Tensor] = field(default_factory=dict)
    """float32: by the names of HEAD_ROUTER: (E, D), (E,), (E,), (E,), (A, E)."""
    head_top_k: int = 0
    """Dimensions of a head that a token uses of values and outputs; 0 for all."""
    mask_outputs: bool = True
    """A query's choice applies to what it reads, as each key's does to its value."""

    def __post_init__(self) -> None:
        if (self.experts_NW is None) != (self.router_ND is None):
            raise ValueError("experts and their router come together")
        if set(self.head_router) != (set(HEAD_ROUTER) if self.head_top_k else set()):
            raise ValueError("head_top_k and a router of head dimensions come together")

    def header(self) -> dict[str, Any]:
        count, width = (0, 0) if self.experts_NW is None else self.experts_NW.shape
        return {
            "kind": self.kind,
            "backbone": 0,
            "petals": [width] * count,
            "top_k": 1,
            "routing": "cosine",
            "materialized": self.materialized,
            "rows": {name: rows.numel() for name, rows in self.rows.items()},
            "columns": None if self.columns is None else self.columns.numel(),
            "head_top_k": self.head_top_k,
            "embedding": self.head_router[SHIFT].numel() if self.head_top_k else 0,
            "mask_outputs": self.mask_outputs,
        }

    def tensors(self) -> dict[str, Tensor]:
        single = {"experts": self.experts_NW, "router": self.router_ND, "columns": self.columns}
        return {
            **{name: tensor for name, tensor in single.items() if tensor is not None},
            **{f"rows.{name}": rows for name, rows in self.rows.items()},
            **{f"head.{name}": tensor for name, tensor in self.head_router.items()},
        }

    @classmethod
    def load(cls, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> OverlappingLayer:
        def part(start: str) -> dict[str, Tensor]:
            return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}

        return cls(
            experts_NW=tensors.get("experts"),
            router_ND=tensors.get("router"),
            materialized=header["materialized"],
            rows=part("rows."),
            columns=tensors.get("columns"),
            head_router=part("head."),
            head_top_k=header["head_top_k"],
            mask_outputs=header["mask_outputs"],
        )
