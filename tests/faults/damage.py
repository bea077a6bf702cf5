"""Damaged inputs: each case damages a copy of something sound, and says which command reads it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from worker import seeded

Change = Callable[[Path], None]
MODEL, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


@dataclass(frozen=True)
class Case:
    """A damaged input."""

    name: str
    of: str
    """What is copied, by its name in the place where everything sound is."""
    change: Change
    """Damages the copy."""
    command: tuple[str, ...]
    """``IN`` stands for the copy."""
    harmless: bool = False
    """The damage may leave a file that is sound: exit code 0 is right too."""


# --- safetensors ---------------------------------------------------------------------------------


def shards(folder: Path) -> list[Path]:
    """The weights of a model or of a plan."""
    plan = folder / "moesaic/plan.safetensors"
    if not folder.is_dir() or plan.exists():
        return [plan if folder.is_dir() else folder]
    return sorted(folder.glob("*.safetensors"))


def parts(file: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    raw = file.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def written(file: Path, header: str, data: bytes, size: int | None = None) -> None:
    """A safetensors file with any header."""
    text = header.encode()
    file.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + data)


def truncated(share: float) -> Change:
    def change(where: Path) -> None:
        file = shards(where)[-1]
        raw = file.read_bytes()
        file.write_bytes(raw[: int(len(raw) * share)])

    return change


def flipped(seed: int, in_header: bool) -> Change:
    """One bit of a header; or a weight of which every bit of the exponent is set."""

    def change(where: Path) -> None:
        random = seeded("flip", seed)
        file = random.choice(shards(where))
        raw = bytearray(file.read_bytes())
        (size,) = struct.unpack("<Q", raw[:8])
        if in_header:
            raw[random.randrange(0, 8 + size)] ^= 1 << random.randrange(8)
        else:
            at = 8 + size + 4 * random.randrange((len(raw) - 8 - size) // 4)
            raw[at + 2] |= 0x80
            raw[at + 3] |= 0x7F
        file.write_bytes(bytes(raw))

    return change


def header(edit: Callable[[dict[str, Any]], Any]) -> Change:
    """Another header over the same data."""

    def change(where: Path) -> None:
        file = shards(where)[0]
        header, data = parts(file)
        header = edit(header) or header
        written(file, header if isinstance(header, str) else json.dumps(header), data)

    return change


def first(header: dict[str, Any]) -> str:
    return next(name for name in header if name != "__metadata__")


def entry(**changes: Any) -> Change:
    def edit(header: dict[str, Any]) -> None:
        header[first(header)] |= changes

    return header(edit)


def twice(header: dict[str, Any]) -> str:
    """The same name two times, as no writer of JSON makes it."""
    name = first(header)
    return json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"


def header_size(size: int) -> Change:
    def change(where: Path) -> None:
        header, data = parts(shards(where)[0])
        written(shards(where)[0], json.dumps(header), data, size)

    return change


def tensors(edit: Callable[[dict[str, Any]], None], which: int = 0) -> Change:
    """Other tensors in a sound file."""

    def change(where: Path) -> None:
        file = shards(where)[which]
        header, _ = parts(file)
        held = load_file(file)
        edit(held)
        save_file(held, file, metadata=header.get("__metadata__"))

    return change


def spoiled(value: float, name: str) -> Change:
    """A value in the middle of every tensor whose name holds ``name``."""

    def change(where: Path) -> None:
        count = 0
        for which in range(len(shards(where))):

            def edit(held: dict[str, Any]) -> None:
                nonlocal count
                for key in held:
                    if name in key:
                        count += 1
                        held[key].flatten()[held[key].numel() // 2] = value

            tensors(edit, which)(where)
        assert count, name

    return change


def drop(held: dict[str, Any]) -> None:
    held.pop(sorted(held)[0])


def transpose(held: dict[str, Any]) -> None:
    name = next(n for n in sorted(held) if held[n].dim() == 2 and len(set(held[n].shape)) > 1)
    held[name] = held[name].T.contiguous()


def shorten(held: dict[str, Any]) -> None:
    name = sorted(held)[0]
    held[name] = held[name][:-1].clone()


def integers(held: dict[str, Any]) -> None:
    name = sorted(held)[0]
    held[name] = held[name].to(torch.int32)


# --- JSON and text -------------------------------------------------------------------------------


def put(name: str, text: str | bytes) -> Change:
    def change(where: Path) -> None:
        file = where / name if where.is_dir() else where
        file.write_bytes(text if isinstance(text, bytes) else text.encode())

    return change


def edited(name: str, edit: Callable[[Any], Any]) -> Change:
    """JSON with something else in it."""

    def change(where: Path) -> None:
        file = where / name if where.is_dir() else where
        content = json.loads(file.read_text())
        content = edit(content) or content
        file.write_text(json.dumps(content))

    return change


def removed(name: str) -> Change:
    return lambda where: (where / name).unlink()


def at(path: str, value: Any) -> Callable[[Any], None]:
    """Sets a place of JSON, its keys dotted; ``...`` removes it."""

    def edit(content: Any) -> None:
        *keys, last = path.split(".")
        for key in keys:
            content = content[int(key)] if isinstance(content, list) else content[key]
        if value is ...:
            del content[last]
        else:
            content[last] = value

    return edit


BOMBS: dict[str, str | bytes] = {
    "deep list": "[" * 200_000,
    "deep list, closed": "[" * 100_000 + "]" * 100_000,
    "deep mapping": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "long integer": '{"format": ' + "9" * 20_000 + "}",
    "NaN": "NaN",
    "null": "null",
    "number": "7",
    "string": '"x"',
    "list": "[]",
    "empty": "",
    "cut": '{"a": ',
    "binary": bytes(range(255, -1, -1)),
}
ALIASES = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
TRICKS = ("../outside.safetensors", "../../outside.safetensors", "/etc/hostname", "..", ".", "",
          "a/b.safetensors", "nul\0l", "x" * 5000)  # fmt: skip


# --- the cases -----------------------------------------------------------------------------------

TEXT = ("--calibration", "TEXT", "--samples", "4", "--length", "32", "--no-eval")
CARVE = ("carve", "IN", "out", *TEXT)
PRUNE = ("prune", "IN", "out", "--keep", "6", *TEXT)
APPLY = ("apply", "DENSE", "IN", "out")
STATS = ("prune", "MOE", "out", "--keep", "6", "--stats", "IN", "--no-eval")
READ = ("carve", "DENSE", "out", "--calibration", "IN", "--samples", "4", "--length", "32",
        "--no-eval")  # fmt: skip
RUN = ("run", "IN")
REPORT = ("report", "IN", "--out", "out.html")
FILES: Sequence[tuple[str, str, tuple[str, ...]]] = (
    ("dense", "a dense model", CARVE),
    ("moe", "a mixture", PRUNE),
    ("carved", "a plan", APPLY),
    ("stats", "statistics", STATS),
)


def weights() -> Iterator[Case]:
    """Of every kind of safetensors file that is read."""
    for kind, reason, command in FILES:

        def case(what: str, change: Change, harmless: bool = False, kind: str = kind,
                 reason: str = reason, command: tuple[str, ...] = command) -> Case:  # fmt: skip
            return Case(f"{reason}: {what}", kind, change, command, harmless)

        for share in (0.0, 0.0005, 0.3, 0.99):
            yield case(f"truncated to {share:g}", truncated(share))
        for seed in range(4):
            yield case(f"bit {seed} of a header flipped", flipped(seed, True), harmless=True)
        for size in (2**64 - 1, 2**63, 10**9, 3, 0):
            yield case(f"a header of {size} bytes", header_size(size))
        yield case("a name twice", header(twice))
        yield case("data out of the file", entry(data_offsets=[0, 10**12]))
        yield case("data that ends before it begins", entry(data_offsets=[64, 0]))
        yield case("an unknown type", entry(dtype="F7"))
        yield case("a shape of 10^30", entry(shape=[10**15, 10**15]))
        yield case("a tensor missing", tensors(drop), harmless=kind == "stats")
        yield case("a tensor shortened", tensors(shorten))


def models() -> Iterator[Case]:
    for kind, command in (("dense", CARVE), ("moe", PRUNE)):
        yield Case(f"{kind}: a matrix transposed", kind, tensors(transpose), command)
        yield Case(f"{kind}: a weight of integers", kind, tensors(integers), command, harmless=True)
        for value in (float("nan"), float("inf"), -float("inf")):
            for name in ("down_proj", "q_proj", "embed_tokens", "norm"):
                yield Case(f"{kind}: {value} in {name}", kind, spoiled(value, name), command)
        yield Case(f"{kind}: NaN by a flipped bit", kind, flipped(1, False), command)
        for trick in TRICKS:
            change = edited(
                INDEX, lambda x, t=trick: x["weight_map"].update({first(x["weight_map"]): t})
            )
            yield Case(f"{kind}: a shard named {trick[:30]!r}", kind, change, command)
        yield Case(
            f"{kind}: a shard that is no name",
            kind,
            edited(INDEX, at("weight_map", {"a": 3})),
            command,
        )
        yield Case(
            f"{kind}: a list of shards", kind, edited(INDEX, at("weight_map", ["a"])), command
        )
        yield Case(f"{kind}: no config", kind, removed(CONFIG), command)
        yield Case(f"{kind}: pickles only", kind, _pickled, command)
    for name, text in BOMBS.items():
        yield Case(f"config.json: {name}", "dense", put(CONFIG, text), CARVE)
        yield Case(f"an index: {name}", "dense", put(INDEX, text), CARVE)
    gone = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size")
    for key in gone:
        yield Case(f"config.json without {key}", "dense", edited(CONFIG, at(key, ...)), CARVE)
    absurd: dict[str, Sequence[Any]] = {
        "model_type": ("nonsense", 7, None, "../../x"),
        "hidden_size": (0, -32, "32", 10**12, 1.5, None, [32]),
        "num_hidden_layers": (0, -1, 10**9, "many"),
        "num_attention_heads": (0, 7, -4),
        "hidden_act": ("nonsense", 3),
        "vocab_size": (0, 10**13),
        "rms_norm_eps": ("x",),
    }
    for key, values in absurd.items():
        for value in values:
            edit = edited(CONFIG, at(key, value))
            yield Case(f"config.json with {key}={value!r}", "dense", edit, CARVE)
    for key, value in (("num_experts", 0), ("num_experts", 9), ("num_experts_per_tok", 99)):
        edit = edited(CONFIG, at(key, value))
        yield Case(f"config.json with {key}={value!r}", "moe", edit, PRUNE)
    for name, text in (("empty", ""), ("a list", "[]"), ("nonsense", '{"version": 3}')):
        yield Case(f"a tokenizer: {name}", "dense", put("tokenizer.json", text), CARVE)


def _pickled(where: Path) -> None:
    for file in shards(where):
        file.unlink()
    (where / INDEX).unlink()
    torch.save({}, where / "pytorch_model.bin")


def plans() -> Iterator[Case]:
    for name, text in BOMBS.items():
        yield Case(f"plan.json: {name}", "carved", put("moesaic/plan.json", text), APPLY)
    changes: dict[str, Any] = {
        "format": 99, "base": {}, "base.hidden_size": 7, "base.widths": 3, "layers": [],
        "layers.2.kind": "nonsense", "layers.2.backbone": -5, "layers.2.petals": ["x"],
        "layers.2.top_k": 99, "layers.2.routing": "../../x", "method": None,
    }  # fmt: skip
    for path, value in changes.items():
        edit = edited("moesaic/plan.json", at(path, value))
        harmless = path == "method"
        yield Case(f"plan.json with {path}={value!r}", "carved", edit, APPLY, harmless)
    for key in ("../../x", "99", "-1", "x"):
        edit = edited(
            "moesaic/plan.json", lambda x, k=key: x["layers"].update({k: x["layers"].pop("2")})
        )
        yield Case(f"plan.json with a layer {key!r}", "carved", edit, APPLY)
    yield Case("a plan without its tensors", "carved", removed("moesaic/plan.safetensors"), APPLY)
    for value in (-7, 10**6):

        def edit(held: dict[str, Any], v: int = value) -> None:
            held["2.order"][3] = v

        change = _plan_tensors(edit)
        yield Case(f"a plan that places neuron {value}", "carved", change, APPLY)
    yield Case("a plan with a NaN", "carved", _plan_tensors(_nan_router), APPLY)


def _plan_tensors(edit: Callable[[dict[str, Any]], None]) -> Change:
    return lambda where: tensors(edit)(where / "moesaic/plan.safetensors")


def _nan_router(held: dict[str, Any]) -> None:
    held["2.router"][0, 0] = float("nan")


def texts() -> Iterator[Case]:
    many = {
        "t.txt": {
            "empty": "", "blank": " \n" * 50, "binary": bytes(range(256)) * 40,
            "UTF-16": ("words " * 300).encode("utf-16"),
        },
        "t.jsonl": {
            "empty lines": "\n\n", "no JSON": "words\n" * 9, "a list a line": "[1]\n" * 9,
            "unknown columns": '{"x": 1}\n' * 9, "a number for text": '{"text": 5}\n' * 9,
            "null": '{"text": null}\n' * 9, "deep": '{"text": ' + "[" * 100_000 + "\n",
            "cut": '{"text": "a', "binary lines": bytes(range(128, 256)) * 9,
        },
        "t.json": {"one JSON": '{"text": "a"}', "deep JSON": "[" * 200_000},
        "t.parquet": {"no Parquet": "PAR1 and nothing"},
        "t.safetensors": {"no safetensors": "nothing"},
    }  # fmt: skip
    for file, bad in many.items():
        for name, text in bad.items():
            change = _named(file, text)
            yield Case(f"a text: {name}", "text.jsonl", change, _with_name(READ, file))


def _named(file: str, text: str | bytes) -> Change:
    """The text under another name, beside the copy."""
    return lambda where: put(file, text)(where.parent / file)


def _with_name(command: tuple[str, ...], file: str) -> tuple[str, ...]:
    return tuple(file if part == "IN" else part for part in command)


def others() -> Iterator[Case]:
    """Recipes, records and unfinished runs."""
    for name, text in {**BOMBS, "aliases": ALIASES, "aliases as steps": f"{ALIASES}steps: *i\n",
                       "a tag": "!!python/object/apply:os.system ['touch /tmp/x']",
                       "tabs": "model:\tx\n\t- y"}.items():  # fmt: skip
        yield Case(f"a recipe: {name}", "recipe.yaml", put("", text), RUN)
    for name, text in {**BOMBS, "strings": '{"steps": "x", "layers": 3, "measured": []}'}.items():
        yield Case(f"result.json: {name}", "carved", put("moesaic/result.json", text), REPORT)
    for name in ("steps", "layers"):
        edit = edited("moesaic/result.json", at(name, "x"))
        yield Case(f"result.json with {name}='x'", "carved", edit, REPORT)


def cases() -> list[Case]:
    """All damaged inputs."""
    return [*weights(), *models(), *plans(), *texts(), *others()]
