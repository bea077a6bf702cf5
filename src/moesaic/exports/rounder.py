"""A model with the values that a GGUF file would hold, one layer in memory at a time.

Rows are rounded by ggml's own quantiser, as llama.cpp rounds those of a file, and put in place of
the matrices of a layer while it is open, so that a file is measured without being written and read.

Shape suffixes: R rows, I inputs of a matrix, E routed experts, G groups, C choices (types).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import product

import torch
from torch import Tensor, nn

from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.data.text import Tokens
from moesaic.errors import MoesaicError
from moesaic.exports.importance import importance, names_in
from moesaic.exports.mixed import (
    EMBEDDINGS,
    HEAD,
    OUTSIDE,
    Layout,
    choice,
    tensor_types,
)
from moesaic.exports.quantiser import held_rows, values_of
from moesaic.io.models import path_of, shape_of
from moesaic.io.source import Source
from moesaic.observation.branches import Change, StandIn
from moesaic.observation.estimates import draws_for, estimated, priced_on
from moesaic.observation.stream import BEFORE, LayerStream, PartChange
from moesaic.types import Model, Track, silent

Types = Mapping[str, str]
"""Types of tensors by group."""
SAMPLED = 16
"""Experts of a layer, about, by which the KL of rounding all of them is estimated."""
AT_ONCE = 1 << 24
"""Weights of several experts, or rows, that are rounded at once: dequantising takes many times
their bytes."""


class Rounder:
    """A native model, of which groups of tensors are rounded while they are in memory.

    Args:
        source: the checkpoint.
        layout: of its file.
        named: llama.cpp's name of a module by transformers'.
        tokens: the text by which it is rounded, and by which types are chosen.
        track: shows progress.
    """

    def __init__(
        self,
        source: Source,
        layout: Layout,
        named: Callable[[str], str | None],
        tokens: Tokens,
        track: Track = silent,
    ) -> None:
        self.source, self.layout, self.named = source, layout, named
        self.arch = base_arch(source.config)
        self.tokens, self.track = tokens, track
        self.known: Mapping[str, Tensor] | None = None
        """The weights, where they were found before."""

    @cached_property
    def weights(self) -> Mapping[str, Tensor]:
        """Mean squares of a matrix's inputs (I,), of all experts (E I,), by llama.cpp's name."""
        if self.known is not None:
            return self.known
        return importance(self.source, self.tokens, self.named, self.track)

    # --- matrices --------------------------------------------------------------------------------

    @cached_property
    def groups(self) -> Mapping[str, int]:
        """The groups of what is rounded, each with its layer or its place around them.

        Raises:
            MoesaicError: of a tensor of the file no matrix of the model is known.
        """
        shape = shape_of(self.source.config)
        layers = self.arch.layers(shape)
        parts = {BEFORE: shape, **dict(enumerate(layers)), len(layers): shape}
        found = {name: place for place, part in parts.items() for name in self._held(part, place)}
        if unknown := {*self.layout.rounded} - {*found, *self._fused(layers)}:
            raise MoesaicError(
                f"memory: types cannot be chosen for {', '.join(sorted(unknown)[:3])}, which "
                f"{self.source.config.model_type} has under other names; give a type instead."
            )
        return {self.layout.rounded[name]: place for name, place in found.items()}

    def _fused(self, layers: nn.ModuleList) -> Iterator[str]:
        """Names of tensors that transformers has in one with the first of their names."""
        for number, layer in enumerate(layers):
            for _, names in names_in(layer, number, self.arch, self.named):
                yield from names[1:]

    def _held(self, part: nn.Module, place: int) -> dict[str, Tensor]:
        """Return the matrices of a layer, or of the model around its layers, that are rounded.

        Of matrices that transformers has in one, the first one's name stands for all.

        Args:
            part: the layer of that number, or the model.
            place: the number; BEFORE for the embeddings, the number of layers for the head.
        """
        arch, rounded = self.arch, self.layout.rounded
        held = dict[str, Tensor]()
        if 0 <= place < self.layout.layers:
            for path, (name, *_) in names_in(part, place, arch, self.named):
                stacked = name.endswith("_exps.weight")
                matrix = part.get_parameter(path if stacked else f"{path}.weight").data
                transposed = stacked and isinstance(arch, MoEArch) and arch.transposed
                if name in rounded:
                    held[name] = matrix.transpose(-1, -2) if transposed else matrix
            return held
        for path, module in part.named_modules():
            name = f"{self.named(path)}.weight"
            if (group := rounded.get(name)) in OUTSIDE and (group == HEAD) == (place > 0):
                held[name] = module.weight.data
        return held

    def _tied(self, model: Model) -> dict[str, Tensor]:
        """Return the head's matrix by the name of the embeddings, where both are one matrix."""
        path, rounded = path_of(model, model.get_input_embeddings()), self.layout.rounded
        name = f"{self.named(path)}.weight"
        tied = HEAD not in rounded.values() and name in rounded
        return {name: model.get_output_embeddings().weight.data} if tied else {}

    @contextmanager
    def rounded(
        self, types: Types, part: nn.Module, place: int, back: bool = False
    ) -> Iterator[nn.Module]:
        """Quantise groups of a layer, or of the model's ends, while the context lasts.

        Args:
            types: of tensors, by group.
            part: the layer of that number, or the model; its weights are present.
            place: the number; BEFORE for the embeddings, the number of layers for the head.
            back: round some experts of many alone, and give them their weights back afterwards;
                otherwise the part is not used again.
        """
        held = self._held(part, place)
        if place == self.layout.layers:
            held |= self._tied(part)
        before = list[tuple[Tensor, Tensor]]()
        for name, matrix in held.items():
            if (type := types.get(self.layout.rounded[name])) is not None:
                some = matrix[:: self._step(name)] if back and matrix.dim() > 2 else matrix
                if back:
                    before.append((some, some.clone()))
                self._round(name, type, some, self._step(name) if back else 1)
        try:
            yield part
        finally:
            for some, values in before:
                some.copy_(values)

    def _round(self, name: str, type: str, matrix: Tensor, step: int) -> None:
        """Give a matrix the values that a file has where a type is asked for, some at a time."""
        weights = self.weights.get(name)
        type = self.layout.tensors[name].as_type(type, weights is not None).type
        stacked, some = matrix.dim() > 2, max(1, AT_ONCE // matrix[0].numel())
        each = None if weights is None else weights.view(-1, matrix.shape[-1])[::step]
        for part, start in zip(matrix.split(some), range(0, len(matrix), some), strict=True):
            mean_EI = each[start : start + some] if stacked and each is not None else each
            values = values_of(held_rows(part.cpu(), type, mean_EI), type)
            part.copy_(values.view(part.shape))

    def _step(self, name: str) -> int:
        """Return the number of experts of which one is quantised for an estimate."""
        shape = self.layout.tensors[name].shape
        return max(1, shape[2] // SAMPLED) if len(shape) > 2 else 1

    def change(self, types: Types) -> PartChange:
        """Return the change that rounds a layer while a stream has it open."""
        return partial(self.rounded, types)

    # --- estimates -------------------------------------------------------------------------------

    def changes(self, types: Sequence[str]) -> list[Change]:
        """Return changes that quantise one group of tensors to one type each, group by group.

        Args:
            types: of tensors.
        """
        self.known = self.weights  # found before a head or a layer is in memory beside it
        every = dict[tuple[str, ...], Change]()  # where rows are short, types are one
        return [
            every.setdefault(self._called(group, type), self._change(group, type))
            for group in self.groups
            for type in types
        ]

    def _called(self, group: str, type: str) -> tuple[str, ...]:
        """Return a group, and the types that its tensors get where one is asked for."""
        of_group = [n for n, other in self.layout.rounded.items() if other == group]
        weighed = group not in OUTSIDE
        return group, *(self.layout.tensors[n].as_type(type, weighed).type for n in of_group)

    def _change(self, group: str, type: str) -> Change:
        """Return the change that quantises a group to one type."""

        def at(place: int) -> StandIn:
            return lambda part: self.rounded({group: type}, part, place, back=True)

        places = {self.groups[group]}
        if group == EMBEDDINGS and HEAD not in self.groups:
            places.add(self.layout.layers)
        return {place: at(place) for place in places}

    def scale(self, group: str) -> float:
        """Return the factor from the KL of the experts that :meth:`changes` quantise to a group's.

        Their errors are taken to be alike and independent, so that KLs add up.
        """
        name = next(name for name, other in self.layout.rounded.items() if other == group)
        experts = self.layout.tensors[name].shape[2:]
        return experts[0] / len(range(0, experts[0], self._step(name))) if experts else 1.0

    @torch.no_grad()
    def best(self, among: Sequence[str], budget: int) -> Types:
        """Return the types by group of least estimated KL within a budget.

        Args:
            among: types of files.
            budget: bytes of the file.

        Raises:
            MoesaicError: it is out of reach, which is said before anything is looked at.
        """
        self.layout.check(among, budget)
        types = tensor_types(among)
        stream: LayerStream[object] = LayerStream.from_disk(
            self.source.checkpoint,
            self.source.config,
            self.arch,
            priced_on(self.tokens),
            view=lambda layer: layer,
        )
        draws = draws_for(stream.model)
        kl_XN = estimated(stream, self.changes(types), draws, track=self.track)
        kls: dict[str, dict[str, float]] = {type: {} for type in types}
        for (group, type), kl in zip(product(self.groups, types), kl_XN.mean(1), strict=True):
            kls[type][group] = self.scale(group) * float(kl)
        return choice(kls, self.layout, budget)
