"""The search for a GGUF file: weights and bits share one budget of bytes.

What a step loses and what rounding loses nearly add up, so that a form's share is first the one
where the sum is least. Types of very few bits lose more than the sum says: from there shares are
moved, made and measured, as long as they lose less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from moesaic.config import ExportArgs, MethodConfig, in_unit
from moesaic.errors import MoesaicError
from moesaic.exports.live import Types
from moesaic.exports.mixed import Sensitivities
from moesaic.fitting.candidates import Candidate
from moesaic.fitting.config import FitConfig
from moesaic.fitting.forms import Form, ending, filed
from moesaic.fitting.gguf_files import Files
from moesaic.fitting.search import FAR, Search
from moesaic.fitting.sizes import Steps, conversions

JOINT = 8
"""Shares of a form that are told apart where bits are shared out with it."""


@dataclass(frozen=True)
class Place:
    """A share of a form that meets the budget, and what its steps and rounding lose alone."""

    form: Form
    share: float
    types: Types | None
    """Of its file by groups of tensors; None where it has one."""
    kl: float

    @property
    def steps(self) -> tuple[MethodConfig, ...]:
        """As they are quickly made, without the file."""
        return conversions(self.form.quick(self.share))


class FileSearch(Search):
    """Finds the file that loses least within a budget of bytes; its config has types."""

    files: Files

    @property
    def budget(self) -> int:
        """Bytes of the file, at most."""
        assert self.config.memory is not None  # without it types are refused
        return self.config.memory

    @property
    def last(self) -> ExportArgs:
        """The file that recipes end in."""
        return ending(self.config)

    @property
    def mixed(self) -> bool:
        """Types differ by layer."""
        return self.last.memory is not None

    @cached_property
    def table(self) -> Sensitivities:
        """What the original loses by types in each group of its tensors."""
        return self.files.original.sensitivities(self.config.types)

    def _best(self, every: Sequence[Form], config: FitConfig) -> Candidate | None:
        """The best file within the budget: of the original, or of what a form makes of it."""
        if self._least(every) > self.budget:
            return None
        candidates = self._rounded()
        places = self._places(every)
        near = places[: config.confirm]
        if candidates:
            least = min(candidate.kl for candidate in candidates)
            near = [some for some in near if _best_of(some).kl <= FAR * least]
            if places and not near and self.tell is not None:
                best = _best_of(places[0])
                self.tell(
                    f"Only rounding pays: it loses {least:.2g}, and what loses least beside it, "
                    f"{best.form.name}, {best.kl:.2g} before any refit."
                )
        for some in self.track(near, "Weights and bits", len(near)):
            candidates += self._moved(some)
        chosen = self._chosen(candidates)
        return chosen and self._settled(chosen)

    def _least(self, every: Iterable[Form]) -> int:
        """Bytes of the smallest file that any form comes to."""
        smallest = [form.quick(shares[0]) for form in every if (shares := self._possible(form))]
        results = [self.costs.built(steps) for steps in [(), *smallest] if self._native(steps)]
        if self.mixed:
            return min(self.files.layout(built).least(self.config.types) for built in results)
        return min(self.files.size(built, self.last) for built in results)

    def _native(self, steps: Steps) -> bool:
        weight = self.costs.weight(steps)
        return weight is not None and weight.native

    def _choice(self, steps: Steps) -> tuple[Types, float]:
        """Types by groups for a result within the budget, and what the original loses by them.

        Raises:
            MoesaicError: the budget is out of reach, which is said before anything is measured.
        """
        layout = self.files.layout(self.costs.built(steps))
        layout.check(self.config.types, self.budget)
        return self.table.choice(layout, self.budget)

    def _rounded(self) -> list[Candidate]:
        """The original's own files: of the widest type that fits, and with types by layer."""
        layout, last, config = self.files.original.layout, self.last, self.config
        tried: list[Candidate | None] = []
        for type in sorted(config.types, key=lambda type: -layout.least([type])):
            if layout.least([type]) <= self.budget and not any(tried):
                file = ExportArgs(to="gguf", type=type)  # type: ignore[arg-type]
                tried.append(self._try(type, (file,), "rough", config))
        if self.mixed and layout.least(config.types) <= self.budget:
            tried.append(self._try(last.called, (last,), "rough", config, self._choice(())[0]))
        return [candidate for candidate in tried if candidate]

    def _places(self, every: Sequence[Form]) -> list[list[Place]]:
        """Of each form the shares that meet the budget; the form first that may lose least."""
        within = {form: places for form in every if (places := [*self._within(form)])}
        forms = [*within.values()]
        steps = {step for places in forms for place in places for step in place.steps}
        losses = self.trials.alone(sorted(steps, key=repr))
        forms = [
            [replace(p, kl=sum(losses[step] for step in p.steps) + p.kl) for p in places]
            for places in forms
        ]
        return sorted(forms, key=lambda places: _best_of(places).kl)

    def _within(self, form: Form) -> Iterator[Place]:
        """A form's shares that meet the budget, rising, with what rounding alone then loses.

        One type loses the same of every result: only the largest share counts.
        """
        if not self.mixed:
            share = self.share(filed(form, self.last), self.config)
            if share is not None:
                yield Place(form, share, None, 0.0)
            return
        for share in self._shares(form):
            if self._native(form.quick(share)):
                with suppress(MoesaicError):
                    yield Place(form, share, *self._choice(form.quick(share)))

    def _shares(self, form: Form) -> Sequence[float]:
        """The shares of a form, rising, at which bits are shared out with it; less than all."""
        return _spread(self._possible(form)[:-1])

    def _moved(self, places: Sequence[Place]) -> list[Candidate]:
        """Files of a form from its best place on, to fewer weights or more, while they lose less.

        Args:
            places: of the form, shares rising.
        """
        start = places.index(_best_of(places))
        candidates = [c for c in (self._file(places[start]),) if c]
        for further in (places[:start][::-1], places[start + 1 :]):
            for place in further:
                candidate = self._file(place)
                if candidate is None or (candidates and candidate.kl >= candidates[-1].kl):
                    break
                candidates.append(candidate)
            if len(candidates) > 1:
                break
        return candidates

    def _file(self, place: Place) -> Candidate | None:
        """The file of a form at a share, made with care."""
        form, last = place.form, self.last
        steps = (*(form.careful or form.quick)(place.share), last)
        return self._try(f"{form.name}, {last.called}", steps, "refined", self.config, place.types)

    def _settled(self, best: Candidate) -> Candidate:
        """The best file, or the same with types that lose less where it is."""
        if best.types is None:
            return best
        result = self.trials.result(best.converted)
        live = self.files.live(result, self.costs.built(best.converted))
        types = live.improved(best.types, self.config.types, self.budget)
        if types == best.types:
            return best
        other = self._try(best.form, best.steps, "refined", self.config, types)
        return other if other is not None and other.kl < best.kl else best

    def _out_of_reach(self, every: Iterable[Form]) -> str:
        """A message that names the smallest file within reach."""
        budget, least = map(in_unit, (self.budget, self._least(every)))
        return f"memory {budget} is out of reach: the least that works is {least}."


def _spread(shares: Sequence[float]) -> Sequence[float]:
    """Some of many shares, evenly, the largest among them."""
    step = -(-max(1, len(shares)) // JOINT)
    return shares[::-1][::step][::-1]


def _best_of(places: Sequence[Place]) -> Place:
    return min(places, key=lambda place: place.kl)
