"""Options of ``condense``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

from moesaic.config import MethodConfig, option, seed_option
from moesaic.errors import MoesaicError
from moesaic.families import Family, Shape
from moesaic.types import JSON, Values

CD_MOE = (
    "Cao et al., \"Condense, Don't Just Prune: Enhancing Efficiency and Performance in MoE Layer "
    'Pruning" (TMLR 2025)'
)
DROP = (
    'He et al., "Demystifying the Compression of Mixture-of-Experts Through a Unified Framework" '
    "(2024)"
)
KEEPS = {
    "shared": ("CD-MoE-S", CD_MOE),
    "shared+routed": ("CD-MoE-SR", CD_MOE),
    "attention": ("Layer Drop", DROP),
    "nothing": ("Block Drop", DROP),
}
"""Name and paper of the method, by the value of ``--keep``."""
WITHOUT_FFN = ("attention", "nothing")
"""Values of ``--keep`` that leave no FFN in a layer, so there is nothing to refit."""
SEARCHED = 8
"""Most layers for which `fit` uses the racing search; deeper models are ranked in one pass."""


@dataclass(frozen=True)
class CondenseConfig(MethodConfig):
    """Options of ``condense``.

    The defaults are CD-MoE's except for the refit; see ``bundles``. One of ``count``, ``memory``
    and ``active`` is the stopping rule; without any, one layer is condensed.
    """

    verb = "condense"
    name = "cd-moe"
    title = "CD-MoE"
    paper = CD_MOE
    implementation = "moesaic.methods.condense.method:Condenser"
    bundles: ClassVar[Mapping[str, Values]] = {
        "best": {},
        "paper": {
            "metric": "js",
            "expert_search": "greedy",
            "layer_search": "greedy",
            "refit": False,
        },
    }
    window = 512

    count: int | None = option(
        None,
        "Layers to condense; 1 where memory and active are not given either.",
        minimum=0,
        idle=(0, "condenses nothing"),
    )
    memory: int | None = option(
        None, "Condense until the weights fit, as in 12GB.", minimum=0, parse="bytes"
    )
    active: int | None = option(
        None,
        "Condense until a token uses at most this many parameters, embeddings and head included.",
        minimum=0,
    )
    keep: Literal["shared", "shared+routed", "attention", "nothing"] = option(
        "shared", "What to keep of a layer; attention is Layer Drop, nothing is Block Drop."
    )
    experts: int | None = option(
        None,
        "Routed experts to keep with shared+routed. Default: as many as a token runs.",
        minimum=0,
    )
    metric: Literal["js", "kl", "ppl"] = option(
        "js",
        "The measure of change; ppl is for the choice of layers, and experts are chosen by js.",
        seldom=True,
    )
    expert_search: Literal["greedy", "random", "l1", "pl_alpha_hill"] = option(
        "greedy", "How the kept experts are chosen; greedy is the paper's Alg. 1.", seldom=True
    )
    layer_search: Literal["racing", "greedy", "rank", "global-rank", "cosine"] = option(
        "racing",
        "How layers are chosen; greedy is the paper's Alg. 2, which racing follows, "
        "each round on as much text as it takes; cosine is of He et al.",
        seldom=True,
    )
    candidates: tuple[int, ...] = option(
        (), "Decoder layers to choose from, such as 1,2,3. Default: all that route.", seldom=True
    )
    shared_gate: Literal["token", "mean"] = option(
        "token",
        "A gate on the shared path: token keeps it, mean fixes it at its mean.",
        seldom=True,
    )
    refit: bool | None = option(
        None,
        "Solve for the dense layers' down projections anew. Default: where it can be done.",
        beyond="refitted down projections",
    )
    seed: int = seed_option("Seed of random choices.", seldom=True)

    def __post_init__(self) -> None:
        if self.count is None and self.memory is None and self.active is None:
            object.__setattr__(self, "count", 1)
        if self.refit is None and self.keep in WITHOUT_FFN:
            object.__setattr__(self, "refit", False)
        super().__post_init__()

    def check(self) -> None:
        if sum(target is not None for target in (self.count, self.memory, self.active)) != 1:
            raise MoesaicError("count, memory and active are targets: give one of them.")
        if self.refit and self.keep in WITHOUT_FFN:
            raise MoesaicError(f"keep={self.keep} leaves nothing of the FFN: leave refit out.")
        if self.experts is not None and self.keep != "shared+routed":
            raise MoesaicError(
                "experts is the number of routed ones to keep: it needs keep=shared+routed."
            )

    @classmethod
    def families(cls, model: Shape) -> Iterator[Family[CondenseConfig]]:
        if not model.experts or not model.replaceable:
            return
        kinds = ["shared"] if model.shared else []
        kinds += [] if model.native else [*WITHOUT_FFN]
        for kind in kinds:
            most = model.layers - (model.leaders if kind == "nothing" else 0)
            options: JSON = {"keep": kind, "refit": False}
            options["layer_search"] = "rank" if kind == "shared" else "cosine"
            if model.native:  # such a result has no gate token by token
                options["shared_gate"] = "mean"
            search = "racing" if model.layers <= SEARCHED else options["layer_search"]
            careful = partial(replace, refit=kind == "shared", layer_search=search)
            every = [cls(count=n, **options) for n in range(most, 0, -1)]
            parts = {max(1, round(share * model.layers)) for share in (1 / 6, 1 / 3, 1 / 2)}
            few = [c for c in every if c.count in parts - {model.layers}]
            yield Family(f"condense to {kind}", every, careful, few, priced=3)

    @property
    def credit(self) -> str:
        return KEEPS[self.keep][1]

    @property
    def base_label(self) -> str:
        return KEEPS[self.keep][0]

    @staticmethod
    def check_compared(name: str, condensed: int) -> None:
        """Refuse to compare more layers than are condensed.

        Raises:
            MoesaicError: ``name`` is above ``condensed``.
        """
        if int(name) > condensed:
            raise MoesaicError(
                f"compare {name!r}: give a number of layers, at most the {condensed} condensed."
            )

    def compared(self, name: str) -> str:
        if not name.isdecimal():
            raise MoesaicError(f"compare {name!r}: give a number of layers.")
        if self.count is not None:
            self.check_compared(name, self.count)
        return f"{name} of the layers condensed, the first chosen"
