"""The search: all alternatives of a model priced once, the best few within a budget measured.

Candidates are decided on calibration text; they are priced and compared on other windows of it that
none was decided on, and the one that is chosen is measured on evaluation text, as every result is:
the three share no rows.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from moesaic import __version__
from moesaic.arch.lookup import base_arch
from moesaic.config import ExportArgs, in_unit, parse_dtype
from moesaic.errors import MoesaicError
from moesaic.exports.rounder import Numbers, Types, choice, tensor_types
from moesaic.fitting.candidates import (
    NONE,
    QUANTISE,
    Candidate,
    Levels,
    plainest,
    unbeaten,
)
from moesaic.fitting.config import BUDGETS, FitConfig
from moesaic.fitting.forms import Form, ending, forms, largest, places_priced
from moesaic.fitting.gguf_files import Files
from moesaic.fitting.prices import IMPOSSIBLE, Prices, asked, key_of
from moesaic.fitting.texts import Texts
from moesaic.fitting.trials import Trials
from moesaic.io.outputs import remove
from moesaic.io.source import resolve
from moesaic.observation.estimates import priced_on
from moesaic.observation.job import Job
from moesaic.recipe import Recipe
from moesaic.sizes import Built, Costs, Steps
from moesaic.surgery import routing_in
from moesaic.types import Track, silent

SHARES = tuple(n / 40 for n in range(12, 38))
"""Shares of the original's bytes among which the smallest is sought where only a loss is given."""
ACTIVE = "active_parameters"
BEST, FILES, FOUND, PRICES = "best.yaml", "files", "found", "prices"
ROUNDS = 2
"""Candidates that are measured, at most, because others were found to have more KL than estimated
or less."""


