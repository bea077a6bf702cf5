"""Run of ``tune``: some parameters of a converted model are trained."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import asdict

import torch
from torch import Tensor

from moesaic.arch.dense import Arch
from moesaic.arch.lookup import base_arch
from moesaic.errors import MoesaicError
from moesaic.exports.quantiser import Model
from moesaic.io.checkpoint import of_model
from moesaic.io.models import HEADLESS, working_type
from moesaic.io.names import PLAN, placed
from moesaic.io.source import Source, resolve
from moesaic.methods.base import Decision, Method, Outline, Summary
from moesaic.observation.job import Job
from moesaic.plan import Plan
from moesaic.record import LayerRecord
from moesaic.train.learning import examples_of, learn
from moesaic.train.objectives import Distillation
from moesaic.train.tune.config import TRAINED, TuneConfig
from moesaic.train.tune.factors import factors, outside
from moesaic.train.tune.parameters import trainable
from moesaic.types import JSON, Config

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
                f"tune writes the language model alone, and transformers has no class for "
                f"{job.arch.model_type} outside of the whole."
            )
        text = config.train if args.text is None else args.text
        examples = examples_of(job, config, text, answers=True)
        live = job.live()
        request: JSON = {}
        teacher = args.teacher
        if teacher is not None:
            request["teacher"] = of_model(teacher)
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
                    "layers": touched(chosen, job.arch, len(job.arch.layers(job.shape))),
                }
            },
            trained=live.to(job.return_device),
        )

    def outline(self, job: Job[Arch]) -> Outline:
        """Return the unchanged shape, and the number of trainable parameters."""
        config, model = self.config, job.shape
        if config.what == "lora":
            linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
            count = sum(config.rank * (m.in_features + m.out_features) for m in linear)
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


def touched(names: Iterable[str], arch: Arch, count: int) -> list[int]:
    """Return the decoder layers that parameters belong to, by the parameters' names.

    Args:
        names: names of parameters; an adapter may have added prefixes.
        arch: the model's architecture.
        count: number of decoder layers.
    """
    names = list(names)
    return [i for i in range(count) if any(arch.layer_prefix(i) in name for name in names)]


def _plan(job: Job[Arch]) -> Plan | None:
    """Return the plan that made a checkpoint, if it is in the folder."""
    original = job.original
    if isinstance(original, Source) and placed(original.folder, PLAN).is_file():
        return Plan.load(original.folder)
    return None


def _with_lora(model: Model, config: TuneConfig) -> tuple[Model, dict[str, torch.nn.Parameter]]:
    """Return the model with low-rank updates of every linear module, and those updates by name.

    They start at random numbers that depend on ``config.seed`` only.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MoesaicError("what lora needs: pip install peft") from error
    options = {
        "r": config.rank,
        "lora_alpha": 2 * config.rank,
        "target_modules": "all-linear",
    }
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(config.seed)
        # peft has patterns of its own for parameters not trained here
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys")
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    return adapted, {n: p for n, p in adapted.named_parameters() if p.requires_grad}
