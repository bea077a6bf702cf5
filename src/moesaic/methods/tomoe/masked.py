"""A model whose activations are masked on the way through, its weights untouched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moesaic.arch.dense import Arch
from moesaic.methods.tomoe.masks import MaskingModules

_Inputs = tuple[Tensor, ...]


class Masked:
    """Hooks that apply a masker's choices to a model.

    They stay on in the backward pass, which may compute activations again.

    Args:
        model: of which every layer is masked.
        arch: its architecture.
        masker: chooses the part of a layer that a token uses.
        projections: an FFN's mask multiplies what gate and up write, beside the hidden activations.
    """

    def __init__(
        self, model: nn.Module, arch: Arch, masker: MaskingModules, projections: bool = False
    ) -> None:
        self.on = True
        self.projections = projections
        self._handles: list[RemovableHandle] = []
        self.masker = masker
        self._attention: dict[int, Mapping[str, Tensor]] = {}
        self._ffn: dict[int, Tensor | None] = {}
        for i, layer in enumerate(arch.layers(model)):
            self._hook(i, layer, arch)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model is as it was."""
        self.on = False
        try:
            yield
        finally:
            self.on = True

    def remove(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, index: int, layer: nn.Module, arch: Arch) -> None:
        attention, ffn, names = arch.attention_of(layer), arch.ffn_of(layer), arch.attention

        def see_attention(_: nn.Module, args: _Inputs, kwargs: dict[str, Tensor]) -> None:
            if self.on:
                x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
                self._attention[index] = self.masker.attention(index, x)

        def see_ffn(_: nn.Module, args: _Inputs) -> None:
            if self.on:
                self._ffn[index] = self.masker.ffn(index, args[0])

        def written(parts: str) -> Callable[[nn.Module, _Inputs, Tensor], Tensor]:
            def hook(_: nn.Module, args: _Inputs, out: Tensor) -> Tensor:
                masks = self._attention[index] if self.on else {}
                if not masks:
                    return out
                pieces = out.split([masks[p].shape[-1] for p in parts], -1)
                masked = [
                    piece * masks[p].to(out.dtype) for p, piece in zip(parts, pieces, strict=True)
                ]
                return torch.cat(masked, -1) if len(masked) > 1 else masked[0]

            return hook

        def read(
            mask_of: Callable[[], Tensor | None],
        ) -> Callable[[nn.Module, _Inputs], _Inputs]:
            def hook(_: nn.Module, args: _Inputs) -> _Inputs:
                mask = mask_of() if self.on else None
                return args if mask is None else (args[0] * mask.to(args[0].dtype),)

            return hook

        def masked(_: nn.Module, args: _Inputs, out: Tensor) -> Tensor:
            mask = self._ffn[index] if self.on else None
            if mask is None:
                return out
            whole = torch.cat([mask, mask], -1) if arch.ffn.fused else mask
            return out * whole.to(out.dtype)

        projections: dict[str, str] = {}
        for part, name in (("q", names.q), ("k", names.k), ("v", names.v)):
            projections[name] = projections.get(name, "") + part
        o, down = getattr(attention, names.o), getattr(ffn, arch.ffn.down)
        self._handles += [
            attention.register_forward_pre_hook(see_attention, with_kwargs=True),
            *(
                getattr(attention, name).register_forward_hook(written(parts))
                for name, parts in projections.items()
            ),
            o.register_forward_pre_hook(read(lambda: self._attention[index].get("o"))),
            ffn.register_forward_pre_hook(see_ffn),
            down.register_forward_pre_hook(read(lambda: self._ffn[index])),
        ]
        if self.projections:
            self._handles += [
                getattr(ffn, name).register_forward_hook(masked)
                for name in arch.ffn.projections
                if name != arch.ffn.down
            ]
