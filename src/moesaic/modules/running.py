"""Tokens that run through a decoder layer: hidden states, ids, positions, whether they are decoded.

Random numbers are functions of a token: of its id, its position, and the decoder layer. A choice
based on them is the same for a prefix, for the whole text, for decoding with a cache and in a
padded batch: it depends neither on a product's last digits nor on earlier calls.

A carved layer may route only in decoding: a forward pass over one position per sequence.
Prompts run dense if routing would save no time: they are then as fast, and more exact.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from moesaic.arch.dense import DenseFFN
from moesaic.types import Values, cache_of

LOW = 0xFFFFFFFF
"""Mask of the lower 32 bits."""


def _hashed(x: Tensor) -> Tensor:
    """Return integers scattered over 32 bits (Wellons' lowbias32); int64, of any shape.

    >>> _hashed(torch.tensor([0, 1, 2])).tolist()
    [0, 1753845952, 3507691905]
    """
    x = x & LOW
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & LOW
    return x ^ (x >> 16)


class RunningTokens:
    """Tokens that run through a decoder layer now; shared by the modules of one layer.

    If they are unknown, as with hidden states instead of ids, every id is 0; and if the number of
    rows differs from the batch's, positions are row indices.
    """

    def __init__(self) -> None:
        self.ids_T: Tensor | None = None
        self.positions_T: Tensor | None = None
        self.layer = 0

    @classmethod
    def of(cls, layer: nn.Module) -> RunningTokens:
        """Return the passage of a decoder layer, made if it has none."""
        passage: RunningTokens = vars(layer).setdefault("passage", cls())
        return passage

    def see(
        self, ids_BL: Tensor, positions_BL: Tensor, layer: int, real_BL: Tensor | None = None
    ) -> None:
        """Set the tokens of a batch.

        Args:
            ids_BL: token ids.
            positions_BL: their positions in their texts.
            layer: index of the decoder layer.
            real_BL: bool; only these tokens have rows. None: all.
        """
        self.layer = layer
        self.ids_T, self.positions_T = (
            each.flatten() if real_BL is None else each[real_BL] for each in (ids_BL, positions_BL)
        )

    def uniform(self, rows: int, columns: int, device: torch.device, stream: int = 0) -> Tensor:
        """Return numbers above 0 and below 1 (T, R), float32, of 23 bits.

        Args:
            rows: tokens T.
            columns: numbers per token R.
            device: device of the numbers.
            stream: numbers of different streams are independent.
        """
        ids_T, positions_T = self.ids_T, self.positions_T
        if ids_T is None or positions_T is None or ids_T.numel() != rows:
            positions_T = torch.arange(rows, device=device)
            ids_T = torch.zeros_like(positions_T)
        where = torch.arange(columns, device=device) + ((2 * self.layer + stream) << 20)
        token_T = _hashed(_hashed(ids_T.to(device) + 1) + positions_T.to(device))
        drawn_TR = _hashed(token_T[:, None] + _hashed(where + 1))
        return ((drawn_TR >> 9).float() + 0.5) / (1 << 23)


def gumbel(uniform: Tensor) -> Tensor:
    """Return Gumbel noise from uniform numbers between 0 and 1 (ToMoE, Eq. 11)."""
    return -(-uniform.log()).log()


def places(ids_BL: Tensor, mask: object = None, past: int = 0) -> Tensor:
    """Return positions of tokens in their texts (B, L), not counting padding before a text.

    Args:
        ids_BL: token ids.
        mask: (B, past + L), 0 or False on padding; anything else is ignored.
        past: number of tokens in the cache.

    >>> places(torch.zeros(2, 3), torch.tensor([[0, 1, 1], [1, 1, 1]])).tolist()
    [[0, 0, 1], [0, 1, 2]]
    >>> places(torch.zeros(1, 1), None, 7).tolist()
    [[7]]
    """
    length = ids_BL.shape[1]
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    return torch.arange(past, past + length, device=ids_BL.device).expand_as(ids_BL)


def watch(model: nn.Module, layers_path: str) -> None:
    """Let a model set its layers' tokens before they run, if one of them uses random numbers."""
    owner, _, leaf = layers_path.rpartition(".")
    body = model.get_submodule(owner)
    draws = any("passage" in vars(layer) for layer in getattr(body, leaf))
    hooks = body._forward_pre_hooks.values()
    if draws and not any(getattr(hook, "func", None) is _see for hook in hooks):
        body.register_forward_pre_hook(partial(_see, leaf), with_kwargs=True)


def _see(leaf: str, body: nn.Module, args: tuple[object, ...], kwargs: Values) -> None:
    """Run as the hook: ``body`` is called with token ids, or with embeddings of them."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    if ids is None and isinstance(given := kwargs.get("inputs_embeds"), Tensor):
        ids = given.new_zeros(given.shape[:2], dtype=torch.int64)
    if not isinstance(ids, Tensor):
        return
    positions = kwargs.get("position_ids")
    if isinstance(positions, Tensor):  # the first of several kinds (K, B, L) is that in text
        positions_BL = (positions[0] if positions.dim() == 3 else positions).expand_as(ids)
    else:
        cache = next(iter(cache_of(kwargs).values()), None)
        count = getattr(cache, "get_seq_length", lambda: 0)
        positions_BL = places(ids, kwargs.get("attention_mask"), count())
    for index, layer in enumerate(getattr(body, leaf)):
        if (passage := vars(layer).get("passage")) is not None:
            passage.see(ids, positions_BL, index)


class SpilledList:
    """List of tensors that are moved to memory-mapped files beyond ``limit`` bytes of memory.

    Each is returned on the device that it was on.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._tensors: list[Tensor] = []
        self._devices: list[torch.device] = []
        self._mapped: set[int] = set()
        self._in_memory = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, i: int) -> Tensor:
        return self._tensors[i].to(self._devices[i])

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def append(self, tensor: Tensor) -> None:
        self._devices.append(tensor.device)
        if self._in_memory + tensor.nbytes <= self.limit:
            self._in_memory += tensor.nbytes
            self._tensors.append(tensor)
            return
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="moesaic-")
        mapped = torch.from_file(
            str(Path(self._folder.name) / str(len(self))),
            shared=True,
            size=tensor.numel(),
            dtype=tensor.dtype,
        ).view(tensor.shape)
        self._mapped.add(len(self))
        self._tensors.append(mapped.copy_(tensor))

    def replace(self, i: int, tensor: Tensor) -> None:
        """Replace entry ``i`` by a tensor of the same shape, in memory or on disk as before."""
        self._devices[i] = tensor.device
        if i in self._mapped:
            self._tensors[i].copy_(tensor)
        else:
            self._tensors[i] = tensor

    def clear(self) -> None:
        self._tensors, self._devices, self._mapped, self._in_memory = [], [], set(), 0
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


