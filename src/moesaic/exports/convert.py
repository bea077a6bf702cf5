"""Run by path in a process of its own: llama.cpp's converter, with two gaps filled.

Its class for GLM4-MoE writes the vocabulary of GLM's own tokenizer, whose special tokens it looks
up by name. An export has its base's tokenizer, so the converter's general way takes its place.

It takes DeepSeek-V3's router for a softmax where the config does not say ``scoring_func``, which
DeepSeek's own files do and those that transformers writes need not.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any


def main(request: str) -> None:
    """``request`` is the JSON list that :func:`moesaic.exports.llamacpp.convert` sends."""
    script, folder, out, outtype = json.loads(request)
    sys.path.insert(0, str(Path(script).parent))
    converter = importlib.import_module(Path(script).stem)
    split = importlib.util.find_spec("conversion")  # into one file a family, lately
    glm, base = (
        importlib.import_module(f"conversion.{name}") if split else converter
        for name in ("glm", "base")
    )
    glm.Glm4MoeModel.set_vocab = lambda self: self._set_vocab_gpt2()
    load = base.ModelBase.load_hparams

    def completed(*args: Any, **options: Any) -> dict[str, Any]:
        hparams: dict[str, Any] = load(*args, **options)
        if hparams.get("model_type") == "deepseek_v3":
            hparams.setdefault("scoring_func", "sigmoid")
        return hparams

    base.ModelBase.load_hparams = staticmethod(completed)
    sys.argv = [script, folder, "--outfile", out, "--outtype", outtype]
    converter.main()


if __name__ == "__main__":
    main(sys.argv[1])
