"""Stream of decoder layers, one at a time, with the tokens that reach its FFN.

The blocks' own keyword arguments (masks, rotary embeddings) are recorded once with every block
replaced by the identity, then the layers are replayed one by one: bitwise the same as the full
forward pass, with one layer's weights in memory when the model is read from disk.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic

import torch
from torch import Tensor, nn

from moesaic.arch.dense import Arch, returns_tuple
from moesaic.data.text import Tokens
from moesaic.io.checkpoint import Checkpoint, not_finite
from moesaic.io.checkpoint import cast as as_dtype
from moesaic.io.models import dtype_by_name, forward_replaced, path_of, skeleton, working_type
from moesaic.io.naming import Naming
from moesaic.modules.running import LayerTokens, RunningTokens, SpilledList, V_co, places
from moesaic.types import JSON, Config, Model, logits_alone, release_memory

StandIn = Callable[[int, Tensor, JSON], Tensor]
Key = tuple[int, int, int]
"""``id`` of a :class:`SpilledList` of hidden states, index of a batch, and the layer passed."""
PartChange = Callable[[nn.Module, int], AbstractContextManager[object]]
"""Function of a part of a model and its place that returns a context in which it is changed."""
BEFORE, REST = -1, -2
"""Numbers of parts that are no layer: all before layer 0, and these without the embeddings."""
CARRIED = object()
"""Placeholder in recorded arguments for the extra output of the previous layer."""


@dataclass
class Block:
    """Decoder layer with its weights loaded, and its own arguments for every batch."""

    index: int
    layer: nn.Module
    _kwargs: list[list[JSON]]
    _carried: dict[Key, object] = field(default_factory=dict)
    """Extra outputs of layers, besides hidden states."""
    _batches: Sequence[Tokens] = ()

    @property
    def device(self) -> torch.device:
        """Device of the layer's weights."""
        return next(self.layer.parameters()).device

    def arguments(self, batch: int) -> JSON:
        """Return the layer's arguments for a batch, besides hidden states."""
        return self._kwargs[batch][self.index]

    def output(
        self, batch: int, states: Tensor, handed: object, layer: nn.Module | None = None
    ) -> Tensor:
        """Return the layer's output for one batch's hidden states (B, L, D).

        Args:
            batch: index of the batch.
            states: hidden states.
            handed: extra output of the previous layer.
            layer: module to run instead of the layer.
        """
        self._carried[(0, batch, self.index - 1)] = handed
        return self._output(layer or self.layer, states, (0, batch, self.index))

    def handed(self, states: SpilledList) -> list[object]:
        """Return per batch the extra output (besides hidden states) of the previous layer."""
        before = self.index - 1
        return [self._carried.get((id(states), b, before)) for b in range(len(states))]

    def _output(self, layer: nn.Module, states: Tensor, key: Key) -> Tensor:
        which, batch, index = key
        before = self._carried.get((which, batch, index - 1))
        arguments = self._kwargs[batch][index]
        arguments = {name: before if v is CARRIED else v for name, v in arguments.items()}
        if (passage := vars(layer).get("passage")) is not None and self._batches:
            self._set_tokens(passage, self._batches[batch])
        result = layer(states.to(self.device), **arguments)
        after: Tensor = result
        if isinstance(result, tuple):
            after, self._carried[key] = (*result, None)[:2]  # Falcon-H1's are alone in theirs
            self._carried.pop((which, batch, index - 2), None)
        return after

    def _set_tokens(self, passage: RunningTokens, batch: Tokens, real: bool = False) -> None:
        """Set the tokens that random choices depend on; with ``real``, without padding."""
        ids, mask = batch.input_ids, batch.attention_mask
        passage.see(ids, places(ids, mask), self.index, mask if real else None)

    def outputs(self, states: Iterable[Tensor], layer: nn.Module | None = None) -> Iterator[Tensor]:
        """Yield the layer's output for each batch's hidden states (B, L, D).

        Args:
            states: one entry per batch.
            layer: module to run instead of the layer.
        """
        for b, before in enumerate(states):
            yield self._output(layer or self.layer, before, (id(states), b, self.index))

    def branch(self, states: SpilledList, into: SpilledList, layer: nn.Module) -> None:
        """Pass every batch through a replacement of the layer; ``states`` do not change."""
        for b, after in enumerate(self.outputs(states, layer)):
            into.append(after)
            self._carried[id(into), b, self.index] = self._carried.get((id(states), b, self.index))

    def run(self, states: SpilledList, layer: nn.Module | None = None) -> None:
        """Pass every batch through the layer, or its replacement; ``states`` become the outputs."""
        for b, after in enumerate(self.outputs(states, layer)):
            states.replace(b, after)


