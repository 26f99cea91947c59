"""Which words mean which failure: one ordered table, the first row that fits decides.

The order is the argument: what only sounds like memory comes before memory, the host's memory
before the device's (its messages often name CUDA too), memory before faults, faults before the
communication that they break.
"""

from __future__ import annotations

from collections.abc import Iterable

from robust_train.failures.accounts import Account
from robust_train.failures.devices_and_peers import AFTER_MEMORY
from robust_train.failures.look_alikes import BEFORE_MEMORY
from robust_train.failures.memory import MEMORY, SAID_WITH_A_VALUE_ERROR
from robust_train.failures.rules import Verdict
from robust_train.values import FailureKind

RULES = (*BEFORE_MEMORY, *MEMORY, *AFTER_MEMORY)

# where several failed at once, the one whose remedy keeps the job alive
_TELLING = (
    FailureKind.DEVICE_OOM,
    FailureKind.HOST_OOM,
    FailureKind.DEVICE_FAULT,
    FailureKind.WORKER_DEATH,
    FailureKind.DEVICE_UNAVAILABLE,
    FailureKind.COMM,
    FailureKind.INTERRUPTED,
    FailureKind.BUG,
)


def judge(account: Account) -> Verdict | None:
    """The verdict of the first row that fits; None where no row does, which is a bug by default.

    A verdict of ``bug`` is one that nothing behind the exception can change.
    """
    if account.is_programming_error:
        rule = SAID_WITH_A_VALUE_ERROR
        if account.types[:1] == ("ValueError",) and rule.fits(account):
            return Verdict(rule.kind, rule.library)
        return None
    for rule in RULES:
        if rule.fits(account):
            return Verdict(rule.kind, rule.library)
    return None


def most_telling(told: Iterable[tuple[Account, Verdict]]) -> tuple[Account, Verdict]:
    """Of several verdicts, the one to act upon."""
    return min(told, key=lambda pair: _TELLING.index(pair[1].kind))
