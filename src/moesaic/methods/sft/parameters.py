"""What may train of a converted model.

condensed   Cao et al. (CD-MoE, Sec. 4.3): the projections of the condensed layers; gate values,
            attention and everything else stay. Rate 1e-4, 10 % warm-up, cosine.
routers     the routers alone, towards the original model's next-token distribution (router
            knowledge distillation); of carved models, too, through the choice (straight-through).
lora        low-rank updates of every linear module of the decoder layers, merged at the end.
all         everything.

The released code of CD-MoE has no effective warm-up and predicts prompts and padding; we do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from moesaic.arch.dense import Arch
from moesaic.errors import MoesaicError
from moesaic.arch.mixture import MoEArch, MoEFFN
from moesaic.nn import CarvedFFN
from moesaic.plan import CondensedLayer, Plan
from moesaic.train import Schedule

WHATS = ("condensed", "routers", "lora", "all")


@dataclass(frozen=True)
class TuneConfig:
    """Options of training. The defaults are the paper's, or our decision."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    what: str = "condensed"
    """condensed, routers, lora or all."""
    data: str = ""
    """Text to train on; rows with a question and an answer are trained on the answer only."""
    teacher: str = ""
    """The original model: its next-token distribution is then the target, not the text's. Routers
    need it."""
    length: int = 512
    """Tokens of a text at most."""
    steps: int | None = None
    """Optimizer steps; None for ``epochs``."""
    epochs: float = 1.0
    batch: int = 8
    """Texts a process takes at a time."""
    accumulate: int = 1
    """Batches before the weights move."""
    lr: float = 1e-4
    warmup: float = 0.1
    weight_decay: float = 0.0
    rank: int = 8
    """lora: the rank of the updates."""
    save_every: int = 100
    """Steps between checkpoints."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.what not in WHATS:
            raise MoesaicError(f"Unknown --what {self.what!r}; choose from {', '.join(WHATS)}.")
        if self.what == "routers" and not self.teacher:
            raise MoesaicError("--what routers learns from the original model: name it, --teacher.")
        if not 0 <= self.warmup < 1:
            raise MoesaicError(f"--warmup {self.warmup:g} is a share of the steps, below 1.")
        for name in ("length", "batch", "accumulate", "rank", "save_every"):
            if getattr(self, name) < 1:
                raise MoesaicError(f"--{name.replace('_', '-')} must be at least 1.")

    @property
    def schedule(self) -> Schedule:
        """What the training loop needs to know."""
        return Schedule.of(self)


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def condensed_layers(plan: Plan) -> list[int]:
    """The layers that routed once and are condensed now."""
    return [
        i
        for i, layer in plan.layers.items()
        if isinstance(layer, CondensedLayer) and plan.base.experts[i] and layer.width
    ]


def trainable(
    model: Any, arch: Arch, what: str, plan: Plan | None = None
) -> dict[str, nn.Parameter]:
    """The parameters that train, by name.

    Raises:
        MoesaicError: the model has none of what was asked for.
    """
    if what == "all":
        return dict(model.named_parameters())
    if what == "condensed":
        layers = [] if plan is None else condensed_layers(plan)
        if not layers:
            raise MoesaicError("This model has no condensed layers; condense it first.")
        starts = tuple(f"{arch.ffn_prefix(i)}{name}." for i in layers for name in PROJECTIONS)
        return {n: p for n, p in model.named_parameters() if n.startswith(starts)}
    found = {
        f"{arch.ffn_prefix(i)}{name}.{n}": p
        for i, layer in enumerate(arch.layers(model))
        for name, router in _routers(arch, layer)
        for n, p in router.named_parameters(recurse=False)
    }
    if not found:
        raise MoesaicError("This model has no routers that learn.")
    return found


def _routers(arch: Arch, layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The router of a layer and its name, if it has one that learns."""
    if isinstance(arch, MoEArch):
        view = arch.view(layer)
        if isinstance(view, MoEFFN):
            yield arch.router, view.router
        return
    ffn = arch.ffn_of(layer)
    if isinstance(ffn, CarvedFFN) and ffn.router is not None and ffn.router.routing != "random":
        yield "router", ffn.router
