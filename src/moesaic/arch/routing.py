"""Routing functions: an architecture's own router, from logits to experts and their weights.

Routing is never written down a second time here. A :class:`RoutingFunction` is the architecture's
own router with its projection taken off: the code that runs in the model decides over the logits it
is given, so softmax or sigmoid, normalised or not, scaled, grouped and biased routers are right by
construction, and a set of allowed experts is scored exactly as it will be deployed.

Shape suffixes: N tokens, E routed experts, S shared ones that the router weighs, A = E + S, K
experts a token runs, V rows of a table, X inputs of a router's decision: logits of A experts, then
the K experts that a table gives to the token, if there is one.
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
    """Names of a routed block's router and its tensors, relative to the block."""

    router: str = "gate"
    weight: str = "gate.weight"
    """Projection of hidden states to logits."""
    choice_bias: str | None = None
    """Tensor that is added to the scores only to choose experts."""
    scale: str | None = None
    """Tensor of factors by which the router multiplies the weights of chosen experts."""
    lifted: bool = False
    """True if the router takes hidden states (1, T, D) instead of (T, D)."""
    factor: str | None = None
    """Attribute of the block by which it multiplies the experts' output."""
    top_k: str = "top_k"
    """Attribute of the router, or of its config, that holds the top-k."""
    inward: bool = False
    """True if the router returns every expert's score, zero for those not chosen, and then the
    logits; a score multiplies its expert's input instead of its output."""
    apart: bool = False
    """True if the projection does not get the hidden states unchanged, or its output is not the
    router's first result: logits are then read after the projection itself."""
    table: str | None = None
    """Tensor of each token's experts (V, K), which the router only weighs; None without one."""
    key: str | None = None
    """Argument of decoder layer, block and router that holds each token's row in the table."""

    always: int = 0
    """S: number of shared experts that have rows in the router after those of the routed ones.
    Every token runs them, and their weights, which the router returns last, share in the routed
    ones' sum."""

    def in_block(self, block: nn.Module) -> RouterParts:
        """Return the parts that one block has, if routers differ by layer."""
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
        """Return a context with a function from the router's output to its decision's inputs (N,
        X)."""
        if self.table is not None:  # a router that skips returns only a part of its row
            table: Tensor = attrgetter(self.table.removeprefix(f"{self.router}."))(router)
            keys: list[Tensor] = []
            with router.register_forward_pre_hook(
                lambda _, args, kwargs: keys.extend((*args[1:], *kwargs.values())), with_kwargs=True
            ):
                yield lambda out: torch.cat(
                    [out[0].float(), table[keys.pop().flatten()].float()], -1
                )
            return
        if self.always:  # the router returns only the routed experts' logits
            inputs: list[Tensor] = []
            weight = attrgetter(self.weight.removeprefix(f"{self.router}."))(router).float()
            with router.register_forward_pre_hook(lambda _, args: inputs.append(args[0])):
                yield lambda _: F.linear(inputs.pop().flatten(0, -2).float(), weight)
            return
        if not self.apart:
            yield lambda out: out[1] if self.inward else in_order(out)[0]
            return
        last: list[Tensor] = []
        projection = router.get_submodule(self.projection)
        with projection.register_forward_hook(lambda _, args, out: last.append(out)):
            yield lambda _: last.pop()

    def read(self, router: nn.Module, out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the logits (N, E), the chosen experts' weights and their indices (N, K) of an
        output.

        Then follow the shared experts' weights (N, S), if the router weighs them.
        """
        if not self.inward:
            return in_order(out)
        scores_NE, logits_NE = out
        return (logits_NE, *scores_NE.topk(attrgetter(self.top_k)(router), dim=-1))

    def written(
        self, out: tuple[Tensor, ...], weights_NK: Tensor, chosen_NK: Tensor, *shared_NS: Tensor
    ) -> tuple[Tensor, ...]:
        """Return a router's output with other chosen experts; the inverse of :meth:`read`."""
        if not self.inward:
            logits, weights = in_order(out)[:2]
            shared = (weight_NS.to(weights.dtype) for weight_NS in shared_NS)
            return in_order((logits, weights_NK.to(weights.dtype), chosen_NK, *shared), like=out)
        scores_NE, logits_NE = out
        none_NE = torch.zeros_like(scores_NE)
        return none_NE.scatter(1, chosen_NK, weights_NK.to(scores_NE.dtype)), logits_NE

    @property
    def projection(self) -> str:
        """Path of the linear module in the router, empty if the router itself is one."""
        return self.weight.removeprefix(f"{self.router}.").rpartition(".")[0]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Prefixes of the names of all tensors that choose and weigh experts."""
        within = f"{self.router}."
        outside = self.choice_bias
        return (within,) if outside is None or outside.startswith(within) else (within, outside)


def in_order(out: tuple[Tensor, ...], like: tuple[Tensor, ...] | None = None) -> tuple[Tensor, ...]:
    """Return a router's results as logits, weights, indices; some versions return the reverse.

    Args:
        out: the results.
        like: results in whose order they are returned instead; ``out`` is then in this one.
    """
    return out if (like or out)[0].is_floating_point() else out[::-1]


def arguments(block: nn.Module, router: nn.Module) -> JSON:
    """Return the attributes that a block passes to its router besides hidden states, by name."""
    names = list(inspect.signature(type(router).forward).parameters)[2:]
    return {name: getattr(block, name) for name in names if getattr(block, name, None) is not None}


class RoutingFunction:
    """Function of a router without its projection: from logits to the true combine weights.

    Args:
        block: the routed block, which is not changed; of its weights only the choice bias is kept.
        parts: names of its router's parts.
    """

    def __init__(self, block: nn.Module, parts: RouterParts) -> None:
        router, parts = block.get_submodule(parts.router), parts.in_block(block)
        self._router = shallow_copy(router)
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
        """Choice bias or factor of each expert, whichever the router has."""
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
                twin = shallow_copy(owner.get_submodule(part))
                owner._modules[part] = twin
                owner = twin

    def fill(self, value: Callable[[str, Tensor], Tensor]) -> None:
        """Set the values of the router's tensors that have none, because their layer is closed.

        Args:
            value: function of a tensor's name in the block, and the tensor, that returns its
                values.
        """
        handed = {self._weight, f"{self._weight.removesuffix('weight')}bias", self._inside}
        for name, tensor in [*self._router.named_parameters(), *self._router.named_buffers()]:
            path = f"{self._parts.router}.{name}"
            if tensor.is_meta and name not in handed and path != self._parts.table:
                place(self._router, name, value(path, tensor))

    def with_top_k(self, top_k: int) -> RoutingFunction:
        """Return the same router with another top-k."""
        twin = copy.copy(self)
        twin._router = shallow_copy(self._router)
        set_top_k(twin._router, self._parts, top_k)
        return twin

    @property
    def top_k(self) -> int:
        """Experts that a token runs."""
        return attrgetter(self._parts.top_k)(self._router)

    def choose(self, logits_NX: Tensor, allowed_NE: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights and the indices of each token's experts (N, K).

        Args:
            logits_NX: inputs of the router's decision, one row per token.
            allowed_NE: bool; the available experts. None: all.
        """
        weights_NK, chosen_NK = self.routed(logits_NX, allowed_NE)[1:3]
        return weights_NK if self.factor == 1.0 else weights_NK * self.factor, chosen_NK

    def weigh(self, logits_NX: Tensor, allowed_NE: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights and indices, with weighed shared experts from index E on (N, K + S)."""
        if not self.always:
            return self.choose(logits_NX, allowed_NE)
        _, weights_NK, chosen_NK, shared_NS = self.routed(logits_NX, allowed_NE)
        number_S = self.count + torch.arange(self.always, device=chosen_NK.device)
        skipped_NK = chosen_NK == self.count
        chosen_NK = chosen_NK.masked_fill(skipped_NK, self.count + self.always)
        chosen_NA = torch.cat([chosen_NK, number_S.expand(len(chosen_NK), -1)], 1)
        return torch.cat([weights_NK, shared_NS], 1) * self.factor, chosen_NA

    @torch.no_grad()
    def routed(self, logits_NX: Tensor, allowed_NE: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the router's output, as :meth:`RouterParts.read` does, for allowed experts only.

        Its logits are the given ones, unless it changes them.
        """
        bias_E, handed, weighed = self.bias_E, self._handed, self.count + self.always
        logits_NA, table_NK = logits_NX[:, :weighed], logits_NX[:, weighed:].long()
        if self._parts.table is not None and self._parts.key is not None:
            table_NK = table_NK[:, : self.top_k]
            if allowed_NE is not None:
                table_NK = replace_removed(table_NK, allowed_NE)
            place(self._router, self._parts.table.removeprefix(f"{self._parts.router}."), table_NK)
            rows_N = torch.arange(len(table_NK), device=table_NK.device)
            handed = {**handed, self._parts.key: rows_N}
        if allowed_NE is not None:
            there_NA = F.pad(allowed_NE, (0, self.always), value=True)
            # softmax and sigmoid of it are exactly zero, and its products are finite
            lowest = torch.finfo(logits_NA.dtype).min / 4
            logits_NA = logits_NA.masked_fill(~there_NA, lowest)
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
        """Return w, every expert's combine weight, zero if not chosen (N, E), float32."""
        return self.every_weight(logits_NX, allowed_NE)[:, : self.count]

    def every_weight(self, logits_NX: Tensor, allowed_NE: Tensor | None = None) -> Tensor:
        """Return w, followed by the weights of shared experts that the router weighs (N, A)."""
        weights_NK, chosen_NK = self.weigh(logits_NX, allowed_NE)
        places = self.count + self.always + 1  # the last for skipped experts, whose index it is
        w_NA = torch.zeros(len(weights_NK), places, dtype=torch.float32, device=weights_NK.device)
        return w_NA.scatter_(1, chosen_NK, weights_NK.float())[:, :-1]


def replace_removed(table_NK: Tensor, allowed_NE: Tensor) -> Tensor:
    """Return a table's experts with removed ones replaced.

    A token runs the first K available of its own, in their order, and then of all others in order
    of index, starting after its first one and wrapping round: so that replacements share the
    tokens.

    Args:
        table_NK: int64: each token's own experts.
        allowed_NE: bool: the available experts, at least K.

    >>> table = torch.tensor([[0, 2], [3, 1], [1, 0]])
    >>> replace_removed(table, torch.tensor([True, False, True, True]).expand(3, 4)).tolist()
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
    """Replace a module's tensor, also a parameter, and return the module that holds it."""
    owner, _, leaf = name.rpartition(".")
    holder = module.get_submodule(owner)
    table = "_buffers" if leaf in holder._buffers else "_parameters"
    vars(holder)[table][leaf] = tensor
    return holder


class FixedOutput(nn.Module):
    """Replacement of a projection that returns fixed logits for any input."""

    def __init__(self, logits_NE: Tensor) -> None:
        super().__init__()
        self.logits_NE = logits_NE

    def forward(self, x: Tensor) -> Tensor:
        return self.logits_NE


def set_top_k(router: nn.Module, parts: RouterParts, top_k: int) -> None:
    """Set a router's top-k; a table of experts keeps its first columns."""
    table = (parts.table or "").removeprefix(f"{parts.router}.")
    if table in dict(router.named_buffers()):
        place(router, table, router.get_buffer(table)[:, :top_k])
    owner, _, leaf = parts.top_k.rpartition(".")
    if owner:  # other modules have the same config
        setattr(router, owner, copy.copy(getattr(router, owner)))
    setattr(getattr(router, owner) if owner else router, leaf, top_k)


def shallow_copy(module: M) -> M:
    """Return a shallow copy with its own dictionaries of tensors and modules, and no hooks."""
    twin = copy.copy(module)
    for table in ("_parameters", "_buffers", "_modules"):
        twin.__dict__[table] = dict(module.__dict__[table])
    for table in ("_forward_hooks", "_forward_pre_hooks"):
        twin.__dict__[table] = OrderedDict()
    twin.__dict__.pop("forward", None)  # a hook of device_map's, which calls the original
    return twin
