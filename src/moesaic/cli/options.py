"""What the commands take: options by type, and those that commands share as dataclasses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from moesaic.cli.shared import carry_out
from moesaic.errors import MoesaicError
from moesaic.recipe import Calibration, Evaluation, Recipe

MODELS = "A hub id, a folder, a .gguf file, smollm2, or a model that ships (tiny-dense ...)."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODELS, show_default=False)]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an unfinished run of the same.")]
CalibrationText = Annotated[
    str,
    typer.Option(
        "--calibration",
        help="Text to calibrate on, or to train on: a .txt, .jsonl, .json or .parquet file, a "
        ".safetensors file of input_ids, a hub dataset id, prose, reference or code, or a mix such "
        "as code=3,prose=1. Default: all text that ships.",
    ),
]
Samples = Annotated[int, typer.Option(min=1, help="Calibration windows.")]
CalibrationLength = Annotated[int, typer.Option("--length", min=2, help="Tokens a window.")]
Seed = Annotated[int, typer.Option(help="Seed of every random choice.")]
EvalData = Annotated[
    str, typer.Option("--data", help="Text to measure on; as for --calibration. Default: ships.")
]
EvalLength = Annotated[int, typer.Option("--length", min=2, help="Tokens a window.")]
MaxTokens = Annotated[int | None, typer.Option(min=2, help="Use at most this much of the text.")]
Refit = Annotated[
    bool | None,
    typer.Option("--refit", help="Refit down projections to the original layers' outputs."),
]
Bundle = Annotated[
    str | None,
    typer.Option(
        "--recipe", metavar="NAME", help="best: what measures best, where no option says otherwise."
    ),
]
Stats = Annotated[
    str, typer.Option(metavar="FILE", help="Decide from this file of observe; run nothing.")
]
Evaluate = Annotated[bool, typer.Option("--eval/--no-eval", help="Measure result and original.")]


def said(**given: Any) -> dict[str, Any]:
    """The options that were given; a method's config has the defaults of the others."""
    return {name: value for name, value in given.items() if value is not None}


def options(pairs: list[str] | None) -> dict[str, Any]:
    """``key=value`` pairs; values are read as in a recipe."""
    given = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals:
            raise MoesaicError(f"--option {pair!r} is not key=value.")
        given[key] = value
    return given


def numbers(text: str) -> list[float]:
    """Numbers between commas."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise MoesaicError(f"{text!r} is not a list of numbers such as 0.3,0.5.") from None


# --- options that commands share -----------------------------------------------------------------


@dataclass(frozen=True)
class CalibrationOptions:
    """What is calibrated on."""

    calibration: CalibrationText = ""
    samples: Samples = 100
    length: CalibrationLength = 256
    seed: Seed = 0

    def drawn(self, stats: str = "") -> Calibration:
        """As a recipe says it."""
        return Calibration(self.calibration, self.samples, self.length, self.seed, stats)


@dataclass(frozen=True)
class RunOptions:
    """What is measured, where it runs, and what is shown."""

    evaluate: Evaluate = True
    data: EvalData = ""
    max_tokens: MaxTokens = 16_384
    device: Device = "cpu"
    dtype: Dtype = "auto"
    overwrite: Overwrite = False
    resume: Resume = False
    as_json: AsJson = False

    def carry_out(
        self,
        model: str,
        out: Path,
        step: Any,
        calibration: Calibration | None = None,
        compare: list[str] | None = None,
    ) -> None:
        """Run one step as a recipe, and show what came of it."""
        measured = Evaluation(self.data, max_tokens=self.max_tokens, compare=tuple(compare or ()))
        recipe = Recipe(
            model=model,
            out=str(out),
            steps=(step,),
            calibration=calibration or Calibration(),
            evaluation=measured if self.evaluate else None,
            device=self.device,
            dtype=self.dtype,
        )
        carry_out(recipe, self.overwrite, self.resume, self.as_json)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters may be dataclasses: each field becomes an option."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, tuple[Any, list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        group = parameter.annotation
        if not is_dataclass(group):
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(group, include_extras=True)
        groups[name] = (group, [field.name for field in fields(group)])
        parameters += [
            inspect.Parameter(
                f.name, parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name]
            )
            for f in fields(group)
        ]

    def run(**given: Any) -> None:
        for name, (group, names) in groups.items():
            given[name] = group(**{n: given.pop(n) for n in names})
        command(**given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run
