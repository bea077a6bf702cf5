"""Discovery of architectures by rule: the paths of a model's parts, from its modules and its
config.

transformers gives routed experts one interface and most models the same few names, so that a table
of architectures would only repeat them. The rules are tried on every causal language model of the
installed transformers: ``docs/architectures.md``.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.arch.dense import Arch, AttentionNames, CustomAct, FFNNames
from moesaic.arch.mixture import ROUTED, MoEArch
from moesaic.arch.routing import (
    RouterParts,
    RoutingFunction,
    arguments,
    place,
    set_top_k,
    shallow_copy,
)
from moesaic.errors import MoesaicError
from moesaic.io.models import skeleton_of
from moesaic.types import JSON, Config, Model

ACTIVATIONS = ("act_fn", "activation_fn", "act", "activation")
GATES = ("gate", "w1", "wi_0", "c_fc_0")
"""Words in the name of the projection whose output enters the activation function."""
FUSED_QKV = ("qkv_proj", "query_key_value", "W_pack", "Wqkv")
OUTPUTS = ("o_proj", "dense", "out_proj", "o")
NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
DENSE_LAYERS = (
    "mlp_only_layers",
    "first_k_dense_replace",
    "moe_layer_start_index",
    "num_dense_layers",
    "mlp_layer_types",
    ROUTED,
)
GROUPS = ("n_group", "num_expert_group")
WIDTHS = (("intermediate_size",), ("ffn",), ("ff", "dim"), ("inner",))
"""Words in the names of config attributes that hold the width of FFNs, the likeliest first."""
EXPERT_WIDTHS = (("moe", "size"), ("expert", "size"), ("intermediate_size",), ("ffn", "size"))
NO_COUNT = ("per_tok", "shared", "group", "top", "size", "width")
"""Words in the names of attributes that hold the width of experts, and in those that do not hold
their number."""
UNSET_WIDTHS = ("intermediate_size", "ffn_hidden_size", "n_inner")
"""Width attributes that may be None, which means a multiple of the hidden size."""
CHOSEN = ("per_tok", "topk", "top_k", "moe_k")
"""Words in the name of the config attribute that holds the top-k."""
PROBES = 64
"""Number of tokens on which a router is tried."""
FAR = 40.0
"""Difference of logits at which one expert has all the weight of a softmax."""
MOST = 256
"""Most configs whose architecture is cached."""


IN_LAYER: dict[str, JSON] = {
    "gemma4_text": {
        "after": "post_feedforward_layernorm_2",
        "before": "pre_feedforward_layernorm_2",
        "entry": "pre_feedforward_layernorm",
    }
}
"""Norms, as fields of :class:`MoEArch`, by ``model_type``, for experts in the decoder layer itself:
no rule finds them."""
INWARD = ("llama4_text",)
"""Types whose router's scores multiply the experts' inputs, and whose experts do not follow
transformers' interface and are stored as (inputs, outputs): no rule finds them."""
_CACHE: dict[str, Arch] = {}


def discover(config: Config) -> Arch:
    """Return the architecture of a config's model.

    Raises:
        MoesaicError: names the parts that were not found.
    """
    text = config.get_text_config()
    if text is not config:
        raise MoesaicError(
            f"{config.model_type}: it has parts beside text; its language model alone, "
            f"{text.model_type}, is another model_type."
        )
    key = f"{type(config).__name__} {config.to_json_string(use_diff=False)}"
    if key not in _CACHE:
        if len(_CACHE) > MOST:
            _CACHE.clear()
        with torch.device("cpu"):  # a converted model calls this on the meta device
            _CACHE[key] = of_model(skeleton_of(config), config)
    return _CACHE[key]


def of_model(model: Model, config: Config) -> Arch:
    """Return the architecture of a model.

    Args:
        model: on any device; a skeleton will do.
        config: its config.

    Raises:
        MoesaicError: names the parts that were not found.
    """
    name = config.model_type
    count = config.num_hidden_layers
    lists = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList))
    path = next((n for n, modules in lists if len(modules) == count), None)
    if path is None:
        raise MoesaicError(f"{name}: no list of {count} decoder layers was found.")
    layers = list(model.get_submodule(path))
    routed = [layer for layer in layers if _experts_paths(name, layer)]
    if routed:
        return _mixture(name, path, layers, routed, config)
    return _dense(name, path, layers, config)


