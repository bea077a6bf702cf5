"""Requests: every option's default, choices and help text, each in one place.

The command line's options, a recipe's fields and the tables of the documents are made from the
dataclasses here and from the methods' own. Nothing here imports torch, so that a wrong request is
answered at once.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache, reduce, wraps
from pathlib import Path
from textwrap import fill, indent
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from moesaic.errors import MoesaicError, check_known, hint, quote
from moesaic.families import Family, Shape
from moesaic.types import JSON, Model, Named, Tokenizer, Track, Values, expand_home, silent, suits

if TYPE_CHECKING:
    import torch
    from _typeshed import DataclassInstance

STRICT: JSON = {"extra": "forbid"}


# --- options -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class About:
    """Help text of an option, with its names, range and choices."""

    help: str
    choices: tuple[str, ...] = ()
    """Allowed values of an option; if empty, those of a ``Literal`` type."""
    flag: str = ""
    """Name on the command line, if it is not the field's: ``--calibration``."""
    metavar: str = ""
    """Placeholder for the value in help texts."""
    minimum: float | None = None
    """Least allowed value."""
    maximum: float | None = None
    """Greatest allowed value."""
    above: float | None = None
    """Exclusive lower bound."""
    below: float | None = None
    """Exclusive upper bound."""
    idle: tuple[float, str] = (0, "")
    """Value that changes nothing, with the reason in words: ``(1, "removes nothing")``."""
    beyond: str = ""
    """Addition to the paper's method that this option makes, in a few words; empty for the
    paper's own options."""
    seldom: bool = False
    """True if help omits it (papers' tables); it is given as ``-o name=value`` and in recipes."""
    parse: str = ""
    """Syntax, if not its type's: ``bytes`` for 12GB or 800MB; ``text`` for a name
    of text, which a recipe may give as a mapping or a list of them."""


def option(default: object = MISSING, help: str = "", **about: Any) -> Any:
    """Make a dataclass field with its help text; further arguments are those of :class:`About`."""
    metadata = {"about": About(help, **about)}
    if isinstance(default, list | dict | set):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def seed_option(help: str = "Seed of every random choice.", *, seldom: bool = False) -> int:
    """Make the field of a seed: a number that every library accepts."""
    return option(0, help, minimum=0, maximum=2**32 - 1, seldom=seldom)


def about(field: Field[object]) -> About:
    """Return an option's :class:`About`, which is empty for a field that is no option."""
    return field.metadata.get("about", About(""))


def flag_of(field: Field[object]) -> str:
    """Return the flag of a field: ``--keep``, or two of a switch that is not off by default."""
    name = field.name.replace("_", "-")
    if own := about(field).flag:
        return own
    if field.default is True or (field.default is None and "bool" in str(field.type)):
        return f"--{name}/--no-{name}"
    return f"--{name}"


def _in_words(field: Field[object]) -> str:
    """Return a field's help text with its default."""
    text, default = about(field).help, field.default
    plain = isinstance(default, int | float | str) and default not in ("", False)
    return f"{text} Default: {default}." if text and plain and "efault" not in text else text


def _extend_doc(doc: str | None, options: Iterable[tuple[str, str]]) -> str:
    """Return a docstring with a section that lists options, each by its name."""
    lines = [
        fill(f"{name}: {words}", 96, subsequent_indent="    ") for name, words in options if words
    ]
    listed = ["", "Options:", indent("\n".join(lines), "    ")] if lines else []
    return "\n".join([inspect.cleandoc(doc or ""), *listed])


@cache
def types_of(config: type) -> Values:
    """Return the types of a dataclass's fields, cached, as reading them is slow."""
    return get_type_hints(config)


def text_fields(config: type[DataclassInstance]) -> list[str]:
    """Return the names of the fields that hold names of text."""
    return [entry.name for entry in fields(config) if about(entry).parse == "text"]


def choices(config: type[DataclassInstance], name: str) -> tuple[str, ...]:
    """Return the values an option may have, in order; empty if it has no fixed choices."""
    for entry in fields(config):
        if entry.name == name and about(entry).choices:
            return about(entry).choices
    kind = types_of(config)[name]
    kinds = (kind, *get_args(kind))
    return next((get_args(k) for k in kinds if get_origin(k) is Literal), ())


