"""Script around llama.cpp's converter that fills eight of its gaps; run in a process of its own.

Its class for GLM4-MoE writes the vocabulary of GLM's own tokenizer, whose special tokens it looks
up by name. An export has its base's tokenizer, so the converter's general method is used.

It takes DeepSeek-V3's router for a softmax if the config has no ``scoring_func``, which DeepSeek's
own files have and those that transformers writes need not.

It identifies byte-level vocabularies by a hash over some text, which is different for every new
vocabulary. One that splits text as GPT-2 does, without normalising it, is written as GPT-2's.

For SentencePiece's vocabularies it needs the file ``tokenizer.model``, which transformers 5 does
not write. Without it, all tokens get one score, or are taken for bytes (Gemma 3): llama.cpp would
split text differently from transformers. Their scores become the order of their merges.

It expects MTP layers in Qwen's mixtures, which transformers does not write: if a checkpoint has
none, ``no_mtp`` is set.

Layers that differ in a Nemotron-H config of ours are given to it in its own format.

It takes a model's name and card from its folder. Here the checkpoint is in a temporary folder, so
both come from the source's folder.

It writes a file as large as the checkpoint, which is not needed to quantise it: values can go to
stdout.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

UNMERGED = -1e6
"""Score of tokens that no merge makes, such as single characters."""
SPACE = "\u2581"
"""Character that SentencePiece writes for a space."""


def main(request: str, output: int = 1) -> None:
    """Run the converter.

    Args:
        request: the JSON list from :func:`moesaic.exports.llamacpp.convert`.
        output: file descriptor for values, if these are requested.
    """
    script, folder, named, out, outtype, predicting, settings, unsaid, published, *streamed = (
        json.loads(request)
    )
    sys.path.insert(0, str(Path(script).parent))
    converter = importlib.import_module(Path(script).stem)
    if settings:  # transformers loads no tokenizer beside a config that it does not know
        importlib.import_module("moesaic")
    split = importlib.util.find_spec("conversion")  # newer versions have one file per family
    glm, granite, base = (
        importlib.import_module(f"conversion.{name}") if split else converter
        for name in ("glm", "granite", "base")
    )
    find = granite.GraniteHybridModel.get_attn_layers

    def attention_layers(self: Any) -> list[int]:
        kinds = self.hparams.get("layer_types") or []
        self.hparams["layer_types"] = [published.get(kind, kind) for kind in kinds]
        found: list[int] = find(self)
        return found

    granite.GraniteHybridModel.get_attn_layers = attention_layers
    base.ModelBase.no_mtp = not predicting
    base.ModelBase.settings = settings  # read in ``completed`` below
    glm.Glm4MoeModel.set_vocab = lambda self: self._set_vocab_gpt2()
    gguf = importlib.import_module("gguf")  # the converter's own
    gguf.LlamaHfVocab.get_token_score = lambda self, token: scores(self.fname_tokenizer).get(
        token, UNMERGED
    )
    for name in ("_set_vocab_sentencepiece", "_set_vocab_gpt2"):
        setattr(base.TextModel, name, spelled(getattr(base.TextModel, name)))
    if streamed:
        gguf.GGUFWriter.write_tensors_to_file = streaming(gguf, output)
    metadata = gguf.Metadata
    described = metadata.load

    def described_as(override: object, _: object, *more: object) -> object:
        return described(override, Path(named), *more)

    metadata.load = staticmethod(described_as)
    load = base.ModelBase.load_hparams

    def completed(*args: object, **options: object) -> dict[str, object]:
        hparams: dict[str, object] = load(*args, **options)
        for name, value in unsaid.get(hparams.get("model_type"), {}).items():
            hparams.setdefault(name, value)
        settings = base.ModelBase.settings
        kept = {name: value for name, value in hparams.items() if name not in settings}
        return kept | {name: value for name, value in settings.items() if value is not None}

    base.ModelBase.load_hparams = staticmethod(completed)
    original = base.TextModel.get_vocab_base_pre

    def split_by(self: object, tokenizer: object) -> str:
        try:
            name: str = original(self, tokenizer)
        except NotImplementedError:
            if not _splits_as_gpt2(Path(folder) / "tokenizer.json"):
                raise
            name = "gpt-2"
        return name

    base.TextModel.get_vocab_base_pre = split_by
    sys.argv = [script, folder, "--outfile", out, "--outtype", outtype]
    converter.main()


def streaming(gguf: Any, descriptor: int) -> Callable[..., None]:
    """Return the writer's method that writes values to a descriptor, and a hole into the file."""

    def write(self: Any, **_: object) -> None:
        (file,), (tensors,) = self.fout, self.tensors
        self.write_ti_data_to_file()
        self.write_padding(file, file.tell())
        padded = (self.ggml_pad(tensor.nbytes, self.data_alignment) for tensor in tensors.values())
        file.truncate(file.tell() + sum(padded))
        file.flush()
        with open(descriptor, "wb") as values:
            values.write(b"\n")  # the file is complete
            values.flush()
            for tensor in tensors.values():
                made = gguf.LazyNumpyTensor.to_eager(tensor.tensor)
                values.write(np.ascontiguousarray(made).data)
                self.write_padding(values, tensor.nbytes)
                tensor.tensor = None

    return write


