"""Shows a job's state on the terminal while the job waits and trains, in the launcher."""

from __future__ import annotations

import logging
from dataclasses import replace

from robust_train.config.attempt import AttemptRequest
from robust_train.launcher.hooks import InLauncher, JobView, Pause
from robust_train.model.attempt import Attempt
from robust_train.model.events import Event
from robust_train.queue.waiting import WaitStatus
from robust_train.report.status import LiveStatus

log = logging.getLogger("robust_train")


class LiveScreen(InLauncher):
    """Draws the job's state. Without a screen it logs the progress of a wait instead."""

    def __init__(self, job: JobView) -> None:
        super().__init__(job)
        self._is_wanted = job.plan.surroundings.owns_terminal
        self._live = LiveStatus(is_wanted=self._is_wanted)
        self._logged: tuple[object, ...] = ()

    def begin(self) -> None:
        """Start to use the lower lines of the terminal."""
        self._live.__enter__()

    def close(self) -> None:
        """Restore the terminal."""
        self._live.close()

    def request(self, request: AttemptRequest, attempt: Attempt) -> AttemptRequest:
        """Ask the attempt not to print progress that the screen shows."""
        return replace(request, has_live_status=self._is_wanted)

    def event(self, event: Event, attempt: Attempt | None) -> None:
        """Log the state of a wait when it changes, if there is no screen."""
        if not isinstance(event, WaitStatus):
            return
        status = (event.checks, event.obstacles)
        if self._live.area is None and event.checks and status != self._logged:
            self._logged = status
            log.info("%s", event.sentence())

    def tick(self, attempt: Attempt | None) -> Pause | None:
        """Show the current state."""
        self._live.show(self.job.state)
        return None
