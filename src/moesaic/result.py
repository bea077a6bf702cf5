"""A converted model, and what every verb that makes one shares."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from moesaic import hub
from moesaic.arch.dense import Arch
from moesaic.io.checkpoint import ShardWriter, narrowed, skeleton, whole_folder
from moesaic.data.text import Tokens, calibration_tokens, evaluation_tokens, shared_out
from moesaic.errors import MoesaicError
from moesaic.hub import Source, resolve
from moesaic.metrics.score import Score, score
from moesaic.arch.mixture import base_arch
from moesaic.plan import BaseShape, LayerPlan, Plan, Progress
from moesaic.recipe import Evaluation
from moesaic.stream.experts import process
from moesaic.stream.stream import LayerStream
from moesaic.surgery import apply_plan, base_shape, check_base, rewrite

# --- a result ------------------------------------------------------------------------------------


@dataclass
class Result:
    """A converted model: the decision, and from it the model, its files and its scores."""

    plan: Plan
    analyses: dict[int, dict[str, Any]]
    """What the method saw of each layer."""
    arch: Arch
    original: Any
    """The caller's model, or the :class:`~moesaic.hub.Source` that was read from disk."""
    comparisons: dict[str, Plan] = field(default_factory=dict)
    """Plans of the variants that were asked for, from the same statistics."""
    summary: dict[str, Any] = field(default_factory=dict)
    """What the method found of the whole model."""
    tokenizer: Any = None
    inplace: bool = False
    dtype: torch.dtype | None = None
    device: str = "cpu"
    evaluation: Tokens | None = field(default=None, repr=False)

    def build(self, plan: Plan) -> Any:
        """The original with a plan applied, live. The original is left alone."""
        if isinstance(self.original, Source):
            model = self.original.load(self.device, self.dtype)
        else:
            model = self.original if self.inplace else copy.deepcopy(self.original)
        apply_plan(model, self.arch, plan)
        hub.convert_class(model, self.arch, plan)
        return model

    @property
    def builders(self) -> dict[str, Callable[[], Any]]:
        """What builds each comparison."""
        return {name: partial(self.build, plan) for name, plan in self.comparisons.items()}

    @cached_property
    def model(self) -> Any:
        """The converted model, an ordinary PreTrainedModel."""
        return self.build(self.plan)

    @cached_property
    def scores(self) -> dict[str, Score]:
        """Perplexity and size of result and original on text that was not calibrated on.

        Raises:
            MoesaicError: there is no tokenizer to read the text with.
        """
        tokens = self.evaluation
        if tokens is None:
            if self.tokenizer is None:
                raise MoesaicError("scores need a tokenizer: pass tokenizer= to carve.")
            settings = Evaluation()
            tokens = evaluation_tokens("", self.tokenizer, settings.length, settings.max_tokens)
        scores = {"result": score(self.model, tokens)}
        if not self.inplace:
            original = self.original
            loaded = original.load(self.device) if isinstance(original, Source) else original
            scores["original"] = score(loaded, tokens)
        return scores

    def save(self, out: str | Path, overwrite: bool = False) -> Path:
        """Write the checkpoint, whole or not at all."""
        with whole_folder(Path(out), overwrite) as folder:
            self.write(folder)
        return Path(out)

    def write(self, folder: Path) -> None:
        """Write checkpoint and plan into an existing folder."""
        if isinstance(self.original, Source):
            save_applied(self.original, self.plan, folder, self.dtype)
        else:
            hub.save_live(self.model, self.tokenizer, folder)
        self.plan.save(folder)


def save_applied(
    source: Source, plan: Plan, folder: Path, dtype: torch.dtype | None = None
) -> None:
    """Write a source with a plan applied, tensor by tensor from disk to disk."""
    config = copy.deepcopy(source.config)
    arch = base_arch(config)
    model = skeleton(config, dtype)
    check_base(plan, model, arch)
    types = {} if dtype is None else {"dtype": narrowed(model)}
    rewrite(source.checkpoint, arch, plan, ShardWriter(folder), **types)
    if dtype is not None:
        config.dtype = dtype
    hub.convert_config(config, arch, plan)
    config.save_pretrained(folder)
    hub.write_stub(config, folder)
    source.checkpoint.copy_side_files(folder)


# --- a job ---------------------------------------------------------------------------------------


