"""Runs the same command again in the background, where a logout does not end it (``detach=true``).

The foreground command calls :func:`start`, and waits until the background command has started or
ended. As soon as the background command has a run folder, it calls :func:`report_start`, which
sends the foreground command a text to show, through a pipe.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from robust_train.gpu.bounded import printed_by
from robust_train.gpu.processes import user_name
from robust_train.host.signals import SignalWatch
from robust_train.host.streams import flush_output

if TYPE_CHECKING:
    from robust_train.config.schema import RobustConfig

OUTPUT_FILE = "detached.log"
_VARIABLE = "ROBUST_TRAIN_DETACHED"
# The command that starts a process outside the login session. The system's journal shows the
# description instead of the command, which may contain a secret.
_SCOPE = ["systemd-run", "--user", "--scope", "--quiet", "--collect", "--description=job", "--"]
# The command that asks logind whether a logout ends a user's processes.
_LOGIND = [
    "busctl",
    "get-property",
    "org.freedesktop.login1",
    "/org/freedesktop/login1",
    "org.freedesktop.login1.Manager",
    "KillUserProcesses",
]
_ANSWER_SECONDS = 10
_MOST_BYTES = 1 << 20


# The pipe to the foreground command, or None in the foreground.
_pipe: int | None = None
with contextlib.suppress(KeyError, ValueError, OSError):
    _inherited = int(os.environ.pop(_VARIABLE))
    os.set_inheritable(_inherited, False)
    _pipe = _inherited

is_detached = _pipe is not None
"""Whether this process is the background command."""


def must_detach(config: RobustConfig) -> bool:
    """Return whether this command should continue in the background, and is not there yet."""
    return bool(config.chosen("detach")) and not is_detached


def start() -> int:
    """Run this process's command in the background, and wait until it has started or ended.

    Signals that arrive in the meantime are passed on to the command, except when a terminal is
    closed.

    Returns:
        0 once the command has started, or its exit code if it ends earlier.
    """
    prefix, note = find_logout_protection()
    read_end, write_end = os.pipe()

    def pass_on(signum: int) -> None:
        if signum != signal.SIGHUP:
            process.send_signal(signum)

    with tempfile.TemporaryFile() as output, SignalWatch() as signals:
        process = subprocess.Popen(
            prefix + [sys.executable] + sys.orig_argv[1:],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, _VARIABLE: str(write_end)},
            pass_fds=(write_end,),
            start_new_session=True,
        )
        os.close(write_end)
        with signals.hand_signals_to(pass_on):
            # A signal may have arrived before this block.
            if signals.received:
                pass_on(signals.received)
            text = os.read(read_end, _MOST_BYTES).decode(errors="replace")
            if text and signals.received in (0, signal.SIGHUP):
                print(text + note, flush=True)
                return 0
            code = process.wait()
        output.seek(0)
        print(output.read().decode(errors="replace"), end="", file=sys.stderr, flush=True)
    return code if code >= 0 else 128 - code


def report_start(folder: Path, text: str) -> None:
    """Let the foreground command show ``text`` and end, and write all output to a file in
    ``folder`` from now on.

    Does nothing in the foreground, and when called again.
    """
    global _pipe
    pipe = _pipe
    _pipe = None
    if pipe is None:
        return
    flush_output()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        output = os.open(folder / OUTPUT_FILE, flags, 0o666)
    except OSError:
        # Without room for the output, the job still trains.
        output = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError):
        # Until now the output went to a temporary file.
        os.write(output, os.pread(1, _MOST_BYTES, 0))
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    with contextlib.suppress(OSError):  # The foreground command may have ended.
        os.write(pipe, text.encode(errors="replace"))
    os.close(pipe)


def job_text(job: str, name: str, folder: Path) -> str:
    """Return the text about a job that the foreground command shows."""
    lines = (
        f"{name} continues in the background as {job} (pid {os.getpid()}); run folder: {folder}",
        f"  robust-train attach {job}     show it; Ctrl-C leaves it running",
        f"  robust-train logs -f {job}    follow its output",
        f"  robust-train wait {job}       wait for its end and exit code",
        f"  robust-train stop {job}       save a last checkpoint and end",
    )
    return "\n".join(lines)


def sweep_text(folder: Path) -> str:
    """Return the text about a sweep that the foreground command shows."""
    lines = (
        f"the sweep continues in the background (pid {os.getpid()}); sweep folder: {folder}",
        "  robust-train ps               list its jobs with your others",
        f"  tail -f {folder}/{OUTPUT_FILE}",
        f"  robust-train wait {folder}",
        f"  robust-train stop {folder}",
    )
    return "\n".join(lines)


def find_logout_protection() -> tuple[list[str], str]:
    """Return a prefix for a command that a logout must not end, and a note for its user. Both are
    empty if this host does not end processes at logout."""
    if printed_by(_LOGIND, _ANSWER_SECONDS) != b"b true\n":
        return [], ""
    works = printed_by([*_SCOPE, "true"], _ANSWER_SECONDS) is not None
    lingers = Path("/var/lib/systemd/linger", user_name(os.geteuid())).exists()
    if works and lingers:
        return _SCOPE, ""
    prefix = _SCOPE
    remedy = "before you log out: loginctl enable-linger"
    if not works:
        prefix = []
        remedy = "systemd-run --user --scope, which would prevent that, does not work here"
    note = f"\nThis host ends a user's processes at logout (KillUserProcesses=yes): {remedy}"
    return prefix, note
