"""Finds the error in a program's output that explains why its process ended.

In the launcher, :mod:`.exits` uses it for a process that ended without reporting its failure. Pure.

The form of the error depends on how the process ended. Python prints a traceback. Native code that
a signal ended prints a line such as ``terminate called after throwing …``. Other programs print an
error among their last lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from robust_train.failures.error_reports import (
    PROGRAMMING_ERRORS,
    ErrorReport,
    last_line_with_text,
    last_report_in,
    names_of,
    one_line,
    reports_in,
)
from robust_train.failures.patterns import Match, MatchedReport, choose_match, find_match
from robust_train.failures.stack import TRACEBACK, last_stack_in, refine_match
from robust_train.model.failure import FailureKind

# An error with a message, or an error without a message as Python shows it. The name starts only
# where a dotted name starts, because the search would otherwise start again at each of its parts.
ERROR_NAME = re.compile(r"(?<!\w)(?<!\w\.)((?:\w+\.)*\w+(?:Error|Exception|Timeout))(?::|\(\))")
# The first line that C++, Python's faulthandler, glog or Rust prints when native code fails.
NATIVE_ERROR = re.compile(
    r"terminate called (?!without)|what\(\):|Fatal Python error|libc\+\+abi|^F\d{4} |panicked at"
)
# A log line below an error does not say why the process ended, except that NCCL logs its errors as
# warnings.
_CHATTER = re.compile(r"^(?!.*\bNCCL\b).{0,60}?\b(?:DEBUG|INFO|WARNING)\b|^\S+:\d+: \w*Warning: ")
# Messages of glibc and the compilers about a program that damaged its memory.
_CORRUPTED = re.compile(
    r"double free|free\(\): |malloc\(\): |munmap_chunk\(\): |corrupted size|corrupted double-linked"
    r"|stack smashing detected|buffer overflow detected|invalid pointer|realloc\(\): ",
    re.IGNORECASE,
)
_CPP_MESSAGE = "what():"
_HEADLINE_LENGTH = 300


def find_last_error(output: str, lines: list[str], *, is_native: bool) -> MatchedReport | None:
    """Return the error that explains why the process ended, None if no known error does.

    If the output has a traceback, only the traceback counts, because the program may have recovered
    from errors that it logged before. The exception is a traceback that only says that a child
    process failed.

    Args:
        output: the end of the output.
        lines: the last lines of ``output``.
        is_native: whether a signal ended the process.
    """
    has_traceback = TRACEBACK in output
    reports: list[ErrorReport] = []
    if is_native:
        reports.append(make_report(_lines_of_native_error(lines)))
        if has_corrupted_memory(reports[0].text):
            return None
    elif not has_traceback:
        reports.append(make_report(_without_chatter(lines)))
        last = last_report_in(last_line_with_text(lines))
        match = find_match(last)
        if last.is_programming_error and match is None:
            return None
        if match is not None and not match.kind.follows_from_others:
            return MatchedReport(last, match)
        reports.append(last)
    if has_traceback:
        quoted = list(reports_in(output))
        reports += quoted
        if quoted[0].is_of_child:
            # The child printed its error before.
            reports.append(make_report(lines))
    chosen = choose_match(_find_matches(reports, last_stack_in(output)))
    if chosen is not None:
        return chosen
    # The log before a crash, or before an error that its library wraps, may say why it happened.
    whole = make_report(lines)
    match = find_match(whole)
    if match is None or reports[0].is_programming_error:
        return None
    if is_native or match.kind is FailureKind.DEVICE_FAULT:
        return MatchedReport(whole, match)
    return None


def _lines_of_native_error(lines: list[str]) -> list[str]:
    """Return the lines from the first native error on. Without a native error, return the lines
    that may explain why the process ended."""
    for number, line in enumerate(lines):
        if NATIVE_ERROR.search(line):
            return lines[number:]
    return _without_chatter(lines)


def _without_chatter(lines: list[str]) -> list[str]:
    """Return the lines without log lines that cannot explain why the process ended."""
    return [line for line in lines if not _CHATTER.match(line)]


def _find_matches(
    reports: Sequence[ErrorReport], stack: str
) -> Iterator[tuple[ErrorReport, Match | None]]:
    """Yield each report with its match, which the ``stack`` of a traceback makes more precise."""
    for report in reports:
        match = find_match(report)
        if report.types:
            match = refine_match(match, report, stack)
        yield report, match


def has_corrupted_memory(text: str) -> bool:
    """Return whether the text says that the program damaged its own memory."""
    return _CORRUPTED.search(text) is not None


def make_report(lines: list[str]) -> ErrorReport:
    """Return the report of an error that is logged in these lines, without a traceback.

    Names of programming errors are left out, because such a name in a log does not prove that the
    process ended by a bug.
    """
    text = one_line(lines)
    types: list[str] = []
    for path in ERROR_NAME.findall(text):
        types += [name for name in names_of(path) if name not in PROGRAMMING_ERRORS]
    return ErrorReport(tuple(types), text, _headline_in(lines, text), one_line(lines, ""))


def _headline_in(lines: Sequence[str], text: str) -> str:
    """Return C++'s message, otherwise the last line with a known error, otherwise the start of the
    whole text."""
    for line in lines:
        _, marker, message = line.partition(_CPP_MESSAGE)
        if marker:
            return message.strip()[:_HEADLINE_LENGTH]
    for line in reversed(lines):
        if find_match(ErrorReport((), one_line([line]), "")) is not None:
            return line.strip()[:_HEADLINE_LENGTH]
    return text[:_HEADLINE_LENGTH]
