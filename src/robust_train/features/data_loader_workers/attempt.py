"""Whether the trainer accepts the number of data-loader workers in its config."""

from __future__ import annotations

from dataclasses import replace

from robust_train.attempt.hooks import InAttempt
from robust_train.attempt.supports import WORKERS
from robust_train.features.data_loader_workers.record import WorkersFinding
from robust_train.model.failure import Failure, FailureKind


class ReadsWorkers(InAttempt):
    """Notes whether the launcher can reduce the workers."""

    def evidence(self, failure: Failure) -> Failure:
        """Add to a lack of host memory whether the trainer reads a number of workers."""
        if failure.kind is not FailureKind.HOST_OOM or self.live.supports(WORKERS):
            return failure
        finding = replace(failure.evidence.of(WorkersFinding), no_workers=True)
        return replace(failure, evidence=failure.evidence.having(finding))
