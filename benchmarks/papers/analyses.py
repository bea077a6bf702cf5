"""What the papers look at beside results: steps of the YAML files beside this. All return JSON.

``text`` is a source, windows and their tokens, with commas between.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from baselines import opened
from torch import Tensor

from moesaic.arch.dense import DenseFFN
from moesaic.arch.lookup import base_arch, dense_arch
from moesaic.carving.tomoe.config import ToMoEConfig
from moesaic.carving.tomoe.masks import MaskingModules
from moesaic.carving.tomoe.student import layer_shapes
from moesaic.data.text import evaluation_tokens
from moesaic.io.models import skeleton_of
from moesaic.io.names import RECORD, our_path
from moesaic.io.source import resolve
from moesaic.metrics.evaluate import evaluate
from moesaic.metrics.forward import _choice
from moesaic.metrics.speed import clock, interleaved
from moesaic.observation.stream import LayerStream
from moesaic.plan import Plan
from moesaic.surgery import routed_modules
from moesaic.types import JSON, Model


def record(folder: str) -> JSON:
    """What a run kept of itself."""
    found: JSON = json.loads(our_path(Path(folder), RECORD).read_text("utf-8"))
    return found


def three(layers: list[int]) -> list[int]:
    """The first, the middle and the last of some layers."""
    return [layers[0], layers[len(layers) // 2], layers[-1]]


# --- NAEE ----------------------------------------------------------------------------------------


def overlap(first: str, second: str) -> JSON:
    """Fig. 4: the kept experts by two calibrations, layer by layer."""
    plans = [Plan.load(Path(folder)).layers for folder in (first, second)]
    sets = [{i: set(layer.kept) for i, layer in plan.items()} for plan in plans]  # type: ignore[attr-defined]
    layers = {i: [sorted(kept[i]) for kept in sets] for i in sorted(sets[0])}
    return {"layers": layers, "same": sum(a == b for a, b in layers.values()), "of": len(layers)}


@torch.no_grad()
def ran(live: Any, batches: Iterable[Tensor]) -> dict[int, Tensor]:
    """One where a token runs an expert (T, E), in the first, the middle and the last layer."""
    found = routed_modules(live, base_arch(live.config))
    kept: dict[int, list[Tensor]] = {i: [] for i in three([*found])}
    for i, parts in kept.items():
        found[i].router.register_forward_hook(lambda _m, _a, out, to=parts: to.append(_choice(out)))
    for ids in batches:
        live(ids.to(live.device), use_cache=False)
    chosen = {i: torch.cat(parts).cpu() for i, parts in kept.items()}  # no expert: their number
    blank = {i: torch.zeros(len(c_TK), len(found[i].experts) + 1) for i, c_TK in chosen.items()}
    return {i: blank[i].scatter_(1, c_TK, 1)[:, :-1] for i, c_TK in chosen.items()}


def pairs(model: str, text: str, device: str = "cpu") -> JSON:
    """Fig. 5: how often two experts run together, in the first, the middle and the last layer.

    Returns:
        by layer ``share``, of a token's pairs (E, E), and ``most``, that of the commonest pair
        over what it would be if all were as common.
    """
    _, live, tokens = opened(model, text, device)
    layers: dict[int, JSON] = {}
    for i, ran_TE in ran(live, (batch.input_ids for batch in tokens.batches())).items():
        count = ran_TE.shape[1]
        together_EE = (ran_TE.T @ ran_TE).triu(1)
        share_EE = together_EE / together_EE.sum()
        most = float(share_EE.max()) * count * (count - 1) / 2
        layers[i] = {"share": [[round(v, 4) for v in r] for r in share_EE.tolist()], "most": most}
    return {"layers": layers, "most": mean(layer["most"] for layer in layers.values())}


# --- CD-MoE --------------------------------------------------------------------------------------


def searched(folder: str) -> JSON:
    """Tab. 6, Figs. 2 and 5: the search's CPU seconds, its first round, and JS by what is kept."""
    run = record(folder)
    summary = run["steps"][-1]["summary"]
    search = summary.get("search") or [{}]
    by_layer = [layer["analysis"].get("divergence", {}) for layer in run["layers"]]
    kinds = {kind for each in by_layer for kind in each}
    return {
        "seconds": sum(s["cpu_seconds"] for s in run["log"]["stages"] if "within" not in s),
        "order": summary["layers"],
        "alone": search[0].get("losses", {}),
        "divergence": {k: mean(d[k] for d in by_layer if k in d) for k in sorted(kinds)},
    }


# --- MoRE ----------------------------------------------------------------------------------------


