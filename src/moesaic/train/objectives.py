"""What training minimises, how long and how fast: all of it that imports no trainer.

Whoever only says what would be trained, as a dry run does, needs no more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.config import MethodConfig
from moesaic.data.text import IGNORED
from moesaic.losses import log_probabilities, next_token_loss
from moesaic.train.text import Example
from moesaic.types import Config, Model, logits_alone


@dataclass(frozen=True)
class Schedule:
    """How long, how much at a time, and how fast."""

    steps: int | None
    """Optimizer steps; None for ``epochs``."""
    batch: int
    """Texts a process takes at a time."""
    accumulate: int
    """Batches before the weights move."""
    lr: float
    warmup: float
    """The share of the steps in which the rate rises from 0."""
    weight_decay: float
    seed: int
    save_every: int
    """Steps between checkpoints."""
    epochs: float = 1.0
    decay: str = "cosine"
    """The rate after the warm-up: cosine, to 0, or constant."""
    recompute: bool = False
    """Gradient checkpointing: half as much again in time, for much less memory."""
    clip: float = 1.0
    """The norm that gradients are clipped at; 0 for never."""

    @classmethod
    def of(cls, config: MethodConfig) -> Schedule:
        """The schedule of a method's config, field by field."""
        names = [field.name for field in fields(cls) if hasattr(config, field.name)]
        return cls(**{name: getattr(config, name) for name in names})


def checkpointing(model: nn.Module, do: str) -> Callable[..., None]:
    """transformers' method to enable or disable it, by its name of today or its old one."""
    names = (f"{kind}_checkpointing_{do}" for kind in ("activation", "gradient"))
    return next(getattr(model, n) for n in names if hasattr(model, n))


def collate(examples: Sequence[Example]) -> dict[str, Tensor]:
    """A batch, padded on the right; padding is neither seen nor predicted.

    Returns:
        ``input_ids``, ``labels`` and ``attention_mask`` (B, L).

    >>> batch = collate([{"input_ids": [5, 6], "labels": [-100, 6]},
    ...                  {"input_ids": [7], "labels": [7]}])
    >>> batch["labels"].tolist(), batch["attention_mask"].tolist()
    ([[-100, 6], [7, -100]], [[1, 1], [1, 0]])
    """
    longest = max(len(e["input_ids"]) for e in examples)

    def rows(name: str, fill: int) -> Tensor:
        return torch.tensor([e[name] + [fill] * (longest - len(e[name])) for e in examples])

    mask = [[1] * len(e["input_ids"]) + [0] * (longest - len(e["input_ids"])) for e in examples]
    return {
        "input_ids": rows("input_ids", 0),
        "labels": rows("labels", IGNORED),
        "attention_mask": torch.tensor(mask),
    }


# --- what is minimised ---------------------------------------------------------------------------


@dataclass
class Objective(ABC):
    """A loss to minimise."""

    state: dict[str, float] = field(default_factory=dict, init=False)
    """Values that it adapts; a resumed run continues from them."""

    @abstractmethod
    def __call__(
        self, model: nn.Module, inputs: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch, and figures to log, as sums over the tokens of :func:`predicting`.

        Minimised and logged is their mean over all such tokens of a step.
        """

    def stepped(self, figures: dict[str, float]) -> dict[str, float]:
        """Takes the figures of a step that is done; may adapt itself. Returns more to log."""
        return {}


def distillation_loss(student_BLV: Tensor, teacher_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """Sum of KL(teacher || student) of the next token, over the tokens that have a label.

    >>> logits = torch.randn(1, 3, 5)
    >>> distillation_loss(logits, logits, torch.tensor([[1, 2, 3]])).item()
    0.0
    """
    student, teacher = (log_probabilities(x, labels_BL) for x in (student_BLV, teacher_BLV))
    return F.kl_div(student, teacher, reduction="sum", log_target=True)


class NextToken(Objective):
    """The next token of the text, and nothing that a config asks to be added, such as the loss that
    balances a mixture's routers."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._alone = logits_alone(config)

    def __call__(
        self, model: nn.Module, inputs: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        labels = inputs.pop("labels")
        return next_token_loss(model(**inputs, **self._alone).logits, labels), {}


class Distillation(Objective):
    """The target is a teacher's next-token distribution."""

    def __init__(self, teacher: Model) -> None:
        super().__init__()
        self.teacher = teacher.eval()

    def __call__(
        self, model: nn.Module, inputs: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        with torch.no_grad():
            taught = self.teacher.to(logits.device)(**inputs).logits
        return distillation_loss(logits, taught, labels), {}
