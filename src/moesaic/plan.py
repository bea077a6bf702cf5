"""What was decided, layer by layer: everything needed to rebuild the result, nothing else.

A plan is also the slim patch: ``moesaic apply BASE PLAN OUT``. On disk it is ``plan.json`` (the
header, readable) and ``plan.safetensors`` (index lists and routers).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from moesaic.errors import MoesaicError
from moesaic.overlapping import OverlappingLayer

FORMAT = 1
JSON_NAME, TENSORS_NAME = "plan.json", "plan.safetensors"


@dataclass(frozen=True)
class CarvedLayer:
    """A dense FFN cut into a backbone that every token runs and petals of which it runs some.

    Neurons are reordered so that the backbone and every petal are contiguous. An ``order_M``
    shorter than the original width drops neurons (static pruning does, MoRE never).
    """

    kind: ClassVar[str] = "carved"

    order_M: Tensor
    """int64: the original neuron at each new place: backbone first, then petal after petal."""
    backbone: int
    petals: tuple[int, ...] = ()
    top_k: int = 0
    routing: str = "cosine"
    router_RD: Tensor | None = None
    """float32: one row a petal; (R, D + B) where the router sees the backbone's B neurons too."""
    down_DM: Tensor | None = None
    """A down projection in carved order that takes the place of the base's own."""
    bias_RD: Tensor | None = None
    """An output bias of every petal; without petals one row."""
    gate: dict[str, Any] = field(default_factory=dict)
    """Options of a router that weighs petals; with a threshold ``top_k`` is the most that run."""

    def __post_init__(self) -> None:
        width = self.backbone + sum(self.petals)
        if self.order_M.numel() != width:
            raise ValueError(f"{self.order_M.numel()} neurons are ordered, {width} are placed")
        if self.order_M.unique().numel() != width:
            raise ValueError("a neuron is placed twice")
        if not 0 <= self.top_k <= len(self.petals):
            raise ValueError(f"top_k {self.top_k} of {len(self.petals)} petals")
        if (self.router_RD is None) != (not self.petals):
            raise ValueError("a router is needed for petals, and only for petals")
        if self.gate and len(set(self.petals)) > 1:
            raise ValueError("petals that are weighed are of one size")

    @property
    def active_width(self) -> float:
        """Mean neurons a token runs under uniform routing (MoRE, App. F.2)."""
        if not self.petals:
            return self.backbone
        return self.backbone + self.top_k * sum(self.petals) / len(self.petals)

    def header(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "backbone": self.backbone,
            "petals": list(self.petals),
            "top_k": self.top_k,
            "routing": self.routing,
            **({"gate": self.gate} if self.gate else {}),
            **({} if self.bias_RD is None else {"bias": True}),
        }

    def tensors(self) -> dict[str, Tensor]:
        optional = {
            "router": self.router_RD,
            "down": self.down_DM,
            "bias": self.bias_RD,
        }
        given = {name: tensor for name, tensor in optional.items() if tensor is not None}
        return {"order": self.order_M, **given}

    @classmethod
    def load(cls, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> CarvedLayer:
        return cls(
            order_M=tensors["order"],
            backbone=header["backbone"],
            petals=tuple(header["petals"]),
            top_k=header["top_k"],
            routing=header["routing"],
            router_RD=tensors.get("router"),
            gate=header.get("gate", {}),
            down_DM=tensors.get("down"),
            bias_RD=tensors.get("bias"),
        )


PADDING = -1
"""In a list of kept experts: a place for an expert that can never be routed to."""


@dataclass(frozen=True)
class PrunedLayer:
    """A mixture of which some experts stay, in their old order, weights untouched."""

    kind: ClassVar[str] = "pruned"

    kept_E: Tensor
    """int64: the original expert at each new place; PADDING where there is none."""
    down_E: Tensor | None = field(default=None, kw_only=True)
    """Down projections at each new place that take the place of the experts' own (E, D, M), as the
    experts' module holds them."""

    def __post_init__(self) -> None:
        real_E = self.experts
        if real_E.numel() == 0 or not torch.equal(real_E, real_E.unique()):
            raise ValueError(f"kept experts must be distinct and in order: {self.kept}")

    @property
    def kept(self) -> list[int]:
        """The original experts, padding included."""
        numbers: list[int] = self.kept_E.tolist()
        return numbers

    @property
    def experts(self) -> Tensor:
        """The original experts, padding left out."""
        return self.kept_E[self.kept_E != PADDING]

    def padded(self, count: int) -> PrunedLayer:
        """The same layer with ``count`` places."""
        missing = count - self.kept_E.numel()
        kept_E = torch.cat([self.kept_E, self.kept_E.new_full((missing,), PADDING)])
        down_E = self.down_E
        if down_E is not None:
            down_E = torch.cat([down_E, down_E.new_zeros(missing, *down_E.shape[1:])])
        return replace(self, kept_E=kept_E, down_E=down_E)

    def header(self) -> dict[str, Any]:
        return {"kind": self.kind, "experts": self.kept_E.numel()}

    def tensors(self) -> dict[str, Tensor]:
        return {"kept": self.kept_E, **({} if self.down_E is None else {"down": self.down_E})}

    @classmethod
    def load(cls, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> PrunedLayer:
        return cls(tensors["kept"], down_E=tensors.get("down"))


@dataclass(frozen=True)
class MergedLayer(PrunedLayer):
    """A pruned layer whose experts that stay are means over those that went (M-SMoE)."""

    kind: ClassVar[str] = "merged"

    into_E: Tensor
    """int64: the expert that each original one joins; a kept one joins itself."""
    share_E: Tensor
    """float32: its weight in the mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not torch.equal(self.into_E.unique(), self.experts):
            raise ValueError(f"experts join {self.into_E.unique().tolist()}, {self.kept} are kept")
        if not torch.equal(self.into_E[self.experts], self.experts):
            raise ValueError("a kept expert joins another")

    @property
    def groups(self) -> dict[int, list[int]]:
        """By kept expert those that become it, itself included."""
        kept: list[int] = self.experts.tolist()
        return {i: (self.into_E == i).nonzero().flatten().tolist() for i in kept}

    def tensors(self) -> dict[str, Tensor]:
        return {"kept": self.kept_E, "into": self.into_E, "share": self.share_E}

    @classmethod
    def load(cls, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> MergedLayer:
        return cls(tensors["kept"], tensors["into"], tensors["share"])


@dataclass(frozen=True)
class SkippingLayer:
    """A mixture whose router leaves out a token's experts of little weight."""

    kind: ClassVar[str] = "skipping"

    beta: float
    rule: str
    """top2: compare the second weight with the first; tail: the last ones with the sum."""
    pruned: PrunedLayer | None = None
    """Experts that go for good as well."""

    def header(self) -> dict[str, Any]:
        pruned = {} if self.pruned is None else {"experts": self.pruned.kept_E.numel()}
        return {"kind": self.kind, "beta": self.beta, "rule": self.rule, **pruned}

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.pruned is None else self.pruned.tensors()

    @classmethod
    def load(cls, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SkippingLayer:
        pruned = PrunedLayer.load(header, tensors) if "experts" in header else None
        return cls(header["beta"], header["rule"], pruned)


@dataclass(frozen=True)
class CondensedLayer:
    """A mixture turned into one dense MLP (CD-MoE, Eq. 3): shared path and chosen experts.

    Of a layer that is dense already, the MLP itself is the shared path.
    """

    kind: ClassVar[str] = "condensed"

    experts_K: Tensor
    """int64: the routed experts that every token runs, in the order they were chosen."""
    gates_K: Tensor
    """float32: g_i, their fixed weights, the router's scaling included."""
    width: int
    """Neurons, zeros beyond the experts' own included."""
    shared: bool = True
    """The shared path stays."""
    shared_scale: float = 1.0
    """What the shared path is multiplied with, beside a gate of its own."""
    gated: int = 0
    """Neurons of the shared path that keep the base's gate, which scales them token by token."""
    down_DM: Tensor | None = None
    """A down projection that takes the place of the folded one."""

    def __post_init__(self) -> None:
        if self.experts_K.numel() != self.gates_K.numel():
            raise ValueError(f"{self.experts_K.numel()} experts, {self.gates_K.numel()} weights")
        if self.experts_K.unique().numel() != self.experts_K.numel():
            raise ValueError("an expert is chosen twice")

    @property
    def experts(self) -> list[int]:
        """The routed experts in the order they were chosen."""
        numbers: list[int] = self.experts_K.tolist()
        return numbers

    def header(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "width": self.width,
            "shared": self.shared,
            "shared_scale": self.shared_scale,
            "gated": self.gated,
        }

    def tensors(self) -> dict[str, Tensor]:
        down = {} if self.down_DM is None else {"down": self.down_DM}
        return {"experts": self.experts_K, "gates": self.gates_K, **down}

    @classmethod
    def load(cls, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> CondensedLayer:
        options = {k: header[k] for k in ("width", "shared", "shared_scale", "gated")}
        return cls(tensors["experts"], tensors["gates"], **options, down_DM=tensors.get("down"))


@dataclass(frozen=True)
class DroppedLayer:
    """A whole decoder layer that is gone, attention included (Layer Drop)."""

    kind: ClassVar[str] = "dropped"

    def header(self) -> dict[str, Any]:
        return {"kind": self.kind}

    def tensors(self) -> dict[str, Tensor]:
        return {}

    @classmethod
    def load(cls, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> DroppedLayer:
        return cls()


LayerPlan = (
    CarvedLayer | OverlappingLayer | PrunedLayer | SkippingLayer | CondensedLayer | DroppedLayer
)
KINDS: dict[str, Any] = {
    kind.kind: kind
    for kind in (
        CarvedLayer,
        OverlappingLayer,
        PrunedLayer,
        MergedLayer,
        SkippingLayer,
        CondensedLayer,
        DroppedLayer,
    )
}


@dataclass(frozen=True)
class BaseShape:
    """What a plan needs its source to be."""

    model_type: str
    hidden_size: int
    widths: tuple[int, ...]
    """The FFN width of every decoder layer; of one expert, where it routes."""
    experts: tuple[int, ...] = ()
    """Routed experts of every decoder layer, 0 for dense ones; empty for a dense model."""


@dataclass(frozen=True)
class Plan:
    """A frozen, complete, deterministic decision about a whole model."""

    method: str
    base: BaseShape
    layers: dict[int, LayerPlan]
    config: dict[str, Any] = field(default_factory=dict)
    """The method's options, as given."""
    calibration: str = ""
    """Fingerprint of the calibration tokens."""

    def header(self) -> dict[str, Any]:
        """The part that fits in ``config.json``."""
        return {
            "format": FORMAT,
            "method": self.method,
            "base": asdict(self.base),
            "config": self.config,
            "calibration": self.calibration,
            "layers": {str(i): layer.header() for i, layer in sorted(self.layers.items())},
        }

    def save(self, folder: Path) -> None:
        """Write ``plan.json`` and ``plan.safetensors`` into an existing folder."""
        tensors = {
            f"{i}.{name}": tensor.contiguous()
            for i, layer in self.layers.items()
            for name, tensor in layer.tensors().items()
        }
        save_file(tensors, folder / TENSORS_NAME)
        (folder / JSON_NAME).write_text(json.dumps(self.header(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a plan from its folder or its ``plan.json``.

        Raises:
            MoesaicError: there is no plan, or it is not whole.
        """
        file = path / JSON_NAME if path.is_dir() else path
        if not file.is_file():
            raise MoesaicError(f"No plan at {path}: expected a folder with {JSON_NAME}.")
        try:
            header = json.loads(file.read_text())
            if header["format"] != FORMAT:
                raise MoesaicError(
                    f"{file} has plan format {header['format']}; this version reads {FORMAT}."
                )
            tensors = load_file(file.with_name(TENSORS_NAME))
            layers = {
                int(i): KINDS[h["kind"]].load(
                    h,
                    {
                        name.removeprefix(f"{i}."): tensor
                        for name, tensor in tensors.items()
                        if name.startswith(f"{i}.")
                    },
                )
                for i, h in header["layers"].items()
            }
            shape: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in header["base"].items()
            }
            base = BaseShape(**shape)
            return cls(header["method"], base, layers, header["config"], header["calibration"])
        except (ValueError, KeyError, TypeError, OSError, SafetensorError) as error:
            raise MoesaicError(f"The plan at {path} cannot be read: {error}") from error


def same(a: LayerPlan, b: LayerPlan) -> bool:
    """Whether two layers' decisions are identical, tensors bitwise."""
    ta, tb = a.tensors(), b.tensors()
    return (
        a.header() == b.header()
        and ta.keys() == tb.keys()
        and all(torch.equal(ta[k], tb[k]) for k in ta)
    )


class Progress:
    """Finished layers of a run, on disk as soon as they are decided, so that it can be resumed.

    Args:
        folder: where they are kept; created with the first layer.
        request: identifies the run; a resumed run must ask for the same.
    """

    def __init__(self, folder: Path, request: Mapping[str, Any]) -> None:
        self.folder = folder
        self.request = json.loads(json.dumps(request))

    def finished(self) -> dict[tuple[str, int], tuple[LayerPlan, dict[str, Any]]]:
        """What is on disk, by name and layer: the plan and what was seen on the way.

        Raises:
            MoesaicError: the folder holds another run.
        """
        note = self.folder / "request.json"
        if not note.is_file():
            return {}
        if json.loads(note.read_text()) != self.request:
            raise MoesaicError(
                f"{self.folder} holds layers of another request; repeat that one's options, "
                "or pass --overwrite to start anew."
            )
        done = {}
        for file in sorted(self.folder.glob("layer-*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                record = json.loads(opened.metadata()["moesaic"])
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}
            layer = KINDS[record["header"]["kind"]].load(record["header"], tensors)
            done[record["name"], record["layer"]] = (layer, record["analysis"])
        return done

    def begin(self) -> None:
        """Note whose the folder is."""
        self.folder.mkdir(parents=True, exist_ok=True)
        note = self.folder / "request.json"
        if not note.exists():
            partial = note.with_suffix(".writing")
            partial.write_text(json.dumps(self.request))
            partial.replace(note)  # other processes may be looking

    def add(self, name: str, index: int, layer: LayerPlan, analysis: dict[str, Any]) -> None:
        """Keep a finished layer; it is there whole or not at all."""
        self.begin()
        record = {"name": name, "layer": index, "header": layer.header(), "analysis": analysis}
        file = self.folder / f"layer-{index:04d}-{name}.safetensors"
        partial = file.with_suffix(".writing")
        tensors = {key: tensor.contiguous() for key, tensor in layer.tensors().items()}
        save_file(tensors, partial, metadata={"moesaic": json.dumps(record)})
        partial.replace(file)

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
