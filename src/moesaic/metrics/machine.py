"""Description of the machine, and its memory.

Run as a process: load a checkpoint, read a prompt, decode, print the peak in bytes.
"""

from __future__ import annotations

import json
import platform
import resource
import sys
from pathlib import Path

import torch

from moesaic.types import JSON


def main(request: str) -> None:
    """Print the peak memory for a JSON list from :func:`moesaic.metrics.speed.peak_memory`."""
    folder, length, new_tokens, device, dtype = json.loads(request)
    from moesaic.config import parse_dtype
    from moesaic.io.source import Source

    model = Source(folder, Path(folder)).load(device, parse_dtype(dtype))
    prompt = torch.arange(length).view(1, -1).to(device) % model.config.vocab_size
    with torch.inference_mode():
        model.generate(prompt, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    if torch.device(device).type == "cuda":
        print(torch.cuda.max_memory_allocated(device))
    else:
        print(_peak_resident())


def free_bytes(device: str | torch.device) -> int:
    """Return the free memory (bytes) of a device: an accelerator's, or this machine's."""
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    import psutil

    return int(psutil.virtual_memory().available)


def _peak_resident() -> int:
    """Return the peak resident set in bytes (on Linux VmHWM: ``ru_maxrss`` counts the parent's)."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def environment(device: str = "cpu") -> JSON:
    """Return versions and the machine, which are stored with every measurement.

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


if __name__ == "__main__":
    main(sys.argv[1])
