"""Counts an attempt's data-loader workers, and checks how much memory they hold.

In the launcher, `WorkersWatch` checks the attempt's processes while it runs, and sends the result
when the attempt ends. `DataLoaderWorkers` adds the result to the evidence of a failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from robust_train.children.interpreters import Interpreter
from robust_train.config.attempt import AttemptRequest
from robust_train.features.data_loader_workers.record import (
    WorkersFinding,
    WorkersNote,
    WorkersSeen,
)
from robust_train.host.linux import TICK_SECONDS
from robust_train.host.memory import Workers, find_workers
from robust_train.launcher.hooks import End, History, InLauncher, Watch
from robust_train.model.attempt import Attempt
from robust_train.model.events import Event
from robust_train.model.failure import FailureKind

# The kinds of failure for which workers matter.
_KINDS = (FailureKind.HOST_OOM, FailureKind.WORKER_DEATH)
_LONGEST_PAUSE_SECONDS = 60.0
# If no workers existed after this share of the attempt's time, the trainer does not use workers.
_LATE = 1 / 3


class WorkersWatch(Watch):
    """Looks for data-loader workers, less often as the attempt gets older."""

    def __init__(
        self, request: AttemptRequest, pids: Sequence[int], send: Callable[[Event], None]
    ) -> None:
        super().__init__(request, pids, send)
        self._send = send
        self._workers = Workers()  # the workers at the last poll that found any
        self._began_at = time.monotonic()
        self._looked_at = self._began_at
        self._next_look = self._began_at + TICK_SECONDS

    def poll(self, living: Mapping[int, Interpreter]) -> End | None:
        """Count the workers if the last count is old enough."""
        now = time.monotonic()
        if now < self._next_look:
            return None
        workers = find_workers([process.pid for process in living.values()])
        if workers.count:
            self._workers = workers
        self._looked_at = now
        pause = max(now - self._began_at, TICK_SECONDS)
        self._next_look = now + min(pause, _LONGEST_PAUSE_SECONDS)
        return None

    def close(self) -> None:
        """Send the number of workers.

        Zero is sent only if the last poll was late enough to show that the trainer uses no workers.
        """
        seconds = time.monotonic() - self._began_at
        is_late = self._looked_at - self._began_at >= _LATE * seconds
        workers = self._workers
        if workers.count or is_late:
            self._send(WorkersSeen(workers.count, workers.hold_most))


class DataLoaderWorkers(InLauncher):
    """Adds the workers to the evidence of a failure."""

    def evidence(self, attempt: Attempt, history: History) -> Attempt:
        """Add the workers to the evidence if host memory ran out, or if a worker died.

        The memory that workers hold matters only if the kernel counted the memory of all processes.
        If an allocation failed in a single process, that process reached its own limit.
        """
        failure = attempt.failure
        if failure is None or failure.kind not in _KINDS:
            return attempt
        note = attempt.of(WorkersNote)
        workers = note.workers_seen
        if failure.kind is FailureKind.WORKER_DEATH and not workers:
            # A worker died, so the watch only missed the workers. Their number is unknown.
            workers = None
        counts_all_processes = failure.evidence.library in ("kernel", "os", "ray")
        finding = replace(
            failure.evidence.of(WorkersFinding),
            workers=workers,
            workers_hold_most=note.they_held_most if counts_all_processes else False,
        )
        evidence = failure.evidence.having(finding)
        return replace(attempt, failure=replace(failure, evidence=evidence))
