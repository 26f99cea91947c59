"""Finds a lack of memory that no message names, in the launcher."""

from __future__ import annotations

from robust_train.failures.shortage import with_shortage
from robust_train.launcher.hooks import History, InLauncher
from robust_train.model.attempt import Attempt


class OutOfMemory(InLauncher):
    """Recognises a lack of memory by figures and by the attempts before."""

    def evidence(self, attempt: Attempt, history: History) -> Attempt:
        """Reclassify an unclear failure if it shows a lack of memory."""
        return with_shortage(attempt, history)
