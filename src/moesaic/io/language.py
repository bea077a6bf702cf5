"""Language models that transformers has only as a part of larger models, here given a head.

Qwen3-VL's mixture, for one, is a ``qwen3_vl_moe_text`` within a ``qwen3_vl_moe``; alone it has no
class that predicts tokens, and no name of an architecture in its config.
"""

from __future__ import annotations

from torch import nn
from transformers import AutoModelForCausalLM, GenerationMixin, LlamaForCausalLM, PreTrainedModel
from transformers.models.auto import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from moesaic.io.naming import register_conversions
from moesaic.registry import Dynamic, remade
from moesaic.types import Config, Model

TEXT = "_text"
ALONE = ("mistral4",)
"""Types of language models within larger models that do not end in ``_text``."""
HEADLESS: dict[str, str] = {
    name: f"{model.removesuffix('Model')}ForCausalLM"
    for name, model in MODEL_MAPPING_NAMES.items()
    if (name.endswith(TEXT) or name in ALONE) and isinstance(model, str)
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
