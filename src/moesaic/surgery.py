"""Application of a plan to a loaded model, or to a checkpoint read tensor by tensor.

Both use the layer kinds' ``convert``, a pure function of tensors.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moesaic.arch.dense import Arch, LayerUse, RoutedModule
from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.errors import MoesaicError, quote
from moesaic.io.checkpoint import Value, cast
from moesaic.io.models import dtype_by_name, skeleton_of
from moesaic.io.naming import Naming, is_mtp, language
from moesaic.io.source import Source, warn_of_unplaced
from moesaic.io.trust import reading
from moesaic.modules.running import always_routing, watch
from moesaic.plan import FORMAT, BaseShape, Plan
from moesaic.plans.base import KINDS, DiskState, Header, LayerPlan, LiveState, Sizes
from moesaic.types import JSON, Config, Model

# --- bases ---------------------------------------------------------------------------------------


def base_shape(model: Model, arch: Arch) -> BaseShape:
    """Return the shape that a plan for this model records for its base."""
    layers = arch.layers(model)
    experts = tuple(arch.experts_in(layer) for layer in layers)
    return BaseShape(
        arch.model_type,
        model.get_input_embeddings().weight.shape[1],
        tuple(arch.width_of(layer) for layer in layers),
        experts if any(experts) else (),
        routing=routing_in(model.config),
    )


def routing_in(config: Config) -> str:
    """Return a digest of the layers' headers and of the number of experts a token."""
    arch = base_arch(config)
    top_k = getattr(config.get_text_config(), getattr(arch, "chosen", None) or "", None)
    decided = json.dumps([headers_of(config), top_k], sort_keys=True)
    return hashlib.sha256(decided.encode()).hexdigest()[:16]


WITHOUT_EFFECT = ("dtype", "torch_dtype", "architectures", "transformers_version", "use_cache")
"""Keys of a config by which no model computes otherwise, or that are compared by themselves."""


def settings_digest(config: Config) -> str:
    """Return a digest of all else by which a model computes than its weights."""

    def kept(values: object) -> object:
        if not isinstance(values, dict):
            return values
        names = (name for name in values if name not in WITHOUT_EFFECT and str(name)[:1] != "_")
        return {str(name): kept(values[name]) for name in names}

    settings = json.dumps(kept(config.to_diff_dict()), sort_keys=True, default=str)
    return hashlib.sha256(settings.encode()).hexdigest()[:16]


def check_base(plan: Plan, model: Model, arch: Arch) -> None:
    """Refuse to apply a plan to another model than it was made for."""
    shape = base_shape(model, arch)
    if shape != plan.base:
        raise MoesaicError(
            f"The plan was made for {_described(plan.base)}; this is {_described(shape)}."
        )
    if plan.base.routing != shape.routing:
        raise MoesaicError(
            f"The plan was made for {plan.base.name or 'a model'} of the same shape that skips "
            "experts otherwise, or of which other layers were changed."
        )
    padding = isinstance(arch, MoEArch) and arch.never is not None
    for i, layer in plan.layers.items():
        try:
            if i not in range(len(shape.widths)):
                raise ValueError(f"there are {len(shape.widths)} layers, from 0 on")
            layer.check(Sizes(shape.hidden_size, shape.widths[i], shape.experts_of(i), padding))
        except (ValueError, TypeError, IndexError) as error:
            raise MoesaicError(f"The plan of layer {i} does not fit the model: {error}.") from error


def spread(values: Iterable[int]) -> str:
    """Return different numbers in words.

    >>> spread([8, 6, 8])
    '6/8'
    """
    return "/".join(map(str, sorted(set(values))))


def _described(base: BaseShape) -> str:
    experts = f", {spread(base.experts)} experts" if base.experts else ""
    return (
        f"a {base.model_type} of {len(base.widths)} layers, hidden size {base.hidden_size}, "
        f"FFN width {spread(base.widths)}{experts}"
    )


# --- converted models ----------------------------------------------------------------------------


def headers_of(config: Config) -> dict[int, list[Header]]:
    """Return the headers of each converted decoder layer, in the order of the conversions.

    Layers that no plan converted are left out.

    Raises:
        MoesaicError: another version wrote the config.
    """
    section = getattr(config, "moesaic", None) or {"format": FORMAT, "layers": {}}
    with reading("config.json, moesaic"):
        if section.get("format") != FORMAT:
            raise MoesaicError(
                f"This {config.model_type} was written in format {quote(section.get('format'))}; "
                f"this version reads {FORMAT}. Convert the original again."
            )
        stacks = {int(i): list(stack) for i, stack in section["layers"].items()}
        for header in (header for stack in stacks.values() for header in stack):
            if header["kind"] not in KINDS:
                raise ValueError(f"there are no layers of kind {quote(header['kind'])}")
    return stacks


def _kind_of(config: Config, index: int) -> tuple[type[LayerPlan], Header] | None:
    """Return the layer kind of a decoder layer and its header; None if no plan converted it."""
    *_, header = headers_of(config).get(index, [None])
    return None if header is None else (KINDS[header["kind"]], header)