V_co = TypeVar("V_co", covariant=True)
"""View of a layer that a method gets: a DenseFFN or a MoEFFN."""


@dataclass
class LayerTokens(Generic[V_co]):
    """Decoder layer with its weights loaded, and the tokens that reach its FFN."""

    index: int
    layer: nn.Module
    ffn: nn.Module
    view: V_co
    _device: torch.device
    _inputs: SpilledList
    _entered: Callable[[SpilledList, RunningTokens], Iterator[Tensor]]
    _cache_bytes: int
    _targets: SpilledList | None
    _residuals: Callable[[], Iterator[Tensor]]
    _hidden: list[Tensor] | None = None
    passage: RunningTokens = field(default_factory=RunningTokens)
    """Tokens of the batch that :meth:`inputs` yielded last."""
    change: AbstractContextManager[nn.Module | None] | None = None
    """Context that the loop over layers may set. It is entered while this layer computes the inputs
    of the next one, and may yield another module to compute them. The stream must ``follow``."""

    def __len__(self) -> int:
        """Return the number of calibration batches."""
        return len(self._inputs)

    @property
    def tokens(self) -> int:
        """Number of calibration tokens, padding left out."""
        return sum(x.shape[0] for x in self._inputs)

    def inputs(self) -> Iterator[Tensor]:
        """Yield batches of x (T, D): the FFN's input, padding left out.

        The FFN is meanwhile given each batch's other arguments, see
        :meth:`moesaic.observation.stream.LayerStream.entered`.
        """
        for x_TD in self._entered(self._inputs, self.passage):
            yield x_TD.to(self._device)

    def targets(self) -> Iterator[Tensor | None]:
        """Yield batches of the original model's FFN output (T, D), before any norm of its own.

        None if the stream does not ``follow``: it is the FFN's output for :meth:`inputs`.
        """
        for b in range(len(self._inputs)):
            yield None if self._targets is None else self._targets[b].to(self._device)

    def residuals(self) -> Iterator[Tensor]:
        """Yield batches of the residual stream after the original layer (T, D)."""
        for s_TD in self._residuals():
            yield s_TD.to(self._device)

    @torch.no_grad()
    def activations(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of x (T, D) and of a dense FFN's h (T, M), cached if memory allows."""
        if self._hidden is not None:
            yield from zip(self.inputs(), self._hidden, strict=True)
            return
        view = cast(DenseFFN, self.view)
        size = view.width * view.up_MD.element_size()
        hidden: list[Tensor] | None = [] if self.tokens * size <= self._cache_bytes else None
        for x_TD in self.inputs():
            h_TM = view.hidden(x_TD)
            if hidden is not None:
                hidden.append(h_TM)
            yield x_TD, h_TM
        self._hidden = hidden


class Phase:
    """State of a carved decoder layer that routes only in decoding: whether it routes now."""

    def __init__(self) -> None:
        self.always = False
        """True if tokens of prompts are routed too, for measuring."""
        self.single = False
        """True if one position per sequence is run."""

    @classmethod
    def of(cls, layer: nn.Module) -> Phase:
        """Return a phase that is updated whenever a decoder layer runs."""
        phase = cls()
        layer.register_forward_pre_hook(phase.see, with_kwargs=True)
        return phase

    def see(self, layer: nn.Module, args: tuple[Tensor, ...], kwargs: Values) -> None:
        """Run as a hook before the layer: hidden states (B, L, D) of one position are decoding."""
        hidden = args[0] if args else kwargs["hidden_states"]
        self.single = hidden.shape[1] == 1

    @property
    def routes(self) -> bool:
        """True if tokens are routed now."""
        return self.always or self.single


@contextmanager
def always_routing(model: nn.Module) -> Iterator[None]:
    """Context in which layers that route only in decoding route every token."""
    phases = [phase for m in model.modules() if (phase := vars(m).get("phase"))]
    before = [phase.always for phase in phases]
    for phase in phases:
        phase.always = True
    try:
        yield
    finally:
        for phase, old in zip(phases, before, strict=True):
            phase.always = old
