"""What an export is before it is written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers.models.auto import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from moesaic.arch import Arch
from moesaic.checkpoint import Writer


@dataclass(frozen=True)
class Export:
    """What becomes of a model, decided before anything is written."""

    config: Any
    write: Callable[[Writer], None]
    costs: Mapping[str, Any] = field(default_factory=dict)
    """What filling up costs."""

    @property
    def model_type(self) -> str:
        return str(self.config.model_type)


def base_config(config: Any, arch: Arch) -> Any:
    """A converted config as its base's own."""
    plain = copy.deepcopy(config)
    own = CONFIG_MAPPING[arch.model_type]
    plain.__class__ = own
    plain.model_type = arch.model_type
    plain.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[own].__name__]
    for name in ("moesaic", "auto_map"):
        plain.__dict__.pop(name, None)
    return plain