class LayerStream(Generic[V_co]):
    """Iterable of a :class:`LayerTokens` for each wanted layer, in order.

    Args:
        model: the model, live; or a skeleton whose weights ``opening`` loads.
        arch: its architecture.
        tokens: tokens to run through it, or batches of them, each with a length of its own.
        layers: indices of layers to yield; the others only run. None after the last one is run.
        view: function from a decoder layer to its view.
        tokens_per_batch: size of the batches that ``tokens`` are split into.
        spill_bytes: hidden states above this size are in a memory-mapped file.
        cache_bytes: a layer's FFN activations are kept between passes up to this size.
        follow: pass two sets of tokens through the layers: one through the model as it is, one
            through every ``site.change``. Sites show the inputs of the second and, as targets, the
            outputs of the first. Takes up to three times as long.
        opening: returns a context in which the weights of a place are loaded: a layer's by its
            index, the head's by the number of layers, and all others at :data:`BEFORE`, or at
            :data:`REST` without the embeddings.
    """

    def __init__(
        self,
        model: Model,
        arch: Arch,
        tokens: Tokens | Sequence[Tokens],
        layers: Collection[int] | None = None,
        *,
        view: Callable[[nn.Module], V_co],
        tokens_per_batch: int = 2048,
        spill_bytes: int = 4 << 30,
        cache_bytes: int = 2 << 30,
        follow: bool = False,
        opening: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self.model = model
        self.arch = arch
        self.view = view
        self.count = len(arch.layers(model))
        self.layers = range(self.count) if layers is None else sorted(layers)
        if isinstance(tokens, Tokens):
            tokens = list(tokens.batches(tokens_per_batch))
        self.batches = tokens
        self._spill_bytes = spill_bytes
        self._cache_bytes = cache_bytes
        self._follow = follow
        self._opening = opening
        self.change: PartChange = lambda *_: nullcontext()
        """Function of each layer and its index, whose context is entered while weights are loaded.

        For the embeddings it gets the model and :data:`BEFORE`, for the head the model and
        :attr:`count`.
        """

    @contextmanager
    def _opened(self, place: int) -> Iterator[None]:
        part = self.arch.layers(self.model)[place] if 0 <= place < self.count else self.model
        with self._opening(place), self.change(part, place):
            yield

    @classmethod
    def from_disk(
        cls,
        checkpoint: Checkpoint,
        config: Config,
        arch: Arch,
        tokens: Tokens | Sequence[Tokens],
        layers: Collection[int] | None = None,
        *,
        view: Callable[[nn.Module], V_co],
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        model: Model | None = None,
        **options: Any,
    ) -> LayerStream[V_co]:
        """Return a stream that reads each layer from a checkpoint folder when its turn comes.

        Args:
            dtype: floating-point dtype; None for the checkpoint's own, or its replacement
                (:func:`~moesaic.io.models.working_type`).
            model: the skeleton to fill; by default a new one. Other arguments are those of the
                class.
        """
        if model is None:
            model = skeleton(config, working_type(config, dtype, str(device)))
        type_of = dtype_by_name(model)
        naming = Naming(checkpoint, config.model_type, model.state_dict())
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        tied: dict[str, str] = {}
        if head is not None and head.weight is embedding.weight:  # whatever the config holds
            one, other = (f"{path_of(model, module)}.weight" for module in (head, embedding))
            stored = {*naming.in_memory.values()}  # only the head, in some checkpoints
            tied |= {other: one} if one in stored and other not in stored else {one: other}

        @contextmanager
        def opened(module: nn.Module, prefix: str, *skip: str) -> Iterator[None]:
            state = {}
            for name in module.state_dict():
                if not name.startswith(skip):
                    to = type_of(prefix + name)
                    stored = tied.get(prefix + name, prefix + name)
                    state[name] = naming.read(stored, partial(as_dtype, dtype=to)).to(device)
            every = module.named_parameters(remove_duplicate=False)
            empty = {name: p for name, p in every if name in state}
            module.load_state_dict(state, assign=True, strict=False)
            for name, buffer in module.named_buffers():
                if not name.startswith(skip):
                    buffer.data = buffer.data.to(device)
            try:
                yield
            finally:
                for name, parameter in empty.items():  # head and embedding may be one
                    owner, _, leaf = name.rpartition(".")
                    setattr(module.get_submodule(owner), leaf, parameter)
                state.clear()
                release_memory()  # else each layer's memory would add up

        prefix, _, layers_name = arch.layers_path.rpartition(".")
        embeddings_name = path_of(model, embedding).removeprefix(f"{prefix}.")
        loaded = arch.layers(model)

        def opening(place: int) -> AbstractContextManager[None]:
            if place == len(loaded):
                return opened(model, "", f"{prefix}.")
            if place >= 0:
                return opened(loaded[place], arch.layer_prefix(place))
            skip = (f"{embeddings_name}.",) if place == REST else ()
            return opened(model.get_submodule(prefix), f"{prefix}.", f"{layers_name}.", *skip)

        return cls(model, arch, tokens, layers, view=view, opening=opening, **options)

    def __len__(self) -> int:
        return len(self.layers)

    @torch.no_grad()
    def __iter__(self) -> Iterator[LayerTokens[V_co]]:
        hidden, kwargs = self.record()
        followed = SpilledList(self._spill_bytes // 4) if self._follow else None
        if followed is not None:
            for tensor in hidden:
                followed.append(tensor.clone())
        share = self._spill_bytes // (8 if self._follow else 2)
        inputs, targets = SpilledList(share), SpilledList(share)
        try:
            for block in self.blocks(kwargs, max(self.layers, default=-1) + 1):
                i, layer = block.index, block.layer
                ffn = self.arch.ffn_of(layer)
                wanted = i in self.layers
                entering = None if followed else inputs
                leaving = targets if self._follow else None
                with self.collected(ffn, entering, leaving, i) if wanted else nullcontext():
                    block.run(hidden)
                if wanted:
                    if followed is not None:
                        with self.collected(ffn, inputs, None, i):
                            for _ in block.outputs(followed):
                                pass
                    site = LayerTokens(
                        i,
                        layer,
                        ffn,
                        self.view(layer),
                        next(ffn.parameters()).device,
                        inputs,
                        partial(self.entered, block),
                        self._cache_bytes,
                        leaving,
                        lambda: (valid(s, m) for s, m in zip(hidden, self.masks(), strict=True)),
                    )
                    yield site
                    inputs.clear()
                    targets.clear()
                if followed is not None:
                    change = site.change if wanted else None
                    with change or nullcontext() as changed:
                        block.run(followed, changed)
        finally:
            for spill in (hidden, followed, inputs, targets):
                if spill is not None:
                    spill.clear()

    @torch.no_grad()
    def turns(self, layers: Collection[int] | None = None) -> Iterator[tuple[Block, SpilledList]]:
        """Yield the wanted layers, each open, with their input hidden states, one entry per batch
        (B, L, D); the loop's body passes these on by :meth:`Block.run`.

        Args:
            layers: indices of those to yield; None for all.
        """
        wanted = self.layers if layers is None else layers
        states, kwargs = self.record()
        try:
            for block in self.blocks(kwargs, max(wanted) + 1):
                if block.index in wanted:
                    yield block, states
                else:
                    block.run(states)
        finally:
            states.clear()

    def blocks(
        self, kwargs: list[list[JSON]], stop: int | None = None, order: Iterable[int] | None = None
    ) -> Iterator[Block]:
        """Yield layers one after the other, each open while its turn lasts.

        Args:
            kwargs: second result of :meth:`record`.
            stop: index of the layer to end before; None for all.
            order: indices in another order, such as backward.
        """
        carried: dict[Key, object] = {}
        for i in range(self.count if stop is None else stop) if order is None else order:
            with self._opened(i):
                yield Block(i, self.arch.layers(self.model)[i], kwargs, carried, self.batches)

    @contextmanager
    def headed(
        self, logits: bool = False, gradients: bool = False
    ) -> Iterator[Callable[[Tokens, Tensor], Tensor]]:
        """Return a context with a function from the last layer's output to the final norm, or to
        logits.

        Args:
            logits: True to apply the head as well.
            gradients: True to allow gradients with respect to the input.

        Yields:
            a function of a batch and the last layer's output (B, L, D), which returns (B, L, D) or
            (B, L, vocabulary).
        """

        embedding = self.model.get_input_embeddings()

        def finish(batch: Tokens, last: Tensor) -> Tensor:
            def replay(_: int, states: Tensor, options: JSON) -> Tensor:
                return last.to(states.device)

            def embedded(ids: Tensor) -> Tensor:  # only its shape is used
                return last.new_zeros(*ids.shape, embedding.embedding_dim, device=self._device)

            unread = embedding.weight.is_meta
            stand_in = forward_replaced(embedding, embedded) if unread else nullcontext()
            with stand_in, self._replaced(replay), torch.set_grad_enabled(gradients):
                return outputs(self.model if logits else self._body, batch, self._device)[0]

        with self._opening(REST), self._opened(self.count) if logits else nullcontext():
            yield finish

    def heads(self, states: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tokens]]:
        """Yield logits (B, L, vocabulary) for all batches, with their tokens.

        Args:
            states: the last layer's hidden states (B, L, D), one entry per batch.
        """
        with self.headed(logits=True) as finish:
            for batch, last in zip(self.batches, states, strict=True):
                yield finish(batch, last), batch

    @contextmanager
    def collected(
        self, ffn: nn.Module, inputs: SpilledList | None, outputs: SpilledList | None, layer: int
    ) -> Iterator[None]:
        """Collect the inputs and outputs of an FFN while the context lasts, padding left out.

        Args:
            ffn: the layer's FFN.
            inputs: list to which each batch's input (T, D) is appended; None to collect none.
            outputs: list for the outputs; None to collect none.
            layer: index of the layer, for errors.

        Raises:
            MoesaicError: an input is not finite.
        """
        entering, leaving = self.masks(), self.masks()

        def before(x: Tensor) -> None:
            if inputs is not None:
                x_TD = valid(x, next(entering))
                if not torch.isfinite(x_TD).all():
                    raise not_finite(f"In calibration batch {len(inputs)} layer {layer} meets")
                inputs.append(x_TD)

        def after(y: Tensor) -> None:
            if outputs is not None:
                outputs.append(valid(y, next(leaving)))

        with self.arch.enter(ffn, before), self.arch.watch(ffn, after):
            yield

    def entered(
        self, block: Block, inputs: Iterable[Tensor], passage: RunningTokens | None = None
    ) -> Iterator[Tensor]:
        """Yield a layer's FFN inputs per batch, while the FFN is given each batch's other
        arguments.

        Args:
            block: the layer, open.
            inputs: inputs from :meth:`collected`, one entry per batch.
            passage: object that is given the tokens of each batch.
        """
        for b, x_TD in enumerate(inputs):
            for running in (passage, vars(block.layer).get("passage")):
                if running is not None:
                    block._set_tokens(running, self.batches[b], real=True)
            with self.handing(block, b):
                yield x_TD

    def handing(self, block: Block, batch: int) -> AbstractContextManager[None]:
        """Return a context in which a layer's FFN is given a batch's arguments for its router."""
        mask = self.batches[batch].attention_mask

        def tokens(number_BL: Tensor) -> Tensor:
            return valid(number_BL.unsqueeze(-1), mask).flatten()

        return self.arch.handing(self.arch.ffn_of(block.layer), block.arguments(batch), tokens)

    def masks(self) -> Iterator[Tensor | None]:
        """Yield the attention mask of every batch (B, L); None if there is no padding."""
        return (batch.attention_mask for batch in self.batches)

    @torch.no_grad()
    def record(self) -> tuple[SpilledList, list[list[JSON]]]:
        """Return embeddings of every batch, and the keyword arguments of every block for it."""
        hidden = SpilledList(self._spill_bytes // 2)
        kwargs: list[list[JSON]] = []
        first: list[Tensor] = []

        def identity(index: int, states: Tensor, arguments: JSON) -> Tensor:
            if index == 0:
                first.append(states)
            kwargs[-1].append(arguments)
            return states

        with self._opened(BEFORE), self._replaced(identity):
            for batch in self.batches:
                kwargs.append([])
                outputs(self._body, batch, self._device)
                hidden.append(first.pop())
        return hidden, kwargs

    @property
    def _body(self) -> Model:
        """Model without its head."""
        body: Model = self.model.base_model
        if body is not self.model:
            return body
        return self.model.get_submodule(self.arch.layers_path.rpartition(".")[0])  # Llama 4

    @property
    def _device(self) -> torch.device:
        """Device that tokens enter: the embeddings', or any part's while those are not read."""
        weight = self.model.get_input_embeddings().weight
        return next(p.device for p in (weight, *self.model.parameters()) if not p.is_meta)

    @contextmanager
    def _replaced(self, stand_in: StandIn) -> Iterator[None]:
        """Replace every block by ``stand_in(index, hidden states, keyword arguments)``."""
        with ExitStack() as replaced:
            for index, layer in enumerate(self.arch.layers(self.model)):
                forward = _replacement_forward(stand_in, index, layer)
                replaced.enter_context(forward_replaced(layer, forward))
            yield


def outputs(model: Model, batch: Tokens, device: torch.device) -> Sequence[Tensor]:
    """Return what a model makes of a batch: first its logits, or without a head its last states."""
    mask = batch.attention_mask
    return model(
        input_ids=batch.input_ids.to(device),
        attention_mask=None if mask is None else mask.to(device),
        use_cache=False,
        **logits_alone(model.config),
    )


def _replacement_forward(stand_in: StandIn, index: int, layer: nn.Module) -> Callable[..., object]:
    """Return a replacement of a layer's forward with the same arguments and results."""
    _, _, *names = inspect.signature(type(layer).forward).parameters
    handing = returns_tuple(type(layer).forward)

    def forward(hidden_states: Tensor, *args: object, **keywords: object) -> object:
        states = stand_in(
            index, hidden_states, {**dict(zip(names, args, strict=False)), **keywords}
        )
        return (states, CARRIED) if handing else states

    return forward


def valid(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the real tokens, padding dropped: (B, L, D), or several residual streams, to (T,
    D)."""
    if mask is None:
        return x.flatten(0, -2)
    mask = mask.to(x.device)
    return x[mask.flatten()] if x.dim() == 2 else x[mask].flatten(0, -2)
