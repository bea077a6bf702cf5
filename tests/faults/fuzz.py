"""Strangers' files with other keys, types and sizes, many of them in one process.

Each case changes a copy of something sound, at random but by its number alone, and runs the command
that reads it. It ends in a result or in exit code 2 with one printable message; nothing is written
but OUT. Memory and processor time are limited.
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import signal
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import datasets
import yaml
from commands import budget
from damage import ALIASES, parts, written
from worker import WRITING, limited, seeded, tree

SECONDS = 60
"""Of the processor, for a case."""
LONGEST = 1000
"""Characters of a message at most."""
QUICK = ("--keep", "6", "--score", "aimer", "--no-refit", "--no-eval")
MEASURING = ("--data", "TEXT", "--length", "16", "--max-tokens", "64")
SHORT = ("--samples", "2", "--length", "16")
READING = ("--keep", "6", "--score", "frequency", *SHORT, "--no-eval")
FITTING = ("--memory", "BUDGET", *SHORT, "--windows", "4", "--max-tokens", "64")


@dataclass(frozen=True)
class Kind:
    """A kind of file, what reads it, and how it is changed."""

    name: str
    of: str
    """What is copied, by its name in the place where everything sound is."""
    change: Callable[[Random, Path], None]
    command: tuple[str, ...]
    """``IN`` stands for the copy, in capitals what else is sound."""
    completed: bool = False
    """True if what the file lacks is added to it."""


# --- values ---------------------------------------------------------------------------------------


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def odd(random: Random) -> Any:
    """A value that no file has there."""
    return random.choice(
        [
            None, True, False, 0, -1, 1, 3, 2**31, 2**63, -(2**63), 10**20, 10**299, 10**400, 1.5,
            -0.5, 1e308, math.nan, math.inf, "", "x", "0", "12", "../../x", "/etc/passwd",
            "\x1b[2J\x1b]0;x\x07", "\u202e", "\ud800", "nul\0l", "a" * 200_000, [], {}, [None], [0],
            ["x"], [[]], [-1, 10**12], {"": None}, {"a": {"b": [1]}}, {"0": 1}, deep(60), deep(450),
            [0] * 3000, {str(i): i for i in range(3000)},
        ]
    )  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in JSON: what holds it, and its key there."""
    keys = value.keys() if isinstance(value, dict) else range(min(len(value), 50))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def mutated(random: Random, content: Any) -> Any:
    """JSON with one to three changes of values, keys and types."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        every = list(places(content)) if isinstance(content, dict | list) else []
        if not every:
            return odd(random)
        top = [(content, key) for key in content] if isinstance(content, dict) else every
        holder, key = random.choice(random.choice((top, every)))
        value = holder[key]
        way = random.randrange(8)
        if way == 0 and isinstance(holder, dict):
            holder[random.choice(["", "x", "\x1b[2J", key.upper(), key + "s", "0"])] = holder.pop(
                key
            )
        elif way == 1:
            del holder[key]
        elif way == 2:
            other, name = random.choice(every)
            try:
                holder[key] = json.loads(json.dumps(other[name]))
            except (KeyError, IndexError):
                holder[key] = odd(random)
        elif way == 3:
            holder[key] = random.choice([[value], {"x": value}, str(value), [value] * 3])
        elif way == 4 and type(value) in (int, float) and abs(value) < 1e290:
            holder[key] = random.choice(
                [-value, value + 0.5, str(value), value * 10**6, value + 1, 0, float(value)]
            )
        else:
            holder[key] = odd(random)
    return content


def text_of(random: Random, content: Any) -> bytes:
    """JSON as text, sometimes not quite."""
    text = json.dumps(content)
    way = random.randrange(12)
    if way == 0 and isinstance(content, dict) and content:
        key = random.choice(list(content))
        text = text[:-1] + f", {json.dumps(key)}: {json.dumps(odd(random))}" + "}"
    elif way == 1:
        return b"\xef\xbb\xbf" + text.encode()
    elif way == 2:
        return text.encode("utf-16")
    elif way == 3:
        at = random.randrange(len(text) + 1)
        return text[:at].encode() + bytes([random.randrange(128, 256)]) + text[at:].encode()
    elif way == 4:
        text = text[: random.randrange(len(text) + 1)]
    elif way == 5:
        text = random.choice(["[" * 200_000, '{"a":' * 1000, "9" * 5000, "", "null"])
    return text.encode()


def json_file(*names: str) -> Callable[[Random, Path], None]:
    def change(random: Random, where: Path) -> None:
        there = [where / name for name in names if (where / name).exists()] if names else [where]
        file = random.choice(there)
        content = mutated(random, json.loads(file.read_text()))
        file.write_bytes(text_of(random, content))

    return change


def header_file(random: Random, where: Path) -> None:
    """The header of a safetensors file; JSON within its metadata as often."""
    files = [where] if where.is_file() else sorted(where.rglob("*.safetensors"))
    file = random.choice(files)
    content, data = parts(file)
    notes = content.get("__metadata__", {})
    if "moesaic" in notes and random.random() < 0.7:
        notes["moesaic"] = text_of(random, mutated(random, json.loads(notes["moesaic"]))).decode(
            "utf-8", "replace"
        )
        written(file, json.dumps(content), data)
        return
    if random.random() < 0.02:  # as often as there is room for
        name = next(iter(content))
        content = "{" + ",".join([f'"{name}": {{}}'] * 40_000) + "}"
        written(file, content, data)
        return
    text = text_of(random, mutated(random, content))
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def gguf_file(random: Random, where: Path) -> None:
    """Numbers, lengths, types and names in the header of a GGUF file."""
    raw = bytearray(where.read_bytes())
    end = raw.find(b"token_embd")
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.choice((random.randrange(4, end), random.randrange(4, 28), _key(random, raw)))
        numbers = (0, 1, 9, 255, 2**16, 2**31 - 1, 2**32 - 1, 2**60, 2**63, 2**64 - 1, 10_000)
        way = random.randrange(4)
        if way == 0:
            raw[at : at + 8] = struct.pack("<Q", random.choice(numbers))
        elif way == 1:
            raw[at : at + 4] = struct.pack("<I", random.choice(numbers) % 2**32)
        elif way == 2:
            raw[at] ^= 1 << random.randrange(8)
        else:
            raw[at : at + 1] = random.choice([b"", b"\x1b", b"\0" * 9, b"x" * 5000])
    where.write_bytes(bytes(raw))


def _key(random: Random, raw: bytearray) -> int:
    """Behind the name of a field: its type and its value."""
    names = [
        b"block_count", b"expert_count", b"embedding_length", b"head_count", b"vocab_size",
        b"feed_forward_length", b"context_length", b"tokenizer.ggml.tokens", b"architecture",
        b"tokenizer.ggml.model", b"expert_used_count",
    ]  # fmt: skip
    name = random.choice([n for n in names if n in raw])
    return raw.find(name) + len(name) + random.choice((0, 4))


STEPS: Sequence[dict[str, Any]] = (
    {"prune": {"keep": 6, "score": "aimer", "refit": False}},
    {"slim": {"keep": 0.5, "refit": False}},
    {"skip": {"top_k": 1}}, {"condense": {"count": 1, "keep": "attention"}},
)  # fmt: skip
RECIPE: dict[str, Any] = {
    "model": "moe", "out": "out",
    "calibration": {"source": "text.jsonl", "samples": 2, "length": 16}, "evaluation": None,
    "device": "cpu", "dtype": "auto",
}  # fmt: skip


def recipe_file(random: Random, where: Path) -> None:
    """A recipe; its paths are kept relative, so that nothing large is read."""
    content = mutated(random, json.loads(json.dumps({**RECIPE, "steps": [random.choice(STEPS)]})))
    text = json.dumps(content) if random.random() < 0.5 else None
    try:
        text = text or yaml.safe_dump(content)
    except RecursionError:
        text = json.dumps(content)
    way = random.randrange(10)
    hexadecimal = f"0x{'f' * 5000}"
    more = (
        f"{ALIASES}\nmodel: *i\n", "a: &a [*a]\nmodel: *a\n", f"model: {hexadecimal}\n",
        f"steps: [{{prune: {{keep: {hexadecimal}}}}}]\n", "? [a, b]\n: 1\n",
        f"seed: {'1:' * 20_000}1\n", "model: 2020-01-01\n", "model: !!binary aGk=\n",
    )  # fmt: skip
    if way == 0:
        text = random.choice(more)
    elif way == 1:
        text = text[: random.randrange(len(text))]
    where.write_text(text, "utf-8", errors="surrogatepass")


def text_file(random: Random, where: Path) -> None:
    rows = [json.loads(line) for line in where.read_text().splitlines()[:12]]
    if random.random() < 0.5:
        rows = [{"messages": TURNS} for _ in rows] if random.random() < 0.5 else [
            {"instruction": "a", "input": "b", "output": row["text"]} for row in rows
        ]  # fmt: skip
    which = random.randrange(len(rows))
    rows[which] = mutated(random, json.loads(json.dumps(rows[which])))
    lines = [json.dumps(row).encode() for row in rows]
    if random.random() < 0.3:
        lines[which] = text_of(random, rows[which])
    where.write_bytes(b"\n".join(lines))


TURNS = [
    {"role": "user", "content": "What is a lighthouse? " * 20},
    {"role": "assistant", "content": "A tower with a light, by the sea. " * 20},
]
SOUND = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PIECES = (
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(80) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{{ 'x' * 10**11 }}", "{{ 9**(9**9) }}", "{{ 'x'|center(10**11) }}", "{{ range(10**9)|list }}",
    "{{ messages|tojson }}", "{{ undefined.x.y }}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}",
    "{% include 'x' %}", "{{ messages.__class__.__mro__ }}", "{% for", "{{ messages + 1 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "\x1b[2J", "{{ '%0999999999d' % 1 }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(80) %}{% set n.x = n.x + n.x %}{% endfor %}",
)  # fmt: skip


def template(random: Random, where: Path) -> None:
    """The chat template of a model, in either place."""
    at = random.randrange(len(SOUND))
    text = SOUND[:at] + random.choice(PIECES) + SOUND[at:]
    if random.random() < 0.5:
        text = random.choice(PIECES) + SOUND
    if random.random() < 0.5:
        (where / "chat_template.jinja").write_text(text)
    else:
        file = where / "tokenizer_config.json"
        content = json.loads(file.read_text())
        content["chat_template"] = random.choice([text, text, odd(random)])
        file.write_text(json.dumps(content))


def text_as_json(random: Random, where: Path) -> None:
    rows = [{"messages": TURNS} for _ in range(6)] if random.random() < 0.5 else [
        {"text": "A tower with a light, by the sea. " * 20} for _ in range(6)
    ]  # fmt: skip
    where.write_bytes(text_of(random, mutated(random, json.loads(json.dumps(rows)))))


def table(random: Random, where: Path) -> None:
    """A Parquet file: its columns' names and types, or its bytes."""
    import pyarrow as pa
    from pyarrow import parquet

    words = "A tower with a light, by the sea. " * 20
    columns = (
        [words] * 4, [1, 2, 3, None], [None] * 4, [b"\xff\xfe", b"", b"x", None],
        [["a"], [], None, []],
        [{"text": words}] * 4, [1.5, math.nan, math.inf, None], [[{"role": "user"}]] * 4,
        [True] * 4,
        [words, None, "", "\x1b[2J"], [TURNS] * 4, [{"role": 3, "content": None}] * 4, [""] * 4,
    )  # fmt: skip
    names = ["text", "text", "messages", "prompt", "completion", "", "\x1b[2J", "tools", "\u202e"]
    made = {random.choice(names): random.choice(columns) for _ in range(random.choice((1, 2, 3)))}
    parquet.write_table(pa.table(made), where)
    if random.random() < 0.4:
        raw = bytearray(where.read_bytes())
        for _ in range(random.choice((1, 3, 30))):
            raw[random.randrange(len(raw))] = random.randrange(256)
        where.write_bytes(bytes(raw[: random.choice((len(raw), random.randrange(len(raw)))) or 1]))


