"""The search: every form of recipe at the size that loses least, measured, the best refined.

Candidates decide on calibration text, are compared on other windows of it that no candidate
decided on, and the one that is chosen is measured on evaluation text, as every result is: the
three share no rows.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.config import ExportArgs, MethodConfig, in_unit, parse_dtype
from moesaic.errors import MoesaicError
from moesaic.estimates import Built, in_words
from moesaic.exports.mixed import Sensitivities
from moesaic.fitting.candidates import Candidate, unbeaten
from moesaic.fitting.config import BUDGETS, FitConfig
from moesaic.fitting.files import Files
from moesaic.fitting.forms import Form, ending, filed, forms, guessed, largest
from moesaic.fitting.redundancy import Redundancy, redundancy
from moesaic.fitting.sizes import Costs, Steps, converting
from moesaic.fitting.texts import Texts
from moesaic.fitting.trials import Trials
from moesaic.foreign import Track, silent
from moesaic.io.source import resolve
from moesaic.recipe import Recipe

SIZES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Shares of the original's bytes that are tried where only a loss is given."""
HALVINGS = 2
"""Sizes that are tried between the smallest that keeps a loss and the next."""
ACTIVE = "active_parameters"
BEST, FILES = "best.yaml", "files"
JOINT = 8
"""Shares of a form that are told apart where bits are shared out with it."""
CLOSE = 1.25
"""A single step is refined where it loses at most so many times what the best one does: refits
were seen to take 15 to 21 % of the KL, so that another may come out ahead."""
FAR = 2.0
"""No form is refined that loses more than so many times what the best one does."""


Tried = tuple[Form, float, Candidate]
"""A form, the share that it was tried at, and what came of it."""


