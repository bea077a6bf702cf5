"""Converted models as ordinary Hugging Face ones.

Importing this module registers ``moesaic_<base>`` with ``AutoConfig`` and
``AutoModelForCausalLM`` for every architecture, and the model without its head with ``AutoModel``,
which engines ask for; ``import moesaic`` sees to that.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from moesaic import per_layer_config
from moesaic.arch.deepseek import DeepseekConfig, DeepseekForCausalLM, DeepseekModel
from moesaic.arch.dense import PREFIX, Arch
from moesaic.arch.lookup import PLAIN, architectures, base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.errors import how_to_install
from moesaic.io.checkpoint import align, extend
from moesaic.io.models import HEADLESS, predicts_tokens, skeleton_of
from moesaic.io.naming import leave_out, register_conversions
from moesaic.io.quantised import QUANTIZATION
from moesaic.io.source import check_loaded, language_model, resolve, source_or_model
from moesaic.io.trust import pretrained, reading
from moesaic.plan import Plan
from moesaic.plans.base import KINDS
from moesaic.surgery import converted_skeleton, headers_of, install, sizes
from moesaic.types import JSON, Config, MadeModel, Model, Named, Tokenizer, expand_home

STUB_NAME = "modeling_moesaic.py"
CONFIG_NAME = "config.json"
PART, FORMAT = "text_config", "quantization_config"
OLD_NAMES = {"torch_dtype": "dtype"}
"""Present names of config keys that transformers reads and no longer writes."""
SAME = (
    (
        *("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk"),
        *("moe_top_k", "moe_k", "top_k_experts", "num_selected_experts"),
    ),
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ("intermediate_size", "moe_intermediate_size", "ffn_hidden_size", "block_ff_dim", "n_inner"),
    ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
)
"""Sets of names that published configs have for the same number. A class knows one of them; other
programs may read another."""
KEPT = ("base", PLAIN)
"""Header keys that describe the model that the first of several plans was made for."""
SIGMOID = {"scoring_func": "sigmoid"}
BIASED = {**SIGMOID, "topk_method": "noaux_tc"}
UNSAID = {"deepseek_v3": BIASED, "dots1": BIASED, "exaone_moe": SIGMOID, "minimax_m2": SIGMOID}
"""Config keys, by architecture, that engines look for and transformers' classes imply."""
PUBLISHED = {"granitemoehybrid": {"linear_attention": "mamba", "full_attention": "attention"}}
"""Layer types of published configs, by architecture and transformers' names, which it writes."""

MODELS = (AutoModelForCausalLM, AutoModel)
"""Auto classes of transformers: with a head, and without."""


# --- moesaic_<base>: classes ---------------------------------------------------------------------


def _keep_source_out(cls: type, auto_class: str = "") -> None:
    """Replace ``register_for_auto_class``, which would copy this package into checkpoints."""


OURS = {
    "__module__": __name__,
    "register_for_auto_class": classmethod(_keep_source_out),
    "is_custom_code": classmethod(lambda _: False),
}
"""Attributes of all our classes. In custom code transformers renames layer types, and leaves
buffers as they are in memory that other modules' code fills (Falcon-H1)."""


@functools.cache
def classes_of(base: str) -> tuple[type[Config], tuple[type[Model], ...]]:
    """Return the classes of ``moesaic_<base>``, subclasses of the base's own, made at the first
    call.

    Returns:
        the class of configs; those of models, with a head and, if transformers has it, without.
    """
    predicts_tokens(base)  # whose class may have to be made
    register_conversions(base, name := PREFIX + base)
    base_config = CONFIG_MAPPING[base]
    model, bare = MODEL_FOR_CAUSAL_LM_MAPPING[base_config], MODEL_MAPPING.get(base_config, None)
    config = _define_config(base, base_config)

    def from_pretrained(
        cls: type[Model], /, name: str, *args: object, **options: object
    ) -> Model | tuple[Model, JSON]:
        """Load as the base's class does, and refuse weights that are missing or left over."""
        with_info = options.pop("output_loading_info", False)
        load = model.from_pretrained.__func__
        loaded, info = load(cls, name, *args, output_loading_info=True, **options)
        check_loaded(info, str(name), loaded.config.num_hidden_layers, whole=True)
        return (loaded, info) if with_info else loaded

    models = [_define_model(base, config, model, from_pretrained=classmethod(from_pretrained))]
    if bare is not None:
        models.append(_define_model(base, config, bare, prefix=model.base_model_prefix))
    AutoConfig.register(name, config, exist_ok=True)
    for auto, model_class in zip(MODELS, models, strict=False):
        auto.register(config, model_class, exist_ok=True)
    globals().update({kind.__name__: kind for kind in (config, *models)})
    return config, tuple(models)


