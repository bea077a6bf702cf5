"""Training in which a process holds a part of each weight: FSDP2 through accelerate and gloo."""

import json

import pytest
import sharded
import torch
from builders import launch, python, tiny_model, weights
from torch import nn

from moesaic.plan import Plan
from moesaic.train.loop import _Shape

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
TEXT = ["--samples", "4", "--no-eval"]
COMMANDS = {
    "tune": ["tune", "--what", "all", "--train", "prose", "--length", "32", "--no-eval"],
    "tomoe": ["carve", "--method", "tomoe", "--calibration", "prose", *TEXT],
}
OPTIONS = {
    "tune": {"lr": 0.01, "batch": 2},
    "tomoe": {"experts": 3, "active": 0.7, "length": 32, "lr": 0.03},
}


def command(key, model, out, **more):
    verb, *rest = COMMANDS[key]
    options = {**OPTIONS[key], "steps": 4, "save_every": 2, **more}
    return [verb, model, out, *rest, *(p for k, v in options.items() for p in ("-o", f"{k}={v}"))]


def losses(out):
    record = json.loads((out / "moesaic/result.json").read_text())
    return record["steps"][-1]["summary"]["training"]["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("key", sorted(COMMANDS))
def test_two_parts_train_as_one_whole(key, tmp_path, llama_folder, monkeypatch):
    """The losses of every step, and all weights; killed between checkpoints and continued too."""
    tiny_model("llama", tie_word_embeddings=False).save_pretrained(tmp_path / "model")
    for file in llama_folder.glob("tokenizer*"):
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    one = python("-m", "moesaic", *command(key, tmp_path / "model", tmp_path / "one", accumulate=2))
    said = one.communicate()[1]
    assert not one.returncode, said
    for name, value in FSDP.items():
        monkeypatch.setenv(name, value)
    for out, ends in (("two", ()), ("continued", (3,))):
        asked = command(key, tmp_path / "model", tmp_path / out)
        for step in ends:
            monkeypatch.setenv("DIE_AT", str(step))
            with pytest.raises(AssertionError):
                launch(sharded.main, *asked)
            monkeypatch.delenv("DIE_AT")
            kept = list((tmp_path / f"{out}.partial").rglob("trained.safetensors"))
            assert [file.parent.name for file in kept] == ["checkpoint-2"]
            asked.append("--resume")
        launch(sharded.main, *asked)
        for ours, theirs in zip(losses(tmp_path / out), losses(tmp_path / "one"), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
        found, wanted = weights(tmp_path / out), weights(tmp_path / "one")
        assert found.keys() == wanted.keys()
        assert all((found[n].double() - wanted[n].double()).abs().max() < 1e-5 for n in found)
        if key == "tomoe":
            a, b = (Plan.load(tmp_path / name).layers for name in (out, "one"))
            assert {i: a[i].header() for i in a} == {i: b[i].header() for i in b}


def test_a_model_gets_its_shape_back():
    """Its modules, their hooks and its very parameters, with the values that parts had."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    x, calls = torch.randn(5, 3), []
    kept = model[0].register_forward_hook(lambda *_: calls.append("kept"))
    wanted, parameters = model(x), dict(model.named_parameters())
    shape = _Shape(model)
    shape.restore()
    assert model(x).equal(wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moesaic.train.loop.DTensor", _Part)
        split(model)
        shape.restore()
    calls.clear()
    torch.testing.assert_close(model(x), wanted + 1)
    assert calls == ["kept"]
    assert type(model[1]) is nn.Linear
    assert all(p is parameters[n] for n, p in model.named_parameters())
    kept.remove()


class _Part(nn.Parameter):
    """A parameter of which only this part is here."""

    whole: torch.Tensor

    def full_tensor(self):
        return self.whole


def split(model):
    """What fully_shard does to a module, without other processes; the last bias is raised."""
    for module in model:
        module.__class__ = type("Split", (type(module),), {})
        module.register_forward_pre_hook(lambda *_: pytest.fail("a hook is left"))
        for name, parameter in list(module.named_parameters()):
            part = _Part(parameter.detach()[:1].clone())
            raised = module is model[-1] and name == "bias"
            part.whole = parameter.detach() + raised
            setattr(module, name, part)
