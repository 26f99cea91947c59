"""Notifies users of a job's events, in the launcher.

`Notifications` passes events and the job's state to `children.notifier`, which decides which of
them are worth a message, and delivers each message in a separate process.
"""

from __future__ import annotations

from robust_train.children.notifier import Notifier, notify_settings
from robust_train.launcher.hooks import InLauncher, JobView, Pause
from robust_train.model.attempt import Attempt
from robust_train.model.events import Event


class Notifications(InLauncher):
    """Passes a job's events and state to the notifier."""

    def __init__(self, job: JobView) -> None:
        super().__init__(job)
        plan = job.plan
        self._notifier = Notifier(notify_settings(plan.config.notify, plan.environ))

    def event(self, event: Event, attempt: Attempt | None) -> None:
        """Send notifications about an event and the state after it."""
        self._notifier.on_event(event, self.job.state)
        self._notifier.poll(self.job.state)

    def tick(self, attempt: Attempt | None) -> Pause | None:
        """Send a notification about a new state, and end deliveries that take too long."""
        self._notifier.poll(self.job.state)
        return None

    def close(self) -> None:
        """Send a notification about the end, and wait a moment for the last deliveries.

        The end of the job is already on disk, so a signal only cuts the last deliveries short.
        """
        with self.job.signals.hand_signals_to(lambda signum: self._notifier.hurry()):
            self._notifier.poll(self.job.state)
            self._notifier.finish()