def _define_config(base: str, base_config: type[Config]) -> type[Config]:
    """Define a class of configs in which some numbers may be lists with one value a layer."""
    aliases, listed = base_config.attribute_map, per_layer_config.listed(base_config)

    def __post_init__(self: Config, **options: object) -> None:
        super(config_class, self).__post_init__(**options)
        per_layer_config.check(self)

    def __getattribute__(self: Config, name: str) -> object:
        """Return an attribute that is a list as it is; ``per_layer_config`` would refuse to."""
        if (real := aliases.get(name, name)) in listed:
            value = object.__getattribute__(self, "__dict__").get(real)
            if isinstance(value, list):
                return value
        return super(config_class, self).__getattribute__(name)

    fields = {f.name: f.default for f in dataclasses.fields(base_config) if f.name in listed}
    config_class: type[Config] = strict(
        type(
            f"Moesaic{base_config.__name__}",
            (base_config,),
            {
                "model_type": PREFIX + base,
                "__annotations__": dict.fromkeys(fields, int | list[int] | None),
                "__post_init__": __post_init__,
                "__getattribute__": __getattribute__,
                **fields,
                **OURS,
            },
        )
    )
    return config_class


def _define_model(
    base: str, config: type[Config], model: type[Model], prefix: str = "", **methods: object
) -> type[Model]:
    """Define a class of models whose layers follow the headers in their config.

    Args:
        base: the base's model type.
        config: the class of its configs.
        model: the base's own class.
        prefix: prefix of its modules' names in models with a head; empty if it has a head.
        methods: further attributes of the class.
    """

    @functools.wraps(model.__init__)  # vLLM compares what it gives with the annotations
    def __init__(self: Model, config: Config) -> None:
        with per_layer_config.as_base(config):
            model.__init__(self, config)
            arch = base_arch(config)
            path = arch.layers_path.removeprefix(f"{prefix}.")
            install(self, dataclasses.replace(arch, layers_path=path), config)
        self.post_init()

    def _initialize_missing_keys(self: Model, *args: object) -> None:
        with per_layer_config.as_base(self.config):  # Gemma 4's asks for one value a layer type
            model._initialize_missing_keys(self, *args)

    return type(
        f"Moesaic{model.__name__}",
        (model,),
        {
            "config_class": config,
            "__init__": __init__,
            "_initialize_missing_keys": _initialize_missing_keys,
            "_keep_in_fp32_modules_strict": [
                *(model._keep_in_fp32_modules_strict or ()),
                *(() if base in architectures()["moe"] else ("router",)),
            ],
            "_can_set_attn_implementation": model._can_set_attn_implementation,
            "_can_set_experts_implementation": model._can_set_experts_implementation,
            **methods,
            **OURS,
        },
    )


class _LazyConfig:
    """Config class of a converted type, made when a model of it is first read: types are many."""

    model_type = ""

    def __new__(cls, *args: object, **options: object) -> Config:
        return classes_of(cls.model_type.removeprefix(PREFIX))[0](*args, **options)

    @classmethod
    def from_dict(cls, *args: object, **options: object) -> Config:
        return classes_of(cls.model_type.removeprefix(PREFIX))[0].from_dict(*args, **options)


