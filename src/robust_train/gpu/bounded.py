"""Calls to the driver, and commands, that are abandoned after a few seconds.

A wedged driver blocks its callers in the kernel, where no signal reaches them. So a thread makes
the call, and is abandoned if it does not return. No other call is made until it does.
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


_LAST_SECONDS = 0.5

_T = TypeVar("_T")


class NoAnswerError(Exception):
    """The driver or a command did not answer in time. The message names it and the seconds."""


class _Call:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        # a forked child has neither the thread nor what it holds
        self.pid = os.getpid()
        self.since = time.monotonic()
        self.answer: Future[Any] = Future()
        self._call = call
        # the thread takes no Ctrl-Z: the kernel hands a signal to any thread that does, also while
        # the main one blocks it
        stops = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, stops)
        try:
            # Thread.start() waits until it runs
            _thread.start_new_thread(self._run, ())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _run(self) -> None:
        try:
            self.answer.set_result(self._call())
        except BaseException as error:
            self.answer.set_exception(error)

    def silence(self) -> NoAnswerError:
        return NoAnswerError(
            f"the NVIDIA driver has not answered for {time.monotonic() - self.since:.0f} s and may "
            "be wedged (NVRM and Xid lines in dmesg have more; a reset of the GPU or a reboot of "
            "the host helps)"
        )


_hanging: _Call | None = None


def ask(call: Callable[[], _T], limit_seconds: float) -> _T:
    """Return the result of ``call``, or raise its exception, unless it takes longer than
    ``limit_seconds``, or an earlier call hangs.

    Raises:
        NoAnswerError: it has not returned, and its thread is abandoned.
    """
    global _hanging
    if _hanging is not None and _hanging.pid == os.getpid():
        if not _hanging.answer.done():
            raise _hanging.silence()
        log.info("the NVIDIA driver answers again")
    _hanging = None
    pending = _Call(call)
    # a process that was stopped (Ctrl-Z) finds its time used up before the thread could continue
    for seconds in (limit_seconds, _LAST_SECONDS):
        with contextlib.suppress(NotInTime):
            pending.answer.exception(seconds)
    if not pending.answer.done():
        _hanging = pending
        silence = pending.silence()
        log.warning("%s", silence)
        raise silence
    answer: _T = pending.answer.result()
    return answer


def run_command(
    command: Sequence[str],  # its standard input is empty, its session its own
    limit_seconds: float,  # after that it is killed
    environ: Mapping[str, str] = os.environ,  # its whole environment
) -> subprocess.CompletedProcess[bytes]:
    """Run a command that may hang in the driver, and return its exit code and output.

    Unlike ``subprocess.run`` it leaves a child behind that SIGKILL does not end.

    Raises:
        NoAnswerError: it took too long.
        OSError: it cannot be started.
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
    """Call `run_command` for a program that may be missing, and return its output. None if it fails
    or takes longer. ``variables`` are added to this process's environment."""
    try:
        done = run_command(command, limit_seconds, {**os.environ, **(variables or {})})
    except (OSError, NoAnswerError):
        return None
    return done.stdout if done.returncode == 0 else None
