"""Run of ``tune``: some parameters of a converted model are trained, by the option ``what``.

condensed   Cao et al. (CD-MoE, Sec. 4.3): the projections of the condensed layers; gate values,
            attention and everything else are kept. Rate 1e-4, 10 % warm-up, cosine.
attention   the attention of the same layers, as the paper trains Layer Drop for comparison.
routers     only the routers, towards the original model's next-token distribution (router
            knowledge distillation); of carved models, too, through the choice (straight-through).
lora        low-rank updates of the decoder layers' linear modules and fused experts, merged at the
            end.
all         everything.

The released code of CD-MoE has no effective warm-up and predicts prompts and padding; we do not.

Fixed weights g of condensed layers are kept out of ``down_proj`` while it trains.
CD-MoE (Cao et al., Eq. 3) trains E_i of ``g_i E_i(x)`` and keeps g_i fixed. With g folded into the
down projection, a step of AdamW, which changes every weight by about the same amount, would change
E_i 1/g_i times as much. So while a layer trains, its down projection is without g, and its input is
multiplied by g; in the end they are folded again. The function is the same all the time.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor, nn

from moesaic.arch.dense import Arch, weight_of
from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.errors import MoesaicError
from moesaic.io.checkpoint import model_fingerprint
from moesaic.io.models import HEADLESS, working_type
from moesaic.io.names import PLAN, our_path
from moesaic.io.source import Source, resolve
from moesaic.methods.base import Decision, Method, Outline, Summary
from moesaic.observation.job import Job
from moesaic.plan import Plan
from moesaic.plans.condensed import CondensedLayer
from moesaic.plans.cut import CutLayer
from moesaic.record import LayerRecord
from moesaic.surgery import routed_modules
from moesaic.train.learning import Distillation, examples_of, learn
from moesaic.train.tune.config import TRAINED, TuneConfig
from moesaic.types import JSON, Config, Model


def trainable(
    model: Model, arch: Arch, what: str, plan: Plan | None = None
) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name.

    Args:
        model: a converted model.
        arch: its architecture.
        what: ``condensed``, ``attention``, ``routers`` or ``all``.
        plan: the plan that made it, from which (and from those before it) follow the layers that
            routed before.

    Raises:
        MoesaicError: the model has no such parameters.
    """
    if what == "all":
        return dict(model.named_parameters())
    routing = routed_modules(model, arch)
    if what in ("condensed", "attention"):
        parts = [f"{arch.inside}{name}." for name in arch.ffn.apart]
        parts = [f"{arch.attention_path}."] if what == "attention" else parts
        starts = tuple(
            f"{arch.layer_prefix(i)}{part}"
            for step in ((*plan.earlier, plan) if plan else ())
            for i in step.layers
            if step.base.experts_of(i) and i not in routing
            for part in parts
        )
        named = model.named_parameters()
        parameters = {name: p for name, p in named if name.startswith(starts) and p.numel()}
        if not parameters:
            raise MoesaicError(
                "This model has no condensed layers"
                + (" with attention" if what == "attention" else "")
                + ": condense it first, or train others with what=lora, what=routers or what=all."
            )
        return parameters
    routers = {
        id(parameter)
        for routed in routing.values()
        if getattr(routed.router, "learns", True)
        for parameter in routed.router.parameters(recurse=False)
    }
    parameters = {name: p for name, p in model.named_parameters() if id(p) in routers}
    if not parameters:
        raise MoesaicError("This model has no routers that learn.")
    return parameters


# --- fixed weights of condensed layers -----------------------------------------------------------


