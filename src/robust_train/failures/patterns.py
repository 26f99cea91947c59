"""One row of the table of failures: which reports it matches, and what they then are."""

from __future__ import annotations

import re
from dataclasses import dataclass

from robust_train.failures.error_reports import ErrorReport
from robust_train.values import FailureKind


@dataclass(frozen=True)
class Match:
    """What a report is: its kind, the library that raised it where known, and a clue."""

    kind: FailureKind
    library: str | None = None
    clue: str | None = None


@dataclass(frozen=True)
class Pattern:
    """A report with one of these types, error numbers or words is a ``match``."""

    match: Match
    words: re.Pattern[str] | None = None
    types: frozenset[str] = frozenset()
    errnos: frozenset[int] = frozenset()

    def matches(self, report: ErrorReport) -> bool:
        """Return whether the report is one of this row's."""
        if not self.types.isdisjoint(report.types):
            return True
        if report.errno is not None and report.errno in self.errnos:
            return True
        return self.words is not None and self.words.search(report.text) is not None


def words(kind: str, library: str | None, *alternatives: str, clue: str | None = None) -> Pattern:
    """Return a row for messages in which one of these patterns is found, in any case."""
    found = re.compile("|".join(alternatives), re.IGNORECASE)
    return Pattern(Match(FailureKind(kind), library, clue), found)


def types_named(kind: str, library: str | None, names: str, clue: str | None = None) -> Pattern:
    """Return a row for exceptions of a class with one of these names, or derived from one."""
    return Pattern(Match(FailureKind(kind), library, clue), types=frozenset(names.split()))
