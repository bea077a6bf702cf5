"""Input of every method: a model, and the tokens to observe it on."""

from __future__ import annotations

import copy
import logging
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from moesaic.arch.dense import Arch
from moesaic.arch.mixture import MoEArch
from moesaic.config import MethodConfig, RunArgs
from moesaic.data.text import (
    SAMPLES,
    Text,
    Tokens,
    calibration_tokens,
    needs_tokenizer,
    positions,
    process_share,
    without_overlap,
)
from moesaic.distributed import gathered, own_device, process
from moesaic.errors import MoesaicError
from moesaic.io.checkpoint import model_fingerprint
from moesaic.io.formats import Format
from moesaic.io.models import check_live, skeleton_of, working_type
from moesaic.io.naming import Naming, mtp_layers
from moesaic.io.quantised import QuantisedCheckpoint
from moesaic.io.source import Source, source_or_model, tokenizer_of
from moesaic.observation.stream import LayerStream
from moesaic.plan import BaseShape
from moesaic.surgery import base_shape, mtp_blocks, settings_digest
from moesaic.types import JSON, Config, Model, Tokenizer, Values

logger = logging.getLogger(__name__)
A_co = TypeVar("A_co", bound=Arch, covariant=True)
T = TypeVar("T")
V = TypeVar("V")
HELD_BACK = 8
"""Number of calibration windows of which one is held out to compare decisions."""


