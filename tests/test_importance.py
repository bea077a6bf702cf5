"""Importance matrices against sums over the whole model's forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import tiny_model, tiny_moe
from torch import Tensor, nn

from moesaic.arch.lookup import base_arch
from moesaic.data.text import Tokens
from moesaic.exports.rounder import importance, means
from moesaic.io.source import resolve
from moesaic.observation.stats import Tally


def named(module: str) -> str | None:
    """All but the head, by transformers' names."""
    return module if module.startswith("model.") else None


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["llama", "qwen2_moe", "gpt_oss"])
def test_means_of_squares_of_a_layer_at_a_time_are_those_of_the_whole(
    model_type: str, tokens: Tokens, tmp_path: Path
) -> None:
    model: Any = tiny_model("llama") if model_type == "llama" else tiny_moe(model_type)
    model.save_pretrained(tmp_path / "model")
    found = importance(resolve(str(tmp_path / "model")), tokens, named)
    wanted: dict[str, Tensor] = {}
    routed: dict[int, Tensor] = {}

    def entered(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            x_TI = args[0].flatten(0, -2)
            wanted[f"{name}.weight"] = (x_TI.double() ** 2).mean(0).float()

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and named(name):
            module.register_forward_pre_hook(entered(name))
    arch = base_arch(model.config)
    layers = arch.moe_layers(model) if hasattr(arch, "moe_layers") else []  # type: ignore[operator]
    for i in layers:
        block = arch.mixture(arch.layers(model)[i]).block  # type: ignore[attr-defined]
        block.register_forward_pre_hook(
            lambda _, args, i=i: routed.__setitem__(i, args[0].flatten(0, -2))
        )
    model.eval()(input_ids=tokens.input_ids)
    for i, x_TD in routed.items():
        view = arch.mixture(arch.layers(model)[i])  # type: ignore[attr-defined]
        _, _, chosen_TK = view.router(x_TD)
        inputs, hidden = [], []
        for e in range(view.count):
            x_ND = x_TD[[e in chosen for chosen in chosen_TK.tolist()]]
            for rows, x in ((inputs, x_ND), (hidden, view.hidden(e, x_ND))):
                rows.append((x.double() ** 2).mean(0) if len(x) else torch.ones(x.shape[1]))
        wanted[f"blk.{i}.ffn_gate_exps.weight"] = torch.cat(inputs).float()
        wanted[f"blk.{i}.ffn_up_exps.weight"] = torch.cat(inputs).float()
        wanted[f"blk.{i}.ffn_down_exps.weight"] = torch.cat(hidden).float()
    assert found.keys() == wanted.keys()
    for name, mean in wanted.items():
        torch.testing.assert_close(found[name], mean, rtol=1e-4, atol=1e-7)


def test_an_expert_that_no_token_reached_weighs_its_inputs_alike() -> None:
    tally = Tally()
    for x_NI in (torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([[2.0, 1.0]])):
        tally.add("a.square_EI", x_NI.square().sum(0), 1, 2)
        tally.add("a.calls_E", torch.tensor(len(x_NI)), 1, 2)
    assert means(tally.stats())["a"].tolist() == pytest.approx([1, 1, 14 / 3, 5 / 3])