def layer_uses(model: Model, arch: Arch) -> list[LayerUse]:
    """Return each decoder layer's parameters and a token's use of them under uniform routing.

    Args:
        model: dense or converted; a skeleton is enough.
        arch: its architecture.

    Raises:
        MoesaicError: the config's description of its base does not fit the model.
    """
    section, layers, uses = getattr(model.config, "moesaic", None), arch.layers(model), []
    widths: tuple[int, ...] = ()
    if section is not None:
        with reading("config.json, moesaic"):
            widths = BaseShape.load(section["base"]).widths
            if len(widths) != len(layers):
                raise ValueError(f"{len(widths)} widths of {len(layers)} layers")
    for i, layer in enumerate(layers):
        kind = _kind_of(model.config, i)
        uses.append(
            arch.use(layer) if kind is None else kind[0].use(layer, arch, kind[1], widths[i])
        )
    return uses


def routed_modules(model: Model, arch: Arch) -> dict[int, RoutedModule]:
    """Return the module that chooses experts, by decoder layer that routes, converted or not."""
    modules = {}
    for i, layer in enumerate(arch.layers(model)):
        kind = _kind_of(model.config, i)
        routed = arch.routed(layer) if kind is None else kind[0].routed(layer, arch, kind[1])
        if routed is not None:
            modules[i] = routed
    return modules


def install(model: Model, arch: Arch, config: Config) -> None:
    """Replace layers' modules by those that a converted model's config lists, without values."""
    for i, stack in headers_of(config).items():
        for header in stack:
            KINDS[header["kind"]].install(arch.layers(model), i, arch, header)
    watch(model, arch.layers_path)


# --- live models ---------------------------------------------------------------------------------


@torch.no_grad()
def apply_layer(layers: nn.ModuleList, index: int, arch: Arch, plan: LayerPlan) -> None:
    """Convert one decoder layer of a loaded model in place."""
    layer = layers[index]
    training = layer.training
    tensors = dict(plan.convert(arch, LiveState(layer)))
    plan.install(layers, index, arch, plan.header())
    layer = layers[index]
    missing = layer.load_state_dict(tensors, strict=False, assign=True)
    unset = [n for n in missing.missing_keys if n.startswith(plan.sources(arch) or "\0")]
    if unset or missing.unexpected_keys:
        raise RuntimeError(f"layer {index}: {unset} unset, {missing.unexpected_keys} unknown")
    layer.train(training)


def apply_plan(model: Model, arch: Arch, plan: Plan) -> None:
    """Convert a loaded model's layers in place; refuse a plan made for another model."""
    check_base(plan, model, arch)
    for i, layer in plan.layers.items():
        apply_layer(arch.layers(model), i, arch, layer)
    watch(model, arch.layers_path)


@contextmanager
def converted_copy(layer: nn.Module, arch: Arch, plan: LayerPlan) -> Iterator[nn.Module]:
    """Yield a converted copy of a loaded decoder layer, every token of which runs as at decoding.

    It shares the tensors that the plan does not change; the layer itself is not changed.
    """
    tensors = [*layer.parameters(), *layer.buffers()]
    layers = nn.ModuleList([copy.deepcopy(layer, {id(t): t for t in tensors})])
    apply_layer(layers, 0, arch, plan)
    with always_routing(layers[0]):
        yield layers[0]


def converted_skeleton(layer: nn.Module, arch: Arch, plan: LayerPlan) -> nn.Module:
    """Return a copy of a decoder layer on the meta device with the modules of a plan."""
    layers = nn.ModuleList([copy.deepcopy(layer).to("meta")])
    plan.install(layers, 0, arch, plan.header())
    return layers[0]


