"""Training loop for everything that learns: transformers' Trainer.

``accelerate launch`` runs it in several processes, each with a whole model or, by FSDP2, with its
part of every weight. A step's loss is the mean over all its real tokens, whichever process or
accumulation step they fall to, so two processes give the losses of one with the same global batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from accelerate import DistributedType
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    ValueType,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME

from moesaic.distributed import process, wait_for_all
from moesaic.errors import MoesaicError
from moesaic.io.models import multiplies_natively
from moesaic.io.trust import mapping_of
from moesaic.losses import predicting
from moesaic.plan import Progress
from moesaic.train.learning import NextToken, Objective, Schedule, checkpointing, collate
from moesaic.train.text import Example, examples_fingerprint
from moesaic.types import Figures, Model, Track, Values, silent

TRAINED_NAME, STATE_NAME = "trained.safetensors", "objective.json"
_NOT_KEPT = ("epoch", "grad_norm")
_DECAYS = {"cosine": "cosine", "constant": "constant_with_warmup"}


class _Loop(Trainer):
    """Trainer that minimises an :class:`Objective`, and saves only trainable parameters."""

    objective: Objective
    _sums: dict[str, Tensor] | None = None

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Tensor]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Tensor]], Tensor | int | None]:
        """Return the batches of a step, and the number of tokens that all processes predict in it.

        transformers counts them only for models whose ``forward`` takes any argument.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = [predicting(batch["labels"]).sum() for batch in batches]
        count = sum(counts, torch.zeros((), dtype=torch.int64)).to(device)
        return batches, self.accelerator.gather(count).sum().clamp(min=1)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        count = predicting(inputs["labels"]).sum()
        loss, figures = self.objective(model, inputs)
        sums = {"tokens": count, **figures}
        before = self._sums or {}
        self._sums = {k: before.get(k, 0) + v.detach() for k, v in sums.items()}
        assert num_items_in_batch is not None  # DDP takes the mean of the processes' gradients
        loss = loss * self.accelerator.num_processes / num_items_in_batch
        return (loss, {}) if return_outputs else loss

    def log(self, logs: dict[str, float], *rest: object, **options: object) -> None:
        for what, name in (("loss", "loss"), ("gradient", "grad_norm")):
            if not math.isfinite(logs.get(name, 0.0)):
                raise MoesaicError(
                    f"lr {self.args.learning_rate:g} is too high: the {what} of step "
                    f"{self.state.global_step} is not a number. Lower it, or warm up longer."
                )
        if self._sums is not None and "loss" in logs:
            names, sums = zip(*self._sums.items(), strict=True)
            reduced = self.accelerator.reduce(torch.stack([s.double() for s in sums]), "sum")
            tokens, *totals = reduced.tolist()
            figures = {n: t / max(1, tokens) for n, t in zip(names[1:], totals, strict=True)}
            logs = {**logs, **figures, **self.objective.after_step(figures)}
            self._sums = None
        super().log(logs, *rest, **options)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)
            return
        state = {n: _whole(p) for n, p in self.model.named_parameters() if p.requires_grad}
        if self.args.should_save:
            self._save(output_dir, state)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        model = self.accelerator.unwrap_model(self.model)
        names = {n for n, p in model.named_parameters() if p.requires_grad}
        state = model.state_dict() if state_dict is None else state_dict
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        trained = {n: state[n].detach().cpu().contiguous() for n in names}
        save_file(trained, folder / TRAINED_NAME)
        (folder / STATE_NAME).write_text(json.dumps(self.objective.state))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        trained = dict[str, ValueType](load_file(Path(resume_from_checkpoint) / TRAINED_NAME))
        model = self.accelerator.unwrap_model(self.model if model is None else model)
        unexpected = sorted(trained.keys() - {n for n, _ in model.named_parameters()})
        if unexpected:
            raise MoesaicError(f"{resume_from_checkpoint} holds another run: {unexpected[0]}.")
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(model, trained, options=options)
        self.objective.state = mapping_of(Path(resume_from_checkpoint) / STATE_NAME)

    def finish(self, checkpoint: str | None) -> None:
        """Train to the last step. From a checkpoint of that step the Trainer would do one more."""
        if checkpoint is not None:
            state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
            if state.global_step >= state.max_steps:
                self._load_from_checkpoint(checkpoint)
                self.state = state
                return
        self.train(resume_from_checkpoint=checkpoint)


