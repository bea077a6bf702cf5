"""Tasks run by lm-eval on a loaded model: its own, and questions of a local file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING

from moesaic.data.sources import HEADLINE, PRESETS, Task
from moesaic.errors import MoesaicError, with_causes
from moesaic.modules.running import always_routing
from moesaic.types import JSON, Model, Tokenizer, Values

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


def measure_tasks(
    model: Model, tokenizer: Tokenizer, tasks: Sequence[Task], limit: int | None = None
) -> dict[str, JSON]:
    """Return every task's figures, by its name; with several processes, only in the first one.

    Args:
        model: in memory.
        tokenizer: its own.
        tasks: of :func:`moesaic.data.sources.wanted_tasks`.
        limit: most questions of each; None for all.

    Returns:
        for each task ``n`` and its metrics: for multiple choice ``acc``, ``acc_norm``, ``stderr``
        (of ``acc``) and ``acc_norm_stderr``; for others their own and ``NAME_stderr``.

    Raises:
        MoesaicError: a task is unknown, its data cannot be fetched, or it has no such examples.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    check_tasks(tasks)
    rows = 16 if model.config.vocab_size <= 64_000 else 4  # logits of many tokens take memory
    lm = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=rows)
    by_task: dict[str, JSON] = {}
    for task in tasks:
        try:
            with always_routing(model), _no_commit():
                report: Values = simple_evaluate(
                    lm,
                    tasks=[task.request],
                    num_fewshot=task.shots,
                    limit=limit,
                    task_manager=task_manager(not task.questions),
                    bootstrap_iters=1000,
                    log_samples=False,
                )
        except Exception as error:
            if (reason := _not_ours(error, task.name, task.shots)) is None:
                raise
            raise MoesaicError(reason) from error
        by_task[task.name] = figures(report, task.called)
    return by_task


@contextmanager
def _no_commit() -> Iterator[None]:
    """Context in which lm-eval does not ask git for a commit: outside of a repository git prints
    an error."""
    from lm_eval import evaluator

    kept, evaluator.get_git_commit_hash = evaluator.get_git_commit_hash, lambda: None
    try:
        yield
    finally:
        evaluator.get_git_commit_hash = kept


def headline(task: Values) -> float | None:
    """Return a task's main figure; None if it has none."""
    return next((float(task[name]) for name in HEADLINE if name in task), None)


def recovery_ratio(ours: Values, theirs: Values) -> float | None:
    """Return CD-MoE's recovery ratio: the mean of the tasks' main figures over the original's.

    Args:
        ours: by task, of the result.
        theirs: of the original.

    Returns:
        the ratio; None if no task has a main figure in both.

    >>> tasks = {"a": {"acc": 0.25}, "b": {"acc": 0.5, "acc_norm": 0.75}, "c": {"acc": 1.0}}
    >>> recovery_ratio(tasks, {"a": {"acc": 0.5}, "b": {"acc_norm": 0.75}, "c": {"n": 1}})
    0.8
    """
    pairs = [(headline(task), headline(theirs.get(name, {}))) for name, task in ours.items()]
    complete = [
        (after, before) for after, before in pairs if after is not None and before is not None
    ]
    total = sum(before for _, before in complete)
    return sum(after for after, _ in complete) / total if total else None


# --- lm-eval -------------------------------------------------------------------------------------


@cache
def task_manager(named: bool) -> TaskManager:
    """Return lm-eval's index of its tasks, cached, as it takes seconds to read; or an empty one.

    Args:
        named: False for questions of a file alone, for which none of them is needed.
    """
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=named)


def check_tasks(tasks: Iterable[Task]) -> None:
    """Refuse tasks that lm-eval does not know, before anything is measured.

    Raises:
        MoesaicError: names the first, and those that are spelled alike.
    """
    named = [task.name for task in tasks if not task.questions]
    names = {*task_manager(True).all_tasks} if named else set()
    for name in named:
        if name not in names:
            close = get_close_matches(name, [*names, *PRESETS], 3, 0.7)
            perhaps = f"; perhaps {', '.join(close)}" if close else ""
            listed = ", ".join(PRESETS)
            raise MoesaicError(
                f"tasks {name!r} is no task of lm-eval{perhaps}. The papers' lists are {listed}; a "
                "file of questions ends in .jsonl."
            )


ABSENT = ("Connection", "Offline", "DatasetNotFound", "LocalEntryNotFound", "HfHubHTTP", "Timeout")
"""Parts of the names of errors that mean that a data set cannot be fetched."""


def _not_ours(error: BaseException, name: str, shots: int | None) -> str | None:
    """Return an error message if the request or the network caused lm-eval's failure; else None."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    absent = any(part in type(e).__name__ for e in with_causes(error) for part in ABSENT)
    if absent or isinstance(error, FileNotFoundError):
        return (
            f"tasks {name!r}: its data set is not on this machine and could not be fetched "
            f"({first:.120}). Run once with the network, or give a FILE.jsonl of questions."
        )
    if isinstance(error, ImportError):
        return f"tasks {name!r} needs a package that is not here: {first:.160}"
    if shots and isinstance(error, ValueError | AssertionError | IndexError):
        return f"shots {shots}: {name} has no such examples ({first:.120}); lower it."
    return None


def figures(report: Values, name: str) -> JSON:
    """Return the figures of a task, or of a group of tasks, from lm-eval's report.

    Args:
        report: result of lm-eval.
        name: of the task.

    Returns:
        see :func:`measure_tasks`.
    """
    metrics = report.get("groups", {}).get(name) or report["results"][name]
    summary: JSON = {}
    for key, value in metrics.items():
        metric, comma, _ = key.partition(",")
        if not comma or not isinstance(value, int | float) or math.isnan(value):
            continue
        summary.setdefault(
            "stderr" if metric == "acc_stderr" else metric, value
        )  # the first filter's
    samples = report.get("n-samples", {})
    parts = report.get("group_subtasks", {}).get(name) or [name]
    counts = [samples[part]["effective"] for part in _leaves(parts, report) if part in samples]
    return {**summary, "n": sum(counts)}


def _leaves(names: Iterable[str], report: Values) -> list[str]:
    """Return the tasks of a group, and of the groups in it."""
    below = report.get("group_subtasks", {})
    leaves: list[str] = []
    for name in names:
        inner = [part for part in below.get(name) or [] if part != name]
        leaves += _leaves(inner, report) if inner else [name]
    return leaves