GREATEST = 10**15
"""Greatest whole number of an option: far more than any count, and far less than 64 bits hold."""


def _check_options(config: DataclassInstance) -> None:
    """Refuse values of another type, none of an option's choices, or out of its range."""
    for entry in fields(config):
        value, info = getattr(config, entry.name), about(entry)
        kind = types_of(type(config))[entry.name]
        if value is None and suits(None, kind):
            continue
        allowed = choices(type(config), entry.name)
        if allowed:
            check_known(entry.name, value, allowed)
        if not suits(value, kind):
            raise MoesaicError(f"{entry.name} must be {_kind_in_words(kind)}; got {quote(value)}.")
        most = GREATEST if info.maximum is None and type(value) is int else info.maximum
        for holds, words, limit in (
            (operator.ge, "at least", info.minimum),
            (operator.le, "at most", most),
            (operator.gt, "above", info.above),
            (operator.lt, "below", info.below),
        ):
            if limit is not None and not holds(value, limit):
                raise MoesaicError(f"{entry.name} {value!r} must be {words} {limit:.10g}.")


WORDS: dict[object, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
}
"""Words for the types of options."""


def _kind_in_words(hint: object) -> str:
    """Return a field's type in words.

    >>> _kind_in_words(float | str | None), _kind_in_words(Path)
    ('a number or text', 'Path')
    """
    kinds = get_args(hint)
    if get_origin(hint) is tuple:
        return f"several ({_kind_in_words(kinds[0])} each)"
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_kind_in_words(kind) for kind in kinds if kind is not NoneType)
    return WORDS.get(hint, getattr(hint, "__name__", str(hint)))


@dataclass(frozen=True)
class Options:
    """Base of dataclasses whose fields are made with :func:`option`, checked and documented."""

    __pydantic_config__: ClassVar[JSON] = STRICT

    def __init_subclass__(cls, **options: object) -> None:
        """Add the options to the docstring; this runs before ``@dataclass``."""
        super().__init_subclass__(**options)
        attributes = {**getattr(cls, "__dataclass_fields__", {}), **vars(cls)}
        members = {name: value for name, value in attributes.items() if isinstance(value, Field)}
        doc = vars(cls).get("__doc__") or getattr(cls, "title", "")
        cls.__doc__ = _extend_doc(
            doc, ((name, _in_words(value)) for name, value in members.items())
        )

    def __post_init__(self) -> None:
        _check_options(self)
        self.check()

    def check(self) -> None:
        """Refuse options that contradict each other.

        Raises:
            MoesaicError: names fields, whose names are the flags of the command line.
        """


# --- methods -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MethodConfig(Options):
    """Options of a method, with the method's description.

    A subclass is a frozen dataclass whose fields are made with :func:`option`. It names the class
    that implements the method without importing it.
    """

    verb: ClassVar[str]
    """Command that the method belongs to, such as ``carve``."""
    name: ClassVar[str]
    """Name in ``--method`` and in plans."""
    title: ClassVar[str]
    """Name in the method's paper."""
    paper: ClassVar[str]
    """Authors, title and venue of its paper; empty for a method of our own."""
    implementation: ClassVar[str]
    """``"module:Class"`` of a :class:`moesaic.methods.base.Method`."""
    library: ClassVar[tuple[str, str]] = ("", "")
    """Further package that it needs, and the extra that installs it."""
    variants: ClassVar[Mapping[str, str]] = {}
    """Names that ``compare`` takes, each in words: ``static`` is ``static pruning``."""
    bundles: ClassVar[Mapping[str, Values]] = {}
    """Sets of options by the name that ``--recipe`` takes, which selects the method if only one has
    it: ``best`` for those that measure best, ``fast`` for results that engines run fast, and
    ``paper``, which every method has, for its paper's own setting."""
    window: ClassVar[int] = 256
    """Default length of a calibration window in tokens."""
    unit: ClassVar[str] = "expert"
    """Word for the parts that the result's routers choose."""

    @property
    def decides_from_stats(self) -> bool:
        """True if these options can be decided from a file of ``observe``."""
        return False

    @classmethod
    def families(cls, model: Shape) -> Iterable[Family[Any]]:
        """Return the families of configs that ``fit`` tries on a model; empty if none suits."""
        return ()

    @property
    def texts(self) -> list[str]:
        """Return the names of text in the method's own options."""
        return [getattr(self, name) for name in text_fields(type(self))]

    @property
    def credit(self) -> str:
        """Paper of these options: authors, title and venue; empty for our own."""
        return self.paper

    @property
    def idle(self) -> str:
        """Reason why these options change nothing: ``keep 1 removes nothing``; empty if they do."""
        for entry in fields(self):
            value, words = about(entry).idle
            if words and getattr(self, entry.name) == value:
                return f"{entry.name} {value:g} {words}"
        return ""

    def compared(self, name: str) -> str:
        """Return a comparison in words: ``static pruning`` for ``static``; refuse other names."""
        if not self.variants:
            raise MoesaicError(f"compare={name}: {self.title} has no comparisons.")
        check_known("compare", name, self.variants)
        return self.variants[name]

    @property
    def beyond(self) -> tuple[str, ...]:
        """Additions of these options to the paper's method, in words; empty if there are none."""
        paper = self.bundles.get("paper", {})
        changed = (f for f in fields(self) if getattr(self, f.name) != paper.get(f.name, f.default))
        return tuple(about(f).beyond for f in changed if about(f).beyond)

    @property
    def base_label(self) -> str:
        """Name of the method with these options, without additions."""
        variant = getattr(self, "variant", "full")
        return self.title if variant == "full" else self.variants.get(variant, str(variant))

    @property
    def label(self) -> str:
        """Name of a result of these options, for titles, with additions to the paper's method.

        ``MoRE``, ``static pruning``, ``MoRE and beyond it: fitted router, refit``.
        """
        if not self.beyond:
            return self.base_label
        return f"{self.base_label} and beyond it: {', '.join(self.beyond)}"


