"""Result of a run: a plan, and the model, files, scores and record that are made from it."""

from __future__ import annotations

import copy
import io
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.text import Text
from torch import Tensor

from moesaic import __version__, hub, report
from moesaic.arch.dense import PREFIX, Arch, LayerUse
from moesaic.arch.lookup import base_arch
from moesaic.config import Evaluation, MethodConfig, path_to
from moesaic.data.sources import read_by
from moesaic.data.text import Tokens, evaluation_tokens
from moesaic.errors import MoesaicError, printable
from moesaic.exports import export
from moesaic.io.checkpoint import IN_MEMORY, ShardWriter, cast, model_fingerprint
from moesaic.io.models import dtype_by_name, skeleton_of, untouched
from moesaic.io.names import (
    CARD,
    FOLDER,
    PAGE,
    PROCESSORS,
    RECIPE,
    RECORD,
    SIDE_FILES,
    check_repository,
    our_folder,
    our_path,
)
from moesaic.io.naming import NEXT, is_mtp, language, leave_out
from moesaic.io.outputs import mark_drawn, whole_folder
from moesaic.io.quantised import describe_format
from moesaic.io.source import Source, has_tokenizer, reason_of_hub
from moesaic.io.trust import check_plain_file, clean_tokenizer, copy_side_files, mapping_of
from moesaic.methods.base import Decision, Method
from moesaic.metrics.evaluate import evaluate, text_behind
from moesaic.metrics.forward import InMemory
from moesaic.metrics.generations import generate
from moesaic.metrics.score import Score, model_size, scores
from moesaic.metrics.speed import environment
from moesaic.observation.job import Job
from moesaic.plan import Plan
from moesaic.recipe import Recipe
from moesaic.record import LayerRecord, Record, Step, strongest
from moesaic.surgery import applied, apply_plan, check_base, mtp_blocks, mtp_fate
from moesaic.types import JSON, MadeModel, Model, Named, Tokenizer, Values, expand_home

ALONE = "The result is only the language model; other parts, such as a vision tower, are left out."
FATES = {
    "kept": "are kept as they are",
    "along": "are reduced as the last layer is",
    "left_out": "are left out",
}
"""Words for the change of MTP layers (:func:`moesaic.surgery.mtp_fate`)."""


