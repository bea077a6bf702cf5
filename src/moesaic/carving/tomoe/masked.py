"""Masks on the activations of a model whose weights are not changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moesaic.arch.dense import Arch
from moesaic.carving.tomoe.masks import MaskingModules


class Masked:
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

    def __init__(self, masked: Masked, index: int) -> None:
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
