"""CD-MoE's search over layers, racing beside the paper's: same choices, and what they take.

Generated mixtures whose layers matter unequally, and tiny-shared-moe. A full-inference equivalent
is every token through every layer once.

    python benchmarks/condense_racing.py [--depths 16 24 32 48] [--seeds 2]
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any, cast

import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from moesaic import CondenseConfig, condense
from moesaic.arch.lookup import moe_arch
from moesaic.data.text import Tokens, calibration_tokens
from moesaic.io.source import resolve
from moesaic.methods.condense.layer_search import LayerSearch, legs
from moesaic.metrics.machine import environment
from moesaic.observation.stream import Block, LayerStream
from moesaic.plans.condensed import CondensedLayer


class Counted:
    """Tokens that pass decoder layers."""

    def __init__(self) -> None:
        self.tokens, output = 0, Block._output

        def counted(block: Block, layer: Any, states: Any, key: Any) -> Any:
            self.tokens += states.shape[0] * states.shape[1]
            return output(block, layer, states, key)

        setattr(Block, "_output", counted)  # noqa: B010 - types forbid what is meant here


def generated(depth: int, seed: int) -> Any:
    """A small random mixture, of whose layers some write more than others."""
    torch.manual_seed(seed)
    config = Qwen2MoeConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_hidden_layers=depth,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.1,
    )
    model = Qwen2MoeForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.down_proj.mul_(4 * torch.rand(1).item())
    return model


def compared(
    model: Any, tokens: Tokens, count: int, passed: Counted, keep: Any = "shared"
) -> dict[str, Any]:
    """Both searches on one model: of each the order, the last loss, and what it took."""
    arch = moe_arch(model.config)
    every = len(arch.moe_layers(model))
    options = CondenseConfig(count=every, keep=keep, refit=False, layer_search="cosine")
    plan = condense(model, options, calibration=tokens).plan
    assert plan is not None
    plans = {i: cast(CondensedLayer, p) for i, p in plan.layers.items() if plan.base.experts[i]}
    whole = LayerSearch([LayerStream(model, arch, tokens, view=arch.mixture)], plans)
    record: dict[str, Any] = {"layers": every, "condensed": count}
    for kind, parts in (("greedy", [tokens]), ("racing", legs(tokens))):
        streams = [LayerStream(model, arch, part, view=arch.mixture) for part in parts]
        search = LayerSearch(streams, plans)
        before = passed.tokens
        steps = list(itertools.islice(search.order(kind, {}), count))
        search.close()
        passes = (passed.tokens - before) / (every * tokens.count * count)
        record[kind] = {
            "order": [i for i, _ in steps],
            "divergence": whole.losses([i for i, _ in steps[:-1]], [steps[-1][0]])[steps[-1][0]],
            "inferences_a_layer": passes,
        }
    orders = [record[kind]["order"] for kind in ("greedy", "racing")]
    record["same_steps"] = sum(a == b for a, b in zip(*orders, strict=True))
    record["same_layers"] = len({*orders[0]} & {*orders[1]})
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[16, 24, 32, 48])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    passed = Counted()
    record: dict[str, Any] = {"environment": environment(), "models": {}}
    ids = torch.randint(1, 256, (100, 32), generator=torch.Generator().manual_seed(0))
    for depth, seed in itertools.product(args.depths, range(args.seeds)):
        figures = compared(generated(depth, seed), Tokens(ids), depth // 2, passed)
        record["models"][f"generated, {depth} layers, seed {seed}"] = figures
    for name, keep in (("tiny-shared-moe", "shared"), ("tiny-moe", "shared+routed")):
        source = resolve(name)
        tokens = calibration_tokens("", source.tokenizer, 100, 128)
        model = source.load("cpu", torch.float32)
        record["models"][name] = compared(model, tokens, 4, passed, keep)
    record["command"] = "python benchmarks/condense_racing.py"
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
