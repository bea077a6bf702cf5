"""Models by name: a folder, a GGUF file, a model that ships, a hub id; whole or only headers.

A file's header names every tensor, its type and its shape. Converted by the code that converts
tensors with values, on the meta device, it is the header of the result: so the bytes of a result's
files are known before they are written.
"""

from __future__ import annotations

import copy
import errno
import logging
import re
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property, partial
from glob import escape
from importlib.resources import files
from pathlib import Path
from textwrap import shorten

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.models.auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)

from moesaic.errors import FULL, MoesaicError, is_panic, with_causes
from moesaic.io.checkpoint import (
    FOREIGN,
    INDEX_NAME,
    PICKLED,
    SINGLE_NAME,
    TYPES,
    WEIGHTS,
    Checkpoint,
    ShardWriter,
    check_finite,
    first_file,
    shards,
    write_shard,
)
from moesaic.io.gguf import folder_of, packaged_file
from moesaic.io.models import path_of, predicts_tokens, skeleton_of
from moesaic.io.names import (
    FOLDER,
    NAMES,
    PACKAGED,
    PLAN,
    READ,
    RECORD,
    SHIPPED,
    SIDE_FILES,
    TOKENIZER_FILES,
    check_name,
    our_path,
    without_slash,
)
from moesaic.io.naming import Naming, is_mtp, language, read_as
from moesaic.io.quantised import LazyWeight, QuantisedCheckpoint, open_checkpoint, quantization_of
from moesaic.io.trust import (
    NEEDS_CODE,
    brings_code,
    check_adapter,
    check_config,
    check_counts,
    check_fetched,
    check_growth,
    check_links,
    copy_side_files,
    mapping_of,
    pretrained,
    reading,
)
from moesaic.types import JSON, Config, MadeModel, Model, Tokenizer, Values, expand_home

SMALL = ("*.json", f"{FOLDER}/*.json", *SIDE_FILES)
"""Name patterns of a hub repository's files that are read beside its weights."""