def __getattr__(name: str) -> type:
    """Return a class by its name, by which checkpoints and pickles import it."""
    if name not in _NAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    config_class, models = classes_of(_NAMED[name])
    return next(kind for kind in (config_class, *models) if kind.__name__ == name)


def _await() -> dict[str, str]:
    """Register every model type that a result may have with transformers.

    Returns:
        bases by the names of our classes.
    """
    deepseek = DeepseekConfig.model_type
    if deepseek not in CONFIG_MAPPING:
        register_conversions("qwen2_moe", deepseek)
        AutoConfig.register(deepseek, DeepseekConfig)
        for auto, model_class in zip(MODELS, (DeepseekForCausalLM, DeepseekModel), strict=True):
            auto.register(DeepseekConfig, model_class)
    added = {deepseek: DeepseekForCausalLM.__name__, **HEADLESS}
    bare = {deepseek: DeepseekModel.__name__, **MODEL_MAPPING_NAMES}
    named: dict[str, str] = {}
    for base, model in {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **added}.items():
        config = CONFIG_MAPPING_NAMES.get(base, DeepseekConfig.__name__)
        named |= {f"Moesaic{name}": base for name in (bare.get(base), config, model)}
        attributes = {"model_type": PREFIX + base}
        AutoConfig.register(PREFIX + base, type(f"Awaited_{base}", (_LazyConfig,), attributes))
    return named


_NAMED = _await()
_ = [*KINDS.values()]  # imported now: models are built where new tensors have no values


# --- native or not -------------------------------------------------------------------------------


def native_config(config: Config, arch: Arch, plan: Plan) -> JSON | None:
    """Return the changed attributes of a base's config with which the base's class can load a
    plan's result; None if it cannot."""
    if not plan.layers:
        return {}
    return next((c for c in _proposed(config, arch, plan) if _holds(config, arch, plan, c)), None)


def _holds(config: Config, arch: Arch, plan: Plan, changes: JSON) -> bool:
    """Return True if a base's class, with a changed config, has the tensors of a plan's result."""
    base, layers = arch.layers(skeleton_of(config)), _layers(config, arch, changes)
    plans = (plan.layers.get(i) for i in range(len(base)))
    return layers is not None and all(
        sizes(layer) == sizes(old if new is None else converted_skeleton(old, arch, new))
        for layer, old, new in zip(layers, base, plans, strict=True)
    )


def _layers(config: Config, arch: Arch, changes: JSON) -> nn.ModuleList | None:
    """Return the layers that a base's class makes from a changed config; None if it refuses."""
    twin = copy.deepcopy(config)
    try:
        for name, value in changes.items():
            setattr(twin, name, value)
        return arch.layers(skeleton_of(twin))
    except (StrictDataclassError, TypeError, ValueError):
        return None


def _proposed(config: Config, arch: Arch, plan: Plan) -> Iterator[JSON]:
    """Yield changes to a base's config with which its own class may hold a plan's result."""
    natives = {i: layer.native() for i, layer in plan.layers.items()}
    if None in natives.values() or headers_of(config):
        return
    routing = [what for what in natives.values() if what and "dense" not in what]
    dense = {i: what["dense"] for i, what in natives.items() if what and "dense" in what}
    base = plan.base
    if routing and (dense or plan.layers.keys() != base.routed):
        return
    if routing:
        if routing.count(routing[0]) == len(routing):
            changes = _sized(arch, routing[0], base.widths[min(base.routed)])
        elif all(what.keys() == {"top_k"} for what in routing):
            changes = _each(config, arch, {i: what["top_k"] for i, what in natives.items() if what})
        else:
            changes = None
        if changes is not None:
            yield changes
        return
    every = base.plain_widths | dense
    widths = {*every.values()}
    if not isinstance(arch, MoEArch):  # layers may have multiples of one width, as in Gemma 4 E2B
        shares = {Fraction(width, base.widths[i]) for i, width in every.items()}
        if len(shares) == 1:
            yield arch.with_width(int(shares.pop() * min(base.widths[i] for i in every)))
        return
    if len(widths) != 1:
        return
    (width,) = widths
    mix = arch.dense_at(config, every.keys())
    if mix is not None:
        yield from ({**mix, name: width} for name in arch.dense_sizes(config))


