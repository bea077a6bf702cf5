"""Train one of the tiny models from nothing, on the text of gather_text.py.

    python scripts/train_tiny.py tiny-moe [--corpus build/corpus] [--assets src/moesaic/assets]

Three do not ship, mixtures that no method was tuned on: ``fine-moe`` (a Qwen2-MoE with 24
experts), ``coarse-moe`` (a Mixtral with 8 wide ones) and ``flat-moe`` (a Qwen3-MoE of four layers,
whose rows are multiples of 256, as GGUF types of few bits want).
They learn in float32 from the calibration text that ships, ten minutes of one core each, and are
written to ``build``; no corpus is needed:

    python scripts/train_tiny.py fine-moe --eager

One core is enough; the script says at its start how long it expects to take. It leaves a checkpoint
every few minutes and continues from the last one when started again.
"""

import argparse
import json
import math
import platform
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tiny_report import WINDOW, held_out_losses, machine, read_jsonl, write_report
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

DOMAINS = ("prose", "reference", "code")
END = "<|endoftext|>"
VOCABULARY = 4096
SEED = 20
STEPS = {"tiny-dense": 2400, "tiny-moe": 2400, "tiny-shared-moe": 2400}
OF_SHIPPED_TEXT = {"fine-moe": 180, "coarse-moe": 300, "flat-moe": 200}
STEPS |= OF_SHIPPED_TEXT
MATRIX_RATE, OTHER_RATE = 0.02, 0.003
PER_DOMAIN = 4  # windows of each domain in a batch; of shipped text half as many
OUTER = ("gate.weight", "embed_tokens.weight", "lm_head.weight")  # matrices of AdamW
WARMUP, COOLDOWN = 72, 0.6  # steps linear up; share of them in a cosine down to a tenth
REPORT, KEEP = 50, 400  # steps between two lines, and between two checkpoints
BALANCE = 0.01  # weight of the load-balancing loss, weak enough to let experts specialise

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "initializer_range": 0.03,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
NAMES = tuple(STEPS)
WIDTHS = {"tiny-moe": 96, "coarse-moe": 320}  # of an expert
UNLIKE: dict[str, dict[str, int]] = {  # sizes in place of those of COMMON and build
    "tiny-shared-moe": {"hidden_size": 192, "num_attention_heads": 6},
    "fine-moe": {"hidden_size": 160, "num_experts": 24, "moe_intermediate_size": 80}
    | {"shared_expert_intermediate_size": 160},
    "coarse-moe": {"hidden_size": 160, "num_hidden_layers": 4, "head_dim": 40},
    "flat-moe": {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 64}
    | {"moe_intermediate_size": 256, "tie_word_embeddings": False},
}


def build(name: str) -> PreTrainedModel:
    """The untrained model, of one of transformers' own classes."""
    if name == "tiny-dense":
        return LlamaForCausalLM(LlamaConfig(**COMMON, intermediate_size=768))
    options = COMMON | {"num_experts_per_tok": 4, "router_aux_loss_coef": BALANCE}
    if name in WIDTHS:
        options |= {"num_experts_per_tok": 2, "num_local_experts": 8, "head_dim": 64}
        options |= {"intermediate_size": WIDTHS[name]} | UNLIKE.get(name, {})
        return MixtralForCausalLM(MixtralConfig(**options))
    options |= {"num_experts": 32, "moe_intermediate_size": 32, "intermediate_size": 128}
    options |= {"decoder_sparse_step": 1, "norm_topk_prob": True} | UNLIKE.get(name, {})
    if name == "flat-moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**options))
    options = {"shared_expert_intermediate_size": 128} | options
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**options))


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal by Newton-Schulz iterations, each expert of a stack by itself.

    At this scale it needs about half the tokens that AdamW does for the same loss.
    """

    def __init__(self, matrices: list[nn.Parameter], dtype: torch.dtype) -> None:
        super().__init__(matrices, {"lr": 0.0, "weight_decay": 0.1, "dtype": dtype})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.05)
                x = p.grad.lerp(momentum, 0.95).to(group["dtype"])
                tall = x.shape[-2] > x.shape[-1]
                x = x.mT if tall else x
                x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
                for _ in range(5):
                    y = x @ x.mT
                    x = 3.4445 * x + (-4.7750 * y + 2.0315 * y @ y) @ x
                x = x.mT if tall else x
                scale = max(1, x.shape[-2] / x.shape[-1]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(x.float(), alpha=-group["lr"] * scale)


def get_optimizers(
    model: PreTrainedModel, dtype: torch.dtype = torch.bfloat16
) -> dict[float, torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for embeddings, routers and norms, each by its peak rate."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        inner = parameter.ndim > 1 and not name.endswith(OUTER)
        (matrices if inner else others).append(parameter)
    adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return {MATRIX_RATE: Muon(matrices, dtype), OTHER_RATE: adam}


def all_experts_at_once(
    experts: nn.Module, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Every expert on every token as one wide MLP, unchosen ones weighted zero.

    The same result as running the chosen experts alone; with experts this narrow it is faster.
    """
    count = experts.num_experts
    share = x.new_zeros(len(x), count, dtype=weights.dtype).scatter(1, index, weights)
    gate_up = F.linear(x, experts.gate_up_proj.flatten(0, 1)).view(len(x), count, 2, -1)
    hidden = experts.act_fn(gate_up[:, :, 0]) * gate_up[:, :, 1]
    hidden = hidden * share.unsqueeze(-1).to(hidden.dtype)
    return F.linear(hidden.flatten(1), experts.down_proj.transpose(0, 1).flatten(1)).to(x.dtype)


