"""Records the MLflow and trackio runs that an attempt logs to, in the process that trains."""

from __future__ import annotations

from robust_train.attempt.hooks import InAttempt
from robust_train.attempt.live import LiveAttempt
from robust_train.config.schema import RobustConfig
from robust_train.folder.trackers import TrackerNote


class TrackersOfAttempt(InAttempt):
    """Updates the record of tracker runs in the run folder, on rank 0."""

    def __init__(self, live: LiveAttempt, config: RobustConfig) -> None:
        super().__init__(live, config)
        self._note = TrackerNote(live.run_dir, live.saving.job if live.is_main else None)

    def boundary(self, what: str) -> None:
        """Look for a new tracker run after a report of progress."""
        if what == "reported":
            self._note.poll()
