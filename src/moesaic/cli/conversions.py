"""Commands that convert a model: one for each verb, made from its methods' configs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click

from moesaic.cli import options as given
from moesaic.cli.commands import ALL, Command, app, carry_out, emit, register
from moesaic.config import OF_BOTH, Calibration, Evaluation, MethodConfig, Verb, about, flag_of
from moesaic.errors import MoesaicError
from moesaic.io.names import check_name
from moesaic.io.outputs import STATISTICS, check_out, check_out_file
from moesaic.methods import VERBS, methods_of
from moesaic.recipe import Recipe, load_recipe, method_of, parse_as, step_config
from moesaic.types import JSON, expand_home

TEXT = given.TEXT
RUN = [given.DRY_RUN, given.OVERWRITE, given.RESUME, given.PUSH, given.AS_JSON]
MEASURED = ("data", "max_tokens", "compare", "baselines")
"""Fields of Evaluation that verbs have as options; ``-o`` takes the others."""


class _VerbCommand(Command):
    """Command of a verb, whose options are those of the method that its arguments name."""

    def __init__(self, verb: Verb) -> None:
        self.verb, self.methods = verb, methods_of(verb.name)
        self.method, self.bundle = next(iter(self.methods)), JSON()
        names = TEXT if verb.calibrates else ()
        self.text = [given.option_of(Calibration, name, given.COMMON) for name in names]
        self.flags_of_text = {flag for made in self.text for flag in made.opts}
        super().__init__(verb.name, self.run, verb.example, self._params(), verb.help)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        self.method = self._named(args)
        self.params = self._params()
        return super().parse_args(ctx, args)

    @property
    def config(self) -> type[MethodConfig]:
        """Config class of the chosen method."""
        return self.methods[self.method]

    def _named(self, args: Sequence[str]) -> str:
        """Return the method that arguments name, by ``--method`` or by its options."""
        own = {field.name for config in self.methods.values() for field in fields(config)}
        own |= {"method", "recipe"}
        options: JSON = {}
        for word, following in zip_longest(args, args[1:], fillvalue=""):
            flag, equals, value = word.partition("=")
            name = given.field_of(flag)
            if flag in ("-o", "--option"):
                options[(value if equals else following).partition("=")[0]] = ""
            elif word.startswith("--") and flag not in self.flags_of_text:
                options[name] = value if equals else following
        named = {name: value for name, value in options.items() if name in own}
        self.bundle = {}
        try:
            method = method_of(self.verb.name, named)
        except MoesaicError:
            if {"-h", "--help", ALL} & {*args}:
                return next(iter(self.methods))
            raise
        if method not in self.methods:
            step_config(self.verb.name, {"method": method})  # refused, with what was meant
        bundles = self.methods[method].bundles
        bundle = str(named.get("recipe", "" if "method" in named else "best"))
        self.bundle = dict(bundles.get(bundle, {}))
        return method

    def _params(self) -> list[click.Parameter]:
        """Return the command's parameters, those of its method first."""
        verb, config = self.verb, self.config
        own = [
            given.option_of(
                config, f.name, given.SELDOM if about(f).seldom else given.OWN, bundle=self.bundle
            )
            for f in fields(config)
            if flag_of(f) not in self.flags_of_text
        ]
        if len(self.methods) > 1:
            first = next(iter(self.methods))
            best = " with --recipe best" if "best" in self.methods[first].bundles else ""
            help = f"Default: {first}{best}."
            own.append(given.Option("--method", help, metavar="|".join(self.methods)))
        if config.bundles:
            help = f"Options that belong together: {', '.join(config.bundles)}."
            own.append(given.Option("--recipe", help, metavar="NAME"))
        if verb.compares:
            help = f"Also measure {verb.compares}. Repeatable."
            own.append(given.option_of(Evaluation, "compare", help=help))
        if verb.observes:
            own.append(given.option_of(Calibration, "stats"))
        help, shape = f"Any other option ({ALL} lists them). Repeatable.", "NAME=VALUE"
        own.append(given.Option("option -o --option", help, metavar=shape, multiple=True))
        measured = [
            given.option_of(Evaluation, n, given.COMMON) for n in MEASURED if n != "compare"
        ]
        help = "Measure result and original."
        evaluate = given.Option("evaluate --eval/--no-eval", help, given.COMMON, default=True)
        common = [*self.text, *measured, evaluate, given.DEVICE, given.DTYPE]
        return [given.MODEL, given.OUT, *own, *common, *RUN]

    def unknown(self, flag: str, others: Iterable[str] = ()) -> str:
        name = given.field_of(flag)
        for method, config in self.methods.items():
            if name in {field.name for field in fields(config)}:
                return f"{flag} is an option of --method {method}, not of {self.method}."
        others = (flag_of(f) for config in self.methods.values() for f in fields(config))
        return super().unknown(flag, others)

    def titles(self) -> dict[str, str]:
        return {given.OWN: f"Options of --method {self.method}"} if len(self.methods) > 1 else {}

    def remarks(self, ctx: click.Context) -> list[str]:
        others = [name for name in self.methods if name != self.method]
        sentences = []
        if others:
            sentences.append(
                f"Options of {', '.join(others)}: moesaic {self.name} --method {others[0]} --help."
            )
        if ctx.meta.get(ALL):
            names = [f.name for f in fields(Evaluation) if about(f).seldom]
            sentences.append(f"-o also takes, for measuring: {', '.join(names)}.")
        return sentences

    def run(
        self,
        model: str,
        out: Path,
        option: Sequence[str] = (),
        method: str | None = None,
        recipe: str | None = None,
        evaluate: bool = True,
        **options: Any,
    ) -> None:
        """Make a recipe of the arguments, and carry it out."""
        making = given.take(options, [str(flag.name) for flag in RUN])
        extra, own = given.pairs(option), {field.name for field in fields(self.config)}
        device = given.take(options, given.PLACE)
        calibration = given.take(options, (*TEXT, "stats") if self.verb.calibrates else ("stats",))
        measured = given.take(options, MEASURED)
        for name in options.keys() & extra.keys():  # without text, of which -o may mean a method's
            raise MoesaicError(f"{name} is given twice; give one value.")
        if not self.verb.calibrates and "data" in measured and "train" not in {**options, **extra}:
            raise MoesaicError(
                "data is what is measured: name what is trained on, too, with --train FILE, "
                "or --train shipped for the text that ships."
            )
        seldom = [f.name for f in fields(Evaluation) if about(f).seldom and f.name not in own]
        measured |= given.take(extra, seldom)
        if measured and not evaluate:
            name = next(iter(measured)).replace("baselines", "baseline")
            raise MoesaicError(f"--{name} is for measuring: not with --no-eval.")
        options |= {n: calibration[n] for n in OF_BOTH if n in calibration and n in own}
        options |= {"method": method, "recipe": recipe}
        made = Recipe(
            model=model,
            out=str(out),
            steps=(step_config(self.verb.name, {**options, **extra}),),
            calibration=parse_as(Calibration, calibration, ""),
            evaluation=parse_as(Evaluation, measured, "") if evaluate else None,
            **device,
        )
        carry_out(made, **making)


