"""Eq. 3 of NAEE: the exact error of a layer's routed output for any set of kept experts.

Equation numbers are the paper's (Lu et al., 2024).

==================  ==========================================================
C                   the kept experts
w, w'               combine weights of a token, with all experts and with C (T, A)
f_i(x)              output of expert i
F(x), F'(x, C)      output of the experts, with all and with C
G_t                 <f_i(x_t), f_j(x_t)>: the Gram matrix of a token (A, A)
==================  ==========================================================

Experts are the E routed ones, followed by the shared ones if the router weighs these too: all A
whose weights may change.

Eq. 3: C minimises ||F'(x, C) - F(x)||_F. With every expert's output known once,

    ||F'(x, C) - F(x)||^2 = sum_t (w'_t - w_t)^T G_t (w'_t - w_t),

so a set costs its routing and a small quadratic form: exact, and no layer is run again.

When one expert is removed or restored, only the rerouted tokens are computed
(:class:`_Rerouting`). A token's squared error is

    |f(C)|^2 - 2 <f(C), y> + |y|^2,    |f(C)|^2 = w'^T G w',    <f(C), y> = w'^T (G w + c),

y being the target and c_j = <f_j, delta>. Both terms need the few experts that the token runs. If
an expert is removed, each token that runs it takes the next one in its order. All others do not
change, or, if the router's weights are a softmax that is not renormalised, all their weights grow
by one factor, and the two terms by its square and by itself.

Which of the two a router does is found by running it (:func:`law_of`), and it is run again for the
rerouted tokens. Routers of another kind (groups, biases added to a softmax) follow no such law, and
their sets are scored one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.arch.routing import RoutingFunction
from moesaic.methods.prune.subsets import Neighbours
from moesaic.observation.stats import packed_places, unpacked

ROWS = 1 << 22
"""Elements in one block of tokens times experts."""
ASKED = 2048
"""Tokens on which a router is run to find its law."""
REMEMBERED = 3
"""Number of sets whose rows are cached, as starting points for sets that differ in one expert."""


class Law(Enum):
    """Change of the weights of tokens that do not run an expert when it is removed."""

    STAY = "nothing changes"
    GROW = "their weights grow as those of a softmax over fewer"


@torch.no_grad()
def law_of(routing: RoutingFunction, logits_SX: Tensor) -> Law | None:
    """Return the law that a router follows, found by removing experts at random; None if neither.

    The router runs on logits of real tokens, with a little noise so that none are equal.
    """
    generator = torch.Generator().manual_seed(0)
    step, count = max(1, len(logits_SX) // ASKED), routing.count
    logits_TX = logits_SX[::step].double().cpu()
    tokens, logits_TE = len(logits_TX), logits_TX[:, :count]
    noise_TE = torch.rand(logits_TE.shape, generator=generator, dtype=torch.float64)
    logits_TE += 1e-3 * logits_TE.std() * noise_TE
    logits_TX, logits_TE = (x.float().to(logits_SX.device) for x in (logits_TX, logits_TE))
    laws = set(Law)
    for kept in (count, (3 * count) // 4, count // 2):
        order_TE = torch.rand(tokens, count, generator=generator).argsort(1).to(logits_TX.device)
        many_TE = order_TE < kept
        w_TK, chosen_TK = routing.choose(logits_TX, many_TE)
        if kept <= chosen_TK.shape[1] or chosen_TK.max() >= count:
            return None
        few_TE = many_TE & (torch.rand(tokens, count, generator=generator) < 0.5).to(many_TE.device)
        few_TE = few_TE.scatter(1, chosen_TK, True)
        v_TK, again_TK = routing.choose(logits_TX, few_TE)
        chosen_TK, by_TK = chosen_TK.sort(1)
        again_TK, at_TK = again_TK.sort(1)
        if not torch.equal(chosen_TK, again_TK):
            return None
        w_TK, v_TK = w_TK.gather(1, by_TK).double(), v_TK.gather(1, at_TK).double()
        share_TE = logits_TE.double().softmax(1)
        growth_T1 = (share_TE * many_TE).sum(1, True) / (share_TE * few_TE).sum(1, True)
        for law, factor in ((Law.STAY, 1.0), (Law.GROW, growth_T1)):
            if not torch.allclose(v_TK, w_TK * factor, rtol=1e-4, atol=1e-7):
                laws.discard(law)
    return next((law for law in Law if law in laws), None)


class _Rows(NamedTuple):
    """Routing of tokens with a set of experts present (row 0) and with one of the chosen removed.

    Shape suffixes: S tokens, R = K + 1 rows a token, K experts that it runs.
    """

    chosen_SRK: Tensor
    """Routed experts, int16."""
    square_SR: Tensor
    """|f|^2 of the output, float64."""
    inner_SR: Tensor
    """<f, y>, float64."""
    share_SR: Tensor
    """Softmax mass of the present experts, float64; ones if the law is not GROW."""

    def put(self, tokens_N: Tensor, rows: _Rows) -> _Rows:
        """Return these rows, with those of some tokens replaced."""
        pairs = zip(self, rows, strict=True)
        return _Rows(*(mine.index_copy(0, tokens_N, theirs) for mine, theirs in pairs))


class _Rerouting:
    """Squared errors of sets of experts that differ in one expert from a known set.

    Args:
        exact: the errors of any sets, for its layer.
        law: the law that the layer's router follows.
    """

    def __init__(self, exact: Reconstruction, law: Law) -> None:
        stats, self.routing, self.device = exact.stats, exact.routing, exact.device
        self.grows = law is Law.GROW
        self.count, self.weighed = self.routing.count, self.routing.count + self.routing.always
        self.logits_SX, self.batch_S, self.batches = exact.logits_SX, exact.batch_S, exact.batches
        self.every = torch.arange(len(self.logits_SX), device=self.device)
        self.gram_N = stats["gram_SP"].to(self.device).flatten()
        self.pairs = stats["gram_SP"].shape[1]
        self.place_AA = packed_places(self.weighed).to(self.device)
        self._remembered: list[tuple[Tensor, _Rows]] = []
        every = self.every
        self.inner_SA = torch.zeros(
            len(every), self.weighed, dtype=torch.float64, device=self.device
        )
        self.target_S = torch.zeros(len(every), dtype=torch.float64, device=self.device)
        self.level_SE = torch.full(
            (len(every), self.count), -1, dtype=torch.int16, device=self.device
        )
        cross = "delta_S" in stats
        for at in every.split(max(1, ROWS // self.count)):
            w_NK, chosen_NK = self._choose(at, None)
            gram_NKA = self._gram(at, self.place_AA[chosen_NK])
            inner_NA = (w_NK.unsqueeze(1) @ gram_NKA).squeeze(1)
            square_N = (w_NK * inner_NA.gather(1, chosen_NK)).sum(1)
            target_N = square_N
            if cross:
                cross_NA = stats["cross_SA"][at.cpu()].to(self.device)
                target_N = square_N + 2 * (w_NK * cross_NA.gather(1, chosen_NK)).sum(1)
                target_N = target_N + stats["delta_S"][at.cpu()].to(self.device)
                inner_NA = inner_NA + cross_NA
            self.inner_SA[at], self.target_S[at] = inner_NA, target_N
            self.level_SE[at] = self._levels(at)
        logits_SE = self.logits_SX[:, : self.count]
        self.share_SE = logits_SE.double().softmax(1) if self.grows else None

    def _levels(self, tokens_N: Tensor) -> Tensor:
        """Return each token's order of experts in levels of K, by running the router (N, E)."""
        left_NE = torch.ones(len(tokens_N), self.count, dtype=torch.bool, device=self.device)
        level_NE = torch.zeros_like(left_NE, dtype=torch.int16)
        left = self.count
        while left > 0:
            level_NE += left_NE
            _, chosen_NK = self.routing.choose(self.logits_SX[tokens_N], left_NE)
            left_NE.scatter_(1, chosen_NK, False)
            left -= chosen_NK.shape[1]
            if left < chosen_NK.shape[1]:
                level_NE += left_NE
                break
        return level_NE

    def _choose(self, tokens_N: Tensor, allowed_NE: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return weights (float64) and experts (N, K), with weighed shared experts last."""
        w_NK, chosen_NK = self.routing.weigh(self.logits_SX[tokens_N], allowed_NE)
        return w_NK.float().double(), chosen_NK

    def _gram(self, tokens_N: Tensor, places: Tensor) -> Tensor:
        """Return entries of the tokens' Gram matrices (N, ...), float64."""
        first = (tokens_N * self.pairs).view(-1, *[1] * (places.dim() - 1))
        return self.gram_N[places + first].double()

    # --- rows ------------------------------------------------------------------------------------

    def _routed(self, tokens_N: Tensor, allowed_NE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the routed experts that tokens run (N, K), |f|^2 and <f, y> (N,)."""
        parts = []
        for at in torch.arange(len(tokens_N), device=self.device).split(max(1, ROWS // self.count)):
            tokens = tokens_N[at]
            w_NK, chosen_NK = self._choose(tokens, allowed_NE[at])
            places_NKK = self.place_AA[chosen_NK.unsqueeze(2), chosen_NK.unsqueeze(1)]
            f_NK = (self._gram(tokens, places_NKK) @ w_NK.unsqueeze(2)).squeeze(2)
            inner_NK = self.inner_SA[tokens.unsqueeze(1), chosen_NK]
            routed_NK = chosen_NK[:, : chosen_NK.shape[1] - self.routing.always]
            parts.append((routed_NK, (w_NK * f_NK).sum(1), (w_NK * inner_NK).sum(1)))
        chosen, square, inner = zip(*parts, strict=True)
        return torch.cat(chosen), torch.cat(square), torch.cat(inner)

    def _rows(self, tokens_N: Tensor, kept_E: Tensor) -> _Rows:
        """Return all rows of some tokens, by running the router."""
        tokens, share_SE = len(tokens_N), self.share_SE
        kept_NE = kept_E.expand(tokens, -1)
        chosen_NK, square_N, inner_N = self._routed(tokens_N, kept_NE)
        share_N = torch.ones_like(square_N)
        if share_SE is not None:
            share_N = share_SE[tokens_N] @ kept_E.double()
        rows = _Rows(
            chosen_NK[:, None].short(), square_N[:, None], inner_N[:, None], share_N[:, None]
        )
        k = chosen_NK.shape[1]
        if int(kept_E.sum()) == k:
            return rows  # none can be removed
        gone_M = chosen_NK.flatten()
        again_M = tokens_N.repeat_interleave(k)
        kept_ME = kept_NE.repeat_interleave(k, 0).scatter(1, gone_M.unsqueeze(1), False)
        then_MK, square_M, inner_M = self._routed(again_M, kept_ME)
        left_NK = share_N[:, None].expand(-1, k)
        if share_SE is not None:
            left_NK = left_NK - share_SE[tokens_N].gather(1, chosen_NK)
        then_NKK, square_NK = then_MK.view(tokens, k, k).short(), square_M.view(tokens, k)
        more = (then_NKK, square_NK, inner_M.view(tokens, k), left_NK)
        return _Rows(*(torch.cat(pair, 1) for pair in zip(rows, more, strict=True)))

    def _known_rows(self, kept_E: Tensor) -> _Rows:
        """Return a set's rows, if possible from a cached set that differs in one expert."""
        for number, (near_E, rows) in enumerate(self._remembered):
            differing = (near_E != kept_E).nonzero().flatten()
            if len(differing) > 1:
                continue
            self._remembered.append(self._remembered.pop(number))  # used last
            if len(differing) == 0:
                return rows
            result = self._moved(rows, near_E, kept_E, int(differing))
            break
        else:
            result = self._rows(self.every, kept_E)
        self._remembered = [*self._remembered[1 - REMEMBERED :], (kept_E, result)]
        return result

    def _moved(self, rows: _Rows, before_E: Tensor, kept_E: Tensor, expert: int) -> _Rows:
        """Return the rows after one expert was removed or restored."""
        comes = bool(kept_E[expert])
        size, k = int(kept_E.sum()), rows.chosen_SRK.shape[2]
        if comes and size == k + 1:
            return self._rows(self.every, kept_E)
        touched_N = self._touched(rows, expert, comes)
        moved = self._rows(touched_N, kept_E)
        rows = self._rescaled(rows, expert, comes)
        if size == k:
            rows = _Rows(*(part[:, :1] for part in rows))
        return rows.put(touched_N, moved)

    def _touched(self, rows: _Rows, expert: int, comes: bool) -> Tensor:
        """Return the tokens whose rows use an expert, or may use it when it is restored."""
        if comes:
            last_SK = rows.chosen_SRK.flatten(1).long()
            last_S = self.level_SE.gather(1, last_SK).amax(1)
            return (self.level_SE[:, expert] <= last_S).nonzero().flatten()
        return (rows.chosen_SRK == expert).flatten(1).any(1).nonzero().flatten()

    def _rescaled(self, rows: _Rows, expert: int, comes: bool) -> _Rows:
        """Return rows that do not use an expert, with weights rescaled for its presence or
        absence."""
        if self.share_SE is None:
            return rows
        moved_S1 = self.share_SE[:, expert, None]
        share_SR = rows.share_SR + (moved_S1 if comes else -moved_S1)
        factor_SR = rows.share_SR / share_SR
        return rows._replace(
            square_SR=rows.square_SR * factor_SR**2,
            inner_SR=rows.inner_SR * factor_SR,
            share_SR=share_SR,
        )

    # --- errors ----------------------------------------------------------------------------------

    def _errors(self, rows: _Rows) -> Tensor:
        return rows.square_SR - 2 * rows.inner_SR + self.target_S[:, None]

    def _sums(self, error_S: Tensor) -> Tensor:
        """Return sums by batch (B,)."""
        sums_B = torch.zeros(self.batches, dtype=torch.float64, device=self.device)
        return sums_B.index_add_(0, self.batch_S, error_S)

    def without(self, kept_E: Tensor, candidates: Tensor) -> Tensor:
        """Return squared errors by batch of the sets without one more candidate (C, B).

        Args:
            kept_E: bool; more experts than a token runs.
            candidates: indices of present experts.
        """
        rows = self._known_rows(kept_E.to(self.device))
        error_SR = self._errors(rows)
        chosen_SK = rows.chosen_SRK[:, 0].long()
        change_SK = error_SR[:, 1:] - error_SR[:, :1]
        place_SK = chosen_SK * self.batches + self.batch_S[:, None]
        change_N = torch.zeros(self.count * self.batches, dtype=torch.float64, device=self.device)
        change_N.index_add_(0, place_SK.flatten(), change_SK.flatten())
        change_EB = change_N.view(self.count, self.batches)
        if self.share_SE is not None:
            share_SE = self.share_SE / rows.share_SR[:, :1]
            share_SE = share_SE.clamp(max=1 - 1e-9)  # removed experts are not used
            growth_SE = share_SE / (1 - share_SE)  # relative growth of a weight
            square_S1, inner_S1 = rows.square_SR[:, :1], rows.inner_SR[:, :1]
            grown_SE = growth_SE * ((2 + growth_SE) * square_S1 - 2 * inner_S1)
            grown_SE = grown_SE.scatter(1, chosen_SK, 0)
            grown_BE = torch.zeros_like(change_EB.T).index_add_(0, self.batch_S, grown_SE)
            change_EB = change_EB + grown_BE.T
        return self._sums(error_SR[:, 0]) + change_EB[candidates.to(self.device)]

    def having(self, kept_E: Tensor, candidates: Tensor) -> Tensor:
        """Return squared errors by batch of the sets with one candidate restored (C, B).

        Args:
            kept_E: bool.
            candidates: indices of removed experts.
        """
        kept_E = kept_E.to(self.device)
        rows = self._known_rows(kept_E)
        error_S = self._errors(rows)[:, 0]
        whole = rows.chosen_SRK.shape[1] == 1  # with no more experts than a token runs
        sums = []
        for expert in candidates.tolist():
            with_E = kept_E.clone()
            with_E[expert] = True
            touched_N = self._touched(rows, expert, comes=True)
            if whole:
                touched_N = self.every
            _, square_N, inner_N = self._routed(touched_N, with_E.expand(len(touched_N), -1))
            now_S = error_S
            if self.share_SE is not None:
                rescaled = self._rescaled(rows, expert, comes=True)
                now_S = self._errors(rescaled)[:, 0]
            now_S = now_S.index_copy(
                0, touched_N, square_N - 2 * inner_N + self.target_S[touched_N]
            )
            sums.append(self._sums(now_S))
        return torch.stack(sums)


# --- any set -------------------------------------------------------------------------------------


ELEMENTS = 1 << 22
"""Elements in one block of candidate sets times tokens times experts."""
RELEASED_BATCH = 16_384
"""Tokens of a batch in the released code: 8 sequences of 2,048."""


def _squared_errors(diff_SCA: Tensor, gram_SAA: Tensor) -> Tensor:
    """Return ||F'(x_t, C) - F(x_t)||^2 = (w' - w)^T G_t (w' - w) for every token and set (S, C).

    >>> diff = torch.tensor([[[1.0, -1.0]]])
    >>> gram = torch.tensor([[[2.0, 0.5], [0.5, 1.0]]])
    >>> _squared_errors(diff, gram)
    tensor([[2.]])
    """
    return ((diff_SCA @ gram_SAA) * diff_SCA).sum(-1)


class Reconstruction(Neighbours):
    """Function from sets of experts (C, E) to ||F'(x, C) - F(x)||_F of Eq. 3 (C,), float64.

    Tokens are processed in blocks, so memory is bounded. For sets that differ in one expert only
    the tokens that are rerouted are computed, if the router allows it (:class:`_Rerouting`). With
    cross terms (progressive pruning) the target is the original model's output, F(x) + delta.

    Args:
        stats: the layer's statistics: ``logits_TX``, ``batch_T``, ``sampled_T``, ``gram_SP``, and
            the cross terms if there are any.
        routing: its routing function.
        sum_batch_norms: sum the norms of batches of :data:`RELEASED_BATCH` tokens, as the released
            code does.
        device: where to compute.
    """

    def __init__(
        self,
        stats: Mapping[str, Tensor],
        routing: RoutingFunction,
        sum_batch_norms: bool = False,
        device: str | torch.device = "cpu",
    ) -> None:
        self.stats, self.routing = stats, routing
        self.sum_batch_norms = sum_batch_norms
        self.device = torch.device(device)
        sampled_T = stats["sampled_T"]
        self.logits_SX = stats["logits_TX"][sampled_T].to(self.device)
        self.w_SA = routing.every_weight(self.logits_SX).double()
        batch_T = stats["batch_T"]
        if sum_batch_norms:
            batch_T = torch.arange(len(batch_T)) // RELEASED_BATCH
        batches, batch_S = batch_T[sampled_T].unique(return_inverse=True)
        self.batch_S, self.batches = batch_S.to(self.device), len(batches)

    @cached_property
    def rerouting(self) -> _Rerouting | None:
        """Errors of neighbouring sets by rerouted tokens; None without a known law."""
        law = law_of(self.routing, self.logits_SX)
        return None if law is None else _Rerouting(self, law)

    def __call__(self, kept_CE: Tensor) -> Tensor:
        stats, kept_CE, weighed = self.stats, kept_CE.to(self.device), self.w_SA.shape[1]
        squared_CB = torch.zeros(
            len(kept_CE), self.batches, dtype=torch.float64, device=self.device
        )
        rows = max(1, ELEMENTS // weighed**2)
        for block in torch.arange(len(self.w_SA)).split(rows):
            gram_SAA = unpacked(stats["gram_SP"][block].to(self.device), weighed)
            sets = max(1, ELEMENTS // (len(block) * weighed))
            batch_S = self.batch_S[block.to(self.device)]
            logits_SX, w_S1A = (
                x[block.to(self.device)] for x in (self.logits_SX, self.w_SA[:, None])
            )
            for at in torch.arange(len(kept_CE), device=self.device).split(sets):
                every_NX = logits_SX.repeat_interleave(len(at), 0)
                kept_NE = kept_CE[at].repeat(len(block), 1)
                now_NA = self.routing.every_weight(every_NX, kept_NE).double()  # w'
                diff_SCA = now_NA.view(len(block), len(at), -1) - w_S1A
                error_SC = _squared_errors(diff_SCA, gram_SAA)
                if "delta_S" in stats:
                    cross_SA, delta_S = (
                        stats[name][block].to(self.device) for name in ("cross_SA", "delta_S")
                    )
                    cross_SC = (diff_SCA @ cross_SA.unsqueeze(-1)).squeeze(-1)
                    error_SC = error_SC - 2 * cross_SC + delta_S[:, None]
                into = torch.zeros_like(squared_CB[at])
                squared_CB[at] += into.index_add_(1, batch_S, error_SC.T.contiguous())
        return self._roots(squared_CB)

    def without(self, kept_E: Tensor, candidates: Tensor) -> Tensor:
        if self.rerouting is None:
            return super().without(kept_E, candidates)
        return self._roots(self.rerouting.without(kept_E, candidates))

    def having(self, kept_E: Tensor, candidates: Tensor) -> Tensor:
        if self.rerouting is None:
            return super().having(kept_E, candidates)
        return self._roots(self.rerouting.having(kept_E, candidates))

    def _roots(self, squared_CB: Tensor) -> Tensor:
        squared_CB = squared_CB.clamp(min=0)
        loss_C = squared_CB.sqrt().sum(1) if self.sum_batch_norms else squared_CB.sum(1).sqrt()
        # some routers return NaN for experts without a score: such sets never win
        return loss_C.nan_to_num(nan=float("inf"), posinf=float("inf"))


def output_norm(stats: Mapping[str, Tensor], routing: RoutingFunction) -> float:
    """Return ||F(x)||_F over the sampled tokens, the denominator of relative losses."""
    logits_SX, weighed = stats["logits_TX"][stats["sampled_T"]], routing.count + routing.always
    total = 0.0
    for block in torch.arange(len(logits_SX)).split(max(1, ELEMENTS // weighed**2)):
        w_SA = routing.every_weight(logits_SX[block]).double()
        gram_SAA = unpacked(stats["gram_SP"][block], weighed)
        total += _squared_errors(w_SA.unsqueeze(1), gram_SAA).sum().item()
    return max(total, 0.0) ** 0.5