@dataclass(frozen=True)
class Verb:
    """Command that makes a model from a model; its options are those of its methods."""

    name: str
    help: str
    """Description in one sentence, for the list of commands."""
    example: str
    """Example of a command line."""
    calibrates: bool = True
    """True if it takes calibration text."""
    observes: bool = False
    """True if it can decide from a file of ``observe`` (``--stats``)."""
    compares: str = ""
    """Help text of ``--compare``; empty for a verb without comparisons."""


# --- a run ---------------------------------------------------------------------------------------


OF_BOTH = ("seed", "length")
"""Fields of :class:`Calibration` that, given by name, are also those of a method that has them."""


@dataclass(frozen=True)
class Calibration(Options):
    """Text that statistics are taken on, or that a method trains on."""

    source: str = option(
        "",
        "Text to calibrate on, or to train on: a .txt, .jsonl, .json or .parquet file, a "
        ".safetensors file of input_ids, a data set as name:config:data_dir:split, by what it is "
        "for (code, chat, tools, math, multilingual: of the hub), prose or reference, which ship, "
        "or a mix such as shipped:code=3,prose=1. Default: all text that ships.",
        flag="--calibration",
        parse="text",
    )
    samples: int | None = option(
        None, "Calibration windows. Default: 100; of a .safetensors file, all.", minimum=1
    )
    length: int | None = option(None, "Tokens of a window. Default: the method's own.", minimum=2)
    seed: int = seed_option()
    documents: bool = option(
        False, "Each calibration window is one document, cut at length, not a piece of all text."
    )
    stats: str = option(
        "", "Decide from this file of observe; the model is not run.", metavar="FILE"
    )

    def __post_init__(self) -> None:
        if isinstance(self.stats, str | Path):
            object.__setattr__(self, "stats", expand_home(str(self.stats)))
        super().__post_init__()


BASELINES = ("q8_0", "q5_0", "q4_0")
"""GGUF types that the gguf package itself quantises to, from 8.5 to 4.5 bits a weight."""


