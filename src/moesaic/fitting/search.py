"""Search of ``fit``: price all alternatives of a model once, then measure the best few.

Candidates are decided on calibration text; they are priced and compared on other windows of it that
none was decided on, and the one that is chosen is measured on evaluation text, as every result is:
the three share no rows.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from moesaic import __version__
from moesaic.arch.lookup import base_arch
from moesaic.config import ExportArgs, in_unit, parse_dtype
from moesaic.errors import MoesaicError
from moesaic.exports.allocation import (
    Layout,
    Numbers,
    Price,
    PriceTable,
    Types,
    choice,
    prices_in,
    tensor_types,
)
from moesaic.fitting.candidates import (
    NONE,
    QUANTISE,
    Candidate,
    Form,
    Levels,
    ending,
    forms,
    largest,
    pareto_front,
    simplest,
)
from moesaic.fitting.config import BUDGETS, FitConfig
from moesaic.fitting.gguf_files import Files
from moesaic.fitting.prices import IMPOSSIBLE, TABLE, Prices, key_of, priced_configs
from moesaic.fitting.trials import Texts, Trials
from moesaic.io.outputs import check_out_file, remove, run_folder, search_folder
from moesaic.io.source import resolve
from moesaic.metrics.evaluate import measured_text
from moesaic.observation.changes import priced_on
from moesaic.observation.job import Job
from moesaic.recipe import Recipe
from moesaic.sizes import RecipeSizes, ResultSize, Skeleton, Steps
from moesaic.surgery import settings_digest
from moesaic.types import Track, expand_home, silent

SHARES = tuple(n / 40 for n in range(12, 38))
"""Shares of the original's bytes that are tried if only a loss is given."""
ACTIVE = "active_parameters"
BEST, FILES, FOUND, PRICES = "best.yaml", "files", "found", "prices"
ROUNDS = 2
"""Most candidates that are measured after the first ones, since these change the estimates of
others."""