def _sized(arch: Arch, native: JSON, width: int) -> JSON | None:
    """Return the config attributes for new sizes of mixture layers; None if one has no attribute.

    Args:
        arch: the architecture.
        native: the sizes, as :meth:`moesaic.plans.base.LayerPlan.native` returns them.
        width: neurons of an expert before.
    """
    assert isinstance(arch, MoEArch)
    setters: dict[str, Callable[[int], JSON | None]] = {
        "experts": arch.with_experts,
        "width": arch.with_width,
        "shared": lambda shared: arch.with_shared(shared, native.get("width", width)),
        "top_k": arch.with_top_k,
    }
    sizes: JSON = {}
    for name, value in native.items():
        attributes = setters[name](value)
        if attributes is None:
            return None
        sizes |= attributes
    return sizes


def _each(config: Config, arch: Arch, top_ks: Mapping[int, int]) -> JSON | None:
    """Return the config attribute that holds each layer's number of experts a token; None without.

    Most config classes take one number for all layers. If one takes a list, a model is made to see
    whether it uses that.
    """
    assert isinstance(arch, MoEArch)
    first, count = next(iter(top_ks.values())), config.num_hidden_layers
    changes = arch.with_top_k([top_ks.get(i, first) for i in range(count)])
    layers = _layers(config, arch, changes or {})
    if layers is None:
        return None
    follows = all(arch.mixture(layers[i]).top_k == top_k for i, top_k in top_ks.items())
    return changes if follows else None


def convert_config(config: Config, arch: Arch, plan: Plan) -> JSON | None:
    """Change a base's config into that of the plan's result, in place.

    Layers that an earlier plan converted keep their headers; those of this plan are added.

    Returns:
        the changed attributes if the result is of the base's own class, else None.
    """
    native, before = native_config(config, arch, plan), _every_key(config)
    if native is not None:
        for name, value in native.items():
            setattr(config, name, value)
        _update_aliases(config, before)
        return native
    header = plan.header()
    stacks = {i: [dict(h) for h in stack] for i, stack in headers_of(config).items()}
    for i, layer in plan.layers.items():
        stacks.setdefault(i, []).append(layer.header())
    earlier = getattr(config, "moesaic", None)
    shape = {k: v for k, v in header["base"].items() if k not in ("weights", "name", "dtype")}
    header |= {"base": shape, **{k: v for k, v in (earlier or {}).items() if k in KEPT}}
    header["layers"] = {str(i): stacks[i] for i in sorted(stacks)}
    config_class, models = classes_of(arch.model_type)
    config.__class__ = config_class
    config.model_type = PREFIX + arch.model_type  # the instance has one of its own
    counts = dict(enumerate(header["base"]["experts"]))
    every = ((i, layer) for i, stack in stacks.items() for layer in stack)
    if any(h.get("experts", counts.get(i)) != counts.get(i) for i, h in every):
        # transformers' load balancing loss takes one number of experts for all layers
        config.output_router_logits = False
    config.moesaic = header
    config.architectures = [models[0].__name__]
    module = STUB_NAME.removesuffix(".py")
    config.auto_map = {
        auto.__name__: f"{module}.{kind.__name__}"
        for auto, kind in zip((AutoConfig, *MODELS), (config_class, *models), strict=False)
    }
    per_layer_config.write_per_layer_config(config, arch)
    _update_aliases(config, before)
    return None


def _update_aliases(config: Config, before: JSON) -> None:
    """Copy changed values of a config to their other names, in place."""
    for name, value in _by_other_names(config, before, before, _every_key(config)).items():
        setattr(config, name, value)


