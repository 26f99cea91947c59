"""Extracts the reports of a failure from an exception, a quoted traceback or a log. Pure, any
process."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

# A program with an error in it: its message is about the program, not about memory.
# KeyError('CUDA out of memory') is a missing key. AssertionError and ImportError are not here:
# torch without CUDA and a missing driver come as those.
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
# A file may be missing because a disk or a server was unreachable for a moment.
_OF_THE_SYSTEM = (
    "FileExistsError FileNotFoundError IsADirectoryError NotADirectoryError PermissionError"
)
_ALSO_CERTAIN = "AssertionError ImportError TabError UnicodeError UnicodeEncodeError"
# Only the program can be the reason for these, so they would come again.
CERTAIN_BUGS = PROGRAMMING_ERRORS.difference(_OF_THE_SYSTEM.split()).union(_ALSO_CERTAIN.split())
# A ValueError may also be raised on purpose in place of the error that is being handled.
_TRANSLATION = "ValueError"
# Python's words for these two links of a chain.
_RAISED_FROM = "The above exception was the direct cause"
_RAISED_IN_A_HANDLER = "During handling of the above exception"

_LINE_LIMIT = 300
_DEPTH_LIMIT = 50
_TEXT_LIMIT = 200_000


@dataclass(frozen=True)
class ErrorReport:
    """The parts of an exception that matter for its classification."""

    # Names of its class and its base classes, bare and as `library.Name`. Empty if unknown.
    types: tuple[str, ...]
    text: str  # its message on one line, without stack frames
    headline: str  # the one line to show people
    # The text with its lines joined, because a terminal breaks them inside of words.
    unwrapped: str = ""
    in_group: bool = False  # it failed at the same time as others
    # The exception itself, None if it is only quoted.
    exception: BaseException | None = field(default=None, compare=False)

    @property
    def is_programming_error(self) -> bool:
        """Return whether the exception is a bug even if its message mentions memory."""
        return not PROGRAMMING_ERRORS.isdisjoint(self.types)

    @property
    def is_certain_bug(self) -> bool:
        """Return whether only the program itself can be the reason."""
        return not CERTAIN_BUGS.isdisjoint(self.types)


def reports_of(exception: BaseException) -> Iterator[ErrorReport]:
    """Yield the exception's own report first, then the reports of its causes."""
    return _follow(exception, set(), in_group=False)


def _follow(exception: BaseException, seen: set[int], in_group: bool) -> Iterator[ErrorReport]:
    if id(exception) in seen or len(seen) >= _DEPTH_LIMIT:
        return
    seen.add(id(exception))
    types = tuple(
        name
        for cls in type(exception).__mro__
        for name in names_of(f"{cls.__module__}.{cls.__name__}")
    )
    reports = list(reports_in(_text_of(exception), types))
    for report in reports:
        raised = exception if report.types[:1] == types[:1] else None
        yield replace(report, in_group=in_group, exception=raised)
    # Exception groups, including the backport's.
    members = getattr(exception, "exceptions", None)
    if isinstance(members, (tuple, list)):
        for member in members:
            if isinstance(member, BaseException):
                yield from _follow(member, seen, in_group=True)
    if exception.__cause__ is not None:
        yield from _follow(exception.__cause__, seen, in_group)
    elif (
        exception.__context__ is not None
        and not exception.__suppress_context__
        # A KeyError in the handler of another error is a separate bug, not a report of that error.
        and (not reports[0].is_programming_error or _TRANSLATION in reports[0].types)
    ):
        yield from _follow(exception.__context__, seen, in_group)


def names_of(path: str) -> tuple[str, ...]:
    """Return a class's name, and if the path has a library, the name with its library."""
    library, dot, _ = path.partition(".")
    name = path.rpartition(".")[2]
    return (name, f"{library}.{name}") if dot else (name,)


