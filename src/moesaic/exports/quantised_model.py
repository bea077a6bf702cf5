"""A model with the values of a GGUF file, layer by layer, and what quantising its tensors costs.

Rows are quantised by ggml's own quantiser, as llama.cpp does those of a file, and put in place of
the matrices of a layer while it is open. So a file is measured that was never written, and the KL
of quantising each group of tensors to each type is estimated.

The quantiser is given an importance matrix, E[x_i^2], the mean square of each input of a matrix
over some text: a k-quant quantises a row w to q so that sum_i E[x_i^2] (w_i - q_i)^2 is small,
instead of sum_i w_i^2 (w_i - q_i)^2.

Shape suffixes: N tokens, I inputs of a matrix, E routed experts, H heads, G groups, C choices
(types).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.arch.dense import Arch
from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.data.text import Tokens
from moesaic.errors import MoesaicError
from moesaic.exports import quantiser
from moesaic.exports.allocation import (
    EMBEDDINGS,
    HEAD,
    OUTSIDE,
    Layout,
    Price,
    Sampled,
    Types,
    choice,
    of_all_experts,
    tensor_types,
)
from moesaic.exports.quantiser import WHOLE
from moesaic.io.checkpoint import exact_copy
from moesaic.io.models import path_of, skeleton_of
from moesaic.io.source import Source
from moesaic.observation.changes import (
    PRICED_AT_ONCE,
    Change,
    StandIn,
    draws_for,
    estimates,
    priced_on,
)
from moesaic.observation.stats import Stats, Tally, square_sums
from moesaic.observation.stream import BEFORE, LayerStream, PartChange
from moesaic.types import Config, Model, Track, silent

# --- importance ----------------------------------------------------------------------------------


EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
"""Names of the routed experts' stacked matrices in llama.cpp."""
SHARED = ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
"""Names of the shared expert's."""
SQUARE, CALLS = ".square_EI", ".calls_E"
"""Ends of the names of a matrix's statistics."""
LATENT, KEYS, VALUES = ".attn_kv_b.weight", ".attn_k_b.weight", ".attn_v_b.weight"
"""Ends of the names of MLA's matrix from latent states to keys and values, and of its parts."""
FUSED, FUSED_PARTS = "in_proj_qkvz", ("in_proj_qkv", "in_proj_z")
"""Name of linear attention's matrix in Qwen3-Next, and names of its two parts in other models."""
LINEAR_OUT = ".ssm_out.weight"
"""End of the name of linear attention's output matrix."""
Notify = Callable[[str, Tensor, int | None], None]


@torch.no_grad()
def importance(
    source: Source, tokens: Tokens, named: Callable[[str], str | None], track: Track = silent
) -> dict[str, Tensor]:
    """Return E[x_i^2] of the matrices of a native checkpoint, which is read layer by layer.

    Args:
        source: the checkpoint.
        tokens: the text.
        named: function from a module's name in transformers to that in llama.cpp, or None.
        track: shows progress.

    Returns:
        float32 (I,) by llama.cpp's names; (E I,) for stacked experts.
    """
    arch = base_arch(source.config)
    stream: LayerStream[nn.Module] = LayerStream.from_disk(
        source.checkpoint, source.config, arch, tokens, view=lambda layer: layer
    )
    tally = Tally()
    for block, states in track(stream.turns(), "Weighing inputs", len(stream)):
        layer = block.layer
        names = dict(_names_in(layer, block.index, arch, named))
        with tap(layer, arch, names, partial(_take, tally, names, arch.experts_in(layer))):
            block.run(states)
    return _of_heads(means(tally.stats()), source.config)


def _columns(name: str, config: Config) -> Tensor | None:
    """Return the inputs of a matrix in the order that llama.cpp has them, int64 (I,).

    None if that is transformers' order. Qwen3.5's linear attention has several value heads for each
    key head: llama.cpp has the first of all key heads first, transformers those of one key head.
    """
    if not (name.endswith(LINEAR_OUT) and config.model_type.startswith("qwen3_5")):
        return None
    count, of_each = config.linear_num_key_heads, config.linear_value_head_dim
    heads = torch.arange(config.linear_num_value_heads * of_each).view(count, -1, of_each)
    return heads.transpose(0, 1).flatten()


