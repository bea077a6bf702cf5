"""Modules of cut or condensed mixtures: dense MLPs, routers that skip, experts of several widths.

Shape suffixes: T tokens, K experts a token runs, E experts, D hidden size, W neurons of the widest
expert, N tokens of one expert, H neurons of one, R neurons of all experts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from moesaic.arch.mixture import Experts, each_with_its_tokens
from moesaic.arch.routing import in_order
from moesaic.registry import Dynamic, remade


class CondensedFFN(nn.Module):
    """MLP without biases: ``y = down(act(gate x) * up x)`` (CD-MoE, Eq. 3).

    Fixed expert weights are folded into the down projection. If the base scales its shared path by
    a gate for each token, the first ``gated`` neurons are that path and ``shared_gate`` scales
    them: sigmoid(g x) down(h) = down(sigmoid(g x) h).

    Args:
        hidden_size: D.
        width: number of neurons; 0 for a block that adds nothing.
        act: the base's activation function.
        names: names of gate, up and down.
        gated: number of neurons that the shared path's gate scales.
        more: True if the base's block returns a pair, whose second part is for the router's loss.
        device: device of the new parameters.
        dtype: their dtype.
    """

    def __init__(
        self,
        hidden_size: int,
        width: int,
        act: Callable[[Tensor], Tensor],
        names: tuple[str, str, str],
        gated: int = 0,
        more: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        with warnings.catch_warnings():  # torch warns of an empty matrix, which is intended
            warnings.simplefilter("ignore", UserWarning)
            for name, (rows, columns) in shapes(names, hidden_size, width).items():
                linear = nn.Linear(columns, rows, bias=False, device=device, dtype=dtype)
                self.add_module(name, linear)
        self.act_fn, self.names = act, names
        self.gated, self.more = gated, more
        if gated:
            self.shared_gate = nn.Linear(hidden_size, 1, bias=False, device=device, dtype=dtype)

    @property
    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        """Gate, up and down."""
        gate, up, down = (getattr(self, name) for name in self.names)
        return gate, up, down

    def forward(self, x: Tensor, **_: object) -> Tensor | tuple[Tensor, None]:
        """Return the block's output, of the shape of its input (..., D).

        Other arguments of the base's block are for its router, and are ignored.
        """
        return (self.output(x), None) if self.more else self.output(x)

    def output(self, x: Tensor) -> Tensor:
        """Return only the output, never a pair."""
        gate, up, down = self.projections
        h = self.act_fn(gate(x)) * up(x)
        if self.gated:
            scale = torch.sigmoid(self.shared_gate(x))
            h = torch.cat([scale * h[..., : self.gated], h[..., self.gated :]], -1)
        return down(h)

    def extra_repr(self) -> str:
        return f"gated={self.gated}" if self.gated else ""


def shapes(
    names: tuple[str, str, str], hidden_size: int, width: int = 0
) -> dict[str, tuple[int, int]]:
    """Return the shapes of gate, up and down by name."""
    rows, columns = (width, hidden_size), (hidden_size, width)
    return dict(zip(names, (rows, rows, columns), strict=True))


class Nothing(nn.Module):
    """Replacement of a path beside the block that was folded into the block: it adds zero."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class PassThrough(nn.Module):
    """Removed decoder layer: no attention, no neurons, its input is its output."""

    def __init__(self, hidden_size: int, ffn_path: str, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.self_attn = nn.Identity()
        setattr(self, ffn_path, CondensedFFN(hidden_size, 0, nn.Identity(), names))

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        return hidden_states


RULES = ("top2", "tail")


def survivors(weights_TK: Tensor, beta: float, rule: str) -> Tensor:
    """Return the kept experts of a token, for weights in falling order (T, K), bool.

    ``top2``: the second is skipped if w_2 < beta w_1 (NAEE, Sec. 3.3). ``tail``: the first i are
    kept, for the smallest i for which the others sum to less than beta times the sum of all (App.
    A.2).

    >>> w = torch.tensor([[0.6, 0.4], [0.9, 0.1]])
    >>> survivors(w, 0.5, "top2").tolist(), survivors(w, 1 / 3, "tail").tolist()
    ([[True, True], [True, False]], [[True, True], [True, False]])
    """
    if rule == "top2":
        kept_TK = torch.ones_like(weights_TK, dtype=torch.bool)
        kept_TK[:, 1] = weights_TK[:, 1] >= beta * weights_TK[:, 0]
        return kept_TK
    tail_TK = weights_TK.flip(-1).cumsum(-1).flip(-1)  # the weight of the experts from here on
    kept_TK = tail_TK >= beta * tail_TK[:, :1]
    kept_TK[:, 0] = True
    return kept_TK


def skip(
    weights_TK: Tensor, chosen_TK: Tensor, beta: float, rule: str, count: int
) -> tuple[Tensor, Tensor]:
    """Return the weights and indices of the kept experts, heaviest first.

    Kept experts take over the weight of the skipped ones, in proportion. A skipped place has weight
    0 and the index ``count``, which no expert has.

    >>> skip(torch.tensor([[0.1, 0.9]]), torch.tensor([[4, 2]]), 0.5, "top2", 8)
    (tensor([[1., 0.]]), tensor([[2, 8]]))
    """
    weights_TK, order_TK = weights_TK.sort(dim=-1, descending=True, stable=True)
    chosen_TK = chosen_TK.gather(-1, order_TK)
    exact_TK = weights_TK.float()
    kept_TK = survivors(exact_TK, beta, rule)
    left_TK = exact_TK.masked_fill(~kept_TK, 0)
    scale_T1 = exact_TK.sum(-1, keepdim=True) / left_TK.sum(-1, keepdim=True)
    whole_T1 = kept_TK.all(-1, keepdim=True)
    left_TK = torch.where(whole_T1, weights_TK, (left_TK * scale_T1).to(weights_TK.dtype))
    return left_TK, chosen_TK.masked_fill(~kept_TK, count)


@remade
def _skipping(base: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a router's class that skips: same weights, same names."""

    @wraps(base.forward)  # other code reads a router's arguments from its signature
    def forward(self: Any, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, ...]:
        out = base.forward(self, *args, **kwargs)
        logits, weights, chosen, *shared = in_order(out)
        kept = skip(weights, chosen, self.beta, self.rule, logits.shape[-1])
        return in_order((logits, *kept, *shared), like=out)

    return Dynamic(f"Skipping{base.__name__}", (base,), {"forward": forward})  # type: ignore[return-value]


def make_skipping(router: nn.Module, beta: float, rule: str, experts: Experts) -> None:
    """Make a router skip, in place, and let its experts accept skipped places."""
    if rule not in RULES:
        raise ValueError(f"rule {rule!r} is not one of {RULES}")
    router.__class__ = _skipping(type(router))
    vars(router).update(beta=beta, rule=rule)
    # transformers' flag for chosen experts that are elsewhere, whose index is the count
    experts._is_expert_parallel = True


UP_ROWS, DOWN_ROWS = "gate_up_rows", "down_rows"
"""Names of tensors: each expert's gates, then ups (2 R, D); columns of its down projection (R,
D)."""


class _UnevenExperts(nn.Module):
    """Mixin for the class of a layer's experts: each has its own width.

    Every neuron is stored once, without zeros.
    """

    slices: Sequence[tuple[int, int]]
    """First row of each expert in ``down_rows``, and the row after its last."""
    gate_up_rows: Tensor
    down_rows: Tensor
    _apply_gate: Callable[[Tensor], Tensor]

    @property
    def widths(self) -> tuple[int, ...]:
        """Neurons of each expert."""
        return tuple(stop - start for start, stop in self.slices)

    def weights_of(self, number: int) -> tuple[Tensor, Tensor]:
        """Return gates and ups of an expert (2 H, D), and its down projection transposed (H, D)."""
        start, stop = self.slices[number]
        return self.gate_up_rows[2 * start : 2 * stop], self.down_rows[start:stop]

    @property
    def gate_up_proj(self) -> Tensor:
        """Copy in the base's layout, padded with zeros (E, 2 W, D)."""
        every = (self.weights_of(number)[0] for number in range(len(self.slices)))
        halves = [half_HD for both_HD in every for half_HD in both_HD.chunk(2)]
        return pad_sequence(halves, batch_first=True).view(len(self.slices), -1, halves[0].shape[1])

    @property
    def down_proj(self) -> Tensor:
        """Copy in the base's layout, padded with zeros (E, D, W)."""
        downs = [self.weights_of(number)[1] for number in range(len(self.slices))]
        return pad_sequence(downs, batch_first=True).mT.contiguous()

    # Group sizes differ by call: if traced, each of them would be compiled anew.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y_TD = torch.zeros_like(hidden_states)
        experts = each_with_its_tokens(top_k_index, top_k_weights, len(self.slices))
        for number, rows, weights_N1 in experts:
            both, down_HD = self.weights_of(number)
            h_NH = self._apply_gate(F.linear(hidden_states[rows], both))
            y_TD.index_add_(0, rows, ((h_NH @ down_HD) * weights_N1).to(y_TD.dtype))
        return y_TD


@remade
def _uneven(base: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a layer's experts whose widths may differ."""
    return Dynamic(f"Uneven{base.__name__}", (_UnevenExperts, base), {})  # type: ignore[return-value]


def make_uneven(experts: Experts, widths: Sequence[int]) -> None:
    """Give routed experts widths of their own, in place; new parameters are on the meta device.

    Args:
        experts: the module of all of a layer's experts.
        widths: neurons of each.
    """
    like = experts.down_proj
    hidden_size, every = like.shape[1], sum(widths)
    vars(experts)["slices"] = tuple(pairwise(accumulate(widths, initial=0)))
    for name, rows in ((UP_ROWS, 2 * every), (DOWN_ROWS, every)):
        new = torch.empty(rows, hidden_size, dtype=like.dtype, device="meta")
        experts.register_parameter(name, nn.Parameter(new, requires_grad=like.requires_grad))
    del experts.gate_up_proj, experts.down_proj
    experts.num_experts = len(widths)
    experts.__class__ = _uneven(type(experts))  # type: ignore[assignment]


def flat(gate_up_EWD: Tensor, down_EDW: Tensor, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return both tensors of uneven experts, from those of padded experts.

    Args:
        gate_up_EWD: gates, then ups, of each expert (E, 2 W, D).
        down_EDW: down projections (E, D, W).
        widths: neurons of each.

    >>> gates = torch.tensor([[[1.0], [0.0], [3.0], [0.0]], [[5.0], [6.0], [7.0], [8.0]]])
    >>> [t.flatten().tolist() for t in flat(gates, torch.ones(2, 1, 2), (1, 2))]
    [[1.0, 3.0, 5.0, 6.0, 7.0, 8.0], [1.0, 1.0, 1.0]]
    """
    parts = []
    for both_WD, width in zip(gate_up_EWD, widths, strict=True):
        parts += [half_WD[:width] for half_WD in both_WD.chunk(2)]
    downs = [down_DW[:, :w].T for down_DW, w in zip(down_EDW, widths, strict=True)]
    return torch.cat(parts), torch.cat(downs)
