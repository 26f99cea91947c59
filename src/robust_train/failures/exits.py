"""Classifies a process that ended without a report, from its exit status and its last output.

The launcher calls `classify_exit` for a script or an interpreter that ended. An attempt calls it if
its trainer exits with a signal's code. Pure.

An exit status alone says little. Exit code 1 may be any error, and SIGKILL may come from the
kernel's OOM killer, a scheduler or a person. So the output is searched for the reason. For example,
exit code 1 below a line with ``CUDA out of memory`` is ``device_oom``. :mod:`.last_error` finds the
error that ended the process, and :mod:`.memory_messages` finds a lack of memory that was logged
earlier.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace

from robust_train.failures.error_reports import (
    last_line_with_text,
    last_report_in,
    one_line,
    reports_in,
)
from robust_train.failures.last_error import NATIVE_ERROR, find_last_error
from robust_train.failures.memory_messages import find_shortage
from robust_train.failures.patterns import MatchedReport, find_pattern, read_evidence
from robust_train.failures.printed import put_final_error_last, remove_boxes
from robust_train.failures.stack import TRACEBACK, native_stack_in
from robust_train.model.failure import Clue, Evidence, Failure, FailureKind

# Signals that ask a process to stop. They come from people, from schedulers (Slurm warns with
# SIGUSR1, and SIGXCPU reports a time limit), or from a terminal that was closed.
_STOPS = frozenset(
    {"SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGPWR", "SIGKILL"}
)
_TAIL_LINES = 60
_HEADLINE_LENGTH = 300
_OOM_KILLER = "the kernel's OOM killer"
_FROM_KERNEL = Evidence(library="kernel")
_KERNEL_OOM = find_pattern("KERNEL_OOM")
# A scheduler's message that it took the machine for another job.
_TAKEN = find_pattern("TAKEN").words
# Python prints this between two tracebacks if the second error was raised from the first.
_DIRECT_CAUSE = "The above exception was the direct cause of the following exception"
# Lines that Python or the shell prints below the reason for a crash.
_BELOW_THE_REASON = ("Extension modules", "File ", "(core dumped)")


def classify_exit(
    returncode: int, output_tail: str = "", *, oom_killed: bool | None = None
) -> Failure:
    """Return why a process that left no report failed. The first case that applies counts:

    1. SIGKILL with ``oom_killed``, or SIGKILL or SIGTERM with a message of the kernel or the
       scheduler about an OOM kill in the output: ``host_oom``.
    2. Any other signal that asks to stop: ``interrupted``. A SIGKILL gets the clue ``killed``,
       because its sender is unknown.
    3. An error in the output that explains the end. If that error only follows from other failures,
       an earlier lack of memory counts instead.
    4. SIGBUS: ``worker_death``. Shared memory was probably full.
    5. A message about an OOM kill alone, unless the process ended by a segmentation fault:
       ``host_oom``.
    6. Anything else is a ``bug``.

    Args:
        returncode: the exit code as :mod:`subprocess` returns it, negative for the signal that
            ended the process. A shell's 128 + signal is understood too.
        output_tail: the end of the process's output, both streams.
        oom_killed: whether the cgroup counted a kill by the kernel's OOM killer while the process
            ran, or None if that is unknown.
    """
    number = signal_of(returncode)
    signal_name = signal.Signals(number).name if number else ""
    end = f"ended by {signal_name}" if signal_name else f"ended with exit code {returncode}"
    output = put_final_error_last(remove_boxes(output_tail))
    lines = output.splitlines()[-_TAIL_LINES:]
    is_segfault = signal_name == "SIGSEGV"
    # A process causes a segmentation fault itself, whatever the kernel did to other processes.
    kernel_message = "" if is_segfault else _find_kernel_message(output)
    by_kernel = Failure(
        FailureKind.HOST_OOM, f"{end}: {kernel_message or _OOM_KILLER}", _FROM_KERNEL
    )
    if oom_killed and signal_name == "SIGKILL":
        return by_kernel
    if kernel_message and signal_name in ("SIGKILL", "SIGTERM"):
        return by_kernel
    if signal_name in _STOPS:
        return _interruption(end, signal_name, lines)
    error = _find_reason(output, lines, is_native=bool(signal_name))
    is_of_other_process = is_segfault and error is not None and error.match == _KERNEL_OOM.match
    if error is not None and not is_of_other_process:
        evidence = read_evidence(error.report.text, error.match)
        failure = Failure(error.match.kind, f"{end}: {error.report.headline}", evidence)
        return blame_oom_killer(failure) if oom_killed else failure
    if signal_name == "SIGBUS":
        # A page of shared or mapped memory was unavailable, usually because /dev/shm was full.
        return Failure(FailureKind.WORKER_DEATH, end, _FROM_KERNEL)
    if kernel_message:
        return by_kernel
    return _bug(end, signal_name, output, lines)


def signal_of(returncode: int) -> int:
    """Return the number of the signal in an exit status, or 0 if no signal ended the process.

    Both forms are understood: ``-9`` from :mod:`subprocess`, and ``137`` from a shell.
    """
    number = -returncode if returncode < 0 else returncode - 128
    return number if number in {*map(int, signal.Signals)} else 0


def _find_kernel_message(output: str) -> str:
    """Return the first line about an OOM kill by the kernel or a scheduler, or an empty string."""
    for line in output.splitlines():
        if _KERNEL_OOM.words.search(line):
            return line.strip()[:_HEADLINE_LENGTH]
    return ""


def _interruption(end: str, signal_name: str, lines: list[str]) -> Failure:
    """Return the failure of a process that was asked to stop.

    An error in the output does not matter, because the peers of a failed rank get the signal too.
    """
    is_sigkill = signal_name == "SIGKILL"
    message = "killed by SIGKILL (sender unknown)" if is_sigkill else end
    is_killed = is_sigkill or _TAKEN.search(one_line(lines)) is not None
    clue = Clue.KILLED if is_killed else None
    return Failure(FailureKind.INTERRUPTED, message, Evidence(clue=clue))


def _find_reason(output: str, lines: list[str], *, is_native: bool) -> MatchedReport | None:
    """Return the error in the output that explains the end, None if no known error does."""
    error = find_last_error(output, lines, is_native=is_native)
    if error is not None and not error.match.kind.follows_from_others:
        return error
    shortage = find_shortage(output, is_native=is_native)
    return error if shortage is None else shortage


def blame_oom_killer(failure: Failure) -> Failure:
    """Attribute a SIGKILL without a known sender to the kernel's OOM killer, which counted a kill.
    Other failures stay unchanged."""
    if failure.evidence.clue != Clue.KILLED:
        return failure
    kind = failure.kind
    if kind is not FailureKind.WORKER_DEATH:
        kind = FailureKind.HOST_OOM
    message = f"{failure.message}: {_OOM_KILLER}"
    return replace(failure, kind=kind, message=message, evidence=_FROM_KERNEL)


def _bug(end: str, signal_name: str, output: str, lines: list[str]) -> Failure:
    """Return the failure of a process whose output matches no section of ``patterns.txt``.

    Args:
        end: how the process ended, for the message.
        signal_name: the signal that ended it, empty for an exit code.
        output: the end of its output.
        lines: the last lines of ``output``.
    """
    crash = native_stack_in(output) if signal_name else None
    if crash is not None:
        reason = crash.headline
    elif TRACEBACK in output:
        # The headline is the first line of the message, which says what happened.
        reason = last_report_in(output).headline
    else:
        reason = _reason_in_last_line(lines)
    message = end
    if reason:
        message = f"{end}: {reason}"
    elif lines:
        message = f"{end}; the end of its output shows no reason"
    clue: str | None = Clue.UNKNOWN
    if signal_name == "SIGSEGV":
        clue = Clue.CRASHED
    elif not signal_name and _is_certain_bug(output):
        clue = None
    return Failure(FailureKind.BUG, message, Evidence(clue=clue))


def _reason_in_last_line(lines: Sequence[str]) -> str:
    """Return the last line if it reads like the reason why a process ended, otherwise empty."""
    for line in reversed(lines):
        text = line.strip()[:_HEADLINE_LENGTH]
        if text and not text.startswith(_BELOW_THE_REASON):
            is_reason = ":" in text or NATIVE_ERROR.search(text) is not None
            return text if is_reason else ""
    return ""


def _is_certain_bug(output: str) -> bool:
    """Return whether the last error, or an error that it was raised from, is certainly a bug."""
    if TRACEBACK not in output:
        return last_report_in(last_line_with_text(output.splitlines())).is_certain_bug
    for part in reversed(output.split(_DIRECT_CAUSE)):
        causes = [report for report in reports_in(part) if not report.is_of_child]
        if causes and causes[0].is_certain_bug:
            return True
        # Several tracebacks in a part do not belong to one chain of causes.
        if part.count(TRACEBACK) != 1:
            return False
    return False
