"""Damaged inputs: each case damages a copy of something sound, and says which command reads it.

What JSON and text may hold is left to ``fuzz``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from builders import edited
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


def misplaced(name: str) -> Change:
    """An index in which a shard has this name."""

    def change(where: Path) -> None:
        places = json.loads((where / INDEX).read_text())["weight_map"]
        edited(where / INDEX, weight_map={**places, first(places): name})

    return change


def removed(name: str) -> Change:
    return lambda where: (where / name).unlink()


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
            yield Case(f"{kind}: a shard named {trick[:30]!r}", kind, misplaced(trick), command)
        yield Case(f"{kind}: no config", kind, removed(CONFIG), command)
        yield Case(f"{kind}: pickles only", kind, _pickled, command)


def _pickled(where: Path) -> None:
    for file in shards(where):
        file.unlink()
    (where / INDEX).unlink()
    torch.save({}, where / "pytorch_model.bin")


def plans() -> Iterator[Case]:
    yield Case("a plan without its tensors", "carved", removed("moesaic/plan.safetensors"), APPLY)
    for value in (-7, 10**6):
        change = spoiled(value, "2.order")
        yield Case(f"a plan that places neuron {value}", "carved", change, APPLY)
    yield Case("a plan with a NaN", "carved", spoiled(float("nan"), "2.router"), APPLY)


def cases() -> list[Case]:
    """All damaged inputs."""
    return [*weights(), *models(), *plans()]
