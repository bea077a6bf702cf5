"""Bytes and active parameters of a model with condensed layers, computed without building it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from torch import nn

from moesaic.arch.mixture import MoEArch
from moesaic.io.checkpoint import shape_of
from moesaic.io.dtypes import sizes_in
from moesaic.observation.job import Job
from moesaic.plans.base import LayerPlan
from moesaic.surgery import layer_uses, shaped


class Footprint:
    """Bytes and active parameters of a model and of its condensed versions."""

    def __init__(self, job: Job[MoEArch]) -> None:
        self._arch = job.arch
        shape = shape_of(job.original.config, job.dtype) if job.on_disk else job.shape
        layers = job.arch.layers(shape)
        self._itemsize = next(layers.parameters()).element_size()
        self.bytes = sum(sizes_in(shape)) + _beside(layers)
        uses = layer_uses(shape, job.arch)
        total = _count(shape)
        stored = sum(use.stored for use in uses)
        used = sum(use.active for use in uses)
        self.active = round(total - stored + used)
        self._whole = [(_count(layer), _beside(layer)) for layer in layers]
        self._idle = [round(use.ffn - use.active_ffn) for use in uses]
        self._skeleton = layers if job.on_disk else job.arch.layers(shape_of(shape.config))
        self._counts: dict[tuple[int, str], tuple[int, int]] = {}

    def applied(self, plans: Mapping[int, LayerPlan]) -> tuple[int, int]:
        """Return bytes and active parameters with the layers' plans applied."""
        bytes_, active = self.bytes, self.active
        for i, plan in plans.items():
            (whole, beside), (stays, tables) = self._whole[i], self._size(i, plan)
            gone = whole - stays
            bytes_ -= gone * self._itemsize + beside - tables
            active -= gone - self._idle[i]
        return bytes_, active

    def _size(self, index: int, plan: LayerPlan) -> tuple[int, int]:
        """Return a layer's parameters under its plan, and the bytes of its other stored tensors."""
        key = (index, json.dumps(plan.header()))
        if key not in self._counts:
            layer = shaped(self._skeleton[index], self._arch, plan)
            self._counts[key] = _count(layer), _beside(layer)
        return self._counts[key]


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _beside(module: nn.Module) -> int:
    """Return the bytes of stored tensors that are no parameters, such as a router's table."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return sum(t.nbytes for name, t in module.state_dict().items() if name not in parameters)
