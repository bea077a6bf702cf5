"""The search where sets are too many to try: 128 -> 64 experts of top-8, greedy and swaps.

One layer of random weights, its experts made of a few prototypes and noise, so that some can stand
in for others and swaps pay; one thread. ``search``: as ``prune`` does it, over all tokens.
``every_set``: the same search with every set scored for itself, as it was done before, over a few
of the tokens; both searches run there, for their times and for the experts that they keep.

    python benchmarks/prune_many.py --out benchmarks/prune_many.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from moesaic import Tokens
from moesaic.arch.lookup import moe_arch
from moesaic.methods.prune.reconstruction import Reconstruction
from moesaic.methods.prune.subsets import Losses, SearchResult, greedy, refined
from moesaic.metrics.machine import environment
from moesaic.observation.stats import Stats, tallied
from moesaic.observation.stream import LayerStream

TYPES = ("qwen3_moe", "qwen2_moe")
"""A router whose weights are made to sum to one, and one whose weights are the softmax's own."""


def model_of(model_type: str, experts: int, prototypes: int) -> Any:
    """One layer of which some experts are alike."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](
        vocab_size=4096,
        hidden_size=128,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=experts,
        num_experts_per_tok=8,
        norm_topk_prob=model_type == "qwen3_moe",
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    layer = model.model.layers[0].mlp
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        for weight in (layer.experts.gate_up_proj, layer.experts.down_proj):
            first = torch.randn(prototypes, *weight.shape[1:])
            weight.copy_(first[torch.arange(experts) % prototypes])
            weight.add_(torch.randn_like(weight), alpha=0.4).mul_(0.1)
        layer.gate.weight.normal_().mul_(0.15)
    return model


def searched(losses: Losses, experts: int, keep: int) -> tuple[SearchResult, SearchResult, float]:
    """The greedy set, the one after swaps, and CPU seconds."""
    start = time.process_time()
    first = greedy(losses, torch.ones(experts, dtype=torch.bool), keep)
    return first, refined(losses, first), time.process_time() - start


def fewer(stats: Stats, tokens: int) -> Stats:
    """The statistics of the first tokens."""
    return {name: tensor[:tokens] for name, tensor in stats.items()}


def measured(model_type: str, args: argparse.Namespace) -> dict[str, Any]:
    """Both searches of one kind of router."""
    model = model_of(model_type, args.experts, args.prototypes)
    arch = moe_arch(model.config)
    tokens = Tokens(torch.randint(4096, (args.tokens // 250, 250)))
    stream = iter(LayerStream(model, arch, tokens, view=arch.mixture))
    site = next(stream)  # whose tokens are there as long as the stream is
    start = time.process_time()
    stats = tallied(site, ("batch_T", "logits_TX", "sampled_T", "gram_SP")).stats()
    observed = time.process_time() - start
    routing = site.view.routing
    start = time.process_time()
    losses = Reconstruction(stats, routing)
    first, best, _ = searched(losses, args.experts, args.keep)
    whole = time.process_time() - start
    few = Reconstruction(fewer(stats, args.few), routing)
    _, ours, ours_seconds = searched(few, args.experts, args.keep)
    _, theirs, theirs_seconds = searched(lambda kept_CE: few(kept_CE), args.experts, args.keep)
    return {
        "model_type": model_type,
        "cpu_seconds_observing": observed,
        "search": {
            "tokens": len(stats["batch_T"]),
            "sets": best.evaluated,
            "cpu_seconds": whole,
            "loss_after_greedy": first.loss,
            "loss": best.loss,
        },
        "every_set": {
            "tokens": args.few,
            "sets": theirs.evaluated,
            "cpu_seconds": theirs_seconds,
            "cpu_seconds_of_the_search": ours_seconds,
            "same_experts": bool(torch.equal(ours.kept_E, theirs.kept_E)),
            "relative_difference_of_losses": abs(ours.loss / theirs.loss - 1),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--prototypes", type=int, default=40)
    parser.add_argument("--keep", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--few", type=int, default=250)
    args = parser.parse_args()
    torch.set_num_threads(1)
    record = {
        "benchmark": "prune_many",
        "arguments": {k: v for k, v in vars(args).items() if k != "out"},
        "environment": environment(),
        "routers": [measured(model_type, args) for model_type in TYPES],
    }
    text = json.dumps(record, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