class Search:
    """Search for the recipe of least KL within a budget.

    Args:
        recipe: model, text, device and type; its steps are not used. If it does not say how many
            windows calibrate, the text is divided.
        config: the budget.
        work: a folder for what is finished.
        track: shows progress.
        notify: called with one line that compares the kinds of changes.
    """

    def __init__(
        self,
        recipe: Recipe,
        config: FitConfig,
        work: Path,
        track: Track = silent,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        self.config, self.work, self.track, self.notify = config, work, track, notify
        self.source = resolve(recipe.model)
        self.texts = Texts(recipe.calibration, self.source, config.windows)
        self.recipe = replace(recipe, calibration=self.texts.drawn)
        self.original = Skeleton.of(self.source, parse_dtype(recipe.dtype))
        text = recipe.calibration.source
        context = text, work / FILES, track, self.recipe.calibration.samples
        self.files = Files(self.source, *context) if config.types else None
        self._tried: dict[Steps, Candidate] = {}
        self._single = False
        """True if only recipes of one step are considered."""

    @property
    def tried(self) -> list[Candidate]:
        """Candidates that were measured."""
        return [*self._tried.values()]

    @cached_property
    def forms(self) -> list[Form]:
        """Forms of recipe that suit the model."""
        return forms(self.source, self.config)

    @cached_property
    def sizes(self) -> RecipeSizes:
        """Sizes of the results of recipes, from headers."""
        folder = self.work / "headers"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return RecipeSizes(self.recipe, folder, self.files.size if self.files else None)

    @cached_property
    def trials(self) -> Trials:
        """Measurements of candidates, and what is made for them."""
        context = self.texts, self.sizes, self.files, self.work, self.track
        return Trials(self.recipe, self.source, *context)

    # --- the search ------------------------------------------------------------------------------

    def run(self) -> tuple[Candidate, list[Candidate]]:
        """Return the candidate of least KL within the budget, and all that were measured.

        Raises:
            MoesaicError: nothing fits (names what would), or the model does as it is.
        """
        config = self.config
        self._check_inputs()
        self._check_needed()
        chosen = self._best(config) if config.has_size else self._smallest()
        if chosen is None:
            raise MoesaicError(self._out_of_reach())
        if config.max_loss is not None and chosen.loss > config.max_loss:
            raise MoesaicError(
                f"max_loss {config.max_loss:g} is out of reach at that size: the best of "
                f"{len(self._tried)} candidates raises perplexity by {chosen.loss:.3g}. A larger "
                f"budget, or max_loss={chosen.loss * 1.05:.2g}, would do."
            )
        for form, reason in self.trials.refused.items():
            logging.getLogger(__name__).warning("Not possible: %s (%s)", form, reason)
        return chosen, self.tried

    def frontier(self, budgets: Sequence[FitConfig]) -> list[Candidate]:
        """Return the one-step candidates that no other one beats in size and KL, largest first.

        Args:
            budgets: in falling order.

        Raises:
            MoesaicError: no candidate meets any of them; names what would.
        """
        self._check_inputs()
        self._single = True
        for budget in budgets:
            self._measure_best(budget)
        if not self._tried:
            raise MoesaicError(self._out_of_reach())
        return pareto_front(self._tried.values(), "memory" if budgets[0].memory else ACTIVE)

    def leave_best(self) -> None:
        """Write the recipe of the best candidate so far, for a search that is interrupted."""
        best = min(self._tried.values(), key=lambda c: c.kl, default=None)
        if best is None or not best.conversions or not self.config.has_size:
            return
        file = self.work / BEST
        file.write_text(replace(self.recipe, steps=best.conversions).to_yaml(), "utf-8")
        logging.getLogger(__name__).warning(
            "Of %d candidates %s has the least KL so far. Its recipe is in %s, for moesaic run; "
            "resumed, the search continues.",
            len(self._tried),
            best.form,
            file,
        )

    def _best(self, config: FitConfig) -> Candidate | None:
        """Return the best candidate within a budget of size; None where nothing fits."""
        return self._simplest(self._measure_best(config))

    def _measure_best(self, config: FitConfig) -> list[Candidate]:
        """Measure the options of least estimated KL within a budget, then the next best."""
        options = sorted(self._options(config), key=Candidate.estimate)
        if not options:
            return []
        self._notify_of_kinds(options, config)
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
        """Measure an option and update the level of its kind; False if it is impossible."""
        try:
            candidate = self.trials.measure(option)
        except MoesaicError as error:  # the layers cannot be changed so: biases, activations
            self.trials.refuse(option.form, error)
            return False
        if not config.allows(candidate.size):
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

    def _notify_of_kinds(self, options: Sequence[Candidate], config: FitConfig) -> None:
        """Report the least estimated KL of each kind of change within a budget."""
        if self.notify is not None:
            kinds: dict[str, float] = {}
            for option in options:
                kinds.setdefault(option.kind, option.estimate())
            listed = ", ".join(f"{kind} {kl:.2g}" for kind, kl in kinds.items())
            sizes = [_size(n, getattr(config, n)) for n in BUDGETS if getattr(config, n)]
            self.notify(f"Estimated KL at {' and '.join(map(str, sizes))}: {listed}.")

    def _simplest(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the simplest of the best within ``max_loss``; where none is, the nearest to it."""
        limit = self.config.max_loss
        within = [c for c in candidates if limit is None or c.loss <= limit]
        return simplest(within) or min(candidates, key=lambda c: c.loss, default=None)

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
    def _table(self) -> tuple[Path, Prices]:
        """File of the price table, and what it holds.

        Raises:
            MoesaicError: it is another file, or would not outlive the run.
        """
        deciding, pricing = self.texts.both
        request = {
            "weights": self.source.fingerprint,
            "text": [deciding.fingerprint, pricing.fingerprint],
            "settings": settings_digest(self.source.config),
            "dtype": self.recipe.dtype,
            "version": __version__,
        }
        own = self.work / FOUND / "prices.json"
        file = Path(expand_home(self.config.prices or own))
        out = self.recipe.out
        made = {Path(folder).resolve() for folder in (out, run_folder(out), search_folder(out))}
        if file != own and made & {*file.resolve().parents}:
            raise MoesaicError(
                f"prices {file} lies in OUT or beside it in a folder of a run, which is removed: "
                "name another place."
            )
        if os.access(file, os.W_OK) or not file.exists():  # one that is complete is only read
            check_out_file(file, TABLE, overwrite=True)
        return file, Prices.load(file, request)

    @cached_property
    def prices(self) -> Prices:
        """Price table, read from its file and completed; made if there is none."""
        file, prices = self._table
        lacking = [c for c in priced_configs(self.forms) if key_of(c) not in prices.steps]
        quantised = self.files.original.quantised if self.files and self._tensor_types else None
        groups = {*quantised.groups} if quantised else set[str]()
        types = [t for t in self._tensor_types if prices.types.get(t, {}).keys() != groups]
        if quantised and any(not of.keys() <= groups for of in prices.types.values()):
            raise MoesaicError(
                f"{file} has prices of other tensors. Remove it, and the table is made anew."
            )
        if lacking or types:
            plans = self.trials.plans(lacking)
            prices.steps |= {key_of(c): IMPOSSIBLE for c in lacking if c not in plans}
            args = replace(self.trials.args(), text=priced_on(self.texts.both[1]))
            folder = self.work / PRICES
            prices.add(Job(args, base_arch), plans, types, quantised, self.track, folder)
            prices.save(file)
            remove(folder)
        return prices

    @property
    def _tensor_types(self) -> tuple[str, ...]:
        """Types of tensors that groups may get; empty if a file has one type."""
        mixed = self.files is not None and ending(self.config).memory is not None
        return tensor_types(self.config.types) if mixed else ()

    def _options(self, config: FitConfig) -> Iterator[Candidate]:
        """Yield the recipes that meet a budget, with their prices."""
        file = ending(config) if self.files else None
        if self.files and file:
            yield from self._quantised(config, file)
        considered = self._considered
        for form in self.track(considered, "Looking for what fits", len(considered)):
            for place in self._places(form, config, file):
                quick: Steps = form.steps(place)
                size = self.sizes.of((*quick, file) if file else quick)
                if size is None or not config.allows(size):
                    continue
                if file and file.memory and not self._leaves_room(quick):
                    continue
                price, steps = self.prices.of(form, place), form.steps(place, careful=True)
                if price is IMPOSSIBLE:
                    continue
                if file is None:
                    yield Candidate(form.name, steps, size, steps_S=price.kl_S)
                    continue
                types, types_S = self._types(quick) if file.memory else (None, NONE)
                name, ends = f"{form.name}, {file.called}", (*steps, file)
                estimates = {"types": types, "steps_S": price.kl_S, "types_S": types_S}
                yield Candidate(name, ends, size, **estimates)  # type: ignore[arg-type]

    def _quantised(self, config: FitConfig, file: ExportArgs) -> Iterator[Candidate]:
        """Yield the original's own files: of the best type that fits, and with types by layer."""
        assert self.files is not None
        assert config.memory is not None
        plain = list[Candidate]()
        for type in config.types:
            whole = ExportArgs(to="gguf", type=type)  # type: ignore[arg-type]
            size = self.sizes.of((whole,))
            if size is not None and config.allows(size):
                types_S = self._of_one_type(type)
                plain.append(Candidate(whole.called, (whole,), size, types_S=types_S))
        if plain:
            yield min(plain, key=Candidate.estimate)
        size = self.sizes.of((file,)) if file.memory and self._leaves_room(()) else None
        if size is not None and config.allows(size):
            types, types_S = self._types(())
            yield Candidate(file.called, (file,), size, types=types, types_S=types_S)

    def _types(self, steps: Steps) -> tuple[Types, Numbers]:
        """Return the types by groups for a result within the budget, and their KL by sample."""
        assert self.files is not None
        assert self.config.memory is not None
        layout = self.files.layout(self.sizes.skeleton(steps))
        prices = self._prices_in(layout)
        types = choice(prices, layout, self.config.memory)
        return types, Price.together(prices[type][group] for group, type in types.items()).kl_S

    def _of_one_type(self, type: str) -> Numbers:
        """Return the estimated KL by sample of the original's file in one type.

        llama.cpp gives some tensors of a group other types.
        """
        assert self.files is not None
        if not self._tensor_types:
            return NONE  # it is the only one
        layout, alike = self.files.original.layout, tensor_types([type])[0]
        types, _ = self.files.uniform(None, type)
        prices = []
        for group, price in self._prices_in(layout)[alike].items():
            wanted = layout.types_in(group, alike)
            found = {name: types.get(name, type) for name, type in wanted.items()}
            prices.append(price * layout.growth(wanted, found))
        return Price.together(prices).kl_S

    def _prices_in(self, layout: Layout) -> PriceTable:
        """Return the prices of the requested types for the file of a result."""
        assert self.files is not None
        of_all = prices_in(self.prices.types, self.files.original.layout, layout)
        return {type: of_all[type] for type in self._tensor_types}

    def _check_inputs(self) -> None:
        """Refuse unusable text and price tables, before anything is computed.

        Text includes that on which results are measured.
        """
        _ = self.texts.both, self._table
        if self.recipe.evaluation is not None:
            measured_text(self.source, self.recipe.evaluation)

    # --- sizes -----------------------------------------------------------------------------------

    def _check_needed(self) -> None:
        """Refuse a budget that the model meets as it is, or that no file meets."""
        if self.files:
            _ = self.files.original  # a converter that refuses is asked once, before all else
            if self._tensor_types and self._least() > (self.config.memory or 0):
                raise MoesaicError(self._out_of_reach())
            return
        size = self.sizes.of(())
        if not self.config.has_size or size is None or not self.config.allows(size):
            return
        budgets = [name for name in BUDGETS if getattr(self.config, name) is not None]
        sizes = ", ".join(f"{name} {_size(name, getattr(size, name))}" for name in budgets)
        raise MoesaicError(
            f"{self.recipe.model} is within this budget as it is ({sizes}): give a smaller one."
        )

    def _places(self, form: Form, config: FitConfig, file: ExportArgs | None) -> Sequence[int]:
        """Return the numbers of a form's recipes that are options within a budget.

        With types by layer that is each, otherwise the largest that fits.
        """

        def fits(place: int) -> bool:
            steps: Steps = form.steps(place)
            size = self.sizes.of((*steps, file) if file else steps)
            return size is not None and config.allows(size)

        if file is not None and file.memory is not None:
            count = form.count - form.family.removes
            return [n for n in range(count) if self._possible(form, n)]
        first = self._first(form)
        if first is None:
            try:
                self.sizes.skeleton(form.steps(form.count - 1))
            except MoesaicError as error:
                self.trials.refuse(form.name, error)
        if first is None or not fits(first) or (not form.single and fits(form.count - 1)):
            return []  # there may be room left: with less of the first step it is another form
        place = largest(range(first, form.count), fits)
        return [] if place is None else [place]

    def _leaves_room(self, steps: Steps) -> bool:
        """Return True if the file of a result is within the budget in the narrowest types."""
        assert self.files is not None
        assert self.config.memory is not None
        layout = self.files.layout(self.sizes.skeleton(steps))
        return layout.least(self.config.types) <= self.config.memory

    def _possible(self, form: Form, place: int) -> bool:
        """Return True if a recipe can be carried out, and its result may be chosen."""
        size = self.sizes.of(form.steps(place))
        return size is not None and (size.native or not self.config.native_only)

    @property
    def _considered(self) -> list[Form]:
        """Forms of the search: all, or those of one step."""
        return [form for form in self.forms if form.single or not self._single]

    def least(self) -> int:
        """Return the bytes of about the smallest result of one step; 0 where there is none."""
        sizes = self._smallest_results([form for form in self.forms if form.single]).values()
        return min((size.memory for size in sizes), default=0)

    def _smallest_results(self, forms: Sequence[Form]) -> dict[Steps, ResultSize]:
        """Return the sizes of about the smallest result of each form, by its steps."""
        every = (form.steps(n) for form in forms if (n := self._first(form)) is not None)
        sizes = ((steps, self.sizes.of(steps)) for steps in every)
        return {steps: size for steps, size in sizes if size is not None}

    def _least(self) -> int:
        """Return the bytes of the smallest file that any form gives."""
        assert self.files is not None
        every: list[Steps] = [(), *self._smallest_results(self._considered)]
        results = [self.sizes.skeleton(steps) for steps in every]
        if self._tensor_types:
            return min(self.files.layout(built).least(self.config.types) for built in results)
        return min(self.files.size(built, ending(self.config)) for built in results)

    def _first(self, form: Form) -> int | None:
        """Return the number of about the smallest recipe of a form; None where none is possible."""
        step = max(1, form.count // 8)
        return next((n for n in range(0, form.count, step) if self._possible(form, n)), None)

    def _out_of_reach(self) -> str:
        """Return a message that names the smallest sizes within reach."""
        if self.files:
            budget, smallest = in_unit(self.config.memory or 0), in_unit(self._least())
            return f"memory {budget} is out of reach: the least that works is {smallest}."
        possible = self._smallest_results(self._considered).values()
        if not possible:
            reasons = dict.fromkeys(self.trials.refused.values())
            return f"This model cannot be made smaller: {' '.join(reasons) or 'nothing fits it.'}"
        budgets = {n: getattr(self.config, n) for n in BUDGETS if getattr(self.config, n)}
        least = {n: min(getattr(size, n) for size in possible) for n in budgets}
        short = [name for name in budgets if least[name] > budgets[name]]
        sentences = [
            f"{name} {_size(name, budgets[name])} is out of reach: the least that works is "
            f"{_size(name, least[name])}"
            for name in short or budgets  # if each could be met by itself, all of them
        ]
        bits = " A GGUF file in fewer bits may be smaller (moesaic fit --type q4_k_m)."
        return "; ".join(sentences) + f".{bits if 'memory' in (short or budgets) else ''}"


def _size(name: str, value: float) -> str | int:
    """Return a size as its budget is written."""
    return in_unit(int(value)) if name == "memory" else int(value)
