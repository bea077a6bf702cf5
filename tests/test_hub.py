"""A carved model behaves as any Hugging Face model does, and is compiled."""

import json
import subprocess
import sys

import pytest
import torch
from builders import carved_model
from shrunken import small_model
from torch import nn
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from moesaic import hub
from moesaic.errors import REPOSITORY


@pytest.fixture
def saved(tmp_path, tokens):
    model = carved_model()
    model.save_pretrained(tmp_path)
    hub.write_stub(model.config, tmp_path)
    with torch.no_grad():
        logits = model(tokens.input_ids).logits
    return tmp_path, logits


def test_trust_remote_code_needs_the_package_and_no_import(saved, tokens):
    """Without the package its repository is named, and no name that nobody has registered."""
    folder, logits = saved
    code = (
        "import sys, json, torch\n"
        "from transformers import AutoModelForCausalLM as Auto\n"
        f"load = lambda: Auto.from_pretrained({str(folder)!r}, trust_remote_code=True)\n"
        "sys.modules['moesaic'] = None\n"
        "try:\n"
        "    load()\n"
        "except ImportError as error:\n"
        "    said = str(error)\n"
        "del sys.modules['moesaic']\n"
        "assert not any(m.startswith('moesaic') for m in sys.modules)\n"
        f"ids = torch.tensor({tokens.input_ids.tolist()})\n"
        "torch.set_num_threads(1)\n"
        "model = load()\n"
        "out = model.eval()(ids).logits.detach().double()\n"
        "name = type(model).__name__\n"
        "print(json.dumps([said, name, out.sum().item(), out[0, 0, :3].tolist()]))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said, name, total, first = json.loads(run.stdout.splitlines()[-1])
    assert said == f"This checkpoint needs: pip install git+{REPOSITORY}"
    assert name == "MoesaicLlamaForCausalLM"
    assert first == logits[0, 0, :3].tolist()
    assert total == pytest.approx(logits.double().sum().item(), rel=1e-12)


def test_bfloat16_keeps_the_router_in_float32(saved, tokens):
    folder, logits = saved
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ffn = model.model.layers[1].mlp
    assert ffn.up_proj.weight.dtype == torch.bfloat16
    assert ffn.router.weight.dtype == torch.float32
    with torch.no_grad():
        found = model(tokens.input_ids).logits.float()
    agreement = (found.argmax(-1) == logits.argmax(-1)).float().mean()
    assert agreement > 0.8


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_gradient_checkpointing_changes_no_gradient(tokens):
    def gradient(checkpointing):
        model = carved_model().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(input_ids=tokens.input_ids, labels=tokens.input_ids, use_cache=False).loss.backward()
        return model.model.layers[1].mlp.down_proj.weight.grad

    torch.testing.assert_close(gradient(True), gradient(False))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_lora_adapts_petals_too(tokens):
    from peft import LoraConfig, get_peft_model

    model = carved_model()
    with torch.no_grad():
        before = model(tokens.input_ids).logits
    targets = ["gate_proj", "up_proj", "down_proj"]
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=targets))
    with torch.no_grad():
        torch.testing.assert_close(adapted(tokens.input_ids).logits, before)
    adapted(input_ids=tokens.input_ids, labels=tokens.input_ids).loss.backward()
    trained = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in n for n in trained)
    carved = [p for n, p in trained.items() if "layers.1.mlp" in n and "lora_B" in n]
    assert len(carved) == 3
    assert all(p.grad.abs().sum() > 0 for p in carved)
    with torch.no_grad():
        for p in carved:
            p.normal_()
        changed = adapted(tokens.input_ids).logits
        merged = adapted.merge_and_unload()
        assert not torch.allclose(changed, before)
        torch.testing.assert_close(merged(tokens.input_ids).logits, changed, rtol=1e-3, atol=1e-3)


# --- compiled: the same values, and no compiling anew for every split ----------------------------


@pytest.fixture
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@torch.no_grad()
def test_no_split_of_the_tokens_is_compiled_anew():
    ffn = carved_model().model.layers[1].mlp
    block = nn.Sequential(nn.LayerNorm(32), ffn, nn.Linear(32, 32))
    compiled = torch.compile(block, backend="eager")
    generator = torch.Generator().manual_seed(0)
    for length in (1, 24, 24, 24, 17, 9, 30, 31, 32, 33, 34, 35, 1):
        x = torch.randn(1, length, 32, generator=generator)
        torch.testing.assert_close(compiled(x), block(x))
    assert counters["stats"]["unique_graphs"] <= 6  # before and after; one token, 24, any number


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@torch.no_grad()
def test_a_compiled_model_generates_the_same():
    model = carved_model()
    compiled = torch.compile(model)
    ids = torch.randint(1, 300, (1, 24), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits
    )


def test_a_loaded_granite_is_written_in_its_published_words(tmp_path):
    """transformers renames its layer types, by which llama.cpp's converter finds attention."""
    model = small_model("granitemoehybrid")
    assert set(model.config.layer_types) == {"linear_attention", "full_attention"}
    hub.save_live(model, None, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["layer_types"] == ["mamba", "attention", "mamba", "attention"]
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert read.config.layer_types == model.config.layer_types