def _fixed_weights(layer: CondensedLayer, shared: int, expert: int) -> Tensor:
    """Return the factor of every neuron of a condensed layer (M,), float32; ``shared`` and
    ``expert`` are the widths of the shared path and of a routed expert."""
    scales = torch.tensor(layer.shared_scale).flatten()
    scale = scales.repeat_interleave(shared // len(scales))[: shared if layer.shared else 0]
    g_K = layer.gates_K.float().repeat_interleave(expert)
    padding = torch.ones(layer.width - len(scale) - len(g_K))
    return torch.cat([scale, g_K, padding])


def factors(arch: Arch, config: Config, plan: Plan | None) -> dict[int, Tensor]:
    """Return the factors (M,) of condensed layers, by layer, if any differs from 1.

    Args:
        arch: the architecture.
        config: the model's config.
        plan: the plan that made it, with those before it; None if unknown.
    """
    fixed: dict[int, Tensor] = {}
    for step in reversed((*plan.earlier, plan) if plan else ()):
        for i, layer in step.layers.items():
            if isinstance(layer, CutLayer) and layer.shared_S is not None:
                return fixed  # shared paths have another width since
            if not isinstance(layer, CondensedLayer) or not step.base.experts_of(i):
                continue  # it was dense, and is only padded
            assert isinstance(arch, MoEArch)
            expert = step.base.widths[i]
            g_M = _fixed_weights(layer, arch.shared_width_in(config, expert), expert)
            if (g_M != 1).any():
                fixed[i] = g_M
    return fixed


@contextmanager
def outside(model: Model, arch: Arch, factors: Mapping[int, Tensor]) -> Iterator[None]:
    """Divide down projections by their factors, and multiply their inputs, while the context lasts.

    Args:
        model: a live model; its down projections are float32 meanwhile.
        arch: its architecture.
        factors: factors by layer (M,), none of them 0.
    """

    def multiply(g_M: Tensor, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return ((args[0].float() * g_M.to(args[0].device)).to(args[0].dtype),)

    def fold(down: nn.Linear, dtype: torch.dtype, g_M: Tensor) -> None:
        down.weight.data = (down.weight.data.float() * g_M.to(down.weight.device)).to(dtype)

    with ExitStack() as meanwhile:
        for i, g_M in factors.items():
            ffn = arch.ffn_of(arch.layers(model)[i])
            down = getattr(ffn, arch.ffn.down)
            meanwhile.callback(fold, down, weight_of(ffn, arch.ffn.down).dtype, g_M)
            down.weight.data = down.weight.data.float() / g_M.to(down.weight.device)
            meanwhile.enter_context(down.register_forward_pre_hook(partial(multiply, g_M)))
        yield


# --- the run -------------------------------------------------------------------------------------


KL = "KL divergence from the teacher"


class Tuning(Method[TuneConfig, Arch]):
    """Method of ``tune``: trains a model, converted or not. No plan can rebuild the result."""

    ratio = ""

    def find(self, config: Config) -> Arch:
        """Return the architecture of a model's config, or of its base's.

        Raises:
            MoesaicError: the architecture is unknown.
        """
        return base_arch(config)

    def run(self, job: Job[Arch]) -> Decision:
        """Choose the trainable parameters, and train them."""
        config, args = self.config, job.args
        if job.arch.model_type in HEADLESS and job.on_disk and job.original.beside:
            raise MoesaicError(
                f"tune writes only the language model, and transformers has no class for "
                f"{job.arch.model_type} outside of the whole."
            )
        examples = examples_of(job, config, answers=True)
        live = job.live()
        request: JSON = {}
        teacher = args.teacher
        if teacher is not None:
            request["teacher"] = model_fingerprint(teacher)
        elif config.teacher:
            source = resolve(config.teacher)
            request["teacher"] = source.fingerprint
            teacher = source.load("cpu", working_type(source.config, args.dtype, job.device))
        total = sum(p.numel() for p in live.parameters())
        g: dict[int, Tensor] = {}
        if config.what == "lora":
            tuned, chosen = _with_lora(live, config)
        else:
            plan = args.plan if args.plan is not None else _plan(job)
            tuned, chosen = live, trainable(live, job.arch, config.what, plan)
            g = factors(job.arch, live.config, plan) if config.what in ("condensed", "all") else g
            request |= {"outside": sorted(g)} if g else {}
        count = sum(p.numel() for p in chosen.values())
        with outside(tuned, job.arch, g):
            losses = learn(
                job,
                config,
                tuned,
                chosen,
                examples,
                args.resume_from,
                objective=None if teacher is None else Distillation(teacher),
                request=request,
            )
        if config.what == "lora":
            live = tuned.merge_and_unload()
        live.requires_grad_(True).eval()
        # within names, to which an adapter may have added prefixes
        starts = map(job.arch.layer_prefix, range(len(job.layers)))
        layers = [i for i, start in enumerate(starts) if any(start in name for name in chosen)]
        return Decision(
            None,
            summary={
                "training": {
                    "what": TRAINED[config.what],
                    "losses": losses,
                    "labels": {"loss": "next-token loss" if teacher is None else KL},
                    "trained_parameters": count,
                    "total_parameters": total,
                    "distilled": teacher is not None,
                    "layers": layers,
                }
            },
            trained=live.to(job.return_device),
        )

    def outline(self, job: Job[Arch]) -> Outline:
        """Return the unchanged shape, and the number of trainable parameters."""
        config, model = self.config, job.skeleton
        if config.what == "lora":
            _, chosen = _with_lora(copy.deepcopy(model), config)
        else:
            chosen = trainable(model, job.arch, config.what, _plan(job))
        count = sum(p.numel() for p in chosen.values())
        return Outline(Plan(config.name, job.base, {}, asdict(config)), trained=count)

    def title_and_text(
        self, layers: list[LayerRecord], decision: Decision, active: float | None
    ) -> Summary:
        """Describe what was trained, for how long, and towards what."""
        what, training = TRAINED[self.config.what], decision.summary["training"]
        text = f"{what[0].upper()}{what[1:]} were trained for {len(training['losses']):,} steps"
        if training["distilled"]:
            text += ", towards a teacher's next-token distribution"
        return Summary(f"{what} trained", f"{text}.")


def _plan(job: Job[Arch]) -> Plan | None:
    """Return the plan that made a checkpoint, if it is in the folder."""
    original = job.original
    if isinstance(original, Source) and our_path(original.folder, PLAN).is_file():
        return Plan.load(original.folder)
    return None


MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Architectures with fused kernels that read two of their matrices, which peft refuses to adapt."""


def _with_lora(model: Model, config: TuneConfig) -> tuple[Model, dict[str, torch.nn.Parameter]]:
    """Return the model with low-rank updates, and those updates by name.

    peft's ``all-linear`` chooses what is updated: all linear modules but the head, and fused
    experts. The updates start at random numbers that depend on ``config.seed`` only.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MoesaicError("what lora needs: pip install peft") from error
    options: JSON = {"r": config.rank, "lora_alpha": 2 * config.rank}
    options |= {"target_modules": "all-linear"}
    if model.config.model_type in MAMBA:
        options["exclude_modules"] = ["out_proj", "conv1d"]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(config.seed)
        # peft has patterns of its own for parameters not trained here
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys")
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    return adapted, {n: p for n, p in adapted.named_parameters() if p.requires_grad}