def questions(random: Random, where: Path) -> None:
    row = {"question": "What is at sea?", "choices": ["a lighthouse", "a desk"], "answer": 0}
    rows = [json.loads(json.dumps(row)) for _ in range(3)]
    mutated(random, rows[random.randrange(3)])
    which = random.randrange(3)
    lines = [json.dumps(row).encode() for row in rows]
    if random.random() < 0.3:
        lines[which] = text_of(random, rows[which])
    where.write_bytes(b"\n".join(lines))


def format_of_weights(random: Random, where: Path) -> None:
    """What a config says of how weights are stored, or its list of tensors."""
    file = where / "config.json"
    content = json.loads(file.read_text())
    content["quantization_config"] = mutated(random, content["quantization_config"])
    file.write_bytes(
        text_of(random, content) if random.random() < 0.1 else json.dumps(content).encode()
    )


def no_file(random: Random, where: Path) -> None:
    """Something else in a file's place."""
    files = [f for f in sorted(where.rglob("*")) if f.is_file()]
    file = random.choice([*files, *(f for f in files if f.suffix == ".json")])
    file.unlink()
    way = random.randrange(8)
    if way == 0:
        file.mkdir()
    elif way == 1:
        os.mkfifo(file)
    elif way < 6:
        to = ("/dev/zero", "/etc/passwd", "nowhere", file.name)[way - 2]
        file.symlink_to(to)
    elif way == 6:
        file.write_bytes(b"\0" * 1000)
    else:
        with file.open("wb") as sparse:
            sparse.truncate(1 << 36)