@dataclass
class Result(MadeModel):
    """Result of a method for one model, trained or not.

    Every verb and function takes it as a model.
    """

    method: Method[MethodConfig, Arch]
    job: Job[Arch]
    decision: Decision
    evaluation: Tokens | None = field(default=None, repr=False)
    """Tokens for :attr:`scores`; None for the text that ships."""
    _weights: str = field(default="", init=False, repr=False)
    """Fingerprint of :attr:`model` when it was made; empty before that."""

    @property
    def plan(self) -> Plan | None:
        """Plan of the result; None if a converted model was only trained further."""
        return self.decision.plan

    @property
    def analyses(self) -> Mapping[int, Values]:
        """Figures that the method recorded of each layer, by layer, as plain JSON."""
        return self.decision.analyses

    @property
    def comparisons(self) -> Mapping[str, Plan]:
        """Plans of the requested comparisons, by name."""
        return self.decision.comparisons

    @property
    def summary(self) -> Values:
        """Findings about the whole model, as plain JSON; curves under ``training``."""
        return self.decision.summary

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the model; None if a loaded model came without one.

        Raises:
            MoesaicError: the original's folder holds none that can be used.
        """
        return self.job.tokenizer

    @property
    def complete(self) -> Plan | None:
        """Plan of the result with those of earlier steps; None if weights were trained."""
        if self.plan is None or self.decision.trained is not None:
            return None
        kind = self.job.dtype if self.job.on_disk else self.job.original.dtype
        dtype = str(kind or "auto").removeprefix("torch.")
        return replace(self.plan, dtype=dtype, earlier=self._earlier)

    # --- the model -------------------------------------------------------------------------------

    def build(self, plan: Plan, dtype: torch.dtype | None = None) -> Model:
        """Return the live original with a plan applied, the caller's own model with ``inplace``.

        Args:
            plan: what was decided.
            dtype: of a model from disk; None for the requested one, or its own.
        """
        model = self.job.original
        if self.job.on_disk:
            model = model.load(self.job.device, dtype or self.job.dtype)
        elif not self.job.args.inplace:
            if plan.base.weights not in ("", model_fingerprint(model)):
                raise MoesaicError(
                    "The model that this result is of was changed since: its weights are others. "
                    "Repeat the call, or ask for result.model before you change it."
                )
            model = copy.deepcopy(model).eval()
        apply_plan(model, self.job.arch, plan)
        hub.convert_class(model, self.job.arch, plan)
        return model

    @property
    def builders(self) -> dict[str, Callable[[], Model]]:
        """Functions that return the live model of each comparison, by its name."""
        plans, trained = self.decision.comparisons, self.decision.retrained
        dtype = self.job.working_type
        built = {name: partial(self.build, plan, dtype) for name, plan in plans.items()}
        return {**built, **trained}

    @cached_property
    def model(self) -> Model:
        """Converted model, an ordinary PreTrainedModel."""
        model = self.decision.trained
        if model is None:
            assert self.plan is not None
            model = self.build(self.plan)
        self._weights = model_fingerprint(model)
        return model

    @cached_property
    def scores(self) -> dict[str, Score]:
        """Perplexity and size on text that was not calibrated on, under ``result`` and, unless
        the caller's model was converted itself, ``original``, from which the result's KL is.

        Raises:
            MoesaicError: there is no tokenizer to read the text with.
        """
        tokens, job = self.evaluation, self.job
        if tokens is None:
            if job.tokenizer is None:
                raise MoesaicError("Scores need a tokenizer: pass tokenizer=.")
            settings = Evaluation()
            tokens = evaluation_tokens(
                "", job.tokenizer, settings.length, settings.max_tokens, job.original.config
            )
        models = {"result": self.model}
        if not job.args.inplace:
            on_disk, original = job.on_disk, job.original
            models["original"] = original.load(job.device, job.dtype) if on_disk else original
        with untouched(*models.values()):
            return dict(zip(models, scores([*map(InMemory, models.values())], tokens), strict=True))

    def identity(self) -> JSON:
        """Return the inputs that the result depends on, as plain JSON."""
        trained = self.decision.trained
        return self.job.request(
            {
                "verb": self.method.config.verb,
                "config": asdict(self.method.config),
                "plan": None if self.plan is None else self.plan.fingerprint,
                "trained": None if trained is None else model_fingerprint(trained),
            }
        )

    # --- its files -------------------------------------------------------------------------------

    def save_pretrained(self, out: str | Path, overwrite: bool = False) -> Path:
        """Write all files of a result: checkpoint, tokenizer, card, and in ``moesaic/`` plan,
        recipe, record and page; whole or not at all.

        Card and page show :attr:`scores` if they were computed.

        Args:
            out: the folder to make.
            overwrite: replace it, if all that it holds was written by this package.

        Returns:
            the folder.

        Raises:
            MoesaicError: ``out`` exists, or holds what was read.
        """
        out = path_to(out)
        args = self.job.args
        read = [self._place, *read_by(self.method.config), *read_by(args.calibration)]
        with whole_folder(out, overwrite, read) as folder:
            self.write(folder)
            describe(replace(self.current_record, out=str(out)), self._recipe(out), folder)
        return out

    save = save_pretrained  # the same

    def push_to_hub(self, repo: str, *, token: str | bool | None = None) -> str:
        """Upload what :meth:`save_pretrained` writes, and return its address.

        The arguments are those of :func:`moesaic.push`.
        """
        return push(self, repo, token=token)

    def export(self, out: str | Path, to: str = "", **options: Any) -> JSON:
        """Write the model in the form that other engines load; see :func:`moesaic.export`."""
        return export(self, out, to, **options)

    # --- run -------------------------------------------------------------------------------------

    def evaluate(self, **options: Any) -> Score:
        """Measure the model beside its original.

        Args:
            options: of :func:`moesaic.evaluate`; ``against=None`` leaves the original out.
        """
        if not self.job.args.inplace:
            options.setdefault("against", self.job.original)
        place = {"device": self.job.device, "dtype": self.job.dtype} if self.job.on_disk else {}
        return evaluate(self, **{**place, **options})

    def generate(self, prompt: str, **options: Any) -> str:
        """Return the greedy continuation of a prompt; see :func:`moesaic.generate`."""
        return generate(self, prompt, **options)

    def write(self, folder: Path) -> None:
        """Write the checkpoint, and the plan that rebuilds it, into an existing folder."""
        plan = self.complete
        if self._weights and model_fingerprint(self.model) != self._weights:
            raise MoesaicError(
                "result.model was changed since it was made, and plan and record are of what it "
                "was. Save it by its own save_pretrained, or give it to a verb."
            )
        if plan is not None and self.job.on_disk:
            save_applied(self.job.original, plan, folder, self.job.dtype)
        else:
            tokenizer = None
            with suppress(MoesaicError):  # token ids needed none
                tokenizer = self.job.tokenizer
            if self.job.on_disk and self.job.original.beside:
                logging.getLogger(__name__).warning(ALONE)
            if self._before_it is not None and self._before_it.job.mtp_layers:
                logging.getLogger(__name__).warning(
                    "A result in memory has no MTP layers, and this one is saved without them. To "
                    "keep them, save the first result, and pass its folder."
                )
            hub.save_live(self.model, tokenizer, folder, self._carried)
        if plan is not None:
            plan.save(our_folder(folder))

    @property
    def _carried(self) -> Mapping[str, Tensor]:
        """Tensors of the original's MTP layers, for a model that was only trained."""
        if self.plan is not None or not self.job.on_disk or not self.job.mtp_layers:
            return {}
        checkpoint, type_of = self.job.original.checkpoint, dtype_by_name(self.model)
        last = self.model.config.num_hidden_layers
        return {
            language(disk): cast(checkpoint.tensor(disk), type_of(name))
            for disk, name in self.job.naming.in_memory.items()
            if is_mtp(name, last)
        }

    @property
    def _before_it(self) -> Result | None:
        """Result that this one was made from; None if a verb was given a model."""
        model = self.job.args.model
        return model if isinstance(model, Result) else None

    @property
    def _place(self) -> str | Path:
        """Folder of the original, or the name that it was loaded by; empty without one."""
        original = self.job.original
        if self.job.on_disk:
            return Path(original.folder)
        return str(getattr(original.config, "_name_or_path", ""))

    @property
    def _before(self) -> JSON:
        """Text that the original was calibrated and trained on, where it is a result of ours."""
        rows, trained = text_behind(Path(self._place)) if self._place else ((), ())
        before = {"sources": [row.as_json() for row in rows], "trained": [*trained]}
        return {name: values for name, values in before.items() if values}

    @property
    def _earlier(self) -> tuple[Plan, ...]:
        """Plans that made the original, if they are in its folder."""
        if (result := self._before_it) is not None:
            made = result.complete
            return () if made is None else (*made.earlier, replace(made, earlier=()))
        if not self.job.on_disk:
            return ()
        try:
            before = Plan.load(self.job.original.folder)
        except MoesaicError:  # it is nobody's result, or that of another version
            return ()
        return (*before.earlier, replace(before, earlier=()))

    # --- its record ------------------------------------------------------------------------------

    @property
    def skeleton(self) -> Model:
        """Model of the result, or a skeleton of it on the meta device."""
        if self.decision.trained is not None or not self.job.on_disk:
            return self.model
        assert self.plan is not None
        config = copy.deepcopy(self.job.original.config)
        hub.convert_config(config, self.job.arch, self.plan)
        return skeleton_of(config)

    def record(
        self, model: str, out: str, *, earlier: Record | None = None, measured: Values | None = None
    ) -> Record:
        """Return the record of the result: steps, layers and measurements.

        Args:
            model: the requested name; of the first step's model.
            out: the result's folder.
            earlier: the record of the steps before this one.
            measured: what was measured of the result beside its original.
        """
        skeleton = self.skeleton
        before = {} if earlier is None else {layer.index: layer for layer in earlier.layers}
        uses = model_size(skeleton).layers
        this_step = [self._layer(i, use) for i, use in enumerate(uses)]
        layers = [self._after(layer, before.get(layer.index)) for layer in this_step]
        step = replace(
            self._step(layers, measured or {}),
            figures=tuple(self.method.figures(this_step, self.decision)),
        )
        model_type = str(skeleton.config.model_type)
        return Record(
            model=model,
            out=out,
            model_type=model_type,
            native=not model_type.startswith(PREFIX),
            steps=[*(earlier.steps if earlier else ()), step],
            layers=layers,
            moesaic=__version__,
            calibration=self._calibration(asdict(self.job.args.calibration), earlier),
            before=self._before if earlier is None else earlier.before,
            environment=environment(self.job.device),
            measured=measured or {},
        )

    def _calibration(self, settings: Values, earlier: Record | None) -> Values:
        """Return the calibration text, or that of earlier steps if this one read none."""
        fingerprint = self.plan.calibration if self.plan is not None else ""
        if not fingerprint:
            return {} if earlier is None else dict(earlier.calibration)
        used, observed = {**settings, "fingerprint": fingerprint}, self.job.observed
        used["length"] = used.get("length") or self.method.config.window
        names = ("samples", "length", "bos")
        windows = {name: observed[name] for name in names if observed.get(name)}
        sources = [*observed.get("sources", ())]
        if "tokens" in vars(self.job):
            tokens = self.job.tokens
            used["samples"], used["length"] = tokens.input_ids.shape
            used |= {"bos": True} if tokens.begun else {}
            used |= {"observed": windows} if observed else {}
            sources += [origin.as_json() for origin in tokens.origins]
        elif observed:  # no text beside it
            stats = self.job.args.calibration.stats
            used = {"stats": stats, "fingerprint": fingerprint, **windows}
        return {**used, "sources": sources} if sources else used

    # --- shown -----------------------------------------------------------------------------------

    @property
    def current_record(self) -> Record:
        """Record of the result so far, with :attr:`scores` if they were computed."""
        scores = vars(self).get("scores", {})
        measured = {"scores": {name: s.as_json() for name, s in scores.items()}}
        if "result" in scores:
            s = scores["result"].routing
            measured["routing"] = {str(i): usage.as_json() for i, usage in s.items()}
        before = self._before_it
        earlier = None if before is None else before.current_record
        return self.record(
            self._name if earlier is None else earlier.model,
            "",
            earlier=earlier,
            measured=measured if scores else {},
        )

    @property
    def _name(self) -> str:
        """Name of the original; of a loaded one the name that it was loaded by."""
        original = self.job.original
        if self.job.on_disk:
            return str(original.name)
        return str(original.config._name_or_path) or f"a {original.config.model_type} in memory"

    def _recipe(self, out: Path) -> str:
        """Return the recipe that repeats the run, as YAML, with notes on what it lacks."""
        results: list[Result] = [self]
        while (before := results[0]._before_it) is not None:
            results.insert(0, before)
        first, args = results[0], self.job.args
        recipe = Recipe(
            model=first._name,
            out=str(out),
            steps=tuple(result.method.config for result in results),
            calibration=args.calibration,
            evaluation=None,
            device=args.device,
            dtype=str(args.dtype or "auto").removeprefix("torch."),
        )
        notes = []
        if not first.job.on_disk:
            notes.append("# The model was loaded in Python, and is not on disk under this name.\n")
        if any(result.job.args.text is not None for result in results):
            notes.append("# The text was given in Python, and is not in this recipe.\n")
        return "".join([*notes, recipe.to_yaml()])

    def __repr__(self) -> str:
        record = self.current_record
        scores = record.measured.get("scores", {})
        figures = [f"{name} {s['perplexity']:.4g}" for name, s in scores.items()]
        measured = f"; perplexity: {', '.join(figures)}" if figures else ""
        return f"<Result: {report.title(record)}{measured}>"

    def __rich__(self) -> RenderableType:
        """Tables and sentences, as the command line shows them."""
        record = self.current_record
        return Group(report.terminal(record), *self._words(record))

    def _words(self, record: Record) -> list[Text]:
        """Return sizes and layers, which a record without measurements does not show."""
        if record.measured:
            return []
        size, job = model_size(self.skeleton), self.job
        before = ""
        if not job.args.inplace:
            original = skeleton_of(job.original.config) if job.on_disk else job.original
            before = f" (before: {model_size(original).total_parameters:,})"
        lines = [
            f"{size.total_parameters:,} parameters{before}, of which a token uses "
            f"{size.active_parameters:,}. Ask for .scores to measure it."
        ]
        lines += [f"layer {layer.index}: {layer.text}" for layer in record.layers]
        return [Text(printable(line)) for line in lines]

    def _repr_html_(self) -> str:
        """Return sentences and tables, for a notebook."""
        record = self.current_record
        console = Console(file=io.StringIO(), record=True, width=100, force_jupyter=False)
        console.print(report.terminal(record), *self._words(record), sep="\n")
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")

    def _step(self, layers: list[LayerRecord], measured: Values) -> Step:
        """Return the record of this step, with its title and sentences."""
        config, decision, plan = self.method.config, self.decision, self.plan
        described = self.method.described_config(plan)
        active = measured.get("scores", {}).get("result", {}).get("active_ratio")
        words = self.method.title_and_text(layers, decision, active)
        summary, text = dict(decision.summary), words.text
        if self.job.mtp_layers:
            fate = self._mtp_fate
            summary[fate] = {NEXT: self.job.mtp_layers}
            text += f" MTP layers, for speculative decoding, {FATES[fate]}."
        changed = [] if plan is None else [layer.weights for layer in plan.layers.values()]
        return Step(
            verb=config.verb,
            method=config.name,
            label=described.label,
            title=words.title,
            text=text,
            paper=config.credit,
            beyond=described.beyond,
            weights="trained" if decision.trained is not None else strongest(changed),
            config=plan.config if plan is not None else asdict(config),
            variants={name: config.compared(name) for name in self.builders},
            unit=config.unit,
            ratio=self.method.ratio,
            summary=summary,
            output=words.output,
        )

    @property
    def _mtp_fate(self) -> str:
        """Change of the MTP layers, a key of :data:`FATES`."""
        job, plan = self.job, self.plan
        if plan is None and job.on_disk and job.mtp_layers:
            return "kept"
        if plan is None or self.decision.trained is not None or not job.on_disk:
            return "left_out"
        changed = hub.convert_config(copy.deepcopy(job.original.config), self.job.arch, plan)
        return mtp_fate(job.naming, self.job.arch, plan, changed)

    def _layer(self, index: int, use: LayerUse) -> LayerRecord:
        """Return the record of one layer, as this step made it."""
        plan, base = self.plan, self.job.base
        routed = base.experts[index] if base.experts else 0
        one = routed and use.experts
        layer = LayerRecord(
            index,
            use.kind,
            "as it was",
            width=(use.expert_width or base.widths[index]) if one else use.width,
            active_width=use.active_width,
            experts=use.experts,
            top_k=use.top_k,
            analysis=self.decision.analyses.get(index, {}),
        )
        if plan is not None and index in plan.layers:
            planned = plan.layers[index]
            description = planned.describe(routed)
            layer = replace(
                layer,
                kind=planned.kind,
                text=description.text,
                weights=planned.weights,
                shape=description.shape,
                width_before=base.widths[index],
                experts_before=routed,
            )
        trained = self.decision.summary.get("training", {}).get("layers")
        if self.decision.trained is not None and (trained is None or index in trained):
            layer = replace(layer, weights="trained")
        return layer

    def _after(self, layer: LayerRecord, before: LayerRecord | None) -> LayerRecord:
        """Return a layer's record with the findings of earlier steps, valid while it routes."""
        if before is None:
            return layer
        planned = self.plan is not None and layer.index in self.plan.layers
        weights = strongest([before.weights, layer.weights])
        if planned and not (before.changed and layer.experts):
            return replace(layer, weights=weights)
        return replace(
            layer,
            kind=layer.kind if planned else before.kind,
            text=f"{before.text}; {layer.text}" if planned else before.text,
            weights=weights,
            width_before=before.width_before,
            experts_before=before.experts_before or layer.experts_before,
            shape={**before.shape, **layer.shape},
            analysis={**before.analysis, **layer.analysis},
        )


