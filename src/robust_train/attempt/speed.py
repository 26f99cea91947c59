"""How fast a rank trains, measured over its newest steps by the host's clock.

:class:`.live.LiveAttempt` holds one :class:`SpeedMeter` in each process that trains. The host runs
ahead of its GPU, but only as far as the GPU's queue allows, so over many steps both take the same
time. CUDA events show whether the GPU was idle while the host waited for data.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from robust_train.compat import has_context
from robust_train.memory.cuda import started_torch
from robust_train.model.spec import Speed

T = TypeVar("T")

_MOST_INTERVALS = 1000
"""How many of the newest intervals count."""

_HIGH = 0.95
"""The quantile above which a duration counts as a rare peak."""

_LEAST_RECENT = 10
"""At least this many intervals count as recent."""

# The time between two reports starts at the first value and doubles up to the second.
_FIRST_REPORT_SECONDS = 1.0
_REPORT_SECONDS = 30.0


class Moment:
    """A moment on the host and, if this process uses a GPU, on the GPU: the end of the work that is
    queued at that moment."""

    def __init__(self) -> None:
        self.at = time.perf_counter()
        # An event at the end of the GPU's queue. A process that does not use the GPU gets no event,
        # because an event would create a context.
        self._event: Any = None
        torch = started_torch()
        # After a fault every call to the device raises an error.
        with contextlib.suppress(RuntimeError):
            if torch is not None and has_context(torch, torch.cuda.current_device()):
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                self._event = event

    def is_past(self) -> bool:
        """Return whether the GPU has reached this moment."""
        with contextlib.suppress(RuntimeError):
            return self._event is None or bool(self._event.query())
        return False

    def seconds_until(self, later: Moment) -> float:
        """Return the time from this moment to a later moment, which the GPU has reached."""
        if self._event is None or later._event is None:
            return later.at - self.at
        return float(self._event.elapsed_time(later._event)) / 1000


@dataclass
class _Interval:
    """The time between two reported steps."""

    begin: Moment
    counts: bool = True
    steps: int = 1
    seconds: float = 0.0
    samples: int = 0
    waited: float | None = None  # wait for data in seconds, None if unknown
    ready: Moment | None = None  # when this rank started to wait for other ranks

    @property
    def alone(self) -> float | None:
        """Seconds per step before this rank waited for other ranks, None if unknown."""
        if self.ready is None or not self.ready.is_past():
            return None
        return self.begin.seconds_until(self.ready) / self.steps


class SpeedMeter:
    """Measures the steps of a rank, in constant memory.

    An attempt's first step does not count. Neither does a step in which something else happens, for
    example a validation, a checkpoint or the end of an epoch.
    """

    def __init__(
        self,
        ranks: int = 1,
        # Returns the samples of this rank in a step, 0 if unknown.
        samples: Callable[[], int] = lambda: 0,
        # Receives the figures.
        report: Callable[[Speed], None] = lambda speed: None,
    ) -> None:
        self._least_seconds = 0.0
        self._ranks = ranks
        self._samples = samples
        self._report = report
        self._is_on = True
        # Whether the trainer's integration measures the waits for data itself.
        self._is_explicit = False
        self._step = 0
        self._interval: _Interval | None = None
        self._wait_from: Moment | None = None
        self._newest: deque[_Interval] = deque(maxlen=_MOST_INTERVALS)
        self._steps = 0
        self._next_report = 0.0
        self._pause = _FIRST_REPORT_SECONDS

    def measure_rarely(self, seconds: float) -> None:
        """Measure only reports that are at least this far apart."""
        self._least_seconds = seconds

    def stop(self) -> None:
        """Measure nothing from here on, because something else measures."""
        self._is_on = False

    def begin(self) -> None:
        """Start a step now. The time before does not count."""
        if self._interval is not None:
            self._interval = _Interval(Moment())

    def pause(self) -> None:
        """Leave out the current step, because it includes more than training."""
        if self._interval is not None:
            self._interval.counts = False

    def measure_waits(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield from ``loader``, and measure how long each batch takes. A step starts with its
        batch."""
        self.begin()
        self.wait_begins()
        for batch in loader:
            self.wait_ends()
            yield batch
            self.wait_begins()

    def wait_begins(self) -> None:
        """Count the time from here on as waiting for data."""
        if self._interval is not None:
            self._wait_from = Moment()

    def wait_ends(self) -> None:
        """End the wait that :meth:`wait_begins` started."""
        start = self._wait_from
        self._wait_from = None
        self._is_explicit = True
        if start is not None:
            self._count_wait(start)

    def batch_begins(self, samples: int) -> None:
        """Count the time from here on as computing a batch."""
        interval = self._interval
        if interval is None:
            return
        interval.samples += samples
        if not self._is_explicit and interval.waited is None:
            self._count_wait(interval.begin)

    def _count_wait(self, start: Moment) -> None:
        """Count the time since ``start`` as a wait for data, unless the GPU was busy all the
        time."""
        if self._interval is not None:
            seconds = 0.0
            if start.is_past():
                seconds = time.perf_counter() - start.at
            self._interval.waited = (self._interval.waited or 0.0) + seconds

    def alone_until_now(self) -> None:
        """Count the time from here on as waiting for other ranks."""
        if self._interval is not None and self._ranks > 1:
            self._interval.ready = Moment()

    def step_done(self, step: int) -> None:
        """Count optimizer step ``step``."""
        if not self._is_on:
            return
        now = Moment()
        interval = self._interval
        if interval is not None and interval.counts and step > self._step:
            interval.seconds = now.at - interval.begin.at
            if interval.seconds < self._least_seconds:
                return
            interval.steps = step - self._step
            if not interval.samples:
                interval.samples = interval.steps * self._samples()
            self._steps += interval.steps
            self._newest.append(interval)
        self._step = step
        self._interval = _Interval(now)
        if now.at >= self._next_report:
            self.send()
            self._next_report = now.at + self._pause
            self._pause = min(2 * self._pause, _REPORT_SECONDS)

    def send(self) -> None:
        """Report the figures so far."""
        speed = self.speed() if self._is_on else None
        if speed is not None:
            self._report(speed)

    def speed(self) -> Speed | None:
        """Return the figures of the newest steps, None if there are none."""
        newest = [interval for interval in self._newest if interval.seconds > 0]
        if not newest:
            return None
        seconds_per_step = sorted(interval.seconds / interval.steps for interval in newest)
        seconds = self._sum_without_peaks([interval.seconds for interval in newest])
        samples = [interval.samples for interval in newest]
        share = self._data_share(newest)
        samples_per_second = None
        if all(samples):
            samples_per_second = _round(sum(samples) / seconds)
        alone = [interval.alone for interval in newest if interval.alone is not None]
        seconds_alone_per_step = None
        if alone:
            seconds_alone_per_step = _round(sum(alone) / len(alone))
        return Speed(
            steps=self._steps,
            seconds_per_step=_round(_quantile(seconds_per_step, 0.5)),
            seconds_per_step_p95=_round(_quantile(seconds_per_step, _HIGH)),
            samples_per_second=samples_per_second,
            seconds_per_step_now=_round(_quantile(_recent_seconds_per_step(newest), 0.5)),
            data_share=share if self._is_explicit else None,
            between_share=None if self._is_explicit else share,
            seconds_alone_per_step=seconds_alone_per_step,
        )

    def _data_share(self, newest: Sequence[_Interval]) -> float | None:
        """Return the share of the time that was spent waiting for data, None if unknown."""
        measured = [
            (interval.waited, interval.seconds)
            for interval in newest
            if interval.waited is not None
        ]
        if not measured:
            return None
        waits = [waited for waited, _ in measured]
        waited = self._sum_without_peaks(waits)
        computed = sum(seconds for _, seconds in measured) - sum(waits)
        return round(waited / max(waited + computed, waited), 4) if waited else 0.0

    def _sum_without_peaks(self, durations: Sequence[float]) -> float:
        """Return the sum of durations.

        If the trainer does not measure its waits for data, a rare peak may have another cause. Each
        of the longest 5 % then counts as the 95th percentile.
        """
        if self._is_explicit:
            return sum(durations)
        most = _quantile(sorted(durations), _HIGH)
        return sum(min(duration, most) for duration in durations)


def _recent_seconds_per_step(newest: Sequence[_Interval]) -> list[float]:
    """Return the seconds per step of about the last half minute, in ascending order."""
    until = newest[-1].begin.at
    return sorted(
        interval.seconds / interval.steps
        for number, interval in enumerate(reversed(newest))
        if number < _LEAST_RECENT or until - interval.begin.at <= _REPORT_SECONDS
    )


def _quantile(ascending: Sequence[float], share: float) -> float:
    """Return the value that a ``share`` of the values does not exceed."""
    return ascending[math.ceil(share * len(ascending)) - 1]


def _round(value: float) -> float:
    """Round a figure to four digits."""
    return float(f"{value:.4g}")
