"""The one training loop, transformers' Trainer, for everything that learns.

``accelerate launch`` runs it in several processes (FSDP and DeepSpeed come with it). A step's loss
is the mean over all its real tokens, whichever process or accumulation step they fall to, so two
processes give the losses of one with the same global batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from moesaic.errors import MoesaicError
from moesaic.progress import Track

IGNORED = -100
"""The label of a token that is not predicted: a prompt's, or padding."""
TRAINED_NAME = "trained.safetensors"
DECAYS = {"cosine": "cosine", "constant": "constant_with_warmup"}
TERMS = "terms"
"""Under this name, beside its ``loss``, a model may return what the loss is made of."""

Example = dict[str, list[int]]
"""input_ids and labels of one text."""


@dataclass(frozen=True)
class Schedule:
    """How long, how much at a time, and how fast."""

    steps: int | None
    """Optimizer steps; None for ``epochs``."""
    epochs: float
    batch: int
    """Texts a process takes at a time."""
    accumulate: int
    """Batches before the weights move."""
    lr: float
    warmup: float
    """The share of the steps in which the rate rises from 0; then a cosine brings it to 0."""
    weight_decay: float
    seed: int
    save_every: int
    """Steps between checkpoints."""
    decay: str = "cosine"
    """What becomes of the rate after the warm-up: cosine or constant."""


def collate(examples: Sequence[Example]) -> dict[str, Tensor]:
    """A batch, padded on the right; padding is neither seen nor predicted.

    >>> batch = collate([{"input_ids": [5, 6], "labels": [-100, 6]},
    ...                  {"input_ids": [7], "labels": [7]}])
    >>> batch["labels"].tolist(), batch["attention_mask"].tolist()
    ([[-100, 6], [7, -100]], [[1, 1], [1, 0]])
    """
    longest = max(len(e["input_ids"]) for e in examples)

    def rows(name: str, fill: int) -> Tensor:
        return torch.tensor([e[name] + [fill] * (longest - len(e[name])) for e in examples])

    mask = [[1] * len(e["input_ids"]) + [0] * (longest - len(e["input_ids"])) for e in examples]
    return {
        "input_ids": rows("input_ids", 0),
        "labels": rows("labels", IGNORED),
        "attention_mask": torch.tensor(mask),
    }


def distillation_loss(student_BLV: Tensor, teacher_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """Sum of KL(teacher || student) of the next token, over the tokens that have a label.

    >>> logits = torch.randn(1, 3, 5)
    >>> distillation_loss(logits, logits, torch.tensor([[1, 2, 3]])).item()
    0.0
    """
    valid = labels_BL[:, 1:] != IGNORED
    student, teacher = (
        x[:, :-1][valid].float().log_softmax(-1) for x in (student_BLV, teacher_BLV)
    )
    return F.kl_div(student, teacher, reduction="sum", log_target=True)


class _Loop(Trainer):  # type: ignore[misc]
    """Keeps only what trains in its checkpoints, and may learn from a teacher."""

    teacher: Any = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._terms: list[dict[str, Tensor]] = []

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        if "loss" in logs:
            names = self._terms[0] if self._terms else {}
            means = {n: torch.stack([t[n] for t in self._terms]).mean().item() for n in names}
            logs = {**logs, **means}
            self._terms.clear()
        super().log(logs, *args, **options)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        if self.teacher is None:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            if TERMS in outputs:
                self._terms.append({n: t.detach() for n, t in outputs[TERMS].items()})
            return (loss, outputs) if return_outputs else loss
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        with torch.no_grad():
            taught = self.teacher(**inputs).logits
        loss = distillation_loss(outputs.logits, taught, labels)
        if num_items_in_batch is None:
            loss = loss / (labels[:, 1:] != IGNORED).sum().clamp(min=1)
        else:  # DDP takes the mean of the processes' gradients
            loss = loss * self.accelerator.num_processes / num_items_in_batch
        return (loss, outputs) if return_outputs else loss

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        model = self.accelerator.unwrap_model(self.model)
        wanted = {n for n, p in model.named_parameters() if p.requires_grad}
        state = model.state_dict() if state_dict is None else state_dict
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        trained = {n: state[n].detach().cpu().contiguous() for n in wanted}
        save_file(trained, folder / TRAINED_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        trained = load_file(Path(resume_from_checkpoint) / TRAINED_NAME)
        model = self.accelerator.unwrap_model(self.model if model is None else model)
        _, unexpected = model.load_state_dict(trained, strict=False)
        if unexpected:
            raise MoesaicError(f"{resume_from_checkpoint} holds another run: {unexpected[0]}.")


class _Told(TrainerCallback):  # type: ignore[misc]
    """Tells somebody of each step's figures."""

    def __init__(self, tell: Any) -> None:
        self.tell = tell

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs and state.is_world_process_zero:
            self.tell(state.global_step, state.max_steps, logs)


class Bar:
    """Turns calls into the passing of items, which is what a progress bar is drawn of."""

    def __init__(self, track: Track) -> None:
        self._track = track
        self._passing: Any = None

    def tell(self, step: int, of: int, logs: dict[str, float]) -> None:
        if self._passing is None:
            self._passing = iter(self._track(range(step, of + 1), "Training", of + 1 - step))
        next(self._passing, None)

    def close(self) -> None:
        for _ in self._passing or ():
            pass


def train(
    model: Any,
    examples: Sequence[Example],
    schedule: Schedule,
    folder: Path,
    *,
    trainable: Mapping[str, nn.Parameter],
    teacher: Any = None,
    device: str = "cpu",
    tell: Any = lambda step, of, logs: None,
) -> list[dict[str, float]]:
    """Train some of a model's parameters in place.

    Args:
        model: a causal language model. What trains is held in float32; a narrower model computes
            in its own type.
        examples: texts as token ids and labels.
        schedule: how long and how fast.
        folder: for checkpoints; training continues from the last one found there.
        trainable: the parameters that train, by name; all others are frozen.
        teacher: a model whose next-token distribution is the target, instead of the text.
        device: cpu, or whatever accelerator there is.
        tell: called with step, steps and figures.

    Returns:
        step, loss and learning rate of every step, and the terms of a loss that has them.
    """
    dtype = model.dtype
    if not trainable:
        raise MoesaicError("Nothing is left to train.")
    model.requires_grad_(False)
    own = {name: parameter.dtype for name, parameter in trainable.items()}
    for parameter in trainable.values():
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=schedule.steps or -1,
        num_train_epochs=schedule.epochs,
        per_device_train_batch_size=schedule.batch,
        gradient_accumulation_steps=schedule.accumulate,
        learning_rate=schedule.lr,
        warmup_steps=schedule.warmup,
        lr_scheduler_type=DECAYS[schedule.decay],
        weight_decay=schedule.weight_decay,
        seed=schedule.seed,
        data_seed=schedule.seed,
        bf16=dtype == torch.bfloat16,
        use_cpu=device == "cpu",
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_steps=schedule.save_every,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=device != "cpu",
    )
    loop = _Loop(
        model=model,
        args=arguments,
        train_dataset=list(examples),
        data_collator=collate,
        callbacks=[_Told(tell)],
    )
    loop.teacher = None if teacher is None else teacher.to(arguments.device).eval()
    loop.remove_callback(PrinterCallback)
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    loop.train(resume_from_checkpoint=last)
    for name, parameter in trainable.items():
        parameter.data = parameter.data.to(own[name])
    unwanted = ("epoch", "grad_norm")
    history = [log for log in loop.state.log_history if "loss" in log]
    return [{k: v for k, v in log.items() if k not in unwanted} for log in history]
