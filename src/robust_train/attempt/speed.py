"""How fast a rank trains, step by step, in constant memory.

Where CUDA has started, times are those of the GPU: the host only queues work there.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from robust_train.compat import has_context
from robust_train.memory.cuda import started_torch
from robust_train.model.events import Event, SpeedMeasured
from robust_train.model.spec import Speed

T = TypeVar("T")

_RATIO = math.log(1.02)
_SHORTEST_SECONDS = 1e-6
_HIGH = 0.95
_FIRST_REPORT_SECONDS, _REPORT_SECONDS = 1.0, 30.0
MOST_UNSETTLED = 200


class Histogram:
    """Counts of durations on a scale with steps of 2 %, so quantiles are at most 1 % off."""

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self._counts: dict[int, int] = {}

    def add(self, seconds: float, count: int = 1) -> None:
        """Add ``count`` durations of ``seconds`` each."""
        place = round(math.log(max(seconds, _SHORTEST_SECONDS)) / _RATIO)
        self._counts[place] = self._counts.get(place, 0) + count
        self.count += count
        self.sum += seconds * count

    def quantile(self, share: float) -> float:
        """Return what a ``share`` of the durations does not exceed."""
        left = share * self.count
        for place in sorted(self._counts):
            left -= self._counts[place]
            if left <= 0:
                break
        return math.exp(place * _RATIO)

    def sum_without_peaks(self) -> float:
        """Return the sum, each of the longest 5 % counted as the 95th percentile."""
        most = self.quantile(_HIGH)
        return sum(
            min(math.exp(p * _RATIO), most) * count for p, count in self._counts.items()
        )


class Moment:
    """Now, on the host; on a GPU in use, when what is queued there so far is done."""

    def __init__(self) -> None:
        self.at = time.perf_counter()
        self._event = _event_now()

    def is_past(self) -> bool:
        """Return whether the GPU, too, has come here."""
        return self._event is None or bool(self._event.query())

    def seconds_until(self, later: Moment) -> float:
        """Return the time from here to another moment that is past."""
        if self._event is None or later._event is None:
            return later.at - self.at
        return float(self._event.elapsed_time(later._event)) / 1000


def _event_now() -> Any:
    """Return an event behind what is queued on the current GPU, if this process uses that one: an
    event makes a context where there is none."""
    torch = started_torch()
    if torch is None or not has_context(torch, torch.cuda.current_device()):
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass
class _Interval:
    """The time from one reported step to the next."""

    begin: Moment
    counts: bool = True
    steps: int = 0
    samples: int = 0
    waits: deque[tuple[Moment, Moment]] | None = None  # for data; None if unknown
    settled_seconds: float = (
        0.0  # of those that the GPU has passed, and that are no more in it
    )
    alone_until: Moment | None = None  # the ranks exchange something from here on
    end: Moment = field(init=False)

    def settle(self) -> None:
        """Sum up the waits that the GPU has passed: a step may be one epoch of a great many
        batches. What the GPU computed meanwhile is no time without data."""
        while self.waits and self.waits[0][1].is_past():
            start, end = self.waits.popleft()
            self.settled_seconds += min(end.at - start.at, start.seconds_until(end))


class SpeedMeter:
    """Measures the steps of one rank; what fails costs the figures.

    An attempt's first step does not count, nor does a time between two steps in which something
    else is known to have happened: a validation, a checkpoint, the end of an epoch.

    Attributes:
        least_seconds: reports of steps are this far apart at least to be measured.
    """

    def __init__(
        self,
        rank: int = 0,
        ranks: int = 1,
        # returns the samples of this rank in a step, None if unknown
        samples: Callable[[], int | None] = lambda: None,
        report: Callable[[Event], None] = lambda event: None,  # takes the events
    ) -> None:
        self.least_seconds = 0.0
        self._rank, self._ranks = rank, ranks
        self._samples, self._report = samples, report
        self._is_on = True
        self._is_explicit = False  # someone measures the waits for data themselves
        self._step: int | None = None
        self._interval: _Interval | None = None
        self._wait_from: Moment | None = None
        self._unsettled: deque[_Interval] = deque(maxlen=MOST_UNSETTLED)
        self._steps, self._waits = Histogram(), Histogram()
        self._samples_done: int | None = 0
        self._seconds_with_waits = self._seconds_alone = 0.0
        self._steps_alone = 0
        self._next_report, self._pause = 0.0, _FIRST_REPORT_SECONDS

    def stop(self) -> None:
        """Measure nothing more: someone else does."""
        self._is_on = False

    def begin(self) -> None:
        """Begin a step now; the time before does not count."""
        if self._interval is not None and (now := self._moment()):
            self._interval = _Interval(now)

    def pause(self) -> None:
        """Leave the present step out: it has more to do than to train."""
        if self._interval is not None:
            self._interval.counts = False

    def waits(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield from ``loader``, which a step begins with, and measure the time that it takes."""
        self.begin()
        self.wait_begins()
        for batch in loader:
            self.wait_ends()
            yield batch
            self.wait_begins()

    def wait_begins(self) -> None:
        """Count from here on as waiting for data."""
        if self._interval is not None:
            self._wait_from = self._moment()

    def wait_ends(self) -> None:
        """End what :meth:`wait_begins` began."""
        start, self._wait_from, self._is_explicit = self._wait_from, None, True
        if start and self._interval and (now := self._moment()):
            self._interval.waits = self._interval.waits or deque()
            self._interval.waits.append((start, now))
            if len(self._interval.waits) > MOST_UNSETTLED:
                self._settle()

    def batch_begins(self, samples: int) -> None:
        """Count from here on as computing a batch."""
        interval = self._interval
        if interval is None:
            return
        interval.samples += samples
        if not self._is_explicit and interval.waits is None and (now := self._moment()):
            interval.waits = deque([(interval.begin, now)])

    def alone_until_now(self) -> None:
        """Count from here on as the ranks' waiting for each other."""
        if self._interval is not None and self._ranks > 1:
            self._interval.alone_until = self._moment()

    def step_done(self, step: int) -> None:
        """Count optimizer step ``step``."""
        now = self._moment()
        if now is None:
            return
        interval, before = self._interval, self._step
        if (
            interval is not None
            and interval.counts
            and before is not None
            and step > before
        ):
            if now.at - interval.begin.at < self.least_seconds:
                return
            interval.end, interval.steps = now, step - before
            self._unsettled.append(interval)
        self._step, self._interval = step, _Interval(now)
        self._settle()
        if now.at >= self._next_report:
            self.send()
            self._next_report = now.at + self._pause
            self._pause = min(2 * self._pause, _REPORT_SECONDS)

    def send(self) -> None:
        """Report the figures so far."""
        self._settle()
        speed = self.speed()
        if speed is not None and self._is_on:
            self._report(SpeedMeasured(speed, self._rank))

    def speed(self) -> Speed | None:
        """Return the figures so far, None without any."""
        steps, waits = self._steps, self._waits
        if not steps.count or steps.sum <= 0:
            return None
        # where it is unknown what is data and what is not, rare peaks are something else
        seconds = steps.sum if self._is_explicit else steps.sum_without_peaks()
        share = alone = None
        if waits.count:
            waited = waits.sum if self._is_explicit else waits.sum_without_peaks()
            share = waited / max(self._seconds_with_waits - waits.sum + waited, waited)
        if self._steps_alone:
            alone = self._seconds_alone / self._steps_alone
        return Speed(
            rank=self._rank,
            steps=steps.count,
            seconds_per_step=_rounded(steps.quantile(0.5)),
            seconds_per_step_p95=_rounded(steps.quantile(_HIGH)),
            samples_per_second=self._samples_done
            and _rounded(self._samples_done / seconds),
            data_share=None if share is None else round(share, 4),
            seconds_alone_per_step=alone and _rounded(alone),
        )

    def _moment(self) -> Moment | None:
        try:
            return Moment() if self._is_on else None
        except RuntimeError:  # after a fault the device answers nothing
            self._is_on = False
            return None

    def _settle(self) -> None:
        """Count the steps that the GPU, too, has done."""
        try:
            while self._unsettled and self._unsettled[0].end.is_past():
                self._count(self._unsettled.popleft())
            if self._interval is not None:
                self._interval.settle()
        except RuntimeError:
            self._is_on = False

    def _count(self, interval: _Interval) -> None:
        steps, seconds = interval.steps, interval.begin.seconds_until(interval.end)
        self._steps.add(seconds / steps, steps)
        samples = interval.samples or steps * (self._samples() or 0)
        known = self._samples_done is not None and samples > 0
        self._samples_done = (self._samples_done or 0) + samples if known else None
        if interval.waits is not None:
            interval.settle()
            self._waits.add(interval.settled_seconds / steps, steps)
            self._seconds_with_waits += seconds
        if interval.alone_until is not None:
            self._seconds_alone += interval.begin.seconds_until(interval.alone_until)
            self._steps_alone += steps


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
