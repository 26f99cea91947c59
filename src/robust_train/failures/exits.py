"""Classifies a process that ended without a report, by its exit status and the end of its output.

The launcher calls `classify_exit` for a script or an interpreter that ended, and `last_shortage_in`
for a script's log. An attempt calls `classify_exit` if its trainer exits with a signal's code.
Pure.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import replace

from robust_train.failures.error_reports import (
    CERTAIN_BUGS,
    PROGRAMMING_ERRORS,
    ErrorReport,
    names_of,
    one_line,
    reports_in,
)
from robust_train.failures.patterns import Match, match, most_telling, named, read_evidence
from robust_train.failures.printed import joined, since_progress, without_frames
from robust_train.failures.stack import TRACEBACK, last_stack_in, native_stack_in, refined
from robust_train.model.failure import Clue, Evidence, Failure, FailureKind

# Signals that ask to stop. They come from people, from schedulers (Slurm warns with SIGUSR1,
# SIGXCPU is its time limit), or from a terminal that was closed.
_STOPS = frozenset(
    {"SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGPWR", "SIGKILL"}
)
_TAIL_LINES = 60
_OOM_KILLER = "the kernel's OOM killer"
_KERNELS = named("KERNEL_OOM")
_TAKEN = named("TAKEN").words
# A log line below an error does not say why the process ended, except that NCCL logs its errors as
# warnings.
_CHATTER = re.compile(r"^(?!.*\bNCCL\b).{0,60}?\b(?:DEBUG|INFO|WARNING)\b|^\S+:\d+: \w*Warning: ")

_NO_ERROR = re.compile(r"^.{0,60}?\b(?:DEBUG|INFO)\b|^\S+:\d+: \w*Warning: ")
# Any line that reports a lack of memory has one of these words, and few other lines do.
_MAY_BE_SHORT = re.compile(
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
_BEGINS_WITH_ERROR = re.compile(r"^(?:\w+\.)*\w+(?:Error|Exception): \S")
_MOST_LINES_OF_A_MESSAGE = 4
_LONGEST_LINE = 8_000
_MOST_MESSAGES = 100
"""At most this many messages that may report a lack of memory are examined, the last first. Each
takes milliseconds, and a loader may have printed "failed to read" for each of its files."""
_DIRECT_CAUSE = "The above exception was the direct cause of the following exception"

# An error with a message, or an error without a message as Python shows it. It starts only where a
# dotted name starts, because the search would otherwise start again at each part of the name.
_ERROR = re.compile(r"(?<!\w)(?<!\w\.)((?:\w+\.)*\w+(?:Error|Exception|Timeout))(?::|\(\))")
# These say that a child failed. The child's failure was printed before.
_OF_A_CHILD = frozenset({"CalledProcessError", "ChildFailedError"})


def _tracebacks_under(words: str) -> re.Pattern[str]:
    """Return a pattern for Python's words with the traceback below them. All its lines may have the
    same prefix."""
    traceback = r"\1Traceback \(.*\n(?:\1\s.*\n)*\1?(?:\S.*)?(?:\n|$)"
    led = r"(?:\1[ \t]*\n\1(?:During handling|The above exc).*\n\1[ \t]*\n" + traceback + ")*"
    return re.compile(rf"^(.{{0,99}})(?:{words}).*\n{traceback}{led}", re.MULTILINE)


# Errors in a destructor, or at the interpreter's exit, which do not end the process.
_IGNORED = _tracebacks_under(r"Exception ignored |Error in atexit\b")
_IN_A_THREAD = _tracebacks_under("Exception in thread ")
# The words of glibc and the compilers for a program that damaged its memory.
_CORRUPTED = re.compile(
    r"double free|free\(\): |malloc\(\): |munmap_chunk\(\): |corrupted size|corrupted double-linked"
    r"|stack smashing detected|buffer overflow detected|invalid pointer|realloc\(\): ",
    re.IGNORECASE,
)
_AFTER_THE_END = ("Extension modules", "File ", "(core dumped)")
_NATIVE = re.compile(
    r"terminate called (?!without)|what\(\):|Fatal Python error|libc\+\+abi|^F\d{4} |panicked at"
)


def classify_exit(
    returncode: int, output_tail: str = "", *, oom_killed: bool | None = None
) -> Failure:
    """Return why a process that left no report failed. The first case that applies counts:

    1. SIGKILL with ``oom_killed``, or SIGKILL or SIGTERM with the kernel's or the scheduler's words
       for an OOM kill in the output: ``host_oom``.
    2. Any other signal that asks to stop: ``interrupted``. A SIGKILL gets the clue ``killed``,
       because its sender is unknown.
    3. An error in the output that explains the end. If it only follows from other failures, an
       earlier lack of memory counts instead.
    4. SIGBUS: ``worker_death``. Shared memory was probably full.
    5. The kernel's words alone, unless the process ended by a segmentation fault: ``host_oom``.
    6. Anything else is a ``bug``.

    Args:
        returncode: as :mod:`subprocess` has it, negative for the signal that ended the process. A
            shell's 128 + signal is understood too.
        output_tail: the end of its output, both streams.
        oom_killed: whether the cgroup counted a kill by the kernel's OOM killer in the meantime, or
            None if that is unknown.
    """
    number = signal_of(returncode)
    name = signal.Signals(number).name if number else ""
    ended = f"ended by {name}" if name else f"ended with exit code {returncode}"
    output_tail = in_order(without_frames(output_tail))
    lines = output_tail.splitlines()[-_TAIL_LINES:]
    is_killed = name == "SIGKILL"
    is_crash = name == "SIGSEGV"
    # A segmentation fault is the process's own, whatever the kernel did to other processes.
    words = filter(_KERNELS.words.search, output_tail.splitlines())
    record = "" if is_crash else next(words, "").strip()[:300]
    by_kernel = Failure(
        FailureKind.HOST_OOM, f"{ended}: {record or _OOM_KILLER}", Evidence(library="kernel")
    )
    if (is_killed and oom_killed) or (record and (is_killed or name == "SIGTERM")):
        return by_kernel
    if name in _STOPS:
        return _interruption(ended, lines, is_killed=is_killed)
    reported = _reported_in(output_tail, lines, native=bool(name))
    if reported is None or reported[1].kind.follows_from_others:
        is_native = bool(name)
        buried = _shortage_in(output_tail, native=is_native)
        reported = buried or reported
    if reported is not None and not (is_crash and reported[1] == _KERNELS.match):
        report, meaning = reported
        failure = Failure(
            meaning.kind, f"{ended}: {report.headline}", read_evidence(report.text, meaning)
        )
        return by_oom_killer(failure) if oom_killed else failure
    if name == "SIGBUS":
        # A page of shared or mapped memory is unavailable, which is how a full /dev/shm shows.
        return Failure(FailureKind.WORKER_DEATH, ended, by_kernel.evidence)
    if record:
        return by_kernel
    return _bug(ended, name, output_tail, lines)


def _interruption(ended: str, lines: list[str], *, is_killed: bool) -> Failure:
    """Return the failure of a process that a signal stopped."""
    # The signal counts, whatever the output says: the peers of a failed rank get it too.
    is_taken = is_killed or _TAKEN.search(one_line(lines))
    return Failure(
        FailureKind.INTERRUPTED,
        "killed by SIGKILL (sender unknown)" if is_killed else ended,
        Evidence(clue=Clue.KILLED if is_taken else None),
    )


def _bug(ended: str, name: str, output: str, lines: list[str]) -> Failure:
    """Return the failure of a process whose output matches no section of ``patterns.txt``.

    Args:
        ended: its end, for the message.
        name: the name of the signal that ended it, empty if none did.
        output: the end of its output.
        lines: the last lines of ``output``.
    """
    crash = native_stack_in(output) if name else None
    if crash is not None:
        last = crash.headline
    elif TRACEBACK in output:
        # A message of several lines starts with what happened.
        last = next(reports_in(output)).headline
    else:
        last = _reason_in_last_line(lines)
    clue: str | None = Clue.CRASHED if name == "SIGSEGV" else Clue.UNKNOWN
    if not name and _is_certain_bug(output):
        clue = None
    silence = "; the end of its output shows no reason" if lines else ""
    return Failure(
        FailureKind.BUG, f"{ended}: {last}" if last else f"{ended}{silence}", Evidence(clue=clue)
    )


def _is_certain_bug(output: str) -> bool:
    """Return whether the last error, or the error that it was raised from, is certainly a bug."""
    if TRACEBACK not in output:
        last = next(filter(str.strip, reversed(output.splitlines())), "")
        return next(reports_in(last)).is_certain_bug
    for part in reversed(output.split(_DIRECT_CAUSE)):
        reports = list(reports_in(part))
        causes = [report for report in reports if _OF_A_CHILD.isdisjoint(report.types)]
        if causes and causes[0].is_certain_bug:
            return True
        if part.count(TRACEBACK) != 1:
            return False
    return False


def in_order(output: str) -> str:
    """Return an output without errors that Python ignored, and with errors of threads, which end no
    process, before the error of the main thread."""
    output = _IGNORED.sub("", output)
    threads = [thread_error[0] for thread_error in _IN_A_THREAD.finditer(output)]
    return "\n".join([*threads, _IN_A_THREAD.sub("", output)])


def by_oom_killer(failure: Failure) -> Failure:
    """Blame the kernel's OOM killer, which counted a kill, for a failure that reports SIGKILL."""
    if failure.evidence.clue != Clue.KILLED:
        return failure
    is_workers = failure.kind is FailureKind.WORKER_DEATH
    return replace(
        failure,
        kind=failure.kind if is_workers else FailureKind.HOST_OOM,
        message=f"{failure.message}: {_OOM_KILLER}",
        evidence=Evidence(library="kernel"),
    )


