"""Measurements of candidates, made and compared with the original; figures are kept on disk.

The text of a search is windows that candidates decide on, and others that choose among them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from moesaic.config import Calibration, MethodConfig, RunArgs, parse_dtype
from moesaic.data.text import (
    SAMPLES,
    Tokens,
    calibration_tokens,
    check_length,
    positions,
    without_overlap,
)
from moesaic.errors import MoesaicError
from moesaic.exports.allocation import Types
from moesaic.exports.quantised_model import QuantisedModel
from moesaic.exports.quantiser import tensors_of
from moesaic.fitting.candidates import BY_WINDOW, Candidate, figures, largest
from moesaic.fitting.config import LEAST
from moesaic.fitting.gguf_files import Files
from moesaic.io.names import FOLDER, our_folder
from moesaic.io.outputs import remove, run_folder, whole_file, whole_folder
from moesaic.io.source import Source
from moesaic.io.trust import mapping_of, reading
from moesaic.metrics.evaluate import measured_text
from moesaic.metrics.forward import Layerwise, Runner
from moesaic.metrics.score import scores
from moesaic.observation.changes import Change
from moesaic.observation.files import observe
from moesaic.pipeline import convert
from moesaic.plan import REQUEST
from moesaic.recipe import Recipe
from moesaic.sizes import RecipeSizes, steps_as_json
from moesaic.types import JSON, Track, release_memory

# --- text -----------------------------------------------------------------------------------------

PART = 4
"""Share of the windows that choose where there is too little text: one of this many."""


class Texts:
    """Windows of one length that share nothing with each other.

    Args:
        drawn: the requested text; if it does not say how many windows calibrate, the text is
            divided.
        source: the model, for its tokenizer.
        windows: number of windows that choose.
    """

    def __init__(self, drawn: Calibration, source: Source, windows: int) -> None:
        self.source, self.windows = source, windows
        self._drawn: dict[int | None, Tokens] = {}
        window = min(MethodConfig.window, positions(source.config) or MethodConfig.window)
        length = drawn.length or window  # one, whichever method looks at it
        check_length(length, source.config)
        self.drawn = drawn if tokenised(drawn) else replace(drawn, length=length)
        """Calibration text, with its length and number of windows."""
        self.drawn = self._with_number()

    @cached_property
    def both(self) -> tuple[Tokens, Tokens]:
        """Windows that candidates decide on, and others that share nothing with them.

        Raises:
            MoesaicError: there is too little text, or the model cannot read it.
        """
        assert self.drawn.samples is not None
        available = self._available(self.drawn.samples + self.windows)
        first = self._windows(min(self.drawn.samples, available))
        count = len(first.input_ids)
        others = without_overlap(self._windows(available), first)
        if len(others.input_ids) < LEAST:
            raise MoesaicError(
                f"fit needs windows that choose beside those that calibrate, {LEAST} at least: "
                f"of {available}, {count} calibrate and {len(others.input_ids)} share no text with "
                "them. Give more text, lower samples, or lower length."
            )
        for tokens in (first, others):
            tokens.check(self.source.config)
        return first, others.rows(slice(self.windows))

    def _with_number(self) -> Calibration:
        """Return the text with its number of windows, some left over to choose by."""
        if self.drawn.samples is not None:
            return self.drawn
        limit = None if tokenised(self.drawn) else SAMPLES + self.windows
        available = self._available(limit)
        choosing = min(self.windows, max(LEAST, available // PART))
        return replace(self.drawn, samples=max(1, available - choosing))

    def _available(self, limit: int | None) -> int:
        """Return the number of windows that the text fills, up to a limit; None for no limit."""

        def fills(samples: float) -> bool:
            try:
                return bool(self._windows(int(samples)).count)
            except MoesaicError:
                return False

        try:
            return len(self._windows(limit).input_ids)
        except MoesaicError:
            fewer = largest(range(1, limit or 1), fills)
            if fewer is None:
                raise
            return int(fewer)

    def _windows(self, samples: int | None) -> Tokens:
        drawn = self.drawn
        if samples not in self._drawn:
            self._drawn[samples] = calibration_tokens(
                drawn.source,
                self.source.tokenizer,
                samples,
                drawn.length,
                drawn.seed,
                documents=drawn.documents,
            )
        return self._drawn[samples]


def tokenised(drawn: Calibration) -> bool:
    """Return True for a file of token ids, whose windows have a length and a number."""
    return drawn.source.endswith(".safetensors")


# --- measurements ---------------------------------------------------------------------------------

STATS, LAYERS = "observed.stats", "layers"
DECIDING = 4096
"""Tokens on which alternatives are decided, before any is made with a refit."""
ROOM = 8
"""Free disk space, in originals, below which the results of first steps are removed."""
RESULT = 4 / 3
"""Disk space, in originals, of the largest result and a file of it in a third of its bytes."""


@dataclass
class Trials:
    """Maker of candidates, which are measured beside the original."""

    recipe: Recipe
    """Recipe whose model, device and type are used."""
    source: Source
    texts: Texts
    """Text that decides and chooses."""
    sizes: RecipeSizes
    files: Files | None
    """GGUF files; None if candidates are checkpoints."""
    work: Path
    """Folder for what is finished."""
    track: Track
    refused: dict[str, str] = field(default_factory=dict)
    """Steps that the model cannot have, with the reason."""
    _weights: dict[tuple[MethodConfig, ...], Mapping[str, torch.Tensor]] = field(
        default_factory=dict
    )
    """Mean squares of the inputs of a result's matrices, by steps."""

    def refuse(self, name: str, error: MoesaicError) -> None:
        """Record that the model cannot be changed so, each reason once."""
        if str(error) not in self.refused.values():
            self.refused[name] = str(error)

    @property
    def dtype(self) -> torch.dtype | None:
        return parse_dtype(self.recipe.dtype)

    def measure(self, candidate: Candidate) -> Candidate:
        """Measure a candidate; its figures are kept on disk, and read if they are there."""
        steps, types = steps_as_json(candidate.steps), candidate.types
        file = self.work / f"tried-{_key([steps, dict(types)] if types else steps)}.json"
        if file.is_file():
            score = mapping_of(file)
            with reading(file, "Remove it, and that is measured anew."):
                return candidate.with_score(score)
        release_memory()  # of the candidate before
        tokens = self.texts.both[1]
        with self.open(candidate) as (run, memory):
            ours, theirs = scores([run, self._reference], tokens)
            score = {**figures(ours, theirs), BY_WINDOW: ours.kl_N, "memory": memory}
        with whole_file(file) as partial:
            partial.write_text(json.dumps(score), "utf-8")
        if shutil.disk_usage(self.work).free < ROOM * self.sizes.skeleton(()).bytes:
            for folder in self.work.glob("made-*"):  # first steps that others would start from
                remove(folder)
        return candidate.with_score(score)

    def plans(self, configs: Sequence[MethodConfig]) -> dict[MethodConfig, Change]:
        """Return by config the plans of its layers, decided on little text.

        Those that the model cannot have are left out, and noted as refused.
        """
        plans: dict[MethodConfig, Change] = {}
        for config in self.track(configs, "Deciding alternatives", len(configs)):
            try:
                args = self.args(stats=config.decides_from_stats)
                plan = convert(config, replace(args, text=self._deciding)).plan
            except MoesaicError as error:
                self.refuse(config.verb, error)
            else:
                assert plan is not None  # those of families decide layer by layer
                plans[config] = plan.layers
        return plans

    def write_file(self, chosen: Candidate, folder: Path) -> JSON:
        """Write the file of the chosen candidate beside its result.

        Args:
            chosen: the candidate.
            folder: of the result; empty where nothing was changed before quantising.

        Returns:
            ``gguf`` with ``file``, ``type``, ``bytes``, ``types``, and its scores on the text that
            results are measured on, the original's ``against``; empty if no file was requested.
        """
        if chosen.file is None or self.files is None:
            return {}
        type = chosen.file.called
        out = our_folder(folder) / f"model-{type}.gguf"
        result = folder if chosen.conversions else None
        record: JSON = {"file": f"{FOLDER}/{out.name}", "type": type}
        quantised = self._quantised(chosen, result)
        release_memory()  # of the models that were measured
        record |= self.files.make(result, out, chosen.file, chosen.types, quantised.weights)
        settings = self.recipe.evaluation
        if settings is not None:
            tokens, _ = measured_text(self.source, settings)
            types = {name: tensor.type for name, tensor in tensors_of(out).items()}
            ours = self._runner(quantised, types)
            score, original = scores([ours, Layerwise(self.source, *self._place)], tokens)
            record |= {**score.as_json(), "against": original.as_json()}
            del record["total_bytes"]  # of the values in float32, in which they were measured
        return {"gguf": record}

    # --- what is made ----------------------------------------------------------------------------

    def result(self, steps: Sequence[MethodConfig]) -> Path | None:
        """Return the folder of a recipe's result, made if it is missing; None without steps.

        Steps that recipes begin with are carried out once.
        """
        model, folder = self.recipe.model, None
        for number, config in enumerate(steps):
            key = _key(steps_as_json(tuple(steps[: number + 1])))
            folder = self.work / f"made-{key}"
            if not folder.exists():
                self.make_room()
                args = replace(self.args(model), resume_from=self.work / f"{LAYERS}-{key}")
                made = convert(config, args)
                with whole_folder(folder) as partial:
                    made.write(partial)
            model = str(folder)
        return folder

    def make_room(self) -> None:
        """Remove quantised rows that were kept, if the disk has little space for a result."""
        free = shutil.disk_usage(self.work).free
        if self.files is not None and free < RESULT * self.sizes.skeleton(()).bytes:
            self.files.kept.clear()

    def hand_over(self, steps: Sequence[MethodConfig], out: str) -> bool:
        """Move a candidate's decided layers to where its run finds them; False if there are none.

        Args:
            steps: of the candidate.
            out: the folder that the run makes.
        """
        work, last = run_folder(out), len(steps) - 1
        for number in range(len(steps)):
            layers = self.work / f"{LAYERS}-{_key(steps_as_json(tuple(steps[: number + 1])))}"
            text = mapping_of(layers / REQUEST)["text"] if layers.is_dir() else {}
            # decided on all windows, and not on fewer, with others held back to compare
            if text.get("fingerprint") == self.texts.both[0].fingerprint:
                to = work if number == last else work / f"step-{number}.layers"
                shutil.copytree(layers, to, dirs_exist_ok=True)
        return work.exists()

    @contextmanager
    def open(self, candidate: Candidate) -> Iterator[tuple[Runner, int]]:
        """Open a candidate's result or file; yield its runner, and the bytes of its weights."""
        result, file, files = self.result(candidate.conversions), candidate.file, self.files
        if file is None or files is None:
            assert result is not None
            made = Source("candidate", result)
            yield Layerwise(made, *self._place), made.checkpoint.tensor_bytes()
            remove(result)
            return
        quantised = self._quantised(candidate, result)
        if candidate.types is None:
            types, size = files.uniform(result, file.type, quantised.weights)
        else:
            types, size = candidate.types, quantised.layout.size(candidate.types)
        yield self._runner(quantised, types), size

    def _quantised(self, candidate: Candidate, result: Path | None) -> QuantisedModel:
        """Return a candidate's result, quantised; importance weights are computed once."""
        assert self.files is not None
        quantised = self.files.quantised(result, self.sizes.skeleton(candidate.conversions))
        known = self._weights.get(candidate.conversions)  # of a result in another folder
        quantised.weights = self._weights[candidate.conversions] = known or quantised.weights
        return quantised

    def _runner(self, quantised: QuantisedModel, types: Types) -> Runner:
        """Return the runner of a model with the values of a file, quantised layer by layer."""
        change = quantised.change(types)
        return Layerwise(quantised.source, self.recipe.device, torch.float32, change=change)

    @property
    def _place(self) -> tuple[str, torch.dtype | None]:
        """Device that models run on, and their type."""
        return self.recipe.device, self.dtype

    @cached_property
    def _reference(self) -> Layerwise:
        return Layerwise(self.source, *self._place, keep=True)

    def args(self, model: str = "", stats: bool = False) -> RunArgs:
        """Return the arguments of the conversion that makes a step.

        Args:
            model: name of the model to convert; by default the original.
            stats: True to decide from the file of statistics.
        """
        return RunArgs.of(
            model or self.recipe.model,
            calibration=self.texts.both[0],
            stats=str(self._stats) if stats else "",
            device=self.recipe.device,
            dtype=self.dtype,
            progress=False,
        )

    @cached_property
    def _deciding(self) -> Tokens:
        """Text on which alternatives are decided."""
        text = self.texts.both[0]
        return text.rows(slice(max(1, DECIDING // text.input_ids.shape[1])))

    @cached_property
    def _stats(self) -> Path:
        """File of statistics of that text, for alternatives that can be decided from one."""
        file = self.work / STATS
        if not file.is_file():
            observe(
                self.recipe.model,
                file,
                calibration=self._deciding,
                gram_mb=0,
                device=self.recipe.device,
                dtype=self.dtype,
                resume=True,
                progress=self.track,
            )
        return file


def _key(request: object) -> str:
    return hashlib.sha256(json.dumps(request).encode()).hexdigest()[:16]
