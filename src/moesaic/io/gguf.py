"""GGUF files, llama.cpp's own: unpacked once into a folder of safetensors in the cache.

transformers reads a file whole. What it knows is used one tensor at a time, so that a file may be
larger than memory: a file's config and tokenizer, the names of weights, and what undoes llama.cpp's
converter: processors of values for most architectures, conversions from llama.cpp's names to its
own for the newest. gguf-py reads headers and knows the types.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moesaic.errors import MoesaicError
from moesaic.io.checkpoint import Checkpoint, ShardWriter, skeleton
from moesaic.io.fingerprint import Stored
from moesaic.io.gguf_header import check_header
from moesaic.io.headers import check_counts
from moesaic.io.names import cache_folder
from moesaic.io.naming import Naming
from moesaic.io.outputs import output_lock, whole_folder
from moesaic.io.trust import pretrained
from moesaic.types import JSON, Config, Model

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor

Bytes: TypeAlias = "npt.NDArray[np.uint8]"
Numbers: TypeAlias = "npt.NDArray[np.float32]"

FORMAT = 3
"""Of folders in the cache."""
COUNT, USED = "expert_count", "expert_used_count"
MIXTURES = {"llama": ("mixtral", {COUNT: "num_local_experts", USED: "num_experts_per_tok"})}
"""Mixtures that llama.cpp names as it names dense models, which transformers takes them for: their
model_type, and attributes of its config by fields of the file."""
ATTRIBUTES = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attention.key_length": "head_dim",
}
"""Attributes of configs that transformers leaves at their defaults, by fields of files."""
UNUSED = re.compile(r"^rope_(freqs|factors)")
"""Tensors that a config says already."""
_NUMBER = re.compile(r"(?<=\.experts)\.(\d+)(?=\.)")


class Tensors(Checkpoint):
    """The tensors of a GGUF file in float32, by llama.cpp's own names.

    Args:
        file: the file.
        folder: where it is unpacked.
        places: of the tensors in the file, see :func:`_stored`.
    """

    def __init__(self, file: Path, folder: Path, places: Mapping[str, JSON]) -> None:
        self.file, self._places = file, places
        super().__init__(folder)

    def _survey(self) -> None:
        """Note what is read by which name. No bytes of the file are its values."""
        shapes = {name: place["shape"] for name, place in self._places.items()}
        self._stored = {n: Stored(self.file, "F32", shape, 0, 0) for n, shape in shapes.items()}

    def _values(self, name: str) -> Numbers:
        """What the file holds at the place of a name."""
        place = self._places[name]
        raw = np.fromfile(self.file, np.uint8, place["nbytes"], offset=place["begin"])
        if raw.size < place["nbytes"]:
            raise MoesaicError(f"{self.file} is missing, truncated or corrupt: {name} ends early.")
        return values(raw, place["type"], place["stored_shape"])

    def _read(self, name: str) -> Tensor:
        return torch.from_numpy(self._values(name))


class Processed(Tensors):
    """The same, named and shaped as published checkpoints have them.

    Args:
        processor: transformers', which undoes what llama.cpp's converter does to values.
        given: of :class:`Tensors`.
    """

    def __init__(self, processor: TensorProcessor, *given: Any) -> None:
        self._processor = processor
        super().__init__(*given)

    def _read(self, name: str) -> Tensor:
        # without names of its own to look up, a processor leaves stacked experts apart
        about: JSON = {"tensor_key_mapping": None, "parsed_parameters": {"tensors": {}}}
        about["name"] = self._places[name]["stored"]
        weights = self._processor.process(weights=self._values(name), **about).weights
        return torch.from_numpy(np.ascontiguousarray(weights)).view(self.shape(name))


def values(raw: Bytes, kind: str, shape: list[int]) -> Numbers:
    """What stored bytes stand for.

    Args:
        raw: uint8.
        kind: one of llama.cpp's names of types.
        shape: of the values.

    Returns:
        float32 of that shape.

    Raises:
        NotImplementedError: the type is not known.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    type = GGMLQuantizationType[kind]
    block, size = GGML_QUANT_SIZES[type]
    rows = raw.reshape(-1, shape[-1] // block * size)
    return dequantize(rows, type).reshape(shape)


def _stamp(file: Path) -> list[int]:
    """What tells that a file was changed."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns]


# --- the folder that stands for a file -----------------------------------------------------------


def folder_of(file: Path) -> Path:
    """A folder in the cache with a GGUF's config, tokenizer and weights, these in float32.

    Raises:
        MoesaicError: the file is damaged, or of an architecture or a type that is not read.
    """
    import transformers

    known_by = FORMAT, transformers.__version__, file.resolve(), *_stamp(file)
    key = hashlib.sha256(":".join(map(str, known_by)).encode())
    folder = cache_folder() / f"{file.stem}-{key.hexdigest()[:12]}"
    if (folder / "config.json").is_file():
        return folder
    with output_lock(folder, wait=True):
        return _unfolded(file, folder)


def _unfolded(file: Path, folder: Path) -> Path:
    if (folder / "config.json").is_file():  # another process has made it meanwhile
        return folder
    with whole_folder(folder, overwrite=True) as work:
        try:
            _unfold(file, work)
        except MoesaicError:
            raise
        except Exception as error:  # readers raise anything over a file that is odd
            message = " ".join(str(error).split()) or type(error).__name__
            raise MoesaicError(f"{file} cannot be read as GGUF: {message:.300}") from error
    return folder


def _unfold(file: Path, work: Path) -> None:
    from gguf import GGUFReader
    from transformers import AutoTokenizer
    from transformers.integrations.gguf import get_gguf_conversion_mapping, is_gguf_arch_supported
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor as Plain

    check_header(file)
    reader = GGUFReader(file)
    architecture = str(_field(reader, "general.architecture"))
    tokenizer = pretrained(AutoTokenizer, file.parent, gguf_file=file.name)
    if int(_field(reader, "split.count") or 1) > 1:
        raise MoesaicError(
            f"{file} is one of several parts; merge them with llama.cpp's llama-gguf-split."
        )
    config, attributes = _config(reader, architecture, file)
    model = skeleton(config, torch.float32)
    odd = sorted(k for k in {str(t.tensor_type.name) for t in reader.tensors} if not _is_read(k))
    if odd:
        raise MoesaicError(f"{file} has tensors of type {odd[0]}, which is not read.")
    read: Callable[[str], Tensor]
    if is_gguf_arch_supported(architecture):
        tensors = Tensors(file, work, {str(t.name): _stored(t) for t in reader.tensors})
        steps = get_gguf_conversion_mapping(architecture, config)
        naming = Naming(tensors, config.model_type, steps=steps)
        names, read = _converted(file, naming, model), naming.read
    else:
        places = _places(file, reader, architecture, model)
        processor = TENSOR_PROCESSORS.get(architecture, Plain)(config=attributes)
        names, read = [*places], Processed(processor, file, work, places).tensor
    writer = ShardWriter(work)
    for name in names:
        writer.add(name, read(name).contiguous())
    writer.close()
    config.architectures, config.dtype = [type(model).__name__], torch.float32
    config.save_pretrained(work)
    if model.can_generate():
        model.generation_config.save_pretrained(work)
    tokenizer.save_pretrained(work)


def _field(reader: GGUFReader, name: str) -> Any:
    """What a file says of itself under a name; None where it says nothing."""
    field = reader.fields.get(name)
    return None if field is None else field.contents()


def _config(reader: GGUFReader, architecture: str, file: Path) -> tuple[Config, JSON]:
    """A file's config, and the attributes that processors ask for."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config: Config = pretrained(AutoConfig, file.parent, gguf_file=file.name)
    check_counts(config.to_dict())
    if architecture in MIXTURES and (_field(reader, f"{architecture}.{COUNT}") or 0) > 0:
        model_type, names = MIXTURES[architecture]
        counts = {to: int(_field(reader, f"{architecture}.{n}")) for n, to in names.items()}
        whole = {**config.to_dict(), **counts, "model_type": model_type}
        config = CONFIG_MAPPING[model_type].from_dict(whole)
    for field, name in ATTRIBUTES.items():
        value = _field(reader, f"{architecture}.{field}")
        if value is not None and getattr(config, name, None) is not None:
            setattr(config, name, int(value))
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    attributes = ("num_attention_heads", "num_key_value_heads", "hidden_size", "n_head")
    return config, {name: getattr(config, name, None) for name in attributes}


def _converted(file: Path, naming: Naming, model: Model) -> list[str]:
    """Names in memory of a model's weights, which are all in a file.

    Raises:
        MoesaicError: some are not there or of another shape, or more is there.
    """
    try:
        naming.check(model)
    except MoesaicError as error:
        message = str(error).replace(str(naming.checkpoint.folder), str(file))
        raise MoesaicError(message) from None
    state = model.state_dict()
    stored = {*naming.in_memory.values()}
    # layers that predict further tokens, which transformers does not read
    left = {name for name in stored - state.keys() if not name.startswith("mtp.")}
    _check_left(file, [name for name, to in naming.in_memory.items() if to in left], model)
    return [name for name in state if name in stored]


def _check_left(file: Path, names: Iterable[str], model: Model) -> None:
    """Refuse a file that holds more than its model.

    Raises:
        MoesaicError: names some of the tensors.
    """
    left = sorted(name for name in names if not UNUSED.search(name))
    if left:
        raise MoesaicError(
            f"{file} has tensors that a {model.config.model_type} has no place for: "
            f"{', '.join(left[:3])} ({len(left)} in all). Give the checkpoint that it was made "
            "from."
        )


def _places(file: Path, reader: GGUFReader, architecture: str, model: Model) -> dict[str, JSON]:
    """The places of a model's weights in a file, by their names in published checkpoints.

    Raises:
        MoesaicError: some are not there or of another shape, or more is there.
    """
    from transformers.core_model_loading import revert_weight_conversion

    there = {str(tensor.name): tensor for tensor in reader.tensors}
    expected = revert_weight_conversion(model, dict(model.state_dict()))
    named, places, used = _namer(architecture, model.config.num_hidden_layers), {}, set()
    for name, meta in expected.items():
        stored = next((n for n in named(name) if n in there), None)
        if stored is not None:
            used.add(stored)
            places[name] = _place(file, name, there[stored], tuple(meta.shape))
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    missing = sorted(name for name in expected if name not in places and name not in tied)
    left = [name for name in there if name not in used]
    if missing:
        more = sorted(name for name in left if not UNUSED.search(name))[:3]
        beside = f"; it has {', '.join(more)}" if more else ""
        raise MoesaicError(
            f"{file} is of architecture {architecture!r} and has no tensor for "
            f"{', '.join(missing[:3])} ({len(missing)} in all){beside}. Give the checkpoint that "
            "it was made from."
        )
    _check_left(file, left, model)
    return places


def _is_read(kind: str) -> bool:
    """Whether there are values for a type."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    try:
        values(np.zeros(size, np.uint8), kind, [block])
    except NotImplementedError:
        return False
    return True


def _namer(architecture: str, layers: int) -> Callable[[str], Iterator[str]]:
    """llama.cpp's names that a weight of a published checkpoint may have; experts are stacked.

    Raises:
        MoesaicError: gguf-py does not know the architecture.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    number = next((n for n, name in MODEL_ARCH_NAMES.items() if name == architecture), None)
    if number is None:
        raise MoesaicError(f"GGUF of the architecture {architecture!r} is not read.")
    tensor_names = get_tensor_name_map(number, layers)

    def named(name: str) -> Iterator[str]:
        module, dot, end = _NUMBER.sub("", name).rpartition(".")
        forms = [(module, dot + end)] if end in ("weight", "bias") else [(f"{module}.{end}", "")]
        if end.endswith("_bias"):  # of a router: a buffer, and a bias of its own in the file
            forms.append((f"{module}.{end.removesuffix('_bias')}", ".bias"))
        for start, ending in forms:
            # some are converted from the model without its head, whose names are shorter
            for candidate in (start, start.partition(".")[2]):
                stored = tensor_names.get_name(candidate)
                if stored is not None:
                    yield from (stored + (ending or ".weight"), stored)

    return named


def _place(file: Path, name: str, tensor: ReaderTensor, shape: tuple[int, ...]) -> JSON:
    """Where a weight lies, and as what; of an expert, its part of the stacked ones.

    Raises:
        MoesaicError: it is of another shape than the config says.
    """
    place, expert = _stored(tensor), _NUMBER.search(name)
    stored_shape = place["stored_shape"]
    if expert is not None:
        count, *stored_shape = stored_shape
        place["nbytes"] //= count
        place["begin"] += int(expert[1]) * place["nbytes"]
    if sorted(n for n in stored_shape if n > 1) != sorted(n for n in shape if n > 1) or (
        expert is not None and int(expert[1]) >= count
    ):
        actual, expected = (" x ".join(map(str, sizes)) for sizes in (stored_shape, shape))
        raise MoesaicError(
            f"{tensor.name} in {file} is of shape {actual}, and its config asks for {expected}: "
            f"{name}."
        )
    return {**place, "shape": list(shape), "stored_shape": stored_shape}


def _stored(tensor: ReaderTensor) -> JSON:
    """Where a tensor lies, and as what."""
    shape = [int(n) for n in reversed(tensor.shape.tolist())]
    return {
        "stored": str(tensor.name),
        "type": str(tensor.tensor_type.name),
        "shape": shape,
        "stored_shape": shape,
        "begin": int(tensor.data_offset),
        "nbytes": int(tensor.n_bytes),
    }
