"""A run on record: one typed structure for all verbs, written as ``result.json``.

Card, page, terminal and picture are made from it alone. Everything that they say of what was done
is said here, by the method and by the layer kinds; the report adds no words of its own about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TypeVar, get_origin, get_type_hints

from moesaic.foreign import JSON, Values, suits

FORMAT = 2
T = TypeVar("T")

WEIGHTS = ("own", "refitted", "averaged", "trained")
"""Changes of weights, the least first: the base model's own (moved, sliced or scaled by
constants at most), solved for in closed form, means over several experts, trained."""


@dataclass(frozen=True)
class LayerRecord:
    """One decoder layer of the result."""

    index: int
    kind: str
    """``dense``, ``moe`` (as they were in the base), or a layer kind's name."""
    told: str
    """The layer's new form, in words: ``6 of 8 experts stay``."""
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
    shape: Values = field(default_factory=dict)
    """Figures that only this kind has: kept experts, beta."""
    analysis: Values = field(default_factory=dict)
    """Figures that the method saw of the layer: losses, calls, coverage."""

    @property
    def changed(self) -> bool:
        return self.kind not in ("dense", "moe")


@dataclass(frozen=True)
class Step:
    """One verb carried out."""

    verb: str
    method: str
    label: str
    """Its name in titles (:attr:`moesaic.config.MethodConfig.label`)."""
    title: str
    """A clause for the page's and the card's title: ``pruned by REAP to 6 of 8 experts``."""
    told: str
    """The result in one or two sentences, for the card."""
    paper: str = ""
    beyond: tuple[str, ...] = ()
    """Additions to that paper's method."""
    weights: str = "own"
    """The greatest change of weights in this step, of any layer."""
    config: Values = field(default_factory=dict)
    variants: Mapping[str, str] = field(default_factory=dict)
    """Comparisons of this step in words, by the name they have in ``scores``."""
    unit: str = "expert"
    """The word for the parts that its result's routers choose."""
    kind: str = ""
    """The drawings that suit: ``split``, ``learned``, ``gated``, ``experts``, ``skipping``,
    ``fewer``, ``condensed`` or ``trained``."""
    summary: Values = field(default_factory=dict)
    """Findings about the whole model: the order of choice, training losses."""
    output: Values = field(default_factory=dict)
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
    calibration: Values = field(default_factory=dict)
    environment: Values = field(default_factory=dict)
    log: Values = field(default_factory=dict)
    """``stages`` of the run with their seconds, the ``warnings`` that were given, and those of
    them that are ``of_speed``."""
    measured: Values = field(default_factory=dict)
    """``files``, bytes of the weights' files of ``original`` and ``result``. Measurements:
    ``evaluation``, ``scores``, ``routing``, ``generation``, ``samples``, ``activity``, ``speed``,
    ``speed_interleaved``, ``speed_ratio``; none of them without ``--eval``."""

    def as_json(self) -> JSON:
        """As ``result.json`` holds it: ``measured`` laid open beside the other keys."""
        plain = asdict(self)
        measured = plain.pop("measured")
        return {**plain, **measured}

    @classmethod
    def from_json(cls, plain: Values) -> Record:
        """The record that ``result.json`` holds; the inverse of :meth:`as_json`.

        Keys of steps and layers that are unknown are left out.

        Raises:
            ValueError: it is no record of this format.
        """
        if not isinstance(plain, Mapping) or plain.get("format") != FORMAT:
            raise ValueError(
                f"not of this version of Moesaic, format {FORMAT}: make the result anew."
            )
        own = {f.name for f in fields(cls)} - {"measured"}
        try:
            if not isinstance(plain["steps"], list) or not isinstance(plain["layers"], list):
                raise TypeError("steps and layers are lists")
            steps = [_known(Step, x) for x in plain["steps"]]
            layers = [_known(LayerRecord, x) for x in plain["layers"]]
            measured = {k: v for k, v in plain.items() if k not in own}
            parts = {"steps": steps, "layers": layers, "measured": measured}
            return _known(cls, {**plain, **parts})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not whole: {error}.") from None

    def output(self) -> JSON:
        """As ``--json`` prints it: layers laid open, and the keys that the last step promises."""
        plain = self.as_json()
        for layer in plain["layers"]:
            layer |= layer.pop("shape")
            layer |= layer.pop("analysis")
        return plain | (dict(self.steps[-1].output) if self.steps else {})


def _known(cls: type[T], plain: Values) -> T:
    """A dataclass of its fields in plain JSON, where lists stand for tuples."""
    found = {}
    for name, hint in get_type_hints(cls).items():
        if name in plain:
            if not suits(plain[name], hint):
                raise TypeError(f"{name} is {plain[name]!r:.40}")
            found[name] = tuple(plain[name]) if get_origin(hint) is tuple else plain[name]
    return cls(**found)


def strongest(weights: Sequence[str]) -> str:
    """The greatest change among several.

    >>> strongest(["own", "refitted", "own"]), strongest([])
    ('refitted', 'own')
    """
    return max(weights, key=WEIGHTS.index, default="own")
