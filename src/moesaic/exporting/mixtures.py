"""Pruned and condensed mixtures in their own architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.checkpoint import Writer, skeleton
from moesaic.errors import MoesaicError
from moesaic.exporting.form import Export, base_config
from moesaic.exporting.targets import Header
from moesaic.hub import Source
from moesaic.moe import MoEArch
from moesaic.plan import Plan, PrunedLayer
from moesaic.surgery import base_shape, rewrite


def reduced(source: Source, arch: MoEArch, headers: Mapping[str, Header], ep: int) -> Export:
    """Fewer experts or dense layers: one count, one dense width, filled up where that is exact."""
    kinds = {header["kind"] for header in headers.values()}
    if "skipping" in kinds:
        raise MoesaicError("No native router skips experts: export the model without skip.")
    if "dropped" in kinds:
        raise MoesaicError("Layers that pass their input on have no native form.")
    config = base_config(source.config, arch)
    shape = base_shape(skeleton(source.config), arch)
    counts = {i: count for i, count in enumerate(shape.experts) if count}
    dense = {i: width for i, width in enumerate(shape.widths) if i not in counts}
    costs: dict[str, Any] = {}
    plans: dict[int, Any] = {}
    if counts:
        most = max(counts.values())
        groups = arch.group_count(config)
        count = next(
            n for n in range(most, 2 * most * ep * groups) if not n % ep and not n % groups
        )
        if set(counts.values()) != {count}:
            if arch.never is None or groups > 1:
                raise MoesaicError(
                    f"Its layers have {_spread(counts.values())} experts and would need {count}: "
                    f"{arch.model_type} has no router that never chooses an expert. "
                    "Prune to one legal count."
                )
            plans = {i: PrunedLayer(torch.arange(n)).padded(count) for i, n in counts.items()}
        setattr(config, arch.count, count)
        costs["experts"] = [sum(counts.values()), count * len(counts)]
    condensed = [h for h in headers.values() if h["kind"] == "condensed"]
    width = max(dense.values(), default=0)
    if condensed:
        mix = arch.dense_at(config, set(dense))
        if any(h["gated"] for h in condensed):
            raise MoesaicError(
                "Its shared path keeps a gate token by token, which no dense layer has: "
                "condense with --shared-gate mean."
            )
        if mix is None or not width:
            raise MoesaicError(
                f"{arch.model_type} cannot have dense layers {_spread(dense)} only; "
                "condense others (--candidates)."
            )
        for name, value in mix.items():
            setattr(config, name, value)
        config.intermediate_size = width
        costs["dense_neurons"] = [sum(dense.values()), width * len(dense)]
    plan = Plan("export", shape, plans)

    def write(writer: Writer) -> None:
        narrow = tuple(arch.ffn_prefix(i) for i, n in dense.items() if n < width)
        rewrite(source.checkpoint, arch, plan, Filling(writer, narrow, width))

    return Export(config, write, costs)


def _spread(values: Any) -> str:
    return "/".join(map(str, sorted(set(values))))


class Filling:
    """A writer that fills up the dense layers under some prefixes to one width."""

    def __init__(self, writer: Writer, prefixes: tuple[str, ...], width: int) -> None:
        self.writer, self.prefixes, self.width = writer, prefixes, width

    def add(self, name: str, tensor: Tensor) -> None:
        if self.prefixes and name.startswith(self.prefixes):
            axis = 1 if name.endswith("down_proj.weight") else 0
            missing = self.width - tensor.shape[axis]
            tensor = F.pad(tensor, (0, missing) if axis else (0, 0, 0, missing))
        self.writer.add(name, tensor)

    def close(self) -> None:
        self.writer.close()
