"""GGUF files, llama.cpp's own: unpacked once into a folder of safetensors in the cache.

gguf-py reads headers, maps tensors and knows their types. transformers reads the config and the
tokenizer, and its tables undo what llama.cpp's converter did: processors of values for most
architectures, conversions from llama.cpp's names to its own for the newest. Its loader is not used:
it needs accelerate, takes Mixtral for a dense Llama, and leaves random what a file lacks.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moesaic.errors import MoesaicError, dims, quote
from moesaic.io.checkpoint import Checkpoint, ShardWriter, Stored
from moesaic.io.models import skeleton
from moesaic.io.names import PACKAGED, cache_folder
from moesaic.io.naming import Naming
from moesaic.io.outputs import output_lock, whole_file, whole_folder
from moesaic.io.trust import check_counts, pretrained, reading
from moesaic.types import JSON, Config, Model

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor

Numbers: TypeAlias = "npt.NDArray[np.float32]"

FORMAT = 4
"""Version of the format of folders in the cache."""
ALIGNMENT = "general.alignment"
"""Field with the number of which tensors' places are multiples."""
COUNT, USED = "expert_count", "expert_used_count"
MIXTURES = {"llama": ("mixtral", {COUNT: "num_local_experts", USED: "num_experts_per_tok"})}
"""Mixtures that llama.cpp names as it names dense models, which transformers takes them for: their
model_type, and attributes of its config by fields of the file."""
ATTRIBUTES = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attention.key_length": "head_dim",
}
"""Config attributes that transformers does not read from files, by the files' fields."""
STATED = ("block_count", "context_length", "embedding_length", "attention.head_count")
"""Fields that llama.cpp requires of every file, and transformers takes from nowhere without."""
FREQUENCIES = re.compile(r"^rope_(freqs|factors)")
"""Names of tensors of rotary frequencies, which a config describes."""
SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""Names of rotary scaling's settings in a config, by the files' fields."""
SCALARS = {"gemma2": 46, "gemma3": 62}
"""Numbers of layers of the largest Gemmas, whose attention scores are scaled otherwise."""
LLAMA_BASE = 10_000.0
"""Base of rotary frequencies of a file that names none."""
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Rotary scaling of every Llama 3; a file holds the frequencies that come of it."""
_EPSILON = re.compile("norm(_rms)?_epsilon$")
_NUMBER = re.compile(r"(?<=\.experts)\.(\d+)(?=\.)")


class StoredWeight(NamedTuple):
    """Weight in a file: a tensor, or one of the experts that are stacked in it."""

    stored: ReaderTensor
    expert: int | None
    shape: list[int]
    """Shape in published checkpoints."""


class Tensors(Checkpoint):
    """Tensors of a GGUF file in float32.

    Args:
        file: the file.
        folder: where it is unpacked.
        parts: of the file, by the names by which they are read.
        processor: transformers', which undoes what llama.cpp's converter does to values; None if
            they are taken as they are.
    """

    def __init__(
        self,
        file: Path,
        folder: Path,
        parts: Mapping[str, StoredWeight],
        processor: TensorProcessor | None = None,
    ) -> None:
        self.file, self._parts, self._processor = file, parts, processor
        super().__init__(folder)

    def _survey(self) -> None:
        """Record shape and type of each name, without reading values."""
        self._stored = {n: Stored(self.file, "F32", p.shape, 0, 0) for n, p in self._parts.items()}

    def _read(self, name: str) -> Tensor:
        from gguf import dequantize

        stored, expert, shape = self._parts[name]
        data = stored.data if expert is None else stored.data[expert]
        numbers = dequantize(data, stored.tensor_type)
        if self._processor is not None:
            # without names of its own to look up, a processor leaves stacked experts apart
            about: JSON = {"tensor_key_mapping": None, "parsed_parameters": {"tensors": {}}}
            processed = self._processor.process(weights=numbers, name=str(stored.name), **about)
            numbers = processed.weights
        if _sizes([*numbers.shape]) != _sizes(shape):  # transposed, which no processor undid
            raise _misfit(self.file, stored, [*numbers.shape], shape, name)
        return torch.from_numpy(np.require(numbers, np.float32, ["C", "W"])).view(shape)


