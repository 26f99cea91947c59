"""Shows the output of attempts, and keeps it in a log file. Its end is evidence of a failure.

:class:`.interpreters.Interpreters` holds one :class:`OutputPump` in the launcher, which gives the
interpreters their standard streams. If the launcher writes to a terminal, the attempts get a
terminal too, so that progress bars look the same.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import stat
import struct
import subprocess
import termios
import time
from io import FileIO
from pathlib import Path
from typing import TextIO

from robust_train.host import screen
from robust_train.host.linux import wait_until_readable
from robust_train.host.loggers import standard_error, standard_output
from robust_train.host.streams import descriptor_of, flush_output

_TAIL_BYTES = 16_384
# At most this many blocks are read in a row, so that signals and events are handled in between.
_MOST_READS = 16
_PIPE_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 1 << 20
_BAR_SECONDS = 1.0
"""Pause after which the log gets the state of a line again that is still being rewritten."""


class OutputStream:
    """The standard output or error of the child processes, passed on to the launcher's stream.

    It is a terminal if the launcher's stream is a terminal, otherwise a pipe. If the launcher's two
    streams are the same file, the child's two streams share one object, which keeps the order of
    the output.

    Attributes:
        child_fd: the child's descriptor.
        read_fd: the descriptor from which its output can be read.
        is_terminal: whether the child gets a terminal.
    """

    def __init__(self, ours: TextIO) -> None:
        self._ours = ours
        self._target = descriptor_of(ours)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.is_terminal = self._target >= 0 and os.isatty(self._target)
        if self.is_terminal:
            self.read_fd, self.child_fd = pty.openpty()
            _copy_settings(self._target, self.child_fd)
        else:
            self.read_fd, self.child_fd = os.pipe()
            # A large pipe has room for output while the launcher is suspended.
            with contextlib.suppress(OSError):
                fcntl.fcntl(self.read_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(self.read_fd, False)

    def is_also(self, other: TextIO) -> bool:
        """Return whether another stream of the launcher writes into the same file."""
        target = descriptor_of(other)
        return self._target >= 0 and target >= 0 and os.path.sameopenfile(self._target, target)

    def fit(self) -> None:
        """Give the child's terminal the current size of the launcher's terminal, and no input."""
        if self.is_terminal:
            with contextlib.suppress(OSError, termios.error):
                _copy_size(self._target, self.child_fd)
                _end_input(self.read_fd, self.child_fd)

    def read(self) -> bytes:
        """Return the output that has arrived, empty if none has."""
        try:
            return os.read(self.read_fd, 1 << 16)
        except OSError:  # Nothing has arrived, or the child's side of the terminal is closed (EIO).
            return b""

    def show(self, data: bytes) -> None:
        """Write output to the launcher's stream, without waiting for the stream's reader."""
        if self._target >= 0:
            screen.show(self._target, data, source=self)
            return
        with contextlib.suppress(Exception):
            self._ours.write(self._decode(data))

    def settle(self) -> None:
        """End an unfinished line, so that it scrolls up like a finished line."""
        if self._target >= 0:
            screen.end_line(self._target, source=self)

    def close(self) -> None:
        """Close both ends."""
        for descriptor in (self.read_fd, self.child_fd):
            with contextlib.suppress(OSError):
                os.close(descriptor)


class OutputPump:
    """Moves the output of attempts to the launcher's streams and into the attempt's log file."""

    def __init__(self) -> None:
        self.stdout = OutputStream(standard_output())
        self.streams = [self.stdout]
        self.stderr = self.stdout
        if not self.stdout.is_also(standard_error()):
            self.stderr = OutputStream(standard_error())
            self.streams.append(self.stderr)
        self._log: AttemptLog | None = None
        self._tail = b""
        # Whether output is held back, because a clearer message may replace it.
        self._holds = False
        self._held: list[tuple[OutputStream, bytes]] = []

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that become readable when output arrives."""
        return [stream.read_fd for stream in self.streams]

    @property
    def input_fd(self) -> int:
        """The standard input of attempts: the launcher's if it is a file or a pipe. If it is a
        terminal, attempts get a terminal without input, which ``stty size`` needs."""
        with contextlib.suppress(OSError):  # Standard input may be closed.
            mode = os.fstat(0).st_mode
            if stat.S_ISREG(mode) or stat.S_ISFIFO(mode):
                return 0
        if os.isatty(0) and self.stdout.is_terminal:
            return self.stdout.child_fd
        return subprocess.DEVNULL

    def hold(self) -> None:
        """Hold back output until :meth:`release`."""
        self._holds = True

    def release(self) -> None:
        """Show the output that was held back, and all later output at once."""
        held = self._held
        self._held = []
        self._holds = False
        for stream, data in held:
            stream.show(data)

    @property
    def tail(self) -> str:
        """The end of the current attempt's output."""
        return self._tail.decode(errors="replace")

    def start_log(self, path: Path) -> None:
        """Write the output from now on to ``path``. If the disk is full, there is no log."""
        self.end_log()
        self._tail = b""
        with contextlib.suppress(OSError):
            self._log = AttemptLog(path.open("ab", buffering=0))

    def end_log(self) -> None:
        """Close the current log file."""
        if self._log is not None:
            self._log.close()
        self._log = None
        for stream in self.streams:
            stream.settle()

    def move(self) -> bool:
        """Pass on the output that has arrived, and return whether there was any."""
        has_moved = False
        for number, stream in enumerate(self.streams):
            stream.fit()
            for _ in range(_MOST_READS):
                data = stream.read()
                if not data:
                    break
                has_moved = True
                flush_output()
                if self._holds:
                    self._held.append((stream, data))
                else:
                    stream.show(data)
                self._tail = (self._tail + data)[-_TAIL_BYTES:]
                if self._log is not None:
                    self._log.write(data, number)
        return has_moved

    def drain(self) -> None:
        """Pass on the remaining output after the child has ended. A terminal delivers output with a
        short delay."""
        while wait_until_readable(self.descriptors, 0.02) and self.move():
            pass

    def close(self) -> None:
        """Pass on the remaining output and close all streams."""
        self.drain()
        self.end_log()
        screen.show_waiting()
        for stream in self.streams:
            stream.close()


