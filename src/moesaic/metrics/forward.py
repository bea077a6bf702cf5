"""Logits of a model, batch by batch: of a whole one, or of one read from disk layer by layer.

All measurements of logits use a :class:`Runner`, so that they are the same for a model that
fits into memory and for one that does not, to the last bit on the same device. Its routing is
counted on the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from moesaic.arch.lookup import base_arch
from moesaic.data.text import Tokens
from moesaic.distributed import gathered, own_device
from moesaic.errors import MoesaicError
from moesaic.io.models import skeleton, working_type
from moesaic.io.source import Source
from moesaic.modules.running import SpilledList, always_routing
from moesaic.observation.stream import LayerStream, PartChange, outputs
from moesaic.surgery import routed_modules
from moesaic.types import JSON, Model, Track, silent

# --- routing -------------------------------------------------------------------------------------


@dataclass
class Routing:
    """Counts of one layer's tokens by expert."""

    shared: int
    """Number of neurons that every token runs."""
    widths: tuple[int, ...]
    """Number of neurons of each expert."""
    tokens: int = 0
    counts: list[int] = field(default_factory=list)
    """Number of tokens that ran each expert."""
    idle: int = 0
    """Number of tokens that ran no expert."""

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * len(self.widths)

    @property
    def calls(self) -> float:
        """Mean number of experts that a token ran."""
        return sum(self.counts) / max(1, self.tokens)

    @property
    def share(self) -> list[float]:
        """Distribution of routed tokens over experts."""
        total = max(1, sum(self.counts))
        return [c / total for c in self.counts]

    @property
    def active_width(self) -> float:
        """Mean number of neurons that a token ran."""
        routed = sum(c * w for c, w in zip(self.counts, self.widths, strict=True))
        return self.shared + (routed / self.tokens if self.tokens else 0)

    @property
    def jsd(self) -> float:
        """Divergence of the routing from uniform (MoRE Eq. 18)."""
        return jsd(self.share, [1 / len(self.counts)] * len(self.counts)) if self.counts else 0.0

    def as_json(self) -> JSON:
        """Return ``share``, ``jsd``, ``active_width``; ``idle``, a share of tokens, if above 0."""
        figures = {"share": self.share, "jsd": self.jsd, "active_width": self.active_width}
        return {**figures, **({"idle": self.idle / self.tokens} if self.idle else {})}


def jsd(p: Sequence[float], q: Sequence[float]) -> float:
    """Return the Jensen-Shannon divergence to base 2, in [0, 1] (MoRE Eq. 18).

    >>> jsd([1.0, 0.0], [0.0, 1.0]), jsd([0.5, 0.5], [0.5, 0.5])
    (1.0, 0.0)
    """

    def kl(a: Sequence[float], b: Sequence[float]) -> float:
        return sum(x * math.log2(x / y) for x, y in zip(a, b, strict=True) if x > 0)

    m = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
    return (kl(p, m) + kl(q, m)) / 2


