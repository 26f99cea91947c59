"""Ending processes: politely, then by force, and never one that has only inherited the number."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from robust_train.queue.cuda_processes import CudaProcess
from robust_train.queue.reservations import start_ticks

_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Ending:
    """How it went with a process.

    Attributes:
        process: which.
        how: ``ended`` (after SIGTERM), ``killed`` (SIGKILL), ``gone`` (before anything was sent),
            ``not permitted``, or ``still there``.
    """

    process: CudaProcess
    how: str

    @property
    def is_gone(self) -> bool:
        """Whether the process is no more."""
        return self.how in ("ended", "killed", "gone")


class Handle:
    """A process that stays the one that was meant, however long somebody thinks before he acts.

    With a pidfd (Linux 5.3) the kernel sees to that. Elsewhere the time at which the process
    started is compared right before each signal.
    """

    def __init__(self, process: CudaProcess) -> None:
        self.process = process
        self._fd: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            self._fd = os.pidfd_open(process.pid)
        # the number may have changed hands between the look at it and this
        self._was_gone = not self._is_the_same()

    def send(self, signum: int) -> None:
        """Send a signal; nothing where the process has ended.

        Raises:
            PermissionError: it is not ours to signal.
        """
        if self.has_ended():
            return
        with contextlib.suppress(ProcessLookupError):
            if self._fd is not None:
                signal.pidfd_send_signal(self._fd, signum)
            else:
                os.kill(self.process.pid, signum)

    def has_ended(self) -> bool:
        """Whether it is gone; a zombie counts as gone: it holds nothing any more."""
        if self._was_gone:
            return True
        if self._fd is not None:
            return bool(select.select([self._fd], [], [], 0)[0])
        return not self._is_the_same() or _is_zombie(self.process.pid)

    def close(self) -> None:
        """Let go of the descriptor."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _is_the_same(self) -> bool:
        return start_ticks(self.process.pid) == self.process.start_ticks


def end_all(
    handles: Sequence[Handle], *, grace_seconds: float, last_seconds: float
) -> list[Ending]:
    """SIGTERM to all, and SIGKILL to those that are still there when the grace is over.

    Args:
        handles: whom.
        grace_seconds: time to end by themselves.
        last_seconds: how long to wait after SIGKILL; a process in the driver may need a while.
    """
    how: dict[Handle, str] = {}
    for handle in handles:
        how[handle] = "gone" if handle.has_ended() else "ended"
        try:
            handle.send(signal.SIGTERM)
        except PermissionError:
            how[handle] = "not permitted"
    asked = [handle for handle in handles if how[handle] == "ended"]
    _wait(asked, grace_seconds)
    stubborn = [handle for handle in asked if not handle.has_ended()]
    for handle in stubborn:
        how[handle] = _kill(handle)
    _wait(stubborn, last_seconds)
    for handle in stubborn:
        if how[handle] == "killed" and not handle.has_ended():
            how[handle] = "still there"
    return [Ending(handle.process, how[handle]) for handle in handles]


def _kill(handle: Handle) -> str:
    try:
        handle.send(signal.SIGKILL)
    except PermissionError:  # it has become another user's since SIGTERM
        return "not permitted"
    return "killed"


def _wait(handles: Iterable[Handle], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    left = list(handles)
    while left and time.monotonic() < deadline:
        left = [handle for handle in left if not handle.has_ended()]
        if left:
            time.sleep(_LOOK_SECONDS)


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return True
