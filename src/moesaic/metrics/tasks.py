"""Zero-shot and few-shot tasks: questions of a local file, and the tasks of lm-eval by name.

A local question is scored as lm-eval scores it: each choice by its summed log-likelihood behind the
prompt, for ``acc`` as it is, for ``acc_norm`` divided by the bytes of the choice (``acc_bytes``
there; its own ``acc_norm`` divides by characters, the same for ASCII).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from moesaic.data.questions import HEADLINE, PRESETS, Question, Task, context
from moesaic.data.text import Tokens, positions
from moesaic.distributed import process
from moesaic.errors import MoesaicError
from moesaic.foreign import JSON, Tokenizer, Track, Values, silent
from moesaic.metrics.forward import BATCH, Runner, Whole, all_shares, own_share

if TYPE_CHECKING:
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

Pair = tuple[list[int], list[int]]
"""The tokens of a context, which is not empty, and of its continuation."""
Ids = tuple[int, ...]


# --- log-likelihoods -----------------------------------------------------------------------------


def encoded(tokenizer: Tokenizer, before: str, after: str) -> Pair:
    """A context and its continuation as tokens, read as one text and cut where the context ends.

    What the tokenizer adds to any text (BOS) is added; blanks at the context's end belong to the
    continuation, as in lm-eval.
    """
    text = before.rstrip()
    ids = tokenizer(before + after, verbose=False)["input_ids"]
    head = tokenizer(text, verbose=False)["input_ids"]
    return ids[: len(head)], ids[len(head) :]


@torch.no_grad()
def loglikelihoods(
    model: Runner,
    pairs: Sequence[Pair],
    track: Track = silent,
    label: str = "Tasks",
    shared: bool = False,
) -> list[tuple[float, bool]]:
    """Of each pair, the summed log-likelihood of its continuation, and whether greedy gives it.

    Args:
        model: what to run.
        pairs: contexts and continuations; what is longer than the model's positions loses its
            start.
        track: shows progress.
        label: for ``track``.
        shared: several processes share the batches, and all of them call this.
    """
    longest = positions(model.shape.config) or 2048
    # by sequence to run: numbers of pairs, and their continuations, which end one token behind it
    rows: dict[Ids, list[tuple[int, list[int]]]] = {}
    for i, (before, after) in enumerate(pairs):
        ids = tuple((before + after)[-(longest + 1) :][:-1])
        rows.setdefault(ids, []).append((i, after[-longest:]))
    groups = own_share(_groups(rows), shared)
    scored: list[list[tuple[int, float, bool]]] = []
    # filled up behind their end, which no token before it sees
    batches = [
        Tokens(pad_sequence([torch.tensor(ids) for ids in group], batch_first=True))
        for group in groups
    ]
    passed = model.run(batches, track, label)
    for group, (logits, _) in zip(groups, passed.logits, strict=True):
        scored.append(
            [
                (i, *_read(logits[r, : len(ids)], after))
                for r, ids in enumerate(group)
                for i, after in rows[ids]
            ]
        )
    likely = {
        i: (value, greedy) for part in all_shares(scored, shared) for i, value, greedy in part
    }
    return [likely[i] for i in range(len(pairs))]


def _groups(rows: Iterable[Ids]) -> list[list[Ids]]:
    """Rows of about the same length together, the longest first: memory is short at once or not."""
    groups: list[list[Ids]] = []
    for ids in sorted(rows, key=lambda ids: (-len(ids), ids)):
        if groups and (len(groups[-1]) + 1) * len(groups[-1][0]) <= BATCH:
            groups[-1].append(ids)
        else:
            groups.append([ids])
    return groups


def _read(logits_LV: Tensor, after: Sequence[int]) -> tuple[float, bool]:
    """The log-likelihood of a continuation that ends one token behind, and whether it is greedy."""
    log_KV = logits_LV[len(logits_LV) - len(after) :].float().log_softmax(-1)
    ids_K = torch.tensor(after, device=log_KV.device)
    value = log_KV.gather(1, ids_K[:, None]).double().sum().item()
    return value, bool((log_KV.argmax(-1) == ids_K).all())


# --- questions of a file -------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """A question as a model answered it."""

    loglikelihoods: tuple[float, ...]
    """Of each choice."""
    acc: bool
    acc_norm: bool


def answers(
    model: Runner,
    tokenizer: Tokenizer,
    task: Task,
    limit: int | None = None,
    track: Track = silent,
    shared: bool = False,
) -> list[Answer]:
    """A model's answers to the questions of a local file.

    The arguments are those of :func:`measure_tasks`, of one task.
    """
    questions = task.questions[:limit]
    pairs = [
        encoded(tokenizer, context(task.questions, i, task.shots or 0), question.continuation(c))
        for i, question in enumerate(questions)
        for c in range(len(question.choices))
    ]
    scored = iter(loglikelihoods(model, pairs, track, task.name, shared))
    return [answered(q, [next(scored)[0] for _ in q.choices]) for q in questions]


def answered(question: Question, likely: Sequence[float]) -> Answer:
    """The choice of the greatest log-likelihood, as it is and by byte, beside the right one.

    >>> question = Question("2 + 2?", ("four", "5"), 0)
    >>> answer = answered(question, [-4.0, -3.0])
    >>> answer.acc, answer.acc_norm
    (False, True)
    """
    by_byte = [v / len(c.encode()) for v, c in zip(likely, question.choices, strict=True)]
    acc, norm = (max(range(len(v)), key=v.__getitem__) for v in (likely, by_byte))
    return Answer(tuple(likely), acc == question.answer, norm == question.answer)


def _standard_error(values: Sequence[float]) -> float:
    """Of a mean: the sample's standard deviation over the root of its size; 0 of one value.

    >>> round(_standard_error([1, 0, 1, 1]), 4)
    0.25
    """
    mean = sum(values) / len(values)
    squares = sum((value - mean) ** 2 for value in values)
    return math.sqrt(squares / max(1, len(values) - 1) / len(values))


def accuracy(answers: Sequence[Answer]) -> JSON:
    """What is told of a task.

    Returns:
        ``acc``, ``acc_norm``, the standard error of each (``stderr``, ``acc_norm_stderr``), and
        ``n``, the questions.
    """
    summary: JSON = {}
    for name, error in (("acc", "stderr"), ("acc_norm", "acc_norm_stderr")):
        values = [float(getattr(answer, name)) for answer in answers]
        summary |= {name: sum(values) / len(values), error: _standard_error(values)}
    return {**summary, "n": len(answers)}


# --- all tasks -----------------------------------------------------------------------------------


def measure_tasks(
    model: Runner,
    tokenizer: Tokenizer,
    tasks: Sequence[Task],
    limit: int | None = None,
    track: Track = silent,
    shared: bool = False,
) -> dict[str, JSON]:
    """Every task's figures, by its name.

    Args:
        model: what to run.
        tokenizer: its own.
        tasks: of :func:`moesaic.data.questions.wanted_tasks`.
        limit: questions of each at most; None for all.
        track: shows progress.
        shared: several processes share the batches, and all of them call this.

    Returns:
        of each task ``n`` and its metrics: of multiple choice ``acc``, ``acc_norm``, ``stderr``
        (of ``acc``) and ``acc_norm_stderr``; of others their own and ``NAME_stderr``.

    Raises:
        MoesaicError: a task is unknown, or its data cannot be had.
    """
    check_tasks(tasks)
    by_task: dict[str, JSON] = {}
    for task in tasks:
        if task.questions:
            by_task[task.name] = accuracy(answers(model, tokenizer, task, limit, track, shared))
    named = [task for task in tasks if not task.questions]
    if named:
        by_task |= _by_harness(model, tokenizer, named, limit, track, shared)
    return {task.name: by_task[task.name] for task in tasks}


def headline(task: Values) -> float | None:
    """The figure that sums a task up; None where it has none."""
    return next((float(task[name]) for name in HEADLINE if name in task), None)


def with_recovery(ours: dict[str, JSON], theirs: Values) -> dict[str, JSON]:
    """Figures of tasks, each with ``recovery``: its headline over the original's."""
    compared = {}
    for name, task in ours.items():
        after, before = headline(task), headline(theirs.get(name, {}))
        compared[name] = (
            {**task, "recovery": after / before} if after is not None and before else task
        )
    return compared