@dataclass(frozen=True)
class Evaluation(Options):
    """Measurements of the result, beside the original."""

    data: str = option(
        "",
        "Text to measure on: a file, a data set or a mix, each source of which is measured too. "
        "Default: text that ships.",
        parse="text",
    )
    length: int | None = option(
        None,
        "Tokens of a window. Default: 512; of a .safetensors file, its own.",
        minimum=2,
        seldom=True,
    )
    max_tokens: int | None = option(
        16_384, "Measure on at most this much of the text; 0: on all of it.", minimum=0
    )
    compare: tuple[str, ...] = option(
        (), "Also measure this variant, from the same statistics. Repeatable."
    )
    baselines: tuple[str, ...] = option(
        (),
        "Also measure the original quantised to this type, as a GGUF file of it is: q8_0, q5_0 or "
        "q4_0. Repeatable.",
        flag="--baseline",
    )
    rounds: int = option(
        5, "Rounds of the speed comparison; 0 leaves speed and memory out.", minimum=0, seldom=True
    )
    prompt: str = option("The capital of France is", "Continued by every model.", seldom=True)
    new_tokens: int = option(40, "Tokens that the prompt is continued by.", minimum=1, seldom=True)
    tasks: str = option(
        "",
        "Tasks, with commas between: names of lm-eval's, a paper's list (naee, cd-moe, more, "
        "tomoe, tomoe-moe, dsmoe), or a FILE.jsonl of questions.",
        metavar="NAMES|FILE.jsonl",
        seldom=True,
    )
    limit: int | None = option(
        None, "Questions of each task at most. Default: all.", minimum=1, seldom=True
    )
    shots: int | None = option(
        None, "Examples before each question. Default: the task's own.", minimum=0, seldom=True
    )
    generations: bool = option(
        False,
        "Continue fixed prompts at three temperatures, and report how often the model repeats "
        "itself or loops.",
        seldom=True,
    )
    stream: bool = option(
        False,
        "Read the model layer by layer from disk; by itself where it does not fit into memory.",
        seldom=True,
    )

    def check(self) -> None:
        if not self.prompt:
            raise MoesaicError("prompt is empty; give text to continue.")
        for type in self.baselines:
            check_known("baselines", type, BASELINES)


GgufType: TypeAlias = Literal[
    "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_k_s", "q4_0", "iq4_xs", "q3_k_m",
    "iq3_xxs", "q2_k", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s",
]  # fmt: skip
"""Types of a GGUF file's weights; from q6_k on they need ggml's quantiser."""


@dataclass(frozen=True)
class Bench(Options):
    """Settings for measuring speed."""

    length: int | None = option(
        None, "Prompt tokens. Default: 512, or what the models' positions leave.", minimum=2
    )
    new_tokens: int = option(32, "Greedy decoding steps of a round.", minimum=1)
    rounds: int = option(5, "Counted rounds, after one of warm-up.", minimum=1)


def form_of(out: str | Path, to: str = "") -> str:
    """Return the form to write: ``to`` if given; else by the name, ``gguf`` or native.

    Raises:
        MoesaicError: ``to`` is native, and the name is that of a GGUF file.
    """
    named = "gguf" if Path(out).suffix == ".gguf" else "native"
    if to == "native" != named:
        raise MoesaicError(f"{out} is a GGUF file's name: give to=gguf, or the name of a folder.")
    return to or named


@dataclass(frozen=True)
class ExportArgs(Options):
    """Form in which a model is written for other engines."""

    verb: ClassVar[str] = "export"

    to: Literal["native", "gguf"] = option(
        "native", "native (a checkpoint) or gguf (a file). Default: gguf where OUT ends so."
    )
    target: str = option("", "The architecture. Default: the one with the least to compute.")
    type: GgufType = option("f32", "The type of a GGUF file's weights.")
    calibration: str = option(
        "",
        "Text from which the importance matrix of k-quants is computed; none: quantise without "
        "one. Default: text that ships.",
    )
    memory: int | None = option(
        None,
        "Bytes that the GGUF file may take, such as 4GB: each layer's attention and FFN get types "
        "of their own, with the least estimated KL in all.",
        minimum=1,
        parse="bytes",
    )
    among: tuple[str, ...] = option(
        (), "A type that memory chooses from. Repeatable. Default: q8_0 to q2_k."
    )

    def check(self) -> None:
        for type in self.among:
            check_known("among", type, get_args(GgufType))
        if self.memory is not None and self.to != "gguf":
            raise MoesaicError("memory chooses the types of a GGUF file: pass to=gguf.")
        if self.type != "f32" and self.to != "gguf":
            raise MoesaicError(f"type={self.type} is a type of GGUF files: pass to=gguf.")
        if self.calibration and self.to != "gguf":
            raise MoesaicError("calibration is for GGUF files: pass to=gguf.")
        if self.among and self.memory is None:
            raise MoesaicError(f"among={self.among[0]} needs memory=4MB or the like.")
        if self.among and not {*self.among} - {"f32"}:
            raise MoesaicError("among=f32 quantises nothing: name a narrower type.")
        if self.memory is not None and self.type != "f32":
            raise MoesaicError(f"memory chooses types itself: leave type={self.type} out.")
        if self.memory is not None and self.calibration == "none":
            raise MoesaicError("memory chooses types by text: leave calibration=none out.")
        if by_text(self.type) and self.calibration == "none":
            raise MoesaicError(
                f"type={self.type} needs an importance matrix: leave calibration=none out."
            )
        if self.calibration not in ("", "none") and self.converted:
            raise MoesaicError(
                f"type={self.type} uses no importance matrix: leave "
                f"calibration={self.calibration} out."
            )

    @property
    def converted(self) -> bool:
        """True for types that llama.cpp's converter writes; the others are the quantiser's."""
        return self.memory is None and self.type in ("f32", "f16", "bf16", "q8_0")

    @property
    def called(self) -> str:
        """Name of the type, or words for several types."""
        return self.type if self.memory is None else "mixed"


