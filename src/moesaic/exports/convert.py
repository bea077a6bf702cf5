"""Run by path in a process of its own: llama.cpp's converter, with seven gaps filled.

Its class for GLM4-MoE writes the vocabulary of GLM's own tokenizer, whose special tokens it looks
up by name. An export has its base's tokenizer, so the converter's general way takes its place.

It takes DeepSeek-V3's router for a softmax where the config does not say ``scoring_func``, which
DeepSeek's own files do and those that transformers writes need not.

It knows byte-level vocabularies by a hash over some text, which every new vocabulary changes, and
asks for it by name. One that splits text as GPT-2 does, and changes nothing of it, is read as that.

Of SentencePiece's vocabularies it wants the file ``tokenizer.model``, which transformers 5 does not
write. Without it, all tokens get one score, or are taken for bytes (Gemma 3): llama.cpp would split
text otherwise than transformers. They get the order of their merges for scores.

It asks Qwen's mixtures for layers that predict further tokens, which transformers does not write:
where a checkpoint has none, it is told so.

What a Nemotron-H config of ours says of layers that differ, it is told in its own words.

It calls a model by its folder, and says what the card there does. A model that is on its way into a
file is in a folder that nobody named: what is said is of another one.
"""

import importlib.util
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

UNMERGED = -1e6
"""The score of tokens that no merge makes, as single characters."""
SPACE = "\u2581"
"""What SentencePiece writes for a space."""


def main(request: str) -> None:
    """``request`` is the JSON list that :func:`moesaic.exports.llamacpp.convert` sends."""
    script, folder, named, out, outtype, predicting, settings = json.loads(request)
    sys.path.insert(0, str(Path(script).parent))
    converter = importlib.import_module(Path(script).stem)
    if settings:  # transformers loads no tokenizer beside a config that it does not know
        importlib.import_module("moesaic")
    split = importlib.util.find_spec("conversion")  # into one file a family, lately
    glm, base = (
        importlib.import_module(f"conversion.{name}") if split else converter
        for name in ("glm", "base")
    )
    base.ModelBase.no_mtp = not predicting
    base.ModelBase.settings = settings  # looked at there: one model never gets another's
    glm.Glm4MoeModel.set_vocab = lambda self: self._set_vocab_gpt2()
    gguf = importlib.import_module("gguf")  # the converter's own
    gguf.LlamaHfVocab.get_token_score = lambda self, token: scores(self.fname_tokenizer).get(
        token, UNMERGED
    )
    for name in ("_set_vocab_sentencepiece", "_set_vocab_gpt2"):
        setattr(base.TextModel, name, spelled(getattr(base.TextModel, name)))
    metadata = gguf.Metadata
    described = metadata.load

    def described_as(override: object, _: object, *more: object) -> object:
        return described(override, Path(named), *more)

    metadata.load = staticmethod(described_as)
    load = base.ModelBase.load_hparams

    def completed(*args: object, **options: object) -> dict[str, object]:
        hparams: dict[str, object] = load(*args, **options)
        if hparams.get("model_type") == "deepseek_v3":
            hparams.setdefault("scoring_func", "sigmoid")
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


def spelled(plain: Callable[..., None]) -> Callable[..., None]:
    """What is SentencePiece's, without a file of its own, written as such; else as before."""

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
    """Text, score and type of every token, one for each row of the embedding.

    The converter's own way takes added tokens that have a place in the vocabulary, as those that
    begin a turn, for ordinary text, and has as many tokens as the tokenizer.
    """
    vocab, kinds = gguf.LlamaHfVocab(model.dir_model), gguf.TokenType
    tokens = [*vocab.all_tokens()][:size]
    for number, added in vocab.tokenizer.added_tokens_decoder.items():
        if number < len(tokens) and tokens[number][-1] != kinds.BYTE:
            text, score, kind = tokens[number]
            if added.special or model.does_token_look_special(added.content):
                kind = kinds.CONTROL
            else:  # llama.cpp looks for it in text as it is
                text, kind = text.replace(SPACE.encode(), b" "), kinds.USER_DEFINED
            tokens[number] = text, score, kind
    unused = range(len(tokens), size)
    return tokens + [(f"[PAD{number}]".encode(), UNMERGED, kinds.UNUSED) for number in unused]


def _tokenizer_in(file: Path) -> dict[str, Any]:
    """What a ``tokenizer.json`` says; nothing where there is none."""
    plain: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return plain


def falls_back_to_bytes(file: Path) -> bool:
    """A BPE over characters, as SentencePiece's are in ``tokenizer.json``."""
    plain = _tokenizer_in(file)
    model, decoder = plain.get("model") or {}, plain.get("decoder") or {}
    characters = model.get("type") == "BPE" and bool(model.get("byte_fallback"))
    return characters and decoder.get("type") == "Sequence"  # a byte-level one's is ByteLevel


def begins_with_space(file: Path) -> bool:
    """Whether a space is put before a text."""
    tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(file))
    first: str = tokenizer.encode("a", add_special_tokens=False).tokens[0]
    return first.startswith(SPACE)


@cache
def scores(file: Path) -> dict[int, float]:
    """SentencePiece's scores of tokens that come of merges: the sooner, the higher."""
    model = _tokenizer_in(file)["model"]
    pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    ranks = {"".join(pair): rank for rank, pair in reversed([*enumerate(pairs)])}
    return {model["vocab"][token]: -float(rank) for token, rank in ranks.items()}


def _splits_as_gpt2(file: Path) -> bool:
    """A byte-level BPE that splits by GPT-2's own expression, without a normaliser before it."""
    plain = _tokenizer_in(file)
    split = plain.get("pre_tokenizer") or {}
    return (
        plain.get("normalizer") is None
        and split.get("type") == "ByteLevel"
        and bool(split.get("use_regex", True))
        and not split.get("add_prefix_space", True)
    )


if __name__ == "__main__":
    main(sys.argv[1])
