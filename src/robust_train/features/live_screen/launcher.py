"""Shows a job's state while it runs."""

from __future__ import annotations

from robust_train.launcher.hooks import InLauncher, JobView, Pause
from robust_train.model.attempt import Attempt
from robust_train.model.events import Event
from robust_train.queue.waiting import WaitStatus
from robust_train.report.status import LiveStatus


class LiveScreen(InLauncher):
    """Draws the job's state, and logs a wait that no screen shows."""

    def __init__(self, job: JobView) -> None:
        super().__init__(job)
        self._live = LiveStatus(is_wanted=job.plan.surroundings.owns_terminal)

    def begin(self) -> None:
        """Take the lower lines of the terminal."""
        self._live.__enter__()

    def close(self) -> None:
        """Give the terminal back."""
        self._live.close()

    def event(self, event: Event, attempt: Attempt | None) -> None:
        """Log each poll of a wait."""
        if isinstance(event, WaitStatus):
            self._live.log_waiting(event)

    def tick(self, attempt: Attempt | None) -> Pause | None:
        """Show the state as it is now."""
        self._live.show(self.job.state)
        return None