# --- plain MLPs ----------------------------------------------------------------------------------


def _mlp_names(module: nn.Module) -> FFNNames | None:
    """Return the projections of a feed-forward module; None if it is no plain MLP."""
    linears = {n: m for n, m in module.named_children() if isinstance(m, nn.Linear)}
    act = next((n for n in ACTIVATIONS if callable(getattr(module, n, None))), None)
    rest = [m for n, m in module.named_children() if n not in linears]
    if any(True for part in rest for _ in part.parameters()):
        return None
    if [*module.parameters(recurse=False)] or not 2 <= len(linears) <= 3:
        return None
    names = _projections(linears, act or ACTIVATIONS[0])
    if names is None or names.gate is None:
        return names if act else None
    return _acting(module, names, has_act=act is not None)


def _acting(module: nn.Module, names: FFNNames, has_act: bool) -> FFNNames | None:
    """Return the names of a gated MLP, with ``custom_act`` unless h = act(gate) * up; None if
    neurons mix.

    Found by running it on usual gates and ups, and on some large enough to show clamping.

    Args:
        module: the MLP.
        names: its projections.
        has_act: True if it has an activation function.
    """
    drawn = torch.Generator("cpu").manual_seed(0)
    both = torch.randn(2, PROBES, 8, generator=drawn, dtype=torch.float32, device="cpu")
    gate, up = torch.cat([both, FAR * both], 1)
    custom, few = CustomAct(copy.deepcopy(module).eval(), names), slice(2, 5)
    act = getattr(module, names.act) if has_act else custom
    try:
        h = custom(gate, up)
        if torch.allclose(act(gate) * up, h, rtol=1e-4, atol=1e-4):
            return names
        local = torch.allclose(custom(gate[:, few], up[:, few]), h[:, few])
    except (RuntimeError, TypeError, AttributeError, ValueError):  # it needs more than x
        return names if has_act else None
    return replace(names, custom_act=True) if local else None


def _projections(linears: dict[str, nn.Linear], act: str) -> FFNNames | None:
    """Return which of two or three linear modules is which, by their shapes; None if none fits."""
    down = _down(linears)
    if down is None:
        return None
    hidden, width = linears[down].weight.shape
    into = [name for name in linears if name != down]
    rows = [linears[name].weight.shape for name in into]
    if len(into) == 2 and all(shape == (width, hidden) for shape in rows):
        gates = [name for name in into if any(part in name for part in GATES)]
        if len(gates) != 1:
            return None
        (up,) = {*into} - {*gates}
        return FFNNames(up, down, gates[0], act)
    if len(into) == 1 and rows[0] == (2 * width, hidden):
        return FFNNames(into[0], down, into[0], act)
    if len(into) == 1 and rows[0] == (width, hidden):
        return FFNNames(into[0], down, None, act)
    return None


def _down(linears: dict[str, nn.Linear]) -> str | None:
    """Return the down projection: its input is the others' output, and its output their input."""
    for name in reversed(linears):
        others = [m for n, m in linears.items() if n != name]
        if all(m.in_features == linears[name].out_features for m in others):
            wide = {m.out_features for m in others}
            if wide <= {linears[name].in_features, 2 * linears[name].in_features}:
                return name
    return None


def _mlps(layer: nn.Module) -> dict[str, FFNNames]:
    """Return the plain MLPs among a module's own parts, by their names."""
    mlps = ((path, _mlp_names(module)) for path, module in layer.named_children())
    return {path: names for path, names in mlps if names is not None}


