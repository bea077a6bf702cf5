"""Names of text and of tasks: a source with its slice, mixes of several, multiple-choice questions.

Nothing here imports torch or datasets, so that a wrong request is answered at once.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import os.path
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from moesaic.config import about
from moesaic.errors import MoesaicError, how_to_install, quote
from moesaic.types import JSON, expand_home

if TYPE_CHECKING:
    from datasets import Dataset

Use = Literal["calibration", "evaluation"]
"""Use of text; calibration and training are one use."""
DOMAINS = ("prose", "reference", "code")
"""Domains of the text that ships with the package; each can be named instead of a file."""
SHIPPED = "shipped"
"""Name of all text that ships; ``shipped:code`` is one domain of it."""
HEAVIEST = 1e9
"""Greatest weight of a source in a mix."""
SPLIT = re.compile(r"(?P<name>[\w.-]*)(?:\[(?P<start>\d+%?)?:(?P<stop>\d+%?)?\])?")
"""Pattern of a split and its rows: ``train``, ``train[10%:]``, ``[:5000]``."""


class Mix(NamedTuple):
    """Data sets of the hub that are read together, in equal parts."""

    nearest: str
    """Most similar text that ships, suggested if they cannot be read."""
    sources: tuple[str, ...]


TALK = "HuggingFaceTB/smoltalk"
MIXES = {
    "code": Mix("shipped:code", ("theblackcat102/evol-codealpaca-v1", f"{TALK}:self-oss-instruct")),
    "chat": Mix(
        "shipped:prose=1,shipped:reference=1",
        (f"{TALK}:smol-magpie-ultra", f"{TALK}:everyday-conversations"),
    ),
    "tools": Mix("shipped:code=1,shipped:reference=1", (f"{TALK}:apigen-80k",)),
    "math": Mix("shipped:reference", ("openai/gsm8k:main", f"{TALK}:metamathqa-50k")),
    "multilingual": Mix(
        "prose=1,reference=1",
        tuple(
            f"wikimedia/wikipedia:20231101.{language}"
            for language in ("ar", "de", "es", "fr", "hi", "ja", "ru", "zh")
        ),
    ),
}
"""Mixes by name; docs/text.md describes their text and its licences."""


@dataclass(frozen=True)
class TextSource:
    """Source of text.

    Raises:
        MoesaicError: the split, the domain or the weight is none.
    """

    name: str = ""
    """File, folder, data set of the hub, one of :data:`DOMAINS` or :data:`MIXES`; empty for all
    text that ships."""
    config: str = ""
    data_dir: str = ""
    split: str = ""
    """Split in the form of :data:`SPLIT`; empty for the use's own split."""
    weight: float = 1.0
    """Share of a mix, relative to the others."""
    mix: str = field(default="", kw_only=True)
    """Named mix that the source is a part of."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", expand_home(self.name))
        if "://" in f"{self.name}:{self.config}":
            raise MoesaicError(
                f"{self.name}:{self.config} is an address, which is not read: give the file itself "
                "once it is here, or a data set of the hub as owner/name."
            )
        if not SPLIT.fullmatch(self.split):
            raise MoesaicError(
                f"{self.split!r} is not a split such as train, train[10%:] or [:5000]."
            )
        if self.name == SHIPPED and self.config not in ("", *DOMAINS):
            raise MoesaicError(
                f"{self.config!r} is no domain of the text that ships; known: {', '.join(DOMAINS)}."
            )
        if not 0 < self.weight <= HEAVIEST:
            raise MoesaicError(f"The weight of {self} must be above 0, at most {HEAVIEST:g}.")

    def __str__(self) -> str:
        return ":".join((self.name, self.config, self.data_dir, self.split)).rstrip(":")

    @property
    def shipped(self) -> bool:
        """True for text that ships with the package."""
        return self.name in ("", SHIPPED, *DOMAINS)

    @property
    def tokenised(self) -> bool:
        """True for a file of token ids."""
        return self.name.endswith(".safetensors")

    @property
    def place(self) -> tuple[str, str, str]:
        """Path or name, config and folder, alike for all slices and splits."""
        name = str(Path(self.name).resolve()) if _exists(self.name) else self.name
        return name, self.config, self.data_dir

    @property
    def split_name(self) -> str:
        """Split without its slice."""
        return self.split.partition("[")[0]

    @property
    def sliced(self) -> bool:
        """True if only some of the split's rows are named."""
        return "[" in self.split

    def rows(self, count: int | None) -> tuple[int, int | None]:
        """Return the first row of the slice, and the row that it ends before; None for the end.

        Args:
            count: rows of the split; None if unknown.

        Raises:
            MoesaicError: the slice is a share, and ``count`` is unknown.
        """
        match = SPLIT.fullmatch(self.split)
        ends: list[int | None] = []
        for text in match.group("start", "stop") if match else (None, None):
            number = int(text.rstrip("%")) if text else None
            if text and text.endswith("%"):
                if count is None:
                    raise MoesaicError(
                        f"{self}: a share in % needs the number of rows, which is not known here; "
                        "give numbers of rows instead, such as [5000:] or [:5000]."
                    )
                number = count * min(100, int(text[:-1])) // 100
            ends.append(number if count is None or number is None else min(number, count))
        return ends[0] or 0, count if ends[1] is None else ends[1]


