"""Classifies what ended an attempt: types come first, then text, and other errors that mention
memory are bugs.

::

    try:
        train()
    except Exception as error:
        failure = classify_failure(error)  # .kind, .message, .evidence

The launcher and attempts use it, as may any program. :mod:`.error_reports` extracts the reports of
an exception or a log, and :mod:`.patterns` looks them up in ``patterns.txt`` with their figures.
:mod:`.stack` reads clues. :mod:`.exits` classifies a process that ended without a report,
:mod:`.printed` restores the lines of its output, and :mod:`.advice` lists advice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from robust_train.failures.error_reports import ErrorReport, reports_of
from robust_train.failures.exits import classify_exit, signal_of
from robust_train.failures.patterns import (
    UNCLEAR,
    Match,
    match,
    most_telling,
    read_evidence,
    with_statistics,
)
from robust_train.failures.shortage import little_is_left
from robust_train.failures.stack import refined, stack_of
from robust_train.model.errors import RankFailure
from robust_train.model.failure import Clue, Evidence, Failure, FailureKind

__all__ = ["classify_exit", "classify_failure"]

_CLASSIFIED = "_robust_train_failure"
_NO_ROOM = Failure(FailureKind.HOST_OOM, "MemoryError")
"""Created before memory runs out."""
_MOST_CAUSES = 10


def classify_failure(exception: BaseException, *, host_memory_ran_out: bool = False) -> Failure:
    """Return why training failed, from the exception that ended it.

    Looks at the exception, then through its ``__cause__``, its ``__context__`` (unless it was
    suppressed, or the exception is a programming error made while handling the first error), the
    members of exception groups, and tracebacks that came from worker processes as text. The first
    match decides. Without a match it is a bug, with the clue ``unknown`` unless only the program
    can be the reason.

    A oneDNN message with several causes is ``host_oom`` if this process has little host memory
    left, or ``host_memory_ran_out`` just before. Otherwise it is a bug.

    An exception is classified once, where it is caught: the first answer stays with it, since later
    the memory that its frames held may be free again. Never raises and imports nothing: torch's
    statistics are read only if CUDA was started.
    """
    classified = getattr(exception, _CLASSIFIED, None)
    if isinstance(classified, Failure):
        return classified
    try:
        failure = _classified(exception, host_memory_ran_out)
    except MemoryError:  # memory is used up, so there is no room to look
        failure = _NO_ROOM
    with contextlib.suppress(Exception):
        setattr(exception, _CLASSIFIED, failure)
    return failure


def _classified(exception: BaseException, host_memory_ran_out: bool) -> Failure:
    if isinstance(exception, SystemExit):
        return _exit_of(exception)
    if isinstance(exception, RankFailure):
        return exception.failure
    telling = most_telling(_matches_in(exception, host_memory_ran_out))
    if telling is None:
        # If no section matches, the error is shown as its author wrote it.
        first = next(iter(reports_of(exception)))
        clue = None if _is_certain_bug(exception) else Clue.UNKNOWN
        return Failure(FailureKind.BUG, first.headline, Evidence(clue=clue))
    report, meaning = telling
    evidence = read_evidence(report.text, meaning)
    if meaning.kind is FailureKind.DEVICE_OOM:
        evidence = with_statistics(evidence, report.text)
    return Failure(meaning.kind, report.headline, evidence)


def _matches_in(
    exception: BaseException, host_memory_ran_out: bool
) -> Iterator[tuple[ErrorReport, Match | None]]:
    for report in reports_of(exception):
        stack = "" if report.exception is None else stack_of(report.exception)
        meaning = refined(match(report), report, stack)
        if meaning is None and UNCLEAR.matches(report):
            shortage = "host memory had run out just before"
            if not host_memory_ran_out:
                shortage = little_is_left()
            if shortage:
                meaning = UNCLEAR.match
                headline = f"{report.headline} ({shortage})"
                report = replace(report, headline=headline)
        yield report, meaning


def _is_certain_bug(exception: BaseException) -> bool:
    """Return whether only the program can cause an error, or the error that it was raised from."""
    error: BaseException | None = exception
    for _ in range(_MOST_CAUSES):
        if error is None:
            break
        if next(iter(reports_of(error))).is_certain_bug:
            return True
        error = error.__cause__
    return False


def _exit_of(stop: SystemExit) -> Failure:
    """Classify ``sys.exit``: 128 + n comes from a signal handler. Any other code is a bug with an
    unknown reason, unless the code says success."""
    if isinstance(stop.code, int) and signal_of(stop.code):
        return classify_exit(stop.code)
    return Failure(
        FailureKind.BUG,
        f"the trainer called sys.exit({stop.code!r})",
        Evidence(clue=Clue.UNKNOWN if stop.code else None),
    )