def _dense(name: str, path: str, layers: Sequence[nn.Module], config: Config) -> Arch:
    mlps = [_mlps(layer) for layer in layers]
    common = {place for place in mlps[0] if all(place in names for names in mlps)}
    hidden = config.hidden_size
    common = {
        place
        for place in common
        if getattr(layers[0].get_submodule(place), mlps[0][place].down).out_features == hidden
    }
    if len(common) != 1:
        children = ", ".join(sorted({type(m).__name__ for m in layers[0].children()}))
        what = "none" if not common else f"several ({', '.join(sorted(common))})"
        raise MoesaicError(
            f"{name}: every decoder layer must have one plain MLP, two or three linear modules and "
            f"an activation function; {what} is in every layer. Found in the first: {children}."
        )
    (place,) = common
    names = {by_place[place] for by_place in mlps}
    if len(names) > 1:
        raise MoesaicError(f"{name}: the MLPs of its decoder layers have different projections.")
    if any(ffn.custom_act for ffn in names):
        raise MoesaicError(f"{name}: what its MLPs make of gates and ups is not act(gate) * up.")
    ffn = names.pop()
    at, attention = _attention(layers[0])
    return Arch(name, ffn, place, path, attention, at, *_sizing(config, layers[0], place, ffn.down))


def _sizing(config: Config, layer: nn.Module, place: str, down: str) -> tuple[str, int, str | None]:
    """Return how a dense model's config holds the width of FFNs: fields of :class:`Arch`.

    Returns:
        the config attribute, its value over the width, and the one by which the width is computed.
    """

    settings, width = config.to_dict(), _width_in(layer, place, down)
    adjusted = next((k for k in settings if "auto_adjust" in k and settings[k] is True), None)
    never = ("shared", "moe", "expert", "multiple")
    keys = [key for words in WIDTHS for key in _keys(settings, words, never)]
    exact = [key for key in keys if settings[key] == width]
    if shared := [key for key in _keys(settings, ("shared", "size")) if settings[key] == width]:
        exact += shared  # Granite 4 without experts
        exact = [key for key in exact if _width_with(config, key, layer, 0, place, down) > width]
    whole = (key for key in keys if settings[key] > width and settings[key] % width == 0)
    key = next(iter(exact), None) or (None if adjusted else next(whole, None))
    if key is not None:
        return key, settings[key] // width, None
    unset = (key for key in UNSET_WIDTHS if key in settings)
    return next(iter([*keys, *unset]), Arch.width), 1, adjusted


def _attention(layer: nn.Module) -> tuple[str, AttentionNames]:
    """Return the path of a layer's attention, and its projections; the usual ones if none fit."""
    for path, module in layer.named_modules():
        linears = {n for n, m in module.named_children() if isinstance(m, nn.Linear)}
        output = next((n for n in OUTPUTS if n in linears), None)
        fused = next((n for n in FUSED_QKV if n in linears), None)
        if output is None or not (fused or {"q_proj", "k_proj", "v_proj"} <= linears):
            continue
        q, k, v = (fused,) * 3 if fused else ("q_proj", "k_proj", "v_proj")
        norms = next((pair for pair in NORMS if hasattr(module, pair[0])), NORMS[0])
        return path, AttentionNames(q, k, v, output, *norms)
    return "self_attn", AttentionNames()


# --- mixtures of experts -------------------------------------------------------------------------


def _experts_paths(name: str, layer: nn.Module) -> list[str]:
    """Return the modules of a decoder layer that follow transformers' interface of experts."""
    mark = "gate_up_proj" if name in INWARD else "is_concatenated"
    return [path for path, m in layer.named_modules() if hasattr(m, mark)]


def _experts_place(name: str, routed: Sequence[nn.Module]) -> tuple[str, str]:
    """Return the path of the experts' block in every routed layer, and their name in it."""
    places = {tuple(_experts_paths(name, layer)) for layer in routed}
    if len(places) != 1 or len(*places) != 1:
        raise MoesaicError(f"{name}: its layers have experts at several places: {sorted(places)}.")
    ((place,),) = places
    block_path, _, leaf = place.rpartition(".")
    if not block_path and name not in IN_LAYER:
        raise MoesaicError(
            f"{name}: its experts stand in the decoder layer itself, not in a block of their own."
        )
    return block_path, leaf


