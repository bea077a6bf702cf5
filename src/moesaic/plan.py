"""Plans: the decision for each layer, everything needed to rebuild a result and nothing else.

A plan is also the slim patch: ``moesaic apply BASE PLAN OUT``. On disk it is ``plan.json`` (the
header, readable) and ``plan.safetensors`` (index lists, routers, refitted weights); in a result
both lie where :mod:`moesaic.io.names` puts them. Where a base was itself made by
plans, these are in the files too, so that the first base is enough.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from moesaic.config import types_of
from moesaic.distributed import process
from moesaic.errors import MoesaicError, quote
from moesaic.io.checkpoint import tensors_fingerprint
from moesaic.io.names import PLAN, PLAN_TENSORS, our_path
from moesaic.io.outputs import let_read, whole_file
from moesaic.io.trust import (
    check_fields,
    check_links,
    check_plain_file,
    header_of,
    mapping_of,
    parse_json,
    reading,
)
from moesaic.plans.base import LayerPlan, load_plan
from moesaic.types import JSON, Values

FORMAT = 4
REQUEST = "request.json"
"""Name of the file that identifies an unfinished run."""


@dataclass(frozen=True)
class BaseShape:
    """Description of the model that a plan can be applied to."""

    model_type: str
    hidden_size: int
    widths: tuple[int, ...]
    """FFN width of every decoder layer; where it routes, that of one expert."""
    experts: tuple[int, ...] = ()
    """Routed experts in every decoder layer, 0 for dense ones; empty for a dense model."""
    weights: str = field(default="", compare=False)
    """Fingerprint of its weights, which comparisons of shapes ignore."""
    routing: str = field(default="", compare=False)
    """Digest of its layers' headers and top-k: models of the same weights may route differently."""
    name: str = field(default="", compare=False)
    """Name by which it was requested."""
    dtype: str = field(default="", compare=False)
    """Floating-point type in which it was run, such as ``torch.bfloat16``."""

    @classmethod
    def load(cls, plain: JSON) -> BaseShape:
        """Make a shape from the JSON object of its fields."""
        kind: type = cls
        check_fields(plain, types_of(kind))
        lists = {name: tuple(plain[name]) for name in ("widths", "experts")}
        return cls(**{**plain, **lists})

    def experts_of(self, index: int) -> int:
        """Return the number of routed experts of a decoder layer, 0 for a dense one."""
        return self.experts[index] if self.experts else 0

    @property
    def plain_widths(self) -> dict[int, int]:
        """FFN widths of the decoder layers that do not route, by layer."""
        return {i: width for i, width in enumerate(self.widths) if not self.experts_of(i)}

    @property
    def routed(self) -> set[int]:
        """Numbers of the decoder layers that route."""
        return {i for i, count in enumerate(self.experts) if count}


