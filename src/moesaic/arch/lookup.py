"""Lookup of architectures by config: other packages' ones, exceptions, and the rule."""

from __future__ import annotations

from inspect import Parameter, signature

from transformers.models.auto import CONFIG_MAPPING

from moesaic.arch import support_table
from moesaic.arch.dense import PREFIX, Arch
from moesaic.arch.discovery import discover
from moesaic.arch.mixture import MoEArch
from moesaic.errors import MoesaicError
from moesaic.io.models import predicts_tokens, skeleton_of
from moesaic.io.quantised import format_of, quantization_of
from moesaic.registry import Registry
from moesaic.types import Config

_DEEPSEEK = MoEArch(
    "deepseek",
    count="n_routed_experts",
    shared="shared_experts",
    shared_count="n_shared_experts",
    dense_layers="first_k_dense_replace",
)
EXCEPTIONS: Registry[Arch] = Registry("moesaic.architectures", {}, {"deepseek": _DEEPSEEK})
"""Architectures that transformers lacks, or for which a rule is wrong, by ``model_type``: ours, and
those of other packages, dense ones and mixtures of experts."""

EXTRA_KEYS = ("moesaic", "auto_map", "model_type", "quantization_config")
"""Config keys beyond the base's shape."""
PLAIN = "plain"
"""Key in the config's ``moesaic`` header of the base's own values that per-layer ones replace."""


def architectures() -> dict[str, list[str]]:
    """Return every architecture known by name: ``moe`` and ``dense``, lists of ``model_type``."""
    mixtures = {name for name, arch in EXCEPTIONS.items() if isinstance(arch, MoEArch)}
    return {
        "moe": sorted({*support_table()["moe"], *mixtures}),
        "dense": sorted({*support_table()["dense"], *(EXCEPTIONS.keys() - mixtures)}),
    }


def base_arch(config: Config) -> Arch:
    """Return the architecture of any config, dense or a mixture of experts, converted or not.

    Raises:
        MoesaicError: names the parts that no rule finds.
    """
    base = config.model_type.removeprefix(PREFIX)
    if base in EXCEPTIONS:
        return EXCEPTIONS[base]
    try:
        if not predicts_tokens(base):
            raise MoesaicError("transformers has no causal language model of it.")
        return discover(plain_config(config, base))
    except MoesaicError as error:
        reason = str(error).removeprefix(f"{base}: ")
        reason = reason[:1].upper() + reason[1:]
        if base in support_table()["moe"] + support_table()["dense"]:
            raise MoesaicError(
                f"This {base} is not supported, though others of its type are. {reason}"
            ) from error
        raise MoesaicError(
            f"Architecture {base!r} is not supported. {reason} "
            "`moesaic inspect` without a model lists those that are."
        ) from error


def uncarved_arch(config: Config, instead: str) -> Arch:
    """Return the architecture of a dense model, or of a mixture, the latter converted or not.

    Args:
        config: the model's config.
        instead: advice in the message if it was carved.

    Raises:
        MoesaicError: the model is unknown, or a carved dense model.
    """
    arch = base_arch(config)
    if config.model_type.startswith(PREFIX) and not isinstance(arch, MoEArch):
        raise MoesaicError(f"{config.model_type} was carved already: {instead}.")
    return arch


def plain_config(config: Config, base: str) -> Config:
    """Return the config of the base model, without the formats of weights."""
    if config.model_type == base and getattr(config, "quantization_config", None) is None:
        return config
    settings = {key: value for key, value in config.to_dict().items() if key not in EXTRA_KEYS}
    for key, value in (getattr(config, "moesaic", None) or {}).get(PLAIN, {}).items():
        settings.pop(key, None)
        if value is not None:
            settings[key] = value
    return CONFIG_MAPPING[base].from_dict(settings)


def dense_arch(config: Config) -> Arch:
    """Return the architecture of a dense model's config.

    Raises:
        MoesaicError: the model is a mixture of experts, was converted already, or is unknown, or
            its FFN needs more than hidden states.
    """
    if config.model_type.startswith(PREFIX):
        raise MoesaicError(f"{config.model_type} is already carved; start from the dense original.")
    if quantization_of(config):
        raise MoesaicError(
            f"This {config.model_type} checkpoint is quantised; carve takes plain weights. "
            "Dequantise it first."
        )
    arch = base_arch(config)
    if isinstance(arch, MoEArch):
        raise MoesaicError(
            f"{config.model_type} is already a mixture of experts; carve takes a dense model."
        )
    ffn = arch.ffn_of(arch.layers(skeleton_of(config))[0])
    beside = [*signature(type(ffn).forward).parameters.values()][2:]
    many = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    needed = [p.name for p in beside if p.default is p.empty and p.kind not in many]
    if needed:
        raise MoesaicError(
            f"{type(ffn).__name__} of this {config.model_type} computes with {needed[0]} too, not "
            "with hidden states alone, and cannot be carved. For a smaller file: slim."
        )
    return arch


def moe_arch(config: Config) -> MoEArch:
    """Return the architecture of a mixture of experts' config, converted before or not.

    Raises:
        MoesaicError: the model is dense, unknown, or in a format that is not read.
    """
    format_of(quantization_of(config))
    arch = base_arch(config)
    if not isinstance(arch, MoEArch):
        raise MoesaicError(
            f"{config.model_type} has no routed experts. For a smaller file: slim. For fewer "
            "weights per token: carve."
        )
    return arch
