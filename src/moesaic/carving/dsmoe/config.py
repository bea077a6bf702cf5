"""Options of DSMoE. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from moesaic.config import MethodConfig, option, seed_option
from moesaic.types import JSON

Variant = Literal["full", "no-straight-through", "no-piecewise", "top-k"]


@dataclass(frozen=True)
class DSMoEConfig(MethodConfig):
    """Options of DSMoE. The defaults are the paper's except for the schedule; see ``bundles``."""

    verb: ClassVar[str] = "carve"
    name: ClassVar[str] = "dsmoe"
    title: ClassVar[str] = "DSMoE"
    paper: ClassVar[str] = (
        "Lv et al., DSMoE: Matrix-Partitioned Experts with Dynamic Routing for "
        "Computation-Efficient Dense LLMs"
    )
    implementation: ClassVar[str] = "moesaic.carving.dsmoe.method:DSMoE"
    library = ("accelerate", "train")
    variants: ClassVar[dict[str, str]] = {
        "top-k": "a fixed number of blocks (LLaMA-MoE)",
        "no-straight-through": "DSMoE without straight-through",
        "no-piecewise": "DSMoE without the threshold in training",
    }
    bundles: ClassVar[dict[str, JSON]] = {
        "paper": {"steps": 305_176, "batch": 32, "length": 1024, "lr": 2e-5}
    }

    active: float | None = option(
        None,
        "Target active ratio of the whole model, reached by moving lambda. Default: no target.",
        above=0,
        maximum=1,
    )
    experts: int = option(8, "Blocks of a layer.", minimum=1)
    variant: Variant = option(
        "full",
        "full; the paper's ablations no-straight-through (G for S in Eq. 11) and no-piecewise "
        "(Eq. 20); or top-k (LLaMA-MoE).",
        seldom=True,
    )
    tau: float = option(0.5, "Threshold of the gates.", minimum=0, below=1, seldom=True)
    length: int = option(256, "Tokens of a window; 1024 in the paper.", minimum=1, seldom=True)
    steps: int = option(
        100,
        "Optimizer steps. By default 204,800 tokens are trained on, of 300,000 that ship; the "
        "paper's are 10 billion.",
        minimum=1,
    )
    batch: int = option(
        8, "Windows that a process takes at a time; 32 in the paper.", minimum=1, seldom=True
    )
    accumulate: int = option(1, "Batches before the weights move.", minimum=1, seldom=True)
    recompute: bool = option(
        False, "Compute activations again in the backward pass, to save memory.", seldom=True
    )
    lr: float = option(
        1e-3,
        "The highest learning rate; 2e-5 for the paper's number of steps.",
        minimum=0,
        seldom=True,
    )
    save_every: int = option(100, "Steps between checkpoints.", minimum=1, seldom=True)
    seed: int = seed_option("Seed of the gates' start and of the order of the text.", seldom=True)

    sparsity: ClassVar[float] = 1.0
    """Weight lambda of the sparsity loss, unless ``active`` adapts it."""
    balance: ClassVar[float] = 0.01
    """Weight of the load-balance loss of top-k."""
    warmup: ClassVar[float] = 0.1
    weight_decay: ClassVar[float] = 0.0
    clip: ClassVar[float] = 1.0
    """Norm at which gradients are clipped; not given in the paper."""

    @property
    def gain(self) -> float:
        """Increase of lambda in a step in which all blocks are active and none should be."""
        return 0.3 if self.steps > 10_000 else 1.0