def _mixture(
    name: str, path: str, layers: Sequence[nn.Module], routed: Sequence[nn.Module], config: Config
) -> MoEArch:
    block_path, leaf = _experts_place(name, routed)
    blocks = [layer.get_submodule(block_path) for layer in routed]
    tables = [_table(block) for block in blocks]
    first = tables.index(None) if None in tables else 0
    layer, block = routed[first], blocks[first]
    experts = block.get_submodule(leaf)
    if getattr(experts, "has_post_expert_norm", False):  # in transformers from 5.20 on
        raise MoesaicError(f"{name}: a norm follows every expert.")
    down: Tensor = experts.get_parameter("down_proj")
    transposed = bool(getattr(experts, "is_transposed", name in INWARD))
    count, width = down.shape[0], down.shape[1 if transposed else 2]
    stacked, always = _stacked(block, leaf)
    parts = replace(_router(name, block, leaf, count, always), inward=name in INWARD)
    parts = replace(parts, table=next(filter(None, tables), None))
    keys = (_key_of(name, *both, parts) for both in zip(routed, blocks, strict=True))
    parts = replace(parts, key=next(filter(None, [*keys]), None))
    norms, gate = IN_LAYER.get(name), None
    inside: dict[str, FFNNames] = {}
    outside: dict[str, FFNNames] = {}
    if norms is None:
        inside, outside = _mlps(block), _mlps(layer)
        if len(inside) + len(outside) > 1:
            raise MoesaicError(
                f"{name}: several MLPs are beside its experts: {', '.join([*inside, *outside])}."
            )
        linears = {n: m for n, m in block.named_children() if type(m) is nn.Linear}
        gate = next((n for n, m in linears.items() if m.out_features == 1), None)
        kinds = ((n, type(m).__name__) for n, m in block.named_children())
        norms = {"after": next((n for n, kind in kinds if kind.endswith("Norm")), None)}
        inside = {stacked: FFNNames(), **inside} if parts.always else inside
        expected = {leaf, parts.router, *inside, *filter(None, [gate, norms["after"]])}
        _nothing_else(name, block, expected, parts)
    shared, beside = next(iter(inside), None), next(iter(outside), None)
    mixes = (value for key, value in vars(block).items() if "combination" in key)
    if shared and any(mix != "sum" for mix in mixes):
        raise MoesaicError(f"{name}: its shared path is not simply added to what its experts make.")
    settings = config.to_dict()
    plain = (_mlps(layer).get(block_path) for layer in layers)
    names = next((names for names in plain if names is not None), None)
    listed = (key for key in DENSE_LAYERS if settings.get(key) is not None)
    # a layer that does not route may have another MLP at the place of others' experts
    others = (getattr(layer, block_path, None) if block_path else None for layer in layers)
    downs = (getattr(block, FFNNames().down, None) for block in others)
    odd = names is None and any(isinstance(down, nn.Linear) for down in downs)
    arch = MoEArch(
        name,
        ffn=names or FFNNames(),
        ffn_path=block_path,
        layers_path=path,
        count=_attribute(name, config, count, "experts", [("expert",)], NO_COUNT),
        width=_attribute(name, config, width, "neurons of experts", EXPERT_WIDTHS, ("shared",)),
        chosen=_choosing(config, block.get_submodule(parts.router), parts),
        transposed=transposed,
        alternating=not getattr(experts, "is_concatenated", True),
        parts=parts,
        experts=leaf,
        shared=shared,
        shared_gate=gate if shared else None,
        beside=beside,
        **norms,
        shared_names={**inside, **outside}.get(shared or beside or "", FFNNames()),
        dense_layers=None if odd else next(listed, None),
    )
    at, attention = _attention(layer)
    arch = replace(arch, attention=attention, attention_path=at)
    if parts.always:
        arch = replace(arch, shared_times=parts.always)
    elif shared or beside:
        arch = _sizing_shared(arch, layers, layer, config, width)
    return _with_router_findings(arch, block, settings, count)


