"""The package's loggers. Important lines reach the screen, whatever a program does to ``logging``.

A program sets up logging for itself. ``dictConfig`` and ``fileConfig`` disable every logger that
exists, ``hydra/job_logging=disabled`` leaves no handler, and a level or filter is meant for other
lines. So each line first takes Python's ordinary way. If no handler writes an important line to the
screen, it is written to standard error. This is decided for each line, since a program may change
its logging at any time. A program may also put a file or a buffer in place of ``sys.stdout`` or
``sys.stderr``, which no one watches: neither counts as the screen. Outside of jobs, in a program
that uses a part of the package, any handler that takes a line is enough.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from robust_train.readable import one_line

PACKAGE = "robust_train"
_OF_A_SCRIPT = "ROBUST_TRAIN_EVENTS"  # the variable that only its processes have
_NAMES = (PACKAGE, f"{PACKAGE}.integrations", f"{PACKAGE}.vision")


class ShortLines(logging.Formatter):
    """Formats a line as the time of day, the level unless it is INFO, and the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(level)s%(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        is_plain = record.levelno in (logging.INFO, logging.DEBUG)
        record.level = "" if is_plain else f"{record.levelname.lower()}: "
        text = super().format(record)
        if record.name.startswith(PACKAGE):
            # an error may hold what a terminal obeys
            text = "\n".join(map(one_line, text.split("\n")))
        return text


class _Lines:
    """How this process handles the lines of all loggers of the package."""

    def __init__(self) -> None:
        # this process is a launcher, an attempt or the script of one
        self.is_job = _OF_A_SCRIPT in os.environ
        # where the job's lines go if the program has set up no logging for them; None if it has
        self.screen: TextIO | None = None
        self.change: Callable[[str], str] | None = None
        self.rank = 0


_lines = _Lines()


class PackageLogger(logging.Logger):
    """A logger whose warnings, errors and lines of `log_always` cannot be muted."""

    def isEnabledFor(self, level: int) -> bool:
        return level >= logging.WARNING or super().isEnabledFor(level) or self._is_jobs(level)

    def _is_jobs(self, level: int) -> bool:
        """Return whether the job shows lines of this level, though the logger may be disabled."""
        return (
            _lines.screen is not None
            and level > self.manager.disable
            and level >= self.getEffectiveLevel()
        )

    def handle(self, record: logging.LogRecord) -> None:
        level = record.levelno
        always_shown = hasattr(record, "always_shown")
        is_essential = always_shown or level >= logging.WARNING
        if _lines.change is not None:
            record.msg = _lines.change(str(record.msg))
        if _lines.rank and not _mark_rank(_lines.rank, record):
            return
        # Python 3.12 and later: a filter may return another record
        passed: object = self.filter(record)
        if isinstance(passed, logging.LogRecord):
            record = passed
        is_routed = bool(passed) and super().isEnabledFor(level)
        if is_routed and self._give_to_handlers(record):
            return
        screen = _lines.screen
        if is_essential and not is_screen(screen):
            screen = None
        if is_routed and screen is not None:
            _write(screen, record)
        elif is_essential or (passed and self._is_jobs(level)):
            _write(standard_error() if _lines.is_job else sys.stderr, record)

    def _give_to_handlers(self, record: logging.LogRecord) -> bool:
        """Do what ``callHandlers`` does, and return whether that has shown the line."""
        is_shown = False
        logger: logging.Logger | None = self
        while logger is not None:
            for handler in logger.handlers:
                if record.levelno < handler.level:
                    continue
                has_passed = handler.handle(record)
                if has_passed and (not _lines.is_job or _is_on_screen(handler)):
                    is_shown = True
            logger = logger.parent if logger.propagate else None
        return is_shown


def _is_on_screen(handler: Any) -> bool:
    """Return whether a handler writes to stdout or stderr.

    A handler has a ``stream``, rich's handler has a console, and a handler that only queues lines
    has a listener, which Python 3.12 and later knows.
    """
    listener = getattr(handler, "listener", None)
    if listener is not None:
        return any(map(_is_on_screen, listener.handlers))
    stream = getattr(handler, "stream", None)
    if stream is None:
        console = getattr(handler, "console", None)
        stream = getattr(console, "file", None)
    return is_screen(stream)


def is_screen(stream: Any) -> bool:
    """Return whether what is written to a stream reaches the standard output or error that this
    process was given: a file or a buffer that a program has put there does not count, but a wrapper
    of its own does, as those of notebooks."""
    if stream is None or getattr(stream, "closed", False):
        return False
    # a stream that stood there before, or /dev/stderr
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        descriptor = stream.fileno()
        if any(os.path.sameopenfile(descriptor, number) for number in (1, 2)):
            return True
        if isinstance(stream, io.TextIOWrapper):
            return False
    screens = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return _may_pass_on(stream) and any(stream is screen for screen in screens)


def _may_pass_on(stream: Any) -> bool:
    """Return whether an object without a descriptor may write elsewhere. A wrapper has a stream, or
    a list of streams, among its attributes. An object that discards everything does not."""
    if isinstance(stream, io.TextIOBase):
        return not isinstance(stream, io.StringIO)
    for value in getattr(stream, "__dict__", {}).values():
        parts = value if isinstance(value, (list, tuple)) else [value]
        if any(hasattr(part, "write") for part in parts):
            return True
    return False


def standard_error() -> TextIO:
    """Return ``sys.stderr``, or the original stream of the process if that is no longer the
    screen."""
    first = sys.__stderr__
    return sys.stderr if first is None or is_screen(sys.stderr) else first


def standard_output() -> TextIO:
    """Return ``sys.stdout``, or the process's first if a file is in its place: what attempts print
    goes through it, and warnings are in that. A buffer is there to collect all of it."""
    first = sys.__stdout__
    is_collected = isinstance(sys.stdout, io.StringIO)
    if first is None or is_collected or is_screen(sys.stdout):
        return sys.stdout
    return first


def _write(stream: TextIO | None, record: logging.LogRecord) -> None:
    """Write a line. If the screen does not accept it, the line is lost."""
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):
            stream.write(f"{ShortLines().format(record)}\n")
            stream.flush()