def _whole(parameter: Tensor) -> Tensor:
    """Return a parameter's whole values; all processes that hold parts must call it together."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


class _Shape:
    """Record of a model's modules, hooks and parameters, to restore them after FSDP2 split them.

    ``fully_shard`` changes modules in place, and there is no way back in torch.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = [
            (module, type(module), dict(module._parameters), _hooks(module))
            for module in model.modules()
        ]

    def restore(self) -> None:
        """Put the original parameter objects, whole again, back into the modules."""
        split = dict(self._model.named_parameters(remove_duplicate=False))
        if not any(isinstance(parameter, DTensor) for parameter in split.values()):
            return
        values = {}
        for name, parameter in split.items():
            values[name] = _whole(parameter).to("cpu", copy=True)
        for module, kind, parameters, hooks in self._modules:
            module.__class__ = kind
            module._parameters.update(parameters)
            for name, before in hooks.items():
                now = vars(module)[name]
                now.clear()
                now.update(before)
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            parameter.data = values[name].to(parameter.dtype)


def _hooks(module: nn.Module) -> dict[str, dict[int, object]]:
    """Return a module's hooks of all kinds, by the attributes that hold them."""
    tables = {n: v for n, v in vars(module).items() if n.startswith("_") and "_hooks" in n}
    return {n: dict(v) for n, v in tables.items() if isinstance(v, dict)}


def last_checkpoint(folder: Path) -> str | None:
    """Return the newest complete checkpoint: the Trainer writes its own state last."""
    complete = [note.parent for note in folder.glob(f"checkpoint-*/{TRAINER_STATE_NAME}")]
    newest = max(complete, key=lambda path: int(path.name.split("-")[1]), default=None)
    return None if newest is None else str(newest)


@dataclass
class _Arguments(TrainingArguments):
    """Training arguments with the one requested device: several GPUs are for several processes.

    By default, one process uses all visible devices by nn.DataParallel, or the first of them.
    """

    place: str = "cpu"

    @cached_property
    def _setup_devices(self) -> torch.device:
        device: torch.device = super()._setup_devices
        place = torch.device(self.place)
        self._n_gpu = min(int(vars(self)["_n_gpu"]), 1)
        if device.type != place.type or place.index is None:
            return device
        if self.distributed_state.distributed_type != DistributedType.NO:
            return device  # each process on its own
        torch.get_device_module(place).set_device(place)
        return place


class _Bar(TrainerCallback):
    """Callback that passes each step's figures to the progress bar."""

    def __init__(self, track: Track) -> None:
        self._track = track
        self._passing: Iterator[Figures] | None = None
        self._figures = Figures()

    def on_log(self, args: object, state: TrainerState, *_: object, **event: Any) -> None:
        logs = event["logs"]
        if "loss" not in logs or not state.is_world_process_zero:
            return
        self._figures = Figures(logs)
        if self._passing is None:
            steps = range(state.global_step, state.max_steps + 1)
            items = (self._figures for _ in steps)
            self._passing = iter(self._track(items, "Training", len(steps)))
        next(self._passing, None)

    def close(self) -> None:
        for _ in self._passing or ():
            pass


