"""Pruned and condensed mixtures in their own architecture."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.arch.mixture import MoEArch
from moesaic.errors import MoesaicError
from moesaic.exports.form import Export, base_config
from moesaic.exports.targets import Header, aligned
from moesaic.foreign import JSON, Config
from moesaic.io.checkpoint import Writer, shape_of
from moesaic.io.naming import Naming
from moesaic.io.source import Source
from moesaic.layers import neurons
from moesaic.layers.base import KINDS
from moesaic.layers.pruned import PrunedLayer
from moesaic.layers.slimmed import SlimmedLayer
from moesaic.plan import Plan
from moesaic.surgery import base_shape, kept, rewrite, shaped, sizes

ALIGNED = aligned(1)
DOWN = "down_proj.weight"


def reduced(
    source: Source, arch: MoEArch, stacks: Mapping[int, Sequence[Header]], ep: int
) -> Export:
    """Fewer experts or dense layers: one count, one dense width, filled up where that is exact.

    Args:
        source: the reduced model.
        arch: its architecture.
        stacks: headers by converted layer.
        ep: the number of experts must be a multiple of it.

    Raises:
        MoesaicError: its own architecture cannot hold it.
    """
    config = base_config(source.config, arch)
    shape = base_shape(shape_of(source.config), arch)
    gone = {i for i, stack in stacks.items() if any(KINDS[h["kind"]].removes(h) for h in stack)}
    stay = [i for i in range(len(shape.widths)) if i not in gone]
    numbers = {old: new for new, old in enumerate(stay)}
    counts = {i: count for i, count in enumerate(shape.experts) if count}
    dense = {i: shape.widths[i] for i in stay if i not in counts}
    costs: JSON = {}
    plans: dict[int, PrunedLayer] = {}
    if counts:
        plans = _filled(arch, source, counts, config, costs)
        most = max(counts.values())
        groups = arch.group_count(config)
        count = next(
            n for n in range(most, 2 * most * ep * groups) if not n % ep and not n % groups
        )
        if set(counts.values()) != {count}:
            if arch.never is None:
                raise MoesaicError(
                    f"Its layers have {_spread(counts.values())} experts and would need {count}: "
                    f"{arch.model_type} has no router that never chooses an expert. "
                    "Prune to one legal count."
                )
            for i, n in counts.items():
                plans[i] = plans.get(i, PrunedLayer(torch.arange(n))).padded(count, groups)
        setattr(config, arch.count, count)
        costs["experts"] = [sum(counts.values()), count * len(counts)]
    condensed = stacks.keys() - gone - counts.keys()
    width = max(dense.values(), default=0) or ALIGNED  # Layer Drop leaves no neuron at all
    narrow = [i for i, n in dense.items() if n < width] if condensed else []
    if gone:
        shorten(config, stay)
    if condensed or (gone and arch.dense_layers):
        mix = arch.dense_at(config, {numbers[i] for i in dense})
        if mix is None:
            raise MoesaicError(
                f"{arch.model_type} cannot have just these dense layers: {_spread(dense)}; "
                "condense other candidates."
            )
        for name, value in mix.items():
            setattr(config, name, value)
    layers = arch.layers(shape_of(source.config))
    made = [sizes(shaped(layers[i], arch, plans[i]) if i in plans else layers[i]) for i in stay]
    for i in narrow:
        own = made[numbers[i]]
        own |= {n: widened(n, s, width) for n, s in own.items() if n.startswith(arch.ffn_path)}
    configs = [config]
    if condensed:
        costs["dense_neurons"] = [sum(dense.values()), width * len(dense)]
        configs = [copy.deepcopy(config) for _ in arch.dense_sizes(config)]
        for trial, name in zip(configs, arch.dense_sizes(config), strict=True):
            setattr(trial, name, width)
    held = [c for c in configs if [*map(sizes, arch.layers(shape_of(c)))] == made]
    if not held:
        raise MoesaicError(
            f"The class of {arch.model_type} has no layers of these sizes: "
            f"{_spread(dense.values())} neurons where they are dense, and experts as they are."
        )
    config = held[0]
    plan = Plan("export", shape, plans)

    def write(writer: Writer) -> None:
        names = Naming(source.checkpoint, arch.model_type).in_memory
        starts = {
            disk.partition(f".{number[1]}.")[0] + "."
            for disk, name in names.items()
            if (number := re.match(rf"{re.escape(arch.layers_path)}\.(\d+)\.", name))
        }
        fitting = Fitting(writer, starts, arch.ffn_path, numbers, narrow, width)
        stays = kept(shape_of(source.config), along=False, beside=not source.beside)
        rewrite(source.checkpoint, arch, plan, fitting, stays)

    return Export(config, write, costs)


def widened(name: str, shape: tuple[int, ...], width: int) -> tuple[int, ...]:
    """The shape of a dense FFN's matrix as :class:`Fitting` fills it up."""
    return (shape[0], width) if name.endswith(DOWN) else (width, *shape[1:])


