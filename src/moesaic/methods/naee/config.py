"""The options of expert pruning and of dynamic skipping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from moesaic.config import MethodConfig, option
from moesaic.errors import MoesaicError
from moesaic.foreign import Values
from moesaic.methods.naee.criteria import CRITERIA, NAEE, Compared, Criterion


@dataclass(frozen=True)
class PruneConfig(MethodConfig):
    """Options of expert pruning. The defaults are the paper's, or our decision."""

    verb = "prune"
    name = "naee"
    title = "NAEE"
    paper = NAEE
    implementation = "moesaic.methods.naee.pruning:Pruner"
    variants: ClassVar[Mapping[str, str]] = Compared()
    bundles: ClassVar[Mapping[str, Values]] = {"best": {"refit": True}}

    keep: float = option(
        6,
        "Experts that stay in each layer; their mean, if counts may differ.",
        minimum=1,
        required=True,
    )
    criterion: str = option(
        "reconstruction", "How it is decided which experts stay.", choices=tuple(CRITERIA)
    )
    progressive: bool = option(
        False, "Each layer sees the tokens as the layers pruned before it pass them on."
    )
    uniform: bool = option(
        True,
        "Equally many experts in every layer. Without, the result is moesaic_<base>.",
        flag="--uniform/--non-uniform",
        beyond="counts that differ by layer",
    )
    padding: bool = option(
        False,
        "Fill unequal counts up with experts that are never chosen, so that the result is of the "
        "architecture's own class.",
    )
    refit: bool = option(
        False,
        "Solve for new down projections of the experts that stay, nearest to the original's "
        "output.",
        beyond="refitted down projections",
    )
    sum_batch_norms: bool = option(
        False, "Sum the norms of batches, as the paper's released code does.", seldom=True
    )
    exhaustive_limit: int = option(
        13_000,
        "The most sets of experts that are all tried; C(16, 8) = 12870.",
        minimum=0,
        seldom=True,
    )
    gram_mb: int = option(
        256, "MiB for one layer's Gram matrices, of reconstruction.", minimum=1, seldom=True
    )
    seed: int = option(0, "Seed of random choice.", seldom=True)

    @property
    def chosen(self) -> Criterion:
        """The criterion itself."""
        return CRITERIA[self.criterion]

    @property
    def credit(self) -> str:
        return self.chosen.paper

    @property
    def base_label(self) -> str:
        return self.chosen.title

    @property
    def gram_bytes(self) -> int:
        """Memory for one layer's Gram matrices; 0 where the criterion needs none."""
        return self.gram_mb << 20 if self.chosen.gram else 0

    def check(self) -> None:
        criterion, by = self.chosen, f"criterion {self.criterion!r}"
        if self.uniform and self.keep != int(self.keep):
            raise MoesaicError(
                f"keep {self.keep:g} is not a whole number; a mean needs uniform=False."
            )
        if self.padding and self.uniform:
            raise MoesaicError("padding fills unequal counts up: it needs uniform=False.")
        if not self.uniform and not criterion.observes:
            raise MoesaicError(
                f"{by} gives no loss by which layers could be compared; uniform=False needs "
                "another."
            )
        if not self.uniform and self.progressive:
            raise MoesaicError(
                "progressive decides a layer before the next is seen; uniform=False needs all."
            )
        if self.progressive and not criterion.observes:
            raise MoesaicError(f"{by} sees no tokens: progressive changes nothing.")
        if self.refit and criterion.merges:
            raise MoesaicError(f"{by} makes experts of its own: they are not refitted.")
        if self.progressive and criterion.merges:
            raise MoesaicError(
                "progressive passes tokens on without the experts that go, not with merged ones: "
                f"{by} decides every layer on the original's tokens."
            )


@dataclass(frozen=True)
class SkipConfig(MethodConfig):
    """Options of dynamic skipping. The defaults are the paper's."""

    verb = "skip"
    name = "naee"
    title = "NAEE"
    paper = NAEE
    implementation = "moesaic.methods.naee.skipping:Skipper"

    quantile: float = option(
        0.5,
        "The quantile of the ratio of weights that beta is; 0.5 is the paper's median.",
        minimum=0,
    )
    calls: float | None = option(
        None, "The mean number of experts that a token should run, instead.", minimum=1
    )
    rule: Literal["auto", "top2", "tail"] = option(
        "auto", "The rule of skipping; auto: top2 where a token runs two experts, else tail."
    )

    def check(self) -> None:
        if self.quantile > 1:
            raise MoesaicError(f"quantile {self.quantile:g} must be from 0 to 1.")