def _sizing_shared(
    arch: MoEArch, layers: Sequence[nn.Module], layer: nn.Module, config: Config, width: int
) -> MoEArch:
    """Return the architecture with the shared path's width: a size, or a count of experts."""
    place = arch.shared_at or "", arch.shared_names.down
    settings, path_width = config.to_dict(), _width_in(layer, *place)

    def counts(key: str) -> bool:
        """Return True if the path's width grows with this attribute, a count of experts."""
        if settings[key] * width != path_width:
            return False
        return _width_with(config, key, layer, [*layers].index(layer), *place) > path_width

    sizes = (key for key in _keys(settings, ("shared", "size")) if settings[key] == path_width)
    size = _likeliest(sizes, config)
    times = (key for key in _keys(settings, ("shared",), ("size",)) if counts(key))
    many = None if size else next(times, None)
    tied = 0 if size or many or path_width % width else path_width // width
    return replace(arch, shared_size=size, shared_count=many, shared_times=tied)


def _width_in(layer: nn.Module, place: str, down: str) -> int:
    """Return the width of the MLP at a place of a decoder layer."""
    return int(getattr(layer.get_submodule(place), down).in_features)


def _width_with(
    config: Config, key: str, layer: nn.Module, index: int, place: str, down: str
) -> int:
    """Return the width of a layer's MLP where its config has one more of an attribute."""
    more = copy.deepcopy(config)
    setattr(more, key, getattr(config, key) + 1)
    with torch.device("meta"):
        return _width_in(type(layer)(more, index), place, down)


def _stacked(block: nn.Module, experts: str) -> tuple[str, int]:
    """Return the module of shared experts in fused tensors, (S, M, D) and (S, D, M), and S; "" and
    0 if there are none."""
    names = FFNNames().projections
    for path, module in block.named_children():
        tensors = dict(module.named_parameters())
        if path != experts and tensors.keys() == {*names} and tensors[names[0]].dim() == 3:
            return path, len(tensors[names[0]])
    return "", 0


def _router(name: str, block: nn.Module, experts: str, count: int, always: int = 0) -> RouterParts:
    """Return the parts of the router: the module with a row for every expert, shared ones last."""
    for path, module in block.named_children():
        if path == experts or _mlp_names(module) is not None or type(module) is nn.Linear:
            continue
        lengths = {n: len(p) for n, p in module.named_parameters() if p.dim() == 2}
        rows = [n for n in lengths if n.rpartition(".")[2] == "weight"]
        weighed = always if lengths.get(rows[0] if rows else "") == count + always else 0
        if len(rows) != 1 or not {*lengths.values()} <= {count + weighed, 1}:
            continue
        weight = f"{path}.{rows[0]}"
        bias = _choice_bias(block, path, weight, count)
        names = (n for n, p in module.named_parameters() if "expert_scale" in n and len(p) == count)
        scale = next((f"{path}.{n}" for n in names), None)
        numbers = [n for n, v in vars(block).items() if isinstance(v, float | int) and "scal" in n]
        factor = next((n for n in numbers if not hasattr(module, n)), None)
        top_k = _top_k(module)
        return RouterParts(path, weight, bias, scale, factor=factor, top_k=top_k, always=weighed)
    children = ", ".join(f"{n} ({type(m).__name__})" for n, m in block.named_children())
    raise MoesaicError(
        f"{name}: no module of {type(block).__name__} has one row for each of {count} experts and "
        f"is a router. Found: {children}."
    )


def _top_k(router: nn.Module) -> str:
    """Return the name of the attribute in which a router holds its top-k."""
    config = vars(getattr(router, "config", None) or object)
    keys = (key for word in CHOSEN for key in config if word in key and type(config[key]) is int)
    key = None if hasattr(router, "top_k") else next(keys, None)
    return RouterParts.top_k if key is None else f"config.{key}"


def _choice_bias(block: nn.Module, router: str, weight: str, count: int) -> str | None:
    """Return the name of the bias for the choice only, in the router or passed by the block."""
    module = block.get_submodule(router)
    inside = [f"{router}.{n}" for n, _ in [*module.named_parameters(), *module.named_buffers()]]
    handed = [n for n, value in arguments(block, module).items() if isinstance(value, Tensor)]
    tensors: dict[str, Tensor] = {n: block.get_parameter(n) for n, _ in block.named_parameters()}
    tensors |= dict(block.named_buffers())
    return next(
        (
            n
            for n in [*inside, *handed]
            if "bias" in n
            and n != f"{weight.removesuffix('weight')}bias"
            and tensors[n].numel() == count
        ),
        None,
    )