def cka(x_ND: Tensor, y_NE: Tensor) -> float:
    """Eqs. 14 and 15, with the median distance for sigma, which the paper does not give.

    >>> x = torch.eye(4); round(cka(x, 3 * x), 6)
    1.0
    """

    def centred(x: Tensor) -> Tensor:
        distance = torch.cdist(x.double(), x.double())
        sigma = distance[distance > 0].median()
        kernel = (-distance.square() / (2 * sigma**2)).exp()
        return kernel - kernel.mean(0) - kernel.mean(1, keepdim=True) + kernel.mean()

    k, m = centred(x_ND), centred(y_NE)
    return float((k * m).sum() / (k.square().sum() * m.square().sum()).sqrt())


@torch.no_grad()
def activations(model: str, text: str, device: str = "cpu") -> list[Tensor]:
    """The mean h of each document (N, M) in the first, the middle and the last layer.

    h is what enters the down projection; of a mixture, that of its shared experts.
    """
    _, live, tokens = opened(model, text, device, documents=True)
    arch = base_arch(live.config)
    wanted = three([*range(len(arch.layers(live)))])
    each = tokens.input_ids.shape[1]  # a document is a batch
    stream = LayerStream(live, arch, tokens, wanted, view=arch.view, tokens_per_batch=each)
    found = []
    for site in stream:
        ffn = site.view if isinstance(site.view, DenseFFN) else site.view.shared_ffn
        assert ffn is not None, "no FFN that all tokens run"
        found.append(
            torch.stack([ffn.hidden(x_TD).float().mean(0).cpu() for x_TD in site.inputs()])
        )
    return found


DEPTHS = ("shallow", "middle", "deep")


def cka_depths(model: str, text: str, device: str = "cpu") -> JSON:
    """Tab. 7: between depths of one model."""
    h = activations(model, text, device)
    return {f"{DEPTHS[a]}-{DEPTHS[b]}": cka(h[a], h[b]) for a, b in ((0, 1), (1, 2), (0, 2))}


def cka_models(model: str, other: str, text: str, device: str = "cpu") -> JSON:
    """Tab. 8: between two models at the same depth."""
    both = [activations(name, text, device) for name in (model, other)]
    return {depth: cka(x, y) for depth, x, y in zip(DEPTHS, *both, strict=True)}


def cka_texts(model: str, text: str, second: str, device: str = "cpu") -> JSON:
    """Tab. 9: between two texts, document by document as they come."""
    both = [activations(model, each, device) for each in (text, second)]
    return {depth: cka(x, y) for depth, x, y in zip(DEPTHS, *both, strict=True)}


@torch.no_grad()
def never(model: str, text: str, ratio: float, device: str = "cpu") -> JSON:
    """Tab. 4: channels of the middle layer that are never among a token's strongest."""
    _, live, tokens = opened(model, text, device)
    arch = dense_arch(live.config)
    middle = len(arch.layers(live)) // 2
    for site in LayerStream(live, arch, tokens, [middle], view=arch.dense):
        count = site.tokens
        seen = torch.zeros(site.view.width, dtype=torch.bool)
        top = max(1, int(float(ratio) * len(seen)))
        for _, h_TM in site.activations():
            seen[h_TM.abs().topk(top).indices.flatten().cpu()] = True
    return {"top": top, "never": float((~seen).float().mean()), "tokens": count}


# --- ToMoE ---------------------------------------------------------------------------------------