def _choice(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return the experts that a router chose (T, K); ours returns only them, others a tuple.

    For a router that returns weights of all experts (T, R), only or first: the experts by falling
    weight, and the number R where the weight is zero.
    """
    parts = out if isinstance(out, tuple) else (out,)
    for chosen in parts:
        if not chosen.is_floating_point():
            return chosen
    every = out[0] if isinstance(out, tuple) else out
    weights_TR, chosen_TR = every.sort(dim=-1, descending=True, stable=True)
    return chosen_TR.masked_fill(weights_TR == 0, every.shape[-1])


class Counts(dict[int, Routing]):
    """Counter of routing by decoder layer."""

    mask: Tensor | None = None
    """Tokens to count of the batch that runs next: bool (B, L), False on padding. None: all."""


@contextmanager
def count_routing(model: Model) -> Iterator[Counts]:
    """Context in which the routing of everything that runs is counted."""
    try:
        arch = base_arch(model.config)
    except MoesaicError:
        modules = {}
    else:
        modules = routed_modules(model, arch)
    counts = Counts({i: Routing(m.shared, m.experts) for i, m in modules.items()})

    def count(layer: Routing, _: nn.Module, args: object, out: Tensor | tuple[Tensor, ...]) -> None:
        chosen_TK = _choice(out)
        if counts.mask is not None:
            chosen_TK = chosen_TK[counts.mask.flatten().to(chosen_TK.device)]
        experts = len(layer.widths)
        layer.tokens += chosen_TK.shape[0]
        layer.idle += int((chosen_TK == experts).all(-1).sum())
        new = torch.bincount(chosen_TK.flatten(), minlength=experts)[:experts].tolist()
        layer.counts = [a + b for a, b in zip(layer.counts, new, strict=True)]

    with ExitStack() as hooks:
        for i, module in modules.items():
            hooks.enter_context(module.router.register_forward_hook(partial(count, counts[i])))
        yield counts


# --- logits --------------------------------------------------------------------------------------


T = TypeVar("T")
BATCH, LOGITS = 1024, 1 << 27
"""Most tokens of a batch, and most logits, which are in memory at once for the whole vocabulary."""
SPILL = 1 << 30
"""Bytes of hidden states that are kept in memory; more are written to a file."""


@dataclass
class Pass:
    """Outputs of one model for some batches."""

    logits: Iterator[tuple[Tensor, Tokens]]
    """Logits (B, L, V) of each batch, on the model's device, and the batch; to be iterated once."""
    routing: dict[int, Routing] = field(default_factory=dict)
    """Routing by decoder layer; complete when ``logits`` is exhausted."""


class InMemory:
    """Model in memory."""

    def __init__(self, model: Model) -> None:
        self.shape = model

    @classmethod
    def of(cls, source: Source, device: str = "cpu", dtype: torch.dtype | None = None) -> InMemory:
        """Load a checkpoint.

        Args:
            source: the checkpoint.
            device: where it computes.
            dtype: as for :class:`Layerwise`.
        """
        return cls(source.load(device, working_type(source.config, dtype, device)))

    def run(
        self, batches: Sequence[Tokens], track: Track = silent, label: str = "Perplexity"
    ) -> Pass:
        """Run the model batch by batch, as the logits are iterated."""
        model, counts = self.shape, dict[int, Routing]()
        run, device = torch.no_grad()(outputs), model.get_input_embeddings().weight.device

        def logits() -> Iterator[tuple[Tensor, Tokens]]:
            with count_routing(model) as routing, always_routing(model):
                for batch in track(batches, label, len(batches)):
                    routing.mask = batch.attention_mask
                    yield run(model, batch, device)[0], batch  # which nothing here holds on to
                counts.update(routing)

        return Pass(logits(), counts)


_Passed: TypeAlias = "tuple[LayerStream[nn.Module], SpilledList, dict[int, Routing]]"
"""Stream of a model, its last hidden states, before the head, and its routing."""


class Layerwise:
    """Model on disk, of which one decoder layer is in memory at a time.

    Args:
        source: the checkpoint.
        device: where a layer computes.
        dtype: floating-point type; None for the checkpoint's own, or what stands in for it
            (:func:`~moesaic.io.models.working_type`).
        keep: keep the last layer's outputs, so that the same batches pass the layers only once.
        change: context entered for each part of the model while its weights are loaded; see
            :attr:`moesaic.observation.stream.LayerStream.change`.

    Raises:
        MoesaicError: the architecture is unknown.
    """

    def __init__(
        self,
        source: Source,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        keep: bool = False,
        change: PartChange | None = None,
    ) -> None:
        self.source, self.keep, self.change = source, keep, change
        self._kept: dict[tuple[str, ...], _Passed] = {}
        """What came of the last batches, by their fingerprints, if it is kept."""
        self.device = own_device(device)
        self.dtype = working_type(source.config, dtype, self.device)
        self.arch = base_arch(source.config)
        self.shape = skeleton(source.config, self.dtype)

    def run(
        self, batches: Sequence[Tokens], track: Track = silent, label: str = "Perplexity"
    ) -> Pass:
        """Run all batches through the layers at once; the head runs as ``logits`` is iterated.

        In between only the last layer's outputs are kept, so that two models can be compared
        exactly that do not fit into memory.
        """
        if not batches:
            return Pass(iter(()), {})
        texts = tuple(batch.fingerprint for batch in batches)
        passed = self._kept.get(texts) or self._passed(batches, track, label)
        self._kept = {texts: passed} if self.keep else {}
        stream, states, routing = passed
        return Pass(stream.heads(states), routing)

    def _passed(self, batches: Sequence[Tokens], track: Track, label: str) -> _Passed:
        """Run batches through all layers; return the last hidden states."""
        stream: LayerStream[nn.Module] = LayerStream.from_disk(
            self.source.checkpoint,
            self.source.config,
            self.arch,
            batches,
            view=lambda layer: layer,
            device=self.device,
            dtype=self.dtype,
            model=self.shape,
            spill_bytes=SPILL,
        )
        stream.change = self.change or stream.change
        model = self.shape
        with torch.no_grad(), count_routing(model) as routing, always_routing(model):
            states, kwargs = stream.record()
            for block in track(stream.blocks(kwargs), label, stream.count):
                outputs = block.outputs(states)
                for b, batch in enumerate(batches):
                    routing.mask = batch.attention_mask
                    states.replace(b, next(outputs))
        return stream, states, dict(routing)


Runner: TypeAlias = InMemory | Layerwise
"""Model that can be run over batches; ``shape`` is the model, or a skeleton of it.

Layers that route only in decoding then route all tokens.
"""


# --- several processes ---------------------------------------------------------------------------


def all_shares(share: list[T], shared: bool) -> list[T]:
    """Gather the results of processes of which each takes an item in turn, in the items' order."""
    every = gathered(share) if shared else [share]
    return [every[i % len(every)][i // len(every)] for i in range(sum(map(len, every)))]


def all_routing(routing: dict[int, Routing], shared: bool) -> dict[int, Routing]:
    """Return the routing of all processes' tokens, added up by layer."""
    every = [part for part in (gathered(routing) if shared else [routing]) if part]
    total = every[0] if every else {}
    for part in every[1:]:
        for i, layer in total.items():
            layer.tokens += part[i].tokens
            layer.idle += part[i].idle
            layer.counts = [a + b for a, b in zip(layer.counts, part[i].counts, strict=True)]
    return total
