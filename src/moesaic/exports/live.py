"""A model in memory with the values that a GGUF file would hold, without the file.

Rows are rounded by ggml's own quantiser, as llama.cpp rounds those of a file, and put back into the
live model's matrices, so that a file is measured without being written and read.

Shape suffixes: R rows, I inputs of a matrix, E routed experts, G groups, C choices (types).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.data.text import Tokens
from moesaic.errors import MoesaicError
from moesaic.exports.importance import importance, names_in
from moesaic.exports.mixed import BESIDE, WINDOWS, Layout, Sensitivities, group, of_tensors
from moesaic.exports.quantiser import rounded_rows
from moesaic.foreign import Model, Track, silent
from moesaic.io.source import Source
from moesaic.metrics.forward import Layerwise, Whole
from moesaic.metrics.machine import free_bytes
from moesaic.metrics.score import qualities
from moesaic.observation.branches import Change, StandIn, divergences
from moesaic.observation.stream import LayerStream

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

    Raises:
        MoesaicError: the model does not fit into memory three times in float32.
    """

    def __init__(
        self,
        source: Source,
        layout: Layout,
        named: Callable[[str], str | None],
        tokens: Tokens,
        track: Track = silent,
    ) -> None:
        need = 12 * sum(tensor.weights for tensor in layout.tensors.values())
        if need > free_bytes("cpu"):
            raise MoesaicError(
                f"memory: types are chosen of a model that is in memory three times in float32, "
                f"{need:,} bytes; give a type instead."
            )
        self.source, self.layout, self.named = source, layout, named
        self.arch = base_arch(source.config)
        self.tokens, self.track = tokens, track

    @cached_property
    def model(self) -> Model:
        """In float32."""
        return self.source.load("cpu", torch.float32)

    @cached_property
    def weights(self) -> Mapping[str, Tensor]:
        """Of each matrix those of its inputs."""
        return importance(self.source, self.tokens, self.named, self.track)

    @cached_property
    def matrices(self) -> Mapping[str, Mapping[str, Tensor]]:
        """By group and llama.cpp's name what is rounded: (R, I), or of all experts (E, R, I).

        Of matrices that transformers has in one, the first one's name stands for all.
        """
        arch = self.arch
        found: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for number, layer in enumerate(arch.layers(self.model)):
            for path, (name, *_) in names_in(layer, number, arch, self.named):
                stacked = name.endswith("_exps.weight")
                matrix = layer.get_parameter(path if stacked else f"{path}.weight").data
                turned = stacked and isinstance(arch, MoEArch) and arch.transposed
                matrix = matrix.transpose(-1, -2) if turned else matrix
                if name in self.layout.rounded:
                    found[group(name, self.layout.layers)][name] = matrix
        for path, module in self.model.named_modules():
            name = f"{self.named(path)}.weight"
            if self.layout.rounded.get(name) == BESIDE:
                found[BESIDE][name] = module.weight.data
        return dict(found)

    @cached_property
    def originals(self) -> Mapping[str, Mapping[str, Tensor]]:
        """What the matrices are unrounded."""
        return {
            name: {called: matrix.clone() for called, matrix in group.items()}
            for name, group in self.matrices.items()
        }

    @contextmanager
    def rounded(self, types: Mapping[str, str], within: str = "") -> Iterator[Model]:
        """The model with some groups rounded, others as they are, while the context lasts.

        Args:
            types: of tensors, by group.
            within: how llama.cpp's names of what is rounded begin.
        """
        own = [
            (matrix, self._rounded(name, called, type), matrix.clone())
            for name, type in types.items()
            for called, matrix in self.matrices[name].items()
            if called.startswith(within)
        ]
        for matrix, values, _ in own:
            matrix.copy_(values)
        try:
            yield self.model
        finally:
            for matrix, _, before in own:
                matrix.copy_(before)

    def _rounded(self, name: str, called: str, type: str) -> Tensor:
        """A matrix's values in a file where a type is asked for."""
        matrix, weights = self.originals[name][called], self.weights.get(called)
        told = self.layout.tensors[called].told(type, weights is not None).type
        return rounded_rows(matrix, told, weights)

    @cached_property
    def reference(self) -> Layerwise:
        """It as it is."""
        return Layerwise(self.source, "cpu", torch.float32, keep=True)

    @property
    def few(self) -> Tokens:
        """The text by which types are chosen."""
        return self.tokens.rows(slice(WINDOWS))

    def _originally(self, batches: Sequence[Tokens]) -> Iterator[tuple[Tensor, Tokens]]:
        return self.reference.run(batches).logits

    def loss(self, types: Mapping[str, str]) -> float:
        """KL from the model with some groups rounded, the others as they are: nats a token."""
        with self.rounded(types) as model:
            found = qualities([Whole(model), self.reference], self.few)[0].kl
        assert found is not None
        return found

    def sensitivities(
        self, types: Sequence[str], near: Mapping[str, str] | None = None
    ) -> Sensitivities:
        """What the model loses where one group of its tensors is rounded.

        Args:
            types: of files.
            near: types by groups, in which the others are meanwhile, instead of unrounded; then a
                group is measured in its own type, and in the next wider and narrower ones.
        """
        known, names = of_tensors(types), tuple(self.matrices)
        at = {name: known.index(type) for name, type in (near or {}).items()}
        loss_GC = np.full((len(names), len(known)), np.inf)
        wanted = [
            (name, type)
            for name in names
            for c, type in enumerate(known)
            if not near or abs(c - at[name]) <= 1
        ]
        inside = [one for one in wanted if one[0] != BESIDE]
        with self.rounded(near or {}):
            stream = LayerStream(self.model, self.arch, self.few, view=lambda layer: layer)
            changes = [self._change(*one) for one in inside]
            losses = divergences(stream, changes, self.track, self._originally)
            found = dict(zip(inside, losses, strict=True))
            for name, type in wanted:
                loss = found.get((name, type)) if name != BESIDE else self.loss({name: type})
                loss_GC[names.index(name), known.index(type)] = loss
        return Sensitivities(names, known, loss_GC)

    def _change(self, name: str, type: str) -> Change:
        """The layers that a group is in, with it in one type."""

        def standing_in(layer: int) -> StandIn:
            @contextmanager
            def changed(module: nn.Module) -> Iterator[nn.Module]:
                with self.rounded({name: type}, f"blk.{layer}."):
                    yield module

            return changed

        layers = {int(called.split(".")[1]) for called in self.matrices[name]}
        return {layer: standing_in(layer) for layer in layers}

    def improved(self, types: Mapping[str, str], among: Sequence[str], budget: int) -> Types:
        """Types by groups that lose less within a budget, as far as going to neighbours leads.

        Losses of one and two bits do not add up: they are measured anew, each with all others
        rounded, as long as what follows from them loses less.

        Args:
            types: by groups, from which is gone.
            among: types of files.
            budget: bytes of the file.
        """
        least = self.loss(types)
        for _ in range(ROUNDS):
            near = self.sensitivities(among, near=types)
            other, _ = near.choice(self.layout, budget)
            loss = self.loss(other)
            if loss >= least:
                break
            types, least = other, loss
        return types