class Job(Generic[A_co]):
    """Model, architecture and calibration tokens of a run, opened when they are first used.

    Args:
        args: the request.
        find: returns the architecture of a model's config, or refuses the model.
        length: tokens of a calibration window, unless the request sets it.
        skeleton: of the model, if there is one already.
    """

    def __init__(
        self,
        args: RunArgs,
        find: Callable[[Config], A_co],
        length: int = 256,
        skeleton: Model | None = None,
    ) -> None:
        self.args = args
        if skeleton is not None:
            self.skeleton = skeleton
        self.dtype, self.track = args.dtype, args.track
        model = args.model
        self.original: Model = source_or_model(model, args.revision, args.token)
        """Model of the caller, or the :class:`~moesaic.io.source.Source` to read from disk."""
        self.device = own_device(args.device)
        """Device to compute on. A live model that is on an accelerator is not moved."""
        self.return_device = "cpu"
        """Device to which a live model returns after the run."""
        if not isinstance(self.original, Source):
            if getattr(self.original, "hf_quantizer", None) is not None:
                raise MoesaicError(
                    "This model was loaded from quantised weights. Pass its name or its folder "
                    "instead: then what is kept keeps its bytes."
                )
            if any(parameter.is_meta for parameter in self.original.parameters()):
                raise MoesaicError(
                    "Some of this model's weights wait on disk or beside the device (device_map). "
                    "Pass its name or its folder instead: then layers are read one at a time."
                )
            check_live(self.original)
            self.return_device = str(self.original.device)
            if self.return_device != "cpu":
                self.device = self.return_device
        self.arch: A_co = find(self.original.config)
        self.observed: JSON = {}
        """Header of the statistics file used for the decision; empty without one."""
        self._length = length

    @property
    def on_disk(self) -> bool:
        """True if the model was given by name."""
        return isinstance(self.original, Source)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer that was passed, else the model's own; None for a loaded model without one."""
        if self.args.tokenizer is None:
            return tokenizer_of(self.args.model, self.original)
        return self.args.tokenizer

    @cached_property
    def tokens(self) -> Tokens:
        """Calibration tokens.

        Raises:
            MoesaicError: there is no such text, too little of it, no tokenizer for it, or a token
                in it is outside the model's vocabulary.
        """
        text, calibration = self.args.text, self.args.calibration
        text = calibration.source if text is None else text
        listed = hasattr(text, "__getitem__") and not isinstance(text, Mapping | UserDict)
        if not listed and not isinstance(text, Tokens):
            raise MoesaicError(
                "calibration is a source, texts, or token ids: a tensor (N, T), or with padding "
                f"moesaic.Tokens(input_ids, attention_mask); got {type(text).__name__}."
            )
        if needs_tokenizer(text) and self.tokenizer is None:
            raise MoesaicError("Calibration text needs a tokenizer: pass tokenizer=, or token ids.")
        tokens = self._windows(text, calibration.samples)
        tokens.check(self.original.config)
        self.warn_of_text()
        return tokens

    def warn_of_text(self) -> None:
        """Warn if a multimodal mixture is calibrated on nothing but text."""
        config = self.original.config
        whole = self.original.beside if self.on_disk else config.get_text_config() is not config
        if whole and isinstance(self.arch, MoEArch):
            logger.warning(
                "This mixture is multimodal and calibrated only on text: experts that are for "
                "pictures or sounds look unused. Measure the result on such input, too."
            )

    def _windows(self, text: Text, samples: int | None) -> Tokens:
        """Return this many windows of a text."""
        calibration, most = self.args.calibration, positions(self.original.config)
        return calibration_tokens(
            text,
            self.tokenizer_for(text),
            samples,
            calibration.length,
            calibration.seed,
            documents=calibration.documents,
            window=min(self._length, most or self._length),
        )

    def tokenizer_for(self, text: object) -> Tokenizer | None:
        """Return the tokenizer for a text; None for token ids, which need none."""
        return self.tokenizer if needs_tokenizer(text) else None

    def held_back(self) -> Tokens:
        """Return held-out windows to compare decisions on: one in :data:`HELD_BACK`, and two of
        four.

        If the text has more than the requested windows, they share nothing with :attr:`tokens`;
        else, and if the caller passed tokens, they are removed from those; a single window serves
        both.
        """
        every = self.tokens
        count = len(every.input_ids)
        few = max(1, min(2, count // 2), count // HELD_BACK)
        if self.args.text is None:
            with suppress(MoesaicError):  # the text has no more windows
                more = self._windows(self.args.calibration.source, count + 2 * few)
                others = without_overlap(more, every)
                if len(others.input_ids) >= few:
                    return others.rows(slice(few))
        if count > few:
            self.tokens = every.rows(slice(count - few))
        return every.rows(slice(count - few, None))

    @property
    def planned_tokens(self) -> int:
        """Number of requested calibration tokens; :attr:`tokens` may be fewer."""
        calibration = self.args.calibration
        return (calibration.samples or SAMPLES) * (calibration.length or self._length)

    @cached_property
    def skeleton(self) -> Model:
        """Model, or a skeleton of it on the meta device.

        Raises:
            MoesaicError: the checkpoint's tensors do not match its config.
        """
        if not self.on_disk:
            return self.original
        model = skeleton_of(self.original.config)
        self.naming.check(model)
        return model

    @property
    def layers(self) -> nn.ModuleList:
        """Decoder layers of :attr:`skeleton`."""
        return self.arch.layers(self.skeleton)

    @property
    def naming(self) -> Naming:
        """Names of the checkpoint's tensors, on disk and in memory."""
        return self.original.naming

    @property
    def format(self) -> Format | None:
        """Format that the checkpoint's quantised weights keep; None if all become plain."""
        kept = self.on_disk and self.dtype is None
        checkpoint = self.original.checkpoint if kept else None
        return checkpoint.format if isinstance(checkpoint, QuantisedCheckpoint) else None

    @cached_property
    def mtp_layers(self) -> int:
        """Number of MTP layers.

        For a loaded model, which has none any more, the number in its config.
        """
        if not self.on_disk:
            return mtp_layers(self.original.config)
        return len(mtp_blocks(self.naming, self.arch, self.base))

    @cached_property
    def base(self) -> BaseShape:
        """Shape and fingerprint of the source, which plans store and check."""
        original = self.original
        weights = original.fingerprint if self.on_disk else model_fingerprint(original)
        name = original.name if self.on_disk else str(original.config._name_or_path)
        shape = base_shape(self.skeleton, self.arch)
        return replace(shape, weights=weights, name=name, dtype=str(self._type))

    @property
    def _type(self) -> torch.dtype:
        """Floating-point dtype that the model runs in."""
        if not self.on_disk:
            return self.original.dtype
        return self.original.config.dtype if self.dtype is None else self.dtype

    @property
    def working_type(self) -> torch.dtype | None:
        """Dtype in which layers from disk are observed; None for the checkpoint's own."""
        return working_type(self.original.config, self.dtype, self.device) if self.on_disk else None

    def request(self, values: Values) -> JSON:
        """Return everything in which a run must agree with the one that it continues.

        Args:
            values: what identifies the run besides the model: config, comparisons, text.
        """
        return {
            "base": asdict(self.base),
            "settings": settings_digest(self.original.config),
            "dtype": str(self._type),
            "computed_in": str(self.working_type or self._type),
            **values,
        }

    @property
    def text(self) -> JSON:
        """Options and fingerprint of the calibration text; options explain another fingerprint."""
        windows, tokens = self.tokens.input_ids.shape
        made = {"windows": windows, "tokens": tokens, "fingerprint": self.tokens.fingerprint}
        return {**asdict(self.args.calibration), **made}

    @cached_property
    def own_tokens(self) -> tuple[Tokens, list[int]]:
        """Tokens of this process, and the indices of their batches."""
        return process_share(self.tokens, *process())

    def stream(
        self,
        layers: Collection[int],
        view: Callable[[nn.Module], V],
        tokens: Tokens | None = None,
        **options: Any,
    ) -> LayerStream[V]:
        """Return a stream of the given layers, from memory or from disk.

        Args:
            layers: the decoder layers to stop at.
            view: function from a layer to its view, such as ``job.arch.dense`` or
                ``job.arch.mixture``.
            tokens: what to run through the model; the calibration tokens by default.
            options: further arguments of :class:`~moesaic.observation.stream.LayerStream`.
        """
        tokens = self.tokens if tokens is None else tokens
        if self.on_disk:
            return LayerStream.from_disk(
                self.original.checkpoint,
                self.original.config,
                self.arch,
                tokens,
                layers,
                view=view,
                device=self.device,
                dtype=self.dtype,
                **options,
            )
        return LayerStream(self.original, self.arch, tokens, layers, view=view, **options)

    def each_layer(
        self,
        layers: Sequence[int],
        source: Callable[[Sequence[int]], Iterable[V]],
        work: Callable[[V], T],
        words: str,
        *,
        shared: bool = True,
    ) -> Iterator[T]:
        """Work on layers, each in one of several processes, and yield all results in each process.

        Args:
            layers: indices of the layers.
            source: opens some of them, one after the other; with all tokens if layers are shared.
            work: function of an opened layer.
            words: label of the progress bar.
            shared: False if every process works on all layers, because each layer needs the
                results of those before it, or because processes share the tokens.
        """
        number, world = process() if shared else (0, 1)
        numbers = sorted(layers)[number::world]
        items = iter(self.track(source(numbers) if numbers else (), words, len(numbers)))
        for _ in range(-(-len(layers) // world)):
            results = [work(item) for item in (next(items, None),) if item is not None]
            for part in gathered(results) if shared else [results]:
                yield from part
        for _ in items:  # lets the source end
            pass

    def live(self, inplace: bool | None = None) -> Model:
        """Return a model to train or to change: read from disk, the caller's own, or a copy of it.

        Args:
            inplace: True for the caller's own; None for the request's ``inplace``.
        """
        if self.on_disk:
            return self.original.load("cpu", self.dtype)
        if inplace is None:
            inplace = self.args.inplace
        return self.original if inplace else copy.deepcopy(self.original)

    def request_of(self, config: MethodConfig) -> JSON:
        """Return the request for a method, as a user wrote it: verb, method and options."""
        return {"verb": config.verb, "method": config.name, "config": asdict(config)}
