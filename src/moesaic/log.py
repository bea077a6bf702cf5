"""Log of a run: its stages with their times, and its warnings."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from moesaic.types import JSON, Track, silent

T = TypeVar("T")
OF_SPEED = ("moesaic.modules", "moesaic.io.models", "moesaic.metrics.speed")
"""Loggers whose warnings explain how fast models are: another floating-point type."""


class Log(logging.Handler):
    """Log handler that records the stages and warnings of a run.

    Args:
        track: shows progress; :meth:`track` does so too, and times it.
    """

    def __init__(self, track: Track = silent) -> None:
        super().__init__(logging.WARNING)
        self.stages: list[JSON] = []
        """Stages in order of their start: ``stage``, ``seconds`` by the clock, ``cpu_seconds`` of
        this process, and ``within``, the stage that it is a part of."""
        self.warnings: list[str] = []
        """Warnings, each once."""
        self.of_speed: list[str] = []
        """Warnings that explain how fast models were."""
        self._shown = track
        self._open: list[str] = []
        self._alone = False

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what happens while the context lasts."""
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
        """Yield the items with a progress bar, timed as a stage."""
        with self.stage(label):
            yield from self._shown(items, label, total)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record warnings while the context lasts; they are shown as before."""
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
        """Record a warning of ours, and show it if there is no other handler, as Python does."""
        self.note(record.getMessage(), record.name.startswith(OF_SPEED))
        if self._alone and logging.lastResort is not None:
            logging.lastResort.handle(record)

    def note(self, message: str, of_speed: bool = False) -> None:
        """Record a warning, unless it was recorded before."""
        for notes in (self.warnings, self.of_speed) if of_speed else (self.warnings,):
            if message not in notes:
                notes.append(message)

    def as_json(self) -> JSON:
        """Return ``stages`` that are over, ``warnings``, and those of them that are
        ``of_speed``."""
        over = [entry for entry in self.stages if "seconds" in entry]
        return {
            "stages": over,
            "warnings": list(self.warnings),
            **({"of_speed": list(self.of_speed)} if self.of_speed else {}),
        }
