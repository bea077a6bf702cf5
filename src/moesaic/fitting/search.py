"""The search: every form of recipe at the size that loses least, measured, the best refined.

Candidates decide on calibration text, are compared on other windows of it that no candidate
decided on, and the one that is chosen is measured on evaluation text, as every result is: the
three share no rows.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from moesaic.config import in_unit, parse_dtype
from moesaic.errors import MoesaicError
from moesaic.estimates import Built
from moesaic.fitting.candidates import Candidate, plainest, unbeaten
from moesaic.fitting.config import BUDGETS, FitConfig
from moesaic.fitting.forms import Form, forms, guessed, largest
from moesaic.fitting.gguf_files import Files
from moesaic.fitting.sizes import Costs, Steps
from moesaic.fitting.texts import Texts
from moesaic.fitting.trials import Trials
from moesaic.io.source import resolve
from moesaic.recipe import Recipe
from moesaic.types import Track, silent

SIZES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Shares of the original's bytes that are tried where only a loss is given."""
HALVINGS = 2
"""Sizes that are tried between the smallest that keeps a loss and the next."""
ACTIVE = "active_parameters"
BEST, FILES = "best.yaml", "files"
CLOSE = 1.25
"""A single step is refined where it loses at most so many times what the best one does: refits
were seen to take 15 to 21 % of the KL, so that another may come out ahead."""
FAR = 2.0
"""No form is refined that loses more than so many times what the best one does."""

Sized = tuple[Form, float]
"""A form, and the largest of its shares that meets a budget."""


class Trial(NamedTuple):
    """A form, the share that it was tried at, and what came of it."""

    form: Form
    share: float
    candidate: Candidate


