"""What ended an attempt: types first, text second, and what only sounds like memory is a bug.

::

    try:
        train()
    except Exception as error:
        failure = classify_failure(error)  # .kind, .message, .evidence, .advice

:mod:`.accounts` finds what an exception or a log tells, :mod:`.judge` says what kind of failure
that is, :mod:`.evidence` reads the figures, :mod:`.advice` what may help, :mod:`.exits` does the
same for a process that ended without saying anything, :mod:`.oom_killer` asks the kernel whether it
killed one.
"""

from __future__ import annotations

from robust_train.failures.accounts import Account, accounts_of
from robust_train.failures.advice import advice_for
from robust_train.failures.evidence import read_evidence, with_statistics
from robust_train.failures.exits import classify_exit, signal_of
from robust_train.failures.judge import judge, most_telling
from robust_train.failures.rules import Verdict
from robust_train.values import Evidence, Failure, FailureKind

__all__ = ["classify_exit", "classify_failure"]


def classify_failure(exception: BaseException) -> Failure:
    """Say why training failed, from the exception that ended it.

    Looks at the exception, then through its ``__cause__``, its ``__context__`` (unless it was
    suppressed, or the exception is a programming error made while handling the first one), the
    members of exception groups, and tracebacks that came from worker processes as text. The first
    one that tells decides; nothing that tells means a bug.

    Never raises and imports nothing: torch's statistics are read only if CUDA was started.
    """
    if isinstance(exception, SystemExit):
        return _exit_of(exception)
    told: list[tuple[Account, Verdict]] = []
    for account in accounts_of(exception):
        verdict = judge(account)
        if verdict is not None:
            told.append((account, verdict))
            if not account.in_group:
                break
    if not told:
        return Failure(FailureKind.BUG, message=_headline(exception))
    account, verdict = most_telling(told)
    evidence = read_evidence(account.text, verdict.library)
    if verdict.kind is FailureKind.DEVICE_OOM:
        evidence = with_statistics(evidence, account.text)
    return Failure(
        kind=verdict.kind,
        message=account.headline,
        evidence=evidence,
        advice=advice_for(verdict.kind, evidence),
    )


def _headline(exception: BaseException) -> str:
    """Of the exception itself: what nobody recognises is shown as its author wrote it."""
    return next(iter(accounts_of(exception))).headline


def _exit_of(stop: SystemExit) -> Failure:
    """``sys.exit`` with a signal's code is how handlers of SIGTERM end; any other is a bug."""
    if isinstance(stop.code, int) and signal_of(stop.code) is not None:
        return classify_exit(stop.code)
    return Failure(
        FailureKind.BUG, message=f"the trainer called sys.exit({stop.code!r})", evidence=Evidence()
    )