def take_loggers() -> None:
    """Replace the package's loggers by those of this module, with their handlers and levels."""
    for name in _NAMES:
        logging.getLogger(name).__class__ = PackageLogger


def log_always(text: str, *figures: object) -> None:
    """Log a line at level INFO that is shown like a warning, for example how a job ended."""
    log = logging.getLogger(PACKAGE)
    file, line, function, _ = log.findCaller(stacklevel=2)
    record = log.makeRecord(
        log.name, logging.INFO, file, line, text, figures, None, function, {"always_shown": True}
    )
    log.handle(record)


@contextlib.contextmanager
def lines_shown() -> Iterator[None]:
    """Show the job's lines within the block, unless the program shows them."""
    logger = logging.getLogger(PACKAGE)
    was_job = _lines.is_job
    before = _lines.screen
    level = logger.level
    show_lines()
    try:
        yield
    finally:
        _lines.is_job = was_job
        _lines.screen = before
        logger.setLevel(level)


def show_lines() -> None:
    """Show the job's lines from now on, unless the program has set up logging that shows them."""
    logger = logging.getLogger(PACKAGE)
    _lines.is_job = True
    is_untouched = logger.propagate and not logger.disabled
    if logger.disabled or not logger.hasHandlers():
        stream = sys.stdout if is_untouched else sys.stderr
        _lines.screen = _lines.screen or stream
        logger.setLevel(logger.level or logging.INFO)


def change_words(change: Callable[[str], str] | None) -> None:
    """Change the words of our own log lines from now on, but not what is filled in."""
    _lines.change = change


def speak_as_rank(rank: int) -> None:
    """Show only warnings from now on, with the rank: the same lines of every rank would hide what
    differs. That holds for the program's own lines, too."""
    _lines.rank = rank
    handlers = list(logging.getLogger().handlers)
    if logging.lastResort is not None:
        handlers.append(logging.lastResort)
    for handler in handlers:
        handler.addFilter(lambda record: _mark_rank(rank, record))


def _mark_rank(rank: int, record: logging.LogRecord) -> bool:
    """Put the rank in front of a line, and return whether a rank other than the first shows it."""
    if record.levelno < logging.WARNING:
        return False
    if not getattr(record, "is_marked", False):
        record.msg = f"[rank {rank}] {record.msg}"
        record.is_marked = True
    return True