def describe(record: Record, recipe_yaml: str, folder: Path) -> None:
    """Write recipe, record, card and page into a result's folder."""
    files = {
        RECIPE: recipe_yaml,
        RECORD: json.dumps(record.as_json(), indent=1),
        PAGE: mark_drawn(report.html([record])),
    }
    card = report.model_card(record, recipe_yaml, tokenizer=has_tokenizer(folder))
    (folder / CARD).write_text(card, "utf-8")
    for name, text in files.items():
        (our_folder(folder) / name).write_text(text, "utf-8")


def _check_weights(plan: Plan, source: Source) -> None:
    """Refuse to apply a plan to other weights than it was made from.

    A plan that was made from a live model is compared with the source loaded in its type.
    """
    expected, actual = plan.base.weights, source.fingerprint
    if expected.startswith(IN_MEMORY):
        dtype = getattr(torch, plan.base.dtype.removeprefix("torch."), None)
        named = isinstance(dtype, torch.dtype)
        actual = model_fingerprint(source.load(dtype=dtype if named else None))
    if expected == actual:  # which dry runs have none of
        return
    if not expected:
        logging.getLogger(__name__).warning(
            "The plan names no weights that it was made from, so it is applied to those of %s "
            "unchecked.",
            source.name,
        )
    else:
        raise MoesaicError(
            f"The plan was made from {plan.base.name or 'a model in memory'}, and "
            f"{source.name} has other weights."
        )


