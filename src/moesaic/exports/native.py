"""Native exports: checkpoints of known architectures; exact or refused.

A mixture whose layers are cut, condensed or dropped is fitted into its own architecture, which has
one size for all layers; carved models are written as experts (:mod:`moesaic.carving.as_experts`).
"""

from __future__ import annotations

import copy
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.auto import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from moesaic import per_layer_config, surgery
from moesaic.arch.dense import Arch
from moesaic.arch.lookup import base_arch
from moesaic.arch.mixture import MoEArch
from moesaic.data.text import evaluation_tokens, positions
from moesaic.errors import MoesaicError
from moesaic.exports import run_script
from moesaic.hub import write_config
from moesaic.io.checkpoint import ShardWriter, Value
from moesaic.io.models import path_of, skeleton_of
from moesaic.io.naming import language, leave_out
from moesaic.io.outputs import check_out, whole_folder
from moesaic.io.quantised import quantization_of
from moesaic.io.source import Source, resolve
from moesaic.io.trust import clean_tokenizer, copy_side_files
from moesaic.plan import Plan
from moesaic.plans import neurons
from moesaic.plans.base import KINDS, Header
from moesaic.plans.cut import CutLayer
from moesaic.types import JSON, Config, Values

# --- a decided export ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Export:
    """Form that a model will have, decided before anything is written."""

    config: Config
    write: Callable[[ShardWriter], None]
    costs: Values = field(default_factory=dict)
    """Neurons before and after padding, by name."""
    exact: bool = True
    """False if weights that should be one are only nearly one."""

    @property
    def model_type(self) -> str:
        return str(self.config.model_type)


def base_config(config: Config, arch: Arch) -> Config:
    """Return a converted config as its base's own."""
    plain = copy.deepcopy(config)
    per_layer_config.take_back(plain)
    config_class = CONFIG_MAPPING[arch.model_type]
    plain.__class__ = config_class
    plain.model_type = arch.model_type
    plain.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[config_class].__name__]
    for name in ("moesaic", "auto_map"):
        plain.__dict__.pop(name, None)
    leave_out(plain)
    return plain


