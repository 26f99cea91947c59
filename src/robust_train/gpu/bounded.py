"""A question to the driver that is given up after some seconds.

A wedged driver blocks its callers in the kernel, where no signal reaches them. So a thread asks,
and is left behind where no answer comes. While it is out there nobody asks again: every further
thread would be lost as well.
"""

from __future__ import annotations

import _thread
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

log = logging.getLogger("robust_train")

_T = TypeVar("_T")

# The kernel gives a signal to the main thread unless that blocks it, as it does with these while it
# holds the ledger lock: then nobody else may take them.
_STOPS = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}


class NoAnswer(Exception):
    """The driver has not answered in time; says for how long."""


class _Question(Generic[_T]):
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


_out: _Question[Any] | None = None


def ask(call: Callable[[], _T], limit_seconds: float) -> _T:
    """What ``call`` returns or raises, unless that takes too long.

    Args:
        call: talks to the driver.
        limit_seconds: how long to wait for it at most. Not at all where an earlier call has not
            come back yet.

    Raises:
        NoAnswer: it has not come back; the thread that it runs in is left behind.
    """
    global _out
    if _out is not None and _out.pid == os.getpid():
        if not _out.is_answered(0.0):
            raise _out.silence()
        log.info("the NVIDIA driver answers again")
    _out = None
    question = _Question(call)
    if not question.is_answered(limit_seconds):
        _out = question
        silence = question.silence()
        log.warning("%s", silence)
        raise silence
    return question.answer()
