"""What every architecture must do that is said to be supported, tried on a tiny random model."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from builders import applied, converted, equal, loaded, saved, stream_of, weights
from safetensors.torch import save_file
from shrunken import small_config, small_model, small_whole
from torch import Tensor, nn
from transformers.models.auto import CONFIG_MAPPING

from moesaic import MoesaicError, Tokens
from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch, MoEFFN
from moesaic.carving.carved_layer import CarvedLayer
from moesaic.io.naming import Naming
from moesaic.io.source import Source, language_model
from moesaic.plans.cut import CutLayer
from moesaic.surgery import base_shape

TOKENS = torch.randint(1, 384, (2, 12), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: Any) -> Tensor:
    logits_BTV: Tensor = model(TOKENS, use_cache=False).logits
    return logits_BTV


def handing(arch: MoEArch, layer: nn.Module) -> AbstractContextManager[None]:
    """Inside, a block whose router asks for more than hidden states is handed the tokens."""
    return arch.handing(arch.ffn_of(layer), {"input_ids": TOKENS}, torch.flatten)


def close(actual: Tensor, wanted: Tensor, at_most: float = 1e-4) -> None:
    assert torch.isfinite(wanted).all()
    assert wanted.abs().max() > 1e-3, "there is nothing to see"
    error = (actual - wanted).norm() / wanted.norm()
    assert error < at_most, f"off by {error:.2g}"


def kept(arch: MoEArch, config: Any, count: int) -> Tensor:
    """Six of eight experts, equally many of each group."""
    groups = arch.group_count(config)
    return torch.arange(count).view(groups, -1)[:, : 6 // groups].flatten()


def block(arch: MoEArch, seen: MoEFFN, x_TD: Tensor) -> None:
    w_TE = seen.routing.weights(seen.logits(x_TD))
    assert (w_TE != 0).sum(1).unique().tolist() == [seen.top_k]
    w_TK = w_TE[w_TE != 0].view(len(x_TD), -1)
    y_TD = (w_TK.unsqueeze(-1) * seen.packed_outputs(x_TD, w_TE != 0)).sum(1)
    if seen.shared is not None and arch.beside is None:
        y_TD = y_TD + seen.shared(x_TD)
        ffn, h_TM = seen.shared_ffn, seen.shared_weighted(x_TD)
        assert ffn is not None
        assert h_TM is not None
        close(h_TM @ ffn.down_DM.T, seen.shared(x_TD))
    close(y_TD, seen.output(x_TD))
    if arch.entry is not None:
        return
    norm = nn.Identity() if arch.after is None else getattr(seen.block, arch.after)
    whole = seen.block(x_TD[None], **seen.handed)
    close(norm(y_TD), (whole[0] if isinstance(whole, tuple) else whole).view_as(x_TD))


@torch.no_grad()
def view(model: Any, arch: Any) -> None:
    """The block is what its view says."""
    x_TD = torch.randn(TOKENS.numel(), model.config.hidden_size)
    for layer in arch.layers(model):
        if not isinstance(arch, MoEArch) or arch.is_dense(layer):
            ffn = arch.dense(layer)
            close(ffn.output(ffn.hidden(x_TD)), arch.ffn_of(layer)(x_TD[None])[0])
        elif arch.is_moe(layer):
            with handing(arch, layer):
                block(arch, arch.mixture(layer), x_TD)
    for layer in arch.layers(model):
        if isinstance(arch, MoEArch) and arch.is_moe(layer):
            entered: list[Tensor] = []
            left: list[Tensor] = []
            ffn = arch.ffn_of(layer)
            handles = arch.enter(ffn, entered.append), arch.watch(ffn, left.append)
            logits(model)
            for handle in handles:
                handle.remove()
            (x_TD,), (y_TD,) = (t.flatten(0, -2) for t in entered), (t.flatten(0, -2) for t in left)
            with handing(arch, layer):
                output_TD = arch.mixture(layer).output(x_TD)
            if arch.beside is None:
                close(output_TD, y_TD)


@torch.no_grad()
def routing(model: Any, arch: Any) -> None:
    """A set of experts is scored as it will be deployed."""
    if not isinstance(arch, MoEArch):
        return
    x_TD = torch.randn(32, model.config.hidden_size)
    i = arch.moe_layers(model)[-1]
    whole = arch.mixture(arch.layers(model)[i])
    few = kept(arch, model.config, whole.count)
    kept_E = torch.zeros(whole.count, dtype=torch.bool).index_fill(0, few, True)
    logits_TX = whole.logits(x_TD)
    w_TE = whole.routing.weights(logits_TX, kept_E.expand(len(logits_TX), -1))
    less = converted(copy.deepcopy(model), {i: CutLayer(few)})
    sliced = arch.mixture(arch.layers(less)[i])
    close(sliced.routing.weights(sliced.logits(x_TD)), w_TE[:, few])
    with whole.restricted(kept_E):
        close(whole.output(x_TD), sliced.output(x_TD))


@torch.no_grad()
def stream(model: Any, arch: Any) -> None:
    """Layers one by one, each with its tokens, are the whole model."""
    live = stream_of(model, Tokens(TOKENS))
    states, kwargs = live.record()
    for block in live.blocks(kwargs):
        block.run(states)
    for output, _ in live.heads(states):
        close(output, logits(model))


def nothing_changes(model: Any, arch: Any) -> None:
    """A plan that keeps everything leaves every tensor and every logit as it was."""
    shape = base_shape(model, arch)
    if isinstance(arch, MoEArch):
        layers: Any = {i: CutLayer(torch.arange(n)) for i, n in enumerate(shape.experts) if n}
    else:
        layers = {
            i: CarvedLayer(torch.arange(w), w, (), 0, None) for i, w in enumerate(shape.widths)
        }
    before = logits(model)
    with tempfile.TemporaryDirectory() as folder:
        base, out = Path(folder, "base"), Path(folder, "out")
        model.save_pretrained(base)
        applied(base, model, layers, out)
        if isinstance(arch, MoEArch):
            assert equal(weights(base), weights(out))
        close(logits(loaded(out)), before, 1e-5)


def reduced(model: Any, arch: Any, slim: bool) -> None:
    """Fewer or narrower experts or neurons: live, saved and from disk are one model."""
    shape = base_shape(model, arch)
    layers: dict[int, Any] = {}
    for i, layer in enumerate(arch.layers(model)):
        width, count = shape.widths[i], shape.experts_of(i)
        if count:
            few = kept(arch, model.config, count) if not slim else torch.arange(count)
            layers[i] = CutLayer(few)
            if slim:
                narrow = max(4, width // 2)
                orders = torch.rand(count, width).argsort(1)[:, :narrow].sort(1).values
                layers[i] = CutLayer(few, orders, width)
                view = arch.mixture(layer)
                path, room = view.shared_width, arch.shared_room(1, narrow)
                if path and (arch.shared_count or arch.shared_times):
                    own_S = torch.arange(path).view(view.shared_count, -1)
                    own_S = own_S[:, : min(room, path) // view.shared_count].flatten()
                    layers[i] = CutLayer(few, orders, width, shared_S=own_S)
        elif not isinstance(arch, MoEArch):
            half = width // 2
            layers[i] = CarvedLayer(torch.randperm(width)[:half], half, (), 0, None)
    before, twin = logits(model), copy.deepcopy(model)
    with tempfile.TemporaryDirectory() as folder:
        base, live, out = (Path(folder, name) for name in ("base", "live", "out"))
        model.save_pretrained(base)
        saved(live, twin, layers)
        again, actual = loaded(live), logits(twin)
        close(logits(again), actual, 1e-5)
        assert (actual - before).abs().max() > 1e-4
        tied = slim and arch.width == "intermediate_size" and any(shape.plain_widths.values())
        if isinstance(arch, MoEArch) and not tied:
            assert again.config.model_type == model.config.model_type, "not native"
        applied(base, model, layers, out)
        assert equal(weights(live), weights(out)), "rewritten on disk it is another model"


def fewer(model: Any, arch: Any) -> None:
    """One expert a token: a field of the config, or refused; by layer where routers differ."""
    if not isinstance(arch, MoEArch) or arch.chosen is None:
        return
    shape, before = base_shape(model, arch), logits(model)
    with tempfile.TemporaryDirectory() as folder:
        saved(Path(folder), model, {i: CutLayer(top_k=1) for i in shape.routed})
        again, actual = loaded(Path(folder)), logits(model)
    assert again.config.model_type == model.config.model_type, "not native"
    assert all(arch.mixture(arch.layers(again)[i]).top_k == 1 for i in shape.routed)
    close(logits(again), actual, 1e-5)
    assert (actual - before).abs().max() > 1e-4


STEPS: dict[str, Callable[[Any, Any], None]] = {
    "view": view,
    "routing": routing,
    "stream": stream,
    "keep all": nothing_changes,
    "prune": lambda model, arch: reduced(model, arch, slim=False),
    "slim": lambda model, arch: reduced(model, arch, slim=True),
    "fewer": fewer,
}
"""What is tried, in this order."""


def as_published(folder: Path) -> None:
    """Mend names that transformers 5.23 writes and cannot read: layers of Kimi-K2.5 as blocks."""
    tensors = weights(folder)
    named = {n.replace("model.blocks.", "model.layers."): t for n, t in tensors.items()}
    if named.keys() != tensors.keys():
        (file,) = folder.glob("*.safetensors")
        save_file(named, file, {"format": "pt"})


def beside(model_type: str, language: str) -> None:
    """A model with parts beside its language model: these keep their bytes, and it is kept whole.

    Results of no architecture's own class are the language model alone.
    """
    model = small_whole(model_type, language)
    with tempfile.TemporaryDirectory() as folder:
        base, out = Path(folder, "base"), Path(folder, "out")
        model.save_pretrained(base)
        as_published(base)
        source = Source("base", base)
        text = source.load()
        assert text.config.model_type == language
        arch = base_arch(source.config)
        shape = base_shape(text, arch)
        if isinstance(arch, MoEArch):
            few = kept(arch, text.config, max(shape.experts))
            layers: dict[int, Any] = {i: CutLayer(few) for i in arch.moe_layers(text)}
        else:
            halves = {
                i: torch.randperm(width)[: width // 2] for i, width in enumerate(shape.widths)
            }
            layers = {i: CarvedLayer(h, len(h), (), 0, None) for i, h in halves.items()}
        close(
            logits(applied(source, text, layers, out).load()), logits(converted(text, layers)), 1e-5
        )
        before, after = weights(base), weights(out)
        names = Naming(source.checkpoint, language)
        state = text.state_dict()
        others = {disk for disk, name in names.in_memory.items() if name not in state}
        assert others, "there is nothing beside it"
        if not isinstance(arch, MoEArch):
            assert not others & after.keys()
            return
        assert equal({n: before[n] for n in others}, {n: after[n] for n in others})
        _, info = type(model).from_pretrained(out, output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys")), info
        assert not info["mismatched_keys"], info


def held(model_type: str) -> tuple[str, str]:
    """Try an architecture.

    Returns:
        ``moe``, ``dense`` or ``unsupported``; and the reason, if it is not supported.
    """
    whole = CONFIG_MAPPING[model_type]
    try:
        language = language_model(whole()) if "text_config" in whole.sub_configs else None
    except Exception:
        language = None
    if language is not None and language.model_type != model_type:
        kind, reason = held(language.model_type)
        if reason:
            return kind, f"Its language model, {language.model_type}: {reason}"
        try:
            torch.manual_seed(0)
            beside(model_type, language.model_type)
        except Exception as error:
            return "unsupported", f"Parts beside text: {type(error).__name__}: {_said(error)}"
        return kind, ""
    try:
        config = small_config(model_type)
        if config.get_text_config() is not config:
            base_arch(config)
        model = small_model(model_type)
    except MoesaicError as error:
        return "unsupported", _said(error)
    except Exception as error:
        return "unsupported", f"No tiny model of it can be made by rule: {_said(error)}"
    try:
        arch = base_arch(model.config)
    except Exception as error:
        return "unsupported", _said(error)
    for name, step in STEPS.items():
        if name == "slim" and not isinstance(arch, MoEArch):
            continue
        try:
            torch.manual_seed(0)
            step(copy.deepcopy(model), arch)
        except Exception as error:
            return "unsupported", f"{_upper(name)}: {type(error).__name__}: {_said(error)}"
    return ("moe" if isinstance(arch, MoEArch) else "dense"), ""


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _said(error: Exception) -> str:
    """The reason alone, on one line."""
    text = " ".join(str(error).split()).partition(" `moesaic inspect`")[0]
    text = re.sub(r"/\S+/(base|live|out)\b", "The checkpoint", text)
    return (text.partition("is not supported. ")[2] or text)[:400]