def unfinished(random: Random, where: Path) -> None:
    """Any file of what a run left."""
    file = random.choice([f for f in sorted(where.rglob("*")) if f.is_file() and f.stat().st_size])
    if file.suffix == ".safetensors":
        header_file(random, file)
    elif file.suffix == ".json":
        json_file()(random, file)
    else:
        raw = file.read_bytes()
        file.write_bytes(raw[: random.randrange(len(raw))])


TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
PRUNED = ("prune", "IN", "out", *QUICK)
CALIBRATED = ("prune", "IN", "out", *READING, "--calibration")
READ = ("prune", "MOE", "out", *READING, "--calibration", "IN")
RESUMED = ("prune", "MOE", "out", *READING, "--calibration", "TEXT", "--resume")
OBSERVED = ("prune", "MOE", "out", "--keep", "6", "--stats", "IN", "--no-eval")
FITTED = ("fit", "MOE", "out", *FITTING, "--calibration", "TEXT")
ASKED = ("eval", "MOE", "--tasks", "IN", *MEASURING)
REPORTED = ("report", "IN", "--out", "out.html")
DENSE, PLAN = ("config.json", "generation_config.json"), "moesaic/plan.json"
KINDS = (
    Kind("safetensors headers", "moe", header_file, PRUNED),
    Kind("indices", "moe", json_file("model.safetensors.index.json"), PRUNED),
    Kind("GGUF headers", "model.gguf", gguf_file, ("inspect", "IN")),
    Kind("plans", "carved", json_file(PLAN), ("apply", "DENSE", "IN", "out")),
    Kind("plans of mixtures", "pruned", json_file(PLAN), ("apply", "MOE", "IN", "out")),
    Kind("headers of results", "carved", json_file("config.json"), ("inspect", "IN")),
    Kind("statistics", "stats", header_file, OBSERVED),
    Kind("result.json", "carved", json_file("moesaic/result.json"), REPORTED),
    Kind("config.json", "moe", json_file("config.json"), PRUNED),
    Kind("config.json, dense", "dense", json_file(*DENSE), ("inspect", "IN")),
    Kind("tokenizer files", "moe", json_file(*TOKENIZER), (*CALIBRATED, "TEXT")),
    Kind("recipes", "odd.yaml", recipe_file, ("run", "IN", "out=out")),
    Kind("texts", "text.jsonl", text_file, READ),
    Kind("texts as JSON", "text.json", text_as_json, READ),
    Kind("texts as Parquet", "text.parquet", table, READ),
    Kind("tokens", "tokens.safetensors", header_file, READ),
    Kind("questions", "questions.jsonl", questions, ASKED),
    Kind("generation_config.json", "moe", json_file("generation_config.json"), PRUNED),
    Kind("formats of weights", "int4", format_of_weights, PRUNED),
    Kind("headers of packed weights", "int4", header_file, PRUNED),
    Kind("something else in a file's place", "moe", no_file, (*CALIBRATED, "TEXT")),
    Kind("chat templates", "moe", template, (*CALIBRATED, "TURNS")),
    Kind("files of a partial run", "out.partial", unfinished, RESUMED),
    Kind("price tables", "prices.json", json_file(), (*FITTED, "--prices", "IN"), completed=True),
    Kind("files of a partial search", "out.search", unfinished, (*FITTED, "--resume")),
)


