"""What ended an attempt: types first, text second, and what only sounds like memory is a bug.

::

    try:
        train()
    except Exception as error:
        failure = classify_failure(error)  # .kind, .message, .evidence, .advice

:mod:`.error_reports` finds what an exception or a log reports, :mod:`.matching` looks it up in the
table of patterns, :mod:`.evidence` and :mod:`.stack` read the figures and clues, :mod:`.advice`
lists advice. :mod:`.exits` does the same for a process that ended without a report.
"""

from __future__ import annotations

from robust_train.failures.advice import advice_for
from robust_train.failures.error_reports import ErrorReport, reports_of
from robust_train.failures.evidence import read_evidence, with_statistics
from robust_train.failures.exits import classify_exit, signal_of
from robust_train.failures.matching import match, most_telling
from robust_train.failures.memory_patterns import UNCLEAR
from robust_train.failures.patterns import Match
from robust_train.failures.shortage import shortage_at
from robust_train.failures.stack import refined, stack_of
from robust_train.values import Clue, Failure, FailureKind

__all__ = ["classify_exit", "classify_failure"]


def classify_failure(exception: BaseException, *, host_memory_ran_out: bool = False) -> Failure:
    """Return why training failed, from the exception that ended it.

    Looks at the exception, then through its ``__cause__``, its ``__context__`` (unless it was
    suppressed, or the exception is a programming error made while handling the first one), the
    members of exception groups, and tracebacks that came from worker processes as text. The first
    one that matches decides; without any it is a bug.

    A message of oneDNN's that has several causes is ``host_oom`` if this process has little host
    memory left, or ``host_memory_ran_out`` just before; else a bug.

    Never raises and imports nothing: torch's statistics are read only if CUDA was started.
    """
    if isinstance(exception, SystemExit):
        return _exit_of(exception)
    matches: list[tuple[ErrorReport, Match]] = []
    shortage = ""
    for report in reports_of(exception):
        stack = "" if report.exception is None else stack_of(report.exception)
        found = refined(match(report), report.text, report.types, stack)
        if found is None and UNCLEAR.matches(report):
            shortage = shortage_at(exception, ran_out_before=host_memory_ran_out)
            found = UNCLEAR.match if shortage else None
        if found is not None:
            matches.append((report, found))
            if not report.in_group:
                break
    if not matches:
        # what no row matches is shown as its author wrote it
        return Failure(FailureKind.BUG, message=next(iter(reports_of(exception))).headline)
    report, found = most_telling(matches)
    evidence = read_evidence(report.text, found)
    if found.kind is FailureKind.DEVICE_OOM:
        evidence = with_statistics(evidence, report.text)
    advice = advice_for(found.kind, evidence)
    message = f"{report.headline} ({shortage})" if found.clue == Clue.UNCLEAR else report.headline
    return Failure(found.kind, message, evidence, advice)


def _exit_of(stop: SystemExit) -> Failure:
    """Classify ``sys.exit``: with a signal's code handlers of SIGTERM end; any other is a bug."""
    if isinstance(stop.code, int) and signal_of(stop.code) is not None:
        return classify_exit(stop.code)
    return Failure(FailureKind.BUG, f"the trainer called sys.exit({stop.code!r})")
