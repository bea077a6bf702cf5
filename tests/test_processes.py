"""One of several processes ends early: what the others say, and how they end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from builders import TESTS

import moesaic

ENDS = {
    "refuses": "raise MoesaicError('keep 9 is out of reach.')",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
}
CODE = """
import os, signal, sys
from moesaic.cli.entry import explained
from moesaic.distributed import join_processes, wait_for_all
from moesaic.errors import MoesaicError
with explained():
    join_processes()
    wait_for_all()
    if os.environ['RANK'] == sys.argv[1]:
        {end}
    wait_for_all()
"""


@pytest.mark.parametrize(
    ("end", "which"),
    [
        ("refuses", 1),
        ("is killed", 0),
        pytest.param("refuses", 0, marks=pytest.mark.nightly),
        pytest.param("is killed", 1, marks=pytest.mark.nightly),
    ],
)
def test_the_other_process_says_the_true_reason(end: str, which: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    path = os.pathsep.join([str(TESTS), str(Path(moesaic.__file__).parents[1])])
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", CODE.replace("{end}", ENDS[end]), str(which)],
            env={**os.environ, **told, "PYTHONPATH": path, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [" ".join(process.communicate(timeout=300)[1].split()) for process in running]
    other = 1 - which
    assert "fault of moesaic" not in errors[other]
    if end == "refuses":
        assert [process.returncode for process in running] == [2, 2], errors
        assert all("keep 9 is out of reach." in error for error in errors)
    else:
        assert running[other].returncode == 1
        assert "Another of the 2 processes ended" in errors[other]
