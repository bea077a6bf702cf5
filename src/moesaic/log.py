"""A run's log: its stages with their times, and the warnings that were given on the way."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from moesaic.types import JSON, Track, silent

T = TypeVar("T")
OF_SPEED = ("moesaic.modules", "moesaic.io.dtypes", "moesaic.metrics.speed")
"""Loggers whose warnings explain how fast models are: another floating-point type."""


class Log(logging.Handler):
    """Takes notes of what a run goes through.

    Args:
        track: shows progress; :meth:`track` does so too, and times it.
    """

    def __init__(self, track: Track = silent) -> None:
        super().__init__(logging.WARNING)
        self.stages: list[JSON] = []
        """In the order in which they began: ``stage``, ``seconds`` by the clock, ``cpu_seconds``
        of this process, and ``within``, the stage that it is a part of."""
        self.warnings: list[str] = []
        """Each once."""
        self.of_speed: list[str] = []
        """Those that explain how fast models were."""
        self._shown = track
        self._open: list[str] = []
        self._alone = False

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what happens inside."""
        entry: JSON = {"stage": name}
        if self._open:
            entry["within"] = self._open[-1]
        self.stages.append(entry)
        self._open.append(name)
        clock, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self._open.remove(name)
            entry["seconds"] = round(time.perf_counter() - clock, 3)
            entry["cpu_seconds"] = round(time.process_time() - cpu, 3)

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        """Pass the items on, and show and time that."""
        with self.stage(label):
            yield from self._shown(items, label, total)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, warnings are noted; they are shown as before."""
        ours, show = logging.getLogger("moesaic"), warnings.showwarning

        def noted(message: Warning | str, *more: Any, **named: Any) -> None:
            self.note(str(message))
            show(message, *more, **named)

        self._alone = not ours.hasHandlers()
        ours.addHandler(self)
        warnings.showwarning = noted
        try:
            yield
        finally:
            ours.removeHandler(self)
            warnings.showwarning = show

    def emit(self, record: logging.LogRecord) -> None:
        """Note a warning of ours; Python shows what has no handler, and this is one."""
        self.note(record.getMessage(), record.name.startswith(OF_SPEED))
        if self._alone and logging.lastResort is not None:
            logging.lastResort.handle(record)

    def note(self, message: str, of_speed: bool = False) -> None:
        """Keep a warning, unless it is there."""
        for notes in (self.warnings, self.of_speed) if of_speed else (self.warnings,):
            if message not in notes:
                notes.append(message)

    def as_json(self) -> JSON:
        """``stages`` that are over, ``warnings``, and those of them that are ``of_speed``."""
        over = [entry for entry in self.stages if "seconds" in entry]
        return {
            "stages": over,
            "warnings": list(self.warnings),
            **({"of_speed": list(self.of_speed)} if self.of_speed else {}),
        }