def sizes(layer: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a decoder layer's tensors, by name."""
    return {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}


# --- checkpoints ---------------------------------------------------------------------------------


def _mtp_plans(naming: Naming, arch: Arch, plan: Plan) -> dict[str, LayerPlan]:
    """Return copies of the last decoder layer's plan for routed MTP layers, by prefix of their
    names in memory."""
    last = max(plan.base.routed, default=-1)
    copied = plan.layers[last].mtp_plan() if last in plan.layers else None
    if copied is None:
        return {}
    blocks = mtp_blocks(naming, arch, plan.base)
    return {start: copied for start, n in blocks.items() if n == plan.base.experts_of(last)}


def mtp_blocks(naming: Naming, arch: Arch, base: BaseShape) -> dict[str, int]:
    """Return the numbers of routed experts, 0 for a dense layer, of the decoder layers among MTP
    layers, by prefix of the layer's names in memory."""
    block = f".{arch.inside}"
    blocks: dict[str, int] = {}
    for name in naming.in_memory.values():
        if is_mtp(name, len(base.widths)) and block in name:
            start, _, inside = name.partition(block)
            blocks.setdefault(f"{start}.", 0)
            if isinstance(arch, MoEArch) and inside == arch.parts.weight:
                shape = naming.shape(name)
                blocks[f"{start}."] = 0 if shape is None else shape[0] - arch.parts.always
    return blocks


def mtp_fate(naming: Naming, arch: Arch, plan: Plan, changed: JSON | None) -> str:
    """Return the change of MTP layers: ``kept``; ``along``, some reduced as the last layer is; or
    ``left_out``, as they would not fit the result's config.

    Args:
        naming: of the checkpoint that the plan is for.
        arch: its architecture.
        plan: the decision.
        changed: the config's changed attributes; None if the result has a class of our own, as
            then nothing else reads the config.
    """
    reduced, changes = _mtp_plans(naming, arch, plan), (changed or {}).keys()
    # a mixture's experts and dense layers may have their width from one config attribute
    dense = arch.width == "intermediate_size" or not plan.base.routed
    for start, count in mtp_blocks(naming, arch, plan.base).items() if changes else ():
        fits = start in reduced if count else not dense
        if not fits and changes & (arch.with_experts if count else arch.with_width)(0).keys():
            return "left_out"
    return "along" if reduced else "kept"


def kept_names(model: Model, mtp: bool, beside: bool) -> Callable[[str], bool]:
    """Return a function that is True for names in memory of tensors that are kept in a result.

    Args:
        model: a skeleton of the language model.
        mtp: MTP layers are kept.
        beside: so are parts beside the language model.
    """
    names, count = {*model.state_dict()}, model.config.num_hidden_layers
    return lambda name: mtp if is_mtp(name, count) else beside or name in names


def rewrite(
    naming: Naming,
    arch: Arch,
    plan: Plan,
    keep: Callable[[str], bool],
    dtype: Callable[[str], torch.dtype | None] = lambda _: None,
) -> Iterator[tuple[str, Value]]:
    """Yield a converted checkpoint's tensors; at most one layer's FFN is in memory.

    Args:
        naming: of the source.
        arch: its architecture.
        plan: the decision.
        keep: True if a tensor outside of the plan's layers is kept, by its name in memory; MTP
            layers that are kept are converted by :func:`_mtp_plans`.
        dtype: floating-point type by name in memory; None for the checkpoint's own.
    """
    checkpoint = naming.checkpoint
    plans = {arch.layer_prefix(i): layer for i, layer in plan.layers.items()}
    plans |= {start: p for start, p in _mtp_plans(naming, arch, plan).items() if keep(start)}
    starts = {
        prefix: tuple(prefix + start for start in layer.sources(arch))
        for prefix, layer in plans.items()
    }
    names: dict[str, dict[str, str]] = {prefix: {} for prefix in plans}
    for disk, name in naming.in_memory.items():
        if not keep(name):
            continue
        owner = next((prefix for prefix in plans if name.startswith(prefix)), None)
        if owner is not None:
            names[owner][disk] = name
        if owner is None or not name.startswith(starts[owner] or "\0"):
            to = dtype(name)
            if to is not None:
                yield disk, cast(checkpoint.tensor(disk), to)
            else:
                yield from checkpoint.stored(disk)
    for prefix, layer in plans.items():
        state = DiskState(naming, prefix, names[prefix], dtype)
        for name, tensor in _fitting(layer.convert(arch, state), prefix):
            full = state.stored_prefix + name
            tensor = naming.reordered(full, tensor)
            if dtype(full) is not None:
                yield full, tensor
            else:
                yield from checkpoint.encode(full, tensor, state.stored_prefix + layer.origin(name))


def applied(
    source: Source, arch: Arch, plan: Plan, changed: JSON | None, dtype: torch.dtype | None
) -> Iterator[tuple[str, Value]]:
    """Yield the tensors of a source with a plan applied, those of MTP layers and other parts too.

    Args:
        source: the original.
        arch: its architecture.
        plan: made for it.
        changed: the config's changed attributes; None if the result has a class of our own.
        dtype: floating-point type; None for the source's own.
    """
    naming, model = source.naming, skeleton_of(source.config, dtype)
    mtp = mtp_fate(naming, arch, plan, changed) != "left_out"
    types = {} if dtype is None else {"dtype": dtype_by_name(model)}
    alone = changed is None and source.beside
    keep = kept_names(model, mtp, beside=source.beside and not alone)
    if not (source.beside or source.headers_only):
        count = model.config.num_hidden_layers
        names = naming.in_memory.values()
        warn_of_unplaced(source.name, [n for n in names if not (keep(n) or is_mtp(n, count))])
    for name, value in rewrite(naming, arch, plan, keep, **types):
        yield language(name) if alone else name, value


def applied_bytes(
    source: Source, arch: Arch, plan: Plan, changed: JSON | None, dtype: torch.dtype | None
) -> int:
    """Return the bytes of what :func:`applied` yields of a source of headers only."""
    assert source.headers_only
    return sum(value.nbytes for _, value in applied(source, arch, plan, changed, dtype))


def _fitting(tensors: Iterator[tuple[str, Tensor]], prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield a layer's converted tensors; refuse a plan that names what does not exist."""
    try:
        yield from tensors
    except (IndexError, KeyError, ValueError, TypeError, RuntimeError) as error:
        message = " ".join(str(error).split())
        raise MoesaicError(
            f"The plan of {prefix.rstrip('.')} does not fit the model: {message:.200}"
        ) from error