@dataclass(frozen=True)
class Source:
    """Checkpoint folder on this machine, with the name by which it was requested."""

    name: str
    folder: Path
    file: Path | None = None
    """GGUF file that the folder was unpacked from."""
    headers_only: bool = False
    """True if headers and small files are read, and no weight: tensors are on the meta device."""

    @property
    def nbytes(self) -> int:
        """Number of bytes of the weights as stored; of a GGUF file those of the file."""
        return self.file.stat().st_size if self.file else self.checkpoint.nbytes()

    @property
    def config(self) -> Config:
        """Config of the language model, the only part that is converted.

        Raises:
            MoesaicError: there is none, or transformers cannot use it.
        """
        return self._configs[1]

    @property
    def beside(self) -> bool:
        """True if the checkpoint has parts beside a language model, such as a vision tower."""
        config, text_config = self._configs
        return config is not text_config

    @cached_property
    def _configs(self) -> tuple[Config, Config]:
        """Config of the whole model, and that of its language model."""
        check_links(self.folder)
        check_adapter({file.name for file in self.folder.iterdir()}, self.folder)
        if not (self.folder / "config.json").is_file():
            raise MoesaicError(f"{self.folder} has no config.json; is it a model folder?")
        plain = mapping_of(self.folder / "config.json")
        check_config(plain, self.folder)
        # transformers raises anything over a config that is odd
        with reading(f"{self.name}: config.json", "", "cannot be used", (Exception,)):
            check_counts(plain)  # before lists of so many layers are made
            config: Config = pretrained(AutoConfig, self.folder)
            if not getattr(config, "return_dict", True):
                raise ValueError("return_dict is false: transformers runs no such model")
            layers = config.get_text_config().num_hidden_layers
            if layers <= 0:
                raise ValueError(f"num_hidden_layers is {layers}")
            check_counts(config.to_dict())
        if getattr(config, "quantization_config", None) == {}:  # transformers refuses an empty one
            del config.quantization_config
        text = language_model(config)
        if text is config:
            self._check_names(config)
            if getattr(config, "tie_word_embeddings", False) and self._heads_differ(config):
                config.tie_word_embeddings = False
        else:  # a whole's own word may be a default that its weights belie
            names = map(language, self.checkpoint.names())
            text.tie_word_embeddings = "lm_head.weight" not in names
            self._check_parts(config, text)
        if text.dtype is None and self._stored_names:  # gpt-oss's names none
            text.dtype = self.checkpoint.dtype
        return config, text

    def _check_names(self, config: Config) -> None:
        """Refuse tensors named as parts of a larger model, where transformers would find none."""
        odd = [name for name in self._stored_names if language(name) != name]
        plain = config.get_text_config() is config and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        if not (odd and plain):
            return
        names = {*skeleton_of(config).state_dict()}
        own = {*read_as(config.model_type, odd).values(), *odd}
        if not names & {*own, *(f"model.{name}" for name in own)}:
            raise MoesaicError(
                f"{self.name}: {odd[0]} and others are named as parts of a larger model, and "
                f"config.json describes only a {config.model_type}, of which transformers would "
                "find none of them. Rename the tensors, or give the larger model's config.json."
            )

    def _check_parts(self, config: Config, text: Config) -> None:
        """Refuse a multimodal model if names of its language model's tensors are not known."""
        model = skeleton_of(text)
        embedding = f"{path_of(model, model.get_input_embeddings())}.weight"
        naming = Naming(self.checkpoint, text.model_type, model.state_dict())
        if embedding not in naming.in_memory.values():
            raise MoesaicError(
                f"{self.name}: tensors of a {config.model_type}'s language model have names that "
                f"are not read: {embedding} is none of {_some(naming.in_memory)}."
            )

    def _heads_differ(self, config: Config) -> bool:
        """Return True if head and embedding are both stored, with different values.

        transformers then unties them, whatever the config's value is.
        """
        kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        ties = getattr(kind, "_tied_weights_keys", None)
        in_memory = read_as(config.model_type, self._stored_names)
        kept = {name: stored for stored, name in in_memory.items()}
        for pair in ties.items() if isinstance(ties, dict) else ():
            both = [kept.get(name, kept.get(name.removeprefix("model."))) for name in pair]
            if all(both):
                own = open_checkpoint(self.folder)  # a dry run's has no values
                return not torch.equal(*(own.tensor(str(name)) for name in both))
        return False

    @property
    def _stored_names(self) -> list[str]:
        """Names of the tensors on disk; empty if there is only a config."""
        has_weights = any((self.folder / name).is_file() for name in (INDEX_NAME, SINGLE_NAME))
        return self.checkpoint.names() if has_weights else []

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """Weights of the folder, to be read one by one.

        Raises:
            MoesaicError: there are none, or the folder's generation settings cannot be used.
        """
        check_links(self.folder)
        if (settings := self.folder / GENERATION_CONFIG_NAME).is_file():
            with reading(settings, "Correct it, or remove it.", "cannot be used", (Exception,)):
                mapping_of(settings)
                GenerationConfig.from_pretrained(self.folder)
        checkpoint = open_checkpoint(self.folder)
        checkpoint.headers_only = self.headers_only
        return checkpoint

    @cached_property
    def naming(self) -> Naming:
        """Names of the tensors, on disk and in memory."""
        return Naming(
            self.checkpoint, self.config.model_type, skeleton_of(self.config).state_dict()
        )

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the weights; empty if there are none."""
        return "" if self.headers_only else self.checkpoint.fingerprint

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer in the folder.

        Raises:
            MoesaicError: there is none, or the folder is no model.
        """
        _ = self.config  # which names what is wrong with the folder itself
        if not has_tokenizer(self.folder):
            raise MoesaicError(
                f"{self.name} has no tokenizer files: save them there too "
                "(tokenizer.save_pretrained), or give token ids in a .safetensors file."
            )
        try:
            tokenizer: Tokenizer = pretrained(AutoTokenizer, self.folder)
            check_growth(tokenizer)
            if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
                raise ValueError("its vocabulary is in no file")  # made up for the architecture
            tokenizer.decode(tokenizer("a", verbose=False)["input_ids"])  # settings of wrong types
        except BaseException as error:  # tokenizers raises anything over a file that is odd
            if not (isinstance(error, Exception) or is_panic(error)):
                raise
            reason = NEEDS_CODE if brings_code(self.folder) else " ".join(str(error).split())
            raise MoesaicError(f"{self.name} has no usable tokenizer: {reason:.300}") from error
        return tokenizer

    def load(
        self,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        device_map: str | JSON | None = None,
    ) -> Model:
        """Load the model, ready to run.

        Args:
            device: where it is put.
            dtype: floating-point type; None for the checkpoint's own.
            device_map: devices of its parts instead, as ``from_pretrained`` takes them.

        Raises:
            MoesaicError: a weight is missing or of another shape, or one of our own result's has
                no place in the model.
        """
        _ = self.config, self.checkpoint  # a damaged file is reported before anything is loaded
        with _silent():
            try:
                model, info = self._pretrained({"dtype": dtype or "auto", "device_map": device_map})
            except RuntimeError:  # transformers cannot assemble a tensor, and does not name it
                self.naming.check(skeleton_of(self.config))
                raise
        self.checkpoint.check_unchanged()
        count = model.config.get_text_config().num_hidden_layers
        ours = any(our_path(self.folder, name).is_file() for name in (PLAN, RECORD))
        check_loaded(info, self.name, count, whole=ours and not self.beside)
        for weight, tensor in model.state_dict().items():
            if not tensor.is_meta:  # those that wait on disk are seen when they are read
                check_finite(weight, tensor)
        return (model if device_map is not None else model.to(device)).eval()

    def _pretrained(self, arguments: JSON) -> tuple[Model, Values]:
        """Load as ``from_pretrained`` does, and dequantise weights."""
        checkpoint = self.checkpoint
        # sizes that do not fit are refused by us
        options = {**arguments, "output_loading_info": True, "ignore_mismatched_sizes": True}
        if not (isinstance(checkpoint, QuantisedCheckpoint) or self.beside):
            own: JSON = {"config": copy.deepcopy(self.config), "use_safetensors": True}
            return pretrained(AutoModelForCausalLM, self.folder, **own, **options)
        config = copy.deepcopy(self.config)
        if quantization_of(config):
            del config.quantization_config
        names = skeleton_of(config).state_dict()
        named = Naming(checkpoint, config.model_type, names).in_memory
        expected = names if self.beside else named.values()
        weights = {
            language(n): LazyWeight(checkpoint, n) for n, name in named.items() if name in expected
        }
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model, info = kind.from_pretrained(None, config=config, state_dict=weights, **options)
        if (self.folder / GENERATION_CONFIG_NAME).is_file():
            model.generation_config = GenerationConfig.from_pretrained(self.folder)
        return model, info