def save_applied(
    source: Source,
    plan: Plan,
    folder: Path,
    dtype: torch.dtype | None = None,
    outline: bool = False,
) -> None:
    """Write a source with a plan applied, tensor by tensor from disk to disk.

    Args:
        source: the original.
        plan: made for it.
        folder: an existing one.
        dtype: floating-point type; None for the source's own.
        outline: write no weights, only headers.

    Raises:
        MoesaicError: the plan was made for another model, or makes no model that can be loaded.
    """
    config = copy.deepcopy(source.config)
    arch = base_arch(config)
    model = skeleton_of(config, dtype)
    check_base(plan, model, arch)
    _check_weights(plan, source)
    naming = source.naming
    naming.check(model)
    changed = hub.convert_config(config, arch, plan)
    fate = mtp_fate(naming, arch, plan, changed)
    if fate == "left_out" or not mtp_blocks(naming, arch, plan.base):
        leave_out(config)  # they are left out, or only in the config
    if alone := changed is None and source.beside:
        logging.getLogger(__name__).warning(ALONE)
    ShardWriter(folder, outline=outline).write(applied(source, arch, plan, changed, dtype))
    if dtype is not None:
        config.dtype = dtype
    describe_format(config, source.checkpoint, kept=dtype is None)
    config._attn_implementation = None  # of how it was run here; some values rule some out
    hub.write_config(config, folder, source.folder)
    hub.write_stub(config, folder)
    copy_side_files(source.folder, folder)
    for file in folder.glob(PROCESSORS) if alone else ():
        file.unlink()
    if not outline:  # what a plan asks for may be no model
        clean_tokenizer(source.folder, folder)
        result = Source("What the plan makes", folder)
        result.naming.check(skeleton_of(result.config))


