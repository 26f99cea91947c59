"""Extracts error reports from an exception, or from text with tracebacks. Pure.

`reports_of` follows an exception to its causes. `reports_in` reads a message or the end of a log,
in which torch, Ray or a worker process may have quoted the traceback of the actual error. The other
modules of this package call both, in any process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

# Errors of the program itself, whatever their message says: KeyError('CUDA out of memory') is a
# missing key. AssertionError and ImportError are not in this list, because torch raises them if
# CUDA or a driver is missing.
_PROGRAMMING = (
    "ArithmeticError AttributeError FileExistsError FileNotFoundError "
    "IsADirectoryError LookupError IndexError KeyError KeyErrorMessage NameError "
    "UnboundLocalError NotADirectoryError NotImplementedError PermissionError PicklingError "
    "RecursionError StopIteration SyntaxError IndentationError TypeError ValueError "
    "UnicodeDecodeError JSONDecodeError ZeroDivisionError OverflowError FloatingPointError "
    "ModuleNotFoundError ConfigError MisconfigurationException OmegaConfBaseException "
    "HydraException ConfigCompositionException ConfigAttributeError MissingMandatoryValue "
    "InterpolationResolutionError DecompressionBombError ProgrammingError "
    "InvalidRequestError"
)
PROGRAMMING_ERRORS = frozenset(_PROGRAMMING.split())
# These errors need not come from the program: a file may be missing because a disk or a
# server was unreachable for a moment.
_FILE_ERRORS = (
    "FileExistsError FileNotFoundError IsADirectoryError NotADirectoryError PermissionError"
)
_OTHER_CERTAIN_BUGS = "AssertionError ImportError TabError UnicodeError UnicodeEncodeError"
# Only the program can cause these errors, so another attempt would fail in the same way.
CERTAIN_BUGS = PROGRAMMING_ERRORS.difference(_FILE_ERRORS.split()).union(
    _OTHER_CERTAIN_BUGS.split()
)
# These errors only say that a child process failed. The child printed its own error earlier.
_CHILD_ERRORS = frozenset({"CalledProcessError", "ChildFailedError"})
# A program may deliberately raise a ValueError in place of the error that it is handling.
_TRANSLATION = "ValueError"
# Python prints one of these lines between two tracebacks of a chain.
_RAISED_FROM = "The above exception was the direct cause"
_RAISED_IN_A_HANDLER = "During handling of the above exception"

_LINE_LIMIT = 300  # characters of a headline
_DEPTH_LIMIT = 50  # exceptions in a chain
_TEXT_LIMIT = 200_000  # characters of a message or log


@dataclass(frozen=True)
class ErrorReport:
    """The parts of an error by which it is classified."""

    # Names of the error's class and base classes, bare and as `library.Name`. Empty if unknown.
    types: tuple[str, ...]
    text: str  # the message on one line, without stack frames
    headline: str  # the line to show people
    # The message with its lines joined without spaces, because terminals wrap lines within words.
    unwrapped: str = ""
    in_group: bool = False  # whether it is a member of an exception group
    # The exception itself, None if a text only quotes it.
    exception: BaseException | None = field(default=None, compare=False)

    @property
    def is_programming_error(self) -> bool:
        """Whether the error is a bug even if its message mentions memory."""
        return not PROGRAMMING_ERRORS.isdisjoint(self.types)

    @property
    def is_certain_bug(self) -> bool:
        """Whether only the program itself can cause the error."""
        return not CERTAIN_BUGS.isdisjoint(self.types)

    @property
    def is_of_child(self) -> bool:
        """Whether the error only says that a child process failed."""
        return not _CHILD_ERRORS.isdisjoint(self.types)


def reports_of(exception: BaseException) -> Iterator[ErrorReport]:
    """Yield the exception's own report first, then the reports of its causes.

    If the message of an exception quotes tracebacks, their reports follow the exception's own.
    """
    return _follow(exception, set(), in_group=False)


def own_report_of(exception: BaseException) -> ErrorReport:
    """Return the report of an exception, without its causes."""
    return next(reports_of(exception))


def _follow(exception: BaseException, seen: set[int], in_group: bool) -> Iterator[ErrorReport]:
    if id(exception) in seen or len(seen) >= _DEPTH_LIMIT:
        return
    seen.add(id(exception))
    names: list[str] = []
    for cls in type(exception).__mro__:
        names += names_of(f"{cls.__module__}.{cls.__name__}")
    types = tuple(names)
    # The message may quote the traceback of another process, and then has several reports.
    reports = list(reports_in(_text_of(exception), types))
    for report in reports:
        is_own = report.types[:1] == types[:1]
        raised = exception if is_own else None
        yield replace(report, in_group=in_group, exception=raised)
    # Exception groups, including the backport's.
    members = getattr(exception, "exceptions", None)
    if isinstance(members, (tuple, list)):
        for member in members:
            if isinstance(member, BaseException):
                yield from _follow(member, seen, in_group=True)
    # A KeyError in the handler of another error is a separate bug, not a report of that error.
    is_separate = reports[0].is_programming_error and _TRANSLATION not in reports[0].types
    context = None if exception.__suppress_context__ else exception.__context__
    if exception.__cause__ is not None:
        yield from _follow(exception.__cause__, seen, in_group)
    elif context is not None and not is_separate:
        yield from _follow(context, seen, in_group)


def names_of(path: str) -> tuple[str, ...]:
    """Return a class's bare name and, if the path starts with a library, its name in that library.

    For ``torch.cuda.OutOfMemoryError``, these are ``OutOfMemoryError`` and
    ``torch.OutOfMemoryError``.
    """
    library, dot, _ = path.partition(".")
    name = path.rpartition(".")[2]
    return (name, f"{library}.{name}") if dot else (name,)


def _text_of(exception: BaseException) -> str:
    try:
        return str(exception)
    except Exception:  # A broken __str__ must not hide the failure.
        return " ".join(repr(type(arg)) for arg in exception.args)


# --- reports in a text ---

_TRACEBACK = re.compile(r"Traceback \(most recent call (?:last|first)\)")
_DIGIT = re.compile(r"\d")
# Prefixes that launchers and loggers put before each line. "[Errno 12]" and "[TRT]" belong to the
# message.
_LINE_PREFIX = re.compile(
    r"^(?:\[(?:rank|default|worker|trainer|node)[ _]?\d+\]:?\s?"  # torchrun
    r"|\[\d+(?:,\d+)?\](?:<std\w+>)?:\s?"  # mpirun
    r"|\((?:\w+ )?\w+[ =]?pid=\d+[^)]*\)\s?"  # Ray, vLLM
    r"|(?:INFO|WARNING|ERROR) [\d-]+ [\d:.,]+ \[?[\w./]+:\d+\]\s?"
    r"|\[[\d:., TZ+/-]{8,35}\]:?\s?"  # a time
    r"|\d{4}-\d\d-\d\dT[\d:.,]+(?:Z|[+-]\d\d:?\d\d)?\s)+",  # a container's log
    re.IGNORECASE,
)
# The line below a traceback's frames: an exception's class, with its message if there is one.
_FINAL_LINE = re.compile(
    r"^(?:E\s{2,})?((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:\([A-Za-z_]\w*\))?(?::\s|:?\s*$)"
)
_AT_MARGIN = re.compile(r"[^\s|+╭╰│~^]")
# The name of an error at the start of a line.
_NAMED_ERROR = re.compile(
    r"^\s*((?:[A-Za-z_]\w*\.)*\w*"
    r"(?:Error|Exception|Interrupt|OutOfResources|BrokenProcessPool|KilledWorker))(?::\s|:?\s*$)"
)
# A line that ends an exception's message.
_SEPARATOR = re.compile(
    rf"^(?:{_RAISED_IN_A_HANDLER}|{_RAISED_FROM}|"
    r"Exception raised from |frame #\d+|C\+\+ CapturedTraceback|\"{3}|'{3}|=+$|-+$)"
)
# The summary that torch elastic prints.
_ROOT_CAUSE = re.compile(r"Root Cause .*?\brank +: (\d+) .*?\bexitcode +: (.*?) +error_file")
_CPP_FRAME = re.compile(r"^\s*(?:frame )?#\d+:? |^Exception raised from |.*most recent call first")
# torch appends these sentences to every CUDA error. Their words would match asserts.
_APPENDIX = re.compile(
    r"Compile with .?TORCH_USE_\w+_DSA.? to enable device-side assertions\.?"
    r"|Device-side assertions were explicitly omitted for this error check[^.\n]*"
    r"|Device-side assertion tracking was not enabled by user\.?",
    re.IGNORECASE,
)
# Hints mention errors that did not happen. Real-ESRGAN prints "If you encounter CUDA out of memory,
# try …", and TensorFlow logs "The caller indicates that this is not a failure" when it will retry.
_HINT = re.compile(
    r"\b(?:if you (?:encounter|see|get|run into|are running|still)|"
    r"(?:to|can|helps?) (?:avoid|prevent|reduce)|"
    r"(?:may|might|can|could|will|would) (?:cause|lead to|result in|trigger|run))\b[^.;\n]*"
    r"|\b(?:OOMs?|out[ -]of[ -]memory)\b[\w ]{0,20}[:=|]\s*0\b"
    r"|(?:如果|如遇|若[是出遇]|[避防]免|防止|以免|もし|만약|\b(?:wenn|falls|если)\b|\ben cas d"
    r"|\bsi (?:vous|la|hay|no)\b)[^.;。；\n]*"
    r"|\b(?:Tipp?|Hinweis|提示|注意)\s?[:：][^\n]*"
    r"|in case of [^.;\n]*|common causes include [^.\]]*"
    r"|^.*The caller indicates that this is not a failure.*$",
    re.IGNORECASE | re.MULTILINE,
)


def reports_in(text: str, types: tuple[str, ...] = ()) -> Iterator[ErrorReport]:
    """Yield a report for each traceback that a text quotes, the last traceback first.

    If the text quotes no traceback, yield one report of the text itself.

    Args:
        text: an exception's message or the end of a log.
        types: the class names of the exception that has this message, empty for a log.
    """
    if len(text) > _TEXT_LIMIT:
        text = text[: _TEXT_LIMIT // 2] + "\n" + text[-_TEXT_LIMIT // 2 :]
    lines = [_LINE_PREFIX.sub("", line.rstrip()) for line in text.splitlines()]
    starts = [number for number, line in enumerate(lines) if _TRACEBACK.search(line)]
    for start in starts:
        _remove_prefix(lines, start)
    # The text before the first traceback belongs to the error in a message, but not in a log.
    message_start = ""
    if types and starts:
        message_start = one_line(lines[: starts[0]])
    quoted: list[tuple[ErrorReport, list[str]]] = []
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=False):
        header = message_start if message_start else _where_caught(lines, start)
        report = _read_traceback(lines[start + 1 : end], header)
        if report is not None:
            quoted.append((report, lines[:start]))
    if not quoted:
        yield _report_of_text(lines, types)
        return
    quoted.reverse()
    for number, (report, above) in enumerate(quoted):
        # Lightning, torch and joblib raise the worker's error again in this process, so `types` has
        # its base classes.
        is_raised_again = number == 0 and report.types[0] in types
        yield replace(report, types=types if is_raised_again else report.types)
        if report.is_programming_error and not _has_cause(report, above):
            return


def last_report_in(text: str) -> ErrorReport:
    """Return the report of the last error in the end of a log."""
    return next(reports_in(text))


def _remove_prefix(lines: list[str], start: int) -> None:
    """Remove the text before the word "Traceback" from all lines of a traceback.

    The prefix may be a time, so its digits may differ from line to line.
    """
    shape = _DIGIT.sub("0", _TRACEBACK.split(lines[start])[0])
    for number, line in enumerate(lines[start + 1 :], start + 1):
        if _DIGIT.sub("0", line).startswith(shape):
            lines[number] = line[len(shape) :]


def _where_caught(lines: list[str], start: int) -> str:
    """Return the line in which torch names the thread or process of a traceback that it quotes.

    The line is empty if torch did not quote the traceback.
    """
    is_original = lines[start].startswith("Original Traceback")
    return lines[start - 1] if is_original else ""


def _read_traceback(lines: list[str], header: str) -> ErrorReport | None:
    """Return the error at the end of a traceback, or None if the traceback is cut off.

    The error is on the first line without indentation or, if Python did not print that line, on the
    last line that names an error.

    Args:
        lines: the lines below the word "Traceback".
        header: the text above the traceback that belongs to the message, may be empty.
    """
    first = [n for n, line in enumerate(lines) if _AT_MARGIN.match(line)][:1]
    last_named = [n for n, line in enumerate(lines) if _NAMED_ERROR.match(line)][-1:]
    for number in first + last_named:
        line = lines[number].strip()
        final = _FINAL_LINE.match(line)
        if final is None:
            continue
        path = final[1]
        name = path.rpartition(".")[2]
        message = [line]
        for further in lines[number + 1 :]:
            # torch elastic's message contains separators.
            if _SEPARATOR.match(further) and name != "ChildFailedError":
                break
            message.append(further)
        text = f"{header} {one_line(message)}".strip()
        headline = line
        root_cause = _ROOT_CAUSE.search(text)
        if root_cause is not None:
            headline = f"{name}: rank {root_cause[1]}: exit code {root_cause[2]}"
        unwrapped = one_line(message, "")
        return ErrorReport(names_of(path), text, headline.strip()[:_LINE_LIMIT], unwrapped)
    return None


def _has_cause(report: ErrorReport, above: Sequence[str]) -> bool:
    """Return whether the error of the traceback above led to this error.

    `_follow` has the same rule for exception objects.
    """
    link = last_line_with_text(above)
    is_translated = _TRANSLATION in report.types
    return _RAISED_FROM in link or (is_translated and _RAISED_IN_A_HANDLER in link)


def last_line_with_text(lines: Sequence[str]) -> str:
    """Return the last line that is not blank, or an empty string if all lines are."""
    for line in reversed(lines):
        if line.strip():
            return line
    return ""


def _report_of_text(lines: list[str], types: tuple[str, ...]) -> ErrorReport:
    """Return the report of a message or log without a traceback."""
    text = one_line(lines)
    first_line = _first_line_with_words(lines)
    headline = first_line
    # Another exception's message may begin with the name of an error: "MemoryError: …".
    named = _NAMED_ERROR.match(text)
    name = types[0] if types else ""
    if named is not None:
        types += names_of(named[1])
    elif not first_line:
        headline = name
    elif name not in ("", "RuntimeError"):
        headline = f"{name}: {first_line}"
    return ErrorReport(types, text, headline[:_LINE_LIMIT], one_line(lines, ""))


def one_line(lines: list[str], between: str = " ") -> str:
    """Return a text on one line, with single spaces, without C++ stack frames and hints.

    Args:
        lines: the text's lines.
        between: the separator to put between two lines.
    """
    kept = "\n".join(line for line in lines if not _CPP_FRAME.match(line))
    text = _HINT.sub(" ", _APPENDIX.sub(" ", kept)).replace("\n", between)
    return " ".join(text.split())


def _first_line_with_words(lines: list[str]) -> str:
    for line in lines:
        if any(map(str.isalnum, line)):
            return line.strip()[:_LINE_LIMIT]
    return ""