@dataclass
class Job:
    """A model and the tokens to observe it on."""

    original: Any
    """The caller's model, or the :class:`~moesaic.hub.Source` to read from disk."""
    arch: Any
    tokens: Tokens
    tokenizer: Any = None
    device: str = "cpu"
    dtype: torch.dtype | None = None

    @classmethod
    def open(
        cls,
        model: Any,
        find: Callable[[Any], Arch],
        calibration: str | Sequence[str] | Tokens | torch.Tensor,
        *,
        samples: int,
        length: int,
        seed: int,
        tokenizer: Any,
        device: str,
        dtype: torch.dtype | None,
    ) -> Job:
        """Find the model and its table entry, and read the tokens.

        Args:
            model: a loaded PreTrainedModel, or a name for :func:`moesaic.hub.resolve`.
            find: the table entry of a config; refuses models that the verb cannot take.
            calibration: texts, tokens (N, L), or what ``--calibration`` takes.
            samples: windows drawn from text.
            length: tokens a window.
            seed: of the draw.
            tokenizer: for texts, when ``model`` is loaded; a name brings its own.
            device: where layers run, when ``model`` is a name.
            dtype: floating-point type, when ``model`` is a name; None for the checkpoint's own.
        """
        original: Any = resolve(str(model)) if isinstance(model, str | Path) else model
        arch = find(original.config)
        if tokenizer is None and isinstance(original, Source):
            tokenizer = original.tokenizer
        tokens = _tokens(calibration, tokenizer, samples, length, seed)
        return cls(original, arch, tokens, tokenizer, device, dtype)

    @cached_property
    def shape(self) -> Any:
        """The model, or a skeleton of it."""
        on_disk = isinstance(self.original, Source)
        return skeleton(self.original.config) if on_disk else self.original

    @cached_property
    def base(self) -> BaseShape:
        return base_shape(self.shape, self.arch)

    @cached_property
    def share(self) -> tuple[Tokens, list[int]]:
        """The tokens that fall to this process, and the numbers of their batches."""
        return shared_out(self.tokens, *process())

    def stream(
        self, layers: Collection[int], tokens: Tokens | None = None, **options: Any
    ) -> LayerStream:
        """The wanted layers one by one, from memory or from disk."""
        tokens = tokens or self.tokens
        if isinstance(self.original, Source):
            return LayerStream.from_disk(
                self.original.checkpoint,
                self.original.config,
                self.arch,
                tokens,
                layers,
                device=self.device,
                dtype=self.dtype,
                **options,
            )
        self.original.eval()
        return LayerStream(self.original, self.arch, tokens, layers, **options)

    def result(self, plan: Plan, analyses: dict[int, dict[str, Any]], **rest: Any) -> Result:
        return Result(
            plan=plan,
            analyses=analyses,
            arch=self.arch,
            original=self.original,
            tokenizer=self.tokenizer,
            dtype=self.dtype,
            device=self.device,
            **rest,
        )


class Finished:
    """Layers that were decided, kept on disk if there is a folder for them."""

    def __init__(self, folder: Path | None, job: Job, request: dict[str, Any]) -> None:
        self.store: dict[tuple[str, int], Any] = {}
        self._file = None
        if folder is not None:
            asked = {"base": asdict(job.base), **request, "calibration": job.tokens.fingerprint}
            self._file = Progress(folder, asked)
            self.store |= self._file.finished()

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self.store

    def __getitem__(self, key: tuple[str, int]) -> tuple[Any, dict[str, Any]]:
        found: tuple[Any, dict[str, Any]] = self.store[key]
        return found

    def add(self, name: str, index: int, layer: LayerPlan, analysis: dict[str, Any]) -> None:
        self.store[name, index] = (layer, analysis)
        if self._file is not None and process()[0] == 0:
            self._file.add(name, index, layer, analysis)


def _tokens(given: Any, tokenizer: Any, samples: int, length: int, seed: int) -> Tokens:
    if isinstance(given, Tokens):
        return given
    if isinstance(given, torch.Tensor):
        return Tokens(given.to(torch.int64))
    if tokenizer is None and not (isinstance(given, str) and given.endswith(".safetensors")):
        raise MoesaicError("Calibration text needs a tokenizer: pass tokenizer=, or token ids.")
    return calibration_tokens(given, tokenizer, samples, length, seed)