class AttemptLog:
    """The log file of an attempt, with the text that a terminal shows in the end.

    A progress bar rewrites its line with carriage returns, perhaps for weeks. So only the last
    state of a line is kept, in memory and in the file. For example, ``10%\\r50%\\r100%\\n``
    becomes ``100%\\n``.
    """

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._unfinished: dict[int, bytes] = {}
        self._settled_bytes = file.tell()
        self._next_state = 0.0

    def write(self, data: bytes, stream: int = 0) -> None:
        """Write output of a stream. Unfinished lines are kept for each stream, so that a line has
        the output of one stream only."""
        data = self._unfinished.pop(stream, b"") + data
        lines, end, rest = data.rpartition(b"\n")
        done = b"\n".join(_last_state(line) for line in (lines + end).split(b"\n"))
        rest = rest[max(rest.rstrip(b"\r").rfind(b"\r"), 0) :]
        if len(rest) > _LONGEST_LINE_BYTES:
            # A line of this length is not a progress bar, and will not be rewritten.
            done = done + rest
            rest = b""
        if rest:
            self._unfinished[stream] = rest
        now = time.monotonic()
        if not done and now < self._next_state:
            return
        self._next_state = now + _BAR_SECONDS
        self._put(done)

    def close(self) -> None:
        """Write the last line's last state and close the file."""
        self._put(b"")
        self._file.close()

    def _put(self, done: bytes) -> None:
        """Write finished lines, and after them the current state of unfinished lines, which the
        next call overwrites."""
        with contextlib.suppress(OSError):
            self._file.truncate(self._settled_bytes)
            self._settled_bytes += self._file.write(done)
            states = [_last_state(line) for line in self._unfinished.values()]
            self._file.write(b"\n".join(states))


def _last_state(line: bytes) -> bytes:
    """Return the text of a line after its last carriage return."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _copy_settings(source: int, target: int) -> None:
    """Prepare the child's terminal ``target`` for output to the launcher's terminal ``source``."""
    _copy_size(source, target)
    attributes = termios.tcgetattr(target)
    # The launcher's terminal translates line ends, which must not happen twice.
    attributes[1] &= ~termios.OPOST
    attributes[3] |= termios.ICANON
    termios.tcsetattr(target, termios.TCSANOW, attributes)


def _end_input(master: int, child: int) -> None:
    """Send an end of file to readers of the child's terminal."""
    attributes = termios.tcgetattr(child)
    if attributes[3] & termios.ICANON and not wait_until_readable([child], 0):
        os.write(master, attributes[6][termios.VEOF])


def _copy_size(source: int, target: int) -> None:
    columns, lines = os.get_terminal_size(source)
    # Progress bars would be empty on a terminal without a size.
    size = struct.pack("HHHH", lines or 24, columns or 80, 0, 0)
    fcntl.ioctl(target, termios.TIOCSWINSZ, size)
