"""One row of the table of wordings: what it is made of."""

from __future__ import annotations

import re
from dataclasses import dataclass

from robust_train.failures.accounts import Account
from robust_train.values import FailureKind

BUG = FailureKind.BUG
DEVICE_OOM = FailureKind.DEVICE_OOM
HOST_OOM = FailureKind.HOST_OOM
WORKER_DEATH = FailureKind.WORKER_DEATH
DEVICE_FAULT = FailureKind.DEVICE_FAULT
DEVICE_UNAVAILABLE = FailureKind.DEVICE_UNAVAILABLE
COMM = FailureKind.COMM
INTERRUPTED = FailureKind.INTERRUPTED


@dataclass(frozen=True)
class Verdict:
    """The kind of a failure and the library that raised it, None where the words do not tell."""

    kind: FailureKind
    library: str | None = None


@dataclass(frozen=True)
class Rule:
    """One row: an account with one of these types, or with these words, is this kind of failure."""

    kind: FailureKind
    library: str | None
    words: re.Pattern[str] | None = None
    types: frozenset[str] = frozenset()
    errnos: frozenset[int] = frozenset()

    def fits(self, account: Account) -> bool:
        """Whether the account is one of this row's."""
        if not self.types.isdisjoint(account.types):
            return True
        if account.errno is not None and account.errno in self.errnos:
            return True
        return self.words is not None and self.words.search(account.text) is not None


def words(kind: FailureKind, library: str | None, *alternatives: str) -> Rule:
    """A row for messages in which one of these patterns is found, in any case."""
    return Rule(kind, library, re.compile("|".join(alternatives), re.IGNORECASE))


def types_named(kind: FailureKind, library: str | None, *names: str) -> Rule:
    """A row for exceptions of a class of one of these names, or derived from one."""
    return Rule(kind, library, types=frozenset(names))
