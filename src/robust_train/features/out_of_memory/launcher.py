"""Finds out whether host memory ran out although the failure's message does not say so, in the
launcher."""

from __future__ import annotations

from robust_train.failures.shortage import with_shortage
from robust_train.launcher.hooks import History, InLauncher
from robust_train.model.attempt import Attempt


class OutOfMemory(InLauncher):
    """Recognises a lack of memory by the process's peak and by earlier attempts."""

    def evidence(self, attempt: Attempt, history: History) -> Attempt:
        """Return the attempt, with a lack of host memory as its failure if that is the cause."""
        return with_shortage(attempt, history)
