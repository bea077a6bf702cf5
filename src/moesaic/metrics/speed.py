"""Prefill and decode speed of models side by side; the machine, and peak memory in a process.

Run as a process: load a checkpoint, read a prompt, decode, print the peak in bytes.
"""

from __future__ import annotations

import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from moesaic.errors import MoesaicError
from moesaic.types import JSON, Model, Track, cache_of, logits_alone, silent


@dataclass(frozen=True)
class Timing:
    """Repeated measurements of one figure, in seconds or tokens a second."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.values), max(self.values)


@dataclass(frozen=True)
class Speed:
    """Tokens a second over the rounds of one run."""

    prefill: Timing
    decode: Timing
    first_token: Timing
    """Seconds from prompt to first new token."""

    def as_json(self) -> JSON:
        """Return medians under the names that programs rely on, and the spread.

        Returns:
            ``prefill_tokens_per_second``, ``decode_tokens_per_second`` and ``first_token_seconds``,
            and the range of each: ``prefill_spread``, ``decode_spread``, ``first_token_spread``.
        """
        return {
            "prefill_tokens_per_second": self.prefill.median,
            "prefill_spread": list(self.prefill.spread),
            "decode_tokens_per_second": self.decode.median,
            "decode_spread": list(self.decode.spread),
            "first_token_seconds": self.first_token.median,
            "first_token_spread": list(self.first_token.spread),
        }


def clock(device: torch.device) -> float:
    """Return the time in seconds, after the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@torch.inference_mode()
def one_round(model: Model, prompt: torch.Tensor, new_tokens: int) -> tuple[float, float]:
    """Return seconds for the prompt, and for ``new_tokens`` greedy steps after it."""
    prompt = prompt.to(model.device)
    start = clock(prompt.device)
    options = {"use_cache": True, **logits_alone(model.config)}
    out = model(input_ids=prompt, logits_to_keep=1, **options)
    token = out.logits[:, -1:].argmax(-1)
    prefilled = clock(prompt.device)
    for _ in range(new_tokens):
        out = model(input_ids=token, **cache_of(out), **options)
        token = out.logits[:, -1:].argmax(-1)
    return prefilled - start, clock(prompt.device) - prefilled


Timed = Callable[[torch.Tensor, int], tuple[float, float]]
"""Function of a prompt and a number of new tokens that returns the seconds of each part."""


def interleaved(
    runners: Mapping[str, Timed],
    prompt: torch.Tensor,
    new_tokens: int = 32,
    rounds: int = 5,
    track: Track = silent,
) -> dict[str, Speed]:
    """Time models in turn, round by round, after one round of warm-up.

    Args:
        runners: by name; of a model of transformers ``partial(one_round, model)``.
        prompt: int64 (1, L).
        new_tokens: greedy decoding steps a round.
        rounds: counted rounds.
    """
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    for number in track(range(rounds + 1), "Speed", rounds + 1):
        turns = [*runners][:: 1 if number % 2 else -1]  # none always follows the other
        for name in turns:
            took = runners[name](prompt, new_tokens)
            if number:
                seconds[name].append(took)
    return {
        name: Speed(
            prefill=Timing(tuple(prompt.shape[1] / p for p, _ in pairs)),
            decode=Timing(tuple(new_tokens / d for _, d in pairs)),
            first_token=Timing(tuple(p for p, _ in pairs)),
        )
        for name, pairs in seconds.items()
    }


def against(ours: Speed, theirs: Speed, ideal: float) -> dict[str, JSON]:
    """Return the speed-up of a result, beside the ideal one by its active parameters.

    Args:
        ours: of the result.
        theirs: of the model it is compared with, from the same rounds.
        ideal: their active parameters over ours, head and embeddings included.

    Returns:
        for ``prefill`` and ``decode`` the ``ratio`` of the medians, the ``spread`` of the ratios of
        all rounds (machines drift, so these say whether there is a difference), the number of
        ``rounds``, the ``ideal`` ratio, and the ``share`` of it that is reached.
    """
    pairs = {"prefill": (ours.prefill, theirs.prefill), "decode": (ours.decode, theirs.decode)}
    found: dict[str, JSON] = {}
    for what, (one, other) in pairs.items():
        rounds = Timing(tuple(a / b for a, b in zip(one.values, other.values, strict=True)))
        ratio = one.median / other.median
        found[what] = {
            "ratio": ratio,
            "spread": list(rounds.spread),
            "rounds": len(rounds.values),
            "ideal": ideal,
            "share": ratio / ideal,
        }
    return found


def peak_memory(
    model: Path, length: int, new_tokens: int, device: str, dtype: torch.dtype | None
) -> int:
    """Return bytes at the peak of loading a checkpoint, one prompt and some decoding.

    Measured in a fresh process: its resident set, or the accelerator's allocations.

    Raises:
        MoesaicError: the process did not finish.
    """
    name = "auto" if dtype is None else str(dtype).removeprefix("torch.")
    request = json.dumps([str(model.absolute()), length, new_tokens, device, name])
    run = subprocess.run(
        [sys.executable, "-m", "moesaic.metrics.speed", request],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],  # -m imports from there first: never from a model's folder
    )
    if run.returncode:
        last = run.stderr.strip().splitlines()[-1:] or ["no message"]
        raise MoesaicError(f"Measuring the memory of {model} failed: {last[0]}")
    return int(run.stdout.strip().splitlines()[-1])


# --- memory and machine --------------------------------------------------------------------------


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
