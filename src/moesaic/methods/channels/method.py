"""Channel skipping as a method: how many channels of each projection a token reads at decoding.

Liu et al. (TEAL), Sec. 4: channels of small |x_i| are left out, below thresholds that are quantiles
on calibration text; within a layer shares are found greedily (Alg. 1). Chen et al. (WINA), Eq. 5:
channels are ranked by |x_i| times the norm of W[:, i], a token reads the K highest; no calibration.

Where we depart from the papers:

- TEAL's greedy search takes steps that are a part of the target instead of 0.05 of one matrix, so
  that its length is bounded; a projection that has less than a step left is judged by the error for
  what it saves; errors are over all positions of one batch.
- WINA's authors share the budget out by TEAL's greedy search, which ``recipe paper`` does; by
  default every projection has the same share, which needs no text.
- Their transformation of the weights, by which columns become orthogonal, is left out.
- Prompts run dense. TEAL skips channels of half of a prompt, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import cast

import torch
from torch import Tensor, nn

from moesaic.arch.dense import Arch
from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.arch.use import LayerUse
from moesaic.config import chosen_layers
from moesaic.errors import MoesaicError
from moesaic.foreign import Config
from moesaic.layers.channels import ChannelsLayer, column_norms
from moesaic.methods.base import Decision, Method, Outline, Summary
from moesaic.methods.channels.config import ChannelsConfig
from moesaic.methods.channels.gradients import gradient_sizes
from moesaic.methods.channels.projections import Projection, projections
from moesaic.methods.channels.thresholds import Scores, one_threshold, shares_for
from moesaic.methods.phrases import percent, some
from moesaic.nn.channel_linear import WHOLE, ChannelExperts, ChannelLinear, Cut
from moesaic.observation.job import Finished, Job
from moesaic.observation.stream import Block, Turn, valid
from moesaic.observation.tap import Event, tapped
from moesaic.plan import Plan
from moesaic.record import LayerRecord
from moesaic.surgery import applied, headers_of, layer_uses

Skipping = Mapping[int, Sequence[Projection]]

BATCH, BACKWARD_BATCH = 512, 1024
"""Tokens of a calibration batch, of which the greedy search looks at the first, and of a batch that
gradients are taken on."""


class Channels(Method[ChannelsConfig, Arch]):
    """Lets the projections of a model skip channels; no weight is changed."""

    ratio = "active"

    def find(self, config: Config) -> Arch:
        """The architecture of any model that is not quantised, converted or not.

        Raises:
            MoesaicError: it is unknown or quantised, or skips channels already.
        """
        if getattr(config, "quantization_config", None) is not None:
            raise MoesaicError(
                "This checkpoint is quantised in blocks, from which single channels cannot be "
                "left out. Take the original in float32 or bfloat16."
            )
        stacks = headers_of(config).values()
        if any(header["kind"] == ChannelsLayer.kind for stack in stacks for header in stack):
            raise MoesaicError(
                "This model skips channels already; start from the one it was made from."
            )
        return base_arch(config)

    @torch.no_grad()
    def run(self, job: Job[Arch]) -> Decision:
        """Decide how many channels each projection reads; look at text only where that needs it."""
        config = self.config
        uses = layer_uses(job.shape, job.arch)
        skipping = self.choose(job, uses)
        share = self.share(skipping, uses)
        fingerprint = job.tokens.fingerprint if config.calibrates else ""
        options = asdict(config)
        finished = job.finished({"config": options, "calibration": fingerprint})
        if not all(("result", i) in finished for i in skipping):
            for i, layer in self._decided(job, skipping, uses, share, finished):
                finished.add("result", i, layer, {})
        layers = {i: finished["result", i][0] for i in skipping}
        plan = Plan(config.name, job.base, layers, options, fingerprint)
        return Decision(plan, {i: {} for i in skipping})

    def outline(self, job: Job[Arch]) -> Outline:
        """Every projection reads the share that they read in the mean."""
        config = self.config
        uses = layer_uses(job.shape, job.arch)
        skipping = self.choose(job, uses)
        share = self.share(skipping, uses)
        layers = {}
        for i, parts in skipping.items():
            cuts, score, factors = {p.path: top(p, share) for p in parts}, config.score, {}
            if config.gradients:
                score = "given"
                factors = {
                    p.path: torch.zeros((uses[i].experts, p.inputs) if p.experts else p.inputs)
                    for p in parts
                }
            layers[i] = ChannelsLayer(cuts, score, factors)
        return Outline(
            Plan(config.name, job.base, layers, asdict(config)),
            exact=config.shares == "uniform" and not config.gradients,
            backward=config.gradients,
        )

    def choose(self, job: Job[Arch], uses: Sequence[LayerUse]) -> Skipping:
        """The projections that skip channels, by layer.

        Raises:
            MoesaicError: there are none.
        """
        config = self.config
        every = {
            i: projections(job.layers[i], job.arch, uses[i], config.where)
            for i in chosen_layers(config.layers, len(uses))
        }
        skipping = {i: parts for i, parts in every.items() if parts}
        if not skipping:
            raise MoesaicError(
                f"No projection of layers {config.layers} can skip channels with where "
                f"{config.where}: they have forms of their own. Try where=all, or the original."
            )
        return skipping

    def share(self, skipping: Skipping, uses: Sequence[LayerUse]) -> float:
        """The share of the channels that projections read in the mean.

        Raises:
            MoesaicError: no share meets the target; says what is within reach.
        """
        weights = {f"{i}.{p.path}": p.run for i, parts in skipping.items() for p in parts}
        all_run = sum(use.active for use in uses)
        others = max(0.0, all_run - sum(weights.values()))
        share = shares_for(weights, others, self.config.active)
        lowest = others / all_run
        if share <= 0:
            raise MoesaicError(
                f"active {self.config.active:g} is out of reach: projections that skip nothing are "
                f"{lowest:.3f} of what a token runs. Take more layers, or where=all."
            )
        return share

    # --- decided ---------------------------------------------------------------------------------

    def _decided(
        self,
        job: Job[Arch],
        skipping: Skipping,
        uses: Sequence[LayerUse],
        share: float,
        finished: Finished,
    ) -> Iterator[tuple[int, ChannelsLayer]]:
        """The plan of every layer, of those that have none yet where layers are decided alone."""
        config = self.config
        if config.gradients:
            yield from self._by_gradients(job, skipping, uses, finished)
            return
        if not config.calibrates:
            for i, parts in skipping.items():
                yield i, ChannelsLayer({p.path: top(p, share) for p in parts}, config.score)
            return
        missing = [i for i in skipping if ("result", i) not in finished]
        for turn in self._turns(job, missing):
            i, layer = turn.block.index, turn.block.layer
            parts = skipping[i]
            factors = {p.path: self._factor(layer, p, job.arch) for p in parts}
            first, handed = turn.states[0].clone(), turn.block.handed(turn.states)[0]
            scores = scored(turn, job.arch, factors)
            shares = {p.path: share for p in parts}
            if config.shares == "greedy":
                search = GreedySearch(turn.block, first, handed, turn.masks[0], job.arch, config)
                shares = search.shares(parts, scores, share)
            cuts = {p.path: cut_of(p, shares[p.path], scores[p.path], config.choice) for p in parts}
            yield i, ChannelsLayer(cuts, config.score)

    def _by_gradients(
        self, job: Job[Arch], skipping: Skipping, uses: Sequence[LayerUse], finished: Finished
    ) -> Iterator[tuple[int, ChannelsLayer]]:
        """One threshold for the whole model, on scores by the sizes of gradients.

        Projections that no gradient reaches, such as those that choose attention's positions, are
        read whole.
        """
        if not all(("gradients", i) in finished for i in skipping):  # kept, to resume from
            windows = self.config.gradient_tokens // job.tokens.input_ids.shape[1]
            few = job.tokens.rows(slice(max(1, windows)))
            stream = job.stream([*skipping], job.arch.ffn_of, few, tokens_per_batch=BACKWARD_BATCH)
            sizes = gradient_sizes(stream, skipping, job.track)
            for i, parts in skipping.items():
                by_path = {p.path: sizes[i, p.path] for p in parts if (i, p.path) in sizes}
                cuts = dict.fromkeys(by_path, WHOLE)
                finished.add("gradients", i, ChannelsLayer(cuts, "given", by_path), {})
        factors = {i: cast(ChannelsLayer, finished["gradients", i][0]).factors for i in skipping}
        skipping = {i: [p for p in parts if p.path in factors[i]] for i, parts in skipping.items()}
        scores = {
            (turn.block.index, path): path_scores
            for turn in self._turns(job, skipping)
            for path, path_scores in scored(turn, job.arch, factors[turn.block.index]).items()
        }
        every = {(i, p.path): p for i, parts in skipping.items() for p in parts}
        thresholds = one_threshold(
            scores,
            {key: p.run for key, p in every.items()},
            {key: float(p.outputs) for key, p in every.items()},
            self.share(skipping, uses),
        )
        for i, parts in skipping.items():
            shares = {p.path: scores[i, p.path].share(thresholds[i, p.path]) for p in parts}
            cuts = {
                p.path: cut_of(p, shares[p.path], scores[i, p.path], self.config.choice)
                for p in parts
            }
            yield i, ChannelsLayer(cuts, "given", factors[i])

    def _factor(self, layer: nn.Module, p: Projection, arch: Arch) -> Tensor | None:
        """What |x| is multiplied by; None for nothing."""
        if self.config.score == "size":
            return None
        weight = layer.get_parameter(p.path if p.experts else f"{p.path}.weight")
        return column_norms(weight, p.experts and isinstance(arch, MoEArch) and arch.transposed)

    def _turns(self, job: Job[Arch], skipping: Collection[int]) -> Iterator[Turn]:
        stream = job.stream(skipping, job.arch.ffn_of, tokens_per_batch=BATCH)
        return iter(job.track(stream.turns(), "Weighing channels", len(skipping)))

    # --- words -----------------------------------------------------------------------------------

    def tell(self, layers: list[LayerRecord], decision: Decision, active: float | None) -> Summary:
        config = self.config
        assert decision.plan is not None
        share = config.active if active is None else active
        where = "Projections" if config.where == "all" else "Feed-forward projections"
        title = f"channels skipped with {config.label}, to {percent(share)} read"
        text = (
            f"{where} of {some(len(decision.plan.layers), len(layers))} leave out each token's "
            "channels of lowest score at decoding; prompts run dense, and no weight is changed. "
            "Perplexity and active ratio are measured with every token as at decoding."
        )
        return Summary(title, text)


def scored(turn: Turn, arch: Arch, factors: Mapping[str, Tensor | None]) -> dict[str, Scores]:
    """The scores of each projection's channels on all calibration tokens, which pass the layer.

    Args:
        turn: the layer.
        arch: its architecture.
        factors: by projection what |x| is multiplied by; None for nothing.
    """
    scores = {path: Scores() for path in factors}

    def add(event: Event) -> None:
        factor, score_NI = factors[event.path], event.x_NI.abs().float()
        if factor is not None:
            factor_I = factor if event.expert is None else factor[event.expert]
            score_NI = score_NI * factor_I.to(score_NI.device)
        scores[event.path].add(score_NI)

    with tapped(turn.block.layer, arch, [*scores], add, iter(turn.masks), instead=True):
        turn.run()
    return scores


@dataclass(frozen=True)
class GreedySearch:
    """TEAL's Alg. 1: the shares of a layer's projections, by the layer's output."""

    block: Block
    before: Tensor
    """A batch of what enters the layer (B, L, D)."""
    handed: object
    """What the layer before hands on beside it."""
    mask: Tensor | None
    """False on padding."""
    arch: Arch
    config: ChannelsConfig

    def shares(
        self, parts: Sequence[Projection], scores: Mapping[str, Scores], share: float
    ) -> dict[str, float]:
        """The share of each projection that a token reads.

        Each step takes the same number of weights away, fewer where a projection has no more left,
        from the projection where the layer's output changes least for what is saved.
        """
        config, total = self.config, sum(p.run for p in parts)
        step = (1 - share) * total / config.steps
        shares = {p.path: 1.0 for p in parts}
        left, now = (1 - share) * total, 0.0
        plan = ChannelsLayer({p.path: Cut(1.0, threshold=0.0) for p in parts}, config.score)
        target = self._output(self.block.layer)
        with applied(self.block.layer, self.arch, plan) as twin:

            def error(trial: Mapping[str, float]) -> float:
                for p in parts:
                    cut = cut_of(p, trial[p.path], scores[p.path], config.choice)
                    _set_cut(twin, p.path, cut)
                return float((self._output(twin) - target).double().square().sum())

            while left > 1e-6 * total:
                trials = []
                for p in parts:
                    taken = min(step, left, shares[p.path] * p.run)
                    if taken < 1e-9 * total:  # all gone already
                        continue
                    trial = {**shares, p.path: shares[p.path] - taken / p.run}
                    missed = error(trial)
                    trials.append(((missed - now) / taken, missed, taken, trial))
                _, now, taken, shares = min(trials, key=lambda t: t[0])
                left -= taken
        return shares

    def _output(self, layer: nn.Module) -> Tensor:
        return valid(self.block.output(0, self.before, self.handed, layer), self.mask)


def _set_cut(layer: nn.Module, path: str, cut: Cut) -> None:
    """Let one projection of a live layer read other channels."""
    owner_path, _, leaf = path.rpartition(".")
    owner = layer.get_submodule(owner_path)
    if isinstance(owner, ChannelExperts):
        owner.cuts[leaf] = cut
    else:
        cast(ChannelLinear, owner.get_submodule(leaf)).cut = cut


def top(p: Projection, share: float) -> Cut:
    """The nearest number of channels to a share, at least one."""
    keep = min(p.inputs, max(1, round(share * p.inputs)))
    return Cut(keep / p.inputs, keep)


def cut_of(p: Projection, share: float, scores: Scores, choice: str) -> Cut:
    """A projection's cut of a share, as a number of channels or as a threshold."""
    if choice == "top-k":
        return top(p, share)
    return Cut(share, threshold=scores.threshold(share))
