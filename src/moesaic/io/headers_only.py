"""Checkpoints without weights: headers alone, to estimate a result's files before they are written.

A file's header names every tensor, its type and its shape. Converted by the code that converts
tensors with values, on the meta device, it is the header of the result: its bytes are known.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from moesaic.errors import MoesaicError
from moesaic.io.checkpoint import INDEX_NAME, SINGLE_NAME, TYPES, ShardWriter, shape_of, write_shard
from moesaic.io.names import NAMES, check_name, without_slash
from moesaic.io.source import Source, from_hub, resolve, unreachable
from moesaic.io.trust import check_links, copy_side_files

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
    path = Path(name).expanduser()
    if path.is_dir():
        config, weights = path / "config.json", (INDEX_NAME, SINGLE_NAME, "*.bin", "*.pt")
        if config.is_file() and not any(any(path.glob(pattern)) for pattern in weights):
            return _of_config(name, path, folder)
        return Source(name, path, weightless=True)
    if without_slash(name) in NAMES or path.suffix == ".gguf":
        return Source(name, resolve(name).folder, weightless=True)
    return _of_hub(name, folder, revision, token)


def _of_config(name: str, path: Path, folder: Path) -> Source:
    """Return the checkpoint that a config describes, its tensors named as in memory."""
    check_links(path)
    copy_side_files(path, folder, "*.json")
    config = Source(name, folder).config
    model = shape_of(config, config.dtype or torch.float32)
    tied = {id(p): n for n, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    first = {n: p for n, p in model.state_dict(keep_vars=True).items() if tied.get(id(p), n) == n}
    size = sum(tensor.nbytes for tensor in first.values())
    if size > LARGEST:
        raise MoesaicError(
            f"config.json describes weights of {size:,} bytes, and {LARGEST:,} are the most: one "
            "of the sizes in it must be wrong."
        )
    writer = ShardWriter(folder, outline=True)
    for tensor_name, tensor in first.items():
        writer.add(tensor_name, tensor.detach().to("meta"))
    writer.close()
    return Source(name, folder, weightless=True)


def _of_hub(name: str, folder: Path, revision: str | None, token: str | bool | None) -> Source:
    """Return a model in the hub's cache if it has the weights, else small files and headers alone.

    The headers are fetched from the hub, eight files at a time.
    """
    from huggingface_hub import HfApi

    place, weights = from_hub(name, revision, token, whole=False)
    if all((place / file).exists() for file in weights):
        return Source(name, place, weightless=True)
    read = partial(HfApi(token=token).parse_safetensors_file_metadata, name, revision=place.name)
    try:
        with ThreadPoolExecutor(8) as pool:
            headers = [*pool.map(read, weights)]
    except Exception as error:
        raise unreachable(name, error) from error
    copy_side_files(place, folder, "*.json")
    for shard, header in zip(weights, headers, strict=True):
        tensors = {
            tensor: torch.empty(info.shape, dtype=TYPES[info.dtype], device="meta")
            for tensor, info in header.tensors.items()
        }
        write_shard(folder / shard, tensors, outline=True)
    return Source(name, folder, weightless=True)
