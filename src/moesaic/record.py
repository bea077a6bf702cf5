r"""Records of runs: one typed structure for all verbs, written as ``result.json``.

Card, page and terminal are made from nothing else: methods and layer kinds describe here what was
done, in sentences and as :class:`Figure`\ s, which are plain data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from moesaic.errors import quote
from moesaic.types import JSON, Values, suits

FORMAT = 3
T = TypeVar("T")
MANY, CROWDED = 1000, 10_000
"""Layers and models of a record, and experts of a layer, at most."""

WEIGHTS = ("own", "refitted", "trained")
"""Changes of weights, the least first: the base model's own (moved, sliced or scaled by
constants at most), solved for in closed form, trained."""


# --- figures -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Drawing as data: :class:`Lines`, :class:`Bars` or :class:`Heat`.

    Numbers are written by format specifications of Python: ``.1%``, ``,.4g``. They are finite, and
    None where they are not known.
    """

    section: str
    """Heading of the section that shows it."""
    title: str
    caption: str = ""
    """Sentence that explains the drawing."""
    kind: str
    """Name of the drawing in :data:`KINDS`."""


@dataclass(frozen=True)
class Series:
    """Line: its name, and its points, x and y."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Lines(Figure):
    """Lines over a common horizontal axis, each named at its end if there are several."""

    series: tuple[Series, ...]
    x: str = "layer"
    """Name of the horizontal axis."""
    y: str
    form: str = ",.4g"
    """Format of the values."""
    strong: str = ""
    """Name of the line that is drawn thick."""
    log: bool | None = None
    """True for a logarithmic scale; None to choose it if values are far apart."""
    kind: str = "lines"


@dataclass(frozen=True)
class Column:
    """Column of bars, on a scale of its own from 0."""

    name: str
    values: tuple[float | None, ...]
    """Value of each row; None if it is not known."""
    form: str = ",.4g"


@dataclass(frozen=True, kw_only=True)
class Bars(Figure):
    """Rows of bars, several columns beside each other."""

    rows: tuple[str, ...]
    columns: tuple[Column, ...]
    row: str = "layer"
    """Name of what a row stands for."""
    kind: str = "bars"


@dataclass(frozen=True)
class Row:
    """Row of a heat map: one cell per column, darker for higher values."""

    label: str
    values: tuple[float | None, ...]
    """Values of the cells; one that is None is drawn only if it is crossed out or outlined."""
    darkest: float = 0.0
    """Value that is drawn darkest; 0 for the greatest of its panel."""
    gone: tuple[int, ...] | None = None
    """Columns that are crossed out; None where nothing was to be removed."""
    outlined: tuple[int, ...] = ()
    """Columns that are outlined."""
    bar: float | None = None
    """Bar at the right, on a scale from 0; None for no bar."""
    note: str = ""
    """Note at the right."""
    panel: str = ""
    """Name of the map that the row belongs to, where several are side by side."""


@dataclass(frozen=True, kw_only=True)
class Heat(Figure):
    """Heat map of cells, or several with the same columns side by side."""

    rows: tuple[Row, ...]
    columns: tuple[str, ...]
    row: str = "layer"
    """Name of what a row stands for."""
    column: str = "expert"
    """Name of what a column stands for."""
    side: str = ""
    """Name of the bars or notes at the right."""
    form: str = ".1%"
    """Format of the values."""
    of: str = ""
    """Words after a value: ``of calls``."""
    written: str = ""
    """Format of values that are written inside of cells; empty to write none."""
    kind: str = "heat"


KINDS: dict[str, type[Figure]] = {"lines": Lines, "bars": Bars, "heat": Heat}

# --- layers, steps, runs -------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerRecord:
    """Record of a decoder layer of the result."""

    index: int
    kind: str
    """``dense``, ``moe`` (as they were in the base), or a layer kind's name."""
    text: str
    """Words for the layer's new form: ``6 of 8 experts kept``."""
    weights: str = "own"
    """Greatest change of the layer's weights, one of :data:`WEIGHTS`."""
    width: int = 0
    """Neurons stored: of a dense layer's FFN, of one expert where the layer routes."""
    width_before: int = 0
    """Number before the first step that changed the layer; 0 if not known."""
    active_width: float = 0.0
    """Neurons a token runs, shared ones included, under uniform routing."""
    experts: int = 0
    """Routed experts; 0 where nothing routes."""
    experts_before: int = 0
    """Number before the first step that changed the layer; 0 if not known."""
    top_k: int = 0
    """Routed experts that a token runs."""
    shape: Values = field(default_factory=dict)
    """Figures that only this kind has: kept experts, beta."""
    analysis: Values = field(default_factory=dict)
    """Figures that the method recorded of the layer: losses, calls, coverage."""

    @property
    def changed(self) -> bool:
        return self.kind not in ("dense", "moe")


