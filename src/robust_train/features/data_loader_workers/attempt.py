"""Records whether the trainer uses the number of data-loader workers in its config.

When an attempt fails, the runner calls `ReadsWorkers.evidence` in the attempt's process. If the
trainer ignores the number, the launcher cannot reduce its workers.
"""

from __future__ import annotations

from dataclasses import replace

from robust_train.attempt.hooks import InAttempt
from robust_train.attempt.supports import WORKERS
from robust_train.features.data_loader_workers.record import WorkersFinding
from robust_train.model.failure import Failure, FailureKind


class ReadsWorkers(InAttempt):
    """Adds to the evidence of a failure whether the trainer reads the number of workers."""

    def evidence(self, failure: Failure) -> Failure:
        """Mark a lack of host memory if the trainer does not read the number of workers."""
        if failure.kind is not FailureKind.HOST_OOM or self.live.supports(WORKERS):
            return failure
        finding = replace(failure.evidence.of(WorkersFinding), no_workers=True)
        return replace(failure, evidence=failure.evidence.having(finding))
