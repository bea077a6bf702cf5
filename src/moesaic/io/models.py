"""Models in memory: skeletons of configs, types to compute in, a caller's model left as it was.

Some language models are in transformers only as parts of larger models: they are given a head here.
Qwen3-VL's mixture, for one, is a ``qwen3_vl_moe_text`` within a ``qwen3_vl_moe``; as such it has
no class that predicts tokens, and no name of an architecture in its config.
"""

from __future__ import annotations

import copy
import logging
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, wraps
from math import prod
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, GenerationMixin, LlamaForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from moesaic.errors import MoesaicError
from moesaic.io.checkpoint import check_finite
from moesaic.io.naming import register_conversions
from moesaic.io.trust import reading
from moesaic.registry import Dynamic, remade
from moesaic.types import Config, MadeModel, Model, Values

LARGE = 1 << 20
"""Elements from which on :class:`_NoRoom` gives a tensor no memory."""
ROOM = 1 << 28
"""Largest number of values of one buffer: a gigabyte in float32."""
PARAMETERS = 500_000
"""Largest number of tensors of a model: five times those of the known one with most experts."""
SKELETONS = 8
"""Number of skeletons that :func:`skeleton_of` caches."""
_SKELETONS: dict[str, Model] = {}


def dtype_by_name(model: Model) -> Callable[[str], torch.dtype]:
    """Return a function of a tensor's name to its type: the model's, or float32 if strict."""
    dtype, wide = model.dtype, model._keep_in_fp32_modules_strict or ()
    types = {name: p.dtype for name, p in model.named_parameters()}

    def type_of(name: str) -> torch.dtype:
        strict = any(part in name for part in wide)
        return torch.float32 if strict else types.get(name, dtype)

    return type_of


def path_of(model: Model, module: nn.Module) -> str:
    """Return the dotted name of a module in its model."""
    return next(name for name, other in model.named_modules() if other is module)


def skeleton_of(config: Config, dtype: torch.dtype | None = None) -> Model:
    """Return the cached skeleton of a config (no values), which must not be run or changed.

    Args:
        config: of the model.
        dtype: floating-point type; None for the config's own.

    Raises:
        MoesaicError: there is no such model.
    """
    dtype = dtype or config.dtype or torch.get_default_dtype()
    key = f"{type(config).__name__} {dtype} {config.to_json_string(use_diff=False)}"
    model = _SKELETONS.pop(key, None)
    if model is None:
        with torch.device("cpu"):  # a converted model asks while it is made on the meta device
            model = skeleton(config, dtype, bare=True)
    while len(_SKELETONS) >= SKELETONS:
        del _SKELETONS[next(iter(_SKELETONS))]
    _SKELETONS[key] = model
    return model


_FILLED = {torch.ones, torch.zeros, torch.full, torch.rand, torch.randn}
_COUNTED = {torch.arange, torch.linspace}


def _elements(func: Any, args: Sequence[Any], kwargs: Values) -> float:
    """Return the number of elements of the tensor that a torch factory function is to make."""
    if func is torch.arange:
        bounds = [n for n in (*args, kwargs.get("end")) if isinstance(n, int | float)]
        step = bounds[2] if len(bounds) > 2 else kwargs.get("step") or 1
        start, end = bounds[:2] if len(bounds) > 1 else (0, *bounds, 0)[:2]
        return abs((end - start) / (step or 1))
    if func is torch.linspace:
        return float(kwargs.get("steps", args[2] if len(args) > 2 else 0))
    size = kwargs.get("size", args[:1] if func is torch.full else args)
    size = size[0] if size and isinstance(size[0], tuple | list) else size
    return prod(size)