def convert_class(model: Model, arch: Arch, plan: Plan) -> None:
    """Make a live model whose layers were converted an instance of its result's class."""
    leave_out(model.config)  # transformers does not load MTP layers
    native = convert_config(model.config, arch, plan)
    if native is None:
        model.__class__ = classes_of(arch.model_type)[1][0]
        return
    for name in arch.with_experts(0).keys() & native.keys():
        if hasattr(model, "num_experts"):
            model.num_experts = native[name]
    aliases = {name: model.config.attribute_map.get(name, name) for name in vars(model)}
    for name, key in aliases.items():  # what its training losses look at
        if key in native:
            setattr(model, name, native[key])


# --- files ---------------------------------------------------------------------------------------


def write_stub(config: Config, folder: Path) -> None:
    """Write the module by which ``trust_remote_code=True`` finds this package without an import.

    A result of its base's own class needs none.
    """
    if not config.model_type.startswith(PREFIX):
        return
    names = sorted(value.rpartition(".")[2] for value in config.auto_map.values())
    needed = f"This checkpoint needs: {how_to_install()}"
    (folder / STUB_NAME).write_text(  # without try, transformers names an index's package instead
        f'''"""Loads this checkpoint with trust_remote_code=True. {needed}"""

try:
    from moesaic.hub import {", ".join(names)}
except ImportError as error:
    raise ImportError("{needed}") from error

__all__ = {json.dumps(names)}
'''
    )


def write_config(config: Config, folder: Path, source: Path | None = None) -> None:
    """Write ``config.json`` so that every reader finds its keys.

    transformers renames some keys when it reads a config, such as ``num_experts`` of Qwen3-MoE,
    and writes the new names only. Here both are written, and unchanged values keep the source's
    names. The config of a multimodal model's language model is a part of the file, also where the
    source has its keys beside those of other parts, unless the result has a class of our own: then
    it is the whole file.

    Args:
        config: of the result.
        folder: an existing folder.
        source: the folder of the model that it was made from.
    """
    config.save_pretrained(folder)
    file = folder / CONFIG_NAME
    plain: JSON = json.loads(file.read_text("utf-8"))
    now, outer, before, source_config = _every_key(config), None, JSON(), JSON()
    if source is not None:
        source_config = json.loads((source / CONFIG_NAME).read_text("utf-8"))
        whole = pretrained(AutoConfig, source)
        language = language_model(whole)
        before = _every_key(language)
        if language is not whole:
            outer = source_config if config.model_type == language.model_type else None
            if PART in source_config:
                source_config = dict(source_config[PART])
            else:  # Qwen2.5-VL's keys stand beside those of its other parts
                own = {*before, "rope_scaling", "rope_theta"} - {*_every_key(whole)}
                source_config = {k: v for k, v in source_config.items() if k in own}
                outer = outer and {k: v for k, v in outer.items() if k not in own}
        source_config.pop("transformers_version", None)
        for key in ("_attn_implementation", "attn_implementation", "_experts_implementation"):
            source_config.pop(key, None)  # of how it is computed where it is loaded
        if getattr(config, FORMAT, None) is None:
            source_config = {k: v for k, v in source_config.items() if k not in QUANTIZATION}
        plain |= {k: v for k, v in source_config.items() if now.get(k) == before.get(k)}
        plain |= _by_other_names(config, source_config, before, now)
    for alias, name in {**OLD_NAMES, **(config.attribute_map or {})}.items():
        if name in now and (alias in plain or (name in plain and alias not in OLD_NAMES)):
            values = {k: source_config[k] for k in (alias, name) if k in source_config}
            if not values or now[name] != before.get(name):
                values = {alias: now[name], name: now[name]}
            plain |= {k: values.get(k, now[name]) for k in (alias, name)}
    plain = {**_engine_keys(config), **plain}
    published = PUBLISHED.get(config.model_type.removeprefix(PREFIX), {})
    if source is None and published and "layer_types" in plain:
        plain["layer_types"] = [published.get(kind, kind) for kind in plain["layer_types"]]
    if not config.model_type.startswith(PREFIX):
        for keys in (plain, outer or {}):
            keys.pop("auto_map", None)  # names code that is not copied
    if outer is not None:
        quantization = {FORMAT: plain.pop(FORMAT)} if FORMAT in plain else {}
        outer.pop(FORMAT, None)
        plain = {**outer, **quantization, PART: plain}
    file.write_text(json.dumps(plain, indent=2, sort_keys=True) + "\n", "utf-8")


