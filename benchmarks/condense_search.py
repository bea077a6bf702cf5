"""CD-MoE's two searches as this package runs them, beside the same searches by full forwards.

Alg. 1: expert outputs kept once and added as vectors, against one run of the condensed layer for
each candidate. Alg. 2: every candidate starts at its own layer, against a forward of the whole
converted model for each. Both must choose the same; the time of each is what is compared.

    python benchmarks/condense_search.py [MODEL] [--samples 8] [--length 128] [--layers 3]
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any, cast

import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from moesaic import CondenseConfig, condense
from moesaic.arch.lookup import moe_arch
from moesaic.data.text import calibration_tokens
from moesaic.io.source import resolve
from moesaic.layers.base import LayerPlan
from moesaic.layers.condensed import CondensedLayer
from moesaic.methods.cdmoe.divergence import js
from moesaic.methods.cdmoe.layer_search import ExpertSearch, LayerSearch
from moesaic.metrics.machine import environment
from moesaic.observation.stream import LayerStream, Spill
from moesaic.plan import Plan
from moesaic.surgery import applied


@torch.no_grad()
def experts(model: Any, tokens: Any) -> tuple[dict[str, float], bool]:
    arch = moe_arch(model.config)
    stream = LayerStream(model, arch, tokens, view=arch.mixture)
    search = ExpertSearch(CondenseConfig(count=1, keep="shared+routed"), stream, arch)
    seconds = {"cached": 0.0, "full_forwards": 0.0}
    equal = True
    hidden, kwargs = stream.record()
    for block in stream.blocks(kwargs):
        if arch.is_moe(block.layer):
            start = time.perf_counter()
            plan, analysis = search.decide(block, hidden)
            assert isinstance(plan, CondensedLayer)
            seconds["cached"] += time.perf_counter() - start
            start = time.perf_counter()
            chosen = by_forwards(block, arch, hidden, plan, analysis)
            seconds["full_forwards"] += time.perf_counter() - start
            equal = equal and chosen == plan.experts
        block.run(hidden)
    return seconds, equal


def by_forwards(
    block: Any, arch: Any, hidden: Spill, plan: CondensedLayer, analysis: dict[str, Any]
) -> list[int]:
    view = arch.mixture(block.layer)
    inputs: list[torch.Tensor] = []
    hook = view.block.register_forward_pre_hook(lambda _, a: inputs.append(a[0].flatten(0, 1)))
    reference = list(block.outputs(hidden))
    hook.remove()
    w_TE = torch.cat([view.routing.weights(view.logits(x).float()) for x in inputs])
    g_E = w_TE.double().sum(0) / (w_TE != 0).sum(0)
    chosen: list[int] = []
    for _ in plan.experts:
        losses = {}
        for e in range(view.count):
            if e in chosen or g_E[e].isnan():
                continue
            some = torch.tensor([*chosen, e])
            width = view.shared_width + len(some) * view.width
            trial = CondensedLayer(
                some, g_E[some].float(), width, plan.shared, plan.shared_scale, plan.gated
            )
            with applied(block.layer, arch, trial) as layer:
                outputs = block.outputs(hidden, layer)
                parts = [js(o, out).mean() for o, out in zip(reference, outputs, strict=True)]
            losses[e] = torch.stack(parts).mean().item()
        chosen.append(min(losses, key=lambda e: (losses[e], e)))
    return chosen


@torch.no_grad()
def layers(model: Any, tokens: Any, count: int) -> tuple[dict[str, float], bool]:
    arch = moe_arch(model.config)
    result = condense(
        model, CondenseConfig(count=len(arch.moe_layers(model)), refit=False), calibration=tokens
    )
    assert result.plan is not None
    base = result.plan.base
    plans = {i: cast(CondensedLayer, p) for i, p in result.plan.layers.items() if base.experts[i]}
    start = time.perf_counter()
    search = LayerSearch([LayerStream(model, arch, tokens, view=arch.mixture)], plans)
    order = search.order("greedy", dict.fromkeys(plans, 0.0))
    cached = [layer for layer, _ in itertools.islice(order, count)]
    search.close()
    seconds = {"cached": time.perf_counter() - start}

    def last(model: Any) -> torch.Tensor:
        batches = tokens.batches()
        return torch.cat([model.base_model(b.input_ids, use_cache=False)[0] for b in batches])

    start = time.perf_counter()
    reference = last(model)
    chosen: list[int] = []
    for _ in range(count):
        losses = {}
        for i in plans.keys() - set(chosen):
            some: dict[int, LayerPlan] = {j: plans[j] for j in sorted([*chosen, i])}
            trial = result.build(Plan("cd-moe", base, some))
            losses[i] = js(reference, last(trial)).mean().item()
        chosen.append(min(losses, key=lambda i: (losses[i], i)))
    seconds["full_forwards"] = time.perf_counter() - start
    return seconds, chosen == cached


def wide() -> Any:
    """Random weights in the proportions of Qwen1.5-MoE-A2.7B, a third of its width."""
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=4096,
        hidden_size=640,
        intermediate_size=1792,
        moe_intermediate_size=448,
        shared_expert_intermediate_size=1792,
        num_hidden_layers=6,
        num_attention_heads=10,
        num_key_value_heads=10,
        num_experts=16,
        num_experts_per_tok=4,
    )
    return Qwen2MoeForCausalLM(config).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="tiny-shared-moe")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    source = resolve(args.model)
    tokens = calibration_tokens("", source.tokenizer, args.samples, args.length)
    record: dict[str, Any] = {"tokens": tokens.count, "environment": environment()}
    models = {args.model: source.load("cpu", torch.float32), "wide, random": wide()}
    for name, model in models.items():
        record[name] = {}
        for search, (seconds, equal) in (
            ("experts", experts(model, tokens)),
            ("layers", layers(model, tokens, args.layers)),
        ):
            times = seconds["full_forwards"] / seconds["cached"]
            figures = {"same_choice": equal, "seconds": seconds, "times_faster": times}
            record[name][search] = figures
            print(name, search, figures, flush=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
