"""Shows the package's important log lines on the screen, whatever a program does to ``logging``.

Importing the package calls `take_loggers`, in every process. Launchers, attempts and the scripts of
attempts then say by `show_lines` that they belong to a job.

A program sets up logging for its own lines. ``dictConfig`` and ``fileConfig`` disable every logger
that exists, and ``hydra/job_logging=disabled`` leaves no handler. So each line first goes to the
program's handlers. If none of them writes an important line to the screen, `PackageLogger` writes
it to standard error. A file or buffer that replaces ``sys.stdout`` or ``sys.stderr`` does not count
as the screen. In a program that uses the package outside of a job, any handler is enough.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TextIO

from robust_train.readable import one_line

PACKAGE = "robust_train"
_SCRIPT_VARIABLE = "ROBUST_TRAIN_EVENTS"  # set in the environment of an attempt's script
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
            # An error's message may contain control sequences, which a terminal would obey.
            text = "\n".join(one_line(line) for line in text.split("\n"))
        return text


class _Lines:
    """How this process handles the lines of all loggers of the package.

    Attributes:
        is_job: this process is a launcher, an attempt or an attempt's script.
        screen: the stream for the job's lines if the program has not set up logging for them.
        change: changes the words of a line before its values are filled in.
        rank: the rank that warnings name. Rank 0 shows all lines, without its rank.
    """

    def __init__(self) -> None:
        self.is_job = _SCRIPT_VARIABLE in os.environ
        self.screen: TextIO | None = None
        self.change: Callable[[str], str] | None = None
        self.rank = 0


_lines = _Lines()


class PackageLogger(logging.Logger):
    """A logger whose warnings, errors and lines of `log_always` cannot be muted."""

    def isEnabledFor(self, level: int) -> bool:
        is_shown = level >= logging.WARNING or self._is_shown_by_job(level)
        return is_shown or super().isEnabledFor(level)

    def _is_shown_by_job(self, level: int) -> bool:
        """Return whether the job shows lines of this level, even if the logger is disabled."""
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
        # In Python 3.12 and later, a filter may return another record.
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
        elif is_essential or (passed and self._is_shown_by_job(level)):
            stream = standard_error() if _lines.is_job else sys.stderr
            _write(stream, record)

    def _give_to_handlers(self, record: logging.LogRecord) -> bool:
        """Call all handlers, like ``callHandlers``, and return whether one has shown the line."""
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
    """Return whether a handler writes to the screen: by its ``stream``, by its console (rich), or
    by its listener if it only queues lines (Python 3.12 and later)."""
    listener = getattr(handler, "listener", None)
    if listener is not None:
        return any(_is_on_screen(inner) for inner in listener.handlers)
    stream = getattr(handler, "stream", None)
    if stream is None:
        console = getattr(handler, "console", None)
        stream = getattr(console, "file", None)
    return is_screen(stream)


def is_screen(stream: Any) -> bool:
    """Return whether a stream writes to the standard output or error with which this process was
    started. A file or buffer that replaces ``sys.stdout`` does not. A wrapper that passes its
    output on does, for example the stream of a notebook."""
    if stream is None or getattr(stream, "closed", False):
        return False
    # The original stream has this descriptor even if it was replaced, and so has /dev/stderr.
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        descriptor = stream.fileno()
        if any(os.path.sameopenfile(descriptor, number) for number in (1, 2)):
            return True
        if isinstance(stream, io.TextIOWrapper):
            return False
    screens = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return _may_pass_on(stream) and any(stream is screen for screen in screens)


def _may_pass_on(stream: Any) -> bool:
    """Return whether an object without a descriptor may pass its output on to another stream, which
    is then one of its attributes, alone or in a list."""
    if isinstance(stream, io.TextIOBase):
        return not isinstance(stream, io.StringIO)
    for value in getattr(stream, "__dict__", {}).values():
        parts = value if isinstance(value, (list, tuple)) else [value]
        if any(hasattr(part, "write") for part in parts):
            return True
    return False


def standard_error() -> TextIO:
    """Return ``sys.stderr``, or the process's original stream if ``sys.stderr`` is no longer the
    screen."""
    original = sys.__stderr__
    if original is None or is_screen(sys.stderr):
        return sys.stderr
    return original


def standard_output() -> TextIO:
    """Return the stream for the output of attempts: ``sys.stdout``, or the process's original
    stream if a program replaced ``sys.stdout`` by a file. A ``StringIO`` is kept, because it is
    there to collect the output."""
    original = sys.__stdout__
    is_collected = isinstance(sys.stdout, io.StringIO)
    if original is None or is_collected or is_screen(sys.stdout):
        return sys.stdout
    return original


def _write(stream: TextIO | None, record: logging.LogRecord) -> None:
    """Write a line. A line that the screen does not accept is lost."""
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):
            stream.write(f"{ShortLines().format(record)}\n")
            stream.flush()


def take_loggers() -> None:
    """Turn the package's loggers into `PackageLogger`. They keep their handlers and levels."""
    for name in _NAMES:
        logging.getLogger(name).__class__ = PackageLogger


def log_always(text: str, *figures: object) -> None:
    """Log a line of level INFO that cannot be muted, for example how a job ended."""
    log = logging.getLogger(PACKAGE)
    file, line, function, _ = log.findCaller(stacklevel=2)
    record = log.makeRecord(
        log.name, logging.INFO, file, line, text, figures, None, function, {"always_shown": True}
    )
    log.handle(record)


@contextlib.contextmanager
def showing_lines() -> Iterator[None]:
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
    """Change the words of the package's log lines from now on, but not the values filled in."""
    _lines.change = change


def show_only_warnings_of_rank(rank: int) -> None:
    """Show only warnings of the package and of the program from now on, each with the rank.
    Otherwise all ranks would show the same lines."""
    _lines.rank = rank
    handlers = list(logging.getLogger().handlers)
    if logging.lastResort is not None:
        handlers.append(logging.lastResort)
    for handler in handlers:
        handler.addFilter(partial(_mark_rank, rank))


def _mark_rank(rank: int, record: logging.LogRecord) -> bool:
    """Return whether a line is a warning or an error, and if so put the rank in front of it."""
    if record.levelno < logging.WARNING:
        return False
    if not getattr(record, "is_marked", False):
        record.msg = f"[rank {rank}] {record.msg}"
        record.is_marked = True
    return True
