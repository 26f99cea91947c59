"""A time slice that is over: the attempt is paused, and the job queues again."""

from __future__ import annotations

from robust_train.gpu.processes import user_name
from robust_train.launcher.hooks import History, InLauncher, JobView, Pause
from robust_train.model.attempt import Attempt
from robust_train.model.failure import FailureKind
from robust_train.model.spec import Decision, Retry


class TimeSlices(InLauncher):
    """Lets another user's job have the GPUs once the slice is over."""

    def __init__(self, job: JobView) -> None:
        super().__init__(job)
        self._paused = 0  # number of the attempt whose slice was over

    def tick(self, attempt: Attempt | None) -> Pause | None:
        """Pause the attempt if its slice is over and somebody with fewer GPUs waits.

        An attempt that saves nothing would begin at the same step each time, and a trainer in this
        process stops for signals only.
        """
        if attempt is None or not attempt.saves or self.job.plan.config.runs_inline:
            return None
        if self.job.signals.received:
            return None
        waiting = self.job.driver.devices.who_waits()
        if waiting is None:
            return None
        self._paused = attempt.number
        whose = f"{waiting.shown_id} of {user_name(waiting.owner)}, who holds fewer GPUs"
        return Pause(f"the time slice is over, and job {whose}, waits")

    def overrule(self, history: History) -> Decision | None:
        """Queue again after a pause that ended the attempt."""
        last = history[-1]
        is_over = last.number == self._paused
        if not is_over or last.kind is not FailureKind.INTERRUPTED:
            return None
        return Retry(
            last.spec,
            "queue_again",
            "its time slice is over and another user waits (gpu_slice_minutes)",
            room=self.job.driver.devices.leave(len(last.spec.gpus)),
        )
