"""``isolation=none``: attempts run in this process, for debuggers and notebooks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

from robust_train.errors import Interrupted
from robust_train.events import Event, MemoryHeld, parse
from robust_train.execution import sleep_until_readable
from robust_train.execution.child import (
    failure_from_json,
    finally_returned,
    micro_batch_in_use,
    run_attempt,
)
from robust_train.execution.request import AttemptRequest
from robust_train.execution.signals import SignalWatch
from robust_train.memory.allocator import allocator_variable
from robust_train.memory.cleanup import StartingMemory, release_and_check
from robust_train.run import Run
from robust_train.runfolder.attempt_requests import AttemptRequests
from robust_train.values import FailureKind, Outcome

log = logging.getLogger("robust_train")


class InlineExecutor:
    """Calls the trainer directly.

    Args:
        trainer: the callable itself.
        signals: the launcher's signals; the trainer is asked to stop by the first of them.
    """

    def __init__(self, trainer: Callable[..., Any], signals: SignalWatch) -> None:
        self._trainer = trainer
        self._signals = signals
        self._memory_at_first: StartingMemory | None = None

    def sleep(self, seconds: float, wake: int | None = None) -> None:
        """Wait, but not past a readable ``wake``."""
        sleep_until_readable(seconds, wake)

    def close(self, *, keep_server: bool) -> None:
        """Nothing was started."""

    def prepare(self) -> None:
        """The trainer is here already."""

    def run(
        self,
        request: AttemptRequest,
        on_event: Callable[[Event], None],
        *,
        hold: tuple[int, ...] = (),
        tick: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """Run one attempt; ``hold`` is open in this process anyway, whose main thread is busy."""
        ending: dict[str, Any] = {}
        seen: dict[str, int] = {}
        returned: dict[str, Any] | None = None

        def report(event: dict[str, Any]) -> None:
            nonlocal returned
            if event["event"] in ("finished", "failed"):
                ending.update(event)
                return
            if event["event"] == "training_started":
                seen["start_step"] = event["step"]
            size = micro_batch_in_use(event)
            if size is not None:
                seen["micro_batch"] = size
            returned = finally_returned(event) or returned
            on_event(parse(event))

        run = Run(
            run_dir=request.run_dir,
            attempt=request.attempt,
            resume_checkpoint=request.resume_checkpoint,
            report=lambda event: report(event.as_json()),
        )

        def stop(signum: int) -> None:
            run.request_stop()
            if not run.is_cooperative:
                raise Interrupted("interrupted")

        # CUDA may have been started already; the allocator reads this when it is
        variable = allocator_variable(request.environ)
        os.environ[variable] = request.environ[variable]
        if self._memory_at_first is None:
            self._memory_at_first = StartingMemory.now()
        started = time.monotonic()
        with self._signals.handed_to(stop), AttemptRequests(run, request.run_dir, tick):
            error = run_attempt(request, self._trainer, run, report)
        memory = {k: v for k, v in ending["memory"].items() if isinstance(v, int)}
        on_gpu = "max_allocated" in memory
        failed = ending["event"] == "failed"
        failure = failure_from_json(ending["failure"]) if failed else None
        was_bug = failure is not None and failure.kind is FailureKind.BUG
        # a debugger may want to look at what the frames hold
        if error is not None and request.cfg.memory.clear_on_failure:
            left = release_and_check(error, self._memory_at_first, keep_traceback=was_bug)
            if left is not None:
                log.warning("%s", left)
                on_event(MemoryHeld(left))
        return Outcome(
            failure=failure,
            result=ending.get("result"),
            seconds=time.monotonic() - started,
            start_step=seen.get("start_step", 0),
            end_step=ending["step"],
            peak_memory_bytes=memory["max_allocated" if on_gpu else "max_resident"],
            memory=memory if on_gpu else None,
            memory_returned=returned,
            micro_batch=seen.get("micro_batch"),
            stopped_for=ending.get("stopped_for"),
            traceback=ending.get("traceback"),
            # only what ends the job may keep its frames, and the tensors in them, alive
            error=error if was_bug else None,
        )