def _filled(
    arch: MoEArch, source: Source, counts: Mapping[int, int], config: Config, costs: JSON
) -> dict[int, PrunedLayer]:
    """Experts and shared paths of several widths filled up to one with neurons that are zero.

    Args:
        arch: the architecture.
        source: the reduced model.
        counts: experts by layer.
        config: gets the widths.
        costs: gets the neurons before and after, where any are added.
    """
    layers = arch.layers(shape_of(source.config))
    views = {i: arch.mixture(layers[i]) for i in counts}
    wide = max(view.width for view in views.values())
    path = max(view.shared_width for view in views.values())
    room = arch.shared_room(path, wide)
    changes = {**arch.with_width(wide), **((arch.with_shared(room, wide) if room else None) or {})}
    for name, value in changes.items():
        setattr(config, name, value)
    plans: dict[int, PrunedLayer] = {}
    for i, view in views.items():
        if (view.width, view.shared_width) != (wide, room):
            order_W = neurons.filled_up(torch.arange(view.width), wide)
            order_S = neurons.filled_up(torch.arange(view.shared_width), room) if room else None
            plans[i] = SlimmedLayer(
                torch.arange(view.count),
                order_W.repeat(view.count, 1),
                view.width,
                shared_S=order_S,
            )
    if plans:
        before = sum(view.count * view.width for view in views.values())
        costs["expert_neurons"] = [before, sum(counts.values()) * wide]
    return plans


def _spread(values: Iterable[int]) -> str:
    return "/".join(map(str, sorted(set(values))))


def shorten(config: Config, stay: Sequence[int]) -> None:
    """Make a config that of the layers that stay, lists with an entry a layer included."""
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(config, name, [value[i] for i in stay])
    config.num_hidden_layers = len(stay)


class Fitting:
    """A writer that numbers layers anew and fills up dense ones to one width.

    Args:
        writer: takes the tensors.
        starts: what stands before a layer's number in names on disk.
        ffn: the path of a layer's FFN.
        numbers: the new number of each layer that stays.
        narrow: the layers whose dense FFNs are filled up.
        width: neurons they are filled up to.
    """

    def __init__(
        self,
        writer: Writer,
        starts: Collection[str],
        ffn: str,
        numbers: Mapping[int, int],
        narrow: Sequence[int],
        width: int,
    ) -> None:
        self.writer, self.numbers = writer, numbers
        self.narrow, self.width, self.ffn = narrow, width, f"{ffn}."
        self.numbered = re.compile(rf"^({'|'.join(map(re.escape, starts))})(\d+)\.(.*)")

    def add(self, name: str, tensor: Tensor) -> None:
        layer = self.numbered.match(name)
        if layer is not None:
            start, old, rest = layer[1], int(layer[2]), layer[3]
            if old not in self.numbers:
                return
            name = f"{start}{self.numbers[old]}.{rest}"
            if old in self.narrow and rest.startswith(self.ffn):
                new = widened(name, tuple(tensor.shape), self.width)
                missing = [n - was for was, n in zip(tensor.shape, new, strict=True)]
                assert min(missing) >= 0, f"{name} would be cut"
                tensor = F.pad(tensor, (0, missing[1], 0, missing[0]))
        self.writer.add(name, tensor)

    def close(self) -> None:
        self.writer.close()
