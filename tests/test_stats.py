"""Statistics: merging by one rule for batches and processes, and files that hold them by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import statistics, tiny_moe
from safetensors.torch import load_file, safe_open, save_file

from moesaic import observe
from moesaic.api import prune
from moesaic.arch.lookup import moe_arch
from moesaic.data.text import Tokens, process_share
from moesaic.errors import MoesaicError
from moesaic.methods.prune.config import PruneConfig
from moesaic.observation import stats as module
from moesaic.observation.files import FILED, StatsFile
from moesaic.observation.stats import Tally, observed, tallied
from moesaic.observation.stream import LayerStream


def test_shares_of_the_batches_merge_to_the_whole(
    tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes with every second batch each, a method's own sum among them."""
    model = tiny_moe("qwen2_moe")
    arch = moe_arch(model.config)

    def tally(share: Tokens, numbers: list[int] | None = None) -> Tally:
        layers = arch.moe_layers(model)[:1]
        stream = LayerStream(model, arch, share, layers, view=arch.mixture, tokens_per_batch=24)
        for site in stream:
            found = tallied(site, FILED, numbers, 0.5)
            for x_TD in site.inputs():
                found.add("own_D", x_TD.abs().sum(0))
        return found

    whole = tally(tokens).stats()
    parts = [tally(*process_share(tokens, number, 2, 24)) for number in range(2)]
    monkeypatch.setattr(module, "gathered", lambda _: parts)
    merged = parts[0].stats(every=True)
    assert merged.keys() == whole.keys() == {*FILED, "own_D"}
    for name, tensor in whole.items():
        if name in ("batch_T", "sampled_T", "calls_E", "bias_E", "reach_EM"):
            assert torch.equal(merged[name], tensor), name
        torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-6)
    assert whole["batch_T"].tolist() == sorted(whole["batch_T"].tolist())
    assert 0 < int(whole["sampled_T"].sum()) < len(whole["sampled_T"])


def test_a_name_that_nothing_computes_is_an_error(tokens: Tokens) -> None:
    model = tiny_moe("mixtral")
    arch = moe_arch(model.config)
    for site in LayerStream(model, arch, tokens, [1], view=arch.mixture):
        with pytest.raises(ValueError, match="nothing computes loud_M of layer 1"):
            observed(site, {"calls_E", "loud_M"}, tokens)


CHANGES: dict[str, Any] = {
    "it has no 'gram_SP'": lambda held: held.pop("layers.1.gram_SP"),
    "logits_TX is of shape": lambda held: held.update(
        {"layers.1.batch_T": held["layers.1.batch_T"][1:].clone()}
    ),
    "gram_SP is of shape": lambda held: held.update(
        {"layers.1.gram_SP": held["layers.1.gram_SP"][:, 1:].clone()}
    ),
}


@pytest.mark.parametrize("message", CHANGES)
def test_damaged_statistics_are_refused(message: str, tokens: Tokens, tmp_path: Path) -> None:
    model, file = tiny_moe("mixtral"), tmp_path / "model.stats"
    observe(model, file, calibration=tokens)
    with safe_open(file, "pt") as opened:
        notes = opened.metadata()
    held = load_file(file)
    CHANGES[message](held)
    save_file(held, file, metadata=notes)
    with pytest.raises(MoesaicError, match=f"layer 1 cannot be read: .*{message}"):
        prune(model, PruneConfig(keep=6), stats=file)


def test_a_file_gives_what_is_asked_for_as_it_was_observed(tokens: Tokens, tmp_path: Path) -> None:
    model, file = tiny_moe("mixtral"), tmp_path / "model.stats"
    observe(model, file, calibration=tokens)
    arch = moe_arch(model.config)
    for site in LayerStream(model, arch, tokens, arch.moe_layers(model), view=arch.mixture):
        wanted = statistics(site)
        assert {*load_file(file)} >= {f"layers.{site.index}.{name}" for name in wanted}
        found = StatsFile(file).layer(site.index, ["logits_TX", "pair_EE"])
        assert found.keys() == {"logits_TX", "pair_EE"}
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
