"""In the launcher, logs a script's command and warns of missing or unusable checkpoints."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path

from robust_train.launcher.hooks import InLauncher, JobView
from robust_train.model.attempt import Attempt, AttemptEnded
from robust_train.model.events import CheckpointUnused, Event, JobEnded, ScriptStarted

log = logging.getLogger("robust_train")


class ScriptCheckpoints(InLauncher):
    """Warns once if the pattern matches no file, and about each file that cannot be used."""

    def __init__(self, job: JobView) -> None:
        super().__init__(job)
        self._unused = ""  # the reason why the newest file cannot be used, empty if it can
        self._ended = 0  # number of attempts that have ended
        self._has_warned = False

    def event(self, event: Event, attempt: Attempt | None) -> None:
        """Log the command, and the problems with checkpoints."""
        match event:
            case ScriptStarted():
                # The attempt does not log the command, because its output is evidence.
                log.info("running %s", shlex.join(event.argv))
            case CheckpointUnused(text=text):
                if text != self._unused:
                    log.warning("%s", text)
                self._unused = text
            case AttemptEnded(record=record):
                self._ended += 1
                if self._ended == 1 and record.is_retried:
                    self._warn_of_pattern()
            case JobEnded() if self._ended:
                self._warn_of_pattern()

    def _warn_of_pattern(self) -> None:
        """Warn once if no file matches the pattern for checkpoints."""
        trainer = self.job.plan.config.trainer
        if self._unused or self._has_warned or self.job.checkpoint is not None:
            return
        if trainer.checkpoint_glob is None:
            return
        self._has_warned = True
        log.warning(
            "no new file matches the pattern for checkpoints %s (in %s): without a checkpoint an "
            "attempt starts from the beginning",
            trainer.checkpoint_glob,
            Path(trainer.cwd or ".").absolute(),
        )
