"""Script that runs an export in plain transformers; run in a process of its own."""

import json
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def main(request: str) -> None:
    """Write the export's logits; ``request`` is the JSON list from
    :func:`moesaic.exports.native.verify`."""
    folder, ids_file, logits_file = json.loads(request)
    model, loaded = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
    )
    for trouble in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if loaded.get(trouble):
            raise SystemExit(f"{trouble}: {sorted(map(str, loaded[trouble]))[:3]}")
    with torch.inference_mode():
        logits = model.eval()(load_file(ids_file)["input_ids"]).logits
    assert not any(name.partition(".")[0] == "moesaic" for name in sys.modules)
    save_file({"logits": logits.contiguous()}, logits_file)


if __name__ == "__main__":
    main(sys.argv[1])
