"""Multiple-choice questions from a file, and the lists of tasks that the papers report.

Nothing here imports torch, so that a wrong request is answered at once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.data.reader import Lines
from moesaic.errors import MoesaicError, how_to_install
from moesaic.types import JSON

if TYPE_CHECKING:
    from datasets import Dataset

HEADLINE = ("acc_norm", "acc", "exact_match", "f1")
"""Metrics of which a task's first available one is its headline figure."""
FIELDS = '{"question": "...", "choices": ["...", "..."], "answer": 0}'


def _listed(tasks: str) -> list[tuple[str, int]]:
    """Return names of tasks, each with its shots, 0 without a number.

    >>> _listed("boolq mmlu=5")
    [('boolq', 0), ('mmlu', 5)]
    """
    parts = (task.partition("=") for task in tasks.split())
    return [(name, int(shots or 0)) for name, _, shots in parts]


PRESETS: Mapping[str, Sequence[tuple[str, int]]] = {
    "naee": _listed("arc_challenge arc_easy boolq hellaswag mmlu openbookqa rte winogrande"),
    "cd-moe": _listed("arc_challenge boolq hellaswag mmlu openbookqa piqa rte winogrande"),
    "more": _listed("winogrande arc_easy arc_challenge sciq mmlu=5"),
    "tomoe": _listed("arc_easy arc_challenge piqa winogrande hellaswag"),
    "tomoe-moe": _listed("boolq=32 sciq piqa winogrande=5 arc_challenge=25 hellaswag=10"),
    "dsmoe": _listed(
        "hellaswag lambada_openai social_iqa piqa storycloze_2016 winogrande "
        "triviaqa=5 webqs=5 gsm8k=5 nq_open=5"
    ),
}
"""Tasks of lm-eval and their shots, by the paper that reports them; ``tomoe-moe`` is the list of
ToMoE's comparison with other mixtures (its Table 5)."""


@dataclass(frozen=True)
class Task:
    """Requested task."""

    name: str
    """Name of the task, or of its file without the ending."""
    shots: int | None = None
    """Examples before each question; None for the task's own."""
    questions: tuple[JSON, ...] = ()
    """Rows of a local file; empty for a task that lm-eval has."""

    @property
    def called(self) -> str:
        """Name by which lm-eval knows it; a file may have the name of one of its own tasks."""
        return f"{self.name}.jsonl" if self.questions else self.name

    @property
    def request(self) -> str | JSON:
        """Task as lm-eval takes it: its name, or its config."""
        if not self.questions:
            return self.name

        def data(**_: object) -> dict[str, Dataset]:
            from datasets import Dataset

            return {"test": Dataset.from_list([*self.questions])}

        return {
            "task": self.called,
            "custom_dataset": data,
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "Question: {{question}}\nAnswer:",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        }


def wanted_tasks(tasks: str, shots: int | None = None, limit: int | None = None) -> list[Task]:
    """Return the tasks that a request names.

    Args:
        tasks: names of lm-eval's tasks, of :data:`PRESETS`, or files, with commas between.
        shots: examples before each question; None for the list's or the task's own.
        limit: most questions of each task.

    Raises:
        MoesaicError: names the field, its value and what would work.
    """
    names = [part.strip() for part in tasks.split(",") if part.strip()]
    if not names:
        for field, value in (("limit", limit), ("shots", shots)):
            if value is not None:
                raise MoesaicError(f"{field} {value} needs tasks; name some, such as arc_easy.")
        return []
    chosen: list[Task] = []
    for name in names:
        if name.endswith((".jsonl", ".json")):
            file = Path(name).expanduser()
            questions = read_questions(file)
            if (shots or 0) >= len(questions):
                raise MoesaicError(
                    f"shots {shots}: the examples are other questions of the file, and {file} has "
                    f"{len(questions)}; lower it, or give more questions."
                )
            chosen.append(Task(file.stem, shots or 0, tuple(questions)))
        elif name in PRESETS:
            chosen += [Task(t, default if shots is None else shots) for t, default in PRESETS[name]]
        else:
            chosen.append(Task(name, shots))
    double = {task.name for task in chosen if [t.name for t in chosen].count(task.name) > 1}
    if double:
        raise MoesaicError(f"tasks names {', '.join(sorted(double))} twice; leave one out.")
    if importlib.util.find_spec("lm_eval") is None:
        raise MoesaicError(f"tasks needs lm-eval, which is not here: {how_to_install('tasks')}.")
    return chosen


def read_questions(file: Path) -> list[JSON]:
    """Return the questions of a file, one JSON object per line, with indices for answers.

    Raises:
        MoesaicError: there is no such file, or a line is malformed; names the line.
    """
    if not file.is_file():
        raise MoesaicError(f"tasks: no file at {file}.")
    lines = Lines(file)
    if not lines:
        raise MoesaicError(f"tasks: {file} has no questions. A line is {FIELDS}.")
    questions: list[JSON] = []
    for i, number in enumerate(lines.numbers):
        try:
            questions.append(_question(lines[i]))
        except (ValueError, TypeError) as error:
            reason = str(error).removeprefix(f"line {number}: ")
            raise MoesaicError(
                f"tasks: {file}, line {number}: {reason}. A line is {FIELDS}."
            ) from None
    return questions


def _question(row: object) -> JSON:
    """Return the checked question of a line.

    Raises:
        ValueError: describes the error.
    """
    if not isinstance(row, Mapping):
        raise ValueError("not a JSON object")
    missing = [name for name in ("question", "choices", "answer") if name not in row]
    if missing:
        raise ValueError(f"no {' and no '.join(missing)}")
    question, choices = row["question"], row["choices"]
    if not isinstance(question, str) or not question.strip():
        raise ValueError("question is not text")
    if not isinstance(choices, list) or len(choices) < 2:
        raise ValueError("choices is not a list of two or more")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("a choice is not text")
    "".join([question, *choices]).encode()  # half of a surrogate pair is no text
    answer = _right_one(row["answer"], choices)
    return {"question": question, "choices": choices, "answer": answer}


def _right_one(answer: object, choices: Sequence[str]) -> int:
    """Return the index of the right choice, from its index or its label.

    A label is the choice itself or its letter.

    >>> [_right_one(label, ["no", "yes"]) for label in (1, "yes", "B")]
    [1, 1, 1]

    Raises:
        ValueError: the answer is none of the choices.
    """
    letters = [chr(ord("A") + i) for i in range(len(choices))]
    ways: list[list[Any]] = [[*range(len(choices))], [*choices], letters]
    for labels in ways:
        if type(answer) is type(labels[0]) and labels.count(answer) == 1:
            return labels.index(answer)
    accepted = f"0 to {len(choices) - 1}, {letters[0]} to {letters[-1]}, or a choice itself"
    raise ValueError(f"answer {answer!r} is none of {accepted}")
