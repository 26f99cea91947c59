"""Shows a job's state on the terminal while it runs, in the launcher."""

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
    """Draws the job's state, and logs a wait that no screen shows."""

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
        """Let an attempt not print what the screen shows."""
        return replace(request, has_live_status=self._is_wanted)

    def event(self, event: Event, attempt: Attempt | None) -> None:
        """Log each poll of a wait that the screen does not show."""
        if not isinstance(event, WaitStatus):
            return
        poll = (event.checks, event.obstacles)
        if self._live.area is None and event.checks and poll != self._logged:
            self._logged = poll
            log.info("%s", event.sentence())

    def tick(self, attempt: Attempt | None) -> Pause | None:
        """Show the current state."""
        self._live.show(self.job.state)
        return None
