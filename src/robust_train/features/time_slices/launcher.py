"""Pauses an attempt at the end of its time slice, in the launcher, and queues the job again."""

from __future__ import annotations

import math
import time

from robust_train.features.time_slices.model import TimeSliceKeys
from robust_train.gpu.processes import user_name
from robust_train.launcher.hooks import History, InLauncher, JobView, Pause
from robust_train.model.attempt import Attempt
from robust_train.model.failure import FailureKind
from robust_train.model.spec import Decision, Retry

_POLL_SECONDS = 5.0


class TimeSlices(InLauncher):
    """Gives the GPUs to another user's job once the time slice is over."""

    def __init__(self, job: JobView) -> None:
        super().__init__(job)
        self._paused = 0  # number of the attempt that was paused
        self._polled_at = -math.inf

    def tick(self, attempt: Attempt | None) -> Pause | None:
        """Pause the attempt if its slice is over and a user with fewer GPUs waits.

        An attempt without a checkpoint is not paused, because it would start at the same step
        again. A trainer in the launcher's process is not paused either, because only signals stop
        it.
        """
        if attempt is None or not attempt.saves or self.job.plan.config.runs_inline:
            return None
        signals = self.job.signals
        if signals.received or not signals.can_stop:
            return None
        if not self._is_over():
            return None
        self._polled_at = time.monotonic()
        waiting = self.job.driver.devices.find_job_to_yield_to()
        if waiting is None:
            return None
        self._paused = attempt.number
        whose = f"{waiting.shown_id} of {user_name(waiting.owner)}, who holds fewer GPUs"
        return Pause(f"the time slice is over, and job {whose}, waits")

    def _is_over(self) -> bool:
        """Return whether the slice is over, and it is time to look for waiting users again."""
        config = self.job.plan.config
        minutes = config.of(TimeSliceKeys).gpu_slice_minutes
        if minutes is None or not config.wait_for_gpu:
            return False
        slice_ends = self.job.driver.devices.acquired_at + 60 * minutes
        return time.monotonic() >= max(slice_ends, self._polled_at + _POLL_SECONDS)

    def overrule(self, history: History) -> Decision | None:
        """Queue the job again after a pause ended the attempt."""
        last = history[-1]
        was_paused = last.number == self._paused
        if not was_paused or last.kind is not FailureKind.INTERRUPTED:
            return None
        return Retry(
            last.spec,
            "queue_again",
            "its time slice is over and another user waits (gpu_slice_minutes)",
            room=self.job.driver.devices.release_for_others(len(last.spec.gpus)),
        )