def train(
    model: nn.Module,
    examples: Sequence[Example] | IterableDataset[Example],
    schedule: Schedule,
    folder: Path | None = None,
    *,
    trainable: Mapping[str, nn.Parameter],
    request: Values | None = None,
    objective: Objective | None = None,
    device: str = "cpu",
    track: Track = silent,
) -> list[dict[str, float]]:
    """Train some of a model's parameters in place.

    Args:
        model: a causal language model. Trainable parameters are held in float32; a narrower model
            computes in its own dtype, or in float32 if the device cannot multiply its matrices.
        examples: texts as token ids and labels; a stream needs ``schedule.steps``.
        schedule: number of steps, batch sizes and learning rate.
        folder: folder of checkpoints; training continues from the last one there. None keeps none.
        trainable: the parameters that train, by name; all others are frozen.
        request: identifies the run besides schedule, texts and names; a resumed run must have the
            same.
        objective: loss to minimise; None for the next-token loss.
        device: cpu, or the accelerator; each of several processes uses its own.
        track: shows progress.

    Returns:
        ``step``, ``loss``, ``learning_rate`` and the objective's figures, for every step.

    Raises:
        MoesaicError: nothing is left to train, or the folder holds another run.
    """
    if not trainable:
        raise MoesaicError("Nothing is left to train.")
    with ExitStack() as meanwhile:
        if folder is None:
            folder = Path(meanwhile.enter_context(TemporaryDirectory(prefix="moesaic-")))
        identity = {
            **(request or {}),
            "schedule": asdict(schedule),
            "texts": examples_fingerprint(examples),
            "trained": sorted(trainable),
        }
        run = Progress(folder, identity)  # refuses another run
        wait_for_all()  # no process writes before all have checked
        if process()[0] == 0:
            run.begin()
        half = meanwhile.enter_context(_learning(model, trainable, device))
        if schedule.recompute:
            checkpointing(model, "enable")({"use_reentrant": False})
            meanwhile.callback(checkpointing(model, "disable"))
        bar = _Bar(track)
        loop = _Loop(
            model=model,
            args=_arguments(schedule, folder, device, half),
            train_dataset=examples,
            data_collator=collate,
            callbacks=[bar],
        )
        loop.objective = NextToken(cast("Model", model).config) if objective is None else objective
        loop.model_accepts_loss_kwargs = True  # what compute_loss returns is a step's mean already
        loop.remove_callback(PrinterCallback)
        shape = _Shape(model)
        if not loop.is_fsdp_enabled:  # the model computes in its own types again, as it is saved
            unwrap = partial(loop.accelerator.unwrap_model, keep_fp32_wrapper=False)
            meanwhile.callback(unwrap, loop.model)
        loop.finish(last_checkpoint(folder))
        shape.restore()
        bar.close()
    return [  # in an order that is the same in a resumed run, whose values are sorted
        {k: log[k] for k in sorted(log, key=lambda k: (k != "loss", k)) if k not in _NOT_KEPT}
        for log in loop.state.log_history
        if "loss" in log
    ]


@contextmanager
def _learning(
    model: nn.Module, trainable: Mapping[str, nn.Parameter], device: str
) -> Iterator[bool]:
    """Make these parameters trainable, in float32, and no others, while the context lasts.

    Yields:
        True if the other parameters compute in bfloat16.
    """
    dtype = cast(torch.dtype, model.dtype)
    model.requires_grad_(False)
    in_own_type = multiplies_natively(dtype, device)
    wide = list((trainable if in_own_type else dict(model.named_parameters())).values())
    types = [parameter.dtype for parameter in wide]
    for parameter in wide:
        parameter.data = parameter.data.float()
    for parameter in trainable.values():
        parameter.requires_grad_(True)
    try:
        yield in_own_type and dtype == torch.bfloat16
    finally:
        for parameter, before in zip(wide, types, strict=True):
            parameter.data = parameter.data.to(before)


def _arguments(schedule: Schedule, folder: Path, device: str, half: bool) -> _Arguments:
    """Return a schedule as the Trainer's arguments."""
    on_cpu = torch.device(device).type == "cpu"
    return _Arguments(
        place=device,
        output_dir=str(folder),
        max_steps=schedule.steps or -1,
        num_train_epochs=schedule.epochs,
        per_device_train_batch_size=schedule.batch,
        gradient_accumulation_steps=schedule.accumulate,
        learning_rate=schedule.lr,
        warmup_steps=schedule.warmup if schedule.steps != 1 else 0,  # a first step's rate is 0
        lr_scheduler_type=_DECAYS[schedule.decay],
        weight_decay=schedule.weight_decay,
        max_grad_norm=schedule.clip,
        seed=schedule.seed,
        data_seed=schedule.seed,
        bf16=half,
        use_cpu=on_cpu,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_steps=schedule.save_every,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=not on_cpu,
    )