def signal_of(returncode: int) -> int:
    """Return the signal in an exit status, in either spelling, or 0 if there is none."""
    number = -returncode if returncode < 0 else returncode - 128
    return number if number in {*map(int, signal.Signals)} else 0


def _reported_in(
    output: str, lines: list[str], *, native: bool
) -> tuple[ErrorReport, Match] | None:
    """Return the report in the output that explains the end: a traceback, C++'s last words, or the
    last lines. A traceback counts alone, unless it only says that a child failed: errors that were
    logged before it may have been overcome."""
    reports: list[ErrorReport] = []
    has_traceback = TRACEBACK in output
    if native or not has_traceback:
        reports.append(_report_of_lines(_last_words(lines, native)))
        if native and _CORRUPTED.search(reports[0].text):
            return None
    if not native and not has_traceback:
        last = next(reports_in(next(filter(str.strip, reversed(lines)), "")))
        meaning = match(last)
        if last.is_programming_error and meaning is None:
            return None
        if meaning is not None and not meaning.kind.follows_from_others:
            return last, meaning
        reports.append(last)
    if has_traceback:
        quoted = list(reports_in(output))
        reports += quoted
        if not _OF_A_CHILD.isdisjoint(quoted[0].types):
            reports.append(_report_of_lines(lines))
    stack = last_stack_in(output)
    matches = (
        (report, refined(match(report), report, stack) if report.types else match(report))
        for report in reports
    )
    telling = most_telling(matches)
    if telling:
        return telling
    # The log before a crash, or before an error that its library wraps, may say why it happened.
    whole = _report_of_lines(lines)
    meaning = match(whole)
    if meaning is None or reports[0].is_programming_error:
        return None
    is_reason = native or meaning.kind is FailureKind.DEVICE_FAULT
    return (whole, meaning) if is_reason else None


