"""The commands that make a model of a model: one for each verb, made from its methods' configs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli.commands import carry_out, emit, register
from moesaic.cli.measure import place
from moesaic.cli.options import (
    DEVICE,
    DTYPE,
    PLACE,
    TEXT,
    AsJson,
    DryRun,
    Model,
    Option,
    Out,
    Overwrite,
    Push,
    Resume,
    Value,
    of_methods,
    option,
    pairs,
    taken,
)
from moesaic.config import Calibration, Evaluation, Verb, about
from moesaic.errors import MoesaicError
from moesaic.io.names import check_name
from moesaic.io.outputs import STATISTICS, check_file
from moesaic.methods import VERBS, methods_of
from moesaic.recipe import Recipe, checked, method_of, step_config

SELDOM = tuple(field.name for field in fields(Evaluation) if about(field).seldom)


def verb_options(verb: Verb) -> list[Option]:
    """The options of a verb's command, most used first."""
    methods = methods_of(verb.name)
    names = TEXT if verb.calibrates else ()
    calibration = [option(Calibration, name) for name in names]
    method_options = of_methods(methods, {o.flag for o in calibration})
    bundles: dict[str, list[str]] = {}
    for method, config in methods.items():
        for name in config.bundles:
            bundles.setdefault(name, []).append(method)
    first, rest = [], []
    if len(methods) > 1:
        default = next(iter(methods))
        default += " with --recipe best" if "best" in methods[default].bundles else ""
        help = f"{', '.join(methods)}. Default: {default}."
        first.append(Option("method", "--method", str, help))
    if bundles:
        several = len(methods) > 1
        named = (f"{n} ({', '.join(m)})" if several else n for n, m in bundles.items())
        help = f"Options that belong together: {', '.join(named)}."
        rest.append(Option("recipe", "--recipe", str, help, metavar="NAME"))
    if verb.compares:
        help = f"Also measure {verb.compares}. Repeatable."
        rest.append(option(Evaluation, "compare", help=help))
    rest.append(Option("option", "--option -o", list, "Any other, of --help-all.", "KEY=VALUE"))
    if verb.observes:
        rest.append(option(Calibration, "stats"))
    evaluation = [option(Evaluation, name) for name in ("data", "max_tokens", "baselines")]
    common = [*calibration, *evaluation, DEVICE, DTYPE]
    visible = [*first, *(o for o in method_options if not o.hidden), *rest]
    visible += [replace(o, common=True) for o in common]
    flags = {o.flag for o in visible}
    seldom = [o for o in method_options if o.hidden and o.flag not in flags]
    return [*visible, *seldom]


def command(verb: Verb) -> Callable[..., None]:
    """The function behind a verb's command."""
    methods = methods_of(verb.name)
    text = (*TEXT, "stats") if verb.calibrates else ("stats",)

    def run(
        model: Model,
        out: Out,
        evaluate: Annotated[
            bool, typer.Option("--eval/--no-eval", help="Measure result and original.")
        ] = True,
        dry_run: DryRun = False,
        overwrite: Overwrite = False,
        resume: Resume = False,
        push: Push = "",
        as_json: AsJson = False,
        **options: Value,
    ) -> None:
        extra = pairs(options.pop("option", None))
        device, calibration = taken(options, PLACE), taken(options, text)
        measured = taken(options, ("data", "max_tokens", "compare", "baselines"))
        for name in options.keys() & extra.keys():  # without text, of which -o may mean a method's
            raise MoesaicError(f"{name} is given twice; give one value.")
        if not verb.calibrates and "data" in measured and "train" not in {**options, **extra}:
            raise MoesaicError(
                "data is what is measured: name what is trained on, too, with train=FILE, or "
                "train=shipped for the text that ships."
            )
        config = methods.get(method_of(verb.name, options))
        config_fields = {field.name for field in fields(config)} if config else set()
        measured |= taken(extra, (name for name in SELDOM if name not in config_fields))
        if measured and not evaluate:
            raise MoesaicError(f"{next(iter(measured))} is for measuring: not with evaluate=False.")
        if "seed" in calibration and "seed" in config_fields:
            options["seed"] = calibration["seed"]
        recipe = Recipe(
            model=model,
            out=str(out),
            steps=(step_config(verb.name, {**options, **extra}),),
            calibration=checked(Calibration, calibration, ""),
            evaluation=checked(Evaluation, measured, "") if evaluate else None,
            **device,
        )
        carry_out(recipe, overwrite, resume, as_json, dry_run, push)

    run.__name__, run.__doc__ = verb.name, verb.help
    return run


# --- observe -------------------------------------------------------------------------------------


def observe(
    model: Model,
    stats: Annotated[Path, typer.Argument(metavar="STATS", help="The file to make.")],
    overwrite: Overwrite = False,
    resume: Resume = False,
    as_json: AsJson = False,
    **options: Value,
) -> None:
    """Observe a model once; prune, slim and skip then decide in seconds with --stats."""
    check_file(stats, STATISTICS, overwrite, [model])
    check_name(model)
    where, gram = place(taken(options, PLACE)), taken(options, ("gram_mb",))
    calibration = checked(Calibration, options, "")
    from moesaic import api
    from moesaic.bars import bars
    from moesaic.distributed import process
    from moesaic.observation.files import StatsFile

    api.observe(
        model,
        stats,
        calibration=calibration,
        **gram,
        **where,
        overwrite=overwrite,
        resume=resume,
        progress=bars,
    )
    if process()[0]:
        return
    header = StatsFile(stats).header
    figures = {"stats": str(stats), "bytes": stats.stat().st_size, "layers": header["layers"]}
    emit(as_json, figures, f"Statistics of {len(header['layers'])} layers in {stats}")


def commands() -> None:
    """Make the commands of all verbs, and of observe."""
    for name in VERBS:
        verb, options = VERBS[name], verb_options(VERBS[name])
        field_names = [
            field.name for config in methods_of(name).values() for field in fields(config)
        ]
        run = command(verb)
        register(name, run, verb.example, options, [*SELDOM, *field_names])
    help = "MiB for one layer's Gram matrices; 0 leaves them out, and reconstruction with them."
    text = [option(Calibration, name) for name in TEXT]
    options = [*text, Option("gram_mb", "--gram-mb", int, help), DEVICE, DTYPE]
    register("observe", observe, "moesaic observe tiny-moe tiny-moe.stats", options)