_exists = os.path.exists  # a Path raises an error if a name is too long for a file
FIELDS = tuple(entry.name for entry in fields(TextSource) if not entry.kw_only)


def text_sources(spec: str) -> tuple[TextSource, ...]:
    """Return the sources that a text's name stands for, each with its weight.

    Args:
        spec: ``name:config:data_dir:split``, all but the name optional; a mix such as
            ``code=3,prose=1``; or either as JSON, one mapping or a list of them, with the fields
            of :class:`TextSource`, for names with ``:``, ``,`` or ``=`` in them.

    Raises:
        MoesaicError: the name has another form.

    >>> [(s.name, s.split, s.weight) for s in text_sources("code=3,allenai/c4:en::train=1")]
    [('code', '', 3.0), ('allenai/c4', 'train', 1.0)]
    """
    if spec.lstrip().startswith(("{", "[")):
        return tuple(_from_json(spec))
    spec = expand_home(spec)
    if _exists(spec) or ("=" not in spec and "," not in spec):
        return (_parsed(spec),)
    if "=" not in spec:
        mix = ",".join(f"{name.strip()}=1" for name in spec.split(","))
        raise MoesaicError(f"{spec!r} has no weights: a mix is written as {mix}.")
    pairs = [pair.rpartition("=") for pair in spec.split(",")]
    try:
        sources = [_parsed(name.strip(), float(weight)) for name, _, weight in pairs if name]
    except ValueError:
        sources = []
    if len(sources) < len(pairs) or not all(source.name for source in sources):
        raise MoesaicError(
            f"{spec!r} is not a mix such as code=3,prose=1: a source and its weight for each part."
        )
    if len({*map(str, sources)}) < len(sources):
        raise MoesaicError(f"{spec!r} names a source twice.")
    return tuple(sources)


def text_name(value: object) -> str:
    """Return a text's name as one string, from a recipe's string, mapping or list of mappings.

    Raises:
        MoesaicError: a field is unknown.
    """
    if isinstance(value, str):
        return value
    spec = json.dumps(value)
    text_sources(spec)
    return spec


def _parsed(text: str, weight: float = 1.0) -> TextSource:
    parts = [text] if _exists(text) else text.split(":", 3)
    name, config, data_dir, split = [*parts, "", "", ""][:4]
    return TextSource(name, config, data_dir, split, weight)


def _from_json(spec: str) -> Iterator[TextSource]:
    try:
        listed = json.loads(spec)
    except (ValueError, RecursionError) as error:
        raise MoesaicError(f"{spec:.60} is not JSON: {error}") from error
    for part in listed if isinstance(listed, list) and listed else [listed]:
        given = part if isinstance(part, Mapping) else {}
        words = {name: value for name, value in given.items() if name != "weight"}
        weight = given.get("weight", 1.0)
        right = given.keys() <= {*FIELDS} and all(isinstance(v, str) for v in words.values())
        if not (right and words.get("name") and isinstance(weight, int | float)):
            raise MoesaicError(
                f"A source of text is a mapping of words, with a name; known: {', '.join(FIELDS)}; "
                f"weight is a number. Got {quote(part, 80)}."
            )
        yield TextSource(**words, weight=float(weight))


