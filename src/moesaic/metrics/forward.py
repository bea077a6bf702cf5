"""Logits of a model, batch by batch: of a whole one, or of one read from disk layer by layer.

All measurements of logits go through a :class:`Runner`, so that they are the same for a model that
fits into memory and for one that does not, to the last bit on the same device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from moesaic.arch.lookup import base_arch
from moesaic.data.text import Tokens
from moesaic.distributed import gathered, own_device, process
from moesaic.io.models import skeleton, working_type
from moesaic.io.source import Source
from moesaic.metrics.routing_counts import Routing, counted
from moesaic.modules.running import SpilledList, always_skipping
from moesaic.observation.stream import LayerStream, PartChange
from moesaic.types import Model, Track, logits_alone, silent

T = TypeVar("T")
BATCH = 1024
"""Number of tokens of a batch, whose logits over the whole vocabulary are in memory at once."""
SPILL = 1 << 30
"""Bytes of hidden states that are kept in memory; more are written to a file."""


@dataclass
class Pass:
    """Outputs of one model for some batches."""

    logits: Iterator[tuple[Tensor, Tokens]]
    """Logits (B, L, V) of each batch, on the model's device, and the batch; to be iterated once."""
    routing: dict[int, Routing] = field(default_factory=dict)
    """Routing by decoder layer; complete when ``logits`` is exhausted."""


class Runner(Protocol):
    """Interface of a model that can be run over batches."""

    @property
    def shape(self) -> Model:
        """Model, or a skeleton of it."""

    def run(
        self, batches: Sequence[Tokens], track: Track = silent, label: str = "Perplexity"
    ) -> Pass:
        """Run the model over batches; channels skipped at decoding are skipped for all tokens."""


class Whole:
    """Model in memory."""

    def __init__(self, model: Model) -> None:
        self.shape = model

    @classmethod
    def of(cls, source: Source, device: str = "cpu", dtype: torch.dtype | None = None) -> Whole:
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
        """Run the model batch by batch, as the logits are asked for."""
        routing: dict[int, Routing] = {}
        return Pass(self._logits(batches, track, label, routing), routing)

    def _logits(
        self, batches: Sequence[Tokens], track: Track, label: str, counts: dict[int, Routing]
    ) -> Iterator[tuple[Tensor, Tokens]]:
        with counted(self.shape) as routing, always_skipping(self.shape):
            for batch in track(batches, label, len(batches)):
                routing.look_at(batch.attention_mask)
                yield self._logits_of(batch), batch  # which nothing here holds on to
            counts.update(routing)

    @torch.no_grad()
    def _logits_of(self, batch: Tokens) -> Tensor:
        model, mask = self.shape, batch.attention_mask
        device = model.get_input_embeddings().weight.device
        output = model(
            input_ids=batch.input_ids.to(device),
            attention_mask=None if mask is None else mask.to(device),
            use_cache=False,
            **logits_alone(model.config),
        )
        logits: Tensor = output.logits
        return logits


@dataclass
class _Kept:
    """Last hidden states of some batches, before the model's head."""

    batches: Sequence[Tokens]
    stream: LayerStream[nn.Module]
    states: SpilledList
    routing: dict[int, Routing]


def _same(a: Sequence[Tokens], b: Sequence[Tokens]) -> bool:
    return [t.fingerprint for t in a] == [t.fingerprint for t in b]


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
        self._kept: _Kept | None = None
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
        kept = self._kept
        if kept is None or not _same(kept.batches, batches):
            kept = self._passed(batches, track, label)
        self._kept = kept if self.keep else None
        return Pass(kept.stream.heads(kept.states, logits=True), kept.routing)

    def _passed(self, batches: Sequence[Tokens], track: Track, label: str) -> _Kept:
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
        with torch.no_grad(), counted(model) as routing, always_skipping(model):
            states, kwargs = stream.record()
            for block in track(stream.blocks(kwargs), label, stream.count):
                outputs = block.outputs(states)
                for b, batch in enumerate(batches):
                    routing.look_at(batch.attention_mask)
                    states.replace(b, next(outputs))
        return _Kept(batches, stream, states, dict(routing))


# --- several processes ---------------------------------------------------------------------------


def own_share(items: Sequence[T], shared: bool) -> list[T]:
    """Return this process's share of the items; all if they are not shared."""
    number, count = process() if shared else (0, 1)
    return list(items[number::count])


def all_shares(share: list[T], shared: bool) -> list[T]:
    """Gather all processes' results of :func:`own_share`, in the order of the items."""
    if not shared:
        return share
    every = gathered(share)
    return [every[i % len(every)][i // len(every)] for i in range(sum(map(len, every)))]


def all_routing(routing: dict[int, Routing], shared: bool) -> dict[int, Routing]:
    """Return the routing of all processes' tokens, added up by layer."""
    if not shared:
        return routing
    every = [part for part in gathered(routing) if part]
    total = every[0] if every else {}
    for part in every[1:]:
        for i, layer in total.items():
            layer.tokens += part[i].tokens
            layer.idle += part[i].idle
            layer.counts = [a + b for a, b in zip(layer.counts, part[i].counts, strict=True)]
    return total
