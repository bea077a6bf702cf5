"""The command line with FSDP2 on CPUs, which accelerate keeps to accelerators.

:func:`main` is called in one of several processes, with accelerate's variables set. With ``DIE_AT``
each ends itself after that many steps.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from builders import run_command
from transformers import TrainerCallback

from moesaic.train import loop


class _Death(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == int(os.environ["DIE_AT"]):
            os._exit(3)


class _Loop(loop._Loop):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert self.is_fsdp_enabled
        if "DIE_AT" in os.environ:
            self.add_callback(_Death())

    def finish(self, checkpoint: str | None) -> None:
        super().finish(checkpoint)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        assert all(isinstance(p, loop.DTensor) for p in parameters)
        assert any(p.to_local().numel() < p.numel() for p in parameters)


def main(*arguments: Any) -> None:
    """See above."""
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    loop._Loop = _Loop  # type: ignore[misc]
    run_command(*arguments)
