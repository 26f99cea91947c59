"""Running a command as a person at a terminal does."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess


def run_at_a_terminal(command, environ, *, ask="", answer="", cwd=None) -> tuple[int, str]:
    """Exit code of a command in a terminal of its own, and all that it showed.

    Args:
        command: with its arguments.
        environ: its whole environment.
        ask: once this is shown, ``answer`` is typed.
        answer: with its line end, or a control character.
        cwd: where to run it.
    """
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command,
        env={**environ, "TERM": "xterm", "COLUMNS": "200"},
        cwd=cwd,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        # so that what is typed can be a Ctrl-C: a terminal interrupts those it controls
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the last writer is gone
        while data := _read(ours, again=answer if ask.encode() in shown else ""):
            shown_before, shown = shown, shown + data
            if ask and ask.encode() in shown and ask.encode() not in shown_before:
                os.write(ours, answer.encode())
    os.close(ours)
    return process.wait(timeout=60), shown.decode()


def _read(terminal: int, *, again: str) -> bytes:
    """What is shown next. A control character is typed again while nothing is: Python's ``input``
    misses a Ctrl-C that comes after the question and before it has begun to read.
    """
    while again and not again.isprintable() and len(again) == 1:
        if select.select([terminal], [], [], 1.0)[0]:
            break
        os.write(terminal, again.encode())
    return os.read(terminal, 65536)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
