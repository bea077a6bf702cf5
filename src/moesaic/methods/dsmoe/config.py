"""The options of DSMoE. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from moesaic.config import Former, MethodConfig, option, seed_option
from moesaic.errors import MoesaicError
from moesaic.foreign import JSON

Variant = Literal["full", "no-straight-through", "no-piecewise", "top-k"]


@dataclass(frozen=True)
class DSMoEConfig(MethodConfig):
    """Options of DSMoE. The defaults are the paper's but for the schedule; see ``bundles``."""

    verb: ClassVar[str] = "carve"
    name: ClassVar[str] = "dsmoe"
    title: ClassVar[str] = "DSMoE"
    paper: ClassVar[str] = (
        "Lv et al., DSMoE: Matrix-Partitioned Experts with Dynamic Routing for "
        "Computation-Efficient Dense LLMs"
    )
    implementation: ClassVar[str] = "moesaic.methods.dsmoe.method:DSMoE"
    variants: ClassVar[dict[str, str]] = {
        "top-k": "a fixed number of blocks (LLaMA-MoE)",
        "no-straight-through": "DSMoE without straight-through",
        "no-piecewise": "DSMoE without the threshold in training",
    }
    former: ClassVar[Mapping[str, Former]] = {"data": Former("train")}
    bundles: ClassVar[dict[str, JSON]] = {
        "paper": {"steps": 305_176, "batch": 32, "length": 1024, "lr": 2e-5, "gain": 0.3}
    }

    active: float | None = option(
        None,
        "Target active ratio of the whole model, reached by moving lambda. Default: no target.",
        above=0,
        maximum=1,
    )
    experts: int = option(8, "Blocks of a layer.", minimum=1)
    layers: str | tuple[int, ...] = option(
        "all", "Layers to carve: all, last-half, uniform, early-middle, or numbers such as 4,5,6."
    )
    variant: Variant = option(
        "full",
        "full; the paper's ablations no-straight-through (G for S in Eq. 11) and no-piecewise "
        "(Eq. 20); or top-k (LLaMA-MoE).",
        seldom=True,
    )
    tau: float = option(0.5, "Threshold of the gates.", minimum=0, below=1, seldom=True)
    sparsity: float = option(
        1.0, "lambda: the weight of the sparsity loss.", minimum=0, seldom=True
    )
    gain: float = option(
        1.0,
        "lambda grows by this in a step in which all blocks are active and none should be; 0.3 for "
        "many thousand steps.",
        minimum=0,
        seldom=True,
    )
    top_k: int | None = option(
        None, "top-k: blocks that a token runs. Default: as many as active asks for."
    )
    top_k_scale: float = option(1.0, "top-k: the sum of a token's weights.", minimum=0, seldom=True)
    balance: float = option(
        0.01, "top-k: the weight of the load-balance loss.", minimum=0, seldom=True
    )
    train: str = option(
        "",
        "Text to train on, a mix of weights included. Default: the calibration text.",
        parse="text",
        seldom=True,
    )
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
    lr: float = option(
        1e-3,
        "The highest learning rate; 2e-5 for the paper's number of steps.",
        minimum=0,
        seldom=True,
    )
    warmup: float = option(
        0.1, "Share of the steps in which the rate rises.", minimum=0, below=1, seldom=True
    )
    weight_decay: float = option(0.0, "AdamW's weight decay.", minimum=0, seldom=True)
    clip: float = option(
        1.0,
        "The norm that gradients are clipped at, of which the paper says nothing; 0 for never.",
        minimum=0,
        seldom=True,
    )
    recompute: bool = option(
        False, "Compute activations again in the backward pass, to save memory.", seldom=True
    )
    save_every: int = option(100, "Steps between checkpoints.", minimum=1, seldom=True)
    seed: int = seed_option("Seed of the gates' start and of the order of the text.", seldom=True)

    def check(self) -> None:
        if self.top_k is not None and not 0 < self.top_k <= self.experts:
            raise MoesaicError(f"top_k {self.top_k} is not from 1 to experts {self.experts}.")
