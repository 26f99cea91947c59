"""In the launcher, measures the GPUs of a failed attempt, and excludes faulty GPUs."""

from __future__ import annotations

from robust_train.features.gpus.record import GpusNote
from robust_train.launcher.hooks import History, InLauncher
from robust_train.model.attempt import Attempt


class Gpus(InLauncher):
    """Adds the free memory of an attempt's GPU to its record, and excludes GPUs that failed."""

    def evidence(self, attempt: Attempt, history: History) -> Attempt:
        """Add the free memory of the GPU on which the attempt failed.

        If that GPU is faulty, it is also excluded for all jobs.
        """
        free = self.job.driver.devices.record_end(attempt)
        return attempt.having(GpusNote(free.before, free.after))
