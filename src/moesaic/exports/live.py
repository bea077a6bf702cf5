"""A model in memory with the values that a GGUF file would hold, without the file.

Rows are rounded by ggml's own quantiser, as llama.cpp rounds those of a file, and put back into the
live model's matrices, so that a file is measured without being written and read.

Shape suffixes: R rows, I inputs of a matrix, E routed experts, G groups, C choices (types).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor, nn

from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.data.text import Tokens
from moesaic.errors import MoesaicError
from moesaic.exports.importance import importance, names_in
from moesaic.exports.mixed import (
    OUTSIDE,
    PER_WEIGHT,
    WINDOWS,
    Layout,
    Sensitivities,
    group_of,
    tensor_types,
)
from moesaic.exports.quantiser import Held, held_rows, values_of
from moesaic.io.source import Source
from moesaic.metrics.forward import Layerwise, Whole
from moesaic.metrics.machine import free_bytes
from moesaic.metrics.score import qualities
from moesaic.observation.branches import Change, divergences
from moesaic.observation.stream import LayerStream
from moesaic.types import Model, Track, silent

Types = Mapping[str, str]
"""Of tensors, by group."""
ROUNDS = 3
"""Times that types are looked at anew, at most."""


class Live:
    """A native model in memory, of which groups of tensors are rounded.

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
        self.windows = tokens.rows(slice(WINDOWS))
        """The text by which types are chosen."""
        self._held: dict[tuple[str, str], Held] = {}
        """By llama.cpp's name and type the bytes of matrices that were rounded before."""

    @cached_property
    def model(self) -> Model:
        """In float32.

        Raises:
            MoesaicError: with what it is rounded from and to it does not fit into memory.
        """
        need = PER_WEIGHT * sum(tensor.numel for tensor in self.layout.tensors.values())
        if need > free_bytes("cpu"):
            raise MoesaicError(
                f"memory: types are chosen of a model that is in memory four times in float32, "
                f"{need:,} bytes; give a type instead."
            )
        return self.source.load("cpu", torch.float32)

    @cached_property
    def reference(self) -> Layerwise:
        """The model as it is, read layer by layer; its logits are kept."""
        return Layerwise(self.source, "cpu", torch.float32, keep=True)

    @cached_property
    def weights(self) -> Mapping[str, Tensor]:
        """By llama.cpp's name of a matrix those of its inputs (I,), of all experts (E I,)."""
        return importance(self.source, self.tokens, self.named, self.track)

    @cached_property
    def matrices(self) -> Mapping[str, Mapping[str, Tensor]]:
        """By group and llama.cpp's name what is rounded: (R, I), or of all experts (E, R, I).

        Of matrices that transformers has in one, the first one's name stands for all.

        Raises:
            MoesaicError: of a tensor of the file no matrix of the model is known.
        """
        arch, unknown = self.arch, {*self.layout.rounded}
        matrices: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for number, layer in enumerate(arch.layers(self.model)):
            for path, names in names_in(layer, number, arch, self.named):
                unknown -= {*names}
                name = names[0]
                stacked = name.endswith("_exps.weight")
                matrix = layer.get_parameter(path if stacked else f"{path}.weight").data
                transposed = stacked and isinstance(arch, MoEArch) and arch.transposed
                matrix = matrix.transpose(-1, -2) if transposed else matrix
                if name in self.layout.rounded:
                    matrices[group_of(name, self.layout.layers)][name] = matrix
        for path, module in self.model.named_modules():
            name = f"{self.named(path)}.weight"
            if (group := self.layout.rounded.get(name)) in OUTSIDE:
                matrices[group][name] = module.weight.data
                unknown.discard(name)
        if unknown:
            raise MoesaicError(
                f"memory: types cannot be chosen for {', '.join(sorted(unknown)[:3])}, which "
                f"{self.source.config.model_type} has under other names; give a type instead."
            )
        return dict(matrices)

    @cached_property
    def originals(self) -> Mapping[str, Tensor]:
        """By llama.cpp's name what the matrices are unrounded."""
        return {
            name: matrix.clone()
            for group in self.matrices.values()
            for name, matrix in group.items()
        }

    @contextmanager
    def rounded(self, types: Types, within: str = "") -> Iterator[Model]:
        """The model with some groups rounded, others as they are, while the context lasts.

        Args:
            types: of tensors, by group.
            within: how llama.cpp's names of what is rounded begin.
        """
        changes = [
            (matrix, self._rounded(name, type), matrix.clone())
            for group, type in types.items()
            for name, matrix in self.matrices[group].items()
            if name.startswith(within)
        ]
        for matrix, values, _ in changes:
            matrix.copy_(values)
        try:
            yield self.model
        finally:
            for matrix, _, before in changes:
                matrix.copy_(before)

    def _rounded(self, name: str, type: str) -> Tensor:
        """A matrix's values in a file where a type is asked for."""
        weights, original = self.weights.get(name), self.originals[name]
        type = self.layout.tensors[name].as_type(type, weights is not None).type
        if (name, type) not in self._held:
            self._held[name, type] = held_rows(original, type, weights)
        return values_of(self._held[name, type], type).view(original.shape)

    def loss(self, types: Types) -> float:
        """KL from the model with some groups rounded, the others as they are: nats a token."""
        with self.rounded(types) as model:
            kl = qualities([Whole(model), self.reference], self.windows)[0].kl
        assert kl is not None
        return kl

    def sensitivities(self, types: Sequence[str], near: Types | None = None) -> Sensitivities:
        """What the model loses where one group of its tensors is rounded.

        Args:
            types: of files.
            near: types by groups, in which the others are meanwhile, instead of unrounded; then a
                group is measured in its own type, and in the next wider and narrower ones.
        """
        choices, groups, near = tensor_types(types), tuple(self.matrices), near or {}
        loss_GC = np.full((len(groups), len(choices)), np.inf)
        places = [
            (g, c)
            for g, group in enumerate(groups)
            for c in range(len(choices))
            if not near or abs(c - choices.index(near[group])) <= 1
        ]
        outside = [(g, c) for g, c in places if self._whole(groups[g], choices[c], near)]
        inside = [place for place in places if place not in outside]
        with self.rounded(near):
            stream = LayerStream(self.model, self.arch, self.windows, view=lambda layer: layer)
            changes = [self._change(groups[g], choices[c], near) for g, c in inside]
            losses = divergences(stream, changes, self.track, self._logits).mean(1).tolist()
            for place, loss in zip(inside, losses, strict=True):
                loss_GC[place] = loss
            for g, c in outside:
                loss_GC[g, c] = self.loss({groups[g]: choices[c]})
        return Sensitivities(groups, choices, loss_GC)

    def _logits(self, batches: Sequence[Tokens]) -> Iterator[tuple[Tensor, Tokens]]:
        """The reference's (B, L, V), with the tokens of each batch."""
        return self.reference.run(batches).logits

    def _whole(self, group: str, type: str, near: Types) -> bool:
        """A group in one type is another model from the first layer on."""
        return group in OUTSIDE and near.get(group) != type

    def _change(self, group: str, type: str, near: Types) -> Change:
        """The layers that a group is in, with it in one type; none where it is in it already."""
        if near.get(group) == type:
            return {}
        layers = {int(name.split(".")[1]) for name in self.matrices[group]}
        return {layer: partial(self._in_type, group, type, layer) for layer in layers}

    @contextmanager
    def _in_type(self, group: str, type: str, layer: int, module: nn.Module) -> Iterator[nn.Module]:
        with self.rounded({group: type}, f"blk.{layer}."):
            yield module

    def improved(self, types: Types, among: Sequence[str], budget: int) -> Types:
        """Types by groups that lose less within a budget, as far as going to neighbours leads.

        Losses of one and two bits do not add up: they are measured anew, each with all others
        rounded, as long as what follows from them loses less.

        Args:
            types: by groups, with which to begin.
            among: types of files.
            budget: bytes of the file.
        """
        least = self.loss(types)
        for _ in range(ROUNDS):
            choice, _ = self.sensitivities(among, near=types).choice(self.layout, budget)
            loss = self.loss(choice)
            if loss >= least:
                break
            types, least = choice, loss
        return types