@dataclass(frozen=True)
class Place:
    """Where a form would lose least in a file, told from what its steps and rounding lose alone."""

    form: Form
    share: float
    kl: float


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
        """Sizes of recipes, and what they take."""
        folder = self.work / "headers"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        length = self.recipe.calibration.length or MethodConfig.window
        return Costs(self.recipe, folder, self.files, self.config.windows * length)

    @cached_property
    def trials(self) -> Trials:
        """How good candidates are."""
        place = self.texts, self.costs, self.files, self.work, self.track
        return Trials(self.recipe, self.source, *place)

    # --- sizes -----------------------------------------------------------------------------------

    def share(self, form: Form, config: FitConfig) -> float | None:
        """The largest of a form's shares that a budget has room for."""

        def fits(share: float) -> bool:
            weight = self.costs.of(form.quick(share))
            return weight is not None and weight.meets(config)

        shares = self._possible(form)
        if not shares:
            self.trials.refused[form.name] = self.costs.reason(form.quick(form.shares[-1]))
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

    # --- the search ------------------------------------------------------------------------------

    @cached_property
    def redundancy(self) -> Redundancy | None:
        """Where a mixture is redundant, which is told; None of dense models."""
        if not isinstance(base_arch(self.source.config), MoEArch):
            return None
        found = redundancy(self.trials.observed(), self.texts.both[1], self.track)
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
        config, _ = self.config, self.texts.both  # too little text is said at once
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
        for form, reason in self.trials.refused.items():
            logging.getLogger(__name__).warning("Not possible: %s (%s)", form, reason)
        return chosen, self.tried

    def _best(self, known: Sequence[Form], config: FitConfig) -> Candidate | None:
        """The best candidate within a budget of size; None where nothing fits."""
        if self.files is not None:
            return self._best_file(known, config)
        found = self._hopeful(self._sized(known, config))
        if not found:
            return None
        self._foretell(found)
        few = self._worth_care(self._tried_quickly(found, config), config)
        kept = [candidate for *_, candidate in few] + self._refined(few, config)
        return min(kept, key=lambda candidate: candidate.kl, default=None)

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

    def _sized(self, known: Sequence[Form], config: FitConfig) -> list[tuple[Form, float]]:
        """The forms that meet a budget, each with its largest share that does."""
        tracked = self.track(known, "Sizing candidates", len(known))
        shares = ((form, self.share(form, config)) for form in tracked)
        return [(form, share) for form, share in shares if share is not None]

    def _refined(self, few: Sequence[Tried], config: FitConfig) -> list[Candidate]:
        """Candidates made with more care."""
        fine = [(form.name, make(share)) for form, share, _ in few for make in form.careful]
        tracked = self.track(fine, "Refining", len(fine))
        made = (self._try(name, steps, "refined", config) for name, steps in tracked)
        return [candidate for candidate in made if candidate]

    def _tried_quickly(self, found: Sequence[tuple[Form, float]], config: FitConfig) -> list[Tried]:
        """Every form at its largest size as it is quickly made, those that lose least first."""
        tried = []
        for form, share in self.track(found, "Trying candidates", len(found)):
            candidate = self._try(form.name, form.quick(share), "rough", config)
            if candidate is not None:
                tried.append((form, share, candidate))
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

    def _try(
        self,
        form: str,
        steps: Steps,
        stage: str,
        config: FitConfig | None = None,
        types: Mapping[str, str] | None = None,
    ) -> Candidate | None:
        """A candidate with its figures; None where it is impossible, or above the budget."""
        weight = self.costs.of(steps)
        if weight is None or (config is not None and not weight.meets(config)):
            return None
        if self.config.plain and not weight.native:
            return None
        try:
            found = Candidate(form, steps, weight, stage=stage, types=types)
            candidate = self.trials.measured(found)
        except MoesaicError as error:  # the weights have no such form: biases, other activations
            self.trials.refused[form] = str(error)
            return None
        if config is not None and not candidate.weight.meets(config):
            return None
        before = self._tried.get(steps)
        if before is None or candidate.kl < before.kl:
            self._tried[steps] = candidate
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

    # --- weights and bits ------------------------------------------------------------------------

    def _best_file(self, known: Sequence[Form], config: FitConfig) -> Candidate | None:
        """The best file within a budget: of the original, or of what a form makes of it.

        What a step loses and what rounding loses nearly add up, so that a form's share is first
        the one where the sum is least. Types of very few bits lose more than the sum says: from
        there shares are moved, made and measured, as long as they lose less.
        """
        assert self.files is not None
        assert config.memory is not None
        if self._reach(known) > config.memory:
            return None
        last = ending(self.config)
        self._foretell([(filed(form, last), form.shares[0]) for form in known if last])
        found = self._rounded(config)
        places = sorted(self._places(known, config), key=lambda place: place.kl)
        few = places[: config.confirm]
        if found:
            least = min(candidate.kl for candidate in found)
            few = [place for place in few if place.kl <= FAR * least]
            if places and not few and self.tell is not None:
                self.tell(
                    f"Only rounding pays: it loses {least:.2g}, and what loses least beside it, "
                    f"{places[0].form.name}, {places[0].kl:.2g} before any refit."
                )
        for place in self.track(few, "Weights and bits", len(few)):
            found += self._moved(place, config)
        best = min(found, key=lambda candidate: candidate.kl, default=None)
        return best and self._settled(best, config)

    def _reach(self, known: Iterable[Form]) -> int:
        """Bytes of the smallest file that any form comes to."""
        assert self.files is not None
        ways: list[Steps] = [()]
        for form in known:
            if shares := self._possible(form):
                ways.append(form.quick(shares[0]))
        files, last = self.files, ending(self.config)
        kept = [self.costs.made(way) for way in ways if self._native(way)]
        if last and last.memory is None:
            return min(files.told(made, last) for made in kept)
        return min(files.layout(made).least(self.config.types) for made in kept)

    def _native(self, steps: Steps) -> bool:
        weight = self.costs.of(steps) if steps else None
        return not steps or (weight is not None and weight.native)

    def _types(self, steps: Steps, memory: int) -> tuple[dict[str, str] | None, float]:
        """Types by groups for a result within a budget, and what the original loses by them.

        Of one type nothing need be known: it loses the same of every result.

        Raises:
            MoesaicError: the budget is out of reach.
        """
        assert self.files is not None
        layout, last = self.files.layout(self.costs.made(steps)), ending(self.config)
        if last is None or last.memory is None:
            weight = self.costs.of((*steps, last)) if last else None
            if weight is None or weight.memory > memory:
                raise MoesaicError("This file is too large.")
            return None, 0.0
        layout.check(self.config.types, memory)
        return self._table.choice(layout, memory)

    @cached_property
    def _table(self) -> Sensitivities:
        """What the original loses by types in each group of its tensors."""
        assert self.files is not None
        return self.files.original.sensitivities(self.config.types)

    def _rounded(self, config: FitConfig) -> list[Candidate]:
        """The original's own files: of the widest type that fits, and with types by layer."""
        assert self.files is not None
        assert config.memory is not None
        found: list[Candidate | None] = []
        layout, last = self.files.original.layout, ending(self.config)
        for type in sorted(self.config.types, key=lambda type: -layout.least([type])):
            if layout.least([type]) <= config.memory:
                steps = (ExportArgs(to="gguf", type=type),)  # type: ignore[arg-type]
                found.append(self._try(type, steps, "rough", config))
                if found[-1]:
                    break
        if last and last.memory and layout.least(self.config.types) <= config.memory:
            types, _ = self._types((), config.memory)
            found.append(self._try(last.called, (last,), "rough", config, types))
        return [one for one in found if one]

    def _places(self, known: Sequence[Form], config: FitConfig) -> list[Place]:
        """Of each form that meets a budget where it loses least, as told."""
        hopeful = self._hopeful([(form, form.shares[-1]) for form in known])
        shares = {form.name: self._shares(form, config) for form, _ in hopeful}
        wanted = [form.quick(share) for form, _ in hopeful for share in shares[form.name]]
        single = {step for steps in wanted for step in converting(steps)}
        losses = self.trials.alone(sorted(single, key=repr))

        def told(form: Form, share: float) -> Place:
            steps = sum(losses[step] for step in converting(form.quick(share)))
            return Place(form, share, steps + shares[form.name][share])

        found = []
        for form, _ in hopeful:
            places = [told(form, share) for share in shares[form.name]]
            found += [min(places, key=lambda place: place.kl)] if places else []
        return found

    def _shares(self, form: Form, config: FitConfig) -> dict[float, float]:
        """Some shares of a form that meet a budget, with what rounding then loses."""
        assert config.memory is not None
        last = ending(self.config)
        if last and last.memory is None:  # one type: as much as fits
            share = self.share(filed(form, last), config)
            return {} if share is None else {share: 0.0}
        found = {}
        for share in _spread(self._possible(form)[:-1]):
            steps = form.quick(share)
            if self._native(steps):
                with suppress(MoesaicError):
                    found[share] = self._types(steps, config.memory)[1]
        return found

    def _moved(self, place: Place, config: FitConfig) -> list[Candidate]:
        """Files of a form from its place on, to fewer weights or to more, while they lose less."""
        shares = [*self._shares(place.form, config)]
        at = shares.index(place.share)
        found = [c for c in (self._file(place.form, place.share, config),) if c]
        for way in (-1, 1):
            least, tried = found[0].kl if found else math.inf, at
            while 0 <= (tried := tried + way) < len(shares):
                candidate = self._file(place.form, shares[tried], config)
                if candidate is None or candidate.kl >= least:
                    break
                found.append(candidate)
                least = candidate.kl
            if len(found) > 1:
                break
        return found

    def _file(self, form: Form, share: float, config: FitConfig) -> Candidate | None:
        """The file of a form at a share, made with care."""
        last = ending(self.config)
        assert last is not None
        assert config.memory is not None
        steps = (*form.careful, form.quick)[0](share)
        with suppress(MoesaicError):
            types, _ = self._types(form.quick(share), config.memory)
            name = f"{form.name}, {last.called}"
            return self._try(name, (*steps, last), "refined", config, types)
        return None

    def _settled(self, best: Candidate, config: FitConfig) -> Candidate:
        """The best file, or the same with types that lose less where it is."""
        assert self.files is not None
        assert config.memory is not None
        if best.types is None:
            return best
        made, folder = self.costs.made(best.converted), self.trials.result(best.converted)
        live = self.files.live(folder, made)
        types = live.improved(best.types, self.config.types, config.memory)
        if types == best.types:
            return best
        other = self._try(best.form, best.steps, "refined", config, types)
        return other if other is not None and other.kl < best.kl else best

    def _smallest(self, known: Iterable[Form]) -> str:
        """A message that names the smallest sizes within reach."""
        if self.files is not None:
            wanted, reach = map(in_unit, (self.config.memory or 0, self._reach(known)))
            return f"memory {wanted} is out of reach: the least that works is {reach}."
        reached = [(form, shares[0]) for form in known if (shares := self._possible(form))]
        weights = [self.costs.of(form.quick(share)) for form, share in reached]
        possible = [w for w in weights if w is not None and (w.native or not self.config.plain)]
        if not possible:
            reasons = dict.fromkeys(self.trials.refused.values())
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


def _spread(shares: Sequence[float]) -> Sequence[float]:
    """Some of many shares, evenly, the largest among them."""
    step = -(-max(1, len(shares)) // JOINT)
    return shares[::-1][::step][::-1]
