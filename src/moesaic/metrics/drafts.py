"""Drafts of layers that predict further tokens: how many of them greedy decoding accepts.

Such a layer (multi-token prediction: DeepSeek-V3, arXiv 2412.19437, section 2.2) is a model of one
decoder layer. What enters it is made of h_t, the hidden state behind the model's last norm, and of
token t+1: join([norm(embedding of t+1); norm(h_t)]). What leaves it becomes, through a last norm
and a head, a draft of token t+2. A further layer takes the one before's hidden state, and t+2.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.arch.dense import PREFIX, Arch
from moesaic.arch.lookup import base_arch, plain_config
from moesaic.data.text import Tokens
from moesaic.errors import MoesaicError
from moesaic.foreign import JSON, Config, Model, Track, silent
from moesaic.io.checkpoint import cast, narrowed, shape_of, skeleton
from moesaic.io.prediction import Parts, parts_of, predicting_layers, predicts
from moesaic.io.source import Source
from moesaic.metrics.forward import BATCH, Runner, all_shares, own_share
from moesaic.nn.phase import set_mode
from moesaic.surgery import sizes


class Drafter(nn.Module):
    """A layer that predicts a further token, its embedding and head included.

    Args:
        model: a causal language model of one decoder layer, see :func:`one_layer`.
        arch: its architecture.
    """

    def __init__(self, model: Model, arch: Arch) -> None:
        super().__init__()
        embedding = model.get_input_embeddings().weight
        width, norm = embedding.shape[1], _around(model, arch).get_submodule("norm")
        self.model = model
        self.embedding_norm, self.hidden_norm = copy.deepcopy(norm), copy.deepcopy(norm)
        place = {"device": embedding.device, "dtype": embedding.dtype}
        self.join = nn.Linear(2 * width, width, bias=False, **place)

    def forward(
        self, hidden_BLD: Tensor, ids_BL: Tensor, mask_BL: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Hidden states for a further layer (B, L, D), and logits of the drafts (B, L, V).

        Args:
            hidden_BLD: behind the last norm of the model, or of the layer before this one.
            ids_BL: the tokens behind those that the hidden states are of.
            mask_BL: False on padding.
        """
        embedded = self.embedding_norm(self.model.get_input_embeddings()(ids_BL))
        joined = self.join(torch.cat([embedded, self.hidden_norm(hidden_BLD)], -1))
        out = self.model.base_model(inputs_embeds=joined, attention_mask=mask_BL, use_cache=False)
        return out[0], self.model.get_output_embeddings()(out[0])


def _around(model: Model, arch: Arch) -> nn.Module:
    """The module that holds a model's decoder layers."""
    return model.get_submodule(arch.layers_path.rpartition(".")[0])


def one_layer(model: Model, arch: Arch, index: int) -> Model:
    """Leave a model one of its decoder layers, in place."""
    leaf, config = arch.layers_path.rpartition(".")[2], model.config
    setattr(_around(model, arch), leaf, nn.ModuleList([arch.layers(model)[index]]))
    types = getattr(config, "layer_types", None)
    config.num_hidden_layers = 1
    if types:
        config.layer_types = [types[index]]
    return model


