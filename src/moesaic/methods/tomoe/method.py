"""Experts learned over frozen weights: the verb ``carve`` for methods that train."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.arch.dense import Arch, dense_arch
from moesaic.methods.budget import layer_sizes
from moesaic.data.text import Tokens, training_examples
from moesaic.hub import Source
from moesaic.methods.tomoe.masks import LayerShape, ToMoE, ToMoEConfig
from moesaic.methods.tomoe.decision import Learned, active_ratio, decide, learned, threshold_for
from moesaic.nn import Masked
from moesaic.layers.overlapping_plan import OverlappingLayer
from moesaic.plan import Plan, Progress
from moesaic.progress import Track, silent
from moesaic.result import Job, Result
from moesaic.stream.experts import process
from moesaic.train import (
    Objective,
    checkpointing,
    distillation_loss,
    next_token_loss,
    predicting,
    train,
)

TINY = 20_000_000
"""Parameters below which the default schedule is a short one."""
KEPT_TOKENS = 8192
"""Calibration tokens, at most, of which logits are kept."""


def layer_shapes(model: Any, arch: Arch) -> list[LayerShape]:
    """What ToMoE needs to know of each layer.

    Raises:
        MoesaicError: the model has no rotary positions.
    """
    hidden_size = model.get_input_embeddings().weight.shape[1]
    return [
        LayerShape(
            hidden_size, size.width, arch.heads(layer, model.config), size.ffn, size.attention
        )
        for layer, size in zip(arch.layers(model), layer_sizes(model, arch), strict=True)
    ]


class Student(nn.Module):
    """A frozen model, masked; the same weights, unmasked, are its teacher (App. B.1)."""

    def __init__(self, base: Any, arch: Arch, config: ToMoEConfig) -> None:
        super().__init__()
        self.base, self.arch, self.objective = base, arch, config.objective
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.tomoe = ToMoE(config, layer_shapes(base, arch))
        self.masked = Masked(base, arch, self.tomoe)
        self.recomputing = False

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.base.dtype
        return dtype

    @property
    def config(self) -> Any:
        return self.base.config

    def train(self, mode: bool = True) -> Student:
        """The base stays as it is when it runs, without dropout; its layers may recompute."""
        super().train(mode)
        self.base.eval()
        for layer in self.arch.layers(self.base):
            layer.training = mode and self.recomputing
        return self

    def gradient_checkpointing_enable(self, options: dict[str, Any]) -> None:
        self.recomputing = True
        checkpointing(self.base, "enable")(options)

    def gradient_checkpointing_disable(self) -> None:
        self.recomputing = False
        checkpointing(self.base, "disable")()

    def logits(self, ids_BL: Tensor, mask_BL: Tensor | None = None) -> Tensor:
        """The masked model's logits (B, L, V)."""
        valid = torch.ones_like(ids_BL) if mask_BL is None else mask_BL
        self.tomoe.begin(valid.bool(), self.training)
        out = self.base(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False)
        logits: Tensor = out.logits
        return logits

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Any]:
        """The loss of Eq. 10, and its terms."""
        given = {"attention_mask": attention_mask, "use_cache": False}
        if self.objective == "distillation":
            with torch.no_grad(), self.masked.off():
                taught = self.base(input_ids=input_ids, **given).logits
            loss = distillation_loss(self.logits(input_ids, attention_mask), taught, labels)
        else:
            loss = next_token_loss(self.logits(input_ids, attention_mask), labels)
        loss = loss / predicting(labels).sum().clamp(min=1)
        terms = self.tomoe.terms()
        whole = loss + self.tomoe.penalty(terms)
        return {"loss": whole, "terms": {self.objective: loss, **terms}}

    @torch.no_grad()
    def head_logits(self, tokens: Tokens) -> dict[int, Tensor]:
        """Logits of the V/O dimensions (T, A) by layer, for real tokens, without noise."""
        self.eval()
        self.tomoe.kept = {}
        device = self.base.device
        for batch in tokens.batches():
            mask = batch.attention_mask
            self.logits(batch.input_ids.to(device), None if mask is None else mask.to(device))
            if sum(len(x) for x in next(iter(self.tomoe.kept.values()), [])) >= KEPT_TOKENS:
                break
        kept, self.tomoe.kept = self.tomoe.kept, None
        return {i: torch.cat(parts).cpu() for i, parts in kept.items()}

    def release(self) -> Any:
        """The base, as it was."""
        self.masked.remove()
        return self.base.requires_grad_(True).eval()


