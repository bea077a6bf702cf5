"""Names of MTP layers (multi-token prediction).

They are published as layers after the last (``num_nextn_predict_layers``: DeepSeek-V3, GLM-4.5) or
under a name of their own (``mtp.``: Qwen3-Next, Nemotron-H). transformers loads no model with them;
it and engines use them for speculative decoding.
"""

from __future__ import annotations

import re

from moesaic.types import Config

NEXT = "num_nextn_predict_layers"
COUNTS = (NEXT, "num_mtp_layers", "num_mtp_modules", "mtp_num_hidden_layers")
"""Config attributes that hold the number of MTP layers."""
_NUMBER = re.compile(r"^(?:(?:model|language_model|backbone|transformer)\.)*layers\.(\d+)\.")
_MTP = re.compile(r"(?:^|\.)mtp[._]")


def mtp_layers(config: Config) -> int:
    """Return the number of MTP layers in a config."""
    return max((int(getattr(config, name, None) or 0) for name in COUNTS), default=0)


def leave_out(config: Config) -> None:
    """Set the numbers of MTP layers in a config to 0, in place."""
    for name in COUNTS:
        if getattr(config, name, None):
            setattr(config, name, 0)


def is_mtp(name: str, count: int) -> bool:
    """Return True if a tensor, by its name on disk or in memory, belongs to an MTP layer, one after
    ``count`` decoder layers or with a name of its own.

    >>> names = "model.layers.3.mlp.up", "model.layers.4.eh_proj", "mtp.fc", "model.mtp_block.0.up"
    >>> [is_mtp(name, 4) for name in names]
    [False, True, True, True]
    """
    number = _NUMBER.search(name)
    return bool(_MTP.search(name)) or (number is not None and int(number.group(1)) >= count)
