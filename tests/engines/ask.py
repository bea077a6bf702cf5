"""Run by path in an engine's own environment: what it makes of some models.

    python ask.py ENGINE REQUEST ANSWERS

REQUEST is a JSON file: ``models``, folders by name; ``prompt``, token ids; ``new_tokens``. ANSWERS
gets a line of JSON with the engine's ``version`` and one for each model: its ``name`` and either
``logprobs``, of each token of the prompt after the first, and ``greedy``, the tokens after it, or
``error``. A model that ends the process has no line.
"""

import gc
import json
import os
import sys
from pathlib import Path


def dtype(folder):
    """The type to compute in: the checkpoint's own, which for most is float32."""
    config = json.loads((Path(folder) / "config.json").read_text("utf-8"))
    return "auto" if "quantization_config" in config else config["dtype"]


def ours(folder):
    """Whether a checkpoint is of a class of this package."""
    config = json.loads((Path(folder) / "config.json").read_text("utf-8"))
    return config["model_type"].startswith("moesaic_")


def transformers():
    """transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM, __version__

    def answer(folder, prompt, new_tokens):
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype(folder), output_loading_info=True, trust_remote_code=True
        )
        if troubles := {name: keys for name, keys in info.items() if keys}:
            raise ValueError(troubles)
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            logits = model.eval()(ids).logits[0].float().log_softmax(-1)
            new = model.generate(
                ids, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert not any(name.partition(".")[0] == "moesaic" for name in sys.modules)
        logprobs = logits[:-1].gather(1, ids[0, 1:, None])[:, 0]
        return logprobs.tolist(), new[0, len(prompt) :].tolist()

    return f"transformers {__version__}", answer


def vllm():
    """vLLM on a CPU."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # or every model would import vLLM once more
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
    )
    from vllm import LLM, SamplingParams, __version__
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda call: call()  # another import for every architecture
    compiled = RotaryEmbedding.forward_cpu

    def rotated(self, positions, query, key=None):
        """0.32's compiled rotary product is wrong where heads are a dimension, as DeepSeek's."""
        way = RotaryEmbedding.forward_native if query.dim() == 3 else compiled
        return way(self, positions, query, key)

    RotaryEmbedding.forward_cpu = rotated

    def answer(folder, prompt, new_tokens):
        greedy = SamplingParams(
            temperature=0,
            max_tokens=new_tokens,
            ignore_eos=True,
            prompt_logprobs=0,
            detokenize=False,
        )
        try:
            engine = LLM(
                folder,
                model_impl="transformers" if ours(folder) else "auto",
                trust_remote_code=True,
                dtype=dtype(folder),
                enforce_eager=True,
                skip_tokenizer_init=True,
                max_model_len=128,
                max_num_seqs=1,
                enable_prefix_caching=False,
                disable_log_stats=True,
            )
            (output,) = engine.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
        finally:
            engine = None
            gc.collect()
            cleanup_dist_env_and_memory()
        pairs = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        logprobs = [every[token].logprob for token, every in pairs]
        return logprobs, list(output.outputs[0].token_ids)

    return f"vLLM {__version__}", answer


def mlx():
    """mlx-lm on a CPU, in float32."""
    import mlx.core as mx
    import numpy as np
    from mlx_lm import __version__
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)

    def answer(folder, prompt, new_tokens):
        model, _ = load_model(Path(folder))
        model.set_dtype(mx.float32)  # its grouped products know no other type on a CPU
        ids = mx.array(prompt)
        logits = np.array(model(ids[None])[0], np.float64)
        logits -= logits.max(-1, keepdims=True)
        scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        steps = generate_step(ids, model, max_tokens=new_tokens)
        logprobs = [float(row[token]) for row, token in zip(scores, prompt[1:], strict=False)]
        return logprobs, [int(token) for token, _ in steps]

    return f"mlx-lm {__version__}", answer


def llamacpp():
    """llama.cpp, in this process."""
    import torch

    from moesaic.exports import convert
    from moesaic.exports import llamacpp as exports
    from moesaic.metrics.gguf_engine import Engine, library

    def converted(_, asked, __):  # a process would import all for every model
        return convert.main(asked)

    exports.run_script = converted

    def answer(folder, prompt, new_tokens):
        file = Path(folder).with_name("model.gguf")
        exports.export_gguf(folder, file, overwrite=True)
        ids = torch.tensor(prompt)
        with Engine(file, 128) as engine:
            scores = engine.logits(ids).log_softmax(-1)
            return (
                scores[:-1].gather(1, ids[1:, None])[:, 0].tolist(),
                engine.greedy(ids, new_tokens),
            )

    return library()[2], answer


def main(engine, request, answers):
    """Answer a request."""
    asked = json.loads(Path(request).read_text("utf-8"))
    version, answer = globals()[engine]()
    with open(answers, "a", encoding="utf-8", buffering=1) as out:
        out.write(json.dumps({"version": version}) + "\n")
        models = asked["models"].items()
        for name, folder in sorted(models, key=lambda model: ours(model[1])):
            line = {"name": name}
            try:
                line["logprobs"], line["greedy"] = answer(
                    folder, asked["prompt"], asked["new_tokens"]
                )
            except (Exception, SystemExit) as error:
                line["error"] = f"{type(error).__name__}: {error}"
            out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