@dataclass(frozen=True)
class Plan:
    """Frozen, complete, deterministic decision about a whole model."""

    method: str
    base: BaseShape
    layers: Mapping[int, LayerPlan]
    config: JSON = field(default_factory=dict)
    """Options of the method, as given."""
    calibration: str = ""
    """Fingerprint of the calibration tokens."""
    dtype: str = "auto"
    """Floating-point type of its result; ``auto`` for the base's own."""
    earlier: tuple[Plan, ...] = ()
    """Plans that made its base from another model, in order; none of them has earlier ones."""

    def __repr__(self) -> str:
        """Return the method and the layers, in one line."""
        kinds = Counter(layer.kind for layer in self.layers.values())
        layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        base = self.base.name or f"a {self.base.model_type} in memory"
        return f"<Plan: {self.method} of {base}; layers: {layers or 'none'}>"

    def header(self) -> JSON:
        """Return the decision without its tensors, as plain JSON."""
        return {
            "format": FORMAT,
            "method": self.method,
            "base": asdict(self.base),
            "config": self.config,
            "calibration": self.calibration,
            "layers": {str(i): layer.header() for i, layer in sorted(self.layers.items())},
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of all layers, by the layer's number and their name."""
        return {
            f"{i}.{name}": tensor.contiguous()
            for i, layer in self.layers.items()
            for name, tensor in layer.tensors().items()
        }

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the decision, and of the weights that it was made from."""
        parts = [self.header(), tensors_fingerprint(self.tensors())]
        return _digest(json.dumps(parts, sort_keys=True))

    def save(self, folder: Path) -> None:
        """Write ``plan.json`` and ``plan.safetensors`` into an existing folder."""
        content, tensors = self._content, self.tensors()
        if self.earlier:
            content["earlier"] = [plan._content for plan in self.earlier]
        for number, plan in enumerate(self.earlier):
            tensors |= {_start(number) + name: t for name, t in plan.tensors().items()}
        save_file(tensors, folder / PLAN_TENSORS)
        let_read(folder / PLAN_TENSORS)
        (folder / PLAN).write_text(json.dumps(content, indent=1) + "\n")

    @property
    def _content(self) -> JSON:
        return {**self.header(), "dtype": self.dtype}

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a plan from its folder, a result's folder or its ``plan.json``.

        Raises:
            MoesaicError: there is no plan, it is not whole, or another version wrote it.
        """
        if path.is_dir():
            check_links(path)
        file = our_path(path, PLAN) if path.is_dir() else path
        if not file.is_file():
            raise MoesaicError(
                f"No plan at {path}: expected a folder with {PLAN}. Results whose weights were "
                "trained have none."
            )
        check_plain_file(file.with_name(PLAN_TENSORS), file.parent)
        with reading(f"The plan at {path}"):
            header = mapping_of(file)
            if "base" not in header:
                raise MoesaicError(f"{file} is no plan: give the result's folder, or its {PLAN}.")
            if header["format"] != FORMAT:
                raise MoesaicError(
                    f"{file} has plan format {quote(header['format'])}; this version reads "
                    f"{FORMAT}. Make the plan again."
                )
            header_of(file.with_name(PLAN_TENSORS))
            tensors = load_file(file.with_name(PLAN_TENSORS))
            earlier = tuple(
                cls._parsed(plan, _under(tensors, _start(number)))
                for number, plan in enumerate(header.get("earlier", []))
            )
            return replace(cls._parsed(header, tensors), earlier=earlier)

    @classmethod
    def _parsed(cls, header: JSON, tensors: Mapping[str, Tensor]) -> Plan:
        """Make a plan from its own header and tensors, without earlier plans."""
        layers = {
            int(i): load_plan(layer, _under(tensors, f"{i}."))
            for i, layer in header["layers"].items()
        }
        base, dtype = BaseShape.load(header["base"]), header.get("dtype", "auto")
        check_fields({**header, "dtype": dtype}, _HEADER)
        return cls(header["method"], base, layers, header["config"], header["calibration"], dtype)


_HEADER = {"method": str, "config": dict, "calibration": str, "dtype": str}


def _start(number: int) -> str:
    """Return the prefix of the names of an earlier plan's tensors."""
    return f"step-{number}."


def _under(tensors: Mapping[str, Tensor], start: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}


class Progress(dict[tuple[str, int], tuple[LayerPlan, JSON]]):
    """Decided layers of a run by name and number, with their measurements.

    They are on disk as soon as they are decided, so that the run can be resumed.

    Args:
        folder: where they are kept, created with the first layer; None to keep them in memory.
        request: identifies the run; a resumed run's must be equal, except ``base.name``, which is
            for messages.

    Raises:
        MoesaicError: the folder holds another run (names the differences), or a damaged layer.
    """

    def __init__(self, folder: Path | None, request: Values) -> None:
        super().__init__()
        self.folder = folder
        self.request: JSON = json.loads(json.dumps(request))
        if folder is None:
            return
        self._check(folder / REQUEST)
        for file in sorted(folder.glob("layer-*.safetensors")):
            self._read(file)

    def _read(self, file: Path) -> None:
        """Take a layer from its file, to which its tensors are mapped; refuse a damaged one."""
        with reading(file, "Remove it, and its layer is decided anew."):
            header_of(file)
            with safe_open(file, framework="pt") as opened:
                notes = opened.metadata()
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}
            if _digest(notes["moesaic"]) != notes["digest"]:
                raise ValueError("its checksum differs from the recorded one")
            record = parse_json(notes["moesaic"], str(file))
            check_fields(record, {"name": str, "layer": int, "analysis": dict})
            layer = load_plan(record["header"], tensors)
            self[record["name"], record["layer"]] = (layer, record["analysis"])

    def _check(self, note: Path) -> None:
        """Refuse to continue another run."""
        if not note.is_file():
            return
        try:
            changed = differences(mapping_of(note), self.request)
        except MoesaicError as error:
            raise MoesaicError(f"{error} Start anew by overwriting it.") from None
        if changed:
            raise MoesaicError(
                f"{self.folder} holds layers of another request: {'; '.join(changed[:3])}. Repeat "
                "that one's options, or start anew with --overwrite (in Python overwrite=True)."
            )

    def begin(self) -> Path | None:
        """Write the request into the folder, and return the folder."""
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            note = self.folder / REQUEST
            if not note.exists():
                with whole_file(note) as partial:  # other processes may be looking
                    partial.write_text(json.dumps(self.request))
        return self.folder

    def add(self, name: str, index: int, layer: LayerPlan, analysis: JSON) -> None:
        """Store a decided layer of the result or comparison ``name``, whole or not at all.

        ``analysis`` holds measurements for the decision, as plain JSON.
        """
        folder = self.begin() if process()[0] == 0 else None
        if folder is None:
            self[name, index] = (layer, analysis)
        else:
            record = {"name": name, "layer": index, "header": layer.header(), "analysis": analysis}
            tensors = {key: tensor.contiguous() for key, tensor in layer.tensors().items()}
            notes = {"moesaic": (text := json.dumps(record)), "digest": _digest(text)}
            file = folder / f"layer-{index:04d}-{name}.safetensors"
            with whole_file(file) as partial:
                save_file(tensors, partial, metadata=notes)
            self._read(file)  # refitted weights of all layers may not fit into memory


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


