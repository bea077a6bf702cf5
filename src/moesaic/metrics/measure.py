"""Measurements: quality, size and speed of models by name, and of a result beside its original."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from moesaic.config import Evaluation, text_fields
from moesaic.data.mixes import check_apart
from moesaic.data.questions import wanted_tasks
from moesaic.data.reader import Taken, shipped_texts
from moesaic.data.source import DOMAINS
from moesaic.data.text import Tokens, evaluation_tokens, needs_tokenizer, positions
from moesaic.distributed import gathered, own_device, process
from moesaic.errors import MoesaicError
from moesaic.foreign import JSON, Model, Tokenizer, Track, Values, give_back, silent
from moesaic.io.arithmetic import sizes_in, working_type
from moesaic.io.caller import leaves_untouched
from moesaic.io.checkpoint import shape_of
from moesaic.io.headers import mapping_of
from moesaic.io.layout import RECORD, placed
from moesaic.io.source import Source, resolve
from moesaic.methods import METHODS
from moesaic.metrics.forward import Layerwise, Runner, Whole
from moesaic.metrics.generations import generations as repeated
from moesaic.metrics.memory import free_bytes
from moesaic.metrics.perplexity import perplexity
from moesaic.metrics.routing import trace
from moesaic.metrics.score import Score, score, scores_beside
from moesaic.metrics.size import model_size
from moesaic.metrics.speed import Speed, peak_memory, ratio, timed
from moesaic.metrics.tasks import measure_tasks, recovery_ratio, with_recovery
from moesaic.nn import ThresholdRouter
from moesaic.record import Record


def sweep(
    model: str,
    taus: Sequence[float],
    *,
    data: str = "",
    length: int | None = Evaluation.length,
    max_tokens: int | None = Evaluation.max_tokens,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    track: Track = silent,
) -> list[JSON]:
    """Perplexity and active ratio of a model at several thresholds of its gates (DSMoE, App. A).

    Args:
        model: a name for :func:`moesaic.io.source.resolve`.
        taus: the thresholds.
        data: as for :func:`moesaic.metrics.evaluate.evaluate`; so are the further arguments.

    Returns:
        for each threshold a dict of ``tau`` and the keys of
        :meth:`moesaic.metrics.score.Score.as_json`.

    Raises:
        MoesaicError: the model's routers have no threshold.
    """
    source = resolve(model)
    live = Whole.of(source, device, dtype).shape
    gates = [m for m in live.modules() if isinstance(m, ThresholdRouter)]
    if not gates:
        raise MoesaicError(f"{model} has no gates with a threshold; tau is for results of dsmoe.")
    if not taus or not all(0 <= tau < 1 for tau in taus):
        raise MoesaicError("tau takes thresholds of at least 0, below 1, such as 0.3,0.5,0.7.")
    tokens = measured_text(source, Evaluation(data=data, length=length, max_tokens=max_tokens))
    points = []
    for tau in taus:
        for gate in gates:
            gate.tau = tau
        points.append({"tau": tau, **score(live, tokens, _named(track, f"{tau:g}")).as_json()})
    return points


def speed_json(speed: Speed) -> JSON:
    """Medians under the names that programs rely on, and the spread.

    Returns:
        ``prefill_tokens_per_second``, ``decode_tokens_per_second`` and ``first_token_seconds``,
        and the range of each: ``prefill_spread``, ``decode_spread``, ``first_token_spread``.
    """
    return {
        "prefill_tokens_per_second": speed.prefill.median,
        "prefill_spread": list(speed.prefill.spread),
        "decode_tokens_per_second": speed.decode.median,
        "decode_spread": list(speed.decode.spread),
        "first_token_seconds": speed.first_token.median,
        "first_token_spread": list(speed.first_token.spread),
    }


def inspect(model: str) -> JSON:
    """The parts of a checkpoint, read from its config alone.

    Returns:
        ``model_type``, ``layers`` (of each ``kind``, ``experts``, ``top_k``, ``width`` and
        ``active_width``), ``total_parameters``, ``active_parameters``, ``active_ratio`` and
        ``router_parameters``.

    Raises:
        MoesaicError: there is no such model, or its architecture is unknown.
    """
    source = resolve(model)
    size = model_size(shape_of(source.config))
    return {
        "model_type": source.config.model_type,
        "layers": [
            {
                "kind": use.kind,
                "experts": use.experts,
                "top_k": use.top_k,
                "width": use.width,
                "active_width": use.active_width,
            }
            for use in size.layers
        ],
        "total_parameters": size.total_parameters,
        "active_parameters": size.active_parameters,
        "active_ratio": size.active_ratio,
        "router_parameters": size.router_parameters,
    }


@leaves_untouched
@torch.inference_mode()
def generate(
    model: Model, tokenizer: Tokenizer, prompt: str, new_tokens: int = 64, chat: bool = False
) -> str:
    """The greedy continuation of a prompt.

    Args:
        model: a live model.
        tokenizer: its own.
        prompt: text to continue.
        new_tokens: tokens to add at most.
        chat: put the prompt as a user's turn into the tokenizer's chat template.

    Raises:
        MoesaicError: the prompt is empty.
    """
    if chat:
        turns = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    ids = inputs["input_ids"].to(model.device)
    if ids.numel() == 0:
        raise MoesaicError("The prompt is empty.")
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=padding,
    )
    text: str = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return text


def measure(
    folder: Path,
    original: Source,
    comparisons: Mapping[str, Callable[[], Model]],
    settings: Evaluation,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    track: Track = silent,
    tokens: Tokens | None = None,
) -> JSON:
    """A saved result beside its original and comparisons: same text, one after another; speed.

    Original and result are held together if there is room for both, and timed in turn, round by
    round. Otherwise they are scored layer by layer from disk, and one is held at a time, to
    generate and to be timed; what even that has no room for is left out. The record says so.
    Comparisons are compared with the original token by token, too; it passes its layers once for
    all of them. Of several processes the first calls this, the others :func:`beside_original`.

    Args:
        folder: the result, as saved: what is measured is what a user will load.
        original: what it was made from.
        comparisons: other models by name, each built when its turn comes.
        settings: text, its length, and how speed is measured.
        device: where to compute.
        dtype: floating-point type; None for the checkpoint's own.
        track: shows progress.
        tokens: of :func:`measured_text`, where they are at hand.

    Returns:
        the fields of :attr:`moesaic.record.Record.measured`.

    Raises:
        MoesaicError: there is no such text, or too little of it.
    """
    device = own_device(device)
    dtype = working_type(original.config, dtype, device)
    where: JSON = {"device": device, "dtype": dtype}
    found = beside_original(folder, original, settings, **where, track=track, tokens=tokens)
    sources, together, tokens = found.sources, found.together, found.tokens
    scores, live = found.scores, found.live
    tokenizer = tokenizer_of(original, settings)
    alone = together or all(fit((source,), device, dtype) for source in sources.values())
    wanted = wanted_tasks(settings.tasks, settings.shots, settings.limit)
    generations: dict[str, str] = {}
    samples: list[JSON] = []
    active: dict[str, dict[str, float]] = {}
    loaders: dict[str, Callable[[], Model]] = {
        name: partial(source.load, device, dtype) for name, source in sources.items()
    }
    reference = Layerwise(original, device, dtype, keep=True)
    for name, load in (loaders | dict(comparisons)).items() if alone else ():
        run = live.pop(name, None)
        model = run.shape if isinstance(run, Whole) else load()
        if name in comparisons:
            shown = _named(track, name)
            scores[name], _ = scores_beside(Whole(model), reference, tokens, shown)
            if wanted:
                assert tokenizer is not None
                tasks = measure_tasks(Whole(model), tokenizer, wanted, settings.limit, shown)
                scores[name] = _with_tasks(scores[name], tasks, scores["original"].tasks)
        if tokenizer is not None and settings.generations:
            said = repeated(model, tokenizer, track=_named(track, name))
            scores[name] = replace(scores[name], generations=said)
        if tokenizer is not None:
            for _ in track((name,), f"Continuation, {name}", 1):
                generations[name] = generate(model, tokenizer, settings.prompt, settings.new_tokens)
                if name == "result":
                    samples = colour_samples(model, tokenizer)
                    active = activity(model, tokenizer, tokens.input_ids.shape[1])
        del model, run  # before the next one comes
    live.clear()
    record: JSON = {
        "evaluation": {
            "data": settings.data or "shipped",
            "length": tokens.input_ids.shape[1],
            "max_tokens": settings.max_tokens,
            "computed_in": str(dtype or original.config.dtype).removeprefix("torch."),
            "sources": [origin.as_json() for origin in tokens.origins],
            **({"tasks": settings.tasks} if wanted else {}),
            **({} if settings.limit is None else {"limit": settings.limit}),
            **({} if settings.shots is None else {"shots": settings.shots}),
            **({} if together and not settings.stream else {"layer_by_layer": True}),
        },
        "files": {name: source.checkpoint.nbytes() for name, source in sources.items()},
        "scores": {name: s.as_json() for name, s in scores.items()},
        "routing": {str(i): routing.as_json() for i, routing in scores["result"].routing.items()},
        **({"generation": {"prompt": settings.prompt, **generations}} if generations else {}),
        "samples": samples,
        **({"activity": active} if active else {}),
    }
    if settings.rounds and alone:
        room = (positions(original.config) or sys.maxsize) - NEW_TOKENS
        prompt = tokens.input_ids[:1, : max(2, min(512, room))]
        speeds = timed(loaders, together, prompt, NEW_TOKENS, settings.rounds, track)
        record["speed_interleaved"] = together
        record["speed"] = {
            name: speed_json(speeds[name])
            | {"peak_memory_bytes": memory(sources[name], prompt.shape[1], 8, device, dtype)}
            for name in track(("original", "result"), "Peak memory", 2)
        }
        ratios = {
            "prefill": ratio(speeds["result"].prefill, speeds["original"].prefill),
            "decode": ratio(speeds["result"].decode, speeds["original"].decode),
        }
        record["speed_ratio"] = {what: found.median for what, found in ratios.items()}
        record["speed_ratio"] |= {f"{w}_spread": list(r.spread) for w, r in ratios.items()}
    return record


@dataclass
class Measured:
    """A result beside its original, on the same text and the same questions."""

    sources: dict[str, Source]
    """Under ``original`` and ``result``."""
    together: bool
    """There was room for both."""
    tokens: Tokens
    scores: dict[str, Score]
    live: dict[str, Runner]
    """The models, loaded or to be read layer by layer."""


def beside_original(
    folder: Path,
    original: Source,
    settings: Evaluation,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    track: Track = silent,
    tokens: Tokens | None = None,
) -> Measured:
    """The scores of a saved result and of its original: text, and tasks.

    Several processes share the batches; all of them call this. The arguments are those of
    :func:`measure`.
    """
    give_back()  # of deciding, before two models are loaded
    device, shared = own_device(device), process()[1] > 1
    sources = {"original": original, "result": Source("result", folder)}
    together = all(gathered(fit(sources.values(), device, dtype)))
    whole = together and not settings.stream
    tokenizer = tokenizer_of(original, settings)
    wanted = wanted_tasks(settings.tasks, settings.shots, settings.limit)
    tokens = measured_text(original, settings) if tokens is None else tokens
    runs: dict[str, Runner] = {
        name: Whole.of(s, device, dtype) if whole else Layerwise(s, device, dtype)
        for name, s in track(sources.items(), "Loading models", len(sources))
    }
    ours, theirs = scores_beside(runs["result"], runs["original"], tokens, track, shared)
    if wanted:
        assert tokenizer is not None
        told = {
            name: measure_tasks(run, tokenizer, wanted, settings.limit, _named(track, name), shared)
            for name, run in runs.items()
        }
        theirs = replace(theirs, tasks=told["original"])
        ours = _with_tasks(ours, told["result"], told["original"])
    return Measured(sources, together, tokens, {"original": theirs, "result": ours}, runs)


def tokenizer_of(source: Source, settings: Evaluation) -> Tokenizer | None:
    """A model's tokenizer; None where it has none, and nothing that is asked for needs one.

    Raises:
        MoesaicError: it has none, and text, tasks or generations need it.
    """
    try:
        return source.tokenizer
    except MoesaicError:
        if needs_tokenizer(settings.data) or settings.tasks or settings.generations:
            raise
        return None


def measured_text(source: Source, settings: Evaluation) -> Tokens:
    """The windows that a model, and what is made of it, are measured on.

    Raises:
        MoesaicError: there is no such text, too little of it, or it is not for the model.
    """
    tokenizer = tokenizer_of(source, settings)
    most = settings.max_tokens
    tokens = evaluation_tokens(settings.data, tokenizer, settings.length, most, source.config)
    check_unseen(source, tokens, settings.data)
    return tokens


def check_unseen(source: Source, tokens: Tokens, data: object) -> None:
    """Refuse to measure a result of ours on rows that it was calibrated or trained on.

    Args:
        source: any model; only results of ours say what text made them.
        tokens: the text to measure on.
        data: its name, where it has one.

    Raises:
        MoesaicError: some row is in both.
    """
    file = placed(source.folder, RECORD)
    if not file.is_file():
        return
    try:
        record = Record.from_json(mapping_of(file))
        used = [Taken.of(told) for told in record.calibration.get("sources", ())]
        steps = [(METHODS[f"{step.verb}.{step.method}"], step.config) for step in record.steps]
        trained = [step[name] for of, step in steps for name in text_fields(of) if step.get(name)]
    except (ValueError, TypeError, AttributeError, KeyError, MoesaicError):
        return  # it is another version's, or damaged
    for theirs in (origin.taken for origin in tokens.origins):
        if not theirs.nobodys and any(theirs.meets(ours) for ours in used):
            raise MoesaicError(
                f"{theirs.source} is to be measured on, and {source.name} was calibrated on rows "
                "of it. Measure on another text, split or slice."
            )
    if isinstance(data, str):
        check_apart(trained, data)


def _with_tasks(of: Score, tasks: dict[str, JSON], before: Mapping[str, Values]) -> Score:
    """A score with its tasks' figures, beside the original's."""
    recovery = recovery_ratio(tasks, before)
    return replace(of, tasks=with_recovery(tasks, before), recovery=recovery)


NEW_TOKENS = 32
"""Tokens that speed is measured on, behind a prompt."""
ROOM = 1.25
"""Memory that models take when they run, over that of their weights."""


def fit(sources: Collection[Source], device: str, dtype: torch.dtype | None) -> bool:
    """Whether a device has room for all of these models at once."""
    types = ((source.config, working_type(source.config, dtype, device)) for source in sources)
    need = sum(sum(sizes_in(shape_of(config), held)) for config, held in types)
    return ROOM * need <= free_bytes(device)


def memory(
    source: Source, length: int, new_tokens: int, device: str, dtype: torch.dtype | None
) -> int:
    """Bytes at the peak of one prompt and some decoding, in a process of its own."""
    name = "auto" if dtype is None else str(dtype).removeprefix("torch.")
    return peak_memory(source.folder, length, new_tokens, device, name)


def _named(track: Track, name: str) -> Track:
    return lambda items, label, total=None: track(items, f"{label}, {name}", total)


def colour_samples(model: Model, tokenizer: Tokenizer, tokens: int = 160) -> list[JSON]:
    """The start of one document a domain, token by token, with the expert of each in every layer.

    Returns:
        of each document ``domain``, ``tokens`` (as text) and ``experts`` (by layer, one a token).
    """
    samples = []
    for domain in ("prose", "reference", "code"):
        ids = tokenizer(shipped_texts("evaluation", domain)[0], add_special_tokens=False)
        ids = torch.tensor(ids["input_ids"][:tokens])
        chosen = trace(model, ids)
        pieces = [tokenizer.decode([i]) for i in ids.tolist()]
        samples.append(
            {
                "domain": domain,
                "tokens": pieces,
                "experts": {str(layer): experts for layer, experts in chosen.items()},
            }
        )
    return samples


def activity(
    model: Model, tokenizer: Tokenizer, length: int, tokens: int = 2048
) -> dict[str, dict[str, float]]:
    """Mean experts that a token runs, by domain of the shipped evaluation text and by layer.

    Empty where that number is the same for every token.
    """
    if not any(isinstance(m, ThresholdRouter) for m in model.modules()):
        return {}
    found = {}
    for domain in DOMAINS:
        text = evaluation_tokens(domain, tokenizer, length, tokens)
        routing = perplexity(model, text).routing
        found[domain] = {str(i): r.calls for i, r in routing.items()}
    return found


def environment(device: str = "cpu") -> JSON:
    """Versions and machine, for every figure that is kept.

    Returns:
        ``python``, ``torch``, ``transformers``, ``machine``, ``processor``, ``vectors`` (the
        widest instructions that torch uses), ``threads``, ``device``.
    """
    import transformers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "processor": _processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor()
