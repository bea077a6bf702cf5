"""Carries methods out in processes of their own, which may be told to die on the way.

REQUESTS is a JSON file with a list of mappings: ``key``, ``config``, ``model`` (a folder), ``live``
(load it first), ``out``; ``key`` is of a method, or
``observe``. With ``progress`` and ``kill`` each is carried out by a child that kills itself when it
begins to keep its second layer or training checkpoint, and continued by another one that does the
same. How they ended is written beside REQUESTS; they make no ``out``.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

SHARED = ("cases", "moesaic.pipeline", "moesaic.train.loop", "transformers.trainer", "accelerate")
KEPT = re.compile(r"layer-[^/]*|checkpoint-\d+")


def die_at_the_second(folder: Path) -> None:
    """Kill this process when it begins to keep a second layer or checkpoint in a folder."""
    begun = set()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("os.rename", "os.mkdir"):
            return
        for argument in arguments:
            match = KEPT.search(str(argument)) if str(argument).startswith(str(folder)) else None
            if match:
                begun.add(match[0])
        if len(begun) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def carry_out(request: dict[str, Any]) -> None:
    """Make one result and write it, with its summary beside it."""
    from cases import many_tokens, model_of, result_of

    from moesaic import observe
    from moesaic.distributed import process
    from moesaic.methods import METHODS

    key, out, progress = request["key"], Path(request["out"]), request.get("progress")
    options = model_of(Path(request["model"]), request["live"])
    if key == "observe":
        observe(options["model"], out, gram_mb=1, calibration=many_tokens())
        return
    config = METHODS[key](**request["config"])
    result = result_of(key, config=config, resume_from=progress and Path(progress), **options)
    if process()[0] == 0 and not progress:
        out.mkdir(parents=True)
        result.write(out)
        (out / "summary.json").write_text(json.dumps(dict(result.summary)))


def main(file: Path) -> None:
    """See above."""
    import conftest  # noqa: F401  (the same settings as in tests)

    from moesaic.distributed import join_processes

    requests = json.loads(file.read_text())
    if not any(request.get("kill") for request in requests):
        join_processes()
        for request in requests:
            carry_out(request)
        return
    for module in SHARED:  # imported once, not by each child
        importlib.import_module(module)
    ends: dict[str, list[int]] = {}
    for request in requests:
        lives = ends[request["key"]] = []
        while len(lives) < 2:
            child = os.fork()
            if child == 0:
                die_at_the_second(Path(request["progress"]))
                code = 1
                try:
                    carry_out(request)
                    code = 0
                finally:
                    os._exit(code)
            lives.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    file.with_name("ends.json").write_text(json.dumps(ends))
