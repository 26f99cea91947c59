"""Counts the data-loader workers of an attempt, and the memory that they hold, from the
launcher."""

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

_OF_THE_HOST = (FailureKind.HOST_OOM, FailureKind.WORKER_DEATH)
_LONGEST_BETWEEN_LOOKS = 60.0
# A share of the attempt's time from its start. If no workers were seen by then, there are none.
_LATE = 1 / 3


class WorkersWatch(Watch):
    """Looks for data-loader workers, ever less often."""

    def __init__(
        self, request: AttemptRequest, pids: Sequence[int], send: Callable[[Event], None]
    ) -> None:
        super().__init__(request, pids, send)
        self._send = send
        self._workers = Workers()  # those of the last look that found any
        self._began = time.monotonic()
        self._looked = self._began
        self._look_at = self._began + TICK_SECONDS

    def poll(self, living: Mapping[int, Interpreter]) -> End | None:
        """Count the workers if that is due."""
        now = time.monotonic()
        if now < self._look_at:
            return None
        workers = find_workers([process.pid for process in living.values()])
        if workers.count:
            self._workers = workers
        self._looked = now
        pause = max(now - self._began, TICK_SECONDS)
        self._look_at = now + min(pause, _LONGEST_BETWEEN_LOOKS)
        return None

    def close(self) -> None:
        """Record the workers. That there are none counts only if the last look was late enough."""
        seconds = time.monotonic() - self._began
        is_late = self._looked - self._began >= _LATE * seconds
        workers = self._workers
        if workers.count or is_late:
            self._send(WorkersSeen(workers.count, workers.hold_most))


class DataLoaderWorkers(InLauncher):
    """Adds the workers to the evidence for a lack of host memory."""

    def evidence(self, attempt: Attempt, history: History) -> Attempt:
        """Add the workers to a lack of host memory, or to the death of a worker.

        A process that is refused memory has reached its own limit, for which workers do not matter.
        They matter if the kernel counts the memory of all processes.
        """
        failure = attempt.failure
        if failure is None or failure.kind not in _OF_THE_HOST:
            return attempt
        note = attempt.of(WorkersNote)
        workers = note.workers_seen
        if failure.kind is FailureKind.WORKER_DEATH and not workers:
            # A worker that died early existed between two looks.
            workers = None
        is_of_all = failure.evidence.library in ("kernel", "os", "ray")
        finding = replace(
            failure.evidence.of(WorkersFinding),
            workers=workers,
            workers_hold_most=note.they_held_most if is_of_all else False,
        )
        evidence = failure.evidence.having(finding)
        return replace(attempt, failure=replace(failure, evidence=evidence))
