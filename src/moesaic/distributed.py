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
"""In the type or the words of an error: the connection to another process is gone."""


def process() -> tuple[int, int]:
    """This process's number and how many there are."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def join_processes() -> None:
    """Meet the processes that were started beside this one, if any."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and process() == (0, 1):
        gpus = torch.cuda.is_available() and torch.distributed.is_nccl_available()
        if gpus:
            torch.cuda.set_device(own_device("cuda"))
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")


def own_device(name: str) -> str:
    """This process's device: of several processes on a machine, each has a GPU of its own.

    Args:
        name: as asked for; a number in it is meant.
    """
    local = os.environ.get("LOCAL_RANK")
    return f"cuda:{local}" if name == "cuda" and local is not None else name


def wait_for_all() -> None:
    """Return when every process has come here."""
    if process()[1] > 1:
        torch.distributed.barrier()


REFUSED, SEEN = "moesaic-refused", "moesaic-seen-"
"""Keys of the store that processes share: why one of them refused, and who knows."""
PATIENCE = timedelta(seconds=10)
"""The longest wait until the others know; the store may be gone with this process."""


def tell_others(reason: str) -> None:
    """Let the other processes know that this one ends, and why, and wake those that wait for it."""
    number, world = process()
    if world == 1:
        return
    distributed = torch.distributed
    with suppress(Exception):  # they may have ended themselves
        store = distributed.distributed_c10d._get_default_store()
        store.set(REFUSED, reason)
        store.set(f"{SEEN}{number}", "")
        if "nccl" not in str(distributed.get_backend()):  # which would wait for the others
            distributed.destroy_process_group()
        store.wait([f"{SEEN}{other}" for other in range(world)], PATIENCE)


def another_ended(error: BaseException) -> tuple[str, bool] | None:
    """Whether an error means that another process ended while this one waited for it.

    Returns:
        the reason in words, and whether it is a refused request; None for any other error.
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
        f"Another of the {world} processes ended before its work was done: what it printed last "
        "says why; nothing, if it was killed, as for want of memory.",
        False,
    )


def gathered(value: T) -> list[T]:
    """What every process gives, in the order of their numbers; the same list in each."""
    _, world = process()
    if world == 1:
        return [value]
    every: list[T | None] = [None] * world
    torch.distributed.all_gather_object(every, value)
    return cast("list[T]", every)


def mean_over_processes(total: Tensor, count: float) -> Tensor:
    """Sums over this process's tokens as means over the tokens of all; float64, on the CPU.

    Args:
        total: sums, of any shape.
        count: this process's tokens.
    """
    sums = torch.cat([total.double().cpu().flatten(), torch.tensor([float(count)]).double()])
    if process()[1] > 1:
        sums = torch.stack(gathered(sums)).sum(0)
    return (sums[:-1] / sums[-1].clamp(min=1)).view(total.shape)
