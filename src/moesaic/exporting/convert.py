"""Run by path in a process of its own: llama.cpp's converter, with any tokenizer for GLM4-MoE.

Its class for GLM4-MoE writes the vocabulary of GLM's own tokenizer, whose special tokens it looks
up by name. An export has its base's tokenizer, so the converter's general way takes its place.
"""

import importlib.util
import json
import sys
from pathlib import Path


def main(request: str) -> None:
    """``request`` is the JSON list that :func:`moesaic.exporting.llamacpp.convert` sends."""
    script, folder, out, outtype = json.loads(request)
    sys.path.insert(0, str(Path(script).parent))
    converter = importlib.import_module(Path(script).stem)
    split = importlib.util.find_spec("conversion")  # into one file a family, lately
    glm = importlib.import_module("conversion.glm") if split else converter
    glm.Glm4MoeModel.set_vocab = lambda self: self._set_vocab_gpt2()
    sys.argv = [script, folder, "--outfile", out, "--outtype", outtype]
    converter.main()


if __name__ == "__main__":
    main(sys.argv[1])