# --- running --------------------------------------------------------------------------------------


class TooLong(BaseException):
    """A case takes more time than it has."""


def _ended(*_: object) -> None:
    raise TooLong


class Watch:
    """Notes files that are opened to be written outside of some folders."""

    def __init__(self, *allowed: Path) -> None:
        self.allowed = [str(folder) for folder in (*allowed, "/dev", "/proc")]
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes):
            flags = arguments[2] if isinstance(arguments[2], int) else 0
            path = os.path.abspath(os.fsdecode(arguments[0]))  # noqa: PTH100
            if flags & WRITING and not path.startswith(tuple(self.allowed)):
                self.seen.append(path)


def prepare(place: Path) -> None:
    """What the cases need beside what commands and damage start from."""
    import torch
    from builders import finish, tiny_tokenizer
    from gguf import GGUFWriter
    from released import PUBLISHED, rebuilt
    from safetensors.torch import save_file

    from moesaic import plan
    from moesaic.fitting import trials

    groups = {"quantization_config": PUBLISHED["Kimi-K2.5"]["quantization_config"]}
    rebuilt({**PUBLISHED["Qwen3-30B-A3B-FP8"], **groups}, place / "int4")
    tiny_tokenizer().save_pretrained(place / "int4")
    save_file({"input_ids": torch.randint(1, 60, (8, 16))}, place / "tokens.safetensors")
    for name in ("text.json", "text.parquet", "questions.jsonl"):
        (place / name).touch()
    turns = [json.dumps({"messages": TURNS})] * 8
    (place / "turns.jsonl").write_text("\n".join(turns) + "\n")
    (place / "odd.yaml").write_text("model: moe\n")
    for kind in ("dense", "moe"):
        file = place / kind / "special_tokens_map.json"
        file.exists() or file.write_text(json.dumps({"eos_token": "</s>"}))
    writer = GGUFWriter(place / "model.gguf", "llama")
    numbers = {
        "block_count": 2, "context_length": 64, "embedding_length": 32, "head_count": 4,
        "feed_forward_length": 64, "head_count_kv": 2, "vocab_size": 64, "expert_count": 0,
        "expert_used_count": 0,
    }  # fmt: skip
    for name, value in numbers.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(63)] + ["</s>"])
    writer.add_token_merges([])
    import numpy as np

    shapes = {"token_embd": (64, 32), "output_norm": (32,), "output": (64, 32)}
    for i in range(2):
        shapes |= {f"blk.{i}.attn_{n}": (32, 32) for n in ("q", "output")}
        shapes |= {f"blk.{i}.attn_{n}": (16, 32) for n in "kv"}
        shapes |= {f"blk.{i}.ffn_{n}": (64, 32) for n in ("gate", "up")}
        shapes |= {f"blk.{i}.ffn_down": (32, 64)}
        shapes |= {f"blk.{i}.{n}_norm": (32,) for n in ("attn", "ffn")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    finish(writer)
    add, count = plan.Progress.add, 0

    def stopping(*arguments: Any) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt
        add(*arguments)

    line = ["prune", str(place / "moe"), str(place / "out"), *READING]
    with patch.object(plan.Progress, "add", stopping):
        code, said = called([*line, "--calibration", str(place / "text.jsonl")])
    assert (place / "out.partial").exists(), (code, said)
    measure = trials.Trials.measure

    def once(self: trials.Trials, candidate: Any) -> None:
        measure(self, candidate)
        raise KeyboardInterrupt

    there = {"BUDGET": budget(place), "TEXT": str(place / "text.jsonl"), "MOE": str(place / "moe")}
    there |= {"out": str(place / "found")}
    line = [there.get(part, part) for part in FITTED]
    with patch.object(trials.Trials, "measure", once):
        code, said = called([*line, "--prices", str(place / "prices.json")])
    assert (place / "found.search").exists(), (code, said)
    (place / "found.search").rename(place / "out.search")
    assert (place / "prices.json").exists(), (code, said)


def called(line: Sequence[str]) -> tuple[int, str]:
    """A command in this process: its exit code, and what it said on stderr."""
    from moesaic import cli

    err, before = io.StringIO(), sys.argv
    sys.argv = ["moesaic", *line]
    code: Any = 0
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(err):
            cli.main()
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.argv = before
    return int(code), err.getvalue()


def tried(number: int, sound: Path, watch: Watch | None = None) -> tuple[str, str]:
    """One case: its kind, and ``result``, ``refused`` or what is wrong."""
    random, kind = seeded("fuzz", number), KINDS[number % len(KINDS)]
    cwd = sound.parent / "fuzz"
    shutil.rmtree(cwd, ignore_errors=True)
    cwd.mkdir()
    source, copy = sound / kind.of, cwd / kind.of
    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, copy)
    for name in ("moe", "text.jsonl") if kind.name == "recipes" else ():
        (cwd / name).symlink_to(sound / name)
    kind.change(random, copy)
    there = {"IN": copy, "TEXT": sound / "text.jsonl", "TURNS": sound / "turns.jsonl",
             "DENSE": sound / "dense", "MOE": sound / "moe", "BUDGET": budget(sound)}  # fmt: skip
    os.chdir(cwd)
    before = tree(cwd, cwd / "out.partial")
    if watch is not None:
        watch.seen.clear()
    for alarm in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(alarm, _ended)
    try:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, 5 * SECONDS)  # what waits takes none of a processor
        code, said = called([str(there.get(part, part)) for part in kind.command])
    except TooLong:
        return kind.name, f"takes more than {SECONDS} seconds"
    except BaseException as error:
        return kind.name, f"raises {type(error).__name__}: {error!s:.300}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    words = said.partition("Error:")[2].strip()
    ours = ("out", copy.name) if kind.completed else ("out",)
    after, before = (
        {name: t for name, t in files.items() if not name.startswith(ours)}
        for files in (tree(cwd, cwd / "out.partial"), before)
    )
    if watch is not None and watch.seen:
        return kind.name, f"wrote {watch.seen[0]}"
    if after != before:
        return kind.name, "wrote to its input, or beside it"
    if code == 0:
        return kind.name, "result"
    if code != 2:
        return kind.name, f"exit code {code}: {words:.400}"
    if said.count("Error:") < 1 or not words or len(words) > LONGEST:
        return kind.name, f"a message of {len(words):,} characters: {said[-200:]!r}"
    if not all(c.isprintable() or c in "\n\t\N{NO-BREAK SPACE}" for c in said):
        return kind.name, f"a message that is not printable: {said[-200:]!r}"
    return kind.name, "refused"


