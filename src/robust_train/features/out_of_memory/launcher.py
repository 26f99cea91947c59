"""Finds evidence of a lack of memory in failures whose message does not name it."""

from __future__ import annotations

from robust_train.failures.shortage import with_shortage
from robust_train.launcher.hooks import History, InLauncher
from robust_train.model.attempt import Attempt


class OutOfMemory(InLauncher):
    """Recognises a lack of memory by figures and by earlier attempts."""

    def evidence(self, attempt: Attempt, history: History) -> Attempt:
        """Return the attempt, with a lack of memory as its failure if the evidence shows that."""
        return with_shortage(attempt, history)
