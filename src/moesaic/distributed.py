"""Several processes on one job, as torchrun or accelerate launch start them."""

from __future__ import annotations

import os
from typing import TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")


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
