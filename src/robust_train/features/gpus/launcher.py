"""Adds the queue's figures of an attempt's GPUs to its evidence, once its processes ended."""

from __future__ import annotations

from robust_train.features.gpus.record import GpusNote
from robust_train.launcher.hooks import History, InLauncher
from robust_train.model.attempt import Attempt


class Gpus(InLauncher):
    """Measures the free memory on the GPUs of an attempt, and excludes GPUs that failed."""

    def evidence(self, attempt: Attempt, history: History) -> Attempt:
        """Add the free memory of the GPU on which the attempt failed."""
        free = self.job.driver.devices.record_end(attempt)
        return attempt.having(GpusNote(free.before, free.after))