def last_shortage_in(log: str) -> str:
    """Return the last report of a lack of memory in a log, on one line, empty if there is none, or
    if the program overcame it."""
    text = "\n".join(map(_shortened, log.splitlines()))
    shortage = _shortage_in(in_order(without_frames(text)), native=True)
    return "" if shortage is None else shortage[0].text


def _shortened(line: str) -> str:
    """Return a line, without its middle if it is too long to have been written for people."""
    if len(line) <= _LONGEST_LINE:
        return line
    half = _LONGEST_LINE // 2
    return f"{line[:half]} {line[-half:]}"


def _shortage_in(output: str, *, native: bool) -> tuple[ErrorReport, Match] | None:
    """Return the last lack of memory in any line of the output, however much was printed below it.
    None if the program overcame it, or if a traceback shows another reason."""
    is_a_childs = TRACEBACK in output and not _OF_A_CHILD.isdisjoint(next(reports_in(output)).types)
    if TRACEBACK in output and not native and not is_a_childs:
        return None
    if native and _CORRUPTED.search(output):
        return None
    lines = list(map(_shortened, joined(since_progress(output).splitlines())))
    near = _may_be_short(lines)
    looked_at: set[tuple[str, ...]] = set()
    has_other_error = False
    for number in reversed(range(len(lines))):
        line = lines[number]
        names = (name.rpartition(".")[2] for name in _ERROR.findall(line))
        if not CERTAIN_BUGS.isdisjoint(names) and match(_report_of_lines([line])) is None:
            return None
        message = tuple(lines[number : number + _MOST_LINES_OF_A_MESSAGE])
        is_new = number in near and message not in looked_at
        if is_new:
            looked_at.add(message)
        if len(looked_at) > _MOST_MESSAGES:
            return None
        longest = len(message) if is_new else 0
        for count in range(1, longest + 1):
            part = lines[number : number + count]
            report = _report_of_lines(part)
            meaning = match(report)
            if meaning is not None and meaning.kind.is_memory:
                if any(map(_NO_ERROR.match, part)):
                    break
                # A program that later fails with another error has only warned of this lack.
                is_warning = any(map(_WARNING.search, part))
                is_survived = is_warning and has_other_error
                if is_survived or _HANDLED.search(report.text):
                    return None
                following = lines[number + count :][:_MOST_LINES_OF_A_MESSAGE]
                return _with_rest(part, following, meaning), meaning
        has_other_error |= _BEGINS_WITH_ERROR.search(line) is not None
    return None


