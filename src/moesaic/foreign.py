"""Names for what is passed around but not ours: plain JSON, and transformers' classes.

transformers brings no types; its classes are named here so that signatures say what they take.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    Config: TypeAlias = PreTrainedConfig
    Model: TypeAlias = PreTrainedModel
    Tokenizer: TypeAlias = PreTrainedTokenizerBase
else:
    Config = Model = Tokenizer = object

JSON: TypeAlias = dict[str, Any]
"""A JSON object."""

Values: TypeAlias = Mapping[str, Any]
"""A JSON object that is only read, or options by name."""
