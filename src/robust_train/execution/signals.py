"""Ctrl-C, SIGTERM, SIGHUP and a scheduler's warning, seen by the launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from robust_train.errors import WARNING_SIGNALS, JobInterrupted

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
UNDER_SUBMITIT = "SUBMITIT_EXECUTOR"
"""Set in the jobs that submitit runs."""


class SignalWatch:
    """While active, turns a signal into :class:`JobInterrupted`, or hands it to whoever asked.

    Nothing is done outside the main thread, where Python allows no handlers.

    Attributes:
        received: the first signal that came, None before.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._handler: Callable[[int], None] | None = None
        self._previous: dict[int, Any] = {}
        self._delivered: int | None = None

    def __enter__(self) -> SignalWatch:
        if threading.current_thread() is threading.main_thread():
            for signum in (*_STOPS, *WARNING_SIGNALS):
                previous = signal.getsignal(signum)
                if previous == signal.SIG_IGN:
                    continue  # nohup, or a background job of a script
                if previous is None:
                    continue  # a handler in C, such as faulthandler's, cannot be put back
                if signum == signal.SIGTERM and UNDER_SUBMITIT in os.environ:
                    continue  # comes with every preemption and is not its signal to requeue
                self._previous[signum] = previous
                signal.signal(signum, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        for signum, previous in self._previous.items():
            signal.signal(signum, previous)

    def deliver(self, signum: int) -> None:
        """Act as if the signal had come, from any thread; ignored if one has come already."""
        if self.received is None and self._previous:
            self._delivered = signum
            # any watched signal wakes the main thread; under submitit ``signum`` may not be one
            signal.pthread_kill(threading.main_thread().ident or 0, next(iter(self._previous)))

    @contextlib.contextmanager
    def handed_to(self, handler: Callable[[int], None]) -> Iterator[int]:
        """Within this block signals call ``handler(signum)`` instead of raising.

        Yields:
            A descriptor that becomes readable when a signal came, for a select loop.
        """
        read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        in_main_thread = bool(self._previous)
        old = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False) if in_main_thread else -1
        self._handler = handler
        try:
            yield read_end
        finally:
            self._handler = None
            if in_main_thread:
                signal.set_wakeup_fd(old)
            os.close(read_end)
            os.close(write_end)

    def watches(self, signum: int) -> bool:
        """Return whether that signal stops the job."""
        return signum in self._previous

    def pass_on(self) -> None:
        """Call whoever had handled the signal before us, now that the checkpoint is written.

        Submitit's handler puts the job back into the queue and ends the process.
        """
        previous = self._previous.get(self.received) if self.received is not None else None
        if self.received in WARNING_SIGNALS and callable(previous):
            previous(self.received, None)

    def raise_if_received(self) -> None:
        """Raise :class:`JobInterrupted` if a signal has come."""
        if self.received is not None:
            raise JobInterrupted(self.received)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        signum, self._delivered = self._delivered or signum, None
        if self.received is None:
            self.received = signum
        if self._handler is not None:
            self._handler(signum)
        else:
            raise JobInterrupted(signum)