def _table(block: nn.Module) -> str | None:
    """Return the name of a table of experts that is not indexed by hidden states."""
    tables = (n for n, t in block.named_buffers() if t.dim() == 2 and t.dtype == torch.int64)
    return next(tables, None)


def _key_of(name: str, layer: nn.Module, block: nn.Module, parts: RouterParts) -> str | None:
    """Return the name of the layer's argument by which a router with a table chooses.

    Raises:
        MoesaicError: a router needs more than hidden states and the values that its block holds.
    """
    router = block.get_submodule(parts.router)
    handed = arguments(block, router)
    parameters = list(inspect.signature(type(router).forward).parameters.values())[2:]
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in handed]
    passed = {*inspect.signature(type(layer).forward).parameters}
    passed &= {*inspect.signature(type(block).forward).parameters}
    if len(missing) == 1 and parts.in_block(block).table and missing[0] in passed:
        return missing[0]
    if missing:
        raise MoesaicError(
            f"{name}: {type(router).__name__} chooses by {' and '.join(missing)} too, and not by "
            "hidden states only."
        )
    return None


def _nothing_else(name: str, block: nn.Module, expected: set[str], parts: RouterParts) -> None:
    """Refuse a block with weights that no rule knows."""
    odd = [n for n, m in block.named_children() if n not in expected and [*m.parameters()]]
    if len(latent := [n for n in odd if "latent" in n]) == 2:
        raise MoesaicError(
            f"{name}: its experts work on fewer dimensions than the model, into which "
            f"{latent[0]} and out of which {latent[1]} projects for all of them."
        )
    tensors = [*block.named_parameters(recurse=False), *block.named_buffers(recurse=False)]
    odd += [n for n, _ in tensors if n != parts.choice_bias]
    if odd:
        raise MoesaicError(f"{name}: {type(block).__name__} has parts that no rule knows: {odd}.")


def _keys(settings: JSON, words: Sequence[str], never: Sequence[str] = ()) -> Iterator[str]:
    """Yield keys of a config with integer values whose names have some words and none of others."""
    for key, value in settings.items():
        if type(value) is int and all(w in key for w in words) and not any(w in key for w in never):
            yield key


def _likeliest(keys: Iterable[str], config: Config) -> str | None:
    """Return the first key that a config's class knows, else the first one: published configs also
    have keys that only other programs read."""
    known = {*type(config).__dataclass_fields__, *(config.attribute_map or {}).values()}
    return min(keys, key=lambda key: key not in known, default=None)


def _attribute(
    name: str,
    config: Config,
    value: int,
    what: str,
    patterns: Iterable[Sequence[str]],
    never: Sequence[str],
) -> str:
    """Return the config attribute that holds a number of ``what``, by words in its name."""
    settings = config.to_dict()
    keys = (key for words in patterns for key in _keys(settings, words, never))
    key = _likeliest((key for key in keys if settings[key] == value), config)
    if key is None:
        raise MoesaicError(f"{name}: its config has no attribute for the {value} {what}.")
    return key


def _choosing(config: Config, router: nn.Module, parts: RouterParts) -> str | None:
    """Return the config attribute that holds the top-k, of all layers or by layer."""
    owner, _, leaf = parts.top_k.rpartition(".")
    top_k = getattr(getattr(router, owner) if owner else router, leaf, None)
    keys = (
        key
        for word, (key, value) in product(CHOSEN, config.to_dict().items())
        if word in key and not re.search("group|index|shared", key)
        if top_k in (value if isinstance(value, list) else [value])
    )
    return _likeliest(keys, config)


# --- found by running the router -----------------------------------------------------------------


