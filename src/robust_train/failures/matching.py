"""What a report is: the first row of one ordered table that matches it.

The order is the argument: what only sounds like memory comes before memory, the host's memory
before the device's (its messages often name CUDA too), memory before faults, faults before the
communication that they break.
"""

from __future__ import annotations

from collections.abc import Iterable

from robust_train.failures.device_patterns import DEVICES, NETWORK
from robust_train.failures.error_reports import ErrorReport
from robust_train.failures.look_alike_patterns import BEFORE_MEMORY
from robust_train.failures.memory_patterns import MEMORY, NOT_ENOUGH_FOR_VLLM
from robust_train.failures.patterns import Match
from robust_train.values import FailureKind

PATTERNS = (*BEFORE_MEMORY, *MEMORY, *DEVICES, *NETWORK)

# where several failed at once, the one whose remedy keeps the job alive
_PRIORITY = (
    FailureKind.DEVICE_OOM,
    FailureKind.HOST_OOM,
    FailureKind.DEVICE_FAULT,
    FailureKind.WORKER_DEATH,
    FailureKind.DEVICE_UNAVAILABLE,
    FailureKind.COMM,
    FailureKind.INTERRUPTED,
    FailureKind.BUG,
)


def match(report: ErrorReport) -> Match | None:
    """Return what a report is, None where no row matches, which is a bug by default. A match of the
    kind ``bug`` is one that no cause behind the exception can change."""
    if report.is_programming_error:
        if report.types[:1] == ("ValueError",) and NOT_ENOUGH_FOR_VLLM.matches(report):
            return NOT_ENOUGH_FOR_VLLM.match
        return None
    return next((row.match for row in PATTERNS if row.matches(report)), None)


def most_telling(matches: Iterable[tuple[ErrorReport, Match]]) -> tuple[ErrorReport, Match]:
    """Return the one of several to act upon."""
    return min(matches, key=lambda pair: _PRIORITY.index(pair[1].kind))