class Search:
    """Finds the recipe of least KL within a budget.

    Args:
        recipe: model, text, device and type; its steps are not looked at. Where it does not say how
            many windows calibrate, those that there are get divided.
        config: the budget.
        work: a folder for what is finished.
        track: shows progress.
        tell: shows a line, of what pays.
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
        context = text, work / FILES, track, self.recipe.calibration.samples
        self.files = Files(self.source, *context) if config.types else None
        self._tried: dict[Steps, Candidate] = {}
        self._single = False
        """Only recipes of one step are looked at."""

    @property
    def tried(self) -> list[Candidate]:
        """The candidates that were measured."""
        return [*self._tried.values()]

    @cached_property
    def forms(self) -> list[Form]:
        """All forms of recipe that the model may have."""
        return forms(self.source, self.config)

    @cached_property
    def costs(self) -> Costs:
        """Sizes of recipes."""
        folder = self.work / "headers"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return Costs(self.recipe, folder, self.files.size if self.files else None)

    @cached_property
    def trials(self) -> Trials:
        """How good candidates are."""
        context = self.texts, self.costs, self.files, self.work, self.track
        return Trials(self.recipe, self.source, *context)

    # --- the search ------------------------------------------------------------------------------

    def run(self) -> tuple[Candidate, list[Candidate]]:
        """Return the candidate of least KL within the budget, and all that were measured.

        Raises:
            MoesaicError: nothing fits, and names what would; or the model does as it is.
        """
        config, _ = self.config, self.texts.both  # too little text is said at once
        self._check_needed()
        chosen = self._best(config) if config.sized else self._smallest()
        if chosen is None:
            raise MoesaicError(self._out_of_reach(self.forms))
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
        """Return the candidates of one step that no other one beats, the largest first.

        Args:
            budgets: falling.

        Raises:
            MoesaicError: nothing meets any of them; names what would.
        """
        _ = self.texts.both  # too little text is said at once
        self._single = True
        for budget in budgets:
            self._measured(budget)
        if not self._tried:
            raise MoesaicError(self._out_of_reach(self.forms))
        return unbeaten(self._tried.values(), "memory" if budgets[0].memory else ACTIVE)

    def leave_best(self) -> None:
        """Write the recipe of the best candidate so far, for a search that ends before its end."""
        best = min(self._tried.values(), key=lambda c: c.kl, default=None)
        if best is None or not best.converted or not self.config.sized:
            return
        file = self.work / BEST
        file.write_text(replace(self.recipe, steps=best.converted).to_yaml(), "utf-8")
        logging.getLogger(__name__).warning(
            "Of %d candidates %s has the least KL so far. Its recipe is in %s, for moesaic run; "
            "resumed, the search goes on.",
            len(self._tried),
            best.form,
            file,
        )

    def _best(self, config: FitConfig) -> Candidate | None:
        """Return the best candidate within a budget of size; None where nothing fits."""
        candidates = self._measured(config)
        return self._chosen(candidates) if candidates else None

    def _measured(self, config: FitConfig) -> list[Candidate]:
        """Measure the best options within a budget, and those that are best after it."""
        options = sorted(self._options(config), key=Candidate.estimate)
        if not options:
            return []
        self._say_what_pays(options, config)
        firsts = {option.form: option for option in reversed(options)}  # the best of each form
        near = [o for o in options if firsts[o.form] is o and not o.far(options[0])]
        some = [option for option in options if option.plain]
        some += [option for option in near if not option.plain][: config.confirm]
        tried: dict[Steps, Candidate] = {}
        levels: Levels = {}
        for option in self.track(some, "Measuring candidates", len(some)):
            if not self._measure(option, config, tried, levels):
                options.remove(option)
        for _ in range(ROUNDS):
            best = min(options, key=lambda option: option.estimate(levels), default=None)
            if best is None or best.steps in tried:
                break
            if not self._measure(best, config, tried, levels):
                options.remove(best)
        return [*tried.values()]

    def _measure(
        self, option: Candidate, config: FitConfig, tried: dict[Steps, Candidate], levels: Levels
    ) -> bool:
        """Measure an option, and what its kind comes to; False where it cannot be had."""
        try:
            candidate = self.trials.measured(option)
        except MoesaicError as error:  # the weights have no such form: biases, other activations
            self.trials.refuse(option.form, error)
            return False
        if not config.allows(candidate.weight):
            return False
        tried[option.steps] = self._tried[option.steps] = candidate
        of_types, of_steps = float(option.types_S.mean()), float(option.steps_S.mean())
        if option.kind == QUANTISE and option.types:
            levels[QUANTISE] = candidate.kl / max(of_types, 1e-12)
        elif option.kind != QUANTISE:
            rest = candidate.kl - levels.get(QUANTISE, 1.0) * of_types
            level = max(rest, 0.1 * candidate.kl) / max(of_steps, 1e-12)
            levels[option.kind] = min(level, levels.get(option.kind, math.inf))
        return True

    def _say_what_pays(self, options: Sequence[Candidate], config: FitConfig) -> None:
        """Show the best of each kind, once for each budget."""
        if self.tell is not None:
            kinds: dict[str, float] = {}
            for option in options:
                kinds.setdefault(option.kind, option.estimate())
            listed = ", ".join(f"{kind} {kl:.2g}" for kind, kl in kinds.items())
            sizes = [_size(n, getattr(config, n)) for n in BUDGETS if getattr(config, n)]
            self.tell(f"Estimated KL at {' and '.join(map(str, sizes))}: {listed}.")

    def _chosen(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the simplest of the best within ``max_loss``; where none is, the nearest to it."""
        limit = self.config.max_loss
        within = [c for c in candidates if limit is None or c.loss <= limit]
        return plainest(within) or min(candidates, key=lambda c: c.loss, default=None)

    def _smallest(self) -> Candidate:
        """Return the smallest result whose perplexity rises by no more than ``max_loss``.

        Raises:
            MoesaicError: there is none.
        """
        limit, found = self.config.max_loss, dict[int, Candidate]()
        assert limit is not None

        def within(number: int) -> bool:
            memory = int(SHARES[::-1][number] * self.original.bytes)
            candidate = self._best(replace(self.config, memory=memory))
            if candidate is None or candidate.loss > limit:
                return False
            found[number] = candidate
            return True

        smallest = largest(range(len(SHARES)), within)
        if smallest is None:
            least = min((candidate.loss for candidate in self.tried), default=0.0)
            raise MoesaicError(
                f"max_loss {limit:g} is out of reach: at {SHARES[-1]:.0%} of the bytes "
                f"perplexity rises by {least:.3g}."
            )
        return found[smallest]

    # --- prices ----------------------------------------------------------------------------------

    @cached_property
    def prices(self) -> Prices:
        """The table, made where it is not there, and completed where it lacks something."""
        deciding, pricing = self.texts.both
        request = {
            "weights": self.source.fingerprint,
            "text": [deciding.fingerprint, pricing.fingerprint],
            "routing": routing_in(self.source.config),
            "dtype": self.recipe.dtype,
            "version": __version__,
        }
        file = Path(self.config.prices or self.work / FOUND / "prices.json").expanduser()
        prices = Prices.load(file, request)
        lacking = [c for c in asked(self.forms) if key_of(c) not in prices.steps]
        types = [type for type in self._tensor_types if type not in prices.types]
        if lacking or types:
            plans = self.trials.plans(lacking)
            prices.steps |= {key_of(c): IMPOSSIBLE for c in lacking if c not in plans}
            rounder = self.files.original.rounder if self.files and types else None
            args = replace(self.trials.args(), text=priced_on(pricing))
            folder = self.work / PRICES
            prices.add(Job(args, base_arch), plans, types, rounder, self.track, folder)
            prices.save(file)
            remove(folder)
        return prices

    @property
    def _tensor_types(self) -> tuple[str, ...]:
        """Types of tensors among which groups choose; none where a file has one type."""
        mixed = self.files is not None and ending(self.config).memory is not None
        return tensor_types(self.config.types) if mixed else ()

    def _options(self, config: FitConfig) -> Iterator[Candidate]:
        """Return the recipes that meet a budget, priced."""
        file = ending(config) if self.files else None
        if self.files and file:
            yield from self._quantised(config, file)
        shown = self.track(self.forms, "Looking for what fits", len(self.forms))
        for form in (f for f in shown if f.single or not self._single):
            for place in self._places(form, config, file):
                price, steps = self.prices.of(form, place), form.steps(place, careful=True)
                quick: Steps = form.steps(place)
                weight = self.costs.weight((*quick, file) if file else quick)
                if price is IMPOSSIBLE or weight is None:
                    continue
                if file is None:
                    yield Candidate(form.name, steps, weight, steps_S=price.kl_S)
                    continue
                with suppress(MoesaicError):
                    types, types_S = self._types(quick) if file.memory else (None, NONE)
                    name, ends = f"{form.name}, {file.called}", (*steps, file)
                    estimates = {"types": types, "steps_S": price.kl_S, "types_S": types_S}
                    yield Candidate(name, ends, weight, **estimates)  # type: ignore[arg-type]

    def _quantised(self, config: FitConfig, file: ExportArgs) -> Iterator[Candidate]:
        """Yield the original's own files: of the best type that fits, and with types by layer."""
        assert self.files is not None
        assert config.memory is not None
        plain = list[Candidate]()
        for type in config.types:
            alone = ExportArgs(to="gguf", type=type)  # type: ignore[arg-type]
            weight = self.costs.weight((alone,))
            if weight is not None and config.allows(weight):
                alike = self.prices.types.get(tensor_types([type])[0], {})  # none where it is alone
                types_S = sum((price.kl_S for price in alike.values()), NONE)
                plain.append(Candidate(alone.called, (alone,), weight, types_S=types_S))
        if plain:
            yield min(plain, key=Candidate.estimate)
        layout = self.files.original.layout
        weight = self.costs.weight((file,))
        if file.memory is not None and weight and layout.least(config.types) <= config.memory:
            types, types_S = self._types(())
            yield Candidate(file.called, (file,), weight, types=types, types_S=types_S)

    def _types(self, steps: Steps) -> tuple[Types, Numbers]:
        """Types by groups for a result within the budget, and their KL by sample.

        Raises:
            MoesaicError: the budget is out of reach, which is said before anything is priced.
        """
        assert self.files is not None
        assert self.config.memory is not None
        layout = self.files.layout(self.costs.built(steps))
        layout.check(self.config.types, self.config.memory)
        prices = {type: self.prices.types[type] for type in self._tensor_types}
        kls = {t: {group: price.kl for group, price in of.items()} for t, of in prices.items()}
        types = choice(kls, layout, self.config.memory)
        of_types = (prices[type][group].kl_S for group, type in types.items())
        return types, sum(of_types, NONE)

    # --- sizes -----------------------------------------------------------------------------------

    def _check_needed(self) -> None:
        """Refuse a budget that the model meets as it is."""
        weight = self.costs.weight(())
        if self.files or not self.config.sized or weight is None or not self.config.allows(weight):
            return
        budgets = [name for name in BUDGETS if getattr(self.config, name) is not None]
        sizes = ", ".join(f"{name} {_size(name, getattr(weight, name))}" for name in budgets)
        raise MoesaicError(
            f"{self.recipe.model} is within this budget as it is ({sizes}): give a smaller one."
        )

    def _places(self, form: Form, config: FitConfig, file: ExportArgs | None) -> Sequence[int]:
        """Return the numbers of a form's recipes that are options within a budget.

        With types by layer each is one that leaves them room, otherwise the largest that fits.
        """

        def fits(place: int) -> bool:
            steps: Steps = form.steps(place)
            weight = self.costs.weight((*steps, file) if file else steps)
            return weight is not None and config.allows(weight)

        if file is not None and file.memory is not None:
            native = (n for n in places_priced(form.family)[:-1] if self._possible(form, n))
            return [*native]
        first = self._first(form)
        if first is None:
            try:
                self.costs.built(form.steps(form.count - 1))
            except MoesaicError as error:
                self.trials.refuse(form.name, error)
        if first is None or not fits(first) or (not form.single and fits(form.count - 1)):
            return []  # there may be room left: with less of the first step it is another form
        place = largest(range(first, form.count), fits)
        return [] if place is None else [place]

    def _possible(self, form: Form, place: int) -> bool:
        """Whether a recipe can be carried out, and its result may be chosen."""
        weight = self.costs.weight(form.steps(place))
        return weight is not None and (weight.native or not self.config.plain)

    def _least(self, every: Iterable[Form]) -> int:
        """Bytes of the smallest file that any form comes to."""
        assert self.files is not None
        firsts = [f.steps(n) for f in every if (n := self._first(f)) is not None]
        results = [self.costs.built(steps) for steps in [(), *firsts]]
        if self._tensor_types:
            return min(self.files.layout(built).least(self.config.types) for built in results)
        return min(self.files.size(built, ending(self.config)) for built in results)

    def _first(self, form: Form) -> int | None:
        """Return the number of about the smallest recipe of a form; None where none is possible."""
        step = max(1, form.count // 8)
        return next((n for n in range(0, form.count, step) if self._possible(form, n)), None)

    def _out_of_reach(self, every: Iterable[Form]) -> str:
        """Return a message that names the smallest sizes within reach."""
        if self.files:
            budget, smallest = in_unit(self.config.memory or 0), in_unit(self._least(every))
            return f"memory {budget} is out of reach: the least that works is {smallest}."
        reached = [(form, n) for form in every if (n := self._first(form)) is not None]
        possible = [self.costs.weight(form.steps(n)) for form, n in reached]
        if not possible:
            reasons = dict.fromkeys(self.trials.refused.values())
            return f"This model cannot be made smaller: {' '.join(reasons) or 'nothing fits it.'}"
        budgets = {n: getattr(self.config, n) for n in BUDGETS if getattr(self.config, n)}
        least = {n: min(getattr(w, n) for w in possible if w) for n in budgets}
        short = [name for name in budgets if least[name] > budgets[name]]
        sentences = [
            f"{name} {_size(name, budgets[name])} is out of reach: the least that works is "
            f"{_size(name, least[name])}"
            for name in short or budgets  # where each alone would do, all of them
        ]
        bits = " A GGUF file in fewer bits may be smaller (moesaic fit --type q4_k_m)."
        return "; ".join(sentences) + f".{bits if 'memory' in (short or budgets) else ''}"


def _size(name: str, value: float) -> str | int:
    """Return a size in the words of its budget."""
    return in_unit(int(value)) if name == "memory" else int(value)