def multiple_of_8(width: int) -> int:
    """Return the next multiple of 8: grouped matrix products need rows of whole 16 bytes.

    >>> multiple_of_8(250)
    256
    """
    return 8 * -(-width // 8)


def head_dim_of(config: Config) -> int:
    """Return the number of elements in one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


TOLERANCE = 1e-4
"""Largest difference of logits that rounding explains, relative to the largest logit."""
NEAR = 5e-2
"""Allowed difference as root mean squares, if several petals have nearly the right weight. A token
of which two petals are nearly tied may take the other one; with hundreds of petals some always are,
and any change in rounding does the same."""


def export_native(model: str, out: str | Path, target: str = "", overwrite: bool = False) -> JSON:
    """Write a converted model as a checkpoint that loads without this package.

    The export is loaded in plain transformers, in a process of its own, and its logits are
    compared with the source's in float32 before it gets its name.

    Args:
        model: a name for :func:`moesaic.io.source.resolve`.
        out: the folder to write.
        target: an architecture; empty for the one with the fewest active neurons.
        overwrite: replace ``out`` if it exists.

    Returns:
        ``out``, ``model_type``, ``exact``, the differences from :func:`verify`, and ``costs``.

    Raises:
        MoesaicError: no architecture holds the model; nothing is left at ``out``.
    """
    source = resolve(model)
    check_embedding(source)
    check_out(Path(out), overwrite, [model])
    export = decide(source, target)
    with whole_folder(Path(out), overwrite, [model]) as folder:
        write(source, export, folder)
        differences = verify(source, folder, export.exact)
    return {
        "out": str(out),
        "model_type": export.model_type,
        "exact": export.exact,
        **differences,
        "costs": dict(export.costs),
    }


def check_embedding(source: Source) -> None:
    """Refuse a checkpoint whose embedding is stored as the head only, where no engine looks for it.

    Raises:
        MoesaicError: names the tensor that is not there.
    """
    model = skeleton_of(source.config)
    name = f"{path_of(model, model.get_input_embeddings())}.weight"
    if name not in source.naming.in_memory.values():
        raise MoesaicError(
            f"{source.name} has no {name}, but a head that is the same matrix: other engines do "
            "not look for it there. Load and save the model in transformers, which writes both."
        )


def decide(source: Source, target: str = "") -> Export:
    """Return the architecture that holds a model, and the function to write it.

    Raises:
        MoesaicError: no architecture does; the message names what each lacks.
    """
    config = source.config
    if quantization_of(config):
        raise MoesaicError(
            "Quantised checkpoints are not exported; results of prune and slim are native as "
            "they are. Make the result with a dtype to export it."
        )
    arch, stacks = base_arch(config), surgery.headers_of(config)
    for header in (header for stack in stacks.values() for header in stack):
        obstacle = KINDS[header["kind"]].obstacle(header)
        if obstacle is not None:
            raise MoesaicError(obstacle)
    if isinstance(arch, MoEArch):
        if target not in ("", arch.model_type):
            raise MoesaicError(f"target {target!r}: a mixture is kept one, {arch.model_type}.")
        return _Reduced(source, arch, stacks).export()
    if source.beside:
        raise MoesaicError(f"{source.name} has parts beside text and is native as it is.")
    layers = [stacks[i][-1] if i in stacks else None for i in range(config.num_hidden_layers)]
    ways = [KINDS[header["kind"]].exporter(header) for header in layers if header]
    export: Callable[..., Export] = next(filter(None, ways), narrow_export)
    return export(source, arch, layers, target)


def write(source: Source, export: Export, folder: Path) -> None:
    """Write a decided export into an existing folder, unverified."""
    export.write(ShardWriter(folder))
    write_config(export.config, folder)
    copy_side_files(source.folder, folder)
    clean_tokenizer(source.folder, folder)


# --- is it the same model? -----------------------------------------------------------------------


def verify(source: Source, folder: Path, exact: bool = True) -> dict[str, float]:
    """Return differences of logits in float32 between the source and its export in plain
    transformers.

    The export is loaded in a process of its own.

    Returns:
        ``largest_difference``, relative to the largest logit; ``mean_difference``, the root mean
        square relative to that of the logits; ``same_next_token``, the share of tokens after which
        both predict the same.

    Raises:
        MoesaicError: the export does not load, or differs by more than rounding explains.
    """
    ids = _text(source, 128)
    with torch.inference_mode():
        expected = source.load(dtype=torch.float32)(ids).logits
    with tempfile.TemporaryDirectory(prefix="moesaic-") as place:
        ids_file, logits_file = Path(place) / "ids.safetensors", Path(place) / "logits.safetensors"
        save_file({"input_ids": ids}, ids_file)
        request = json.dumps([str(folder), str(ids_file), str(logits_file)])
        trouble = run_script("plain.py", request, HF_MODULES_CACHE=place)
        if trouble is not None:
            raise MoesaicError(f"The export does not load in plain transformers: {trouble}")
        logits = load_file(logits_file)["logits"]
    change = logits - expected
    largest = float(change.abs().max() / expected.abs().max())
    mean = float(change.norm() / expected.norm())
    if exact and not largest <= TOLERANCE:
        raise MoesaicError(
            f"The export's logits differ from the model's by {largest:.1e} of the largest, more "
            f"than rounding explains ({TOLERANCE:.0e}). Nothing was kept."
        )
    if not exact and not mean <= NEAR:
        raise MoesaicError(
            f"The export's logits differ from the model's by {mean:.1e} in root mean square, more "
            f"than weights that are nearly even explain ({NEAR:.0e}). Nothing was kept."
        )
    same = (logits.argmax(-1) == expected.argmax(-1)).float().mean().item()
    return {"largest_difference": largest, "mean_difference": mean, "same_next_token": same}


def _text(source: Source, tokens: int) -> Tensor:
    """Return real text (1, L), or random tokens without a tokenizer."""
    length = min(tokens, positions(source.config) or tokens)
    try:
        return evaluation_tokens("", source.tokenizer, length, length).input_ids
    except MoesaicError:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(source.config.vocab_size, (1, length), generator=generator)


# --- layers that are cut, condensed or dropped ---------------------------------------------------


def narrow_export(
    source: Source, arch: Arch, headers: Sequence[Header | None], target: str
) -> Export:
    """Return the export of narrower dense layers: one intermediate size, padded with zeros.

    Args:
        source: the reduced model, which is dense.
        arch: its architecture.
        headers: headers by layer.
        target: the base's own architecture, or empty.

    Raises:
        MoesaicError: the target is another architecture.
    """
    if target not in ("", arch.model_type):
        raise MoesaicError(f"Without experts it is exported as {arch.model_type}, not {target}.")
    shape = surgery.base_shape(skeleton_of(source.config), arch)
    config = base_config(source.config, arch)
    config.intermediate_size = width = max(shape.widths)
    layers = {i: _widened(n, width) for i, n in enumerate(shape.widths) if n < width}
    costs = [sum(shape.widths), len(shape.widths) * width]

    def write(writer: ShardWriter) -> None:
        plan = Plan("export", shape, layers)
        writer.write(surgery.rewrite(source.naming, arch, plan, keep=lambda _: True))

    return Export(config, write, {"active_neurons": costs, "stored_neurons": costs})


def _widened(before: int, width: int) -> CutLayer:
    """Return the plan of a dense layer that is padded with zero neurons."""
    return CutLayer(None, neurons.filled_up(torch.arange(before), width)[None], before)


class _Reduced:
    """Reduced mixture that is fitted into its architecture, which has one size for all layers.

    Args:
        source: the reduced model.
        arch: its architecture.
        stacks: headers by converted layer.
    """

    def __init__(
        self, source: Source, arch: MoEArch, stacks: Mapping[int, Sequence[Header]]
    ) -> None:
        self.source, self.arch = source, arch
        self.config = base_config(source.config, arch)
        model = skeleton_of(source.config)
        self.layers = arch.layers(model)
        self.shape = surgery.base_shape(model, arch)
        drop = {i for i, stack in stacks.items() if any(KINDS[h["kind"]].removes(h) for h in stack)}
        kept = [i for i in range(len(self.shape.widths)) if i not in drop]
        self.numbers = {old: new for new, old in enumerate(kept)}
        """New index of each kept layer, by old index."""
        self.counts = {i: count for i, count in enumerate(self.shape.experts) if count}
        """Number of experts of the layers that route."""
        self.dense = {i: self.shape.widths[i] for i in kept if i not in self.counts}
        self.condensed = stacks.keys() - drop - self.counts.keys()
        self.width = max(self.dense.values(), default=0) or 8  # Layer Drop leaves no neuron
        self.plans: dict[int, CutLayer] = {}
        self.costs: JSON = {}

    def export(self) -> Export:
        """Return the export with one number of experts and one dense width, padded if exact.

        Raises:
            MoesaicError: the architecture cannot hold the model.
        """
        if self.counts:
            self.widen()
            self.fill_up()
        self.drop()
        return Export(self.holding(), self.write, self.costs)

    def _configure(self, changes: Values) -> None:
        for name, value in changes.items():
            setattr(self.config, name, value)

    def widen(self) -> None:
        """Pad experts and shared paths of several widths with zero neurons."""
        arch, views = self.arch, {i: self.arch.mixture(self.layers[i]) for i in self.counts}
        wide = max(view.width for view in views.values())
        room = arch.shared_room(max(view.shared_width for view in views.values()), wide)
        self._configure(arch.with_width(wide))
        self._configure((arch.with_shared(room, wide) if room else None) or {})
        for i, view in views.items():
            if (view.width, view.shared_width) != (wide, room):
                order_W = neurons.filled_up(torch.arange(view.width), wide)
                order_S = neurons.filled_up(torch.arange(view.shared_width), room) if room else None
                self.plans[i] = CutLayer(
                    torch.arange(view.count),
                    order_W.repeat(view.count, 1),
                    view.width,
                    shared_S=order_S,
                )
        if self.plans:
            before = sum(view.count * view.width for view in views.values())
            self.costs["expert_neurons"] = [before, sum(self.counts.values()) * wide]

    def fill_up(self) -> None:
        """Give all layers that route one number of experts, by adding ones that are never chosen.

        Raises:
            MoesaicError: the router cannot keep an expert from being chosen.
        """
        counts, groups = self.counts, self.arch.group_count(self.config)
        count = groups * -(-max(counts.values()) // groups)
        if set(counts.values()) != {count}:
            if self.arch.never is None:
                raise MoesaicError(
                    f"Its layers have {surgery.spread(counts.values())} experts and would need "
                    f"{count}: {self.arch.model_type} has no router that never chooses an expert. "
                    "Prune to one legal count."
                )
            for i, n in counts.items():
                plan = self.plans.get(i, CutLayer(torch.arange(n)))
                self.plans[i] = plan.padded(count, groups)
        self._configure({self.arch.count: count})
        self.costs["experts"] = [sum(counts.values()), count * len(counts)]

    def drop(self) -> None:
        """Remove dropped layers from the config, and set which of the others are dense.

        Raises:
            MoesaicError: the architecture cannot have just these dense layers.
        """
        dropped = len(self.numbers) < len(self.shape.widths)
        if dropped:
            shorten(self.config, [*self.numbers])
        if self.condensed or (dropped and self.arch.dense_layers):
            mix = self.arch.dense_at(self.config, {self.numbers[i] for i in self.dense})
            if mix is None:
                raise MoesaicError(
                    f"{self.arch.model_type} cannot have just these dense layers: "
                    f"{surgery.spread(self.dense)}; condense other candidates."
                )
            self._configure(mix)

    def holding(self) -> Config:
        """Pad dense layers to the width of the widest, and return a config whose layers have these
        sizes, of several candidates for that width.

        Raises:
            MoesaicError: no candidate does.
        """
        configs = [self.config]
        if self.condensed:
            narrow = {i: n for i, n in self.dense.items() if n < self.width}
            self.plans |= {i: _widened(n, self.width) for i, n in narrow.items()}
            self.costs["dense_neurons"] = [sum(self.dense.values()), self.width * len(self.dense)]
            configs = [copy.deepcopy(self.config) for _ in self.arch.dense_sizes(self.config)]
            for trial, name in zip(configs, self.arch.dense_sizes(self.config), strict=True):
                setattr(trial, name, self.width)
        layers = {i: self.layers[i] for i in self.numbers}
        for i, plan in self.plans.items():
            layers[i] = surgery.converted_skeleton(layers[i], self.arch, plan)
        shapes = [*map(surgery.sizes, layers.values())]
        for config in configs:
            if [*map(surgery.sizes, self.arch.layers(skeleton_of(config)))] == shapes:
                return config
        raise MoesaicError(
            f"The class of {self.arch.model_type} has no layers of these sizes: "
            f"{surgery.spread(self.dense.values())} neurons where they are dense, and experts as "
            "they are."
        )

    def write(self, writer: ShardWriter) -> None:
        """Write the model, padded and with new layer numbers."""
        model, naming = skeleton_of(self.source.config), self.source.naming
        starts = {
            disk.partition(f".{number[1]}.")[0] + "."
            for disk, name in naming.in_memory.items()
            if (number := re.match(rf"{re.escape(self.arch.layers_path)}\.(\d+)\.", name))
        }
        numbered = re.compile(rf"^({'|'.join(map(re.escape, starts))})(\d+)\.(.*)")

        def renumbered() -> Iterator[tuple[str, Value]]:
            keep = surgery.kept_names(model, mtp=False, beside=False)
            plan = Plan("export", self.shape, self.plans)
            for name, value in surgery.rewrite(naming, self.arch, plan, keep):
                if (layer := numbered.match(name)) is not None:
                    start, old, rest = layer[1], int(layer[2]), layer[3]
                    if old not in self.numbers:
                        continue
                    name = f"{start}{self.numbers[old]}.{rest}"
                yield language(name) if self.source.beside else name, value

        writer.write(renumbered())


def shorten(config: Config, kept: Sequence[int]) -> None:
    """Restrict a config to the kept layers, including lists with an entry per layer."""
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(config, name, [value[i] for i in kept])
    config.num_hidden_layers = len(kept)