class Search:
    """Finds the recipe that loses least within a budget.

    Args:
        recipe: model, text, device and type; its steps are not looked at. Where it does not say how
            many windows calibrate, those that there are get divided.
        config: the budget.
        work: a folder for what is finished.
        track: shows progress.
        tell: shows a line, of what can be tried or what pays.
    """

    def __init__(
        self,
        recipe: Recipe,
        config: FitConfig,
        work: Path,
        track: Track = silent,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.config, self.work, self.track, self.tell = config, work, track, tell
        self.source = resolve(recipe.model)
        self.texts = Texts(recipe.calibration, self.source, config.windows)
        self.recipe = replace(recipe, calibration=self.texts.drawn)
        self.original = Built(self.source.config, parse_dtype(recipe.dtype))
        text = recipe.calibration.source
        self.files = Files(self.source, text, work / FILES, track) if config.types else None
        self._tried: dict[Steps, Candidate] = {}

    @property
    def tried(self) -> list[Candidate]:
        """The candidates that were measured."""
        return [*self._tried.values()]

    @cached_property
    def costs(self) -> Costs:
        """Sizes of recipes."""
        folder = self.work / "headers"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return Costs(self.recipe, folder, self.files)

    @cached_property
    def trials(self) -> Trials:
        """How good candidates are."""
        context = self.texts, self.costs, self.files, self.work, self.track
        return Trials(self.recipe, self.source, *context)

    # --- the search ------------------------------------------------------------------------------

    def run(self) -> tuple[Candidate, list[Candidate]]:
        """The candidate of least loss within the budget, and all that were measured.

        Raises:
            MoesaicError: nothing fits, and names what would; or the model does as it is.
        """
        config, _ = self.config, self.texts.both  # too little text is said at once
        self._check_needed()
        every = forms(self.source, config)
        chosen = self._best(every, config) if config.sized else self._smallest(every)
        if chosen is None:
            raise MoesaicError(self._out_of_reach(every))
        if config.max_loss is not None and chosen.loss > config.max_loss:
            raise MoesaicError(
                f"max_loss {config.max_loss:g} is out of reach at that size: the best of "
                f"{len(self._tried)} candidates loses {chosen.loss:.3g}. A larger budget, or "
                f"max_loss={chosen.loss * 1.05:.2g}, would do."
            )
        for form, reason in self.trials.refused.items():
            logging.getLogger(__name__).warning("Not possible: %s (%s)", form, reason)
        return chosen, self.tried

    def frontier(self, budgets: Sequence[FitConfig]) -> list[Candidate]:
        """What one step alone makes of a model: the candidates that none beats, the largest first.

        Args:
            budgets: falling; every form is tried at the largest size that meets the first, and at
                the others those that lose little more than the best one did.

        Raises:
            MoesaicError: nothing meets any of them; names what would.
        """
        _ = self.texts.both  # too little text is said at once
        every = forms(self.source, self.config)
        singles = [form for form in every if form.single]
        for budget in budgets:
            sized = self._sized(singles, budget)
            if not sized:
                continue
            if not self._tried and self.tell is not None:
                names = dict.fromkeys(form.name for form, _ in sized)
                self.tell(f"What can be tried: {'; '.join(names)}.")
            trials = self._tried_quickly(sized, budget)
            self._refined(self._worth_care(trials, budget), budget)
            singles = [trial.form for trial in _near(trials, FAR)] or singles
        if not self._tried:
            raise MoesaicError(self._out_of_reach(every))
        return unbeaten(self._tried.values(), "memory" if budgets[0].memory else ACTIVE)

    def leave_best(self) -> None:
        """Write the recipe of the best candidate so far, for a search that ends before its end."""
        best = min(self._tried.values(), key=lambda c: c.kl, default=None)
        if best is None or not best.converted or not self.config.sized:
            return
        file = self.work / BEST
        file.write_text(replace(self.recipe, steps=best.converted).to_yaml(), "utf-8")
        logging.getLogger(__name__).warning(
            "Of %d candidates %s loses least so far. Its recipe is in %s, for moesaic run; "
            "resumed, the search goes on.",
            len(self._tried),
            best.form,
            file,
        )

    def _best(self, every: Sequence[Form], config: FitConfig) -> Candidate | None:
        """The best candidate within a budget of size; None where nothing fits."""
        sized = self._sized(every, config)
        if not sized:
            return None
        trials = self._worth_care(self._tried_quickly(sized, config), config)
        return self._chosen([t.candidate for t in trials] + self._refined(trials, config))

    def _chosen(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """The plainest of the best within ``max_loss``; where none is, what comes nearest to it."""
        limit = self.config.max_loss
        within = [c for c in candidates if limit is None or c.loss <= limit]
        return plainest(within) or min(candidates, key=lambda c: c.loss, default=None)

    def _smallest(self, every: Sequence[Form]) -> Candidate:
        """The smallest result whose loss is within ``max_loss``.

        Raises:
            MoesaicError: there is none.
        """
        limit, best, above, below = self.config.max_loss, None, 1.0, 0.0
        assert limit is not None

        def within(share: float) -> Candidate | None:
            memory = int(share * self.original.bytes)
            candidate = self._best(every, replace(self.config, memory=memory))
            return candidate if candidate is not None and candidate.loss <= limit else None

        for share in SIZES:
            candidate = within(share)
            if candidate is None:
                below = share
                break
            best, above = candidate, share
        if best is None:
            least = min((candidate.loss for candidate in self.tried), default=0.0)
            raise MoesaicError(
                f"max_loss {limit:g} is out of reach: at {SIZES[0]:.0%} of the bytes the best "
                f"candidate loses {least:.3g}."
            )
        for _ in range(HALVINGS):
            share = (above + below) / 2
            if candidate := within(share):
                best, above = candidate, share
            else:
                below = share
        return best

    # --- sizes -----------------------------------------------------------------------------------

    def _check_needed(self) -> None:
        """Refuse a budget that the model meets as it is."""
        weight = self.costs.weight(())
        if self.files or not self.config.sized or weight is None or not weight.meets(self.config):
            return
        budgets = [name for name in BUDGETS if getattr(self.config, name) is not None]
        sizes = ", ".join(f"{name} {_size(name, getattr(weight, name))}" for name in budgets)
        raise MoesaicError(
            f"{self.recipe.model} is within this budget as it is ({sizes}): give a smaller one."
        )

    def share(self, form: Form, config: FitConfig) -> float | None:
        """The largest of a form's shares that a budget has room for; None where none is it."""

        def fits(share: float) -> bool:
            weight = self.costs.weight(form.quick(share))
            return weight is not None and weight.meets(config)

        shares = self._possible(form)
        if not shares:
            try:
                self.costs.built(form.quick(form.shares[-1]))
            except MoesaicError as error:
                self.trials.refused[form.name] = str(error)
            return None
        if not fits(shares[0]):
            return None
        if not form.single and fits(shares[-1]):
            return None  # there is room left: with less of the first step it is another form
        least, most = (self.costs.weight(form.quick(shares[i])) for i in (0, -1))
        guess = guessed(shares, least, most, config) if least and most else None
        return largest(shares, fits, guess)

    def _possible(self, form: Form) -> tuple[float, ...]:
        """A form's shares but those that are too little for it."""
        shares = form.shares
        while shares and self.costs.weight(form.quick(shares[0])) is None:
            shares = shares[max(1, len(shares) // 8) :]
        return shares

    def _sized(self, every: Sequence[Form], config: FitConfig) -> list[Sized]:
        """The forms that meet a budget."""
        tracked = self.track(every, "Sizing candidates", len(every))
        shares = ((form, self.share(form, config)) for form in tracked)
        return [(form, share) for form, share in shares if share is not None]

    def _out_of_reach(self, every: Iterable[Form]) -> str:
        """A message that names the smallest sizes within reach."""
        reached = [(form, shares[0]) for form in every if (shares := self._possible(form))]
        weights = [self.costs.weight(form.quick(share)) for form, share in reached]
        possible = [w for w in weights if w is not None and (w.native or not self.config.plain)]
        if not possible:
            reasons = dict.fromkeys(self.trials.refused.values())
            return f"This model cannot be made smaller: {' '.join(reasons) or 'nothing fits it.'}"
        budgets = {n: getattr(self.config, n) for n in BUDGETS if getattr(self.config, n)}
        least = {name: min(getattr(weight, name) for weight in possible) for name in budgets}
        short = [name for name in budgets if least[name] > budgets[name]]
        sentences = [
            f"{name} {_size(name, budgets[name])} is out of reach: the least that works is "
            f"{_size(name, least[name])}"
            for name in short or budgets  # where each alone would do, all of them
        ]
        bits = " A GGUF file in fewer bits may be smaller (moesaic fit --type q4_k_m)."
        return "; ".join(sentences) + f".{bits if 'memory' in (short or budgets) else ''}"

    # --- trials ----------------------------------------------------------------------------------

    def _tried_quickly(self, sized: Sequence[Sized], config: FitConfig) -> list[Trial]:
        """Every form at its largest size as it is quickly made, those that lose least first."""
        trials = []
        for form, share in self.track(sized, "Trying candidates", len(sized)):
            candidate = self._try(form.name, form.quick(share), "rough", config)
            if candidate is not None:
                trials.append(Trial(form, share, candidate))
        return sorted(trials, key=lambda trial: trial.candidate.kl)

    def _worth_care(self, trials: Sequence[Trial], config: FitConfig) -> list[Trial]:
        """Those that may come out best: the first, and single steps near the best single one."""
        first = _near(trials, FAR)[: config.confirm]
        singles = _near([t for t in trials if len(t.candidate.steps) == 1], CLOSE)
        return first + [trial for trial in singles if trial not in first]

    def _refined(self, trials: Sequence[Trial], config: FitConfig) -> list[Candidate]:
        """Candidates made with more care."""
        careful = [(t.form.name, t.form.careful(t.share)) for t in trials if t.form.careful]
        tracked = self.track(careful, "Refining", len(careful))
        candidates = (self._try(name, steps, "refined", config) for name, steps in tracked)
        return [candidate for candidate in candidates if candidate]

    def _try(
        self,
        form: str,
        steps: Steps,
        stage: str,
        config: FitConfig,
        types: Mapping[str, str] | None = None,
    ) -> Candidate | None:
        """A candidate with its figures; None where it is impossible, or above the budget."""
        weight = self.costs.weight(steps)
        if weight is None or not weight.meets(config):
            return None
        if self.config.plain and not weight.native:
            return None
        try:
            candidate = Candidate(form, steps, weight, stage=stage, types=types)
            candidate = self.trials.measured(candidate)
        except MoesaicError as error:  # the weights have no such form: biases, other activations
            self.trials.refused[form] = str(error)
            return None
        if not candidate.weight.meets(config):
            return None
        before = self._tried.get(steps)
        if before is None or candidate.kl < before.kl:
            self._tried[steps] = candidate
        return candidate


def _size(name: str, value: float) -> str | int:
    """A size in the words of its budget."""
    return in_unit(int(value)) if name == "memory" else int(value)


def _near(trials: Sequence[Trial], factor: float) -> list[Trial]:
    """Of trials, those that lose least first, the ones that lose little more than the first."""
    return [t for t in trials if t.candidate.kl <= factor * trials[0].candidate.kl]
