"""What methods that train share: their text, one call of the one loop, and what that takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
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
    """Text to train on, in windows or rows as :func:`~moesaic.train.text.training_text` has it.

    Args:
        job: the model, whose tokenizer and vocabulary count.
        config: with ``length``, ``steps`` and ``seed``.
        text: its source, or itself.
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
        job: the model, and where it is trained.
        config: the method's, schedule included.
        model: live.
        trainable: the parameters that train, by name.
        examples: what is trained on.
        folder: for checkpoints; None keeps none.
        objective: what to minimise; None for the next-token loss.
        request: what identifies the run beside model and config.

    Returns:
        the figures of every step, as :func:`moesaic.train.loop.train` has them.

    Raises:
        MoesaicError: nothing is left to train, or the folder holds another run.
    """
    from moesaic.train.loop import train  # imports the trainer, which a dry run does without

    return train(
        model,
        examples,
        Schedule.of(config),
        folder,
        trainable=trainable,
        request=job.request({"verb": config.verb, "config": asdict(config), **(request or {})}),
        objective=objective,
        device=job.device,
        track=job.args.track,
    )
