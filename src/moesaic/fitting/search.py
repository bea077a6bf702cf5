"""The search: every form of recipe at the largest size that fits, measured, the best refined.

Candidates decide on calibration text, are compared on other windows of it that no candidate
decided on, and the one that is chosen is measured on evaluation text, as every result is: the
three share no rows.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch

from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.config import (
    ROUNDED,
    Calibration,
    ExportArgs,
    MethodConfig,
    RunArgs,
    in_unit,
    parse_dtype,
)
from moesaic.data.text import SAMPLES, Tokens, apart, calibration_tokens, evaluation_tokens
from moesaic.distributed import process
from moesaic.errors import MoesaicError
from moesaic.estimates import Built, in_words, notice
from moesaic.fitting.config import BUDGETS, FitConfig
from moesaic.fitting.files import Files
from moesaic.fitting.forms import Form, changes, forms, guessed, largest, lowest, mixed
from moesaic.fitting.redundancy import Redundancy, redundancy
from moesaic.fitting.sizes import Costs, Steps, Weight, told
from moesaic.foreign import JSON, Track, give_back, silent
from moesaic.io.layout import OWN, RECORD, own
from moesaic.io.outputs import alone, discard, searched, whole_file, whole_folder
from moesaic.io.source import Source, resolve
from moesaic.log import Log
from moesaic.metrics.evaluate import have_room
from moesaic.metrics.forward import Layerwise, Whole
from moesaic.metrics.machine import environment
from moesaic.metrics.rounding import rounded_scores
from moesaic.metrics.score import Score, scores
from moesaic.observation.files import observe
from moesaic.pipeline import convert, run_recipe
from moesaic.plan import Progress
from moesaic.recipe import Recipe, check_run
from moesaic.record import Record

LEAST = 4
"""Windows that choose, at least."""
PART = 4
"""Of less text than is wanted every so manieth window chooses."""
SIZES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Shares of the original's bytes that are tried where only a loss is given."""
HALVINGS = 2
"""Sizes that are tried between the smallest that keeps a loss and the next."""
ACTIVE = "active_parameters"
STATS, BEST = "observed.stats", "best.yaml"
SMALLER = 2
"""Shares below the largest that are tried where a file came out larger than told."""
JOINT = 6
"""Shares of a form at which it is measured before bits are shared out."""
ROOM = 8
"""Originals that the disk has room for, at least, while first steps are kept."""
CLOSE = 1.25
"""A single step is refined where it loses at most so many times what the best one does: refits
were seen to take 15 to 21 % of the KL, so that another may come out ahead."""
ALIKE = 1.03
"""Sizes of which one is less than so many times the other are alike: what loses less counts."""
FAR = 2.0
"""No form is refined that loses more than so many times what the best one does."""


@dataclass(frozen=True)
class Candidate:
    """A recipe that fits, and what came of it."""

    form: str
    steps: Steps
    weight: Weight
    score: JSON | None = None
    """``perplexity``, ``loss`` (its rise, relative), ``kl`` and ``tokens``; None: not measured."""
    stage: str = "rough"
    """``rough`` or ``refined``: with how much care it was made."""

    def scored(self, score: JSON) -> Candidate:
        """With its figures; ``memory`` among them is what a file came to."""
        memory = score.get("memory", self.weight.memory)
        return replace(self, score=score, weight=replace(self.weight, memory=memory))

    @property
    def converted(self) -> tuple[MethodConfig, ...]:
        """The steps without the file."""
        return tuple(step for step in self.steps if isinstance(step, MethodConfig))

    @property
    def file(self) -> ExportArgs | None:
        """The GGUF file that it ends in, if it does."""
        last = self.steps[-1]
        return last if isinstance(last, ExportArgs) else None

    def as_json(self) -> JSON:
        """The form, the steps, sizes and figures."""
        score = self.score or {}
        said = {"form": self.form, "stage": self.stage, "steps": told(self.steps)}
        return {**said, **asdict(self.weight), **score}

    @property
    def kl(self) -> float:
        """By which candidates are compared."""
        return float(self.score["kl"]) if self.score else math.inf