# --- the folder that stands for a file -----------------------------------------------------------


def folder_of(file: Path) -> Path:
    """Return a cache folder with a GGUF file's config, tokenizer and float32 weights.

    Raises:
        MoesaicError: the file is damaged, or of an architecture or a type that is not read.
    """
    import transformers

    stat = file.stat()
    known_by = (FORMAT, transformers.__version__, file.resolve(), stat.st_size, stat.st_mtime_ns)
    key = hashlib.sha256(":".join(map(str, known_by)).encode())
    folder = cache_folder() / f"{file.stem}-{key.hexdigest()[:12]}"
    if (folder / "config.json").is_file():
        return folder
    try:
        with output_lock(folder, wait=True):
            if (folder / "config.json").is_file():  # another process has made it meanwhile
                return folder
            # readers raise anything over a file that is odd
            remedy = "Give the checkpoint that it was made from."
            odd = reading(file, remedy, "cannot be read as GGUF", (Exception,))
            with whole_folder(folder, overwrite=True) as work, odd:
                _unfold(file, work)
    except OSError as error:
        raise MoesaicError(
            f"{file} is unpacked into {folder.parent}, which cannot be written to ("
            f"{error.strerror}). MOESAIC_CACHE may name another folder."
        ) from error
    return folder


def _unfold(file: Path, work: Path) -> None:
    from gguf import GGML_QUANT_SIZES, GGUFReader, dequantize
    from transformers import AutoTokenizer
    from transformers.integrations.gguf import get_gguf_conversion_mapping, is_gguf_arch_supported
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor as Plain

    _check_gguf(file)
    reader = GGUFReader(file)
    architecture = str(_field(reader, "general.architecture"))
    if architecture == "gpt-oss":  # its config would have the lengths of names in place of numbers
        raise MoesaicError(
            f"{file}: transformers misreads the rotary scaling of GGUF files of gpt-oss. Give the "
            "checkpoint that it was made from."
        )
    if int(_field(reader, "split.count") or 1) > 1:
        raise MoesaicError(
            f"{file} is one of several parts; merge them with llama.cpp's llama-gguf-split."
        )
    tokenizer = pretrained(AutoTokenizer, file.parent, gguf_file=file.name)
    config, attributes = _config(reader, architecture, file)
    model = skeleton(config, torch.float32)
    for kind in sorted({tensor.tensor_type for tensor in reader.tensors}):
        try:
            dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
        except NotImplementedError:
            raise MoesaicError(
                f"{file} has tensors of type {kind.name}, which is not read."
            ) from None
    read: Callable[[str], Tensor]
    if is_gguf_arch_supported(architecture):
        whole = {str(t.name): StoredWeight(t, None, _shape(t)) for t in reader.tensors}
        steps = get_gguf_conversion_mapping(architecture, config)
        naming = Naming(Tensors(file, work, whole), config.model_type, steps=steps)
        names, read = _converted(file, naming, model), naming.read
    else:
        parts = _parts(file, reader, architecture, model)
        processor = TENSOR_PROCESSORS.get(architecture, Plain)(config=attributes)
        names, read = [*parts], Tensors(file, work, parts, processor).tensor
    ShardWriter(work).write((name, read(name)) for name in names)
    config.architectures, config.dtype = [type(model).__name__], torch.float32
    config.save_pretrained(work)
    if model.can_generate():
        model.generation_config.save_pretrained(work)
    tokenizer.save_pretrained(work)


def _field(reader: GGUFReader, name: str) -> Any:
    """Return a field of a file's header; None if it has none of that name."""
    field = reader.fields.get(name)
    return None if field is None else field.contents()