def by_text(type: str) -> bool:
    """Return whether llama.cpp quantises to a type only with an importance matrix."""
    return type.startswith(("iq1", "iq2", "iq3"))


@dataclass(frozen=True)
class RunArgs:
    """Arguments of every verb beside its config."""

    model: Named
    """Loaded PreTrainedModel, a :class:`~moesaic.result.Result`, or a name for
    :func:`moesaic.io.source.resolve`. A model given by name is read from disk layer by layer and
    never held whole, unless it is trained."""
    calibration: Calibration = field(default_factory=Calibration)
    text: Any = None
    """Text itself instead of a source: texts, rows to train on, or tokens (N, T) as
    :class:`~moesaic.data.text.Tokens` or int64 tensor."""
    tokenizer: Tokenizer = option(None, "For texts, when model is loaded; a name brings its own.")
    compare: tuple[str, ...] = option(
        (), "Variants of the method to decide on beside it, from the same statistics."
    )
    plan: Any = option(
        None, "The plan that a loaded model was made by, where a method asks for it."
    )
    teacher: Model | None = option(None, "A loaded model to learn from, where a method distils.")
    inplace: bool = option(
        False, "Convert the caller's model itself; without it that model is not changed."
    )
    device: str = option("cpu", "The device that layers run on, when model is a name.")
    dtype: torch.dtype | None = option(
        None,
        "Floating-point type, when model is a name; None for the checkpoint's own, computed in "
        "float32 where the processor cannot multiply matrices of it.",
    )
    resume_from: Path | None = option(
        None, "Folder for finished layers; a run that finds them there continues."
    )
    revision: str | None = option(None, "Branch, tag or commit, when model is a hub id.")
    token: str | bool | None = option(
        None, "Of the hub, when model is a hub id. Default: HF_TOKEN, or that of hf auth login."
    )
    track: Track = silent
    """Function that wraps iterables to show progress."""

    @classmethod
    def of(cls, model: Named, **options: Any) -> RunArgs:
        """Make the arguments from the flat keyword arguments of the library's verbs.

        Args:
            model: see :attr:`model`.
            options: fields of this class and of :class:`Calibration`; ``calibration`` may also be
                a source, texts or tokens.

        Raises:
            TypeError: an option is unknown.
        """
        from moesaic.progress import tracked

        text = options.pop("calibration", "")
        names = {f.name for f in fields(Calibration)} & options.keys()
        settings = {name: options.pop(name) for name in sorted(names)}
        if isinstance(text, Calibration):
            calibration = replace(text, **settings)
        elif isinstance(text, str | Path):
            calibration = Calibration(**{"source": str(text), **settings})
        else:
            options["text"], calibration = text, Calibration(**settings)

        compare = options.get("compare") or ()
        options["compare"] = (compare,) if isinstance(compare, str) else tuple(compare)
        progress = options.pop("progress", True)
        if (folder := options.get("resume_from")) is not None:
            options["resume_from"] = folder = path_to(folder)
            if folder.is_file():
                raise MoesaicError(f"resume_from {folder} is a file; name a folder.")
        place = checked_place(*map(options.get, ("device", "dtype", "tokenizer")))
        options["device"], options["dtype"] = place
        unknown = options.keys() - {f.name for f in fields(cls)} | options.keys() & {"track"}
        if unknown:
            near = hint(min(unknown), [f.name for f in fields(cls)])
            raise TypeError(f"unknown option {', '.join(sorted(unknown))}.{near}")
        return cls(model=model, calibration=calibration, track=tracked(progress), **options)