def recovery_ratio(ours: Values, theirs: Values) -> float | None:
    """CD-MoE's recovery ratio: the mean of the tasks' headlines over the original's mean.

    Args:
        ours: by task, of the result.
        theirs: of the original.

    Returns:
        None where no task has a headline in both.

    >>> tasks = {"a": {"acc": 0.25}, "b": {"acc": 0.5, "acc_norm": 0.75}, "c": {"n": 1}}
    >>> recovery_ratio(tasks, {"a": {"acc": 0.5}, "b": {"acc_norm": 0.75}})
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
def task_manager() -> TaskManager:
    """lm-eval's index of its tasks, which takes seconds to read."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _by_harness(
    model: Runner,
    tokenizer: Tokenizer,
    tasks: Sequence[Task],
    limit: int | None,
    track: Track,
    shared: bool,
) -> dict[str, JSON]:
    manager = task_manager()
    lm = harness_model(model, tokenizer, track, shared)
    return {
        task.name: figures(harness(lm, task.name, manager, task.shots, limit), task.name)
        for task in tasks
    }


def check_tasks(tasks: Iterable[Task]) -> None:
    """Refuse tasks that lm-eval does not know, before anything is measured.

    Raises:
        MoesaicError: names the first, and those that are spelled alike.
    """
    named = [task.name for task in tasks if not task.questions]
    names = {*task_manager().all_tasks} if named else set()
    for name in named:
        if name not in names:
            raise MoesaicError(_unknown(name, names))


