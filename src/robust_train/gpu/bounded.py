"""Calls to the driver, and commands, that are given up after some seconds.

A wedged driver blocks its callers in the kernel, where no signal reaches them. So a thread makes
the call, and is left behind if it does not return. Until it does no other call is made: every
further thread would be lost as well. A command is left behind in the same way.
"""

from __future__ import annotations

import _thread
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

log = logging.getLogger("robust_train")

_T = TypeVar("_T")

# The kernel gives a signal to the main thread unless that blocks it, as it does with these while it
# holds the queue lock: then nobody else may take them.
_STOPS = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}


class NoAnswer(Exception):
    """The driver has not answered in time; says for how long."""


class _Call(Generic[_T]):
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], _T]) -> None:
        self.pid = os.getpid()  # a forked child has neither the thread nor what it holds
        self.since = time.monotonic()
        self._call = call
        self._began: float | None = None
        self._answer: _T | None = None
        self._error: BaseException | None = None
        self._done = _thread.allocate_lock()
        self._done.acquire()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        try:
            _thread.start_new_thread(self._run, ())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _run(self) -> None:
        self._began = time.monotonic()
        try:
            self._answer = self._call()
        except BaseException as error:
            self._error = error
        self._done.release()

    def is_answered(self, within_seconds: float) -> bool:
        left = within_seconds
        # on a busy machine it may be long until the thread runs at all; and a process that was
        # stopped (Ctrl-Z) finds its time used up, so once more without waiting
        while not self._done.acquire(timeout=max(left, 0.0)):
            if left <= 0 and self._began is not None:
                return False
            began = time.monotonic() if self._began is None else self._began
            left = began + within_seconds - time.monotonic()
        self._done.release()
        return True

    def answer(self) -> _T:
        if self._error is not None:
            raise self._error
        return cast("_T", self._answer)

    def silence(self) -> NoAnswer:
        return NoAnswer(
            f"the NVIDIA driver has not answered for {time.monotonic() - self.since:.0f} s and may "
            "be wedged (NVRM and Xid lines in dmesg tell more; a reset of the GPU or a reboot of "
            "the host helps)"
        )


_out: _Call[Any] | None = None


def ask(call: Callable[[], _T], limit_seconds: float) -> _T:
    """Return what ``call`` returns, or raise what it raises, unless that takes too long.

    Args:
        call: talks to the driver.
        limit_seconds: how long to wait at most; not at all while an earlier call hangs.

    Raises:
        NoAnswer: it has not returned; the thread that it runs in is left behind.
    """
    global _out
    if _out is not None and _out.pid == os.getpid():
        if not _out.is_answered(0.0):
            raise _out.silence()
        log.info("the NVIDIA driver answers again")
    _out = None
    pending = _Call(call)
    if not pending.is_answered(limit_seconds):
        _out = pending
        silence = pending.silence()
        log.warning("%s", silence)
        raise silence
    return pending.answer()


def run_command(
    command: Sequence[str],
    limit_seconds: float,
    environ: Mapping[str, str] | None = None,
    *,
    last_seconds: float = 1.0,
) -> subprocess.CompletedProcess[str]:
    """Run a command that may hang in the driver; return its exit code and output.

    ``subprocess.run`` would wait without end for a killed child in uninterruptible sleep; here the
    child is left behind.

    Args:
        command: its standard input is empty.
        limit_seconds: after that it is killed.
        environ: its whole environment; None: this process's.
        last_seconds: how long a killed child may take to end.

    Raises:
        NoAnswer: it took too long.
        OSError: it cannot be started.
    """
    child = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = child.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        try:
            child.communicate(timeout=last_seconds)
        except subprocess.TimeoutExpired:
            log.warning("pid %d does not end after SIGKILL: it hangs in the driver", child.pid)
        raise NoAnswer(f"{command[0]} has not ended after {limit_seconds:g} s") from None
    except BaseException:
        child.kill()
        raise
    return subprocess.CompletedProcess(command, child.returncode, out, err)
