"""Dense to MoE by continued training: the verb ``carve`` where all weights train."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moesaic import hub
from moesaic.arch.dense import Arch, dense_arch
from moesaic.methods.budget import layer_sizes
from moesaic.io.checkpoint import skeleton
from moesaic.data.text import Tokens, training_examples
from moesaic.errors import MoesaicError
from moesaic.hub import Source, resolve
from moesaic.methods.dsmoe.gates import DSMoE, DSMoEConfig, SparseObjective
from moesaic.data.packing import PackedText
from moesaic.plan import Plan
from moesaic.progress import Track, silent
from moesaic.result import Result
from moesaic.surgery import apply_plan, base_shape
from moesaic.train import train


@dataclass
class Trained(Result):
    """A converted model whose weights were trained as well.

    The plan says what training began from. It cannot rebuild the result and is not saved.
    """

    trained: Any = None
    losses: list[dict[str, float]] = field(default_factory=list)
    """step, loss, learning rate and the method's figures of every step."""
    others: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """What trains each comparison."""

    @property
    def model(self) -> Any:
        """The trained model, an ordinary PreTrainedModel."""
        return self.trained

    @property
    def builders(self) -> dict[str, Callable[[], Any]]:
        """What trains each comparison, on the same text for as long."""
        return self.others

    def write(self, folder: Path) -> None:
        """Write the checkpoint into an existing folder."""
        hub.save_live(self.trained, self.tokenizer, folder)


def carve_and_train(
    model: Any,
    config: DSMoEConfig | None = None,
    *,
    calibration: str | Sequence[Any] | Tokens | torch.Tensor = "",
    tokenizer: Any = None,
    compare: Sequence[str] = (),
    inplace: bool = False,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Path | None = None,
    track: Track = silent,
) -> Trained:
    """Carve a dense model into a mixture of experts and train it.

    Args:
        model: a loaded PreTrainedModel, or a name for :func:`moesaic.hub.resolve`.
        config: what to make of it, on which text, how long.
        calibration: what to train on, where ``config.data`` names nothing: a source, texts, or
            tokens (N, L).
        tokenizer: for texts, when ``model`` is loaded.
        compare: variants of the method to train beside it, on the same text.
        inplace: convert the caller's model itself.
        device: cpu, or whatever accelerator there is.
        dtype: floating-point type, when ``model`` is a name.
        progress: folder for checkpoints; a run that finds them there continues.
        track: shows progress.

    Raises:
        MoesaicError: the request cannot be met.
    """
    config = config or DSMoEConfig()
    original: Any = resolve(str(model)) if isinstance(model, str | Path) else model
    arch = dense_arch(original.config)
    on_disk = isinstance(original, Source)
    if tokenizer is None and on_disk:
        tokenizer = original.tokenizer
    shape = skeleton(original.config) if on_disk else original
    sizes, base = layer_sizes(shape, arch), base_shape(shape, arch)
    examples = _examples(config, calibration, tokenizer)
    variants = {name: replace(config, variant=name) for name in compare}  # type: ignore[arg-type]
    plans = {
        name: Plan(DSMoE.name, base, dict(DSMoE(wanted).start(sizes)), asdict(wanted))
        for name, wanted in ({"": config} | variants).items()
    }

    def trained(name: str) -> tuple[Any, list[dict[str, float]]]:
        if on_disk:
            live = original.load("cpu", dtype)
        else:
            live = original if inplace and not name else copy.deepcopy(original)
        wanted = variants.get(name, config)
        folder = progress and progress / name
        return live, _train(
            live,
            arch,
            plans[name],
            wanted,
            DSMoE(wanted).target(sizes),
            examples,
            folder,
            device,
            track,
        )

    live, losses = trained("")
    count = sum(p.numel() for p in live.parameters())
    return Trained(
        plan=plans[""],
        analyses={},
        arch=arch,
        original=original,
        comparisons={name: plans[name] for name in compare},
        summary={
            "tune": {
                "what": "all",
                "losses": losses,
                "trained_parameters": count,
                "total_parameters": count,
            }
        },
        tokenizer=tokenizer,
        inplace=inplace,
        dtype=dtype,
        device=device,
        trained=live,
        losses=losses,
        others={name: partial(lambda name: trained(name)[0].to(device), name) for name in compare},
    )


def _train(
    live: Any,
    arch: Arch,
    plan: Plan,
    config: DSMoEConfig,
    target: float | None,
    examples: Any,
    progress: Path | None,
    device: str,
    track: Track,
) -> list[dict[str, float]]:
    apply_plan(live, arch, plan)
    hub.convert_class(live, arch, plan)
    routers: list[Any] = [arch.ffn_of(arch.layers(live)[i]).router for i in sorted(plan.layers)]
    losses = train(
        live,
        examples,
        config.schedule,
        progress,
        trainable=dict(live.named_parameters()),
        objective=SparseObjective(routers, config, target),
        device=device,
        track=track,
    )
    live.requires_grad_(True).to("cpu").eval()
    return losses


def _examples(config: DSMoEConfig, given: Any, tokenizer: Any) -> Any:
    if isinstance(given, torch.Tensor):
        given = Tokens(given)
    if isinstance(given, Tokens):
        return given.examples()
    if config.data or isinstance(given, str):
        given = config.data or given
        if not given.endswith(".safetensors"):
            _need(tokenizer)
            return PackedText(given, tokenizer, config.length, config.seed)
    else:
        _need(tokenizer)
    return training_examples(given, tokenizer, config.length)


def _need(tokenizer: Any) -> None:
    if tokenizer is None:
        raise MoesaicError("Training text needs a tokenizer: pass tokenizer=, or token ids.")
