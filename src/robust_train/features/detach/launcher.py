"""Lets the foreground command exit as soon as the job in the background waits or trains.

The launcher of a detached job runs in the background. The command that started the launcher waits
for a message from it, prints the message and exits.
"""

from __future__ import annotations

from robust_train.children import detach
from robust_train.launcher.hooks import InLauncher
from robust_train.model.attempt import Attempt
from robust_train.model.events import AttemptStarted, Event
from robust_train.queue.waiting import WaitStatus


class Detach(InLauncher):
    """Notifies the foreground command that the job waits or trains."""

    def event(self, event: Event, attempt: Attempt | None) -> None:
        """Send the foreground command the text that it prints before it exits."""
        if isinstance(event, WaitStatus | AttemptStarted):
            state = self.job.state
            folder = self.job.plan.run_dir
            detach.report_start(folder, detach.job_text(state.id, state.name, folder))