Tried = tuple[Form, float, Candidate]
"""A form, the share that it was tried at, and what came of it."""


class Search:
    """Finds the recipe that loses least within a budget.

    Args:
        recipe: model, text, device and type; its steps are not looked at. Where it does not say how
            many windows calibrate, those that there are get divided.
        config: the budget.
        work: a folder for what is finished.
        track: shows progress.
        tell: shows a line, of what the search is predicted to take.
    """

    def __init__(
        self,
        recipe: Recipe,
        config: FitConfig,
        work: Path,
        track: Track = silent,
        tell: Callable[[str], None] | None = None,
    ):
        self.config, self.work, self.track, self.tell = config, work, track, tell
        self.source = resolve(recipe.model)
        self._windows: dict[int | None, Tokens] = {}
        self.recipe = replace(recipe, calibration=settled(recipe.calibration))
        self.recipe = replace(recipe, calibration=self._settled(self.recipe.calibration))
        self.dtype = parse_dtype(recipe.dtype)
        self.original = Built(self.source.config, self.dtype)
        self.files: Files | None = None
        if config.types:
            text = recipe.calibration.source
            self.files = Files(self.source, text, work, track)
        self._tried: dict[str, Candidate] = {}
        self.refused: dict[str, str] = {}
        """Forms that the model cannot have, by their names, with the reason."""

    # --- text ------------------------------------------------------------------------------------

    @cached_property
    def texts(self) -> tuple[Tokens, Tokens]:
        """Windows that candidates decide on, and others that share nothing with them.

        Raises:
            MoesaicError: there is too little text.
        """
        first = self._drawn(self.recipe.calibration.samples)
        count, wanted = len(first.input_ids), self.config.windows
        there = self._there(count + wanted)
        others = apart(self._drawn(there), first)
        if len(others.input_ids) < LEAST:
            raise MoesaicError(
                f"fit needs windows that choose beside those that calibrate, {LEAST} at least: "
                f"of {there}, {count} calibrate and {len(others.input_ids)} share no text with "
                "them. Give more text, lower samples, or lower length."
            )
        return first, others.rows(slice(wanted))

    def _settled(self, drawn: Calibration) -> Calibration:
        """Windows of one length, whichever method looks at them, and some left to choose by."""
        if drawn.samples is not None:
            return drawn
        every = tokenised(drawn)
        there = (
            len(self._drawn(None).input_ids)
            if every
            else self._there(SAMPLES + self.config.windows)
        )
        samples = there - min(self.config.windows, there // PART)
        return replace(drawn, samples=samples)

    def _there(self, most: int) -> int:
        """Windows that the text fills, up to so many."""

        def fills(samples: float) -> bool:
            try:
                return bool(self._drawn(int(samples)).count)
            except MoesaicError:
                return False

        try:
            return len(self._drawn(most).input_ids)
        except MoesaicError:
            fewer = largest(range(1, most), fills)
            if fewer is None:
                raise
            return int(fewer)

    def _drawn(self, samples: int | None) -> Tokens:
        drawn = self.recipe.calibration
        if samples not in self._windows:
            self._windows[samples] = calibration_tokens(
                drawn.source,
                self.source.tokenizer,
                samples,
                drawn.length,
                drawn.seed,
                documents=drawn.documents,
            )
        return self._windows[samples]

    # --- sizes -----------------------------------------------------------------------------------

    @cached_property
    def costs(self) -> Costs:
        """Sizes of recipes, and what they take."""
        folder = self.work / "headers"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        length = self.recipe.calibration.length or MethodConfig.window
        return Costs(self.recipe, folder, self.files, self.config.windows * length)

    def share(self, form: Form, config: FitConfig) -> float | None:
        """The largest of a form's shares that a budget has room for."""

        def fits(share: float) -> bool:
            weight = self.costs.of(form.quick(share))
            return weight is not None and weight.meets(config)

        shares = self._possible(form)
        if not shares:
            self.refused[form.name] = self.costs.reason(form.quick(form.shares[-1]))
            return None
        least, most = (self.costs.of(form.quick(shares[i])) for i in (0, -1))
        if least is None or not least.meets(config):
            return None
        if not form.single and most is not None and most.meets(config):
            return None  # there is room left: with less of the first step it is another form
        guess = None if most is None else guessed(shares, least, most, config)
        return largest(shares, fits, guess)

    def _possible(self, form: Form) -> tuple[float, ...]:
        """A form's shares but those that are too little for it."""
        shares = form.shares
        while shares and self.costs.of(form.quick(shares[0])) is None:
            shares = shares[max(1, len(shares) // 8) :]
        return shares

    # --- quality ---------------------------------------------------------------------------------

    def measured(self, candidate: Candidate) -> Candidate:
        """A candidate with its figures, which are kept."""
        file = self.work / f"tried-{self._key(told(candidate.steps))}.json"
        if file.is_file():
            return candidate.scored(json.loads(file.read_text("utf-8")))
        give_back()  # of the candidate before
        tokens = self.texts[1]
        with self._opened(self._made(candidate.steps)) as made:
            room = have_room((made,), self.recipe.device, self.dtype)
            run = (
                Whole.of(made, self.recipe.device, self.dtype)
                if room
                else Layerwise(made, self.recipe.device, self.dtype)
            )
            score = figures(*scores([run, self._reference], tokens))
            if candidate.file:
                score["memory"] = Path(made.name).stat().st_size
        with whole_file(file) as partial:
            partial.write_text(json.dumps(score), "utf-8")
        if shutil.disk_usage(self.work).free < ROOM * self.original.bytes:
            for folder in self.work.glob("made-*"):  # first steps that others would start from
                shutil.rmtree(folder, ignore_errors=True)
        return candidate.scored(score)

    @contextmanager
    def _opened(self, made: Path) -> Iterator[Source]:
        """A candidate's result or its file, which goes afterwards."""
        if self.files is None or made.is_dir():
            yield Source("candidate", made)
            if self.files is None:  # else files are made of it
                shutil.rmtree(made, ignore_errors=True)
            return
        with self.files.opened(made) as source:
            yield source
        made.unlink()

    @cached_property
    def _reference(self) -> Layerwise:
        return Layerwise(self.source, self.recipe.device, self.dtype, keep=True)

    def _key(self, said: object) -> str:
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]

    def _made(self, steps: Steps) -> Path:
        """The folder of a recipe's result, or its file; what steps have in common is made once."""
        model, folder = self.recipe.model, Path()
        for number, config in enumerate(steps):
            folder = self.work / f"made-{self._key(told(steps[: number + 1]))}"
            if isinstance(config, ExportArgs):
                assert self.files is not None
                folder = folder.with_suffix(".gguf")
                self.files.make(model, folder, config)
            elif not folder.exists():
                result = convert(config, self._args(model, config, number))
                result.save(folder)
            model = str(folder)
        return folder

    def _args(self, model: str, config: MethodConfig, number: int) -> RunArgs:
        return self._run_args(model, self.costs.decided(config, number))

    def _run_args(self, model: str, from_stats: bool) -> RunArgs:
        return RunArgs.of(
            model,
            calibration=self.texts[0],
            stats=str(self._stats) if from_stats else "",
            device=self.recipe.device,
            dtype=self.dtype,
            seed=self.recipe.calibration.seed,
        )

    @cached_property
    def _stats(self) -> Path:
        """One file of statistics, from which all first steps decide that can."""
        file = self.work / STATS
        if not file.is_file():
            observe(
                self.recipe.model,
                file,
                calibration=self.texts[0],
                device=self.recipe.device,
                dtype=self.dtype,
                resume=True,
                track=self.track,
            )
        return file

    def filed(self, chosen: Candidate, folder: Path) -> JSON:
        """Write the file of the chosen candidate beside its result.

        Args:
            chosen: the candidate.
            folder: of the result; empty where nothing was changed before rounding.

        Returns:
            ``gguf`` with ``file``, ``type``, ``bytes``, ``types``, and its figures on the text that
            results are measured on; nothing where no file was asked for.
        """
        asked = chosen.file
        if asked is None or self.files is None:
            return {}
        file = own(folder) / f"model-{asked.called}.gguf"
        model = str(folder) if len(chosen.steps) > 1 else str(self.source.folder)
        made = self.files.make(model, file, asked)
        said: JSON = {
            "file": f"{OWN}/{file.name}",
            **{k: made[k] for k in ("type", "bytes", "types")},
        }
        settings = self.recipe.evaluation
        if settings is not None:
            tokens = evaluation_tokens(
                settings.data, self.source.tokenizer, settings.length, settings.max_tokens
            )
            place = self.recipe.device, self.dtype
            with self.files.opened(file) as read:
                run = Whole.of(read, *place)
                said |= figures(*scores([run, Layerwise(self.source, *place)], tokens))
        return {"gguf": said}

    # --- the search ------------------------------------------------------------------------------

    @cached_property
    def redundancy(self) -> Redundancy | None:
        """Where a mixture is redundant, which is told; None of dense models."""
        if not isinstance(base_arch(self.source.config), MoEArch):
            return None
        args = self._run_args(self.recipe.model, from_stats=True)
        found = redundancy(args, self.texts[1], self.track)
        if self.tell is not None:
            self.tell(found.told())
        for verb in filter(found.hopeless, ("prune", "slim")):
            logging.getLogger(__name__).warning(
                "%s is not tried: a quarter of it loses more than a half of the other way.", verb
            )
        return found

    def _hopeful(self, found: list[tuple[Form, float]]) -> list[tuple[Form, float]]:
        """The forms that may come out best, by what they begin with; all where none may."""
        if not found or self.redundancy is None:
            return found
        firsts = (form.quick(share)[0].verb for form, share in found)
        return [
            one
            for one, verb in zip(found, firsts, strict=True)
            if not self.redundancy.hopeless(verb)
        ] or found

    def run(self) -> tuple[Candidate, list[Candidate]]:
        """The candidate of least loss within the budget, and all that were measured.

        Raises:
            MoesaicError: nothing fits; names what would.
        """
        config, _ = self.config, self.texts  # too little text is said at once
        known = forms(self.source, config)
        if config.sized:
            chosen = self._best(known, config)
            if chosen is None:
                raise MoesaicError(self._smallest(known))
            loss, most = chosen.score["loss"] if chosen.score else 0.0, config.max_loss
            if most is not None and loss > most:
                raise MoesaicError(
                    f"max_loss {most:g} is out of reach at that size: the best of "
                    f"{len(self._tried)} candidates loses {loss:.3g}. A larger budget, or "
                    f"max_loss={loss * 1.05:.2g}, would do."
                )
        else:
            chosen = self._smallest_within(known)
        for form, reason in self.refused.items():
            logging.getLogger(__name__).warning("Not possible: %s (%s)", form, reason)
        return chosen, list(self._tried.values())

    def _best(self, known: Sequence[Form], config: FitConfig) -> Candidate | None:
        """The best candidate within a budget of size; None where nothing fits."""
        found = self._sized(known, config)
        if not found and not mixed(self.config):
            return None
        found = self._hopeful(found)
        self._foretell(found)
        return self._best_of(found, config)

    def frontier(self, budgets: Sequence[FitConfig]) -> list[Candidate]:
        """What one step alone makes of a model: the candidates that none beats, the largest first.

        Args:
            budgets: falling; every form is tried at the largest size that meets the first, and at
                the others those that lose little more than the best one did.

        Raises:
            MoesaicError: nothing meets any of them; names what would.
        """
        _ = self.texts  # too little text is said at once
        every = forms(self.source, self.config)
        known = [form for form in every if form.single]
        for budget in budgets:
            found = self._sized(known, budget)
            if not found:
                continue
            found = self._hopeful(found)
            if not self._tried:  # each of the others takes less: fewer forms are left
                self._foretell(found)
            tried = self._tried_quickly(found, budget)
            self._refined(self._worth_care(tried, budget), budget)
            known = [form for form, _, c in tried if c.kl <= FAR * tried[0][2].kl] or known
        if not self._tried:
            raise MoesaicError(self._smallest(every))
        return unbeaten(self._tried.values(), "memory" if budgets[0].memory else ACTIVE)

    def baselines(self) -> list[JSON]:
        """What rounding alone makes of the model; nothing where there is no room for it."""
        device = self.recipe.device
        if not have_room((self.source,), device, torch.float32):
            return []
        types = self.track(ROUNDED, "Rounding alone", len(ROUNDED))
        made = rounded_scores(self.source, self._reference, self.texts[1], types, device)
        return [
            {"form": f"rounded to {type}", "memory": ours.total_bytes, **figures(ours, theirs)}
            for type, ours, theirs in made
        ]

    def _sized(self, known: Sequence[Form], config: FitConfig) -> list[tuple[Form, float]]:
        """The forms that meet a budget, each with its largest share that does."""
        tracked = self.track(known, "Sizing candidates", len(known))
        shares = ((form, self.share(form, config)) for form in tracked)
        return [(form, share) for form, share in shares if share is not None]

    def _best_of(self, found: Sequence[tuple[Form, float]], config: FitConfig) -> Candidate | None:
        """The best of some forms at their sizes, those that may come out best refined."""
        few = self._worth_care(self._tried_quickly(found, config), config)
        refined = self._refined(few, config) + self._jointly(config)
        kept = [candidate for *_, candidate in few] + refined
        return min(kept, key=lambda candidate: candidate.kl, default=None)

    def _refined(self, few: Sequence[Tried], config: FitConfig) -> list[Candidate]:
        """Candidates made with more care; rounding alone, too, where no type is narrow enough."""
        fine = [
            (_called(form, share, make(share)), make(share))
            for form, share, _ in few
            for make in form.careful
        ]
        fine += [(asked.called, (asked,)) for asked in mixed(self.config)]
        tracked = self.track(fine, "Refining", len(fine))
        made = (self._try(name, steps, "refined", config) for name, steps in tracked)
        return [candidate for candidate in made if candidate]

    def _jointly(self, config: FitConfig) -> list[Candidate]:
        """The best forms of one step that end in a file whose layers differ in type.

        What the step loses and what rounding loses nearly add up: the former is measured at a few
        shares, the latter follows for every size from what the original loses by types, so that
        each form's share is the one where the sum is least. Types of very few bits lose more than
        the sum says, so smaller shares are tried as long as they lose less.
        """
        ends, best = mixed(self.config), list[tuple[float, Form, Sequence[float], float]]()
        if not ends or self.files is None or config.memory is None:
            return []
        single = (form for form in changes(self.source, self.config) if form.single)
        known = self._hopeful([(form, form.shares[-1]) for form in single])
        for form, _ in self.track(known, "Weights or bits", len(known)):
            rounding = self._rounding(form, config.memory)
            if rounding:
                added = partial(self._added, form, rounding)
                share, loss = lowest([*rounding], added, JOINT)
                best.append((loss, form, [*rounding], share))
        best = sorted(best, key=lambda b: b[0])[: self.config.confirm]

        def made(form: Form, share: float) -> Candidate | None:
            steps = (*(*form.careful, form.quick)[0](share), *ends)
            return self._try(f"{form.name}, mixed", steps, "refined", config)

        found = []
        for _, form, shares, share in self.track(best, "Refining both", len(best)):
            smaller = shares[: shares.index(share)]
            least = math.inf
            for tried in (share, *smaller[:: -(-max(1, len(smaller)) // JOINT)][::-1]):
                candidate = made(form, tried)
                if candidate is None or candidate.kl >= least:
                    break
                found.append(candidate)
                least = candidate.kl
        return found

    def _rounding(self, form: Form, memory: int) -> dict[float, float]:
        """By share of a form what rounding to a size then loses, where types are narrow enough."""
        assert self.files is not None
        table, whole = self.files.rounding(self.config.types), self.original.size.total_parameters
        found = {}
        for share in self._possible(form)[:-1]:
            weight = self.costs.of(form.quick(share))
            if weight is not None and weight.native:
                with suppress(MoesaicError):
                    kept = 1 - (whole - weight.parameters) / table.ffn
                    found[share] = table.choice(memory, kept)[1]
        return found

    def _added(self, form: Form, rounding: Mapping[float, float], share: float) -> float:
        """The KL of a form's quick step, and of rounding it; infinite where it is refused."""
        steps = form.quick(share)
        weight = self.costs.of(steps)
        assert weight is not None
        try:
            return self.measured(Candidate(form.name, steps, weight)).kl + rounding[share]
        except MoesaicError as error:
            self.refused[form.name] = str(error)
            return math.inf

    def _tried_quickly(self, found: Sequence[tuple[Form, float]], config: FitConfig) -> list[Tried]:
        """Every form at its largest size as it is quickly made, those that lose least first."""
        tried = []
        for form, most in self.track(found, "Trying candidates", len(found)):
            for share in self._from(form, most):
                candidate = self._try(form.name, form.quick(share), "rough", config)
                if candidate is not None:
                    tried.append((form, share, candidate))
                    break
        return sorted(tried, key=lambda t: t[2].kl)

    def _worth_care(self, tried: Sequence[Tried], config: FitConfig) -> list[Tried]:
        """Those that may come out best: the first, and single steps near the best single one."""
        few = [t for t in tried[: config.confirm] if t[2].kl <= FAR * tried[0][2].kl]
        singles = [t for t in tried if len(t[2].steps) == 1]
        return few + [t for t in singles if t not in few and t[2].kl <= CLOSE * singles[0][2].kl]

    def _foretell(self, found: Sequence[tuple[Form, float]]) -> None:
        """Tell what it takes to try some forms, and then to refine as many as may be refined."""
        rough = [form.quick(share) for form, share in found]
        careful = [make(share) for form, share in found for make in form.careful]
        careful += [(asked,) for asked in mixed(self.config)]
        if self.tell is None or not rough:
            return
        seconds, peak = self.costs.predicted(rough)
        refined = min(self.config.confirm, len(careful))
        each = self.costs.predicted(careful)[0] / max(1, len(careful))
        more = f"{len(rough)} forms and {refined} refined; the result itself comes on top"
        if line := in_words(seconds + refined * each, peak, more):
            self.tell(line)

    def leave_best(self, recipe: Recipe) -> None:
        """Write the recipe of the best candidate so far, for a search that ends before its end."""
        best = min(self._tried.values(), key=lambda c: c.kl, default=None)
        if best is None or not best.converted or not self.config.sized:
            return
        file = self.work / BEST
        file.write_text(replace(recipe, steps=best.converted).to_yaml(), "utf-8")
        logging.getLogger(__name__).warning(
            "Of %d candidates %s loses least so far. Its recipe is in %s, for moesaic run; "
            "resume=True continues the search.",
            len(self._tried),
            best.form,
            file,
        )

    def _from(self, form: Form, most: float) -> Sequence[float]:
        """A share, and those below it: told sizes of files are a little off."""
        if self.files is None:
            return (most,)
        place = form.shares.index(most)
        return form.shares[max(0, place - SMALLER) : place + 1][::-1]

    def _try(
        self, form: str, steps: Steps, stage: str, config: FitConfig | None = None
    ) -> Candidate | None:
        """A candidate with its figures; None where it is impossible, or above the budget."""
        weight = self.costs.of(steps)
        if weight is None or (config is not None and not weight.meets(config)):
            return None
        if self.config.plain and not weight.native:
            return None
        try:
            candidate = self.measured(Candidate(form, steps, weight, stage=stage))
        except MoesaicError as error:  # the weights have no such form: biases, other activations
            self.refused[form] = str(error)
            return None
        if config is not None and not candidate.weight.meets(config):
            return None
        self._tried[self._key(told(steps))] = candidate
        return candidate

    def _smallest_within(self, known: Sequence[Form]) -> Candidate:
        """The smallest result whose loss is within ``max_loss``."""
        whole, best, most = self.original.bytes, None, self.config.max_loss
        assert most is not None
        above, below = 1.0, 0.0

        def at(share: float) -> Candidate | None:
            found = self._best(known, replace(self.config, memory=int(share * whole)))
            kept = found is not None and found.score is not None and found.score["loss"] <= most
            return found if kept else None

        for share in SIZES:
            found = at(share)
            if found is None:
                below = share
                break
            best, above = found, share
        for _ in range(HALVINGS if best is not None else 0):
            share = (above + below) / 2
            found = at(share)
            best, above, below = (best, above, share) if found is None else (found, share, below)
        if best is None:
            losses = [c.score["loss"] for c in self._tried.values() if c.score]
            least = min(losses, default=0.0)
            raise MoesaicError(
                f"max_loss {most:g} is out of reach: at {SIZES[0]:.0%} of the bytes the best "
                f"candidate loses {least:.3g}."
            )
        return best

    def _smallest(self, known: Iterable[Form]) -> str:
        """A message that names the smallest sizes within reach."""
        reached = [(form, shares[0]) for form in known if (shares := self._possible(form))]
        weights = [self.costs.of(form.quick(share)) for form, share in reached]
        possible = [w for w in weights if w is not None and (w.native or not self.config.plain)]
        if not possible:
            reasons = dict.fromkeys(self.refused.values())
            return f"This model cannot be made smaller: {' '.join(reasons) or 'nothing fits it.'}"
        said = []
        for name in BUDGETS:
            wanted = getattr(self.config, name)
            if wanted is not None:
                least = min(getattr(weight, name) for weight in possible)
                asked, smallest = map(in_unit if name == "memory" else int, (wanted, least))
                said.append(f"{name} {asked} is out of reach: the least that works is {smallest}")
        rounds = self.config.memory is not None and not self.config.types
        bits = " A GGUF file in fewer bits may be smaller: --type q4_k_m." if rounds else ""
        return "; ".join(said) + f".{bits}"


def _called(form: Form, share: float, steps: Steps) -> str:
    """A form by the file that it ends in, which may be of another type than when quickly made."""
    ends = form.quick(share)[-1], steps[-1]
    if all(isinstance(end, ExportArgs) for end in ends):
        rough, fine = (end.called for end in ends if isinstance(end, ExportArgs))
        return form.name.removesuffix(rough) + fine
    return form.name


def unbeaten(found: Iterable[Candidate], size: str) -> list[Candidate]:
    """The candidates than which none is as small and loses as little, the largest first.

    Args:
        found: measured.
        size: what is counted, ``memory`` or ``active_parameters``.
    """
    best: list[Candidate] = []
    for one in sorted(found, key=lambda c: (getattr(c.weight, size), c.kl)):
        if best and one.kl >= best[-1].kl:
            continue
        if best and getattr(one.weight, size) < ALIKE * getattr(best[-1].weight, size):
            best.pop()
        best.append(one)
    return best[::-1]


def figures(ours: Score, theirs: Score) -> JSON:
    """``perplexity``, ``loss``, ``kl`` and ``tokens`` of a candidate beside the original."""
    return {
        "perplexity": ours.perplexity,
        "loss": ours.perplexity / theirs.perplexity - 1,
        "kl": ours.kl,
        "tokens": ours.tokens,
    }


def fit(
    recipe: Recipe,
    config: FitConfig,
    *,
    overwrite: bool = False,
    resume: bool = False,
    track: Track = silent,
    tell: Callable[[str], None] | None = None,
) -> Record | None:
    """Find the recipe that loses least within a budget, and carry it out.

    Args:
        recipe: the model, the folder to make, text, and how the result is measured; without steps.
        config: the budget.
        overwrite: replace ``recipe.out`` if it exists, and drop an unfinished search.
        resume: continue an unfinished search; finished candidates are not measured again.
        track: shows progress.
        tell: shows a line: what the search, and then the run, are predicted to take, where that is
            over a minute.

    Returns:
        the record of the result, with ``chosen`` and ``tried`` among what was measured.

    Raises:
        MoesaicError: nothing fits, or the model cannot be made smaller; names what would work.
    """
    if process()[1] > 1:
        raise MoesaicError("fit runs in one process; the recipe that it finds runs in several.")
    check_run(recipe, overwrite=overwrite, resume=resume)
    with alone(Path(recipe.out)):
        log = Log(track)
        again = {"overwrite": overwrite, "resume": resume}
        search = opened(recipe, config, **again, track=log.track, tell=tell)
        try:
            with log.listening(), log.stage("search"):
                chosen, tried = search.run()
        except MoesaicError:
            if not any(c.score for c in search._tried.values()):  # nothing that could be resumed
                shutil.rmtree(search.work, ignore_errors=True)
            raise
        except KeyboardInterrupt:
            search.leave_best(search.recipe)
            raise
        return carried_out(search, chosen, tried, **again, log=log, tell=tell)


def opened(
    recipe: Recipe,
    config: FitConfig,
    *,
    overwrite: bool = False,
    resume: bool = False,
    track: Track = silent,
    tell: Callable[[str], None] | None = None,
) -> Search:
    """A search, begun or continued; the arguments are those of :func:`fit`.

    Raises:
        MoesaicError: an unfinished search is in the way.
    """
    work = searched(recipe.out)
    if not resume:
        if work.exists() and not overwrite:
            raise MoesaicError(
                f"{work} holds an unfinished search: continue it with resume=True, or start anew "
                "with overwrite=True."
            )
        discard(work)
    search = Search(recipe, config, work, track, tell)
    request = {
        "weights": search.source.fingerprint,
        "calibration": asdict(search.recipe.calibration),
        "windows": config.windows,
        "dtype": recipe.dtype,
    }
    Progress(work, request).begin()
    return search


def carried_out(
    search: Search,
    chosen: Candidate,
    tried: Sequence[Candidate],
    *,
    overwrite: bool = False,
    resume: bool = False,
    log: Log | None = None,
    tell: Callable[[str], None] | None = None,
    **more_found: object,
) -> Record | None:
    """Make and measure what was chosen; what the search kept on disk goes.

    Args:
        search: that chose it.
        chosen: the candidate.
        tried: all that were measured.
        overwrite: replace the folder if it exists.
        resume: continue an unfinished run.
        log: one that was begun; by default a new one.
        tell: shows what the run is predicted to take.
        more_found: more that led to it, for the record.
    """
    recipe = search.recipe
    best = replace(recipe, steps=chosen.converted)
    refused = [{"form": form, "reason": reason} for form, reason in search.refused.items()]
    looked: Redundancy | None = vars(search).get("redundancy")  # where that was asked for
    found: JSON = {
        **({} if looked is None else {"redundancy": looked.as_json()}),
        "chosen": chosen.as_json(),
        "tried": [c.as_json() for c in tried],
        "refused": refused,
        **more_found,
    }

    def more(folder: Path) -> JSON:
        """The file that was asked for, beside the result."""
        return search.filed(chosen, folder)

    record: Record | None
    if best.steps:
        record = run_recipe(
            best,
            overwrite=overwrite,
            resume=resume,
            found=found,
            more=more,
            track=search.track,
            log=log,
            checked=None if tell is None else lambda recipe: tell(notice(recipe)),
        )
    else:
        record = rounded(best, search.source, found, more, overwrite)
    shutil.rmtree(search.work, ignore_errors=True)
    return record


def rounded(
    recipe: Recipe, source: Source, found: JSON, more: Callable[[Path], JSON], overwrite: bool
) -> Record:
    """The record of a folder that holds the original's GGUF file alone: no step was worth it."""
    with whole_folder(Path(recipe.out), overwrite) as folder:
        record = Record(
            model=recipe.model,
            out=recipe.out,
            model_type=source.config.model_type,
            native=True,
            steps=[],
            layers=[],
            calibration=asdict(recipe.calibration),
            environment=environment(recipe.device),
            measured={**found, **more(folder)},
        )
        (own(folder) / RECORD).write_text(json.dumps(record.as_json(), indent=1), "utf-8")
    return record


def settled(drawn: Calibration) -> Calibration:
    """The same text in windows of one length, whichever method looks at it."""
    return drawn if tokenised(drawn) else replace(drawn, length=drawn.length or MethodConfig.window)


def tokenised(drawn: Calibration) -> bool:
    """It is a file of token ids, whose windows have a length and a number."""
    return drawn.source.endswith(".safetensors")
