"""The delivery of one notification: a process with a time limit.

:mod:`.notifier` starts deliveries in the launcher or a sweep, and collects them. So a delivery
cannot fail, delay or hang a job.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO

from robust_train.config.values import URLS_VARIABLE
from robust_train.model.events import Json
from robust_train.readable import shorten

_LIMIT_SECONDS = 30
_AFTER_KILL_SECONDS = 1.0
_MOST_ERROR_BYTES = 4096


@dataclass
class Delivery:
    """A process that delivers a notification."""

    name: str  # the beginning of the line that reports a failure
    process: subprocess.Popen[bytes]
    errors: IO[bytes]  # its standard error
    until: float  # the deadline by the monotonic clock
    is_cut_short: bool = False  # whether a signal ends it early

    @property
    def is_over(self) -> bool:
        """Whether the process has ended or has reached its deadline."""
        return self.process.poll() is not None or time.monotonic() >= self.until

    def cut_short(self) -> None:
        """Set the deadline to now. A signal handler may call this."""
        self.is_cut_short = True
        self.until = 0.0

    def end(self) -> str:
        """Kill the process if it still runs. Returns the reason why the delivery failed, empty if
        it succeeded."""
        process = self.process
        with self.errors as errors:
            if process.poll() is None:
                # A program of another user, such as sudo's, cannot be killed.
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait(_AFTER_KILL_SECONDS)
                return "ended by a signal" if self.is_cut_short else "it took too long"
            if process.returncode == 0:
                return ""
            errors.seek(max(errors.seek(0, os.SEEK_END) - _MOST_ERROR_BYTES, 0))
            lines = errors.read().decode(errors="replace").strip().splitlines()
        return shorten(lines[-1], 300) if lines else f"exit code {process.returncode}"


def start_delivery(
    name: str, command: Sequence[str], content: Json, variables: Mapping[str, str]
) -> Delivery:
    """Start a program that delivers a notification.

    Args:
        name: the beginning of the line that reports a failure.
        command: the program.
        content: the notification, as JSON on standard input.
        variables: environment variables that are added.

    Raises:
        OSError, ValueError: the program cannot be started.
    """
    environ = {**os.environ, **variables}
    environ.pop(URLS_VARIABLE, None)
    # `Delivery.end` closes this file.
    errors = tempfile.TemporaryFile()  # noqa: SIM115
    with tempfile.TemporaryFile() as stdin:
        stdin.write(json.dumps(content, default=str).encode())
        stdin.seek(0)
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environ,
            start_new_session=True,
            # If this process is killed, the alarm still ends the program: exec keeps it.
            preexec_fn=partial(signal.alarm, 2 * _LIMIT_SECONDS),
        )
    return Delivery(name, process, errors, time.monotonic() + _LIMIT_SECONDS)
