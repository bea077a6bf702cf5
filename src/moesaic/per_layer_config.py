"""Sizes that differ from layer to layer, in the config schemas of transformers and vLLM.

A result may have layers of its base's own modules, each of its own width or with its own number of
experts a token. transformers' key for that is ``per_layer_config``; vLLM's Transformers backend
takes lists under the names of :data:`LISTED`. Both are in ``config.json`` beside the header that
this package uses, and in the config in memory, which is the one that vLLM reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from moesaic.arch.dense import Arch
from moesaic.arch.lookup import PLAIN, plain_config
from moesaic.arch.mixture import MoEArch
from moesaic.errors import MoesaicError
from moesaic.io.models import skeleton_of
from moesaic.types import JSON, Config

LISTED = ("moe_intermediate_size", "intermediate_size", "num_experts_per_tok")
"""Attributes that vLLM's Transformers backend reads layer by layer if they are lists."""
LAYERS = "per_layer_config"
NORMED = "norm_topk_prob"


def write_per_layer_config(config: Config, arch: Arch) -> None:
    """Write the sizes of a converted model's layers into its config as lists, in place.

    Only where layers have the base's own modules in other sizes, and equally many experts. The
    values that the lists replace are kept in the header.
    """
    take_back(config)
    plain = plain_config(config, arch.model_type)
    before, now = (arch.layers(skeleton_of(c)) for c in (plain, config))
    counts = {arch.experts_in(layer) for layer in now} - {0}
    if len(counts) > 1 or [*map(_modules, before)] != [*map(_modules, now)]:
        return
    changed = {
        name: each
        for name, each in _numbers(plain, arch, now).items()
        if hasattr(plain, name) and each != _of_layers(plain, name, len(now))
    }
    if not changed:
        return
    settings: JSON = {}
    if changed.keys() <= listed(config):
        settings |= {**(arch.with_experts(*counts) if counts else {}), **changed}
        if isinstance(arch, MoEArch) and not hasattr(plain, NORMED):
            settings[NORMED] = _normed(arch, now)
    layers = {int(i): differs for i, differs in (plain.to_dict().get(LAYERS) or {}).items()}
    settings[LAYERS] = {
        i: {**layers.get(i, {}), **{name: each[i] for name, each in changed.items()}}
        for i in range(len(now))
    }
    config.moesaic[PLAIN] = {name: getattr(plain, name, None) for name in settings}
    config.moesaic[PLAIN][LAYERS] = layers or None
    _set_attributes(config, settings)


def take_back(config: Config) -> None:
    """Restore the base's values in a config, in place."""
    _set_attributes(config, (getattr(config, "moesaic", None) or {}).pop(PLAIN, {}))


def listed(config: Config | type[Config]) -> set[str]:
    """Return the attributes of a config, or of a class of configs, that may be lists."""
    return {config.attribute_map.get(name, name) for name in LISTED}


def _modules(layer: nn.Module) -> list[type]:
    return [type(module) for module in layer.modules()]


def _numbers(plain: Config, arch: Arch, layers: nn.ModuleList) -> dict[str, list[int]]:
    """Return each layer's number of a result, by attribute of the base's config.

    For layers without experts, numbers that concern experts are the base's.
    """
    if not isinstance(arch, MoEArch):
        return {arch.width: [arch.times * arch.width_of(layer) for layer in layers]}
    views = [arch.mixture(layer) if arch.is_moe(layer) else None for layer in layers]
    widths = [None if view is None else view.width for view in views]
    top_ks = [None if view is None else view.top_k for view in views]
    numbers = {arch.width: widths, **({} if arch.chosen is None else {arch.chosen: top_ks})}
    return {
        name: [
            other if number is None else number
            for number, other in zip(each, _of_layers(plain, name, len(layers)), strict=True)
        ]
        for name, each in numbers.items()
    }


def _of_layers(config: Config, name: str, count: int) -> list[int]:
    """Return a config's number for each layer, given as one number for all of them or as a list."""
    value: int | list[int] | None = getattr(config, name, None)
    return list(value) if isinstance(value, list) else [value or 0] * count


def _normed(arch: MoEArch, layers: nn.ModuleList) -> bool:
    """Return True if the weights of a token's experts add up to one, however many they are."""
    view = next(arch.mixture(layer) for layer in layers if arch.is_moe(layer))
    routing = view.routing.with_top_k(1)
    if routing.bias_E is not None:
        routing.bias_E = torch.full((view.count,), 0.0 if arch.parts.scale is None else 1.0)
    if routing.always:
        return False
    logits_NX = torch.zeros(1, view.count + routing.always + routing.top_k)
    weights_NK = routing.routed(logits_NX)[1]
    return bool(weights_NK.sum() > 1 - 1e-3)


def _set_attributes(config: Config, settings: JSON) -> None:
    """Set attributes, and delete those that are None and that are no fields of the config.

    Values that differ by layer are set last, as they are compared with the others.
    """
    if LAYERS in settings:
        config.per_layer_config = None
    for name in settings.keys() - {LAYERS}:
        if settings[name] is None and name not in type(config).__dataclass_fields__:
            vars(config).pop(name, None)
        else:
            setattr(config, name, settings[name])
    if settings.get(LAYERS):
        config.per_layer_config = settings[LAYERS]


def check(config: Config) -> None:
    """Refuse lists that are not one number for each layer."""
    for name in listed(config):
        each, count = vars(config).get(name), config.num_hidden_layers
        if isinstance(each, list) and len(each) != count:
            raise MoesaicError(
                f"config.json: {name} lists {len(each)} numbers, but there are {count} layers."
            )


@contextmanager
def as_base(config: Config) -> Iterator[None]:
    """Context in which a config has its base's values, from which the base's class makes modules.

    Raises:
        MoesaicError: vLLM would replace our experts by its own.
    """
    settings, every = (getattr(config, "moesaic", None) or {}).get(PLAIN, {}), config.to_dict()
    ours = {name: every[name] for name in settings}
    if config._attn_implementation == "vllm" and not any(
        isinstance(every.get(name), list) for name in listed(config)
    ):
        raise MoesaicError(
            f"vLLM's Transformers backend cannot run this {config.model_type}: only widths and "
            "experts a token may differ from its base's, layer by layer."
        )
    _set_attributes(config, settings)
    try:
        yield
    finally:
        _set_attributes(config, ours)