@contextmanager
def _silent() -> Iterator[None]:
    """Context in which transformers draws no bars and prints nothing about missing weights."""
    logger, bars = logging.getLogger("transformers.modeling_utils"), is_progress_bar_enabled()
    before = logger.disabled
    logger.disabled = True  # a level would make it speak of sharding
    disable_progress_bar()
    try:
        yield
    finally:
        logger.disabled = before
        if bars:
            enable_progress_bar()


def language_model(config: Config) -> Config:
    """Return the config of a model's language model, if that can be loaded as a model of its own.

    Otherwise, and if the model has no other parts, return the config itself.
    """
    text: Config = getattr(config, "text_config", None)
    if not predicts_tokens(getattr(text, "model_type", "")):  # some have a plain mapping there
        return config
    for name in ("quantization_config", "dtype"):  # stated once, for the whole model
        if getattr(text, name, None) is None and getattr(config, name, None) is not None:
            setattr(text, name, getattr(config, name))
    return text


def check_loaded(info: Values, name: str, layers: int, whole: bool) -> None:
    """Refuse a model of which some weights are random, or that was not read whole.

    Args:
        info: as ``from_pretrained(..., output_loading_info=True)`` returns it.
        name: of the model, for messages.
        layers: number of its decoder layers; weights of later ones may be left over.
        whole: refuse weights of the checkpoint that the model has no place for, as for our own
            results; otherwise print a warning.

    Raises:
        MoesaicError: names some of the weights.
    """
    unplaced = [key for key in info["unexpected_keys"] if not is_mtp(str(key), layers)]
    info = {**info, "unexpected_keys": unplaced}
    kinds = {"missing_keys": "missing", "mismatched_keys": "of another shape than config.json says"}
    if whole:
        kinds["unexpected_keys"] = "left over"
    for key, words in kinds.items():
        if info[key]:
            raise MoesaicError(
                f"{name} cannot be loaded: weights are {words}: {_some(info[key])}. The checkpoint "
                "is damaged, or was written by another version."
            )
    warn_of_unplaced(name, unplaced)


