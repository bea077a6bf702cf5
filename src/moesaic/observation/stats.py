"""Statistics of each layer for decisions: from the model, or from a file of ``observe``.

A method names what it needs (:data:`NEEDS`), and nothing else is computed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from moesaic.arch.dense import FFN, Arch
from moesaic.arch.mixture import MoEArch, MoEFFN
from moesaic.data.text import Tokens
from moesaic.distributed import gathered, process
from moesaic.errors import MoesaicError
from moesaic.observation.expert_stats import PARTS, ExpertStats, gram_room, observed
from moesaic.observation.files import StatsFile, from_file
from moesaic.observation.job import Job
from moesaic.observation.neuron_stats import (
    NeuronStats,
    Products,
    observe_neurons,
    watching,
    weight_stats,
)
from moesaic.observation.stream import LayerTokens

MODEL = {"products": "pairs of neurons", "tokens": "tokens"}
"""Statistics that no file of ``observe`` holds, in words."""
NEEDS = frozenset({"router", *PARTS, "sizes", "energy", "shared", *MODEL})
"""Names of statistics. Of a mixture: ``router`` and
:data:`~moesaic.observation.expert_stats.PARTS`. Of the neurons of any model: ``sizes`` of their
weights, ``energy``, that of the ``shared`` path too, and ``products``; ``tokens`` for the layer's
tokens themselves, all of them in every process."""
OF_EXPERTS = frozenset({"router", *PARTS})
OF_NEURONS = frozenset({"sizes", "energy", "shared"})
OF_WEIGHTS = frozenset({"weights", "sizes"})
"""Statistics that need no text."""
NO_TEXT = Tokens(torch.zeros(1, 1, dtype=torch.int64))
"""Tokens that pass through the model if only weights are observed."""


@dataclass
class LayerStats:
    """Statistics of one layer; None for those that are not needed."""

    experts: ExpertStats | None = None
    neurons: NeuronStats | None = None
    products: Products | None = None


Observed = tuple[int, LayerStats, LayerTokens[FFN] | None]
"""Index of a layer, its statistics, and its tokens if they are in memory."""


class Observation:
    """Source of a run's statistics: the model's activations, or a file.

    Args:
        job: the model, and the calibration tokens or the file of statistics.
        needs: names of :data:`NEEDS`.
        gram_bytes: memory for the Gram matrices of one layer's experts.

    Raises:
        MoesaicError: the file is of another model, or lacks what is needed.
    """

    def __init__(self, job: Job[Arch], needs: Collection[str], gram_bytes: int = 0) -> None:
        self.job, self.needs, self.gram_bytes = job, frozenset(needs), gram_bytes
        path = job.args.calibration.stats
        file = self._opened(path) if path else None
        self._file = file if self.needs else None
        job.observed = self._file.header if self._file is not None else {}
        self.reads_text = self._file is None and bool(self.needs - OF_WEIGHTS)

    def _opened(self, path: str) -> StatsFile:
        lacking = [words for name, words in MODEL.items() if name in self.needs]
        if lacking:
            raise MoesaicError(
                f"stats hold no {' and no '.join(lacking)}: these options need the model, and "
                "cannot decide from stats."
            )
        return from_file(self.job, path, needs_gram="gram" in self.needs)

    @property
    def whole(self) -> bool:
        """True if every process sees all tokens of a layer, so that they can share layers."""
        return self._file is None and "tokens" in self.needs

    @property
    def file(self) -> str:
        """Fingerprint of the file; empty without one."""
        return "" if self._file is None else str(self._file.fingerprint)

    @property
    def calibration(self) -> str:
        """Fingerprint of the text used for the decision; empty if there is none."""
        if self._file is not None:
            return str(self._file.header["calibration"])
        return self.job.tokens.fingerprint if self.reads_text else ""

    def layers(self, layers: Sequence[int], follow: bool = False) -> Iterator[Observed]:
        """Yield layers in turn, observed on the tokens of all processes.

        Args:
            layers: rising indices.
            follow: as for :class:`~moesaic.observation.stream.LayerStream`.
        """
        if self._file is not None:
            for i in layers:
                stats = self._file.layer(i)
                yield i, LayerStats(stats, stats.neurons), None
        elif self.needs & OF_EXPERTS:
            yield from self._experts(layers, follow)
        elif self.needs & {"shared", "products", "tokens"}:
            yield from self._sites(layers)
        elif self.needs:
            yield from self._passing(layers)
        else:
            yield from ((i, LayerStats(), None) for i in layers)

    @property
    def _tokens(self) -> tuple[Tokens, Tokens, Sequence[int] | None]:
        """All tokens, those of this process, and the indices of its batches."""
        if not self.reads_text:
            return NO_TEXT, NO_TEXT, [0]
        return self.job.tokens, *self.job.own_tokens

    def _experts(self, layers: Sequence[int], follow: bool) -> Iterator[Observed]:
        arch, (every, share, numbers) = self.job.arch, self._tokens
        assert isinstance(arch, MoEArch)
        if "tokens" in self.needs:
            share, numbers = every, None
        for site in self.job.stream(layers, arch.mixture, share, follow=follow):
            stats = observed(site, every, numbers, self.gram_bytes, self.needs)
            yield site.index, LayerStats(stats, stats.neurons), site

    def _sites(self, layers: Sequence[int]) -> Iterator[Observed]:
        """Yield layers with their tokens: all in every process if ``needs`` includes them."""
        whole = "tokens" in self.needs
        tokens = self.job.tokens if whole else self.job.own_tokens[0]
        for site in self.job.stream(layers, self.job.arch.view, tokens):
            i, stats = site.index, None
            if self.needs & OF_NEURONS:
                part = observe_neurons(site)
                stats = part if whole else NeuronStats.merged(gathered(part))
            products = Products.of(site, not whole) if "products" in self.needs else None
            yield i, LayerStats(None, stats, products), site

    def _passing(self, layers: Sequence[int]) -> Iterator[Observed]:
        """Yield statistics collected during the forward pass itself, without the shared path's."""
        arch, tokens = self.job.arch, self._tokens[1]
        for turn in self.job.stream(layers, arch.view, tokens).turns():
            i, layer = turn.block.index, turn.block.layer
            stats = replace(weight_stats(arch.view(layer)), tokens=tokens.count)
            with watching(layer, arch, stats, iter(turn.masks)):
                turn.run()
            merged = NeuronStats.merged(gathered(stats))
            yield i, LayerStats(None, merged), None