# --- recipes, plans, statistics ------------------------------------------------------------------


def run(recipe: Path, overrides: Sequence[str], **making: Any) -> None:
    """Carry out a recipe, one complete run."""
    carry_out(load_recipe(recipe, overrides), **making)


def apply(places: Sequence[str], overwrite: bool, as_json: bool) -> None:
    """Rebuild a result from its base and its plan."""
    if not 2 <= len(places) <= 3:
        raise MoesaicError(f"apply takes [BASE] PLAN OUT; got {len(places)} of them.")
    *bases, plan, out = map(expand_home, places)
    for base in bases:
        check_name(base)
    check_out(Path(out), overwrite, [*bases, plan])
    if not Path(plan).exists():
        raise MoesaicError(f"No plan at {plan}.")
    from moesaic import pipeline

    pipeline.apply(bases[0] if bases else "", plan, out, overwrite)
    emit(as_json, {"out": out}, f"Checkpoint in {out}")


def observe(
    model: str, stats: Path, overwrite: bool, resume: bool, as_json: bool, **options: Any
) -> None:
    """Take statistics of a model once; prune, slim and skip then decide in seconds with --stats."""
    check_out_file(stats, STATISTICS, overwrite, [model])
    check_name(model)
    settings = given.device_and_dtype(options) | given.take(options, ("gram_mb",))
    settings["calibration"] = parse_as(Calibration, options, "")
    from moesaic import api
    from moesaic.distributed import process
    from moesaic.observation.files import StatsFile
    from moesaic.progress import bars

    api.observe(model, stats, **settings, overwrite=overwrite, resume=resume, progress=bars)
    if process()[0]:
        return
    header = StatsFile(stats).header
    figures = {"stats": str(stats), "bytes": stats.stat().st_size, "layers": header["layers"]}
    emit(as_json, figures, f"Statistics of {len(header['layers'])} layers in {stats}")


def commands() -> None:
    """Make the commands of all verbs, and of recipes, plans and statistics."""
    for name in VERBS:
        app.add_command(_VerbCommand(VERBS[name]))
    recipe = given.Argument("recipe", "A recipe.", "RECIPE.yaml", type=given.PATH)
    overrides = given.Argument(
        "overrides", "Fields to change, such as steps.0.prune.keep=4.", "[NAME=VALUE]...", nargs=-1,
        required=False,
    )  # fmt: skip
    example = "moesaic run recipes/more-llama-3.1-8b.yaml out=my-folder"
    register("run", run, example, [recipe, overrides, *RUN])
    words = "A model (default: the plan's), a result's folder or its plan.json, the folder to make."
    places = given.Argument("places", words, "[BASE] PLAN OUT", nargs=-1, required=True)
    params = [places, given.OVERWRITE, given.AS_JSON]
    register("apply", apply, "moesaic apply tiny-moe out rebuilt", params)
    help = "MiB for one layer's Gram matrices; 0 leaves them out, and reconstruction with them."
    stats = given.Argument("stats", "The file to make.", type=given.PATH)
    text = [given.option_of(Calibration, name) for name in TEXT]
    gram = given.Option("--gram-mb", help, given.COMMON, metavar="N", type=given.Number(int))
    gram.of_field = True
    making = [given.OVERWRITE, given.RESUME, given.AS_JSON]
    params = [given.MODEL, stats, *text, gram, given.DEVICE, given.DTYPE, *making]
    register("observe", observe, "moesaic observe tiny-moe tiny-moe.stats", params)