# --- the hub -------------------------------------------------------------------------------------

EARLIER = ("model.safetensors*", "model-*-of-*.safetensors", f"{FOLDER}/*", *SIDE_FILES)
"""Files of an earlier result in the repository, which would be loaded beside a new one's."""


def push(result: Named, repo: str, *, token: str | bool | None = None) -> str:
    """Upload a result, with its card, to a repository of the hub, which is made if there is none.

    Args:
        result: what a verb returned, or the folder that it was saved to.
        repo: ``owner/name``.
        token: of the hub; None for the one that HF_TOKEN or ``hf auth login`` gives.

    Returns:
        the repository's address.

    Raises:
        MoesaicError: nothing can be uploaded, or nothing of that kind is in the folder.
    """
    check_repository(repo, token)
    if isinstance(result, Result):
        with TemporaryDirectory(prefix="moesaic-") as place:
            folder = result.save_pretrained(Path(place) / repo.rpartition("/")[2])
            return push(folder, repo, token=token)
    if not isinstance(result, str | Path):
        raise MoesaicError(
            f"push takes a Result or its folder; got {type(result).__name__}, whose own "
            "push_to_hub uploads it without a card."
        )
    folder = Path(expand_home(result))
    for file in sorted(folder.rglob("*")):
        check_plain_file(file, folder)  # what a link leads to would be uploaded
    from huggingface_hub import HfApi

    try:
        record = Record.from_json(mapping_of(our_path(folder, RECORD)))
        recipe = our_path(folder, RECIPE).read_text("utf-8")
    except (MoesaicError, ValueError, OSError) as error:
        raise MoesaicError(f"{folder} is not a result of ours: {error}") from error
    title, hub = f"{report.title(record)}, by moesaic", HfApi(token=token)
    try:
        repo = hub.create_repo(repo, exist_ok=True).repo_id
        hub.upload_folder(
            repo_id=repo,
            folder_path=folder,
            ignore_patterns=[CARD],
            delete_patterns=[*EARLIER],
            commit_message=title,
        )
        card = report.model_card(record, recipe, repo, has_tokenizer(folder))
        hub.upload_file(path_or_fileobj=card.encode(), path_in_repo=CARD, repo_id=repo)
    except Exception as error:  # whatever the client's own library of HTTP raises
        reason, _ = reason_of_hub(error)
        raise MoesaicError(
            f"push {repo!r} failed ({reason}). The result is in {folder}."
        ) from error
    return f"{hub.endpoint}/{repo}"