def spelled(plain: Callable[..., None]) -> Callable[..., None]:
    """Wrap the converter's method to write SentencePiece vocabularies without a file of their
    own."""

    def write(self: Any, *args: object) -> None:
        file = self.dir_model / "tokenizer.json"
        if (self.dir_model / "tokenizer.model").is_file() or not falls_back_to_bytes(file):
            return plain(self, *args)
        gguf, writer = importlib.import_module("gguf"), self.gguf_writer
        size = self.find_hparam(["vocab_size_per_layer_input", "vocab_size"])
        texts, order, kinds = zip(*entries(self, gguf, size), strict=True)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(texts)
        writer.add_token_scores(order)
        writer.add_token_types(kinds)
        gguf.SpecialVocab(self.dir_model, n_vocab=size).add_to_gguf(writer)
        return writer.add_add_space_prefix(begins_with_space(file))

    return write


def entries(model: Any, gguf: Any, size: int) -> list[tuple[bytes, float, int]]:
    """Return text, score and type of every token, one for each row of the embedding.

    The converter's own method takes added tokens that are in the vocabulary, such as those that
    begin a turn, for ordinary text, and has only as many tokens as the tokenizer.
    """
    vocab, kinds = gguf.LlamaHfVocab(model.dir_model), gguf.TokenType
    tokens = [*vocab.all_tokens()][:size]
    for number, added in vocab.tokenizer.added_tokens_decoder.items():
        if number < len(tokens) and tokens[number][-1] != kinds.BYTE:
            text, score, kind = tokens[number]
            if added.special or model.does_token_look_special(added.content):
                kind = kinds.CONTROL
            else:  # llama.cpp searches for it in the plain text
                text, kind = text.replace(SPACE.encode(), b" "), kinds.USER_DEFINED
            tokens[number] = text, score, kind
    unused = range(len(tokens), size)
    return tokens + [(f"[PAD{number}]".encode(), UNMERGED, kinds.UNUSED) for number in unused]


def _tokenizer_in(file: Path) -> dict[str, Any]:
    """Return the contents of a ``tokenizer.json``; empty if there is none."""
    plain: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return plain


def falls_back_to_bytes(file: Path) -> bool:
    """Return True for a BPE over characters, as SentencePiece's are in ``tokenizer.json``."""
    plain = _tokenizer_in(file)
    model, decoder = plain.get("model") or {}, plain.get("decoder") or {}
    characters = model.get("type") == "BPE" and bool(model.get("byte_fallback"))
    return characters and decoder.get("type") == "Sequence"  # a byte-level one's is ByteLevel


def begins_with_space(file: Path) -> bool:
    """Return True if the tokenizer puts a space before a text."""
    tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(file))
    first: str = tokenizer.encode("a", add_special_tokens=False).tokens[0]
    return first.startswith(SPACE)


@cache
def scores(file: Path) -> dict[int, float]:
    """Return SentencePiece's scores of tokens made by merges: the sooner, the higher."""
    model = _tokenizer_in(file)["model"]
    pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    ranks = {"".join(pair): rank for rank, pair in reversed([*enumerate(pairs)])}
    return {model["vocab"][token]: -float(rank) for token, rank in ranks.items()}


def _splits_as_gpt2(file: Path) -> bool:
    """Return True for a byte-level BPE that splits as GPT-2 does, without a normaliser."""
    plain = _tokenizer_in(file)
    split = plain.get("pre_tokenizer") or {}
    return (
        plain.get("normalizer") is None
        and split.get("type") == "ByteLevel"
        and bool(split.get("use_regex", True))
        and not split.get("add_prefix_space", True)
    )


if __name__ == "__main__":
    stdout = os.dup(1)
    os.dup2(2, 1)  # what others print goes to stderr
    main(sys.argv[1], stdout)
