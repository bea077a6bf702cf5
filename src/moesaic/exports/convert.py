"""Run by path in a process of its own: llama.cpp's converter, with six gaps filled.

Its class for GLM4-MoE writes the vocabulary of GLM's own tokenizer, whose special tokens it looks
up by name. An export has its base's tokenizer, so the converter's general way takes its place.

It takes DeepSeek-V3's router for a softmax where the config does not say ``scoring_func``, which
DeepSeek's own files do and those that transformers writes need not.

It knows byte-level vocabularies by a hash over some text, which every new vocabulary changes, and
asks for it by name. One that splits text as GPT-2 does, and changes nothing of it, is read as that.

It asks Qwen's mixtures for layers that predict further tokens, which transformers does not write:
where a checkpoint has none, it is told so.

Of DeciLM's layers it reads widths in multiples of 256, which NVIDIA's models have, and vocabularies
that are SentencePiece's or Llama 3's. Its own way for one width takes a list as well; vocabularies
are those of Llamas. What a config of ours says of layers that differ, it is told in its own words.

It calls a model by its folder, and says what the card there does. A model that is on its way into a
file is in a folder that nobody named: what is said is of another one.
"""

import importlib.util
import json
import sys
from pathlib import Path


def main(request: str) -> None:
    """``request`` is the JSON list that :func:`moesaic.exports.llamacpp.convert` sends."""
    script, folder, named, out, outtype, predicting, settings = json.loads(request)
    sys.path.insert(0, str(Path(script).parent))
    converter = importlib.import_module(Path(script).stem)
    if settings:  # transformers loads no tokenizer beside a config that it does not know
        importlib.import_module("moesaic")
    split = importlib.util.find_spec("conversion")  # into one file a family, lately
    glm, deci, llama, base = (
        importlib.import_module(f"conversion.{name}") if split else converter
        for name in ("glm", "deci", "llama", "base")
    )
    base.ModelBase.no_mtp = not predicting
    base.ModelBase.settings = settings  # looked at there: one model never gets another's
    glm.Glm4MoeModel.set_vocab = lambda self: self._set_vocab_gpt2()
    deci.DeciModel.set_vocab = llama.LlamaModel.set_vocab
    deci.DeciModel.origin_hf_arch = None  # which LlamaModel looks at there
    metadata = importlib.import_module("gguf").Metadata  # the converter's own
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
            if not splits_as_gpt2(Path(folder) / "tokenizer.json"):
                raise
            name = "gpt-2"
        return name

    base.TextModel.get_vocab_base_pre = split_by
    sys.argv = [script, folder, "--outfile", out, "--outtype", outtype]
    converter.main()


def splits_as_gpt2(file: Path) -> bool:
    """A byte-level BPE that splits by GPT-2's own expression, without a normaliser before it."""
    plain = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    split = plain.get("pre_tokenizer") or {}
    return (
        plain.get("normalizer") is None
        and split.get("type") == "ByteLevel"
        and bool(split.get("use_regex", True))
        and not split.get("add_prefix_space", True)
    )


if __name__ == "__main__":
    main(sys.argv[1])
