"""Progress of a run: bars on stderr with the time left, and a log of its stages and warnings."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.segment import Segment
from rich.text import Text

from moesaic.errors import printable
from moesaic.types import JSON, Figures, Track, silent

T = TypeVar("T")


class Plain(Console):
    """Console that no text can steer: brackets in a name are no markup, colons no emoji, and escape
    sequences are shown."""

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Yield the segments of a renderable, with their text made printable."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else printable(segment.text)
            yield segment if text == segment.text else segment._replace(text=text)


console, err_console = Plain(), Plain(stderr=True)


def bars(items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
    """Draw a bar with the time left on stderr while the items pass; none without items.

    Of several processes the first draws for all.
    """
    if total == 0 or os.environ.get("RANK", "0") != "0":
        yield from items
        return
    columns = (
        TextColumn("{task.description:<26}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        Left(),
    )
    with Progress(*columns, console=err_console) as bar:
        for item in bar.track(items, total=total, description=label):
            if isinstance(item, Figures):
                bar.update(bar.task_ids[0], description=f"{label}, loss {item['loss']:.4g}")
            yield item


def tracked(progress: bool | Track) -> Track:
    """Return what shows the progress of a verb: bars, nothing, or the caller's own.

    Raises:
        TypeError: it is neither a truth value nor a function.
    """
    if isinstance(progress, bool):
        return bars if progress else silent
    if not callable(progress):
        raise TypeError(
            "progress is True, False, or a function (items, label, total) that returns the items; "
            f"got {progress!r:.60}. The folder that a run continues from is resume_from."
        )
    return progress


class Left(ProgressColumn):
    """Column with the time left, from the first finished item on."""

    def __init__(self) -> None:
        super().__init__()
        self._done, self._at = 0.0, 0.0

    def render(self, task: Task) -> Text:
        """Return ``0:01:30``, or dashes while nothing is done."""
        if task.completed != self._done:  # since then the next item runs
            self._done, self._at = task.completed, task.elapsed or 0.0
        if not self._done or task.total is None:
            return Text("-:--:--", style="progress.remaining")
        left = self._at * task.total / self._done - (task.elapsed or 0.0)
        minutes, seconds = divmod(max(0, round(left)), 60)
        text = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
        return Text(text, style="progress.remaining")


# --- the log of a run ----------------------------------------------------------------------------


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
        self._open: list[JSON] = []
        self._alone = False

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what happens while the context lasts."""
        entry: JSON = {"stage": name}
        if self._open:
            entry["within"] = self._open[-1]["stage"]
        self.stages.append(entry)
        self._open.append(entry)
        clock, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self._open = [other for other in self._open if other is not entry]
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
