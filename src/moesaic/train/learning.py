"""Objectives and schedules of training, its text, and one call of the training loop.

Imports no trainer: a dry run needs no more than this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.arch.dense import Arch
from moesaic.config import MethodConfig
from moesaic.data.text import IGNORED
from moesaic.losses import log_probabilities, next_token_loss
from moesaic.observation.job import Job
from moesaic.train.text import Example, Examples, training_text
from moesaic.types import Config, Model, Values, logits_alone


@dataclass(frozen=True)
class Schedule:
    """Number of steps, batch sizes and learning rate of a training run."""

    steps: int | None
    """Optimizer steps; None for ``epochs``."""
    batch: int
    """Texts per process and batch."""
    accumulate: int
    """Batches per optimizer step."""
    lr: float
    warmup: float
    """Share of the steps in which the rate rises from 0."""
    weight_decay: float
    seed: int
    save_every: int
    """Steps between checkpoints."""
    epochs: float = 1.0
    decay: str = "cosine"
    """Learning rate after the warm-up: ``cosine``, to 0, or ``constant``."""
    recompute: bool = False
    """True for gradient checkpointing: 50 % more time, for much less memory."""
    clip: float = 1.0
    """Norm at which gradients are clipped; 0 for never."""

    @classmethod
    def of(cls, config: MethodConfig) -> Schedule:
        """Return the schedule of a method's config, field by field."""
        names = [field.name for field in fields(cls) if hasattr(config, field.name)]
        return cls(**{name: getattr(config, name) for name in names})


def checkpointing(model: nn.Module, do: str) -> Callable[..., None]:
    """Return transformers' method to enable or disable checkpointing, by either name."""
    names = (f"{kind}_checkpointing_{do}" for kind in ("activation", "gradient"))
    return next(getattr(model, n) for n in names if hasattr(model, n))


def collate(examples: Sequence[Example]) -> dict[str, Tensor]:
    """Return a batch, padded on the right; padding is neither seen nor predicted.

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


# --- objectives ----------------------------------------------------------------------------------


Tensors = dict[str, Tensor]
"""Batch as arguments of a model, or figures of one, by name."""


@dataclass
class Objective(ABC):
    """Loss to minimise."""

    state: dict[str, float] = field(default_factory=dict, init=False)
    """Values that the objective adapts; a resumed run continues from them."""

    @abstractmethod
    def __call__(self, model: nn.Module, inputs: Tensors) -> tuple[Tensor, Tensors]:
        """Return the loss of a batch, and figures to log, as sums over the tokens of
        :func:`predicting`.

        The loop minimises and logs their mean over all such tokens of a step.
        """

    def after_step(self, figures: dict[str, float]) -> dict[str, float]:
        """Update the state from the figures of a finished step; return further figures to log."""
        return {}


def distillation_loss(student_BLV: Tensor, teacher_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """Return the sum of KL(teacher || student) of the next token, over the tokens that have a
    label.

    >>> logits = torch.randn(1, 3, 5)
    >>> distillation_loss(logits, logits, torch.tensor([[1, 2, 3]])).item()
    0.0
    """
    student, teacher = (log_probabilities(x, labels_BL) for x in (student_BLV, teacher_BLV))
    return F.kl_div(student, teacher, reduction="sum", log_target=True)


class NextToken(Objective):
    """Next-token loss without terms that a config may add, such as a load-balance loss."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._alone = logits_alone(config)

    def __call__(self, model: nn.Module, inputs: Tensors) -> tuple[Tensor, Tensors]:
        labels = inputs.pop("labels")
        return next_token_loss(model(**inputs, **self._alone).logits, labels), {}


class Distillation(Objective):
    """KL from a teacher's next-token distribution."""

    def __init__(self, teacher: Model) -> None:
        super().__init__()
        self.teacher = teacher.eval()

    def __call__(self, model: nn.Module, inputs: Tensors) -> tuple[Tensor, Tensors]:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        with torch.no_grad():
            taught = self.teacher.to(logits.device)(**inputs).logits
        return distillation_loss(logits, taught, labels), {}


# --- one call of the loop ------------------------------------------------------------------------


def examples_of(job: Job[Arch], config: MethodConfig, **how: bool) -> Examples:
    """Return the text that a run trains on: what the caller passed, else the option ``train``, else
    the calibration text.

    Args:
        job: the model, whose tokenizer and vocabulary are used.
        config: has ``length``, ``steps`` and ``seed``.
        how: ``answers`` and ``stream`` of :func:`~moesaic.train.text.training_text`.
    """
    options: Any = config
    text = job.args.text
    if text is None:
        text = getattr(config, "train", job.args.calibration.source)
    return training_text(
        text,
        job.tokenizer_for(text),
        options.length,
        steps=options.steps,
        seed=options.seed,
        config=job.original.config,
        **how,
    )


def learn(
    job: Job[Arch],
    config: MethodConfig,
    model: nn.Module,
    trainable: Mapping[str, nn.Parameter],
    examples: Examples,
    folder: Path | None,
    *,
    objective: Objective | None = None,
    request: Values | None = None,
) -> list[dict[str, float]]:
    """Train some of a model's parameters in place, by a method's own schedule.

    Arguments, result and errors are those of :func:`moesaic.train.loop.train`; ``request`` is what
    identifies the run besides model and config.
    """
    from moesaic.train.loop import train  # imports the trainer, which a dry run does not need

    return train(
        model,
        examples,
        Schedule.of(config),
        folder,
        trainable=trainable,
        request=job.request({**job.request_of(config), **(request or {})}),
        objective=objective,
        device=job.device,
        track=job.args.track,
    )
