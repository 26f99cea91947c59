"""Running a command as a person at a terminal does."""

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import termios


def run_at_a_terminal(
    command, environ, *, ask="", answer="", columns=200, lines=24, cwd=None
) -> tuple[int, str]:
    """Exit code of a command in a terminal of its own, and all that it showed. Once ``ask`` is
    shown, ``answer`` is typed, with its line end, or a control character."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    process = subprocess.Popen(
        command,
        env={**environ, "TERM": "xterm", "COLUMNS": str(columns)},
        cwd=cwd,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        # so that what is typed can be a Ctrl-C: a terminal interrupts those it controls
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the last writer is gone
        while data := _read(ours, again=answer if ask.encode() in shown else ""):
            shown_before, shown = shown, shown + data
            if ask and ask.encode() in shown and ask.encode() not in shown_before:
                os.write(ours, answer.encode())
    os.close(ours)
    return process.wait(timeout=60), shown.decode(errors="replace")


def _read(terminal: int, *, again: str) -> bytes:
    """What is shown next. A control character is typed again while nothing is: Python's ``input``
    misses a Ctrl-C that comes after the question and before it has begun to read.
    """
    while again and not again.isprintable() and len(again) == 1:
        if select.select([terminal], [], [], 1.0)[0]:
            break
        os.write(terminal, again.encode())
    return os.read(terminal, 65536)
