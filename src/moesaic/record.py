"""What is known of a run: one typed structure for all verbs, written as ``result.json``.

Card, page, terminal and picture are made from it alone. Everything that they say of what was done
is said here, by the method and by the layer kinds; the report adds no words of its own about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

FORMAT = 2
T = TypeVar("T")

WEIGHTS = ("own", "refitted", "averaged", "trained")
"""What became of weights, the least change first: the base model's own (moved, sliced or scaled by
constants at most), solved for in closed form, means over several experts, trained."""


@dataclass(frozen=True)
class LayerRecord:
    """One decoder layer of the result."""

    index: int
    kind: str
    """``dense``, ``moe`` (as they were in the base), or a layer kind's name."""
    told: str
    """What became of the layer, in words: ``6 of 8 experts stay``."""
    weights: str = "own"
    """One of :data:`WEIGHTS`."""
    width: int = 0
    """Neurons stored: of a dense layer's FFN, of one expert where the layer routes."""
    width_before: int = 0
    """The same of the layer before the first step that changed it; 0 where not known."""
    active_width: float = 0.0
    """Neurons a token runs, shared ones included, under uniform routing."""
    experts: int = 0
    """Routed experts; 0 where nothing routes."""
    top_k: int = 0
    """Routed experts that a token runs."""
    shape: Mapping[str, Any] = field(default_factory=dict)
    """What only this kind has: backbone and petals, kept experts, beta."""
    analysis: Mapping[str, Any] = field(default_factory=dict)
    """What the method saw of the layer: losses, calls, coverage."""

    @property
    def changed(self) -> bool:
        return self.kind not in ("dense", "moe")


@dataclass(frozen=True)
class Step:
    """One verb carried out."""

    verb: str
    method: str
    label: str
    """What it is called in titles (:attr:`moesaic.config.MethodConfig.label`)."""
    title: str
    """A clause for the page's and the card's title: ``pruned by REAP to 6 of 8 experts``."""
    told: str
    """What was done, in one or two sentences for the card."""
    paper: str = ""
    beyond: tuple[str, ...] = ()
    """What was done beyond that paper."""
    weights: str = "own"
    """What became of the weights in this step: the greatest change of any layer."""
    config: Mapping[str, Any] = field(default_factory=dict)
    variants: Mapping[str, str] = field(default_factory=dict)
    """What the comparisons of this step are, by the name they have in ``scores``."""
    unit: str = "expert"
    """What the routers of its result choose."""
    kind: str = ""
    """Which drawings suit: ``split``, ``learned``, ``gated``, ``experts``, ``skipping``,
    ``condensed`` or ``trained``."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """What the method found of the whole model: the order of choice, training losses."""
    output: Mapping[str, Any] = field(default_factory=dict)
    """Keys that programs rely on in ``--json``, beside or instead of the record's own."""


@dataclass
class Record:
    """Everything that is known of a run."""

    model: str
    """The original, by the name that was asked for."""
    out: str
    model_type: str
    """Of the result."""
    native: bool
    """The result is of its base's own architecture: transformers alone loads it."""
    steps: list[Step]
    layers: list[LayerRecord]
    """Every decoder layer of the result, in order."""
    moesaic: str = ""
    format: int = FORMAT
    calibration: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)
    """What was measured: ``evaluation``, ``scores``, ``routing``, ``generation``, ``samples``,
    ``activity``, ``speed``, ``speed_ratio``; empty without ``--eval``."""

    def as_json(self) -> dict[str, Any]:
        """As ``result.json`` holds it: ``measured`` laid open beside the other keys."""
        plain = asdict(self)
        measured = plain.pop("measured")
        return {**plain, **measured}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Record:
        """The record that ``result.json`` holds; the inverse of :meth:`as_json`.

        Keys of steps and layers that are unknown are left out.

        Raises:
            ValueError: it is no record of this format.
        """
        if not isinstance(plain, Mapping) or plain.get("format") != FORMAT:
            raise ValueError("is no result.json of this version of Moesaic: make the result anew.")
        own = {f.name for f in fields(cls)} - {"measured"}
        try:
            known = {k: v for k, v in plain.items() if k in own}
            known["steps"] = [_known(Step, x) for x in plain["steps"]]
            known["layers"] = [_known(LayerRecord, x) for x in plain["layers"]]
            return cls(**known, measured={k: v for k, v in plain.items() if k not in own})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"is no whole result.json: {error}.") from None

    def output(self) -> dict[str, Any]:
        """As ``--json`` prints it: layers laid open, and the keys that the last step promises."""
        plain = self.as_json()
        layers = [x | x.pop("shape") | x.pop("analysis") for x in plain["layers"]]
        return {**plain, "layers": layers, **(self.steps[-1].output if self.steps else {})}


def _known(cls: type[T], plain: Mapping[str, Any]) -> T:
    """A dataclass of its fields in plain JSON, where lists stand for tuples."""
    names = [f.name for f in fields(cls) if f.name in plain]  # type: ignore[arg-type]
    found = {name: plain[name] for name in names}
    return cls(**{k: tuple(v) if k == "beyond" else v for k, v in found.items()})


def strongest(weights: Sequence[str]) -> str:
    """The greatest change among several.

    >>> strongest(["own", "refitted", "own"]), strongest([])
    ('refitted', 'own')
    """
    return max(weights, key=WEIGHTS.index, default="own")
