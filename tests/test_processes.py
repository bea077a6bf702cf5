"""One of several processes ends early: what the others say, and how they end."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
from builders import SERVER, called

from moesaic.cli.entry import explained
from moesaic.distributed import join_processes, wait_for_all
from moesaic.errors import MoesaicError


def ending(how: str, which: int) -> None:
    """In one of several processes, one of which ends early."""
    with explained():
        join_processes()
        wait_for_all()
        if os.environ["RANK"] == str(which):
            if how == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise MoesaicError("keep 9 is out of reach.")
        wait_for_all()


@pytest.mark.parametrize(
    ("end", "which"),
    [
        ("refuses", 1),
        ("is killed", 0),
        pytest.param("refuses", 0, marks=pytest.mark.nightly),
        pytest.param("is killed", 1, marks=pytest.mark.nightly),
    ],
)
def test_the_other_process_says_the_true_reason(end: str, which: int, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    files = [tmp_path / str(rank) for rank in range(2)]
    running = [
        SERVER.Process(
            target=called,
            args=({**os.environ, **told, "RANK": str(rank)}, files[rank]),
            kwargs={"work": ending, "arguments": (end, which)},
        )
        for rank in range(2)
    ]
    for process in running:
        process.start()
    for process in running:
        process.join(300)
    errors = [" ".join(file.read_text().split()) for file in files]
    other = 1 - which
    assert "fault of moesaic" not in errors[other]
    if end == "refuses":
        assert [process.exitcode for process in running] == [2, 2], errors
        assert all("keep 9 is out of reach." in error for error in errors)
    else:
        assert running[other].exitcode == 1
        assert "Another of the 2 processes ended" in errors[other]
