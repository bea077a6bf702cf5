"""The search for experts to keep, against running the layer again for every subset.

The same work in the same run, float32, the same tokens: r of n experts by Eq. 3 of NAEE in every
layer. Ours counts everything: each expert's output once per token, Gram matrices, all subsets.
The other runs the layer's own block, restricted to a subset, over cached inputs, and compares it
with the cached output.

    python benchmarks/prune_search.py --out benchmarks/prune_search.json
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import combinations
from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from moesaic import PruneConfig, Tokens
from moesaic.arch.lookup import moe_arch
from moesaic.arch.mixture import MoEFFN
from moesaic.methods.naee.criteria import Case
from moesaic.methods.naee.pruning import Pruner
from moesaic.metrics.machine import environment
from moesaic.observation.experts import observe_experts
from moesaic.observation.stream import LayerStream, Site


@torch.no_grad()
def every_subset(site: Site[MoEFFN], keep: int) -> tuple[list[int], float]:
    """The straightforward version, batch by batch as the tokens come."""
    view = site.view
    batches = [(x_TD, view.output(x_TD)) for x_TD in site.inputs()]
    losses: dict[tuple[int, ...], float] = {}
    for chosen in combinations(range(view.count), keep):
        allowed_E = torch.zeros(view.count, dtype=torch.bool)
        allowed_E[list(chosen)] = True
        squared = 0.0
        with view.restricted(allowed_E):
            for x_TD, y_TD in batches:
                squared += (view.output(x_TD) - y_TD).double().square().sum().item()
        losses[chosen] = squared**0.5
    best = min(losses, key=lambda chosen: losses[chosen])
    return list(best), losses[best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--keep", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=1024,
        hidden_size=args.hidden,
        intermediate_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_local_experts=args.experts,
    )
    model = MixtralForCausalLM(config).eval()
    arch, tokens = moe_arch(config), Tokens(torch.randint(1024, (args.tokens // 256, 256)))
    method = Pruner(PruneConfig(keep=args.keep, refit=False))
    layers = []
    for site in LayerStream(model, arch, tokens, view=arch.mixture):
        start = time.perf_counter()
        stats = observe_experts(site)
        observed = time.perf_counter()
        case = Case(stats, site.view.routing, site.index, method.config)
        ((ours, analysis),) = method.choose(case, [args.keep]).values()
        done = time.perf_counter()
        theirs, loss = every_subset(site, args.keep)
        ended = time.perf_counter()
        layers.append(
            {
                "layer": site.index,
                "kept": ours.kept,
                "same_subset": ours.kept == theirs,
                "loss": analysis["loss"],
                "loss_of_every_subset": loss,
                "seconds": done - start,
                "seconds_observing": observed - start,
                "seconds_searching": done - observed,
                "seconds_of_every_subset": ended - done,
                "times_faster": (ended - done) / (done - start),
            }
        )
    record = {
        "benchmark": "prune_search",
        "arguments": {k: v for k, v in vars(args).items() if k != "out"},
        "environment": environment(),
        "layers": layers,
        "times_faster": sum(x["seconds_of_every_subset"] for x in layers)
        / sum(x["seconds"] for x in layers),
        "same_subset_everywhere": all(x["same_subset"] for x in layers),
    }
    text = json.dumps(record, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