class _NoRoom(TorchFunctionMode):
    """Context in which large uninitialised tensors, whose sizes come from a config, get no memory;
    nor do filled ones of more than :data:`ROOM`, which are no buffers of any model."""

    def __init__(self) -> None:
        super().__init__()
        self._made = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            if _elements(func, args, kwargs) > LARGE:
                kwargs = {**kwargs, "device": "meta"}
        elif func in _FILLED or func in _COUNTED:
            count = _elements(func, args, kwargs)
            if count > ROOM and func in _FILLED:
                kwargs = {**kwargs, "device": "meta"}
            else:
                self._made += count
            if self._made > 4 * ROOM:
                raise ValueError(f"it asks for buffers of more than {4 * ROOM:,} values")
        return func(*args, **kwargs)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Context in which a module's parameters move to the meta device; buffers keep their values."""
    count = 0

    def moved(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        nonlocal count
        count += 1
        if count > PARAMETERS:
            raise ValueError(f"it asks for more than {PARAMETERS:,} tensors")
        if parameter is None or parameter.is_meta:
            return parameter
        return type(parameter)(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(moved)  # type: ignore[arg-type]
    with hook, _NoRoom():
        yield


def skeleton(config: Config, dtype: torch.dtype | None = None, bare: bool = False) -> Model:
    """Make the model of a config with parameters on the meta device and real buffers.

    Args:
        config: of the model.
        dtype: floating-point type; None for the config's own.
        bare: buffers are not initialised either, which takes half the time; such a model cannot
            be run. :func:`skeleton_of` caches these.

    Raises:
        MoesaicError: there is no such model.
    """
    options = {} if dtype is None else {"dtype": dtype}
    if options:  # transformers writes the type into the config, so into a copy
        config = copy.deepcopy(config)
    try:
        values = no_init_weights() if bare else nullcontext()
        with _parameters_on_meta(), values:
            model = AutoModelForCausalLM.from_config(config, **options).eval()
        model.tie_weights()  # becoming empty broke the ties
    except MoesaicError:
        raise
    except Exception as error:  # transformers raises anything over a config that is odd
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise MoesaicError(
                f"transformers has no causal language model of the type {config.model_type}."
            ) from error
        message = " ".join(str(error).split())
        raise MoesaicError(
            f"config.json describes no {config.model_type} that can be made: "
            f"{type(error).__name__}: {message:.300}"
        ) from error
    return model


ALONE = ("mistral4",)
"""Types of language models within larger models that do not end in ``_text``."""
HEADLESS: dict[str, str] = {
    name: f"{model.removesuffix('Model')}ForCausalLM"
    for name, model in MODEL_MAPPING_NAMES.items()
    if (name.endswith("_text") or name in ALONE) and isinstance(model, str)
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
}
"""Names for the classes with a head that are made here, by ``model_type``."""


def predicts_tokens(model_type: str) -> bool:
    """Return True if a type has a causal language model: transformers' own, or one made here.

    The latter are made at the first call.
    """
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        register_conversions(model_type)
        return True
    if model_type not in HEADLESS:
        return False
    config_class = CONFIG_MAPPING[model_type]
    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        model_class = _with_head(model_type)
        # or it would not be taken: the config is transformers' own
        AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
        register_conversions(model_type, model_type)
    return True


@remade
def _with_head(model_type: str) -> type:
    """Make the class of a base model with a head."""
    config_class: type = CONFIG_MAPPING[model_type]
    base: type[Model] = MODEL_MAPPING[config_class]

    def __init__(self: Model, config: Config) -> None:
        PreTrainedModel.__init__(self, config)
        self.model = base(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    namespace = {
        "__module__": base.__module__,
        "__init__": __init__,
        "forward": LlamaForCausalLM.forward,  # which serves any base model and head
        "config_class": config_class,
        "base_model_prefix": "model",
        "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"},
    }
    return Dynamic(HEADLESS[model_type], (base.__mro__[1], GenerationMixin), namespace)


logger = logging.getLogger(__name__)


SUPPORTED = {
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}
"""Names of the torch operators that return whether a CPU multiplies matrices of a type."""


def multiplies_natively(dtype: torch.dtype, device: str) -> bool:
    """Return True if a device multiplies matrices of a type natively.

    Processors without AVX-512, most laptops' among them, do not for bfloat16 and float16: torch
    computes these number by number, at least ten times as slowly as in float32. Experts in float64
    are multiplied nowhere.
    """
    if dtype is torch.float64:
        return False
    if torch.device(device).type != "cpu" or dtype not in SUPPORTED:
        return True
    available = torch.backends.mkldnn.is_available()  # not on a Mac
    return available and bool(getattr(torch.ops.mkldnn, SUPPORTED[dtype])())


def working_type(
    config: Config, dtype: torch.dtype | None = None, device: str = "cpu"
) -> torch.dtype | None:
    """Return the type in which a checkpoint is run and timed; results are saved in their own.

    Args:
        config: of the checkpoint.
        dtype: the requested type; None for the checkpoint's own.
        device: where to compute.

    Returns:
        ``dtype`` if given; else float32, which holds the same weights exactly, if the device cannot
        multiply matrices of the checkpoint's type; else None, for that type.
    """
    stored = config.dtype
    if dtype is not None or stored is None or multiplies_natively(stored, device):
        return dtype
    _warn_widened(str(stored).removeprefix("torch."))
    return torch.float32


def sizes_in(module: nn.Module, dtype: torch.dtype | None = None) -> list[int]:
    """Return the bytes of each of a module's weights in a type; None for their own."""
    return [p.numel() * (dtype or p.dtype).itemsize for p in module.parameters()]


@cache
def _warn_widened(name: str) -> None:
    logger.warning(
        f"This processor cannot multiply matrices of {name}: models are computed in float32, and "
        "saved in their own types."
    )


NEAR = {torch.bfloat16: 0.05, torch.float16: 0.05}
"""Largest differences between logits of the same weights, relative to the largest logit, by the
types in which ``model.to`` rounds rotary frequencies, too."""


def check_live(model: Model) -> None:
    """Refuse a loaded model that is more than its config and weights, which alone are saved.

    Such are adapters, parametrisations, quantised modules, and hooks or settings that change what
    is computed. It is compared with a model made of both, over a few tokens.

    Raises:
        MoesaicError: names a weight, or says that the logits differ.
    """
    config = copy.deepcopy(model.config)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    with reading("This loaded model's config", "", "is not valid", (Exception,)):
        config.validate()
    plain, state, advice = skeleton(config), model.state_dict(), "Save it, and give the folder."
    usual = plain.state_dict()
    odd = [name for name in usual if name not in state] + [
        name
        for name, value in state.items()
        if name not in usual
        or value.shape != usual[name].shape
        or value.is_floating_point() != usual[name].is_floating_point()
        or hasattr(value, "__tensor_flatten__")  # as torchao's have
    ]
    if odd:
        raise MoesaicError(
            f"{odd[0]} of this loaded model is not as in a {type(plain).__name__} of its config "
            f"({len(odd)} such weights). Merge adapters, and remove parametrisations, masks and "
            "quantised modules first."
        )
    if len([*model.modules()]) < len([*plain.modules()]):
        raise MoesaicError(f"Layers of this loaded model are one and the same module. {advice}")
    first = {p.data_ptr() or name: name for name, p in reversed([*model.named_parameters()])}
    if one := {name for name, _ in plain.named_parameters()} - {*first.values()}:
        raise MoesaicError(
            f"{min(one)} of this loaded model is one tensor with another weight, which its config "
            "does not say: set tie_word_embeddings=True there if it is the embedding, or copy it."
        )
    for name, value in state.items():
        check_finite(name, value)
    if any(isinstance(vars(m).get("forward"), FunctionType) for m in model.modules()):
        raise MoesaicError(
            "A function stands in place of a forward of this loaded model, and would run the old "
            f"weights in its copy: call model.compile() in place of it. {advice}"
        )
    if "hf_device_map" in vars(model):  # on several devices
        return
    state = {name: v.clone() if v.is_inference() else v for name, v in state.items()}
    plain.load_state_dict(state, assign=True)
    ids = torch.arange(1, 9, device=model.device)[None] % config.get_text_config().vocab_size
    with torch.no_grad(), untouched(model):
        try:
            found, wanted = (m(ids).logits.float() for m in (model, plain.to(model.device)))
        except Exception as error:  # anything, by modules of mixed types for example
            reason = " ".join(str(error).split())
            raise MoesaicError(f"This loaded model cannot be run: {reason:.200}") from error
    found, wanted = found.nan_to_num(), wanted.nan_to_num()
    if (found - wanted).abs().max() > NEAR.get(model.dtype, 1e-3) * max(1, wanted.abs().max()):
        raise MoesaicError(
            "This loaded model computes something else than its config and weights say, which "
            "alone are saved: remove hooks that change what passes, and undo changes of modules' "
            f"settings. {advice}"
        )


P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def untouched(*models: object) -> Iterator[None]:
    """Context in which loaded models are in evaluation mode; afterwards their state is restored.

    That is each module's mode, which parameters learn, and the state of random numbers. Weights,
    hooks and forwards are restored by the code that changes them.

    Args:
        models: arguments that verbs take as models; names and None are ignored.
    """
    held = (model.model if isinstance(model, MadeModel) else model for model in models)
    loaded = [model for model in held if isinstance(model, nn.Module)]
    # weakly: a model that is converted in place gives up its old modules meanwhile
    modes = [(weakref.ref(m), m.training) for model in loaded for m in model.modules()]
    learning = [(weakref.ref(p), p.requires_grad) for model in loaded for p in model.parameters()]
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    for model in loaded:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            if (live := module()) is not None:
                live.training = training
        for parameter, learns in learning:
            weight = parameter()
            if weight is not None and weight.requires_grad != learns:  # else inference mode refuses
                weight.requires_grad_(learns)
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


def leaves_untouched(verb: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that the loaded models among its arguments are :func:`untouched`."""

    @wraps(verb)
    def called(*args: P.args, **options: P.kwargs) -> T:
        with untouched(*args, *options.values()):
            return verb(*args, **options)

    return called


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., object]) -> Iterator[None]:
    """Context in which a module's forward is replaced; it is restored afterwards, even a hook's."""
    before = vars(module).get("forward")  # device_map's hooks stand here
    module.forward = forward  # shadows the class's
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
