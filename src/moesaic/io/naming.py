"""Tensor names on disk and in memory, which differ: transformers fuses experts when it loads.

Its own conversion table is used for both directions, so that an architecture needs no second list
of names here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from moesaic.errors import MoesaicError, dims, quote
from moesaic.io.checkpoint import Checkpoint
from moesaic.types import Config, Model

_EXPERT = re.compile(r"(?:(?<=\.experts\.)|(?<=^experts\.))\d{1,9}(?=\.)")
_LANGUAGE = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?")
_BASE, _HEAD = "model.", "lm_head."


def language(name: str) -> str:
    """Return the name that a language model by itself has for a tensor of a multimodal checkpoint.

    >>> language("language_model.model.layers.0.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    >>> language("language_model.lm_head.weight"), language("model.vision_tower.norm.weight")
    ('lm_head.weight', 'model.vision_tower.norm.weight')
    """
    match = _LANGUAGE.match(name)
    if match is None:
        return name
    rest = name[match.end() :]
    return rest if rest.startswith(_HEAD) else f"{_BASE}{rest}"


Step: TypeAlias = WeightConverter | WeightRenaming
"""Conversion step of transformers."""


def conversions(model_type: str) -> list[Step] | None:
    """Return transformers' conversions for a model_type, or for the model that it is part of."""
    steps = _own_conversions(model_type)
    if steps is None and model_type.endswith("_text"):  # its whole's, which names it otherwise
        of_whole = get_checkpoint_conversion_mapping(model_type.removesuffix("_text")) or []
        steps = [copy.deepcopy(step) for step in of_whole if not _places(step)] or None
    return steps


def read_as(model_type: str, stored: Iterable[str]) -> dict[str, str]:
    """Return the names in memory of tensors of a model_type's checkpoints, by those on disk."""
    steps = conversions(model_type) or []
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    return {name: rename_source_key(name, renamings, converters)[0] for name in stored}


def register_conversions(model_type: str, name: str = "") -> None:
    """Register a type's conversions under another name.

    Without one they are registered under the type's own, if transformers has them only for the
    multimodal model that it is a part of.
    """
    steps = conversions(model_type)
    if steps is not None and (name or _own_conversions(model_type) is None):
        register_checkpoint_conversion_mapping(name or model_type, steps, overwrite=True)


def _own_conversions(model_type: str) -> list[Step] | None:
    """Return transformers' conversions by a type's name, else by its base model's or its causal
    language model's class."""
    steps: list[Step] | None = get_checkpoint_conversion_mapping(model_type)
    for classes in (MODEL_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        if steps is None and model_type in classes:
            steps = get_checkpoint_conversion_mapping(classes[model_type])
    return steps


def _places(step: Step) -> bool:
    """Return True if a conversion only adds or removes a prefix, such as a part's."""
    return isinstance(step, WeightRenaming) and any(p.startswith("^") for p in step.source_patterns)


class Naming:
    """Names of one checkpoint's tensors in memory, and the way to read them by these.

    Args:
        checkpoint: its tensors by their names on disk.
        model_type: of its config.
        names: names of the model's tensors in memory. As when transformers reads it, a name on
            disk that is among them is kept, and names may lack the base model's prefix.
        steps: transformers' conversions; by default those of the type.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model_type: str,
        names: Collection[str] = (),
        steps: Sequence[Step] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        steps = conversions(model_type) or [] if steps is None else steps
        renamings = [step for step in steps if isinstance(step, WeightRenaming)]
        converters = [step for step in steps if isinstance(step, WeightConverter)]
        self._converters = {p: c for c in converters for p in c.source_patterns}
        self.in_memory: dict[str, str] = {}
        """Names in memory by names on disk, in the order of the files."""
        self._parts: dict[str, list[tuple[str, str | None]]] = {}
        for name in checkpoint.names():
            memory_name, pattern = rename_source_key(language(name), renamings, converters)
            if memory_name not in names:
                if language(name) in names:
                    memory_name, pattern = language(name), None
                elif f"{_BASE}{memory_name}" in names:
                    memory_name = f"{_BASE}{memory_name}"
            self.in_memory[name] = memory_name
            turns = pattern is not None and _turns(self._converters[pattern])
            if turns and not self._turned(name):
                pattern = None
            self._parts.setdefault(memory_name, []).append((name, pattern))
        for converter in self._converters.values():
            if _turns(converter):
                converter.operations = [
                    Transpose(operation.dim0, operation.dim1) for operation in converter.operations
                ]

    def _turned(self, disk: str) -> bool:
        """Return True if matrices of experts are stored as (inputs, outputs), as in some files.

        The hidden size is then the last one of downs, and the second of gates and ups. If both
        sizes are equal, the matrices are stored as transformers writes them.
        """
        names = (n for n in self.checkpoint.names() if n.endswith("embed_tokens.weight"))
        hidden = next((self.checkpoint.shape(n)[1] for n in names), 0)
        shape = self.checkpoint.shape(disk)
        size = shape[1] if disk.endswith("down_proj") else shape[2]
        return size != hidden

    def read(self, name: str, cast: Callable[[Tensor], Tensor] = lambda t: t) -> Tensor:
        """Read the tensor that is called ``name`` in memory, ``cast`` applied to each of its parts.

        Raises:
            MoesaicError: the checkpoint does not hold it.
        """
        return self._assembled(name, lambda part: cast(self.checkpoint.tensor(part)))

    def ordered(self, disk: str, cast: Callable[[Tensor], Tensor] = lambda t: t) -> Tensor:
        """Read a tensor by its name on disk, ``cast`` applied, its values ordered as in memory."""
        tensor = cast(self.checkpoint.tensor(disk))
        converter = self._reorders.get(disk)
        return tensor if converter is None else _converted(converter, disk, tensor)

    def reordered(self, disk: str, tensor: Tensor) -> Tensor:
        """Return values in the order that they have on disk; the inverse of :meth:`ordered`."""
        converter = self._reorders.get(disk)
        return (
            tensor if converter is None else _converted(converter.reverse_transform(), disk, tensor)
        )

    @cached_property
    def _reorders(self) -> dict[str, WeightConverter]:
        """Converters that only reorder a tensor's values, by its name on disk."""
        reorders = {}
        for name, parts in self._parts.items():
            disk, pattern = parts[0]
            if len(parts) > 1 or pattern is None:
                continue
            converter = self._converters[pattern]
            turns = all(type(operation) is Transpose for operation in converter.operations)
            if turns or self.shape(name) == self.checkpoint.shape(disk):
                reorders[disk] = converter
        return reorders

    def _assembled(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """Assemble a tensor in memory from its parts on disk, read by ``read``."""
        parts = self._parts.get(name, [(name, None)])
        if parts[0][1] is None:
            return read(parts[0][0])
        parts = sorted(parts, key=lambda p: dot_natural_key(p[0]))
        converter = copy.deepcopy(self._converters[parts[0][1]])
        if len(converter.target_patterns) > 1:
            raise MoesaicError(
                f"{parts[0][0]} in {self.checkpoint.folder} is one tensor for several of the model "
                f"({', '.join(converter.target_patterns)}), which is not read layer by layer."
            )
        steps = [(type(each), getattr(each, "dim", None)) for each in converter.operations]
        if steps in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
            matrices: dict[str, list[str]] = {p: [] for p in converter.source_patterns}
            for part, pattern in parts:
                matrices[str(pattern)].append(part)
            return _stacked([*zip(*matrices.values(), strict=True)], read)
        for part, pattern in parts:
            converter.add_tensor(name, part, pattern, read(part))
        (tensor,) = converter.convert(name).values()
        return tensor[0] if isinstance(tensor, list) else tensor

    def check(self, model: Model) -> None:
        """Refuse a checkpoint in which a weight of a model, maybe a skeleton, is missing or of
        another shape; no values are read."""
        shared: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            shared.setdefault(id(parameter), []).append(name)
        tied = {name: names for names in shared.values() for name in names}
        for name, expected in model.state_dict().items():
            if name in self._parts:
                shape = self.shape(name)
                if shape is None:
                    parts = [part for part, _ in self._parts[name]]
                    raise MoesaicError(
                        f"{len(parts)} tensors of {self.checkpoint.folder} such as "
                        f"{quote(parts[0], 100)} do not make up {name} of shape "
                        f"{dims(expected.shape)}: one is missing, or of another shape, or there is "
                        "one too many. The checkpoint is damaged, or its config is another model's."
                    )
                if shape != expected.shape:
                    raise MoesaicError(
                        f"{name} in {self.checkpoint.folder} is of shape {dims(shape)}, and "
                        f"config.json says {dims(expected.shape)}. The checkpoint is damaged, "
                        "or its config is another model's."
                    )
                if expected.is_floating_point() and not all(
                    self.checkpoint.is_floating(part) for part, _ in self._parts[name]
                ):
                    raise MoesaicError(
                        f"{name} in {self.checkpoint.folder} is of whole numbers. The checkpoint "
                        "is damaged, or quantised; give one that is not."
                    )
            elif not any(other in self._parts for other in tied.get(name, ())):
                raise MoesaicError(
                    f"{self.checkpoint.folder} has no tensor {name!r}. The checkpoint is damaged, "
                    "its config is another model's, or moesaic does not know its tensors' names."
                )

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor in memory; None if its parts do not fit together."""
        try:
            return tuple(
                self._assembled(
                    name, lambda part: torch.empty(self.checkpoint.shape(part), device="meta")
                ).shape
            )
        except (RuntimeError, ValueError, LookupError):  # the last if it is stored in two ways
            return None


def _stacked(experts: Sequence[Sequence[str]], read: Callable[[str], Tensor]) -> Tensor:
    """Read experts into one tensor (E, ...), one by one, so that there is no second copy of all.

    Args:
        experts: for each expert, names of its matrices, whose rows are joined.
        read: returns a matrix by its name.

    Raises:
        ValueError: an expert's shape is not the first one's.
    """
    stacked = None
    for place, names in enumerate(experts):
        parts = [read(name) for name in names]
        shape = (sum(map(len, parts)), *parts[0].shape[1:])
        if stacked is None:
            stacked = parts[0].new_empty(len(experts), *shape)
        if shape != stacked.shape[1:]:
            raise ValueError(f"{names[0]} does not fit the experts before it")
        torch.cat(parts, out=stacked[place])
        del parts  # before the next are read
    assert stacked is not None
    return stacked


def _turns(converter: WeightConverter) -> bool:
    """Return True if a converter transposes tensors that do not have the shape that a model has."""
    return all(getattr(operation, "check_dims", False) for operation in converter.operations)


def _converted(converter: WeightConverter, name: str, tensor: Tensor) -> Tensor:
    """Return the tensor that a converter makes of a single one."""
    converter = copy.deepcopy(converter)
    converter.add_tensor(name, name, converter.source_patterns[0], tensor)
    (result,) = converter.convert(name).values()
    return result[0] if isinstance(result, list) else result


def expert_number(name: str) -> int | None:
    """Return the number of the one expert that a tensor on disk belongs to; None if none.

    >>> expert_number("model.layers.2.mlp.experts.14.up_proj.weight")
    14
    >>> expert_number("experts.3.w1.weight")  # within a layer that has no block around them
    3
    """
    match = _EXPERT.search(name)
    return int(match.group()) if match else None


def renumbered(name: str, number: int) -> str:
    """Return the name of the same tensor of another expert.

    >>> renumbered("model.layers.2.mlp.experts.14.up_proj.weight", 3)
    'model.layers.2.mlp.experts.3.up_proj.weight'
    """
    return _EXPERT.sub(str(number), name)


# --- MTP layers (multi-token prediction) ---------------------------------------------------------

# They are published as layers after the last (``num_nextn_predict_layers``: DeepSeek-V3, GLM-4.5)
# or under a name of their own (``mtp.``: Qwen3-Next, Nemotron-H). transformers loads no model with
# them; it and engines use them for speculative decoding.
NEXT = "num_nextn_predict_layers"
COUNTS = (NEXT, "num_mtp_layers", "num_mtp_modules", "mtp_num_hidden_layers")
"""Config attributes that hold the number of MTP layers."""
_NUMBER = re.compile(r"^(?:(?:model|language_model|backbone|transformer)\.)*layers\.(\d{1,9})\.")
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
    """Return True if a tensor belongs to an MTP layer.

    Args:
        name: of the tensor, on disk or in memory.
        count: number of the model's decoder layers.

    >>> names = "model.layers.3.mlp.up", "model.layers.4.eh_proj", "mtp.fc", "model.mtp_block.0.up"
    >>> [is_mtp(name, 4) for name in names]
    [False, True, True, True]
    """
    number = _NUMBER.search(name)
    return bool(_MTP.search(name)) or (number is not None and int(number.group(1)) >= count)