@dataclass(frozen=True)
class Step:
    """Record of a verb that was carried out."""

    verb: str
    method: str
    label: str
    """Name of the method in titles (:attr:`moesaic.config.MethodConfig.label`)."""
    title: str
    """Clause for the page's and the card's title: ``pruned by REAP to 6 of 8 experts``."""
    text: str
    """Description of the result in one or two sentences, for the card."""
    paper: str = ""
    beyond: tuple[str, ...] = ()
    """Additions to that paper's method."""
    weights: str = "own"
    """Greatest change of any layer's weights in this step."""
    config: Values = field(default_factory=dict)
    variants: Mapping[str, str] = field(default_factory=dict)
    """Comparisons of this step in words, by the name they have in ``scores``."""
    unit: str = "expert"
    """Word for the parts that routers of the result choose."""
    ratio: str = ""
    """Ratio to show first: the share of the dense ``projections`` that a token runs, of the
    original's ``active`` parameters, or of those that are ``stored``; empty if only values
    changed."""
    figures: tuple[Figure, ...] = ()
    summary: Values = field(default_factory=dict)
    """Findings about the whole model: the order of choice, training losses."""
    output: Values = field(default_factory=dict)
    """Keys that programs rely on in ``--json``, beside or instead of the record's own."""


@dataclass
class Record:
    """Record of a run: the model, its steps, its layers, and all measurements."""

    model: str
    """Name of the original, as it was requested."""
    out: str
    model_type: str
    """Model type of the result."""
    native: bool
    """True if the result is of its base's own architecture, which transformers loads by itself."""
    steps: list[Step]
    layers: list[LayerRecord]
    """Every decoder layer of the result, in order."""
    moesaic: str = ""
    format: int = FORMAT
    calibration: Values = field(default_factory=dict)
    before: Values = field(default_factory=dict)
    """Text that the original was itself made by, where it is a result: ``sources``, the rows
    that it was calibrated on, and ``trained``, the names of text that it was trained on."""
    environment: Values = field(default_factory=dict)
    log: Values = field(default_factory=dict)
    """``stages`` of the run with their seconds, the ``warnings`` that were given, and those of
    them that are ``of_speed``."""
    measured: Values = field(default_factory=dict)
    """``files``, bytes of the weights' files of ``original`` and ``result``. Measurements:
    ``evaluation``, ``scores``, ``routing``, ``generation``, ``speed``, ``speed_interleaved``,
    ``speed_ratio``; none of them without ``--eval``."""

    def as_json(self) -> JSON:
        """Return what ``result.json`` holds: the parts of ``measured`` beside the other keys."""
        plain = asdict(self)
        measured = plain.pop("measured")
        return {**plain, **measured}

    @classmethod
    def from_json(cls, plain: Values) -> Record:
        """Return the record that ``result.json`` holds; the inverse of :meth:`as_json`.

        Keys that are unknown are left out.

        Raises:
            ValueError: it is no record of this format.
        """
        version = plain.get("format") if isinstance(plain, Mapping) else None
        if version != FORMAT:
            raise ValueError(
                f"not of this version of Moesaic, format {FORMAT}: make the result anew."
            )
        names = {f.name for f in fields(cls)} - {"measured"}
        try:
            measured = {k: v for k, v in plain.items() if k not in names}
            record = _from_json(cls, {**plain, "measured": measured})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not whole: {error}.") from None
        record._check()
        return record

    def _check(self) -> None:
        """Refuse by a ValueError more layers, experts and models than a run has: all are drawn."""
        counts = {"layers": len(self.layers)}
        counts |= {name: len(self.measured.get(name) or ()) for name in ("scores", "tried")}
        most = dict.fromkeys(counts, MANY)
        for layer in self.layers:
            for name in ("experts", "experts_before", "top_k"):
                counts[name] = max(counts.get(name, 0), getattr(layer, name))
        for name, count in counts.items():
            if count > most.get(name, CROWDED):
                raise ValueError(f"{count:,} {name} are more than any run has.")

    def output(self) -> JSON:
        """Return what ``--json`` prints: flat layers, no figures, and the last step's own keys."""
        plain = self.as_json()
        for step in plain["steps"]:
            del step["figures"]
        for layer in plain["layers"]:
            layer |= layer.pop("shape")
            layer |= layer.pop("analysis")
        return plain | (dict(self.steps[-1].output) if self.steps else {})


def _from_json(cls: type[T], plain: Values) -> T:
    """Return a dataclass of its fields in plain JSON."""
    hints = get_type_hints(cls)
    return cls(**{name: _typed(plain[name], hints[name], name) for name in hints if name in plain})


def _typed(value: Any, hint: Any, name: str) -> Any:
    """Return a field's value of plain JSON, with dataclasses for mappings, tuples for lists;
    TypeError if it is of another type."""
    if hint is Figure:
        hint = KINDS[value["kind"]]
    origin, kinds = get_origin(hint), get_args(hint)
    if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
        return _from_json(hint, value)
    if origin in (tuple, list) and isinstance(value, list | tuple):
        return origin(_typed(part, kinds[0], name) for part in value)
    if not suits(value, hint):
        raise TypeError(f"{name} is {quote(value, 40)}")
    return tuple(value) if isinstance(value, list) and origin is not list else value


def strongest(weights: Sequence[str]) -> str:
    """Return the greatest change among several.

    >>> strongest(["own", "refitted", "own"]), strongest([])
    ('refitted', 'own')
    """
    return max(weights, key=WEIGHTS.index, default="own")