class StudentLoss(Objective):
    """Eq. 10, which the student computes as a mean, as the sum that the training loop takes.

    A batch's tosses follow from its number among the batches of all processes, so that several
    processes toss what one that accumulates as many batches would.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.state = seed, {"batches": 0}

    def __call__(
        self, model: nn.Module, inputs: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        number, of = process()
        torch.manual_seed(1_000_003 * self.seed + int(self.state["batches"]) * of + number)
        self.state["batches"] += 1
        count = predicting(inputs["labels"]).sum()
        out = model(**inputs)
        return out["loss"] * count, {name: term * count for name, term in out["terms"].items()}


def learn(
    model: Any,
    config: ToMoEConfig | None = None,
    *,
    calibration: str | Sequence[str] | Tokens | Tensor = "",
    samples: int = 100,
    length: int = 256,
    seed: int = 0,
    tokenizer: Any = None,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    inplace: bool = False,
    progress: Path | None = None,
    track: Track = silent,
) -> Result:
    """Carve a dense model by training experts and routers over its frozen weights.

    Args:
        model: a loaded PreTrainedModel, or a name.
        config: the method's options.
        calibration: texts, tokens (N, L), or what ``--calibration`` takes: all of it is trained
            on; ``samples`` windows of it fix how many dimensions of a head are used.
        samples: windows drawn from calibration text.
        length: tokens a window.
        seed: of the draw.
        tokenizer: for texts, when ``model`` is loaded.
        device: cpu, or whatever accelerator there is.
        dtype: floating-point type, when ``model`` is a name.
        inplace: convert the caller's model itself.
        progress: folder for checkpoints; a run that finds them there continues.
        track: shows progress.

    Raises:
        MoesaicError: the request cannot be met.
    """
    config = config or ToMoEConfig()
    job = Job.open(
        model,
        dense_arch,
        calibration,
        samples=samples,
        length=length,
        seed=seed,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
    )
    on_disk = isinstance(job.original, Source)
    live = job.original.load("cpu", dtype) if on_disk else job.original
    if not on_disk and not inplace:
        live = copy.deepcopy(live)
    tiny = sum(p.numel() for p in live.parameters()) < TINY
    config = config.settled(tiny)
    student = Student(live, job.arch, config)
    modules = {n: p for n, p in student.named_parameters() if n.startswith("tomoe.")}
    examples = _examples(calibration, job, config.length or length)
    if progress is not None:
        asked = {"base": asdict(job.base), "config": asdict(config)}
        run = Progress(progress, {**asked, "calibration": job.tokens.fingerprint})
        run.finished()
        if process()[0] == 0:
            run.begin()
    losses = train(
        student,
        examples,
        config.schedule,
        progress and progress / "training",
        trainable=modules,
        objective=StudentLoss(config.seed),
        device=device,
        track=track,
    )
    head_logits = student.head_logits(job.tokens)
    student.to("cpu")
    with torch.no_grad():
        student.tomoe.begin(torch.ones(1, 1, dtype=torch.bool), noise=False)
        layers = learned(student.tomoe, head_logits)
        threshold = threshold_for(layers, config.active)
        plans, analyses = decide(student.tomoe, layers, job.arch.attention, threshold)
    student.release()
    plan = Plan("tomoe", job.base, dict(plans), asdict(config), job.tokens.fingerprint)
    return job.result(
        plan,
        analyses,
        inplace=inplace,
        summary={
            "training": {
                "losses": losses,
                "active": active_ratio(layers, threshold),
                "threshold": threshold,
                "trained_parameters": sum(p.numel() for p in modules.values()),
                "examples": len(examples),
                "copied_parameters": _copied(layers, plans) if config.materialize else 0,
            }
        },
    )


def _copied(layers: Mapping[int, Learned], plans: Mapping[int, OverlappingLayer]) -> int:
    """FFN weights that materialised experts hold beyond the dense model's."""
    shares = {i: sum(p.header()["petals"]) / layers[i].shape.width for i, p in plans.items()}
    return round(sum(layers[i].shape.ffn * (share - 1) for i, share in shares.items()))


def _examples(given: Any, job: Job, length: int) -> list[dict[str, list[int]]]:
    """All of the calibration text, in windows to learn from."""
    if isinstance(given, Tensor) or hasattr(given, "input_ids"):
        return job.tokens.examples()
    return training_examples(given, job.tokenizer, length)
