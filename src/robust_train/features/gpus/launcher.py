"""Measures and excludes the GPUs of a failed attempt, in the launcher, once its processes ended."""

from __future__ import annotations

from robust_train.features.gpus.record import GpusNote
from robust_train.launcher.hooks import History, InLauncher
from robust_train.model.attempt import Attempt


class Gpus(InLauncher):
    """Adds the free memory of an attempt's GPU to its record, and excludes GPUs that failed."""

    def evidence(self, attempt: Attempt, history: History) -> Attempt:
        """Add the free memory of the GPU on which the attempt failed. The same call excludes that
        GPU for all jobs if it is faulty."""
        free = self.job.driver.devices.record_end(attempt)
        return attempt.having(GpusNote(free.before, free.after))