def _config(reader: GGUFReader, architecture: str, file: Path) -> tuple[Config, JSON]:
    """Return a file's config, and the attributes that transformers' tensor processors need."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    stated = {name.partition(".")[2] for name in reader.fields}
    missing = [name for name in STATED if name not in stated]
    missing += ["attention.layer_norm_rms_epsilon"] * (not any(map(_EPSILON.search, stated)))
    missing += [USED] * (COUNT in stated and USED not in stated)
    if missing:
        raise MoesaicError(f"{file} has no field {architecture}.{missing[0]}; it is damaged.")
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
    _scale(config, reader, architecture, file)
    if architecture in SCALARS:
        config.query_pre_attn_scalar = attention_scalar(config, SCALARS[architecture])
    attributes = ("num_attention_heads", "num_key_value_heads", "hidden_size", "n_head")
    return config, {name: getattr(config, name, None) for name in attributes}


def _scale(config: Config, reader: GGUFReader, architecture: str, file: Path) -> None:
    """Give a config its file's rotary scaling, which transformers does not read, or refuse it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if architecture == "gemma4":  # whose config's own type is what the frequencies say
        return
    start = f"{architecture}.rope.scaling."
    stated = {
        n.removeprefix(start): _field(reader, n) for n in reader.fields if n.startswith(start)
    }
    whole = getattr(config, "rope_parameters", None) or {}
    rope, kind = whole.get("full_attention", whole), stated.pop("type", "none")
    stored = {str(t.name): t.data for t in reader.tensors if FREQUENCIES.search(str(t.name))}
    base, rotated = (
        _field(reader, f"{architecture}.rope.{n}") for n in ("freq_base", "dimension_count")
    )
    if "rope_theta" in rope:
        rope["rope_theta"] = base or LLAMA_BASE
    if rotated and "rope_theta" in rope and not hasattr(config, "rotary_dim"):
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if rotated != int(size * rope.get("partial_rotary_factor", 1.0)):
            raise _unscaled(file)
    if kind in ("linear", "yarn") and not stored and stated.keys() - {"finetuned"} <= {*SCALING}:
        settings = {name: stated[field] for field, name in SCALING.items() if field in stated}
        rope.update(settings, rope_type=kind)
    elif kind == "none" and [*stored] == ["rope_freqs.weight"]:
        (found,) = stored.values()
        rope.update(LLAMA3, factor=float(found.max()))
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = rope["rope_theta"] ** -(np.arange(len(found)) / len(found))
        if not np.allclose(plain / found, scaled.numpy(), rtol=1e-4):
            raise _unscaled(file)
    elif kind != "none" or stored:
        raise _unscaled(file)


