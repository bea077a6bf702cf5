"""A converted model trained a little: tune()."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from moesaic import hub
from moesaic.io.checkpoint import whole_folder
from moesaic.data.text import training_examples
from moesaic.errors import MoesaicError
from moesaic.hub import Source, resolve
from moesaic.methods.sft.parameters import TuneConfig, trainable
from moesaic.arch.mixture import base_arch
from moesaic.plan import JSON_NAME, Plan
from moesaic.progress import Track, silent
from moesaic.train import Distillation, train


@dataclass
class Tuned:
    """A trained model, and how it went."""

    model: Any
    config: TuneConfig
    losses: list[dict[str, float]]
    """step, loss and learning_rate of every step."""
    trained_parameters: int
    total_parameters: int
    tokenizer: Any = None
    builders: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """Comparisons; training has none."""

    @property
    def summary(self) -> dict[str, Any]:
        """What ``result.json`` holds of it."""
        return {
            **asdict(self.config),
            "losses": self.losses,
            "trained_parameters": self.trained_parameters,
            "total_parameters": self.total_parameters,
        }

    def save(self, out: str | Path, overwrite: bool = False) -> Path:
        """Write the checkpoint, whole or not at all."""
        with whole_folder(Path(out), overwrite) as folder:
            self.write(folder)
        return Path(out)

    def write(self, folder: Path) -> None:
        """Write the checkpoint into an existing folder. It is no plan's result any more."""
        hub.save_live(self.model, self.tokenizer, folder)


def _plan(original: Any) -> Plan | None:
    """The plan that a checkpoint was made by, if it lies beside it."""
    if isinstance(original, Source) and (original.folder / JSON_NAME).is_file():
        return Plan.load(original.folder)
    return None


def tune(
    model: Any,
    config: TuneConfig | None = None,
    *,
    examples: str | Sequence[Any] | None = None,
    plan: Plan | None = None,
    teacher: Any = None,
    tokenizer: Any = None,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Path | None = None,
    track: Track = silent,
) -> Tuned:
    """Train some of a converted model's parameters.

    Args:
        model: a loaded PreTrainedModel, which is trained in place, or a name.
        config: what trains, on what, how long.
        examples: rows to train on instead of ``config.data``: texts, or mappings with a prompt
            and an answer, or input_ids and labels.
        plan: which layers were condensed, when ``model`` is loaded.
        teacher: a loaded original model, instead of ``config.teacher``.
        tokenizer: for texts, when ``model`` is loaded.
        device: cpu, or whatever accelerator there is.
        dtype: floating-point type, when ``model`` is a name.
        progress: folder for checkpoints; a run that finds them there continues.
        track: shows progress.

    Raises:
        MoesaicError: the request cannot be met.
    """
    config = config or TuneConfig()
    original: Any = resolve(str(model)) if isinstance(model, str | Path) else model
    arch = base_arch(original.config)
    on_disk = isinstance(original, Source)
    if tokenizer is None and on_disk:
        tokenizer = original.tokenizer
    live = original.load("cpu", dtype) if on_disk else original
    rows = config.data if examples is None else examples
    ready = not isinstance(rows, str) and len(rows) > 0 and "labels" in rows[0]
    data: Any = rows if ready else training_examples(rows, tokenizer, config.length)
    if config.teacher and teacher is None:
        teacher = resolve(config.teacher).load("cpu", dtype)
    total = sum(p.numel() for p in live.parameters())
    if config.what == "lora":
        tuned, chosen = _with_lora(live, config)
    else:
        plan = plan if plan is not None else _plan(original)
        tuned, chosen = live, trainable(live, arch, config.what, plan)
    count = sum(p.numel() for p in chosen.values())
    losses = train(
        tuned,
        data,
        config.schedule,
        progress,
        trainable=chosen,
        objective=None if teacher is None else Distillation(teacher),
        device=device,
        track=track,
    )
    if config.what == "lora":
        live = tuned.merge_and_unload()
    live.requires_grad_(True).eval()
    return Tuned(live.to("cpu"), config, losses, count, total, tokenizer)


def _with_lora(model: Any, config: TuneConfig) -> tuple[Any, dict[str, torch.nn.Parameter]]:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MoesaicError("--what lora needs: pip install peft") from error
    options = {"r": config.rank, "lora_alpha": 2 * config.rank, "target_modules": "all-linear"}
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    return adapted, {n: p for n, p in adapted.named_parameters() if p.requires_grad}
