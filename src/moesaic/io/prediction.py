"""Layers that predict further tokens beside a model's own (multi-token prediction), by name.

They are published as layers behind the last (``num_nextn_predict_layers``: DeepSeek-V3, GLM-4.5) or
under a name of their own (``mtp.``: Qwen3-Next, Nemotron-H). transformers loads no model with them;
it and engines use them for speculative decoding.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import astuple, dataclass
from itertools import count, takewhile

from moesaic.foreign import Config

NEXT = "num_nextn_predict_layers"
COUNTS = (NEXT, "num_mtp_layers", "num_mtp_modules", "mtp_num_hidden_layers")
"""Attributes of configs that count them."""
_NUMBER = re.compile(r"^(?:(?:model|language_model|backbone|transformer)\.)*layers\.(\d+)\.")
_MTP = re.compile(r"(?:^|\.)mtp[._]")


def predicting_layers(config: Config) -> int:
    """As many as a config says."""
    return max((int(getattr(config, name, None) or 0) for name in COUNTS), default=0)


def leave_out(config: Config) -> None:
    """Say in a config that there are no such layers, in place."""
    for name in COUNTS:
        if getattr(config, name, None):
            setattr(config, name, 0)


def predicts(name: str, count: int) -> bool:
    """Whether a tensor belongs to a layer that predicts further tokens.

    Args:
        name: its own, on disk or in memory.
        count: the model's decoder layers.

    >>> names = "model.layers.3.mlp.up", "model.layers.4.eh_proj", "mtp.fc", "model.mtp_block.0.up"
    >>> [predicts(name, 4) for name in names]
    [False, True, True, True]
    """
    number = _NUMBER.search(name)
    return bool(_MTP.search(name)) or (number is not None and int(number.group(1)) >= count)


@dataclass(frozen=True)
class Parts:
    """The parts of a layer that predicts further tokens, by the starts of their tensors' names."""

    layer: str
    """A decoder layer as the model has them."""
    join: str
    """The projection of the token's embedding and the hidden state, one behind the other."""
    embedding_norm: str
    hidden_norm: str
    norm: str
    """In place of the model's last norm."""
    head: str
    embedding: str
    """In place of the model's own head and embedding, where they are there."""


LAYOUTS = (
    Parts(
        "{layers}.{number}.",
        "{layers}.{number}.eh_proj.",
        "{layers}.{number}.enorm.",
        "{layers}.{number}.hnorm.",
        "{layers}.{number}.shared_head.norm.",
        "{layers}.{number}.shared_head.head.",
        "{layers}.{number}.embed_tokens.",
    ),
    Parts(
        "mtp.layers.{depth}.",
        "mtp.fc.",
        "mtp.pre_fc_norm_embedding.",
        "mtp.pre_fc_norm_hidden.",
        "mtp.norm.",
        "mtp.lm_head.",
        "mtp.embed_tokens.",
    ),
)
"""Behind the last layer, as DeepSeek-V3 and GLM-4.5 have them; and as Qwen3-Next does."""


def parts_of(names: Collection[str], layers: str, last: int) -> list[Parts]:
    """The layers that predict further tokens, the one that predicts the nearest first.

    Args:
        names: of a checkpoint's tensors in memory.
        layers: the path of the model's decoder layers.
        last: as many there are.

    Returns:
        their parts; empty where there are none, or they are laid out in no way that is known.

    >>> names = [f"mtp.{n}.weight" for n in ("fc", "layers.0.mlp.up_proj", "layers.1.mlp.up_proj")]
    >>> [parts.layer for parts in parts_of(names, "model.layers", 4)]
    ['mtp.layers.0.', 'mtp.layers.1.']
    """

    def there(start: str) -> bool:
        return any(name.startswith(start) for name in names)

    for layout in LAYOUTS:
        each = (
            Parts(*(n.format(layers=layers, number=last + k, depth=k) for n in astuple(layout)))
            for k in count()
        )
        blocks = [*takewhile(lambda parts: there(parts.layer) and there(parts.join), each)]
        if blocks:
            return blocks
    return []
