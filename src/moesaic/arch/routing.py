"""An architecture's own routing function: logits in, experts and their weights out.

Routing is never written down a second time here. A :class:`RoutingFunction` is the architecture's
own router with its projection taken off: the code that runs in the model decides over the logits it
is given, so softmax or sigmoid, normalised or not, scaled, grouped and biased routers are right by
construction, and a set of allowed experts is scored exactly as it will be deployed.

Shape suffixes: N tokens, E routed experts, S shared ones that the router weighs, A = E + S, K
experts a token runs, V numbers of tokens, X what a router decides on: logits of A experts, behind
them the K that a table gives to the token, if it does.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.types import JSON

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class RouterParts:
    """Where a routed block's router and its tensors are; tensors' paths are the block's."""

    router: str = "gate"
    weight: str = "gate.weight"
    """The projection of hidden states to logits."""
    choice_bias: str | None = None
    """A tensor that is added to the scores only to choose experts."""
    scale: str | None = None
    """A tensor of factors by which the router multiplies the weights of chosen experts."""
    lifted: bool = False
    """The router asks for sentences: hidden states (1, T, D) instead of (T, D)."""
    factor: str | None = None
    """The block's own attribute by which it multiplies what the experts make."""
    top_k: str = "top_k"
    """The router's own number of experts a token, or that of its config."""
    inward: bool = False
    """The router returns every expert's score, zero where it is not chosen, and then the logits; a
    score multiplies what its expert is given instead of what it makes."""
    apart: bool = False
    """The projection is not given hidden states as they are, or what it makes is not what the
    router says first: logits are seen behind the projection itself."""
    table: str | None = None
    """A tensor of each token's experts (V, K), which the router weighs and does not choose; not
    every layer has it."""
    key: str | None = None
    """The argument of decoder layer, block and router that says where in the table a token is."""

    always: int = 0
    """S: shared experts of which the router has rows behind those of the routed ones. Every token
    runs them, and their weights, which the router returns last, share in the routed ones' sum."""

    def in_block(self, block: nn.Module) -> RouterParts:
        """Those that one block has, where routers differ from layer to layer."""
        names = {n for n, _ in [*block.named_parameters(), *block.named_buffers()]}

        def there(path: str | None) -> str | None:
            return path if path in names else None

        parts = replace(
            self,
            choice_bias=there(self.choice_bias),
            scale=there(self.scale),
            table=there(self.table),
        )
        return parts if parts.table else replace(parts, key=None)

    @contextmanager
    def projected(self, router: nn.Module) -> Iterator[Callable[[tuple[Tensor, ...]], Tensor]]:
        """Inside, a function from what the router returns to what it decided on (N, X)."""
        if self.table is not None:  # a router that skips says not all of its row
            table: Tensor = attrgetter(self.table.removeprefix(f"{self.router}."))(router)
            keys: list[Tensor] = []
            with router.register_forward_pre_hook(
                lambda _, args, kwargs: keys.extend((*args[1:], *kwargs.values())), with_kwargs=True
            ):
                yield lambda out: torch.cat(
                    [out[0].float(), table[keys.pop().flatten()].float()], -1
                )
            return
        if self.always:  # the router says only what the routed experts' logits are
            inputs: list[Tensor] = []
            weight = attrgetter(self.weight.removeprefix(f"{self.router}."))(router).float()
            with router.register_forward_pre_hook(lambda _, args: inputs.append(args[0])):
                yield lambda _: F.linear(inputs.pop().flatten(0, -2).float(), weight)
            return
        if not self.apart:
            yield lambda out: out[1 if self.inward else 0]
            return
        last: list[Tensor] = []
        projection = router.get_submodule(self.projection)
        with projection.register_forward_hook(lambda _, args, out: last.append(out)):
            yield lambda _: last.pop()

    def read(self, router: nn.Module, out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The logits (N, E), the chosen experts' weights and their numbers (N, K) of an output.

        Behind them the shared experts' weights (N, S), where the router weighs them.
        """
        if not self.inward:
            return out
        scores_NE, logits_NE = out
        return (logits_NE, *scores_NE.topk(attrgetter(self.top_k)(router), dim=-1))

    def written(
        self, out: tuple[Tensor, ...], weights_NK: Tensor, chosen_NK: Tensor, *shared_NS: Tensor
    ) -> tuple[Tensor, ...]:
        """A router's output as it would be with other experts; the inverse of :meth:`read`."""
        if not self.inward:
            shared = (weight_NS.to(out[1].dtype) for weight_NS in shared_NS)
            return out[0], weights_NK.to(out[1].dtype), chosen_NK, *shared
        scores_NE, logits_NE = out
        none_NE = torch.zeros_like(scores_NE)
        return none_NE.scatter(1, chosen_NK, weights_NK.to(scores_NE.dtype)), logits_NE

    @property
    def projection(self) -> str:
        """The path of the linear module in the router, empty where the router is it."""
        return self.weight.removeprefix(f"{self.router}.").rpartition(".")[0]

    @property
    def tensors(self) -> tuple[str, ...]:
        """The starts of the names of all tensors that choose and weigh experts."""
        within = f"{self.router}."
        outside = self.choice_bias
        return (within,) if outside is None or outside.startswith(within) else (within, outside)


def arguments(block: nn.Module, router: nn.Module) -> JSON:
    """What a block hands its router beside hidden states: attributes of its own, by name."""
    names = list(inspect.signature(type(router).forward).parameters)[2:]
    return {name: getattr(block, name) for name in names if getattr(block, name, None) is not None}


def _floor(dtype: torch.dtype) -> float:
    """A logit whose softmax and sigmoid are exactly zero, and that stays finite in products."""
    return torch.finfo(dtype).min / 4


class RoutingFunction:
    """A router without its projection: logits in, the true combine weights out.

    Args:
        block: the routed block; not changed, and nothing of its weights is kept but the choice
            bias.
        parts: where its router keeps what.
    """

    def __init__(self, block: nn.Module, parts: RouterParts) -> None:
        router, parts = block.get_submodule(parts.router), parts.in_block(block)
        self._router = unbound(router)
        self._forward = type(router).forward
        self._parts = parts
        self._handed = arguments(block, router)
        self._weight = parts.weight.removeprefix(f"{parts.router}.")
        weight: Tensor = attrgetter(parts.weight)(block)
        rows, self.hidden = weight.shape
        self.always, self.count = parts.always, rows - parts.always
        if hasattr(self._router, "hidden_dim") and not parts.apart:
            vars(self._router)["hidden_dim"] = rows
        self.factor = 1.0 if parts.factor is None else float(getattr(block, parts.factor))
        self.bias_E: Tensor | None = None
        """By expert what the router adds to choose, or its factor: it has one or the other."""
        within = f"{parts.router}."
        self._inside = self._outside = None
        vector = parts.choice_bias or parts.scale
        if vector is not None:
            self.bias_E = attrgetter(vector)(block).detach().flatten()
            self._inside = vector.removeprefix(within)
            if not vector.startswith(within):
                self._inside, self._outside = None, vector
        for path in (self._weight, self._inside or ""):
            owner = self._router
            for part in path.split(".")[:-1]:
                twin = unbound(owner.get_submodule(part))
                owner._modules[part] = twin
                owner = twin

    def fill(self, value: Callable[[str, Tensor], Tensor]) -> None:
        """Give values to the router's tensors that have none: those of a layer that is closed.

        Args:
            value: of a tensor by its name in the block, and itself.
        """
        handed = {self._weight, f"{self._weight.removesuffix('weight')}bias", self._inside}
        for name, tensor in [*self._router.named_parameters(), *self._router.named_buffers()]:
            path = f"{self._parts.router}.{name}"
            if tensor.is_meta and name not in handed and path != self._parts.table:
                place(self._router, name, value(path, tensor))

    def of_fewer(self, top_k: int) -> RoutingFunction:
        """The same router with another number of experts a token."""
        twin = copy.copy(self)
        twin._router = unbound(self._router)
        set_top_k(twin._router, self._parts, top_k)
        return twin

    @property
    def top_k(self) -> int:
        """Experts that a token runs."""
        return attrgetter(self._parts.top_k)(self._router)

    @torch.no_grad()
    def choose(self, logits_NX: Tensor, allowed_NE: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The weights and the numbers of each token's experts (N, K).

        Args:
            logits_NX: what the router decides on, one row a token.
            allowed_NE: bool; the experts that are there. None: all.
        """
        weights_NK, chosen_NK = self._routed(logits_NX, allowed_NE)[1:3]
        return weights_NK if self.factor == 1.0 else weights_NK * self.factor, chosen_NK

    @torch.no_grad()
    def weigh(self, logits_NX: Tensor, allowed_NE: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same with shared experts that the router weighs, numbered E on (N, K + S)."""
        if not self.always:
            return self.choose(logits_NX, allowed_NE)
        _, weights_NK, chosen_NK, shared_NS = self._routed(logits_NX, allowed_NE)
        number_S = self.count + torch.arange(self.always, device=chosen_NK.device)
        skipped_NK = chosen_NK == self.count
        chosen_NK = chosen_NK.masked_fill(skipped_NK, self.count + self.always)
        chosen_NA = torch.cat([chosen_NK, number_S.expand(len(chosen_NK), -1)], 1)
        return torch.cat([weights_NK, shared_NS], 1) * self.factor, chosen_NA

    @torch.no_grad()
    def restricted(self, logits_NX: Tensor, allowed_NE: Tensor) -> tuple[Tensor, ...]:
        """What the router itself hands its block, of allowed experts only (N, K)."""
        return self._routed(logits_NX, allowed_NE)[1:]

    @torch.no_grad()
    def reported(self, logits_NX: Tensor) -> Tensor:
        """The logits that the router says it was given: these, unless it changes them."""
        return self._routed(logits_NX, None)[0].flatten(0, -2)

    def _routed(self, logits_NX: Tensor, allowed_NE: Tensor | None) -> tuple[Tensor, ...]:
        bias_E, handed, weighed = self.bias_E, self._handed, self.count + self.always
        logits_NA, table_NK = logits_NX[:, :weighed], logits_NX[:, weighed:].long()
        if self._parts.table is not None and self._parts.key is not None:
            table_NK = table_NK[:, : self.top_k]
            if allowed_NE is not None:
                table_NK = replaced(table_NK, allowed_NE)
            place(self._router, self._parts.table.removeprefix(f"{self._parts.router}."), table_NK)
            rows_N = torch.arange(len(table_NK), device=table_NK.device)
            handed = {**handed, self._parts.key: rows_N}
        if allowed_NE is not None:
            there_NA = F.pad(allowed_NE, (0, self.always), value=True)
            logits_NA = logits_NA.masked_fill(~there_NA, _floor(logits_NA.dtype))
            if bias_E is not None and self._parts.scale is None:
                bias_E = bias_E.to(logits_NA.device).masked_fill(~allowed_NE, float("-inf"))
        x_NA = logits_NA
        if self._parts.apart:
            owner, _, leaf = self._parts.projection.rpartition(".")
            self._router.get_submodule(owner)._modules[leaf] = FixedOutput(logits_NA)
            others = (p for n, p in self._router.named_parameters() if n != self._inside)
            device = next((p.device for p in others), logits_NA.device)  # meta, of a closed layer
            x_NA = logits_NA.new_zeros(len(logits_NA), self.hidden, device=device)
        else:
            eye_AA = torch.eye(weighed, dtype=logits_NA.dtype, device=logits_NA.device)
            projection = place(self._router, self._weight, eye_AA)
            if projection._parameters.get("bias") is not None:
                bias = f"{self._weight.removesuffix('weight')}bias"
                place(self._router, bias, logits_NA.new_zeros(weighed))
        if self._inside is not None and bias_E is not None:
            place(self._router, self._inside, bias_E.to(logits_NA.device))
        if self._outside is not None and bias_E is not None:
            handed = {**handed, self._outside: bias_E.to(logits_NA.device)}
        if self._parts.lifted:
            x_NA = x_NA[None]
        return self._parts.read(self._router, self._forward(self._router, x_NA, **handed))

    def weights(self, logits_NX: Tensor, allowed_NE: Tensor | None = None) -> Tensor:
        """w, the combine weight of every expert, zero for those not chosen (N, E), float32."""
        return self.every_weight(logits_NX, allowed_NE)[:, : self.count]

    def every_weight(self, logits_NX: Tensor, allowed_NE: Tensor | None = None) -> Tensor:
        """The same, and behind them those of shared experts that the router weighs (N, A)."""
        weights_NK, chosen_NK = self.weigh(logits_NX, allowed_NE)
        places = self.count + self.always + 1  # the last for skipped experts, which have its number
        w_NA = torch.zeros(len(weights_NK), places, dtype=torch.float32, device=weights_NK.device)
        return w_NA.scatter_(1, chosen_NK, weights_NK.float())[:, :-1]


def replaced(table_NK: Tensor, allowed_NE: Tensor) -> Tensor:
    """A table's experts where only some are there: others in the place of those that are not.

    A token runs the first K that are there of its own, in their order, and then of all others by
    number, from behind its first one on and round: so that those who come in share the tokens.

    Args:
        table_NK: int64: each token's own experts.
        allowed_NE: bool: the experts that are there, K at least.

    >>> table = torch.tensor([[0, 2], [3, 1], [1, 0]])
    >>> replaced(table, torch.tensor([True, False, True, True]).expand(3, 4)).tolist()
    [[0, 2], [3, 0], [0, 2]]
    """
    (tokens, k), count = table_NK.shape, allowed_NE.shape[1]
    number_E = torch.arange(count, device=table_NK.device)
    place_NE = k + (number_E - table_NK[:, :1] - 1) % count
    order_NK = torch.arange(k, device=table_NK.device).expand(tokens, k)
    place_NE = place_NE.scatter(1, table_NK, order_NK).masked_fill(~allowed_NE, k + count)
    first_NK = place_NE.topk(k, dim=1, largest=False, sorted=True).indices
    whole_N1 = allowed_NE.gather(1, table_NK).all(1, keepdim=True)
    return torch.where(whole_N1, table_NK, first_NK)


def place(module: nn.Module, name: str, tensor: Tensor) -> nn.Module:
    """Put a tensor in place of a module's own, be that a parameter; returns what holds it."""
    owner, _, leaf = name.rpartition(".")
    holder = module.get_submodule(owner)
    table = "_buffers" if leaf in holder._buffers else "_parameters"
    vars(holder)[table][leaf] = tensor
    return holder


class FixedOutput(nn.Module):
    """Stands for a projection, and says logits whatever it is given."""

    def __init__(self, logits_NE: Tensor) -> None:
        super().__init__()
        self.logits_NE = logits_NE

    def forward(self, x: Tensor) -> Tensor:
        return self.logits_NE


def set_top_k(router: nn.Module, parts: RouterParts, top_k: int) -> None:
    """Let a router choose another number of experts a token; of a table's, the first ones."""
    table = (parts.table or "").removeprefix(f"{parts.router}.")
    if table in dict(router.named_buffers()):
        place(router, table, router.get_buffer(table)[:, :top_k])
    owner, _, leaf = parts.top_k.rpartition(".")
    if owner:  # other modules have the same config
        setattr(router, owner, copy.copy(getattr(router, owner)))
    setattr(getattr(router, owner) if owner else router, leaf, top_k)


def unbound(module: M) -> M:
    """A shallow copy with tables of tensors and modules of its own, and no hooks."""
    twin = copy.copy(module)
    for table in ("_parameters", "_buffers", "_modules"):
        twin.__dict__[table] = dict(module.__dict__[table])
    for table in ("_forward_hooks", "_forward_pre_hooks"):
        twin.__dict__[table] = OrderedDict()
    twin.__dict__.pop("forward", None)  # a hook of device_map's, which calls the original
    return twin
