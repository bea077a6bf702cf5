"""Commands that make one model from another: names, help texts and examples."""

from __future__ import annotations

from moesaic.config import Verb

BUILT_IN = (
    Verb(
        "carve",
        "Let each token use a part of a dense model: petals or experts.",
        "moesaic carve smollm2 out --active 0.8",
        compares="this variant at the same active ratio (more, tomoe, dsmoe)",
    ),
    Verb(
        "prune",
        "Take experts out of a mixture of experts; the result loads wherever the original does.",
        "moesaic prune tiny-moe out --keep 6",
        observes=True,
        compares="this criterion at the same size",
    ),
    Verb(
        "slim",
        "Make experts narrower, neuron by neuron; the result loads wherever the original does.",
        "moesaic slim tiny-shared-moe out --keep 0.5",
        observes=True,
        compares="this score at the same size",
    ),
    Verb(
        "condense",
        "Turn some layers of a mixture of experts into small dense layers.",
        "moesaic condense tiny-shared-moe out --count 2",
        compares="with this many of the layers condensed",
    ),
    Verb(
        "skip",
        "Let tokens leave out experts of little weight; beta is calibrated on MODEL as it is.",
        "moesaic skip tiny-moe out --quantile 0.5",
        observes=True,
    ),
    Verb(
        "tune",
        "Train a converted model a little. Runs under accelerate launch.",
        "moesaic tune out tuned --train text.jsonl --what condensed",
        calibrates=False,
    ),
)
