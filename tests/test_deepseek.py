"""DeepSeekMoE, whose own code today's transformers cannot import: the same function by parts."""

import json

import pytest
import torch
import torch.nn.functional as F
from builders import edited, loaded, logits, tiny_moe, tiny_tokenizer, weights
from torch import Tensor, nn

import moesaic
from moesaic import CondenseConfig, MoesaicError, PruneConfig
from moesaic.io.source import resolve

Weights = dict[str, Tensor]


class MLP(nn.Module):
    """As the checkpoint's own code names its parts."""

    def __init__(self, weights, at):
        super().__init__()
        for name in ("gate_proj", "up_proj", "down_proj"):
            weight = weights[f"{at}.{name}.weight"]
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight = nn.Parameter(weight, requires_grad=False)
            setattr(self, name, linear)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """A list of experts, a gate that gives numbers and weights, and shared experts beside."""

    def __init__(self, weights, at, config):
        super().__init__()
        every = range(config.n_routed_experts)
        self.experts = nn.ModuleList([MLP(weights, f"{at}.experts.{e}") for e in every])
        self.gate, self.config = weights[f"{at}.gate.weight"], config
        self.shared_experts = MLP(weights, f"{at}.shared_experts")

    def forward(self, x_TD):
        scores = F.linear(x_TD, self.gate).softmax(-1)
        value, index = torch.topk(scores, self.config.num_experts_per_tok, dim=-1, sorted=False)
        if self.config.norm_topk_prob:
            value = value / (value.sum(-1, keepdim=True) + 1e-20)
        rows = []
        for x_D, ws, chosen in zip(x_TD, value, index, strict=True):
            parts = [w * self.experts[e](x_D) for w, e in zip(ws, chosen.tolist(), strict=True)]
            rows.append(torch.stack(parts).sum(0) + self.shared_experts(x_D))
        return torch.stack(rows)


def norm(x, weight, eps):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def attention(x_LD, weights, at, config):
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    size = config.hidden_size // heads
    q, k, v = (F.linear(x_LD, weights[f"{at}.{n}_proj.weight"]) for n in "qkv")
    q, k, v = (t.view(len(x_LD), -1, size).transpose(0, 1) for t in (q, k, v))
    steps = 1.0 / 10000 ** (torch.arange(0, size, 2).float() / size)
    angle = torch.outer(torch.arange(len(x_LD)).float(), steps).repeat(1, 2)

    def turned(t):
        first, second = t.chunk(2, -1)
        return t * angle.cos() + torch.cat([-second, first], -1) * angle.sin()

    k, v = (t.repeat_interleave(heads // kv, 0) for t in (turned(k), v))
    out = F.scaled_dot_product_attention(turned(q), k, v, is_causal=True)
    return F.linear(out.transpose(0, 1).flatten(1), weights[f"{at}.o_proj.weight"])


@torch.no_grad()
def by_hand(weights, config, ids):
    """The logits of one row of tokens, from the tensors as a checkpoint has them."""
    x = weights["model.embed_tokens.weight"][ids]
    for i in range(config.num_hidden_layers):
        at, eps = f"model.layers.{i}", config.rms_norm_eps
        before = norm(x, weights[f"{at}.input_layernorm.weight"], eps)
        x = x + attention(before, weights, f"{at}.self_attn", config)
        routes = i >= config.first_k_dense_replace and i % config.moe_layer_freq == 0
        ffn = MoE(weights, f"{at}.mlp", config) if routes else MLP(weights, f"{at}.mlp")
        x = x + ffn(norm(x, weights[f"{at}.post_attention_layernorm.weight"], eps))
    x = norm(x, weights["model.norm.weight"], config.rms_norm_eps)
    return F.linear(x, weights["lm_head.weight"])


@pytest.mark.parametrize("changes", [{}, {"norm_topk_prob": True, "moe_layer_freq": 2}])
def test_it_is_the_function_of_its_own_code(changes, tokens, tmp_path):
    model = tiny_moe("deepseek", top_k=3, num_hidden_layers=4, **changes)
    model.save_pretrained(tmp_path)
    stored = weights(tmp_path)
    assert "model.layers.2.mlp.experts.7.down_proj.weight" in stored
    assert ("model.layers.3.mlp.up_proj.weight" in stored) is bool(changes)
    wanted = torch.stack([by_hand(stored, model.config, row) for row in tokens.input_ids[:2]])
    torch.testing.assert_close(logits(model, tokens)[:2], wanted, rtol=1e-4, atol=1e-4)


def test_no_code_of_the_checkpoint_is_run(tokens, tmp_path):
    """A published folder names modelling code; here it would fail at once."""
    folder = tmp_path / "published"
    model = tiny_moe("deepseek")
    model.save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    said["auto_map"] = {
        "AutoConfig": "configuration_deepseek.DeepseekConfig",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM",
    }
    said["rope_theta"] = said.pop("rope_parameters")["rope_theta"]
    (folder / "config.json").write_text(json.dumps(said))
    for name in ("configuration_deepseek.py", "modeling_deepseek.py"):
        (folder / name).write_text("raise AssertionError('run')\n")
    source = resolve(str(folder))
    assert torch.equal(logits(source.load(), tokens), logits(model, tokens))
    run = {"calibration": tokens, "tokenizer": tiny_tokenizer()}
    out = moesaic.prune(folder, PruneConfig(keep=5), **run).save(tmp_path / "p")
    pruned = loaded(out)
    assert (type(pruned).__name__, pruned.config.n_routed_experts) == ("DeepseekForCausalLM", 5)
    first = CondenseConfig(count=1, candidates=(1,))
    condensed = moesaic.condense(folder, first, **run)
    model = loaded(condensed.save(tmp_path / "c"))
    assert model.config.first_k_dense_replace == 2, "its own class holds that"


def test_other_scores_are_refused(tmp_path):
    tiny_moe("deepseek").save_pretrained(tmp_path)
    edited(tmp_path / "config.json", scoring_func="sigmoid")
    with pytest.raises(MoesaicError, match="scoring_func"):
        _ = resolve(str(tmp_path)).config