def serve(numbers: Sequence[int], sound: Path, out: int) -> None:
    """Cases one after the other in this process; each outcome is a line of JSON."""
    cache = sound.parent / "cache"
    os.environ["XDG_CACHE_HOME"] = str(cache)
    datasets.config.HF_DATASETS_CACHE = cache / "datasets"
    limited()
    watch = Watch(sound.parent)
    for number in numbers:
        kind, outcome = tried(number, sound, watch)
        os.write(out, json.dumps([number, kind, outcome]).encode() + b"\n")


def fuzzed(numbers: Sequence[int], sound: Path) -> Iterator[tuple[int, str, str]]:
    """The outcomes of cases by number. All are tried in one process, in another one only after one
    that ended it or that no alarm could stop."""
    import select

    waiting = list(numbers)
    while waiting:
        back, out = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(back)
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 2)
                serve(waiting, sound, out)
            finally:
                os._exit(0)
        os.close(out)
        with os.fdopen(back, "rb") as lines:
            while waiting:
                ready, _, _ = select.select([lines], [], [], 10 * SECONDS)
                line = lines.readline() if ready else b""
                if not line:
                    break
                number, kind, outcome = json.loads(line)
                waiting.remove(number)
                yield number, kind, outcome
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if waiting:
            number = waiting.pop(0)
            kind = KINDS[number % len(KINDS)].name
            yield number, kind, f"ended the process ({os.waitstatus_to_exitcode(status)})"