WRITTEN = {
    "tokenizer": "Tokenizer | None",
    "plan": "Plan | None",
    "teacher": "Model | None",
    "compare": "Sequence[str]",
    "resume_from": "str | Path | None",
    "dtype": "torch.dtype | str | None",
}
"""Types of the arguments of :meth:`RunArgs.of` that accept more than the field's type."""


V = TypeVar("V", bound=Callable[..., Any])
Shown: TypeAlias = tuple[inspect.Parameter, str]
"""Keyword argument with its meaning."""


def _argument(name: str, default: object, annotation: str) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _run_options() -> Iterator[Shown]:
    """Yield the keyword arguments of all verbs, with their meanings."""
    type = "str | Path | Calibration | Sequence[str] | Sequence[Values] | Tokens | Tensor"
    words = "Text to calibrate or to train on: a source, texts, rows, or token ids."
    yield _argument("calibration", "", type), words
    for config in (Calibration, RunArgs):
        for entry in fields(config):
            if about(entry).help and entry.name != "source":
                hint = WRITTEN.get(entry.name) or str(entry.type)
                yield _argument(entry.name, entry.default, hint), _in_words(entry)
    words = "Bars on stderr; False for none, or a function (items, label, total). Default: True."
    yield _argument("progress", True, "bool | Track"), words


def takes_options(*configs: type[Options], without: Sequence[str] = ()) -> Callable[[V], V]:
    """Decorate a verb that takes options by name: its signature and docstring list them.

    Args:
        configs: classes whose fields it takes too, such as those of its methods.
        without: options of other verbs that it does not take, and refuses by a TypeError.
    """
    common = {p.name: (p, words) for p, words in _run_options() if p.name not in without}
    shown = dict(_method_options(configs)) | common

    def named(made: V) -> V:
        @wraps(made)
        def verb(*args: Any, **options: Any) -> Any:
            if unused := [name for name in options if name in without]:
                raise TypeError(f"{made.__name__}() has no option {unused[0]!r}.")
            return made(*args, **options)

        signature = inspect.signature(made)
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        if configs:
            every = " | ".join(config.__name__ for config in configs)
            parameters[1] = parameters[1].replace(annotation=f"{every} | None")
        more = [parameter for parameter, _ in shown.values()]
        vars(verb)["__signature__"] = signature.replace(parameters=[*parameters, *more])
        verb.__doc__ = _extend_doc(verb.__doc__, ((n, words) for n, (_, words) in shown.items()))
        return cast(V, verb)

    return named


def _method_options(configs: Sequence[type[Options]]) -> Iterator[tuple[str, Shown]]:
    """Yield the options of some configs by name, each once."""
    methods = [config for config in configs if issubclass(config, MethodConfig)]
    bundles = dict.fromkeys(name for config in methods for name in config.bundles)
    named = {
        "method": ([config.name for config in methods], "Default: what measures best."),
        "recipe": ([*bundles], "A name for options that belong together."),
    }
    for name, (values, words) in named.items():
        if len(values) > (name == "method"):
            hint = f"Literal[{', '.join(map(repr, values))}] | None"
            yield name, (_argument(name, None, hint), words)
    entries: dict[str, list[tuple[type, Field[Any]]]] = {}
    for config in configs:
        for entry in fields(config):
            entries.setdefault(entry.name, []).append((config, entry))
    for name, group in entries.items():
        hints = [types_of(config)[name] for config, _ in group]
        default = group[0][1].default
        same = all(entry.default == default for _, entry in group)
        texts = dict.fromkeys(_in_words(entry) for _, entry in group)
        spelled = _spelled(reduce(operator.or_, hints))
        if about(group[0][1]).parse == "bytes":
            spelled = f"str | {spelled}"
        shown = _argument(name, default if same else ..., spelled)
        yield name, (shown, " ".join(texts))


