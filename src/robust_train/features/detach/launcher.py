"""Ends the command in the foreground once the job in the background has started."""

from __future__ import annotations

from robust_train.children import detach
from robust_train.launcher.hooks import InLauncher
from robust_train.model.attempt import Attempt
from robust_train.model.events import AttemptStarted, Event
from robust_train.queue.waiting import WaitStatus


class Detach(InLauncher):
    """Reports to the foreground that the job waits or trains."""

    def event(self, event: Event, attempt: Attempt | None) -> None:
        """End the foreground with the information that its user needs about the job."""
        if isinstance(event, WaitStatus | AttemptStarted):
            state = self.job.state
            folder = self.job.plan.run_dir
            detach.has_begun(folder, detach.job_text(state.id, state.name, folder))
