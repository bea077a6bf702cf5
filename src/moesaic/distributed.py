"""Several processes on one job, as torchrun or accelerate launch start them."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")
LOST = (
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "gloo",
    "Connection closed by peer",
)
"""Words in the type or message of an error that show a lost connection to another process."""


def process() -> tuple[int, int]:
    """Return this process's number and how many there are."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def join_processes() -> None:
    """Join the process group, if several processes were started."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and process() == (0, 1):
        gpus = torch.cuda.is_available() and torch.distributed.is_nccl_available()
        if gpus:
            torch.cuda.set_device(own_device("cuda"))
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")


def own_device(name: str) -> str:
    """Return this process's device: each of several processes on a machine has its own GPU.

    Args:
        name: the requested device; one with a number is returned unchanged.
    """
    local = os.environ.get("LOCAL_RANK")
    return f"cuda:{local}" if name == "cuda" and local is not None else name


def wait_for_all() -> None:
    """Return when every process has come here."""
    if process()[1] > 1:
        torch.distributed.barrier()


REFUSED, SEEN = "moesaic-refused", "moesaic-seen-"
"""Keys of the store that processes share: reason of a refusal, and who has read it."""
PATIENCE = timedelta(seconds=10)
"""Longest wait until the others have read it; the store may end with this process."""


def publish_refusal(reason: str) -> None:
    """Publish that this process ends, and why, and wake the processes that wait for it."""
    number, world = process()
    if world == 1:
        return
    distributed = torch.distributed
    with suppress(Exception):  # they may have ended too
        store = distributed.distributed_c10d._get_default_store()
        store.set(REFUSED, reason)
        store.set(f"{SEEN}{number}", "")
        if "nccl" not in str(distributed.get_backend()):  # which would wait for the others
            distributed.destroy_process_group()
        store.wait([f"{SEEN}{other}" for other in range(world)], PATIENCE)


def peer_failure(error: BaseException) -> tuple[str, bool] | None:
    """Return the reason if an error means that another process ended while this one waited.

    Returns:
        the reason in words, and True if it is a refused request; None for any other error.
    """
    number, world = process()
    names = [type(error).__name__, str(error)]
    if world == 1 or not any(word in name for name in names for word in LOST):
        return None
    with suppress(Exception):  # the store may have been its own
        store = torch.distributed.distributed_c10d._get_default_store()
        if store.check([REFUSED]):
            reason = store.get(REFUSED).decode()
            store.set(f"{SEEN}{number}", "")
            return reason, True
    return (
        f"Another of the {world} processes ended before its work was done: its last output "
        "has the reason; none, if it was killed, as for want of memory.",
        False,
    )


def gathered(value: T) -> list[T]:
    """Return the values of all processes, in the order of their numbers; the same list in each."""
    _, world = process()
    if world == 1:
        return [value]
    every: list[T | None] = [None] * world
    torch.distributed.all_gather_object(every, value)
    return cast("list[T]", every)


def mean_over_processes(total: Tensor, count: float) -> Tensor:
    """Return sums over this process's ``count`` tokens as means over the tokens of all processes,
    of the same shape; float64, on the CPU."""
    sums = torch.cat([total.double().cpu().flatten(), torch.tensor([float(count)]).double()])
    if process()[1] > 1:
        sums = torch.stack(gathered(sums)).sum(0)
    return (sums[:-1] / sums[-1].clamp(min=1)).view(total.shape)
