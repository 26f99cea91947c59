"""In the launcher, finds out whether host memory ran out if the failure's message does not say."""

from __future__ import annotations

from robust_train.failures.shortage import with_shortage
from robust_train.launcher.hooks import History, InLauncher
from robust_train.model.attempt import Attempt


class OutOfMemory(InLauncher):
    """Recognises a lack of memory from the process's peak and from earlier attempts."""

    def evidence(self, attempt: Attempt, history: History) -> Attempt:
        """Return the attempt, with a lack of host memory as its failure if that is the cause."""
        return with_shortage(attempt, history)
