"""FFN of which each token runs one expert; experts are index lists into shared weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from moesaic.arch.dense import DenseFFN, FFNNames
from moesaic.carving.carved_ffn import CarvedFFN
from moesaic.modules.running import RunningTokens

FORMS = ("moe", "pseudo")


class OverlappingFFN(CarvedFFN):
    """Carved FFN without a backbone whose petals may share neurons (ToMoE, Eqs. 12-13).

    The weights are the base's own, in the base's order. ``form`` chooses how they run, with the
    same
    result: ``pseudo`` runs the dense block and masks it (Eq. 17), at the dense block's cost;
        ``moe``
    gathers each expert's weights and runs it over its tokens, which pays for thousands of tokens.
    """

    experts: Tensor
    form = "pseudo"

    def __init__(
        self,
        projections: Mapping[str, nn.Module],
        act: Callable[[Tensor], Tensor],
        names: FFNNames,
        hidden_size: int,
        experts: int,
        width: int,
        routing: str = "cosine",
        passage: RunningTokens | None = None,
    ) -> None:
        petals = (width,) * experts
        super().__init__(
            projections, act, names, hidden_size, 0, petals, 1, routing, passage=passage
        )
        self.register_buffer("experts", torch.empty(experts, width, dtype=torch.int64))

    def _worth_moving(self, x_TD: Tensor, on_TR: Tensor) -> bool:
        return self.form == "moe" and not self._called()

    def _parts(self, ffn: DenseFFN) -> Iterable[DenseFFN]:
        return map(ffn.chosen, self.experts)

    def _by_neuron(self, on_TR: Tensor, width: int) -> Tensor:
        on_RM = torch.zeros(len(self.petals), width, device=on_TR.device)
        return on_TR @ on_RM.scatter_(1, self.experts, 1)


def set_form(model: nn.Module, form: str) -> None:
    """Set the form in which a model's overlapping experts run."""
    if form not in FORMS:
        raise ValueError(f"form {form!r} is not one of {FORMS}")
    for module in model.modules():
        if isinstance(module, OverlappingFFN):
            module.form = form