def _unknown(name: str, names: Iterable[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, [*names, *PRESETS], 3, 0.7)
    perhaps = f"; perhaps {', '.join(close)}" if close else ""
    listed = ", ".join(PRESETS)
    return (
        f"tasks {name!r} is no task of lm-eval{perhaps}. The papers' lists are {listed}; a file of "
        "questions ends in .jsonl."
    )


def harness(
    lm: LM, task: str | JSON, manager: TaskManager, shots: int | None, limit: int | None
) -> Values:
    """One task of lm-eval, in its own Python API.

    Args:
        lm: of :func:`harness_model`.
        task: a name, or a task's own config.
        manager: lm-eval's TaskManager.
        shots: examples before each question; None for the task's own.
        limit: questions at most.

    Returns:
        what lm-eval returns.

    Raises:
        MoesaicError: the task's data cannot be had, or it has no examples.
    """
    from lm_eval import simple_evaluate

    name = task if isinstance(task, str) else task["task"]
    try:
        results: Values = simple_evaluate(
            lm,
            tasks=[task],
            num_fewshot=shots,
            limit=limit,
            task_manager=manager,
            bootstrap_iters=1000,
            log_samples=not isinstance(task, str),
        )
    except MoesaicError:
        raise
    except Exception as error:
        if (reason := _not_ours(error, name, shots)) is None:
            raise
        raise MoesaicError(reason) from error
    return results


ABSENT = ("Connection", "Offline", "DatasetNotFound", "LocalEntryNotFound", "HfHubHTTP", "Timeout")
"""In the names of the errors by which a data set is not to be had."""


def _not_ours(error: BaseException, name: str, shots: int | None) -> str | None:
    """A failure of lm-eval in words, if the request or the network is to blame; else None."""
    chain: list[BaseException] = []
    behind: BaseException | None = error
    while behind is not None and behind not in chain:
        chain.append(behind)
        behind = behind.__cause__ or behind.__context__
    first = (str(error).splitlines() or [type(error).__name__])[0]
    absent = any(part in type(e).__name__ for e in chain for part in ABSENT)
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


def harness_model(model: Runner, tokenizer: Tokenizer, track: Track, shared: bool) -> LM:
    """The model as lm-eval takes it.

    One in memory is run by lm-eval itself; otherwise lm-eval asks, and its requests are scored
    layer by layer, or shared by several processes.
    """
    if isinstance(model, Whole) and (not shared or process()[1] == 1):
        from lm_eval.models.huggingface import HFLM

        return HFLM(
            pretrained=model.shape, tokenizer=tokenizer, backend="causal", batch_size=_rows(model)
        )
    from lm_eval.api.model import TemplateLM

    class TaskModel(TemplateLM):
        """lm-eval's requests, scored by a runner."""

        def __init__(self) -> None:
            super().__init__()
            self.tokenizer = tokenizer

        @property
        def eot_token_id(self) -> int:
            return int(tokenizer.eos_token_id or 0)

        @property
        def prefix_token_id(self) -> int:
            first = tokenizer.bos_token_id
            return self.eot_token_id if first is None else int(first)

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: object
        ) -> list[int]:
            how = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
            return tokenizer(string, verbose=False, **how)["input_ids"]

        def _loglikelihood_tokens(
            self, requests: Sequence[tuple[object, list[int], list[int]]], **_: object
        ) -> list[tuple[float, bool]]:
            pairs = [(before, after) for _, before, after in requests]
            return loglikelihoods(model, pairs, track, "Tasks", shared)

        def loglikelihood_rolling(self, requests: object, disable_tqdm: bool = False) -> None:
            raise MoesaicError(GENERATES)

        def generate_until(self, requests: object, disable_tqdm: bool = False) -> None:
            raise MoesaicError(GENERATES)

    return TaskModel()


GENERATES = (
    "tasks that generate text need the model in memory, in one process; choose tasks of multiple "
    "choice, such as arc_easy."
)


def _rows(model: Whole) -> int:
    """Sequences of a batch for lm-eval: fewer where the vocabulary's logits take much memory."""
    return 16 if model.shape.config.vocab_size <= 64_000 else 4


def figures(report: Values, name: str) -> JSON:
    """The figures of a task, or of a group of tasks, as lm-eval found them.

    Args:
        report: what lm-eval returned.
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
    """The tasks of a group, and of the groups in it."""
    below = report.get("group_subtasks", {})
    leaves: list[str] = []
    for name in names:
        inner = [part for part in below.get(name) or [] if part != name]
        leaves += _leaves(inner, report) if inner else [name]
    return leaves