def warn_of_unplaced(name: str, unplaced: Collection[str | tuple[str, ...]]) -> None:
    """Warn of weights of a checkpoint that its model has no place for."""
    if unplaced:
        logging.getLogger(__name__).warning(
            "%s: weights that its model has no place for are left out: %s", name, _some(unplaced)
        )


def _some(keys: Collection[str | tuple[str, ...]]) -> str:
    """Return a few names in words, and how many there are.

    >>> _some(["d", "c", "b", "a"])
    'a, b, c (4 in all)'
    """
    names = sorted(str(key if isinstance(key, str) else next(iter(key))) for key in keys)
    more = f" ({len(names)} in all)" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def resolve(name: str, revision: str | None = None, token: str | bool | None = None) -> Source:
    """Find a model.

    Args:
        name: a folder, a GGUF file, a model that ships, or a hub id.
        revision: of a hub id a branch, tag or commit; None for the default one.
        token: of the hub; None for the one that HF_TOKEN or ``hf auth login`` gives.

    Raises:
        MoesaicError: there is no such model, or the hub cannot be reached.
    """
    check_name(name)
    path = Path(expand_home(name))
    if path.is_dir():
        return Source(name, path)
    name = without_slash(name)
    if name in PACKAGED:
        file = packaged_file(name)
        return Source(name, folder_of(file), file)
    if name in SHIPPED:
        return Source(name, Path(str(files("moesaic").joinpath(f"assets/models/{name}"))))
    if path.suffix.lower() == ".gguf":
        check_fetched(path)
        return Source(name, folder_of(path), path)
    return Source(name, from_hub(name, revision, token)[0])


PATIENCE = 60.0
"""Seconds that the hub may take to answer."""
_COMMITS = dict[tuple[str, str, str | None], str]()
"""Commits that this process read, by endpoint, repository and revision."""


