"""Student of ToMoE: a model with frozen weights, and masks that trainable modules put on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moesaic.arch.dense import Arch
from moesaic.carving.budget import layer_sizes
from moesaic.carving.tomoe.config import ToMoEConfig
from moesaic.carving.tomoe.masks import LayerShape, MaskingModules
from moesaic.data.text import Tokens
from moesaic.distributed import process
from moesaic.losses import predicting
from moesaic.train.learning import Objective, Tensors, checkpointing, distillation_loss
from moesaic.types import Config, Model


class MaskingHooks:
    """Hooks that apply a masker's choices to a model.

    They are kept on in the backward pass, which may compute activations again.

    Args:
        model: model of which every layer is masked.
        arch: its architecture.
        masker: modules that choose the part of a layer that a token uses.
        projections: True to mask the outputs of gate and up, besides the hidden activations.
    """

    def __init__(
        self, model: nn.Module, arch: Arch, masker: MaskingModules, projections: bool = False
    ) -> None:
        self.on = True
        self.masker = masker
        self._handles: list[RemovableHandle] = []
        for i, layer in enumerate(arch.layers(model)):
            self._handles += _LayerMasks(self, i).watch(layer, arch, projections)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Switch the masks off while the context lasts."""
        self.on = False
        try:
            yield
        finally:
            self.on = True

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


class _LayerMasks:
    """Masks of one layer, computed when its attention and its FFN are entered."""

    def __init__(self, masked: MaskingHooks, index: int) -> None:
        self.masked, self.index = masked, index
        self.heads: Mapping[str, Tensor] = {}
        """Masks by part of attention: q, k, v and o."""
        self.neurons: Tensor | None = None

    def __deepcopy__(self, memo: object) -> _LayerMasks:
        """Return itself: a copy of the model shares the masks of its hooks."""
        return self

    def watch(self, layer: nn.Module, arch: Arch, projections: bool) -> list[RemovableHandle]:
        """Register the hooks on a layer's parts."""
        attention, ffn, names = arch.attention_of(layer), arch.ffn_of(layer), arch.attention
        handles = [
            attention.register_forward_pre_hook(self._enter_attention, with_kwargs=True),
            ffn.register_forward_pre_hook(self._enter_ffn),
        ]
        parts: dict[str, str] = {}
        for part, name in (("q", names.q), ("k", names.k), ("v", names.v)):
            parts[name] = parts.get(name, "") + part
        for name, letters in parts.items():
            hook = partial(self._written, letters)
            handles.append(getattr(attention, name).register_forward_hook(hook))
        handles.append(getattr(attention, names.o).register_forward_pre_hook(self._read_heads))
        for name in arch.ffn.projections:
            module = getattr(ffn, name)
            if name == arch.ffn.down:
                handles.append(module.register_forward_pre_hook(self._read_neurons))
            elif projections:
                repeats = 2 if arch.ffn.fused else 1
                hook = partial(self._written_neurons, repeats)
                handles.append(module.register_forward_hook(hook))
        return handles

    def _enter_attention(
        self, _: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]
    ) -> None:
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self.heads = self.masked.masker.attention(self.index, x) if self.masked.on else {}

    def _enter_ffn(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.neurons = self.masked.masker.ffn(self.index, args[0]) if self.masked.on else None

    def _written(self, parts: str, _: nn.Module, args: object, out: Tensor) -> Tensor:
        if not self.heads:
            return out
        pieces = out.split([self.heads[part].shape[-1] for part in parts], -1)
        masked = [
            piece * self.heads[part].to(out.dtype)
            for part, piece in zip(parts, pieces, strict=True)
        ]
        return torch.cat(masked, -1) if len(masked) > 1 else masked[0]

    def _read_heads(self, _: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0] * self.heads["o"].to(args[0].dtype),) if self.heads else args

    def _read_neurons(self, _: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return args if self.neurons is None else (args[0] * self.neurons.to(args[0].dtype),)

    def _written_neurons(self, repeats: int, _: nn.Module, args: object, out: Tensor) -> Tensor:
        if self.neurons is None:
            return out
        return out * torch.cat([self.neurons] * repeats, -1).to(out.dtype)


# --- student -------------------------------------------------------------------------------------


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
        self.masked = MaskingHooks(base, arch, self.masking, config.published)
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

    def __call__(self, model: nn.Module, inputs: Tensors) -> tuple[Tensor, Tensors]:
        number, processes = process()
        torch.manual_seed(1_000_003 * self.seed + int(self.state["batches"]) * processes + number)
        self.state["batches"] += 1
        count = predicting(inputs["labels"]).sum()
        out = model(**inputs)
        return out["loss"] * count, {name: term * count for name, term in out["terms"].items()}