MODEL = {
    "base.routing": "its layers skip experts otherwise, or others of them were changed",
    "weights": "its weights are others",
    "settings": "its config.json is another",
    "teacher": "the teacher is another",
    "trained": "it was trained otherwise",
    "plan": "another plan was decided",
    "stats": "the statistics are others",
}
"""Sentences for changed fingerprints of models, by their names in requests."""
TEXT = {"calibration": "", "text": "", "text.fingerprint": "", "texts": "training "}
"""Names of fingerprints of text, with words for the kind of text."""
OF_TEXT = ("text.", "calibration.", "samples", "length", "bos", "tokens", "sources")
"""Prefixes of the names of fields that describe a text."""


def differences(before: Values, now: Values) -> list[str]:
    """Return in words how the inputs that two things were made from differ; empty if they do not.

    Inputs of plans, statistics, layers, prices or trained weights are the model (``base``, or
    only ``weights``), the text and the options, by name. Fingerprints are compared and not shown:
    fields that explain them are, if there are any.

    >>> stored = {"config": {"keep": 6}, "text": {"samples": 64, "fingerprint": "1f"}}
    >>> asked = {"config": {"keep": 5}, "text": {"samples": 128, "fingerprint": "c0"}}
    >>> differences(stored, asked)
    ['keep was 6, is 5', 'samples was 64, is 128']
    """
    before, now = flats = [_flat(json.loads(json.dumps(made))) for made in (before, now)]
    names = [flat.pop("base.name", "") or "a model in memory" for flat in flats]
    for flat in flats:
        flat.pop("base.dtype", "")  # a run's own stands beside it
    keys = [key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key)]
    texts, words = [key for key in keys if key in TEXT], []
    settings = [key for key in keys if key not in texts and key.startswith(OF_TEXT)]
    for key in keys:
        if key == "base.weights" and names[0] != names[1]:
            words.append(f"it was made from {names[0]}, this is {names[1]}")
        elif key == "base.weights":
            words.append(f"the weights of {names[0]} have changed")
        elif key in MODEL:
            words.append(MODEL[key])
        elif key in texts:
            words += [] if settings else [f"the {TEXT[key]}text is another"]
        elif texts or not key.startswith("text."):
            field = key.removeprefix("config.").removeprefix("text.")
            words.append(f"{field} was {quote(before.get(key))}, is {quote(now.get(key))}")
    return words


def _flat(plain: Values, start: str = "") -> dict[str, object]:
    """Return nested mappings as one, by dotted keys."""
    flat: dict[str, object] = {}
    for key, value in plain.items():
        within = isinstance(value, Mapping)
        flat |= _flat(value, f"{start}{key}.") if within else {f"{start}{key}": value}
    return flat