def shows_tokens(job: Job[Arch], needs: Collection[str]) -> bool:
    """Return True if layers come with all tokens, so that a refit needs no other pass."""
    by_site = {*OF_EXPERTS, "shared", "products", "tokens"} & set(needs)
    a_share = "tokens" not in needs and process()[1] > 1
    return bool(by_site - OF_WEIGHTS) and not a_share and not job.args.calibration.stats


# --- memory --------------------------------------------------------------------------------------


def neuron_pairs(experts: int, width: int) -> int:
    """Return the bytes of the inner products of a layer's neurons, by expert, in float64."""
    return 8 * experts * width**2


def bytes_of(
    needs: Collection[str], job: Job[Arch], layers: Sequence[int], gram_bytes: int = 0
) -> int:
    """Return the bytes of the largest layer's statistics, from its shapes.

    Args:
        needs: names of :data:`NEEDS`.
        job: the model and the requested tokens.
        layers: indices of the layers.
        gram_bytes: memory for the Gram matrices of one layer's experts.
    """
    arch: Arch = job.arch
    held = 0
    for i in layers:
        view = arch.view(job.layers[i])
        if "products" in needs:
            held = max(held, neuron_pairs(view.count, view.width))
        if "gram" in needs and isinstance(view, MoEFFN):
            held = max(held, min(gram_bytes, gram_room(job.planned_tokens, view.weighed)))
    return held
