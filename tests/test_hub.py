"""A carved model behaves as any Hugging Face model does."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from builders import carved_model
from transformers import AutoModelForCausalLM

from moesaic import hub
from moesaic.carving.carved_ffn import CarvedFFN
from moesaic.errors import REPOSITORY


@pytest.fixture
def saved(tmp_path, tokens):
    model = carved_model()
    model.save_pretrained(tmp_path)
    hub.write_stub(model.config, tmp_path)
    with torch.no_grad():
        logits = model(tokens.input_ids).logits
    return tmp_path, logits


def test_trust_remote_code_needs_no_import(saved, tokens):
    folder, logits = saved
    code = (
        "import sys, json, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "assert not any(m.startswith('moesaic') for m in sys.modules)\n"
        f"m = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)\n"
        f"ids = torch.tensor({tokens.input_ids.tolist()})\n"
        "torch.set_num_threads(1)\n"
        "out = m.eval()(ids).logits.detach()\n"
        "print(json.dumps([type(m).__name__, out.double().sum().item(), out[0, 0, :3].tolist()]))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    name, total, first = json.loads(run.stdout.splitlines()[-1])
    assert name == "MoesaicLlamaForCausalLM"
    assert first == logits[0, 0, :3].tolist()
    assert total == pytest.approx(logits.double().sum().item(), rel=1e-12)


def test_without_the_package_the_repository_is_named(saved):
    """Not, as transformers says by itself, a name that nobody has registered."""
    folder, _ = saved
    code = (
        "import sys\n"
        "sys.modules['moesaic'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        f"AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stderr.splitlines()[-1] == (
        f"ImportError: This checkpoint needs: pip install git+{REPOSITORY}"
    )


def test_only_weights_and_settings_are_saved(saved):
    folder, _ = saved
    assert {p.name for p in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_moesaic.py",
    }


def test_saving_again_changes_nothing(saved, tmp_path_factory):
    folder, _ = saved
    again = tmp_path_factory.mktemp("again")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(again)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    first, second = (json.loads((f / "config.json").read_text()) for f in (folder, again))
    assert first == second


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phi3"])
def test_generate_with_cache_is_generate_without(model_type):
    model = carved_model(model_type)
    ids = torch.randint(1, 300, (2, 5), generator=torch.Generator().manual_seed(0))
    settings = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    cached = model.generate(ids, use_cache=True, **settings)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **settings))
    assert cached.shape[1] > 5


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


def test_device_map(saved, tokens):
    folder, logits = saved
    model = AutoModelForCausalLM.from_pretrained(folder, device_map={"": "cpu"})
    with torch.no_grad():
        assert torch.equal(model(tokens.input_ids).logits, logits)


def test_tied_embeddings_stay_tied(tmp_path):
    model = carved_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_torchao_int8(tokens):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = carved_model()
    with torch.no_grad():
        exact = model(tokens.input_ids).logits
        quantize_(model, Int8WeightOnlyConfig(version=2))
        ffn = model.model.layers[1].mlp
        assert isinstance(ffn, CarvedFFN)
        found = model(tokens.input_ids).logits
    assert (found - exact).norm() < 0.1 * exact.norm()


def test_deepcopy_of_a_carved_model(tokens):
    model = carved_model()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(twin(tokens.input_ids).logits, model(tokens.input_ids).logits)
