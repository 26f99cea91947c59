"""Calls the NVIDIA driver and runs commands with a time limit, in any process.

A wedged driver blocks its callers in the kernel, where no signal reaches them. So a thread makes
the call, and is abandoned if it does not return in time. No other call is made until it returns.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from typing import Any, TypeVar

log = logging.getLogger("robust_train")

_LAST_SECONDS = 0.5  # the extra time for a call or a killed command to end

_T = TypeVar("_T")


class NoAnswerError(Exception):
    """The driver or a command did not answer in time. The message names both."""


class _Call:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        # A forked child does not have the thread.
        self.pid = os.getpid()
        self.since = time.monotonic()
        self.answer: Future[Any] = Future()
        self._call = call
        # The thread blocks Ctrl-Z. Otherwise the kernel would deliver it to this thread while the
        # main thread blocks it.
        stops = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, stops)
        try:
            # threading.Thread.start() would wait until the thread runs.
            _thread.start_new_thread(self._run, ())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _run(self) -> None:
        try:
            self.answer.set_result(self._call())
        except BaseException as error:
            self.answer.set_exception(error)

    def no_answer(self) -> NoAnswerError:
        seconds = time.monotonic() - self.since
        return NoAnswerError(
            f"the NVIDIA driver has not answered for {seconds:.0f} s and may be wedged (see NVRM "
            "and Xid lines in dmesg; a reset of the GPU or a reboot of the host helps)"
        )


# The call that did not return in time, None if there is none.
_hanging: _Call | None = None


def ask(call: Callable[[], _T], limit_seconds: float) -> _T:
    """Make a call to the driver in a thread. Return its result, or raise its exception.

    Raises:
        NoAnswerError: the call takes longer than ``limit_seconds``, or an earlier call still hangs.
    """
    global _hanging
    if _hanging is not None and _hanging.pid == os.getpid():
        if not _hanging.answer.done():
            raise _hanging.no_answer()
        log.info("the NVIDIA driver answers again")
    _hanging = None
    pending = _Call(call)
    # If this process was stopped (Ctrl-Z), the limit passed while the thread was stopped too. So
    # the thread gets some more time.
    for seconds in (limit_seconds, _LAST_SECONDS):
        with contextlib.suppress(NotInTime):
            pending.answer.exception(seconds)
    if not pending.answer.done():
        _hanging = pending
        error = pending.no_answer()
        log.warning("%s", error)
        raise error
    answer: _T = pending.answer.result()
    return answer


def run_command(
    command: Sequence[str],
    limit_seconds: float,  # the time after which the command is killed
    environ: Mapping[str, str] = os.environ,  # the command's whole environment
) -> subprocess.CompletedProcess[bytes]:
    """Run a command that may hang in the driver, and return its exit code and output.

    The command has an empty standard input and its own session. Unlike ``subprocess.run``, this
    function does not wait for a child that SIGKILL does not end.

    Raises:
        NoAnswerError: the command took too long.
        OSError: the command cannot be started.
    """
    child = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        try:
            child.communicate(timeout=_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("pid %d does not end after SIGKILL: it hangs in the kernel", child.pid)
        raise NoAnswerError(f"{command[0]} has not ended after {limit_seconds:g} s") from None
    except BaseException:
        child.kill()
        raise
    return subprocess.CompletedProcess(command, child.returncode, out, err)


def printed_by(
    command: Sequence[str], limit_seconds: float, variables: Mapping[str, str] | None = None
) -> bytes | None:
    """Run a command and return its output. None if the program is missing, fails, or takes too
    long. ``variables`` are added to this process's environment."""
    try:
        done = run_command(command, limit_seconds, {**os.environ, **(variables or {})})
    except (OSError, NoAnswerError):
        return None
    return done.stdout if done.returncode == 0 else None
