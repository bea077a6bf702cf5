"""Export of a model, decided before it is written."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from transformers.models.auto import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from moesaic import per_layer_config
from moesaic.arch.dense import Arch
from moesaic.io.checkpoint import Writer
from moesaic.io.naming import leave_out
from moesaic.types import Config, Values


@dataclass(frozen=True)
class Export:
    """Form that a model will have, decided before anything is written."""

    config: Config
    write: Callable[[Writer], None]
    costs: Values = field(default_factory=dict)
    """Neurons before and after padding, by name."""
    exact: bool = True
    """False if weights that should be one are only nearly one."""

    @property
    def model_type(self) -> str:
        return str(self.config.model_type)


def base_config(config: Config, arch: Arch) -> Config:
    """Return a converted config as its base's own."""
    plain = copy.deepcopy(config)
    per_layer_config.take_back(plain)
    config_class = CONFIG_MAPPING[arch.model_type]
    plain.__class__ = config_class
    plain.model_type = arch.model_type
    plain.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[config_class].__name__]
    for name in ("moesaic", "auto_map"):
        plain.__dict__.pop(name, None)
    leave_out(plain)
    return plain


def run_script(name: str, request: str, **env: str) -> str | None:
    """Run a script of this folder in a process of its own; return the last line of its error, or
    None.

    Its folder is kept off the path, or its neighbours would be imported as packages of the same
    names.
    """
    script = Path(__file__).with_name(name)
    run = subprocess.run(
        [sys.executable, str(script), request],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1", **env},
    )
    messages = run.stderr.strip().splitlines()[-1:] or ["no message"]
    return messages[0] if run.returncode else None


def aligned(width: int) -> int:
    """Return the next multiple of 8: grouped matrix products need rows of whole 16 bytes.

    >>> aligned(250)
    256
    """
    return 8 * -(-width // 8)


def head_dim_of(config: Config) -> int:
    """Return the number of elements in one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