def from_hub(
    name: str, revision: str | None = None, token: str | bool | None = None, whole: bool = True
) -> tuple[Path, list[str]]:
    """Fetch the files of a model that transformers reads.

    Without a connection only the cache is used. A branch that moves while this process runs is read
    at the commit of its first use.

    Args:
        name: of the repository.
        revision: a branch, tag or commit; None for the default one.
        token: of the hub; None for the one that is stored on this machine.
        whole: False to fetch no weights.

    Returns:
        the folder in the hub's cache, and the names of the files of weights.

    Raises:
        MoesaicError: there is no such repository, it holds no such model, or the hub cannot be
            reached and the cache has not all.
    """
    from huggingface_hub import HfApi, snapshot_download

    hub = HfApi(token=token)
    asked = hub.endpoint, name, revision
    revision = _COMMITS.get(asked, revision)

    def get(files: Iterable[str], because: Exception | None = None) -> Path:
        only: JSON = {"allow_patterns": [*map(escape, files)]}
        only["local_files_only"] = because is not None
        try:
            return Path(snapshot_download(name, revision=revision, token=token, **only))
        except Exception as error:
            raise _unreachable(name, because or error) from error

    try:
        found = hub.model_info(name, revision=revision, timeout=PATIENCE)
        names = [file.rfilename for file in found.siblings or ()]
    except Exception as error:
        folder = get(["config.json"], error)
        with suppress(MoesaicError):
            weights = shards(folder)
            if all((folder / file).exists() for file in weights):
                return folder, weights
        raise _unreachable(f"{name} is not whole in the hub's cache, and", error) from error
    if "config.json" not in names:
        first_file(names, {}, name)
        raise MoesaicError(f"{name} has no config.json; is it a model?")
    folder = get(filter(_is_small, names))
    if folder.parent.name == "snapshots":
        revision = _COMMITS[asked] = folder.name
    weights = shards(folder, names, name)
    if whole and not all((folder / file).exists() for file in weights):
        folder = get(weights)
    return folder, weights


def _is_small(file: str) -> bool:
    """Return True if a file of a repository is read and does not hold weights.

    >>> [_is_small(f) for f in ("config.json", "original/params.json", "model.safetensors")]
    [True, False, False]
    """
    if any(fnmatch(file, pattern) for pattern in READ):
        return False
    return any(fnmatch(file, p) and file.count("/") == p.count("/") for p in SMALL)


def _unreachable(name: str, error: Exception) -> Exception:
    """Return the error for a repository that cannot be fetched, with the reason and advice.

    A full disk's own error is returned as it is.
    """
    reason, status = reason_of_hub(error)
    numbers = {getattr(one, "errno", None) for one in with_causes(error)}
    if numbers & {*FULL}:
        return error  # which is explained as that of any other file
    advice = "Check the name and the connection, or pass the folder of a downloaded copy."
    if status in (401, 403, 404):
        advice = (
            "Check the name. If it is private or gated, ask for access on its page, and give a "
            "token: hf auth login, or HF_TOKEN."
        )
    elif numbers & {errno.EACCES, errno.EROFS, errno.EPERM} or isinstance(error, FileNotFoundError):
        advice = "Can the hub's cache be written? HF_HOME says where it is."
    return MoesaicError(f"{name} could not be fetched from the hub ({reason}). {advice}")


def reason_of_hub(error: BaseException) -> tuple[str, int | None]:
    """Return the reason why the hub failed, in its own words, and its status if it answered."""
    chain = [*with_causes(error)]
    answered = [one for one in chain if getattr(one, "response", None) is not None]
    one = answered[0] if answered else error
    words = re.sub(r"\(?Request ID: [^)\s]*\)?;?", "", " ".join(str(one).split()))
    status = answered[0].response.status_code if answered else None  # type: ignore[attr-defined]
    return f"{type(one).__name__}: {shorten(words, 200, placeholder=' ...')}", status


def source_or_model(
    model: object, revision: str | None = None, token: str | bool | None = None
) -> Source | Model:
    """Return the model that a verb was given: a loaded one itself, or the source of a name.

    Args:
        model: a name or folder, a loaded model, or what a verb returned.
        revision: as for :func:`~moesaic.io.source.resolve`.
        token: the same.

    Raises:
        MoesaicError: it is neither, or there is no such model.
    """
    if isinstance(model, str | Path):
        return resolve(str(model), revision, token)
    if isinstance(model, MadeModel):
        return model.model
    if isinstance(model, PreTrainedModel) and model.get_output_embeddings() is None:
        raise MoesaicError(
            f"A {type(model).__name__} has no language-modelling head: load the model with "
            "AutoModelForCausalLM."
        )
    if isinstance(model, PreTrainedModel | Source):
        return model
    raise MoesaicError(
        "A model is a name, a folder, a loaded PreTrainedModel of transformers, or a Result; "
        f"got {type(model).__name__}."
    )


