"""Tokens that run through a converted layer, and whether they are decoded, for its modules.

Random numbers are functions of a token: of its id, its position, and the decoder layer. A choice
based on them is the same for a prefix, for the whole text, for decoding with a cache and in a
padded batch: it depends neither on a product's last digits nor on earlier calls.

A converted layer may skip parts only in decoding: a forward pass over one position per sequence.
Prompts run dense if skipping parts would save no time: they are then as fast, and more exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moesaic.types import Values, cache_of

LOW = 0xFFFFFFFF
"""Mask of the lower 32 bits."""


def _hashed(x: Tensor) -> Tensor:
    """Return integers scattered over 32 bits (Wellons' lowbias32); int64, of any shape.

    >>> _hashed(torch.tensor([0, 1, 2])).tolist()
    [0, 1753845952, 3507691905]
    """
    x = x & LOW
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & LOW
    return x ^ (x >> 16)


class RunningTokens:
    """Tokens that run through a decoder layer now; shared by the modules of one layer.

    If they are unknown, as with hidden states instead of ids, every id is 0; and if the number of
    rows differs from the batch's, positions are row indices.
    """

    def __init__(self) -> None:
        self.ids_T: Tensor | None = None
        self.positions_T: Tensor | None = None
        self.layer = 0

    @classmethod
    def of(cls, layer: nn.Module) -> RunningTokens:
        """Return the passage of a decoder layer, made if it has none."""
        passage: RunningTokens = vars(layer).setdefault("passage", cls())
        return passage

    def see(
        self, ids_BL: Tensor, positions_BL: Tensor, layer: int, real_BL: Tensor | None = None
    ) -> None:
        """Set the tokens of a batch.

        Args:
            ids_BL: token ids.
            positions_BL: their positions in their texts.
            layer: index of the decoder layer.
            real_BL: bool; only these tokens have rows. None: all.
        """
        self.layer = layer
        self.ids_T, self.positions_T = (
            each.flatten() if real_BL is None else each[real_BL] for each in (ids_BL, positions_BL)
        )

    def uniform(self, rows: int, columns: int, device: torch.device, stream: int = 0) -> Tensor:
        """Return numbers above 0 and below 1 (T, R), float32, of 23 bits.

        Args:
            rows: tokens T.
            columns: numbers per token R.
            device: device of the numbers.
            stream: numbers of different streams are independent.
        """
        ids_T, positions_T = self.ids_T, self.positions_T
        if ids_T is None or positions_T is None or ids_T.numel() != rows:
            positions_T = torch.arange(rows, device=device)
            ids_T = torch.zeros_like(positions_T)
        where = torch.arange(columns, device=device) + ((2 * self.layer + stream) << 20)
        token_T = _hashed(_hashed(ids_T.to(device) + 1) + positions_T.to(device))
        drawn_TR = _hashed(token_T[:, None] + _hashed(where + 1))
        return ((drawn_TR >> 9).float() + 0.5) / (1 << 23)


def gumbel(uniform: Tensor) -> Tensor:
    """Return Gumbel noise from uniform numbers between 0 and 1 (ToMoE, Eq. 11)."""
    return -(-uniform.log()).log()


def places(ids_BL: Tensor, mask: object = None, past: int = 0) -> Tensor:
    """Return positions of tokens in their texts (B, L), not counting padding before a text.

    Args:
        ids_BL: token ids.
        mask: (B, past + L), 0 or False on padding; anything else is ignored.
        past: number of tokens in the cache.

    >>> places(torch.zeros(2, 3), torch.tensor([[0, 1, 1], [1, 1, 1]])).tolist()
    [[0, 0, 1], [0, 1, 2]]
    >>> places(torch.zeros(1, 1), None, 7).tolist()
    [[7]]
    """
    length = ids_BL.shape[1]
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    return torch.arange(past, past + length, device=ids_BL.device).expand_as(ids_BL)


class Watch:
    """Hook that sets the tokens of each layer with a passage before a model's layers run.

    Args:
        leaf: the name of the list of layers in the module that runs them.
    """

    def __init__(self, leaf: str) -> None:
        self.leaf = leaf

    @classmethod
    def over(cls, model: nn.Module, layers_path: str) -> None:
        """Watch a model, if one of its layers uses random numbers and no hook is there yet."""
        owner, _, leaf = layers_path.rpartition(".")
        body = model.get_submodule(owner)
        draws = any("passage" in vars(layer) for layer in getattr(body, leaf))
        hooks = body._forward_pre_hooks.values()
        if draws and not any(isinstance(getattr(hook, "__self__", None), cls) for hook in hooks):
            body.register_forward_pre_hook(cls(leaf).see, with_kwargs=True)

    def see(self, body: nn.Module, args: tuple[object, ...], kwargs: Values) -> None:
        """Run as the hook: ``body`` is called with token ids, or with embeddings of them."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None and isinstance(given := kwargs.get("inputs_embeds"), Tensor):
            ids = given.new_zeros(given.shape[:2], dtype=torch.int64)
        if not isinstance(ids, Tensor):
            return
        positions = kwargs.get("position_ids")
        if isinstance(positions, Tensor):  # the first of several kinds (K, B, L) is that in text
            positions_BL = (positions[0] if positions.dim() == 3 else positions).expand_as(ids)
        else:
            cache = next(iter(cache_of(kwargs).values()), None)
            count = getattr(cache, "get_seq_length", lambda: 0)
            positions_BL = places(ids, kwargs.get("attention_mask"), count())
        for index, layer in enumerate(getattr(body, self.leaf)):
            if (passage := vars(layer).get("passage")) is not None:
                passage.see(ids, positions_BL, index)


MODES = ("decoding", "always")
"""Modes in which parts are skipped; ``always`` is for measuring."""


class Phase:
    """State shared by the modules of one decoder layer: whether they skip parts now."""

    def __init__(self) -> None:
        self.mode = "decoding"
        self.single = False
        """True if one position per sequence is run."""

    @classmethod
    def of(cls, layer: nn.Module) -> Phase:
        """Return a phase that is updated whenever a decoder layer runs."""
        phase = cls()
        layer.register_forward_pre_hook(phase.see, with_kwargs=True)
        return phase

    def see(self, layer: nn.Module, args: tuple[Tensor, ...], kwargs: Values) -> None:
        """Run as a hook before the layer: hidden states (B, L, D) of one position are decoding."""
        hidden = args[0] if args else kwargs["hidden_states"]
        self.single = hidden.shape[1] == 1

    @property
    def skips(self) -> bool:
        """True if parts are skipped now."""
        return self.mode == "always" or (self.single and self.mode == "decoding")


@contextmanager
def set_mode(model: nn.Module, mode: str) -> Iterator[None]:
    """Set the mode of a model's layers, one of :data:`MODES`, while the context lasts.

    With ``always`` every token is treated as in decoding.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is none of {', '.join(MODES)}")
    phases = [phase for m in model.modules() if (phase := vars(m).get("phase"))]
    before = [phase.mode for phase in phases]
    for phase in phases:
        phase.mode = mode
    try:
        yield
    finally:
        for phase, old in zip(phases, before, strict=True):
            phase.mode = old