def _may_be_short(lines: Sequence[str]) -> set[int]:
    """Return the numbers of the lines at which a report of a lack of memory may start."""
    numbers: set[int] = set()
    for number, line in enumerate(lines):
        below = lines[number + 1] if number + 1 < len(lines) else ""
        spellings = f"{line} {below}", line + below
        if any(map(_MAY_BE_SHORT.search, spellings)):
            first = max(number - _MOST_LINES_OF_A_MESSAGE + 2, 0)
            numbers.update(range(first, number + 1))
    return numbers


def _with_rest(lines: list[str], following: Sequence[str], meaning: Match) -> ErrorReport:
    """Return the report in some lines, with lines below that have more of its figures: a terminal
    may have broken the message there."""
    report = _report_of_lines(lines)
    most = _figures_in(report, meaning)
    for line in following:
        lines = [*lines, line]
        wider = _report_of_lines(lines)
        if _figures_in(wider, meaning) > most:
            report = replace(wider, headline=wider.text[:300])
            most = _figures_in(wider, meaning)
    return report


def _figures_in(report: ErrorReport, meaning: Match) -> int:
    figures = vars(read_evidence(report.text, meaning))
    return sum(type(value) is int for value in figures.values())


def _report_of_lines(lines: list[str]) -> ErrorReport:
    text = one_line(lines)
    named = (name for path in _ERROR.findall(text) for name in names_of(path))
    return ErrorReport(
        tuple(name for name in named if name not in PROGRAMMING_ERRORS),
        text,
        _headline_in(lines, text),
        one_line(lines, ""),
    )


def _last_words(lines: list[str], native: bool) -> list[str]:
    """Return the lines from C++'s ``terminate called`` on, else the lines that are not chatter."""
    if native:
        for number, line in enumerate(lines):
            if _NATIVE.search(line):
                return lines[number:]
    return [line for line in lines if not _CHATTER.match(line)]


def _headline_in(lines: Sequence[str], text: str) -> str:
    for line in lines:
        if "what():" in line:
            return line.partition("what():")[2].strip()[:300]
    for line in reversed(lines):
        if match(ErrorReport((), one_line([line]), "")) is not None:
            return line.strip()[:300]
    return text[:300]


def _reason_in_last_line(lines: Sequence[str]) -> str:
    """Return the last line if it reads like the reason why a process ended, otherwise empty."""
    for line in reversed(lines):
        words = line.strip()[:300]
        if words and not words.startswith(_AFTER_THE_END):
            return words if _NATIVE.search(words) or ":" in words else ""
    return ""
