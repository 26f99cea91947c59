"""Classifies failures: why a training ended, with the evidence.

::

    try:
        train()
    except Exception as error:
        failure = classify_failure(error)  # .kind, .message, .evidence

An attempt classifies its exception with `classify_failure`. The launcher classifies the exit of a
process that left no report with `classify_exit`. Any program may call both.

:mod:`.error_reports` extracts error reports from an exception or a text, and :mod:`.patterns` looks
them up in ``patterns.txt``. :mod:`.stack` refines the match by the stack. :mod:`.exits` starts from
an exit status and searches the output, which :mod:`.printed` prepares. :mod:`.shortage` finds out
whether host memory was short, and :mod:`.advice` lists advice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from robust_train.failures.error_reports import ErrorReport, own_report_of, reports_of
from robust_train.failures.exits import classify_exit, signal_of
from robust_train.failures.patterns import (
    UNCLEAR,
    Match,
    choose_match,
    find_match,
    read_evidence,
    with_statistics,
)
from robust_train.failures.shortage import describe_shortage
from robust_train.failures.stack import refine_match, stack_of
from robust_train.model.errors import RankFailure
from robust_train.model.failure import Clue, Evidence, Failure, FailureKind

__all__ = ["classify_exit", "classify_failure"]

# The attribute of an exception that keeps its classification.
_CLASSIFIED = "_robust_train_failure"
# The failure if memory runs out during the classification, created while there is memory.
_NO_MEMORY_LEFT = Failure(FailureKind.HOST_OOM, "MemoryError")
_MOST_CAUSES = 10


def classify_failure(exception: BaseException, *, host_memory_ran_out: bool = False) -> Failure:
    """Return why training failed, from the exception that ended it.

    The exception is examined first, then its ``__cause__``, its ``__context__`` (unless it was
    suppressed, or the exception is a programming error made while handling the first error), the
    members of exception groups, and tracebacks that came from worker processes as text. The first
    match decides. Without a match the failure is a bug, with the clue ``unknown`` unless only the
    program can be the reason.

    An exception keeps its first classification, because the memory that its frames held may be free
    later. Never raises and imports nothing: torch's statistics are read only if CUDA was started.

    Args:
        exception: the exception that ended training.
        host_memory_ran_out: whether host memory ran out just before. Then, or if this process has
            little host memory left, a oneDNN message that may have several causes is ``host_oom``.
            Otherwise it is a bug.
    """
    classified = getattr(exception, _CLASSIFIED, None)
    if isinstance(classified, Failure):
        return classified
    try:
        failure = _classify(exception, host_memory_ran_out)
    except MemoryError:
        failure = _NO_MEMORY_LEFT
    with contextlib.suppress(Exception):
        setattr(exception, _CLASSIFIED, failure)
    return failure


def _classify(exception: BaseException, host_memory_ran_out: bool) -> Failure:
    if isinstance(exception, SystemExit):
        return _classify_sys_exit(exception)
    if isinstance(exception, RankFailure):
        return exception.failure
    chosen = choose_match(_find_matches(exception, host_memory_ran_out))
    if chosen is None:
        headline = own_report_of(exception).headline
        clue = None if _is_certain_bug(exception) else Clue.UNKNOWN
        return Failure(FailureKind.BUG, headline, Evidence(clue=clue))
    report, match = chosen
    evidence = read_evidence(report.text, match)
    if match.kind is FailureKind.DEVICE_OOM:
        evidence = with_statistics(evidence, report.text)
    return Failure(match.kind, report.headline, evidence)


def _find_matches(
    exception: BaseException, host_memory_ran_out: bool
) -> Iterator[tuple[ErrorReport, Match | None]]:
    """Yield the reports of an exception and of its causes, each with its match."""
    for report in reports_of(exception):
        stack = "" if report.exception is None else stack_of(report.exception)
        match = refine_match(find_match(report), report, stack)
        if match is None and UNCLEAR.matches(report):
            shortage = "host memory had run out just before"
            if not host_memory_ran_out:
                shortage = describe_shortage()
            if shortage:
                headline = f"{report.headline} ({shortage})"
                yield replace(report, headline=headline), UNCLEAR.match
                continue
        yield report, match


def _is_certain_bug(exception: BaseException) -> bool:
    """Return whether only the program can cause the error, or an error that it was raised from."""
    error: BaseException | None = exception
    for _ in range(_MOST_CAUSES):
        if error is None:
            break
        if own_report_of(error).is_certain_bug:
            return True
        error = error.__cause__
    return False


def _classify_sys_exit(stop: SystemExit) -> Failure:
    """Classify a call of ``sys.exit``. A signal handler exits with 128 + the signal's number. Any
    other code is a bug, and its reason is unknown unless the code means success."""
    if isinstance(stop.code, int) and signal_of(stop.code):
        return classify_exit(stop.code)
    clue = Clue.UNKNOWN if stop.code else None
    message = f"the trainer called sys.exit({stop.code!r})"
    return Failure(FailureKind.BUG, message, Evidence(clue=clue))
