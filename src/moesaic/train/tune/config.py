"""Options of ``tune``. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from moesaic.config import MethodConfig, option, seed_option
from moesaic.errors import MoesaicError
from moesaic.types import JSON

TRAINED = {
    "condensed": "the condensed layers",
    "attention": "the condensed layers' attention",
    "routers": "the routers",
    "lora": "low-rank updates",
    "all": "all weights",
}
"""Trainable parameters in words, by the option ``what``."""


@dataclass(frozen=True)
class TuneConfig(MethodConfig):
    """Options of ``tune``. The defaults are CD-MoE's, or our decision."""

    verb: ClassVar[str] = "tune"
    name: ClassVar[str] = "sft"
    title: ClassVar[str] = "supervised fine-tuning"
    paper: ClassVar[str] = ""
    implementation: ClassVar[str] = "moesaic.train.tune.method:Tuning"
    library = ("accelerate", "train")

    bundles: ClassVar[dict[str, JSON]] = {
        "paper": {"what": "condensed", "lr": 1e-4, "warmup": 0.1, "weight_decay": 0.0}
    }

    what: Literal["condensed", "attention", "routers", "lora", "all"] = option(
        "condensed",
        "condensed: the condensed layers' projections; attention: their attention, which is what "
        "Layer Drop leaves; routers; lora: low-rank updates, merged at the end; all: everything.",
    )
    train: str = option(
        "",
        "Text to train on: as for calibration; rows with a question and an answer are trained on "
        "the answer only. A mix needs steps. Default: text that ships.",
        parse="text",
    )
    teacher: str = option(
        "",
        "Learn from this original's next-token distribution, not from the text; routers need it.",
        metavar="MODEL",
    )
    length: int = option(512, "Tokens of a text at most.", minimum=2)
    steps: int | None = option(None, "Optimizer steps. Default: epochs.", minimum=1)
    epochs: float = option(1.0, "Times that the text passes.", above=0, seldom=True)
    batch: int = option(8, "Texts that a process takes at a time.", minimum=1)
    accumulate: int = option(1, "Batches before the weights move.", minimum=1, seldom=True)
    lr: float = option(1e-4, "The highest learning rate.", minimum=0)
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
    rank: int = option(8, "lora: the rank of the updates.", minimum=1)
    save_every: int = option(100, "Steps between checkpoints.", minimum=1, seldom=True)
    seed: int = seed_option()

    def check(self) -> None:
        if self.what == "routers" and not self.teacher:
            raise MoesaicError("what routers learns from the original model: name it as teacher.")

    @property
    def base_label(self) -> str:
        """Name in titles, such as ``training of the routers``; it credits no paper."""
        return f"training of {TRAINED[self.what]}"
