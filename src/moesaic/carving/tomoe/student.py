"""Student of ToMoE: a model with frozen weights, masked by trainable modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesaic.arch.dense import Arch
from moesaic.carving.budget import layer_sizes
from moesaic.carving.tomoe.config import ToMoEConfig
from moesaic.carving.tomoe.masked import Masked
from moesaic.carving.tomoe.masks import LayerShape, MaskingModules
from moesaic.data.text import Tokens
from moesaic.distributed import process
from moesaic.exports.quantiser import Model
from moesaic.losses import predicting
from moesaic.train.objectives import Objective, checkpointing, distillation_loss
from moesaic.types import Config

_KEPT_TOKENS = 8192
"""Most calibration tokens of which logits are kept."""
_Terms = dict[str, Tensor | dict[str, Tensor]]


def layer_shapes(model: Model, arch: Arch) -> list[LayerShape]:
    """Return the sizes of each layer that ToMoE needs.

    Raises:
        MoesaicError: the model has no rotary positions.
    """
    return [
        LayerShape(**vars(size), heads=arch.heads(layer, model.config))
        for layer, size in zip(arch.layers(model), layer_sizes(model, arch), strict=True)
    ]


class Student(nn.Module):
    """Frozen model with masks; the same weights without masks are its teacher (App. B.1)."""

    def __init__(self, base: Model, arch: Arch, config: ToMoEConfig) -> None:
        super().__init__()
        self.base, self.arch = base, arch
        self.masking = MaskingModules(config, layer_shapes(base, arch))
        self.masked = Masked(base, arch, self.masking, config.published)
        self.recomputing = False

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def config(self) -> Config:
        return self.base.config

    @property
    def _no_split_modules(self) -> list[str]:
        """Classes of modules that FSDP shards as one: the base's decoder layers."""
        return sorted(self.base._no_split_modules or ())

    @property
    def learning(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name."""
        return {n: p for n, p in self.named_parameters() if n.startswith("masking.")}

    def train(self, mode: bool = True) -> Student:
        """Set the modules' mode; the base is always in eval mode, but its layers may recompute."""
        super().train(mode)
        self.base.eval()
        for layer in self.arch.layers(self.base):
            layer.training = mode and self.recomputing
        return self

    def gradient_checkpointing_enable(self, options: dict[str, bool]) -> None:
        self.recomputing = True
        checkpointing(self.base, "enable")(options)

    def gradient_checkpointing_disable(self) -> None:
        self.recomputing = False
        checkpointing(self.base, "disable")()

    def logits(self, ids_BL: Tensor, mask_BL: Tensor | None = None) -> Tensor:
        """Return the masked model's logits (B, L, V)."""
        valid = torch.ones_like(ids_BL) if mask_BL is None else mask_BL
        self.masking.begin(valid.bool(), self.training)
        out = self.base(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False)
        return out.logits

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> _Terms:
        """Return the loss of Eq. 10 and its terms.

        Returns:
            ``loss``, and ``terms``: its terms by name, before they are weighted.
        """
        with torch.no_grad(), self.masked.off():
            taught = self.base(
                input_ids=input_ids, attention_mask=attention_mask, use_cache=False
            ).logits
        loss = distillation_loss(self.logits(input_ids, attention_mask), taught, labels)
        loss = loss / predicting(labels).sum().clamp(min=1)
        terms = self.masking.terms()
        total = loss + self.masking.penalty(terms)
        return {"loss": total, "terms": {"distillation": loss, **terms}}

    @torch.no_grad()
    def head_logits(self, tokens: Tokens) -> dict[int, Tensor]:
        """Return logits of the V/O dimensions (T, A) by layer, for real tokens, without noise."""
        self.eval()
        self.masking.kept = {}
        device = self.base.device
        for batch in tokens.batches():
            mask = batch.attention_mask
            self.logits(batch.input_ids.to(device), None if mask is None else mask.to(device))
            kept = next(iter(self.masking.kept.values()), [])
            if sum(len(x) for x in kept) >= _KEPT_TOKENS:
                break
        parts, self.masking.kept = self.masking.kept, None
        return {i: torch.cat(logits).cpu() for i, logits in parts.items()}

    def release(self) -> None:
        """Remove the masks from the base, and make it trainable again."""
        self.masked.remove()
        self.base.requires_grad_(True).eval()


class StudentLoss(Objective):
    """Eq. 10 as a sum over tokens, which the training loop takes; the student computes the mean.

    A batch's random masks depend on its number among the batches of all processes, so that several
    processes draw the same as one process that accumulates as many batches.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.state = seed, {"batches": 0}

    def __call__(
        self, model: nn.Module, inputs: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        number, processes = process()
        torch.manual_seed(1_000_003 * self.seed + int(self.state["batches"]) * processes + number)
        self.state["batches"] += 1
        count = predicting(inputs["labels"]).sum()
        out = model(**inputs)
        return out["loss"] * count, {name: term * count for name, term in out["terms"].items()}