class Drafts:
    """The layers of a checkpoint that predict further tokens; their weights are not read yet.

    Args:
        source: the checkpoint.
        device: where they will compute.
        dtype: floating-point type; None for the checkpoint's own.

    Raises:
        MoesaicError: it has none, a weight of theirs is missing, or they are like no decoder layer.
    """

    def __init__(
        self, source: Source, device: str = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        config, self.device = source.config, device
        self.arch = arch = base_arch(config)
        self.naming = source.naming
        self._held = {*self.naming.in_memory.values()}
        blocks = parts_of(self._held, arch.layers_path, config.num_hidden_layers)
        self._check_count(source.name, config, len(blocks))
        self.layers: list[tuple[Drafter, Mapping[str, str]]] = []
        """Each without values, and by its tensors the checkpoint's, by their names in memory."""
        for parts in blocks:
            form, index = self._like(parts, config, source.name)
            model = one_layer(skeleton(copy.deepcopy(form), dtype), arch, index)
            drafter = Drafter(model, arch)
            self.layers.append((drafter, {n: self._stored(n, parts) for n in drafter.state_dict()}))

    def _check_count(self, name: str, config: Config, count: int) -> None:
        """Refuse a checkpoint that has no such layers, or fewer than its config counts."""
        counted = predicting_layers(config)
        if count and count >= counted:
            return
        others = sorted(n for n in self._held if predicts(n, config.num_hidden_layers))
        if counted and not others:
            problem = f"config.json counts {counted} of them, and there are no weights of any"
        elif count:
            problem = f"config.json counts {counted} of them, and there are weights of {count}"
        elif others:
            problem = f"they are named in no way that is known ({others[0]})"
        else:
            problem = "there are none"
        raise MoesaicError(f"{name}: layers that predict further tokens cannot be run: {problem}.")

    def _like(self, parts: Parts, config: Config, name: str) -> tuple[Config, int]:
        """The config of a model that has a decoder layer like one of these, and its number."""
        start = parts.layer
        inside = [n for n in self._held if n.startswith(start)]
        shapes = {n.removeprefix(start): self.naming.shape(n) for n in inside}
        for form in _forms(config, self.arch):
            for i, layer in reversed([*enumerate(self.arch.layers(shape_of(form)))]):
                if all(shapes.get(n) == shape for n, shape in sizes(layer).items()):
                    return form, i
        raise MoesaicError(
            f"{name}: {start.rstrip('.')}, which predicts further tokens, has the tensors of none "
            "of the model's decoder layers, so it cannot be run."
        )

    def _stored(self, name: str, parts: Parts) -> str:
        """The tensor of the checkpoint that is one of a :class:`Drafter`'s.

        Raises:
            MoesaicError: it is not there.
        """
        around = self.arch.layers_path.rpartition(".")[0]
        starts = {
            f"model.{self.arch.layers_path}.0.": (parts.layer,),
            f"model.{around}.norm.": (parts.norm, f"{around}.norm."),
            f"model.{around}.embed_tokens.": (parts.embedding, f"{around}.embed_tokens."),
            "model.lm_head.": (parts.head, "lm_head.", f"{around}.embed_tokens."),
            "embedding_norm.": (parts.embedding_norm,),
            "hidden_norm.": (parts.hidden_norm,),
            "join.": (parts.join,),
        }
        start = next(start for start in starts if name.startswith(start))
        likely = [place + name.removeprefix(start) for place in starts[start]]
        for place in likely:
            if place in self._held:
                return place
        raise MoesaicError(
            f"{self.naming.checkpoint.folder} has no tensor {likely[0]!r}, of a layer that "
            "predicts further tokens."
        )

    def opened(self, like: Model) -> Iterator[Drafter]:
        """The layers, ready to run.

        Args:
            like: the model itself, whose embedding and head are used where they are loaded.
        """
        loaded = {n: t for n, t in like.state_dict().items() if not t.is_meta}
        for drafter, names in self.layers:
            type_of = narrowed(drafter.model)
            state = {}
            for name, place in names.items():
                to = partial(cast, dtype=type_of(name.removeprefix("model.")))
                read = loaded[place] if place in loaded else self.naming.read(place, to)
                state[name] = read.to(self.device)
            drafter.load_state_dict(state, assign=True)
            for buffer in drafter.buffers():
                buffer.data = buffer.data.to(self.device)
            yield drafter.eval()

    @torch.no_grad()
    def accepted(
        self, run: Runner, tokens: Tokens, track: Track = silent, shared: bool = False
    ) -> JSON:
        """The share of their drafts that greedy decoding accepts, on a text.

        Everything reads the text itself: a layer's draft of a token is accepted where it is what
        the model thinks most probable there, both behind the same tokens. So of the first layer it
        is what speculative decoding accepts of one draft; of a further one, where all drafts
        before its own were the text's tokens.

        Args:
            run: the model.
            tokens: the windows.
            track: shows progress.
            shared: several processes share the batches, and all of them call this.

        Returns:
            ``acceptance``, a share for each layer; ``tokens``, drafts of the first that were
            looked at.

        Raises:
            MoesaicError: the windows are too short for a draft.
        """
        drafters = [*self.opened(run.shape)]
        counts = torch.zeros(len(drafters), 2, dtype=torch.int64)
        hidden: list[Tensor] = []
        head = run.shape.get_output_embeddings()
        batches = own_share(list(tokens.batches(BATCH)), shared)
        with head.register_forward_pre_hook(lambda _, args: hidden.append(args[0])):
            for logits, batch in run.run(batches, track, "Drafts").logits:
                counts += self._counted(drafters, hidden.pop(), logits.argmax(-1), batch)
        total = torch.stack(all_shares([counts], shared)).sum(0)
        if not total[:, 1].all():
            raise MoesaicError(
                "The windows of text are too short for drafts; pass a greater length."
            )
        share = (total[:, 0] / total[:, 1]).tolist()
        return {"acceptance": share, "tokens": int(total[0, 1])}

    def _counted(
        self, drafters: list[Drafter], hidden_BLD: Tensor, greedy_BL: Tensor, batch: Tokens
    ) -> Tensor:
        """Of each layer the drafts that are accepted, and all, int64 (layers, 2)."""
        ids_BL, real_BL = batch.input_ids.to(self.device), batch.real.to(self.device)
        mask_BL = None if batch.attention_mask is None else real_BL
        counts = []
        for depth, drafter in enumerate(drafters, 1):
            with set_mode(drafter, "always"):
                next_BL = F.pad(ids_BL[:, depth:], (0, depth))
                hidden_BLD, drafted = drafter(hidden_BLD, next_BL, mask_BL)
            same = drafted.argmax(-1)[:, :-depth] == greedy_BL[:, depth:]
            both = real_BL[:, depth:] & real_BL[:, :-depth]
            counts.append(torch.stack([(same & both).sum(), both.sum()]))
        return torch.stack(counts).cpu()


def _forms(config: Config, arch: Arch) -> Iterator[Config]:
    """A model's config, that of its base, and the latter where no layer is dense.

    Layers that predict further tokens stay as they were where nothing is decided about them.
    """
    yield config
    base = config.model_type.removeprefix(PREFIX)
    plain = plain_config(config, base)
    yield plain
    if changes := arch.dense_at(plain, ()):
        plain = copy.deepcopy(plain)
        for name, value in changes.items():
            setattr(plain, name, value)
        yield plain