def attention_scalar(config: Config, layers: int) -> int:
    """Return the number by whose root llama.cpp divides a Gemma's attention scores.

    It is the size of a head, but in the largest model, which is known by its number of layers.
    """
    if config.num_hidden_layers == layers:
        return int(config.hidden_size // config.num_attention_heads)
    return int(config.head_dim)


def _unscaled(file: Path) -> MoesaicError:
    return MoesaicError(
        f"{file}: its rotary scaling is none that is read from GGUF files. Give the checkpoint "
        "that it was made from."
    )


def _converted(file: Path, naming: Naming, model: Model) -> list[str]:
    """Return the names in memory of a model's weights; refuse a file that holds others."""
    try:
        naming.check(model)
    except MoesaicError as error:
        message = str(error).replace(str(naming.checkpoint.folder), str(file))
        raise MoesaicError(message) from None
    state = model.state_dict()
    stored = {*naming.in_memory.values()}
    # MTP layers, which transformers does not read
    left = {name for name in stored - state.keys() if not name.startswith("mtp.")}
    _check_left(file, [name for name, to in naming.in_memory.items() if to in left], model)
    return [name for name in state if name in stored]


def _check_left(file: Path, names: Iterable[str], model: Model) -> None:
    """Refuse a file that holds more than its model."""
    left = sorted(name for name in names if not FREQUENCIES.search(name))
    if left:
        raise MoesaicError(
            f"{file} has tensors that a {model.config.model_type} has no place for: "
            f"{', '.join(left[:3])} ({len(left)} in all). Give the checkpoint that it was made "
            "from."
        )


def _parts(
    file: Path, reader: GGUFReader, architecture: str, model: Model
) -> dict[str, StoredWeight]:
    """Return a model's weights in a file by published names; refuse a file that holds others."""
    from transformers.core_model_loading import revert_weight_conversion

    there = {str(tensor.name): tensor for tensor in reader.tensors}
    expected = revert_weight_conversion(model, dict(model.state_dict()))
    named, parts, used = _namer(architecture, model.config.num_hidden_layers), {}, set()
    for name, meta in expected.items():
        stored = next((n for n in named(name) if n in there), None)
        if stored is not None:
            used.add(stored)
            parts[name] = _part(file, name, there[stored], [*meta.shape])
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    missing = sorted(name for name in expected if name not in parts and name not in tied)
    left = [name for name in there if name not in used]
    if missing:
        more = sorted(name for name in left if not FREQUENCIES.search(name))[:3]
        beside = f"; it has {', '.join(more)}" if more else ""
        raise MoesaicError(
            f"{file} is of architecture {architecture!r} and has no tensor for "
            f"{', '.join(missing[:3])} ({len(missing)} in all){beside}. Give the checkpoint that "
            "it was made from."
        )
    counts = Counter(str(p.stored.name) for p in parts.values() if p.expert is not None)
    for name, (tensor, expert, shape) in parts.items():
        if expert is not None and len(tensor.data) != (count := counts[str(tensor.name)]):
            raise _misfit(file, tensor, _shape(tensor), [count, *shape], name)
    _check_left(file, left, model)
    return parts


def _namer(architecture: str, layers: int) -> Callable[[str], Iterator[str]]:
    """Return a function to llama.cpp's possible names of a published weight, experts stacked."""
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


def _part(file: Path, name: str, tensor: ReaderTensor, shape: list[int]) -> StoredWeight:
    """Return a weight, or an expert's part of a stacked one; its shape must be the config's."""
    match, stored = _NUMBER.search(name), _shape(tensor)
    expert = int(match[1]) if match else None
    if expert is not None:
        stored = stored[1:]
    if sorted(_sizes(stored)) != sorted(_sizes(shape)):
        raise _misfit(file, tensor, stored, shape, name)
    return StoredWeight(tensor, expert, shape)


def _misfit(
    file: Path, tensor: ReaderTensor, stored: list[int], shape: list[int], name: str
) -> MoesaicError:
    """Return the error for a tensor whose shape is not the config's."""
    return MoesaicError(
        f"{tensor.name} in {file} is of shape {dims(stored)}, and its config asks for "
        f"{dims(shape)}: {name}."
    )


def _sizes(shape: list[int]) -> list[int]:
    """Return the sizes of a shape without ones, which reshaping by converters keeps."""
    return [n for n in shape if n > 1]


def _shape(tensor: ReaderTensor) -> list[int]:
    return [int(n) for n in reversed(tensor.shape.tolist())]


# --- headers -------------------------------------------------------------------------------------

# The format is that of ggml's ``docs/gguf.md``: a magic, a version, numbers of tensors and of
# fields, the fields, and each tensor's description.
MOST = {"fields": 10_000, "tensors": 200_000, "values": 4_000_000, "dimensions": 8}
"""Limits of a header: the largest vocabularies have 300,000 tokens, as many merges, scores and
types."""
NAME, WORD, TEXT = 1000, 4096, 1 << 24
"""Largest numbers of bytes of a name, of a string in a list, and of any other string."""
NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Codes of :mod:`struct` by the types of fields that are numbers."""
STRING, LIST = 8, 9


class _Reader:
    """Reader of a header that checks every size first."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.left = file, size
        self.order = "<"

    def take(self, count: int) -> bytes:
        """Return the next bytes; raises ValueError if the file ends before."""
        self.left -= count
        if self.left < 0:
            raise ValueError("it ends within its header")
        return self.file.read(count)

    def number(self, kind: str) -> float:
        """Return the next number of a :mod:`struct` type."""
        (value,) = struct.unpack(self.order + kind, self.take(struct.calcsize(f"={kind}")))
        return value

    def count(self, what: str, most: int, kind: str = "Q") -> int:
        """Return the next number; raises ValueError if it is above ``most``."""
        count = int(self.number(kind))
        if count > most:
            raise ValueError(f"{count:,} {what}, of {most:,} at most")
        return count

    def text(self, most: int) -> bytes:
        """Return the next string, of at most ``most`` bytes."""
        return self.take(self.count("bytes of text", most))


def _check_gguf(path: Path) -> None:
    """Refuse a header that asks for more than any model has, and tensors that do not lie one after
    the other, as ggml does; ValueError names the value and its limit."""
    from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

    line, place, end, size = GGUF_DEFAULT_ALIGNMENT, 0, 0, path.stat().st_size
    with path.open("rb") as file:
        reader = _Reader(file, size)
        if reader.take(4) != b"GGUF":
            raise ValueError("it does not begin as GGUF does")
        version = reader.take(4)
        if version[0] == 0:  # the other order of bytes
            reader.order = ">"
        tensors = reader.count("tensors", MOST["tensors"])
        fields = reader.count("fields", MOST["fields"])
        for key, number in _numbers(reader, fields):
            check_counts({key.rpartition(".")[2]: number})
            line = max(1, int(number)) if key == ALIGNMENT else line
        for _ in range(tensors):
            name = reader.text(NAME).decode("utf-8", "replace")
            dimensions = reader.count("dimensions", MOST["dimensions"], "I")
            shape = [reader.number("Q") for _ in range(dimensions)]
            kind, start = GGMLQuantizationType(int(reader.number("I"))), reader.number("Q")
            if prod(shape) >= 2**62:
                raise ValueError(f"{quote(name)} is of shape {quote(shape)}")
            if start != place:
                raise ValueError(
                    f"{quote(name)} begins at byte {start:,} of the data, not {place:,}"
                )
            block, nbytes = GGML_QUANT_SIZES[kind]
            end = place + int(prod(shape)) // block * nbytes
            place = -(-end // line) * line
        if end > reader.left - (reader.left - size) % line:
            raise ValueError(f"it ends within its tensors, which take {end:,} bytes")


def _numbers(reader: _Reader, fields: int) -> Iterator[tuple[str, float]]:
    """Yield the fields that are numbers, with their names."""
    values = 0
    for _ in range(fields):
        name = reader.text(NAME).decode("utf-8", "replace")
        kind = int(reader.number("I"))
        if kind in NUMBERS:
            yield name, reader.number(NUMBERS[kind])
        elif kind == STRING:
            reader.text(TEXT)
        elif kind == LIST:
            kind = int(reader.number("I"))
            count = reader.count("values", MOST["values"] - values)
            values += count
            if kind == STRING:
                for _ in range(count):
                    reader.text(WORD)
            elif kind in NUMBERS:
                reader.take(count * struct.calcsize(f"={NUMBERS[kind]}"))
            else:
                raise ValueError(f"{quote(name)} is a list of type {kind}")
        else:
            raise ValueError(f"{quote(name)} is of type {kind}")


# --- files in packages of the Python index -------------------------------------------------------


def packaged_file(name: str) -> Path:
    """Return the GGUF file of a model of :data:`~moesaic.io.names.PACKAGED`.

    Raises:
        MoesaicError: its package, or a part of it, is not installed or damaged.
    """
    package = PACKAGED[name]
    spec = importlib.util.find_spec(package.split()[-1].replace("-", "_"))
    if spec is None:
        raise MoesaicError(f"{name} needs its package: pip install {package}")
    folders: Sequence[str] = spec.submodule_search_locations or ()
    for folder in folders:
        for whole in Path(folder).rglob("*.gguf"):
            return whole
    try:  # joined once, and checked by its checksum
        module = importlib.import_module(spec.name)
        file: Path = cache_folder() / module.MODEL_NAME
        if not file.is_file():
            with output_lock(file, wait=True), whole_file(file) as partial:
                module.assemble(partial, overwrite=True)  # it is there, and empty
    except (ImportError, AttributeError, FileNotFoundError, ValueError) as error:
        raise MoesaicError(
            f"{name} cannot be put together from its package ({error}): pip install "
            f"--force-reinstall {package}"
        ) from error
    return file