def _of_heads(weights: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Return importance weights in llama.cpp's order, of MLA's keys and values by head (H I,).

    The inputs of a key's rows are queries in llama.cpp, whose weights are taken to be equal.
    """
    orders = {name: _columns(name, config) for name in weights}
    weights |= {name: weights[name][o] for name, o in orders.items() if o is not None}
    for name in [name for name in weights if name.endswith(LATENT)]:
        layer, heads = name.removesuffix(LATENT), config.num_attention_heads
        weights[layer + KEYS] = torch.ones(heads * config.qk_nope_head_dim)
        weights[layer + VALUES] = weights[name].repeat(heads)
    return weights


def _by_head(matrix: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """Return keys (H I N) and values (H N I) of an MLA matrix (H*N I), as llama.cpp has them."""
    sizes = [config.qk_nope_head_dim, config.v_head_dim]
    keys_HNI, values_HNI = matrix.view(-1, sum(sizes), matrix.shape[-1]).split(sizes, 1)
    return keys_HNI.transpose(-1, -2), values_HNI


def _apart(matrix: Tensor, config: Config) -> Sequence[Tensor]:
    """Return queries, keys and values of a fused matrix (H*N I) by key head (H N I), and gates."""
    count, of_each = config.linear_num_key_heads, config.linear_value_head_dim
    gates = config.linear_num_value_heads // count * of_each
    by_head_HNI = matrix.view(count, -1, matrix.shape[-1])
    return by_head_HNI.split([by_head_HNI.shape[1] - gates, gates], 1)


def means(stats: Stats) -> dict[str, Tensor]:
    """Return E[x_i^2], float32, the experts one after the other (E I,).

    An expert that no token reached has ones: all of its inputs have equal weight.

    Args:
        stats: by matrix sums of x_i^2, ``NAME.square_EI``, and tokens, ``NAME.calls_E``.
    """
    found = {}
    for name in (key.removesuffix(SQUARE) for key in stats if key.endswith(SQUARE)):
        calls_E1 = stats[f"{name}{CALLS}"][:, None]
        mean_EI = stats[f"{name}{SQUARE}"] / calls_E1.clamp(min=1)
        found[name] = torch.where(calls_E1 > 0, mean_EI, 1.0).flatten().float()
    return found


def _take(
    tally: Tally,
    names: Mapping[str, Sequence[str]],
    experts: int,
    path: str,
    x_NI: Tensor,
    expert: int | None,
) -> None:
    row = (0, 1) if expert is None else (expert, experts)
    for name in names[path]:
        tally.add(f"{name}{SQUARE}", square_sums(x_NI.float()), *row)
        tally.add(f"{name}{CALLS}", torch.tensor(len(x_NI)), *row)


def _names_in(
    layer: nn.Module, index: int, arch: Arch, named: Callable[[str], str | None]
) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the paths of a layer's matrices, each with llama.cpp's names of its parts."""
    for path, module in layer.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        fused = path.endswith(FUSED)
        paths = [path.replace(FUSED, part) for part in FUSED_PARTS] if fused else [path]
        parts = [name for p in paths if (name := named(f"{arch.layer_prefix(index)}{p}"))]
        if parts:
            yield path, [f"{name}.weight" for name in parts]
    if isinstance(arch, MoEArch) and arch.is_moe(layer):
        view = arch.mixture(layer)
        up, down = view.matrices
        gates, *stacked = [f"blk.{index}.{name}.weight" for name in EXPERTS]
        yield f"{arch.inside}{arch.experts}.{up}", [gates] * view.gated + stacked[:1]
        yield f"{arch.inside}{arch.experts}.{down}", stacked[1:]
        names = arch.shared_names
        if arch.shared_at is not None and names.gate == names.up:  # two tensors in llama.cpp
            gate, up, down = (f"blk.{index}.{name}.weight" for name in SHARED)
            yield f"{arch.shared_at}.{names.up}", [gate, up]
            yield f"{arch.shared_at}.{names.down}", [down]


@contextmanager
def tap(layer: nn.Module, arch: Arch, paths: Collection[str], notify: Notify) -> Iterator[None]:
    """Call ``notify`` with the inputs of a layer's projections while it runs, padding too.

    Experts run additionally, one by one.

    Args:
        layer: the decoder layer, live.
        arch: its architecture.
        paths: paths of projections in the layer; for routed experts those of their tensors.
        notify: called with a path, inputs (N, I) and the expert's index: once per projection and
            batch, for experts once per expert that runs.
    """

    def linear(path: str) -> Callable[..., None]:
        def before(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            notify(path, args[0].flatten(0, -2), None)

        return before

    experts: set[str] = set()
    with ExitStack() as hooks:
        if isinstance(arch, MoEArch) and arch.is_moe(layer):
            view, block = arch.mixture(layer), f"{arch.inside}{arch.experts}."
            experts = {path for path in paths if path.startswith(block)}

            def routed(_: nn.Module, args: tuple[Tensor, ...]) -> None:
                up, down = (f"{block}{name}" for name in view.matrices)
                for i, x_NI in view.split(args[0].flatten(0, -2), *args[1:3]):
                    if up in experts:
                        notify(up, x_NI, i)
                    if down in experts:
                        notify(down, view.activate(i, x_NI), i)

            if experts:
                hooks.callback(view.experts.register_forward_pre_hook(routed).remove)
        for path in {*paths} - experts:
            handle = layer.get_submodule(path).register_forward_pre_hook(linear(path))
            hooks.callback(handle.remove)
        yield


# --- a model with the values of a file -----------------------------------------------------------


SAMPLED = 16
"""Experts of a layer, about, by which the KL of quantising all of them is estimated."""
SAMPLED_VALUES = 1 << 26
"""Most values of one matrix of these experts together, where they are more than two."""
ALL = (slice(None),)


class QuantisedModel:
    """Native model, of which groups of tensors are quantised while they are in memory.

    Args:
        source: the checkpoint.
        layout: of its file.
        named: llama.cpp's name of a module by transformers'.
        tokens: the text by which it is quantised, and by which types are chosen.
        track: shows progress.
        kept: rows that were quantised before.
    """

    def __init__(
        self,
        source: Source,
        layout: Layout,
        named: Callable[[str], str | None],
        tokens: Tokens,
        track: Track = silent,
        kept: quantiser.KeptRows | None = None,
    ) -> None:
        self.source, self.layout, self.named = source, layout, named
        self.arch = base_arch(source.config)
        self.tokens, self.track, self.kept = tokens, track, kept

    @cached_property
    def weights(self) -> Mapping[str, Tensor]:
        """Mean squares of a matrix's inputs (I,), of all experts (E I,), by llama.cpp's name.

        Computed unless they were set, from an earlier run.
        """
        return importance(self.source, self.tokens, self.named, self.track)

    # --- matrices --------------------------------------------------------------------------------

    @cached_property
    def groups(self) -> Mapping[str, int]:
        """Groups of matrices that are quantised, each with its layer or place around all layers.

        Raises:
            MoesaicError: of a tensor of the file no matrix of the model is known.
        """
        shape = skeleton_of(self.source.config)
        layers = self.arch.layers(shape)
        parts = {BEFORE: shape, **dict(enumerate(layers)), len(layers): shape}
        found = {name: place for place, part in parts.items() for name in self._held(part, place)}
        parts_in = (_names_in(layer, n, self.arch, self.named) for n, layer in enumerate(layers))
        # transformers has these in one with the first of their names
        fused = {name for part in parts_in for _, names in part for name in names[1:]}
        places = {name: quantiser.order(name)[0] for name in self.layout.group_of}
        known = {name for name, place in places.items() if place < self.layout.layers}
        if unknown := known - {*found, *fused}:
            raise MoesaicError(
                f"What quantising {', '.join(sorted(unknown)[:3])} costs cannot be estimated: "
                f"{self.source.config.model_type} has other names for them. "
                "export --to gguf --type works."
            )
        return {self.layout.group_of[name]: place for name, place in found.items()}

    def _held(self, part: nn.Module, place: int) -> dict[str, Tensor]:
        """Return the matrices of a layer, or of the model around its layers, that are quantised.

        Of matrices that transformers has in one, the first one's name stands for all.

        Args:
            part: the layer of that number, or the model.
            place: the number; BEFORE for the embeddings, the number of layers for the head.
        """
        arch, group_of = self.arch, self.layout.group_of
        held = dict[str, Tensor]()
        if 0 <= place < self.layout.layers:
            for path, (name, *others) in _names_in(part, place, arch, self.named):
                stacked = name.endswith("_exps.weight")
                matrix = part.get_parameter(path if stacked else f"{path}.weight").data
                transposed = stacked and isinstance(arch, MoEArch) and arch.transposed
                parts = {name: matrix.transpose(-1, -2) if transposed else matrix}
                if path.endswith(FUSED):
                    parts = dict(
                        zip((name, *others), _apart(matrix, self.source.config), strict=True)
                    )
                if name.endswith(LATENT):
                    keys_HIN, values_HNI = _by_head(matrix, self.source.config)
                    block = name.removesuffix(LATENT)
                    parts |= {block + KEYS: keys_HIN, block + VALUES: values_HNI}
                held |= {name: part for name, part in parts.items() if name in group_of}
            return held
        for path, module in part.named_modules():
            name = f"{self.named(path)}.weight"
            if (group := group_of.get(name)) in OUTSIDE and (group == HEAD) == (place > 0):
                held[name] = module.weight.data
        return held

    def _tied(self, model: Model) -> dict[str, Tensor]:
        """Return the head's matrix by the name of the embeddings, where both are one matrix."""
        path, group_of = path_of(model, model.get_input_embeddings()), self.layout.group_of
        name = f"{self.named(path)}.weight"
        tied = HEAD not in group_of.values() and name in group_of
        return {name: model.get_output_embeddings().weight.data} if tied else {}

    @contextmanager
    def quantising(
        self, types: Types, part: nn.Module, place: int, half: int | None = None
    ) -> Iterator[nn.Module]:
        """Quantise tensors of a layer, or of the model's ends, while the context lasts.

        Args:
            types: of tensors.
            part: the layer of that number, or the model; its weights are present.
            place: the number; BEFORE for the embeddings, the number of layers for the head.
            half: of the experts that are sampled of many, the only ones to quantise; all weights
                are given back afterwards. Otherwise the part is not used again.
        """
        held = self._held(part, place)
        if place == self.layout.layers:
            held |= self._tied(part)
        before = list[tuple[Tensor, Tensor]]()
        for name, matrix in held.items():
            if (type := self._type(types, name)) != WHOLE:
                halves = self._halves(self.layout.group_of[name]) if "_exps." in name else ALL
                for chosen in ALL if half is None else halves[half : half + 1]:
                    some = matrix[chosen]
                    if half is not None:
                        before.append((some, exact_copy(some)))
                    self._quantise(name, type, some, chosen)
        try:
            yield part
        finally:
            for some, values in before:
                some.copy_(values)

    def _type(self, types: Types, name: str) -> str:
        """Return the type that a tensor gets; WHOLE if it is not quantised."""
        of_group = types.get(self.layout.group_of[name])
        if name in types or of_group is None:
            return types.get(name, WHOLE)
        return self.layout.tensors[name].as_type(of_group, name in self.weights).type

    def _quantise(self, name: str, type: str, matrix: Tensor, chosen: slice) -> None:
        """Replace a matrix's values by those quantised to a type, part by part.

        Args:
            name: llama.cpp's.
            type: of tensors.
            matrix: of one, or of chosen experts.
            chosen: these.
        """
        weights, kept = self.weights.get(name), self.kept if chosen == slice(None) else None
        stacked, some = matrix.dim() > 2, max(1, quantiser.AT_ONCE // matrix[0].numel())
        each = None if weights is None else weights.view(-1, matrix.shape[-1])
        if stacked and each is not None:  # heads of one matrix have one row of weights
            each = each[chosen] if len(each) > 1 else each.expand(len(matrix), -1)
        order_I = _columns(name, self.source.config)
        row = matrix.shape[-1]
        filling = 0, -row % quantiser.block_of(type)  # zeros at the end of each row
        each = None if each is None else F.pad(each, filling)
        for part, start in zip(matrix.split(some), range(0, len(matrix), some), strict=True):
            mean_EI = each[start : start + some] if stacked and each is not None else each
            rows = part.cpu() if order_I is None else part.cpu()[:, order_I]
            held = quantiser.held_rows(F.pad(rows, filling), type, mean_EI, kept)
            values = quantiser.values_of(held, type)[:, :row].view(part.shape)
            part.copy_(values if order_I is None else values[:, order_I.argsort()])

    def _halves(self, group: str) -> Sequence[slice]:
        """Return two halves of a group's experts that are quantised for an estimate.

        If they are few, or none, all that the group has.
        """
        if not (shape := self._experts(group)):
            return ALL
        inputs, rows, experts = shape
        step = experts // min(SAMPLED, max(2, SAMPLED_VALUES // (inputs * rows)))
        return [slice(n, None, 2 * step) for n in (0, step)] if step > 1 else ALL

    def _experts(self, group: str) -> tuple[int, ...]:
        """Return the shape of a group's experts (inputs, rows, count); () of other groups."""
        tensors = self.layout.tensors_of[group].items()
        return next((tensor.shape for name, tensor in tensors if "_exps." in name), ())

    def change(self, types: Types) -> PartChange:
        """Return the change that quantises a layer while a stream has it open.

        Raises:
            MoesaicError: of a tensor of the file no matrix of the model is known.
        """
        _ = self.groups
        return partial(self.quantising, types)

    # --- estimates -------------------------------------------------------------------------------

    def _priced(self, types: Sequence[str], filled: bool) -> Iterator[tuple[str, str]]:
        """Yield groups of tensors and the types that each is priced in.

        If rows are filled up, these include the types that tensors have otherwise.
        """
        types_in = self.layout.types_in
        for group in self.groups:
            differ = (t for t in types if types_in(group, t, filled) != types_in(group, t))
            others = [other for type in differ for other in types_in(group, type).values()]
            yield from product([group], dict.fromkeys([*types, *others]))

    def changes(self, types: Sequence[str], filled: bool = False) -> list[Change]:
        """Return changes that quantise one group of tensors to one type each, group by group.

        Of groups of many experts there are two, each of half of the experts that are sampled.

        Args:
            types: of tensors.
            filled: True to fill up rows of down projections to whole blocks with zeros.
        """
        _ = self.groups, self.weights  # before a head or a layer is in memory beside them
        every = dict[tuple[object, ...], Change]()  # where rows are short, types are one
        changes = []
        for group, type in self._priced(types, filled):
            of_tensors = self.layout.types_in(group, type, filled)
            for half in range(len(self._halves(group))):
                change = self._change(group, of_tensors, half)
                changes.append(every.setdefault((half, *of_tensors.items()), change))
        return changes

    def _change(self, group: str, types: Types, half: int) -> Change:
        """Return the change that quantises a group's tensors, or half of its sampled experts."""

        def at(place: int) -> StandIn:
            return lambda part: self.quantising(types, part, place, half)

        places = {self.groups[group]}
        if group == EMBEDDINGS and HEAD not in self.groups:
            places.add(self.layout.layers)
        return {place: at(place) for place in places}

    def prices(
        self, types: Sequence[str], found: Iterable[Price], filled: bool = False
    ) -> dict[str, dict[str, Price]]:
        """Return prices by type and group.

        Args:
            types: of tensors.
            found: prices of :meth:`changes`.
            filled: as for these.
        """
        each, prices = iter(found), defaultdict[str, dict[str, Price]](dict)
        sampled = defaultdict[tuple[str, str], dict[str, Sampled]](dict)  # by part and type
        for group, type in self._priced(types, filled):
            prices[type][group] = next(each)
            halves = self._halves(group)
            if len(halves) > 1:
                experts = self._experts(group)[-1]
                m, n = (len(range(experts)[half]) for half in halves)
                both = prices[type][group], next(each), (m, n), experts
                sampled[group.split()[0], type][group] = both
        for (_, type), of_part in sampled.items():
            prices[type] |= zip(of_part, of_all_experts([*of_part.values()]), strict=True)
        return dict(prices)

    @torch.no_grad()
    def best(self, among: Sequence[str], budget: int) -> Types:
        """Return the types by group of least estimated KL within a budget.

        Args:
            among: types of files.
            budget: bytes of the file.

        Raises:
            MoesaicError: it is out of reach; raised before anything is read.
        """
        self.layout.check(among, budget)
        types = tensor_types(among)
        stream: LayerStream[object] = LayerStream.from_disk(
            self.source.checkpoint,
            self.source.config,
            self.arch,
            priced_on(self.tokens),
            view=lambda layer: layer,
            tokens_per_batch=PRICED_AT_ONCE,
        )
        draws = draws_for(stream.model)
        found = estimates(stream, self.changes(types), draws, track=self.track)
        prices = map(Price, found.per_token.numpy(), found.head_C.tolist())
        return choice(self.prices(types, prices), self.layout, budget)