def _with_router_findings(arch: MoEArch, block: nn.Module, settings: JSON, count: int) -> MoEArch:
    """Return the architecture with the findings of running the router: call, biases, groups."""
    parts, groups = arch.parts, next((key for key in GROUPS if settings.get(key)), None)
    if not hasattr(block.get_submodule(parts.router), "num_group"):
        groups = None
    drawn = torch.Generator().manual_seed(0)
    logits_NX = torch.randn(PROBES, count + parts.always, generator=drawn, dtype=torch.float32)
    logits_NE, refused = logits_NX[:, :count], None
    for lifted, apart in ((False, False), (True, False), (False, True)):
        parts = replace(parts, lifted=lifted, apart=apart)
        try:
            echo_NE = _routing_twin(block, parts, count).routed(logits_NX)[0].flatten(0, -2)
            break
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
            refused = error
    else:
        raise MoesaicError(f"{arch.model_type}: its router cannot be asked: {refused!s:.200}")
    same = echo_NE.shape == logits_NE.shape and torch.allclose(echo_NE, logits_NE, atol=1e-5)
    if not (parts.apart or same):
        raise MoesaicError(
            f"{arch.model_type}: its router changes logits before it chooses by them."
        )
    arch = replace(arch, parts=parts, groups=groups)
    if (_routing_twin(block, parts, count, top_k=1).weights(logits_NX) != 0).sum(1).max() > 1:
        arch = replace(arch, chosen=None)
    return replace(arch, per_group=_per_group(arch, block), never=_never(arch, block, logits_NX))


def _routing_twin(
    block: nn.Module, parts: RouterParts, count: int, **numbers: int
) -> RoutingFunction:
    """Return the routing function of a block with constant weights: all ones, biases zero.

    Args:
        block: the block.
        parts: names of its router's parts.
        count: number of experts, which may be lower than the block's.
        numbers: other numbers to set on the router.
    """
    rows = len(attrgetter(parts.weight)(block))
    counts = {rows - parts.always: count, rows: count + parts.always}
    twin, router = shallow_copy(block), copy.deepcopy(block.get_submodule(parts.router))
    # to_empty would use torch's references, and import sympy
    twin._modules[parts.router] = router._apply(
        lambda t: torch.ones(t.shape, dtype=torch.float32 if t.is_floating_point() else t.dtype)
    )
    for path, value in ((parts.weight, 1.0), (parts.choice_bias, 0.0), (parts.scale, 1.0)):
        if path is not None:
            shape = [counts.get(n, n) for n in attrgetter(path)(block).shape]
            place(twin, path, torch.full(shape, value, dtype=torch.float32))
    for name in vars(router):
        if name == "num_experts":
            setattr(router, name, count)
    for name, number in numbers.items():
        if name == "top_k":
            set_top_k(router, parts, number)
        else:
            setattr(router, name, number)
    return RoutingFunction(twin, parts)


def _per_group(arch: MoEArch, block: nn.Module) -> int:
    """Return the fewest experts per group that a router can work with: one, or two."""
    if arch.groups is None:
        return 1
    try:
        trial = _routing_twin(block, arch.parts, 2, num_group=2, topk_group=1, top_k=1)
        trial.weights(torch.ones(2, 2, dtype=torch.float32))
    except (RuntimeError, IndexError):
        return 2
    return 1


def _never(arch: MoEArch, block: nn.Module, logits_NX: Tensor) -> str | None:
    """Return the tensor that can keep an expert from being chosen and changes nothing else."""
    parts, count = arch.parts, logits_NX.shape[1] - arch.parts.always
    bias = f"{parts.weight.removesuffix('weight')}bias"
    if any(name == bias for name, _ in block.named_parameters()):
        return bias
    if parts.choice_bias is None:
        return None
    router = block.get_submodule(parts.router)
    groups = int(getattr(router, "num_group", 1) or 1)
    allowed_E = torch.ones(count, dtype=torch.bool)
    allowed_E[:: count // groups] = False
    there_X = F.pad(allowed_E, (0, parts.always), value=True)
    logits_NX = torch.cat([logits_NX, logits_NX + FAR * ~there_X])
    routing = _routing_twin(block, parts, count)
    masked_NE = routing.weights(logits_NX, allowed_E.expand(len(logits_NX), -1))
    lowest = torch.finfo(torch.float32).min / 4
    routing.bias_E = torch.zeros(count, dtype=torch.float32).masked_fill(~allowed_E, lowest)
    biased_NE = routing.weights(logits_NX)
    return parts.choice_bias if torch.allclose(biased_NE, masked_NE, atol=1e-6) else None
