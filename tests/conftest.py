"""Tiny random models of every dense architecture, and a tiny tokenizer. Nothing is downloaded."""

from __future__ import annotations

import os

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# Laws hold bitwise. MKL may round otherwise where memory is aligned otherwise, unless told not to.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto import CONFIG_MAPPING
from transformers.utils import logging

from moesaic.arch.dense import DENSE
from moesaic.data.text import Tokens, shipped_texts

logging.disable_progress_bar()
torch.set_num_threads(1)
# The same examples every time: a run that fails, fails again.
settings.register_profile("moesaic", derandomize=True)
settings.load_profile("moesaic")

VOCAB = 384

WAYS = {
    "every neuron": {"WIDE": 1 << 20, "CROWDED": 0},
    "one by one": {"WIDE": 1, "NARROW": 1 << 20, "CROWDED": 1e9},
    "one by one, down too": {"WIDE": 1, "NARROW": 1},
    "petal by petal": {"CROWDED": 2, "SHARED": 0, "WIDE": 1 << 20},
}
"""How several petals run, forced."""


def force(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Run several petals that way, whatever is faster."""
    for name, value in WAYS[way].items():
        monkeypatch.setattr(f"moesaic.nn.carved.{name}", value)


SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
EXTRA: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 8, "sliding_window": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8},
    "qwen3": {"head_dim": 8},
    "llama": {"mlp_bias": True},
    "granite": {"residual_multiplier": 0.5, "embedding_multiplier": 2.0},
}


def processes(*arguments: Any, count: int = 2) -> subprocess.Popen[bytes]:
    """Python with these arguments in several CPU processes, by accelerate's launcher and gloo."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    launch += ["--multi_gpu", "--num_processes", str(count)]  # it starts CPU processes too
    return subprocess.Popen(
        [*launch, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        stderr=subprocess.PIPE,
    )


def launch(*arguments: Any) -> None:
    """Run Python with these arguments in two processes to their end."""
    process = processes(*arguments)
    _, errors = process.communicate()
    assert process.returncode == 0, errors.decode()


def tiny_config(model_type: str, **changes: Any) -> Any:
    return CONFIG_MAPPING[model_type](**{**SMALL, **EXTRA.get(model_type, {}), **changes})


def tiny_model(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """A random model whose weights are large enough for neurons to differ."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.fixture(params=sorted(DENSE))
def model_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tokens() -> Tokens:
    ids = torch.randint(1, VOCAB, (6, 24), generator=torch.Generator().manual_seed(1))
    return Tokens(ids)


@pytest.fixture
def padded(tokens: Tokens) -> Tokens:
    mask = torch.ones_like(tokens.input_ids, dtype=torch.bool)
    mask[1, 15:] = False
    mask[4, 3:] = False
    return Tokens(tokens.input_ids.masked_fill(~mask, 0), mask)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(shipped_texts("calibration", "prose")[:5], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|endoftext|>")


@pytest.fixture(scope="session")
def llama_folder(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast
) -> Path:
    """A tiny llama as a user would have it: sharded safetensors and a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    tiny_model("llama").save_pretrained(folder, max_shard_size="60KB")
    tokenizer.save_pretrained(folder)
    return folder
