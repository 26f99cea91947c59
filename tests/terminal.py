"""Running a command as a person at a terminal does."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_at_a_terminal(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    ask: str = "",
    answer: str = "",
    cwd: Path | None = None,
) -> tuple[int, str]:
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
        while data := os.read(ours, 65536):
            shown += data
            if ask and ask.encode() in shown:
                os.write(ours, answer.encode())
                ask = ""
    os.close(ours)
    return process.wait(timeout=60), shown.decode()


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