def has_tokenizer(folder: Path) -> bool:
    """Return True if a folder has files of a tokenizer."""
    return any(file for names in TOKENIZER_FILES for file in folder.glob(names))


def tokenizer_of(model: object, opened: Source | Model) -> Tokenizer | None:
    """Return the tokenizer that comes with a model; None for a loaded one, which has none.

    Args:
        model: the argument of a verb.
        opened: what :func:`source_or_model` returned for it.

    Raises:
        MoesaicError: its folder holds no tokenizer that can be used.
    """
    if isinstance(model, MadeModel):
        return model.tokenizer
    return opened.tokenizer if isinstance(opened, Source) else None


LARGEST = 1 << 44
"""Largest number of bytes of a model, 17.6 TB: some file systems hold no larger sparse file."""


def headers_of_model(
    name: str, folder: Path, revision: str | None = None, token: str | bool | None = None
) -> Source:
    """Find a model without its weights.

    Of a hub id only small files and headers are fetched. A folder that has a config and no weights
    is taken for the model that the config describes.

    Args:
        name: as for :func:`moesaic.io.source.resolve`.
        folder: an existing one, for the files that have to be made.
        revision: as for :func:`moesaic.io.source.resolve`.
        token: the same.

    Raises:
        MoesaicError: there is no such model, or the hub cannot be reached.
    """
    check_name(name)
    path = Path(expand_home(name))
    if path.is_dir():
        config, weights = path / "config.json", (*WEIGHTS, *PICKLED, *FOREIGN, ".gguf")
        if config.is_file() and not any(file.name.endswith(weights) for file in path.iterdir()):
            return _of_config(name, path, folder)
        return Source(name, path, headers_only=True)
    if without_slash(name) in NAMES or path.suffix.lower() == ".gguf":
        return Source(name, resolve(name).folder, headers_only=True)
    return _of_hub(name, folder, revision, token)


def _of_config(name: str, path: Path, folder: Path) -> Source:
    """Return the checkpoint that a config describes, its tensors named as in memory."""
    check_links(path)
    copy_side_files(path, folder, "*.json")
    config = Source(name, folder).config
    model = skeleton_of(config, config.dtype or torch.float32)
    tied = {id(p): n for n, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    first = {n: p for n, p in model.state_dict(keep_vars=True).items() if tied.get(id(p), n) == n}
    size = sum(tensor.nbytes for tensor in first.values())
    if size > LARGEST:
        raise MoesaicError(
            f"config.json describes weights of {size:,} bytes, and {LARGEST:,} are the most: one "
            "of the sizes in it must be wrong."
        )
    outlines = ((tensor_name, tensor.detach().to("meta")) for tensor_name, tensor in first.items())
    ShardWriter(folder, outline=True).write(outlines)
    return Source(name, folder, headers_only=True)


def _of_hub(name: str, folder: Path, revision: str | None, token: str | bool | None) -> Source:
    """Return a model in the hub's cache if it has the weights, else small files and headers.

    The headers are fetched from the hub, eight files at a time.
    """
    from huggingface_hub import HfApi

    place, weights = from_hub(name, revision, token, whole=False)
    if all((place / file).exists() for file in weights):
        return Source(name, place, headers_only=True)
    read = partial(HfApi(token=token).parse_safetensors_file_metadata, name, revision=place.name)
    try:
        with ThreadPoolExecutor(8) as pool:
            headers = [*pool.map(read, weights)]
    except Exception as error:
        raise _unreachable(name, error) from error
    copy_side_files(place, folder, "*.json")
    for shard, header in zip(weights, headers, strict=True):
        tensors = {
            tensor: torch.empty(info.shape, dtype=TYPES[info.dtype], device="meta")
            for tensor, info in header.tensors.items()
        }
        write_shard(folder / shard, tensors, outline=True)
    return Source(name, folder, headers_only=True)