def sources_of(spec: str, use: Use) -> tuple[TextSource, ...]:
    """Return the sources of :func:`text_sources`, with named mixes replaced by theirs.

    For evaluation, a name that is also a domain of the text that ships is that domain, so that
    figures are the same everywhere.
    """
    merged: dict[str, TextSource] = {}
    for part in (part for source in text_sources(spec) for part in _parts(source, use)):
        before = merged.get(str(part))
        weight = part.weight + (before.weight if before else 0.0)
        merged[str(part)] = replace(before or part, weight=weight)
    return tuple(merged.values())


def _parts(source: TextSource, use: Use) -> Iterator[TextSource]:
    """Yield the sources of a named mix, or the source itself."""
    mix = MIXES.get(source.name)
    measured = use == "evaluation" and source.name in DOMAINS
    if mix is None or measured or _exists(source.name):
        yield source
        return
    if str(source) != source.name:
        raise MoesaicError(f"{source}: a named mix has no config, data_dir or split.")
    for spec in mix.sources:
        yield replace(_parsed(spec, source.weight / len(mix.sources)), mix=source.name)


def read_by(config: object) -> list[str]:
    """Return the names of models, files and text in a dataclass of options; not all are local."""
    names: list[str] = []
    for entry in fields(config) if is_dataclass(config) else ():
        value, info = getattr(config, entry.name), about(entry)
        if info.parse == "text":
            names += [source.name for source in text_sources(value or "")]
        elif {"MODEL", "FILE", "FILE.jsonl"} & {*info.metavar.split("|")}:
            names += str(value or "").split(",")
    return [expand_home(name) for name in names if name]


# --- tasks ---------------------------------------------------------------------------------------

HEADLINE = ("acc_norm", "acc", "exact_match", "f1")
"""Metrics of which a task's first available one is its headline figure."""
LINE = '{"question": "...", "choices": ["...", "..."], "answer": 0}'


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
            "fewshot_split": "test",  # or a question may be among its own examples
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
            file = Path(expand_home(name))
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


class JsonLines(Sequence[Any]):
    """Rows of a .jsonl file, read when they are used; ``numbers`` are those of their lines."""

    def __init__(self, path: Path) -> None:
        self._starts, self.numbers, at = array("q"), array("q"), 0
        with path.open("rb") as lines:
            self._bytes: mmap.mmap | bytes = b""
            if path.stat().st_size:  # nothing cannot be mapped
                self._bytes = mmap.mmap(lines.fileno(), 0, access=mmap.ACCESS_READ)
            for number, line in enumerate(lines, 1):
                if line.strip():
                    self._starts.append(at)
                    self.numbers.append(number)
                at += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        end = self._bytes.find(b"\n", self._starts[index])
        try:
            return json.loads(self._bytes[self._starts[index] : None if end < 0 else end])
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", error)  # without a line, which is always the first here
            raise ValueError(f"line {self.numbers[index]}: {reason}") from None


def read_questions(file: Path) -> list[JSON]:
    """Return the questions of a file, one JSON object per line, with indices for answers.

    Raises:
        MoesaicError: there is no such file, or a line is malformed; names the line.
    """
    if not file.is_file():
        raise MoesaicError(f"tasks: no file at {file}.")
    lines = JsonLines(file)
    if not lines:
        raise MoesaicError(f"tasks: {file} has no questions. A line is {LINE}.")
    questions: list[JSON] = []
    for i, number in enumerate(lines.numbers):
        try:
            questions.append(_question(lines[i]))
        except (ValueError, TypeError) as error:
            reason = str(error).removeprefix(f"line {number}: ")
            raise MoesaicError(
                f"tasks: {file}, line {number}: {reason}. A line is {LINE}."
            ) from None
    return questions


def _question(row: object) -> JSON:
    """Return the checked question of a line; a ValueError describes what is wrong in it."""
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
