"""Finds the last message about a lack of memory in a program's output.

The launcher calls `find_last_shortage` for a script's log, and `exits` calls `find_shortage` for
the end of an output. Pure.

Some programs log that memory ran out, print a table or a summary below, and exit with code 1. So
the message may be on any line. It does not count if the program overcame the lack of memory, for
example with a smaller batch, or if another error came later.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from robust_train.failures.error_reports import CERTAIN_BUGS, ErrorReport, last_report_in
from robust_train.failures.last_error import ERROR_NAME, has_corrupted_memory, make_report
from robust_train.failures.patterns import Match, MatchedReport, find_match, read_evidence
from robust_train.failures.printed import (
    drop_before_last_steps,
    join_indented_lines,
    put_final_error_last,
    remove_boxes,
)
from robust_train.failures.stack import TRACEBACK

# Any line that reports a lack of memory has one of these words, and few other lines do.
_MAY_REPORT_SHORTAGE = re.compile(
    r"out[ _-]?of|\bOOM|insufficient|n[o't]+ (?:have )?enough|no more|low on|lack of|exhaust"
    r"|fail|unable|can(?:not| not|['’]t)|could ?n[o'’]?t|bad.?alloc|MemoryError|ENOMEM|exceed"
    r"|n[o'’]t fit|[显顯内內]存|記憶體|メモリ|메모리|speicher|m[ée]moire|mem[oó]ria|памят",
    re.IGNORECASE,
)
# The words of a program that overcame an error and continued.
_HANDLED = re.compile(
    r"\b(?:trying (?!to )|retrying|skipp(?:ing|ed)|halving|recover(?:ing|ed)?\b|falling back"
    r"|continuing|ignor(?:ing|ed)"
    r"|(?<!try )(?<!consider )(?<!by )using [\w ]*?(?:batch|default|CPU))"
    r"|跳[过過]|重[试試]|改[用为為]|自[动動]",
    re.IGNORECASE,
)
_WARNING = re.compile(r"^.{0,60}?\bWARN(?:ING)?\b|警告", re.IGNORECASE)
_REMARK = re.compile(r"^.{0,60}?\b(?:DEBUG|INFO)\b|^\S+:\d+: \w*Warning: ")
_BEGINS_WITH_ERROR = re.compile(r"^(?:\w+\.)*\w+(?:Error|Exception): \S")
_MOST_LINES_OF_A_MESSAGE = 4
_LONGEST_LINE = 8_000
_HEADLINE_LENGTH = 300
_MOST_MESSAGES = 100
"""At most this many messages that may report a lack of memory are examined, the last first. Each
takes milliseconds, and a loader may have printed "failed to read" for each of its files."""


def find_last_shortage(log: str) -> str:
    """Return the last report of a lack of memory in a log, on one line.

    Empty if the log has no report, or if the program overcame the lack of memory.
    """
    text = "\n".join(_shorten(line) for line in log.splitlines())
    shortage = find_shortage(put_final_error_last(remove_boxes(text)), is_native=True)
    return "" if shortage is None else shortage.report.text


def find_shortage(output: str, *, is_native: bool) -> MatchedReport | None:
    """Return the last report of a lack of memory in any line of the output, however much was
    printed below it.

    None if the output has no report, if the program overcame it, or if another error came later.

    Args:
        output: the end of the output.
        is_native: whether a signal ended the process. Otherwise a traceback shows the reason.
    """
    if is_native and has_corrupted_memory(output):
        return None
    if TRACEBACK in output and not is_native and not last_report_in(output).is_of_child:
        return None
    recent = drop_before_last_steps(output).splitlines()
    lines = [_shorten(line) for line in join_indented_lines(recent)]
    candidates = _candidate_lines(lines)
    examined: set[tuple[str, ...]] = set()
    has_later_error = False
    for number in reversed(range(len(lines))):
        line = lines[number]
        if _is_certain_bug(line):
            return None
        window = tuple(lines[number : number + _MOST_LINES_OF_A_MESSAGE])
        if number in candidates and window not in examined:
            examined.add(window)
            if len(examined) > _MOST_MESSAGES:
                return None
            shortage = _match_at_start(window)
            if shortage is not None:
                message, match = shortage
                if _is_overcome(message, has_later_error):
                    return None
                below = lines[number + len(message) :][:_MOST_LINES_OF_A_MESSAGE]
                return MatchedReport(_report_with_figures(message, below, match), match)
        if _BEGINS_WITH_ERROR.search(line):
            has_later_error = True
    return None


def _shorten(line: str) -> str:
    """Return a line, without its middle if it is too long to be meant for people."""
    if len(line) <= _LONGEST_LINE:
        return line
    half = _LONGEST_LINE // 2
    return f"{line[:half]} {line[-half:]}"


def _candidate_lines(lines: Sequence[str]) -> set[int]:
    """Return the numbers of the lines at which a report of a lack of memory may start. A terminal
    may have broken its words at the end of a line."""
    numbers: set[int] = set()
    for number, line in enumerate(lines):
        below = lines[number + 1] if number + 1 < len(lines) else ""
        has_words = _MAY_REPORT_SHORTAGE.search(f"{line} {below}") is not None
        if has_words or _MAY_REPORT_SHORTAGE.search(line + below):
            first = max(number - _MOST_LINES_OF_A_MESSAGE + 2, 0)
            numbers.update(range(first, number + 1))
    return numbers


def _is_certain_bug(line: str) -> bool:
    """Return whether a line names an error that only the program can cause."""
    names = [path.rpartition(".")[2] for path in ERROR_NAME.findall(line)]
    if CERTAIN_BUGS.isdisjoint(names):
        return False
    return find_match(make_report([line])) is None


def _match_at_start(lines: Sequence[str]) -> tuple[list[str], Match] | None:
    """Return the first lines if they report a lack of memory, as few as possible, with their match.
    None for a remark that was logged as information."""
    for count in range(1, len(lines) + 1):
        message = list(lines[:count])
        match = find_match(make_report(message))
        if match is not None and match.kind.is_memory:
            is_remark = any(_REMARK.match(line) for line in message)
            return None if is_remark else (message, match)
    return None


def _is_overcome(message: Sequence[str], has_later_error: bool) -> bool:
    """Return whether the program continued after this lack of memory. If the message is a warning
    and another error came later, the program ended because of that error."""
    is_warning = any(_WARNING.search(line) for line in message)
    if is_warning and has_later_error:
        return True
    return _HANDLED.search(make_report(list(message)).text) is not None


def _report_with_figures(message: list[str], below: Sequence[str], match: Match) -> ErrorReport:
    """Return the report of a message, with the lines below that have more of its figures: a
    terminal may have broken the message there."""
    report = make_report(message)
    most = _count_figures(report, match)
    lines = message
    for line in below:
        lines = [*lines, line]
        longer = make_report(lines)
        count = _count_figures(longer, match)
        if count > most:
            report = replace(longer, headline=longer.text[:_HEADLINE_LENGTH])
            most = count
    return report


def _count_figures(report: ErrorReport, match: Match) -> int:
    figures = vars(read_evidence(report.text, match))
    return sum(type(value) is int for value in figures.values())
