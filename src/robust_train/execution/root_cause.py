"""Which of several ranks' endings is the reason for the others. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from robust_train.values import FailureKind

_FOLLOWS_FROM_OTHERS = frozenset({FailureKind.COMM.value, FailureKind.INTERRUPTED.value})


@dataclass(frozen=True)
class RankEnd:
    """How one rank's process ended.

    Attributes:
        rank: its number.
        pid: its process id.
        account: its own ``finished`` or ``failed`` event; None where it died without a word.
        at: seconds of the monotonic clock: when it gave its account, else when it was seen dead.
        returncode: as subprocess has it, None where it did not end by itself.
        was_killed: it was killed because another had failed.
    """

    rank: int
    pid: int
    account: Mapping[str, Any] | None
    at: float
    returncode: int | None = None
    was_killed: bool = False

    @property
    def kind(self) -> str | None:
        """The failure's kind by its own account, None without one."""
        if self.account is None or self.account["event"] == "finished":
            return None
        kind: str = self.account["failure"]["kind"]
        return kind

    @property
    def is_failure(self) -> bool:
        """It failed, and not because it was killed for another's failure."""
        if self.account is not None:
            return bool(self.account["event"] == "failed")
        return not self.was_killed

    @property
    def others_know(self) -> bool:
        """The other ranks have heard of its end and end by themselves, after a last checkpoint."""
        if self.kind == FailureKind.INTERRUPTED.value:
            return True
        return self.account is not None and bool(self.account.get("others_know"))


def root_cause(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The end that the others followed from; None where no rank failed.

    A rank that the kernel killed says nothing, and its peers report a broken connection first: so
    SIGKILL comes before any account. After that the earliest one counts that is no consequence by
    its nature (a lost connection, having been told to stop) or by its own word.
    """
    failures = [end for end in ends if end.is_failure]
    return min(failures, key=_order, default=None)


def _order(end: RankEnd) -> tuple[int, float]:
    if end.account is None:
        return (0 if end.returncode == -signal.SIGKILL else 1), end.at
    if end.account.get("heard_of_rank") is not None:
        return 2, end.at
    return (3 if end.kind in _FOLLOWS_FROM_OTHERS else 1), end.at
