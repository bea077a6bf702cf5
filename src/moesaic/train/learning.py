"""Helpers of methods that train: their text, and one call of the training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from moesaic.arch.dense import Arch
from moesaic.config import MethodConfig
from moesaic.data.rows import Row
from moesaic.data.text import Tokens
from moesaic.observation.job import Job
from moesaic.train.objectives import Objective, Schedule
from moesaic.train.text import Examples, training_text
from moesaic.types import Values


def examples_of(
    job: Job[Arch], config: MethodConfig, text: str | Sequence[Row] | Tokens | Tensor, **how: bool
) -> Examples:
    """Return text to train on, in windows or rows as :func:`~moesaic.train.text.training_text`
    does.

    Args:
        job: the model, whose tokenizer and vocabulary are used.
        config: has ``length``, ``steps`` and ``seed``.
        text: a source, or the text itself.
        how: ``answers`` and ``stream`` of that function.
    """
    options: Any = config
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

    Args:
        job: the model, and its device.
        config: the method's config, including the schedule.
        model: live.
        trainable: the parameters that train, by name.
        examples: training text.
        folder: folder of checkpoints; None keeps none.
        objective: loss to minimise; None for the next-token loss.
        request: what identifies the run besides model and config.

    Returns:
        the figures of every step, as :func:`moesaic.train.loop.train` returns them.

    Raises:
        MoesaicError: nothing is left to train, or the folder holds another run.
    """
    from moesaic.train.loop import train  # imports the trainer, which a dry run does not need

    return train(
        model,
        examples,
        Schedule.of(config),
        folder,
        trainable=trainable,
        request=job.request({**job.asked(config), **(request or {})}),
        objective=objective,
        device=job.device,
        track=job.args.track,
    )
