"""An attempt's reports to its launcher: events, steps, and the figure that a sweep optimises.

:class:`.live.LiveAttempt` holds one :class:`Reports` in each process that trains. Training never
waits for a report: steps are sent at most ten times a second, and a figure on a GPU is sent when it
has arrived on the host.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from robust_train.files import to_plain
from robust_train.memory.in_use import describe_memory, memory_in_use
from robust_train.model.events import (
    EpochEnded,
    Event,
    Json,
    MemoryReported,
    Progress,
    TrainingStarted,
    UserEvent,
    ValueReported,
)

log = logging.getLogger("robust_train")

_PROGRESS_INTERVAL_SECONDS = 0.1

Report = Callable[[Event], None]
"""Receives one event."""


class Reports:
    """Sends an attempt's events to the launcher.

    The newest report of a step waits in ``_unsent``. If it has figures on a GPU, it moves to
    ``_held`` until they are copied to the host, and is sent then.

    Attributes:
        steps_before: optimizer steps of earlier attempts, 0 for a fresh start.
        last_step: last optimizer step that was reported, None before the first.
    """

    def __init__(self, report: Report, *, is_main: bool) -> None:
        self.steps_before = 0
        self.last_step: int | None = None
        self._report = report
        self._is_main = is_main
        self._is_muted = False
        self._total_steps: int | None = None
        self._unsent: Progress | None = None
        # A report whose figures are still being copied from a GPU.
        self._held: Progress | None = None
        self._next_progress = 0.0
        self._objective = ""
        self._mode: str | None = None
        # The names of dicts in place of a figure, each of which causes one warning.
        self._warned_names: set[str] = set()

    @property
    def steps_done(self) -> int:
        """Number of finished optimizer steps, including those of earlier attempts."""
        return self.steps_before if self.last_step is None else self.last_step

    @property
    def is_done(self) -> bool:
        """Whether the last of all optimizer steps is done, as far as the trainer reports them."""
        total = self._total_steps
        return total is not None and self.steps_done >= total

    def send(self, event: Event) -> None:
        """Send an event, unless reports are muted."""
        if not self._is_muted:
            self._report(event)

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """Discard the reports of a trainer's function within the block."""
        was_muted = self._is_muted
        unsent = self._unsent
        self._is_muted = True
        try:
            yield
        finally:
            self._is_muted = was_muted
            self._unsent = unsent

    def started(self, step: int) -> None:
        """See :meth:`.run.Run.started`."""
        self.steps_before = step
        self.send(TrainingStarted(step))

    def reach(self, step: int) -> None:
        """Record that optimizer step ``step`` is done."""
        self.last_step = step

    def progress(self, step: int, total_steps: int | None, scalars: Mapping[str, float]) -> bool:
        """Send a step's figures, at most ten times a second, and return whether they were sent."""
        self._total_steps = total_steps
        self._unsent = Progress(step, total_steps, scalars)
        self._send_held(waits=False)
        now = time.monotonic()
        if now < self._next_progress:
            return False
        self._next_progress = now + _PROGRESS_INTERVAL_SECONDS
        self._warn_of_groups("progress", scalars)
        if any(getattr(value, "is_cuda", False) for value in scalars.values()):
            self._hold()
        else:
            self.send_last_progress()
        return True

    def _warn_of_groups(self, method: str, scalars: Mapping[str, Any]) -> None:
        """Warn once about each dict in place of a figure, because its loss would not be watched."""
        for name, value in scalars.items():
            if isinstance(value, Mapping) and name not in self._warned_names:
                self._warned_names.add(name)
                text = (
                    "run.%s: %s is a dict, whose figures are neither shown nor watched; pass **%s"
                )
                log.warning(text, method, name, name)

    def _hold(self) -> None:
        """Send the newest step's figures once they are on the host.

        Reading them now would wait for all work that is queued on the GPU. The next report waits
        for them if they have not arrived by then.
        """
        assert self._unsent is not None
        self._send_held(waits=True)
        self._held = replace(self._unsent, metrics=_start_copies(self._unsent.metrics))
        self._unsent = None
        self._send_held(waits=False)

    def _send_held(self, *, waits: bool) -> None:
        """Send the held figures if they are on the host. ``waits`` waits until they are."""
        held = self._held
        if held is None or self._is_muted:
            return
        late_figures = [value for value in held.metrics.values() if hasattr(value, "has_arrived")]
        if waits or all(figure.has_arrived() for figure in late_figures):
            self._held = None
            self.send(replace(held, metrics=to_plain(_figures_on_host(held.metrics))))

    def send_last_progress(self) -> None:
        """Send the newest step's figures, unless they were sent."""
        self._send_held(waits=True)
        unsent = self._unsent
        self._unsent = None
        if unsent is not None:
            figures = _figures_on_host(_start_copies(unsent.metrics))
            self.send(replace(unsent, metrics=to_plain(figures)))

    def epoch_ended(self, epoch: int, scalars: Mapping[str, float]) -> None:
        """Send an epoch's figures, and report the objective if it is among them."""
        self._warn_of_groups("epoch_ended", scalars)
        figures = to_plain(dict(scalars))
        self.send_last_progress()
        self.send(EpochEnded(epoch, self.steps_done, figures))
        self.report_objective(figures, epoch)

    def record(self, event: str, fields: Mapping[str, Json]) -> None:
        """See :meth:`.run.Run.record`."""
        figures = to_plain(dict(fields))
        self.send(UserEvent(str(event), figures))
        self.report_objective(figures, figures.get("step"))

    def record_memory(self, name: str) -> None:
        """Send the memory in use, under a name for this point in training."""
        figures = memory_in_use(context=False)
        log.debug("%s: %s", name, describe_memory(figures))
        self.send(MemoryReported(name, **figures))

    def report(self, value: float, step: int | None = None) -> None:
        """See :meth:`.run.Run.report`."""
        if self._is_main:
            step = self.steps_done if step is None else int(step)
            self.send(ValueReported(float(value), step))

    def optimise(self, objective: str) -> None:
        """Set the name of the figure that a sweep optimises, empty for none."""
        self._objective = objective

    def monitor(self, figure: str, mode: str) -> None:
        """Let a framework set the figure that a sweep optimises, unless the config names one.
        ``mode`` is ``min`` or ``max``."""
        if not self._objective:
            self._objective = figure
            self._mode = mode

    def report_objective(self, figures: Mapping[str, Json], step: Json) -> None:
        """Report the figure that a sweep optimises, if it is among ``figures``."""
        value = figures.get(self._objective)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return
        if self._is_main and isinstance(step, int):
            self.send(ValueReported(float(value), step, self._mode))


def _start_copies(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures, with each figure on a GPU replaced by a copy that is on its way to the
    host. A figure that cannot be copied is left out."""
    figures: dict[str, Any] = {}
    for name, value in scalars.items():
        if not getattr(value, "is_cuda", False) or value.ndim != 0:
            figures[name] = value
            continue
        # This imports torch, which the launcher does not have.
        from robust_train.step.update import LateFigure

        with contextlib.suppress(RuntimeError):
            figures[name] = LateFigure(value)
    return figures


def _figures_on_host(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures, all of them on the host. After a fault of the GPU its figures are left
    out, because the attempt reports the fault."""
    on_host = {}
    for name, value in figures.items():
        with contextlib.suppress(RuntimeError):
            on_host[name] = value.read() if hasattr(value, "has_arrived") else value
    return on_host
