"""The trained models that ship: they load by name, quickly, and score what their cards say."""

import json
import math
from importlib.resources import files

import pytest
import torch
from transformers import AutoModelForCausalLM

import moesaic
from moesaic.data.sources import DOMAINS
from moesaic.io.names import SHIPPED
from moesaic.io.source import resolve
from moesaic.metrics.forward import jsd

BY_DAY = [n if n == "tiny-moe" else pytest.param(n, marks=pytest.mark.nightly) for n in SHIPPED]


def card(name):
    return json.loads(files("moesaic").joinpath(f"assets/models/{name}/training.json").read_text())


@pytest.mark.parametrize("name", SHIPPED)
def test_what_ships_is_small_and_has_a_card(name):
    folder = resolve(name).folder
    assert (folder / "model.safetensors").stat().st_size <= 12e6
    assert (folder / "README.md").is_file()
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    assert set(card(name)["held_out_loss"]) == {*DOMAINS, "all"}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SHIPPED)
def test_the_cards_losses_are_what_eval_measures(name):
    score = moesaic.evaluate(name, data="code", length=256, max_tokens=0, dtype=torch.float32)
    assert math.log(score.perplexity) == pytest.approx(
        card(name)["held_out_loss"]["code"], abs=1e-3
    )


@pytest.mark.parametrize("mixture", BY_DAY[1:])
def test_experts_specialise(mixture):
    """Routing differs between domains, more in some layer than chance would have it."""
    shares = {}
    for domain in ("prose", "code"):
        score = moesaic.evaluate(mixture, data=domain, length=256, max_tokens=4096)
        shares[domain] = {i: r.share for i, r in score.routing.items()}
    divergences = [jsd(shares["prose"][i], shares["code"][i]) for i in shares["prose"]]
    assert max(divergences) > 0.2