def _by_other_names(config: Config, source: JSON, before: JSON, now: JSON) -> JSON:
    """Return values for keys of the source's file that are other names of changed values.

    Args:
        config: of the result.
        source: content of the source's file.
        before: all values of the source's config.
        now: all values of the result's config.
    """
    known = {*type(config).__dataclass_fields__, *(config.attribute_map or {})}
    values: JSON = {}
    for names in SAME:
        changed = [k for k in names if k in known and now.get(k) != before.get(k)]
        for other in (k for k in names if k not in known and k in source):
            value = source[other]
            # also the number that a list repeats for every layer
            alike = value[:1] if isinstance(value, list) and value == value[:1] * len(value) else []
            for key in (k for k in changed if before.get(k) in (value, *alike)):
                listed = isinstance(value, list) and isinstance(now[key], int)
                values[other] = [now[key]] * len(value) if listed else now[key]
    return values


def _engine_keys(config: Config) -> JSON:
    """Return keys that other engines look for and transformers does not write.

    Rotary settings were top-level keys before transformers 5; engines that look there would use a
    default of their own.
    """
    plain: JSON = dict(UNSAID.get(config.model_type.removeprefix(PREFIX), {}))
    rotary = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" in rotary:  # not where layers have settings of their own
        kind = rotary.get("rope_type", "default")
        plain["rope_scaling"] = None if kind == "default" else {**rotary, "type": kind}
        plain |= {k: rotary[k] for k in ("rope_theta", "partial_rotary_factor") if k in rotary}
    return plain


def _every_key(config: Config) -> JSON:
    """Return a config as plain JSON, including defaults."""
    return json.loads(config.to_json_string(use_diff=False))


def save_live(
    model: Model,
    tokenizer: Tokenizer | None,
    folder: Path,
    predicting: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a loaded model with all files needed to load it again.

    Args:
        model: to be written.
        tokenizer: to be written beside it; None for none.
        folder: an existing one.
        predicting: tensors of MTP layers, by their names on disk.
    """
    if not predicting:
        leave_out(model.config)
    refusals = (ValueError, StrictDataclassError)  # of settings, such as those of generation
    with reading("This model", "", "cannot be saved by transformers", refusals):
        model.save_pretrained(folder)
    if predicting:
        extend(folder, predicting)
    for file in folder.glob("*.safetensors"):
        align(file)
    write_config(model.config, folder)
    write_stub(model.config, folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


@contextmanager
def on_disk(
    model: Named,
    tokenizer: Tokenizer | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> Iterator[str]:
    """Yield a name by which a model can be read from disk: its own, or a temporary copy's folder.

    Args:
        model: a name or folder, a loaded model, or what a verb returned.
        tokenizer: of a loaded model.
        revision: branch, tag or commit, when ``model`` is a hub id.
        token: of the hub.
    """
    if isinstance(model, str | Path):
        name = expand_home(str(model))
        at = revision is not None or token is not None
        yield str(resolve(name, revision, token).folder) if at else name
        return
    with TemporaryDirectory(prefix="moesaic-") as place:
        folder = Path(place) / "model"
        folder.mkdir()
        if isinstance(model, MadeModel):
            model.write(folder)
        else:
            live: Model = source_or_model(model)
            twin: Model = copy.copy(live)  # its modules are the caller's, its config is not
            twin.config = copy.deepcopy(live.config)
            save_live(twin, tokenizer, folder)
        yield str(folder)