def _text_of(exception: BaseException) -> str:
    try:
        return str(exception)
    except Exception:  # a broken __str__ must not hide the failure
        return " ".join(repr(type(arg)) for arg in exception.args)


# --- text -------------------------------------------------------------------------------------

_TRACEBACK = re.compile(r"Traceback \(most recent call (?:last|first)\)")
_DIGIT = re.compile(r"\d")
# What launchers and loggers put before each line; "[Errno 12]" and "[TRT]" belong to the message.
_LINE_PREFIX = re.compile(
    r"^(?:\[(?:rank|default|worker|trainer|node)[ _]?\d+\]:?\s?"  # torchrun
    r"|\[\d+(?:,\d+)?\](?:<std\w+>)?:\s?"  # mpirun
    r"|\((?:\w+ )?\w+[ =]?pid=\d+[^)]*\)\s?"  # Ray, vLLM
    r"|(?:INFO|WARNING|ERROR) [\d-]+ [\d:.,]+ \[?[\w./]+:\d+\]\s?"
    r"|\[[\d:., TZ+/-]{8,35}\]:?\s?"  # a time
    r"|\d{4}-\d\d-\d\dT[\d:.,]+(?:Z|[+-]\d\d:?\d\d)?\s)+",  # a container's log
    re.IGNORECASE,
)
_FINAL_LINE = re.compile(
    r"^(?:E\s{2,})?((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:\([A-Za-z_]\w*\))?(?::\s|:?\s*$)"
)
_AT_MARGIN = re.compile(r"[^\s|+╭╰│~^]")
_PREFIX = re.compile(
    r"^\s*((?:[A-Za-z_]\w*\.)*\w*"
    r"(?:Error|Exception|Interrupt|OutOfResources|BrokenProcessPool|KilledWorker))(?::\s|:?\s*$)"
)
_SEPARATOR = re.compile(
    rf"^(?:{_RAISED_IN_A_HANDLER}|{_RAISED_FROM}|"
    r"Exception raised from |frame #\d+|C\+\+ CapturedTraceback|\"{3}|'{3}|=+$|-+$)"
)
# The line of torch elastic.
_ROOT_CAUSE = re.compile(r"Root Cause .*?\brank +: (\d+) .*?\bexitcode +: (.*?) +error_file")
_FRAME = re.compile(r"^\s*(?:frame )?#\d+:? |^Exception raised from |.*most recent call first")
# What torch appends to every CUDA error, whatever it is: it names asserts and memory.
_APPENDIX = re.compile(
    r"Compile with .?TORCH_USE_\w+_DSA.? to enable device-side assertions\.?"
    r"|Device-side assertions were explicitly omitted for this error check[^.\n]*"
    r"|Device-side assertion tracking was not enabled by user\.?",
    re.IGNORECASE,
)
# A hint is not a report. Real-ESRGAN prints "If you encounter CUDA out of memory, try …", and
# TensorFlow logs after a failed try that "The caller indicates that this is not a failure".
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
    """Yield the reports in a text: the message itself, or those in tracebacks that it quotes.

    Args:
        text: an exception's message or the end of a log.
        types: class names of the exception whose message it is, empty for a log.
    """
    if len(text) > _TEXT_LIMIT:
        text = text[: _TEXT_LIMIT // 2] + "\n" + text[-_TEXT_LIMIT // 2 :]
    lines = [_LINE_PREFIX.sub("", line.rstrip()) for line in text.splitlines()]
    starts = [number for number, line in enumerate(lines) if _TRACEBACK.search(line)]
    for start in starts:
        _unprefix(lines, start)
    if not starts:
        yield _plain(lines, types)
        return
    # The start of a message belongs to the error, the start of a log does not.
    header = one_line(lines[: starts[0]]) if types else ""
    spans = zip(starts, [*starts[1:], len(lines)], strict=True)
    tracebacks = []
    for start, end in spans:
        caught = header if header else _where_caught(lines, start)
        tracebacks.append((_quoted(lines[start + 1 : end], caught), lines[:start]))
    quoted = [(report, above) for report, above in reversed(tracebacks) if report is not None]
    if not quoted:
        yield _plain(lines, types)
        return
    for number, (report, above) in enumerate(quoted):
        # Lightning, torch and joblib raise the worker's class again, so the base classes are known.
        report_types = types if number == 0 and report.types[0] in types else report.types
        yield replace(report, types=report_types)
        if report.is_programming_error and not _has_cause(report, above):
            return


def _has_cause(report: ErrorReport, above: Sequence[str]) -> bool:
    """Return whether the traceback above an error led to it, by the same rule as `_follow` for an
    exception object."""
    link = next(filter(str.strip, reversed(above)), "")
    is_translated = _TRANSLATION in report.types
    return _RAISED_FROM in link or (is_translated and _RAISED_IN_A_HANDLER in link)


def _unprefix(lines: list[str], start: int) -> None:
    """Remove the prefix before the first words from a traceback's lines, whatever figures it
    has."""
    shape = _DIGIT.sub("0", _TRACEBACK.split(lines[start])[0])
    for number, line in enumerate(lines[start + 1 :], start + 1):
        if _DIGIT.sub("0", line).startswith(shape):
            lines[number] = line[len(shape) :]


def _plain(lines: list[str], types: tuple[str, ...]) -> ErrorReport:
    text = one_line(lines)
    prefix = _PREFIX.match(text)
    name = types[0] if types else ""
    headline = first = _first_line(lines)
    # An example is "MemoryError: …" inside of another exception's message.
    if prefix is not None:
        types += names_of(prefix.group(1))
    elif name not in ("", "RuntimeError") or not first:
        headline = f"{name}: {first}" if first else name
    return ErrorReport(types, text, headline[:_LINE_LIMIT], one_line(lines, ""))


def _where_caught(lines: list[str], start: int) -> str:
    """Return torch's line above an error of another thread or process, empty if there is none."""
    is_original = lines[start].startswith("Original Traceback")
    return lines[start - 1] if is_original else ""


def _quoted(lines: list[str], header: str) -> ErrorReport | None:
    """Return the error at the end of a traceback: the first line without indentation, or if the
    lines are not Python's, the last line that names an error."""
    first = [n for n, line in enumerate(lines) if _AT_MARGIN.match(line)][:1]
    named = [n for n, line in enumerate(lines) if _PREFIX.match(line)][-1:]
    for number in first + named:
        line = lines[number].strip()
        final = _FINAL_LINE.match(line)
        if final is None:
            continue
        message = [line]
        name = final.group(1).rpartition(".")[2]
        for further in lines[number + 1 :]:
            # torch elastic draws lines within its message.
            if _SEPARATOR.match(further) and name != "ChildFailedError":
                break
            message.append(further)
        text = f"{header} {one_line(message)}" if header else one_line(message)
        cause = _ROOT_CAUSE.search(text)
        shown = f"{name}: rank {cause[1]}: exit code {cause[2]}" if cause else line
        return ErrorReport(
            names_of(final.group(1)),
            text.strip(),
            shown.strip()[:_LINE_LIMIT],
            unwrapped=one_line(message, ""),
        )
    return None


def one_line(lines: list[str], between: str = " ") -> str:
    """Return a text on one line, with single spaces, without C++ stack frames and hints.

    Args:
        lines: the text's lines.
        between: the text that joins them.
    """
    kept = "\n".join(line for line in lines if not _FRAME.match(line))
    text = _HINT.sub(" ", _APPENDIX.sub(" ", kept)).replace("\n", between)
    return " ".join(text.split())


def _first_line(lines: list[str]) -> str:
    """Return the first line with words in it, unchanged."""
    stripped = (line.strip() for line in lines)
    return next((line[:_LINE_LIMIT] for line in stripped if any(map(str.isalnum, line))), "")
