"""Evidence of memory that ran out and that no message names."""

from __future__ import annotations

from robust_train.failures.shortage import with_shortage
from robust_train.launcher.hooks import History, InLauncher
from robust_train.model.attempt import Attempt


class OutOfMemory(InLauncher):
    """Recognises a lack of memory by figures and by the attempts before."""

    def evidence(self, attempt: Attempt, history: History) -> Attempt:
        """Return an attempt whose unclear failure may have become a lack of memory."""
        return with_shortage(attempt, history)
