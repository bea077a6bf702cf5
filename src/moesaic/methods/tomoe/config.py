"""The options of ToMoE. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from moesaic.config import MethodConfig, option, seed_option
from moesaic.foreign import JSON

PUBLISHED: JSON = {
    "balance": 1.0,
    "head_bias": 3.0,
    "neuron_masks": "projections",
    "noise": True,
    "clip": 0.0,
    "steps": 10_000,
    "batch": 1,
    "length": 2048,
    "lr": 1e-3,
    "decay": "constant",
}
"""The paper's objective, start, masks, result and schedule (App. C; a process trains on one text at
a time) wherever our defaults are others."""


@dataclass(frozen=True)
class ToMoEConfig(MethodConfig):
    """Options of ToMoE. The defaults are the paper's, or our decision."""

    verb: ClassVar[str] = "carve"
    name: ClassVar[str] = "tomoe"
    title: ClassVar[str] = "ToMoE"
    paper: ClassVar[str] = (
        "Gao et al., ToMoE: Converting Dense Large Language Models to Mixture-of-Experts through "
        "Dynamic Structural Pruning, TMLR 2025"
    )
    implementation: ClassVar[str] = "moesaic.methods.tomoe.method:ToMoE"
    variants: ClassVar[dict[str, str]] = {"more": "MoRE", "static": "static pruning"}
    bundles: ClassVar[dict[str, JSON]] = {"paper": PUBLISHED}

    active: float = option(
        0.6,
        "Target active ratio: the share of the projections' parameters that a token uses.",
        above=0,
        maximum=1,
    )
    experts: int = option(8, "Experts of a layer.", minimum=1, maximum=64)
    attention: Literal["routed", "none"] = option(
        "routed",
        "routed: each token chooses dimensions of values and outputs; none: attention stays.",
        seldom=True,
    )
    neuron_masks: Literal["hidden", "projections"] = option(
        "hidden",
        "hidden: an expert's mask multiplies hidden activations; projections: what gate and up "
        "write, too, Eq. 2's three places.",
        seldom=True,
    )
    parameters: float = option(16.0, "alpha, the weight of the budget R_P.", minimum=0, seldom=True)
    union: float = option(
        2.0, "beta, the weight of the union of experts R_U.", minimum=0, seldom=True
    )
    balance: float = option(
        0.125,
        "gamma, the weight of the load balance R_L (Eq. 9); 1 in the paper.",
        minimum=0,
        seldom=True,
    )
    tau: float = option(0.4, "Temperature of the straight-through masks.", above=0, seldom=True)
    bias: float = option(
        3.0, "b: with it every expert starts as the whole FFN (Eq. 15).", seldom=True
    )
    head_bias: float = option(6.0, "b of attention's dimensions; 3 in the paper.", seldom=True)
    noise: bool = option(
        False,
        "A result tosses, as the paper's: its experts are one toss, its routers toss for each "
        "token; the budget counts maxima over tosses, and the ratio stays where that leaves it.",
        seldom=True,
    )
    materialize: bool = option(
        False,
        "Give every expert a copy of its weights: faster, and larger.",
        seldom=True,
    )
    steps: int = option(
        800,
        "Optimizer steps. By default 204,800 tokens are trained on, of 300,000 that ship; the "
        "paper's are 20 million.",
        minimum=1,
    )
    batch: int = option(1, "Texts that a process takes at a time.", minimum=1, seldom=True)
    length: int = option(256, "Tokens of a text; 2048 in the paper.", minimum=2, seldom=True)
    accumulate: int = option(1, "Batches before the modules move.", minimum=1, seldom=True)
    lr: float = option(
        3e-3, "The highest learning rate; 1e-3 in the paper.", minimum=0, seldom=True
    )
    decay: Literal["constant", "cosine"] = option(
        "cosine", "constant, as in the paper, or cosine: to 0 at the last step.", seldom=True
    )
    warmup: float = option(
        0.0, "Share of the steps in which the rate rises.", minimum=0, maximum=1, seldom=True
    )
    weight_decay: float = option(0.05, "AdamW's weight decay.", minimum=0, seldom=True)
    clip: float = option(
        1.0,
        "The norm that gradients are clipped at; 0 for never, as in the released code.",
        minimum=0,
        seldom=True,
    )
    recompute: bool = option(
        False, "Compute activations again in the backward pass, to save memory.", seldom=True
    )
    save_every: int = option(100, "Steps between checkpoints.", minimum=1, seldom=True)
    seed: int = seed_option("Seed of the modules' start and of tosses.", seldom=True)