def _spelled(hint: object) -> str:
    """Return a type as it is written in an annotation, with Sequence in place of a tuple."""
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(dict.fromkeys(map(_spelled, get_args(hint))))
    if hint is NoneType:
        return "None"
    written = inspect.formatannotation(hint).replace("typing.", "")
    return written.replace("tuple[", "Sequence[").replace(", ...]", "]")


# --- values --------------------------------------------------------------------------------------

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda", "mps", "xpu", "npu", "hpu", "mlu", "musa")


def path_to(out: object) -> Path:
    """Return the path of an output that a caller named; refuse what is no name of a file."""
    if not isinstance(out, str | Path) or "\0" in str(out):
        raise MoesaicError(f"An output is named by a str or a Path; got {quote(out)}.")
    return Path(expand_home(out))


def checked_place(
    device: object, dtype: object, tokenizer: object
) -> tuple[str, torch.dtype | None]:
    """Return the device and the floating-point type that a Python function was given, by name or as
    torch has them; None is the CPU, and a model's own type. Refuse what cannot be used."""
    name = "auto" if dtype is None else str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        known = ", ".join(known for known in DTYPES if known != "auto")
        raise MoesaicError(f"dtype must be one of {known}, or None; got {quote(dtype)}.")
    if isinstance(tokenizer, str) or (tokenizer is not None and not hasattr(tokenizer, "encode")):
        raise MoesaicError(f"tokenizer must be a tokenizer or None; got {quote(tokenizer)}.")
    return check_device("cpu" if device is None else str(device)), parse_dtype(name)


def parse_dtype(name: str) -> torch.dtype | None:
    """Return the torch type of a name: float32, bfloat16 or float16; None for ``auto``."""
    check_known("dtype", name, DTYPES)
    if name == "auto":
        return None
    import torch

    return getattr(torch, name)


def parse_bytes(text: str) -> int:
    """Parse a number of bytes with an optional unit, decimal (KB) or binary (KiB).

    >>> parse_bytes("1.5GB"), parse_bytes("300"), parse_bytes("1.001MB"), parse_bytes("2GiB")
    (1500000000, 300, 1001000, 2147483648)
    """
    units = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    units |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in units:
        raise MoesaicError(f"{text!r} is not a number of bytes such as 800MB or 12.5GB.")
    return round(float(match[1]) * units[match[2]])


_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3}


def in_unit(size: int) -> str:
    """Return a number of bytes as :func:`parse_bytes` reads it, rounded up to four digits.

    >>> in_unit(1000), in_unit(3_366_400), in_unit(12_500_000_001), parse_bytes(in_unit(9_999_999))
    ('1KB', '3.367MB', '12.51GB', 10000000)
    """
    unit = next((u for u in _UNITS if size >= _UNITS[u]), "")
    step = 10 ** max(0, len(str(size)) - 4)
    return f"{-(-size // step) * step / _UNITS[unit]:g}{unit}" if unit else str(size)


def check_device(name: str) -> str:
    """Return a device's name; refuse a device that this machine does not have."""
    if name == "cpu":
        return name
    if name.partition(":")[0] not in DEVICES:
        listed = ", ".join(DEVICES)
        raise MoesaicError(f"device {name!r} is none of {listed}, with a number such as cuda:1.")
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise MoesaicError(
            f"device {name!r} cannot be used here: {str(error).splitlines()[0]:.100}"
        ) from None
    return name


def chosen_layers(spec: str | Sequence[int], count: int) -> list[int]:
    """Return the decoder layers that a ``layers`` option names (MoRE, App. E.4 and Table 12).

    Raises:
        MoesaicError: the name is unknown, or a layer does not exist.
    """
    named = {
        "all": range(count),
        "last-half": range(count // 2, count),
        "uniform": range(1, count, 2),
        "early-middle": range(count // 2),
    }
    if isinstance(spec, str):
        if spec in named:
            return list(named[spec])
        try:
            spec = tuple(int(part) for part in spec.split(","))
        except ValueError:
            raise MoesaicError(
                f"layers {spec!r} is none of {', '.join(named)}, nor numbers such as 4,5,6."
            ) from None
    layers = sorted(set(spec))
    if not layers or layers[0] < 0 or layers[-1] >= count:
        raise MoesaicError(f"layers must name layers from 0 to {count - 1}; got {list(spec)}.")
    return layers
