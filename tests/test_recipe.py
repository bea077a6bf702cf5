"""Recipes are strict, and every one that ships parses."""

from dataclasses import replace
from pathlib import Path

import pytest

from moesaic import MoesaicError, MoREConfig, ToMoEConfig
from moesaic.methods import METHODS
from moesaic.recipe import load_recipe, parse_recipe, step_config

SHIPPED = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))
TEXT = "model: smollm2\nout: out\nsteps:\n- carve: {active: 0.7, layers: [1, 2]}\n"


@pytest.mark.parametrize("file", SHIPPED, ids=lambda f: f.stem)
def test_every_recipe_that_ships_parses_and_round_trips(file):
    recipe = load_recipe(file)
    assert load_recipe(str(file)) == recipe
    assert parse_recipe(recipe.to_yaml()) == recipe


def test_names_are_written_as_they_are():
    assert "model: modèle\n" in parse_recipe(TEXT.replace("smollm2", "modèle")).to_yaml()


def test_every_method_ships_a_recipe():
    used = {
        f"{config.verb}.{config.name}" for file in SHIPPED for config in load_recipe(file).steps
    }
    assert used == {key for key in METHODS if key != "skip.top-k"}  # of no paper


def test_values_arrive():
    """Sizes may have units, numbers may be listed with commas, and an empty section is none."""
    recipe = parse_recipe(TEXT)
    assert (recipe.steps[0].active, recipe.steps[0].layers) == (0.7, (1, 2))
    assert parse_recipe(TEXT + "calibration:\n") == recipe
    assert step_config("condense", {"memory": "1.5GB"}).memory == 1_500_000_000
    assert step_config("condense", {"candidates": "1,2"}).candidates == (1, 2)
    assert step_config("skip", {"betas": "0.5"}).betas == (0.5,)


def test_a_named_recipe_gives_way_to_what_is_said():
    best = step_config("carve", {"method": "more", "recipe": "best", "active": 0.7})
    assert (best.experts, best.top_k, best.active) == (256, 0, 0.7)
    fast = {"method": "more", "recipe": "fast"}
    assert step_config("carve", fast).experts == 6
    assert step_config("carve", {**fast, "experts": 16}).experts == 16


def test_without_a_method_it_is_what_measures_best():
    """And with one it is that method; options that it lacks are of the first that has them."""
    fine = MoREConfig(experts=256, top_k=0, layers="all", router="ridge", refit=True)
    for options in ({}, {"active": 0.8}, {"recipe": "best"}):
        assert step_config("carve", options) == fine
    assert step_config("carve", {"experts": 64}) == replace(fine, experts=64)
    for name in ("more", "tomoe", "dsmoe"):
        assert step_config("carve", {"method": name}) == METHODS[f"carve.{name}"]()
    assert step_config("carve", {"materialize": True}) == METHODS["carve.tomoe"](materialize=True)
    for verb in ("prune", "slim", "condense"):
        assert step_config(verb, {"recipe": "best"}) == step_config(verb, {})
    assert step_config("skip", {"top_k": 2}).name == "top-k"


def test_a_named_recipe_says_the_method_that_has_it():
    """Where no method was given: the only one that has it; not one that lacks it."""
    for name in ("best", "fast"):
        assert step_config("carve", {"recipe": name}).name == "more"
    assert step_config("skip", {"recipe": "paper", "quantile": 0.4}).name == "naee"
    with pytest.raises(MoesaicError, match="'paper' is for more, tomoe, dsmoe: give method=more"):
        step_config("carve", {"recipe": "paper"})
    with pytest.raises(MoesaicError, match="for more, not for tomoe"):
        step_config("carve", {"method": "tomoe", "recipe": "fast"})
    with pytest.raises(MoesaicError, match="^tau is not an option of carve, method more"):
        step_config("carve", {"recipe": "best", "tau": 0.4})
    with pytest.raises(MoesaicError, match="known: best, fast, paper"):
        step_config("carve", {"recipe": "worst"})


def test_a_recipe_that_several_methods_have_asks_for_one(monkeypatch):
    """Unless an option that one of them alone has decides."""
    monkeypatch.setattr(ToMoEConfig, "bundles", {"best": {"recompute": True}})
    with pytest.raises(MoesaicError, match="'best' is for more, tomoe: give method=more"):
        step_config("carve", {"recipe": "best"})
    assert step_config("carve", {"recipe": "best", "alpha": 1.0}).name == "more"


def test_overrides():
    recipe = parse_recipe(TEXT, ["steps.0.carve.active=0.9", "out=there", "calibration.samples=5"])
    assert (recipe.steps[0].active, recipe.out, recipe.calibration.samples) == (0.9, "there", 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "not valid YAML"),
        (TEXT.replace("active: 0.7", "active: 0.7, active: 0.8"), "active stands twice.*line 4"),
        (TEXT + "model: tiny-moe\n", "model stands twice.*line 5"),
        ("- 1", "must be a mapping"),
        ("model: a\nout: b", "steps must be a list"),
        (TEXT.replace("model:", "# model:"), r"^model is missing\.$"),
        (TEXT + "color: red", r"color is not an option; known: model, out"),
        (
            TEXT + "calibration: {sample: 3}",
            r"calibration\.sample is not an option|calibration\.sample",
        ),
        (
            TEXT + "calibration: {samples: many}",
            r"calibration\.samples 'many' is not a whole number",
        ),
        (TEXT.replace("carve", "curve"), r"steps\.0\.curve: unknown step 'curve'; known: carve"),
        (
            TEXT.replace("active", "activ"),
            r"steps\.0\.carve\.activ is not an option of carve, method more; known: active",
        ),
        (TEXT.replace("0.7", "yes"), r"steps\.0\.carve\.active 'True' is not a number"),
        (TEXT.replace("0.7", "much"), r"steps\.0\.carve\.active 'much' is not a number"),
        (TEXT.replace("{active: 0.7, layers: [1, 2]}", "3"), "expected options"),
        (TEXT.replace("active: 0.7", "method: moe"), "unknown method 'moe'; known: more"),
        (TEXT.replace("active: 0.7", "recipe: [best]"), "unknown recipe"),
        (TEXT.replace("active: 0.7", "variant: best"), r"variant 'best' is none of full, backbone"),
    ],
)
def test_mistakes_are_named_with_their_place(text, message):
    with pytest.raises(MoesaicError, match=message):
        parse_recipe(text)


@pytest.mark.parametrize(
    "override", ["nonsense", "steps.7.carve.active=1", "steps.x=1", "model.a=1"]
)
def test_bad_overrides(override):
    with pytest.raises(MoesaicError, match="key=value|does not name a place"):
        parse_recipe(TEXT, [override])


def test_a_value_that_cannot_be_read_is_not_blamed_on_its_place():
    with pytest.raises(MoesaicError, match=r"'\[' is no value for steps.0.carve.active"):
        parse_recipe(TEXT, ["steps.0.carve.active=["])