def learned(folder: str) -> JSON:
    """Figs. 3 and 5 to 9: the curves of a run, and the widths, unions and similarity of experts."""
    run = record(folder)
    curve = run["steps"][-1]["summary"]["training"]["losses"]
    layers = [layer for layer in run["layers"] if layer["analysis"].get("expert_widths")]
    widths = {x["index"]: x["analysis"]["expert_widths"] for x in layers}
    shares = [layer["analysis"]["union"] for layer in layers]
    apart = [
        mean(v for r, row in enumerate(x["analysis"]["similarity"]) for v in row[r + 1 :] or [0])
        for x in layers
    ]
    return {
        "curve": curve[:: max(1, len(curve) // 20)],
        "first": curve[0],
        "last": {k: mean(step[k] for step in curve[-10:]) for k in curve[0]},
        "widths": widths,
        "attention": {x["index"]: [x["analysis"]["qk"], x["analysis"]["vo"]] for x in layers},
        "union": mean(shares),
        "spread": max(max(w) for w in widths.values()) / min(max(w) for w in widths.values()),
        "equal": mean(min(w) / max(w) for w in widths.values()),
        "similarity": dict(zip([x["index"] for x in layers], apart, strict=True)),
        "seconds": sum(s["cpu_seconds"] for s in run["log"]["stages"] if "within" not in s),
    }


def load(folder: str, data: str, max_tokens: int) -> JSON:
    """Fig. 4: the share of tokens that each expert gets, by layer."""
    measured = evaluate(folder, data=data, max_tokens=int(max_tokens), progress=False)
    share = {i: [round(s, 4) for s in r.share] for i, r in measured.routing.items()}
    jsd = {i: r.jsd for i, r in measured.routing.items()}
    return {"share": share, "jsd": jsd, "mean": mean(jsd.values())}


def routed(folder: str, prompt: str, device: str = "cpu") -> JSON:
    """Tabs. 7, 11 and 14: each token of a text with its expert, in three layers.

    Returns:
        by layer ``tokens``, and ``runs``: the share of neighbours that go to the same expert.
    """
    source = resolve(folder)
    ids = source.tokenizer(prompt, return_tensors="pt").input_ids
    words = [source.tokenizer.decode([t]) for t in ids[0].tolist()]
    return {
        str(i): {
            "tokens": [[w, e] for w, e in zip(words, ran_TE.argmax(1).tolist(), strict=True)],
            "runs": float((ran_TE[1:] == ran_TE[:-1]).all(1).float().mean()),
        }
        for i, ran_TE in ran(source.load(device), [ids]).items()
    }


def modules(model: str, experts: int) -> JSON:
    """Tab. 8: what trains, and what the result keeps, by App. A.1's formula and counted."""
    skeleton = skeleton_of(resolve(model).config)
    shapes = layer_shapes(skeleton, dense_arch(skeleton.config))
    masking = MaskingModules(ToMoEConfig(experts=int(experts)), shapes)
    counts: Counter[str] = Counter()
    for name, parameter in masking.named_parameters():
        part, *rest = name.split(".")
        counts[part if part == "hypernetwork" else ".".join([part, *rest[1:2]])] += (
            parameter.numel()
        )
    said = sum(s.hidden * 128 + 128 * s.heads.size + s.hidden * int(experts) for s in shapes)
    return {"trained": dict(counts), "kept_by_the_paper": said}


@torch.no_grad()
def _forward(live: Model, ids: Tensor, _: int) -> tuple[float, float]:
    """Seconds of a forward pass, and of no decoding."""
    started = clock(live.device)
    live(ids, use_cache=False)
    return clock(live.device) - started, math.inf


def throughput(models: str, batches: str, length: int, device: str = "cpu") -> JSON:
    """Tab. 15: tokens a second of forward passes, the models in turn, all in float32."""
    dense, *others = models.split()
    names = {"dense": dense, **{Path(name).name.rpartition(".")[2]: name for name in others}}
    live = {name: resolve(model).load(device, torch.float32) for name, model in names.items()}
    runners = {name: partial(_forward, model) for name, model in live.items()}
    speed: dict[str, dict[str, float]] = {name: {} for name in names}
    for size in batches.split():
        ids = torch.randint(5, 500, (int(size), int(length)), device=device)
        for name, measured in interleaved(runners, ids, rounds=3).items():
            speed[name][size] = int(size) * measured.prefill.median
    ratio = {name: by[size] / speed["dense"][size] for name, by in speed.items()}
    return {"tokens_per_second": speed, "ratio": ratio}


# --- DSMoE ---------------------------------------------------------------------------------------


def thresholds(folder: str, taus: str, data: str, max_tokens: int, device: str = "cpu") -> JSON:
    """Tab. 4 and Fig. 2: perplexity and active ratio of a result at other thresholds."""
    source = resolve(folder)
    live = source.load(device)
    tokens = evaluation_tokens(data, source.tokenizer, 256, int(max_tokens), live.config)
    gates = [m for m in live.modules() if type(m).__name__ == "ThresholdRouter"]
    found = {}
    for tau in taus.split():
        for gate in gates:
            gate.tau = float(tau)
        measured = evaluate(live, data=tokens, progress=False)
        calls = mean(r.calls for r in measured.routing.values())
        active = measured.active_parameters / measured.total_parameters
        found[tau] = {"perplexity": measured.perplexity, "active": active, "blocks": calls}
    return found


def activity(folder: str, sources: str, max_tokens: int) -> JSON:
    """Fig. 3: the mean number of active blocks by layer, text by text."""
    found = {}
    for data in sources.split():
        measured = evaluate(folder, data=data, max_tokens=int(max_tokens), progress=False)
        layers = {str(i): r.calls for i, r in measured.routing.items()}
        found[data] = {"layers": layers, "mean": mean(layers.values())}
    return found