def shipped_text(corpus: Path, assets: Path) -> None:
    """Make the calibration text that ships a corpus, with the tokenizer that all models share."""
    corpus.mkdir(parents=True, exist_ok=True)
    shutil.copy(assets / "calibration.jsonl", corpus / "train.jsonl")
    shutil.copy(assets / "models" / "tiny-moe" / "tokenizer.json", corpus)


def texts_of(corpus: Path, domain: str) -> list[str]:
    """The training documents of a domain, shuffled."""
    texts = [row["text"] for row in read_jsonl(corpus / "train.jsonl") if row["domain"] == domain]
    random.Random(SEED).shuffle(texts)
    return texts


def get_tokenizer(corpus: Path) -> PreTrainedTokenizerFast:
    """The byte-level BPE shared by the models, trained on the training split once."""
    path = corpus / "tokenizer.json"
    if not path.exists():
        texts = []
        for domain in DOMAINS:
            chosen = texts_of(corpus, domain)
            sizes = np.cumsum([len(text) for text in chosen])
            texts += chosen[: int(np.searchsorted(sizes, 8_000_000)) + 1]
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet
        )
        bpe.train_from_iterator(texts, trainer)
        bpe.save(str(path))
    return PreTrainedTokenizerFast(
        tokenizer_file=str(path),
        bos_token=END,
        eos_token=END,
        model_max_length=COMMON["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )


def get_tokens(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> list[np.ndarray]:
    """Each domain's training documents as one stream of tokens, an end token after each."""
    streams = []
    for domain in DOMAINS:
        path = corpus / f"train-{domain}.npy"
        if not path.exists():
            texts = texts_of(corpus, domain)
            rows = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            np.save(path, np.concatenate([np.array([*row, 0], dtype=np.uint16) for row in rows]))
        streams.append(np.load(path))
    return streams


def batches(
    streams: list[np.ndarray], step: int, steps: int, per_domain: int
) -> Iterator[torch.Tensor]:
    """Windows of one domain each, as many of every domain; a function of the seed and the step."""
    for current in range(step, steps):
        draw = np.random.default_rng((SEED, current))
        windows = []
        for stream in streams:
            starts = draw.integers(0, len(stream) - WINDOW - 1, per_domain)
            windows += [stream[start : start + WINDOW + 1] for start in starts]
        yield torch.from_numpy(np.stack(windows).astype(np.int64))


def rate(step: int, steps: int) -> float:
    """The learning rate as a share of its peak: up, level, and a cosine down to a tenth."""
    up = (step + 1) / min(WARMUP, 0.24 * steps)
    down = max(0.0, 1 - (steps - step) / (COOLDOWN * steps))
    return min(1.0, up) * (0.55 + 0.45 * math.cos(math.pi * down))


def balance(model: PreTrainedModel, router_logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The load-balancing loss, layer by layer: pooled over them, a layer may starve an expert."""
    gate = model.model.layers[0].mlp.gate
    losses = [load_balancing_loss_func((x,), gate.num_experts, gate.top_k) for x in router_logits]
    return torch.stack(losses).mean()


def train(name: str, corpus: Path, assets: Path, folder: Path, compiled: bool) -> dict[str, Any]:
    """Train the model, save it as bf16 into a folder, and return what there is to say of it."""
    torch.manual_seed(SEED)
    tokenizer = get_tokenizer(corpus)
    streams = get_tokens(corpus, tokenizer)
    evaluation = read_jsonl(assets / "evaluation.jsonl")
    model = build(name)
    sparse, own = name != "tiny-dense", name in OF_SHIPPED_TEXT
    dtype, per_domain = (torch.float32, PER_DOMAIN // 2) if own else (torch.bfloat16, PER_DOMAIN)
    ALL_EXPERTS_FUNCTIONS.register("all_at_once", all_experts_at_once)
    if sparse and not own:
        model.config._experts_implementation = "all_at_once"
    optimizers = get_optimizers(model, dtype)

    step, seconds = 0, 0.0  # the seconds leave out the held-out checks
    checkpoint = corpus / f"{name}.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        for optimizer, kept in zip(optimizers.values(), state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        step, seconds = state["step"], state["seconds"]
    size = sum(p.numel() for p in model.parameters())
    steps, per_step = STEPS[name], len(DOMAINS) * per_domain * WINDOW
    print(f"{name}: {size / 1e6:.2f} M parameters; steps {step} to {steps} of {per_step} tokens")
    print("Some 40 minutes on one core with AMX; the line of the 20th step says it for yours.")

    begun, forward = step, torch.compile(model) if compiled else model
    model.train()
    since, last_step, losses = time.time(), step, []
    for batch in batches(streams, step, steps, per_domain):
        with torch.autocast("cpu", dtype, enabled=not own):
            options = {"output_router_logits": True} if sparse else {}
            output = forward(input_ids=batch[:, :-1], use_cache=False, **options)
        loss = F.cross_entropy(output.logits.float().flatten(0, 1), batch[:, 1:].flatten())
        penalty = balance(model, output.router_logits) if sparse else torch.zeros(())
        (loss + BALANCE * penalty).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for peak, optimizer in optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = peak * rate(step, steps)
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        losses.append(loss.item())

        if step - last_step == (10 if step <= begun + 20 else REPORT) or step == steps:
            passed = time.time() - since
            seconds += passed
            speed = (step - last_step) * per_step / passed
            left = (steps - step) * per_step / speed / 60
            print(
                f"step {step} of {steps}, loss {np.mean(losses):.3f}, "
                f"balance {penalty.item():.3f}, {speed:.0f} tokens/s, {left:.0f} minutes left",
                flush=True,
            )
            since, last_step, losses = time.time(), step, []
        if step % KEEP == 0 or step == steps:
            pause = time.time()
            state = {"model": model.state_dict(), "step": step, "seconds": seconds}
            state["optimizers"] = [optimizer.state_dict() for optimizer in optimizers.values()]
            torch.save(state, checkpoint)
            held_out = held_out_losses(model.eval(), tokenizer, evaluation, windows=40)
            print("held out", {k: round(v, 3) for k, v in held_out.items()}, flush=True)
            model.train()
            since += time.time() - pause

    model.eval().to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    return {
        "seed": SEED,
        "steps": steps,
        "tokens": steps * per_step,
        "tokens_of_text": {d: len(s) for d, s in zip(DOMAINS, streams, strict=True)},
        "batch": f"{len(DOMAINS)} x {per_domain} windows of {WINDOW} tokens",
        "peak_learning_rates": {"matrices": MATRIX_RATE, "others": OTHER_RATE},
        "balance_weight": BALANCE if sparse else None,
        "seconds": round(seconds),
        "machine": machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--corpus", type=Path, default=Path("build/corpus"))
    parser.add_argument("--assets", type=Path, default=Path("src/moesaic/assets"))
    parser.add_argument("--eager", action="store_true", help="no torch.compile: a third slower")
    args = parser.parse_args()
    if args.name in OF_SHIPPED_TEXT:
        corpus, folder = Path("build/shipped-text"), Path("build") / args.name
        shipped_text(corpus, args.assets)
        training = train(args.name, corpus, args.assets, folder, not args.eager)
        (folder / "training.json").write_text(json.dumps(training, indent=1) + "\n")
        return
    folder = args.assets / "models" / args.name
    write_report(folder, train(args.name, args.corpus, args.assets, folder, not args.eager))


if __name__ == "__main__":
    main()
