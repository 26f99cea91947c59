"""Handles Ctrl-C, SIGTERM, SIGHUP and a scheduler's warning signal in launchers and sweeps.

:class:`.job.Job` and :class:`.gpu_queue.GpuQueue` each have a `SignalWatch`, in the main thread of
their processes. Attempts handle their signals in ``attempt/signals.py``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any

from robust_train.host.linux import sleep_with_ticks
from robust_train.model.errors import EXIT_FAILED, WARNING_SIGNALS, ConfigError, JobInterrupted

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that stop an attempt. A stop of a whole job sends one of them to every process."""

_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *WARNING_SIGNALS)

FORWARDED = {signal.SIGRTMIN + number: signum for number, signum in enumerate(_WATCHED, start=1)}
"""The signal that each forwarded signal stands for. A sweep forwards the signals that it receives
to its jobs, and a node to the other nodes, as real-time signals. So a process that receives both
the original and the forwarded signal can count the two as one."""
_FORWARDED_AS: dict[int, int] = {original: sent for sent, original in FORWARDED.items()}

UNDER_SUBMITIT = "SUBMITIT_EXECUTOR"
"""Set in the environment of submitit's jobs, which receive SIGTERM with every preemption."""

DUMP_STACKS = signal.SIGRTMAX - 1
"""Makes an attempt write the stacks of its threads. SIGUSR1 and SIGUSR2 are not free, because
trainers and schedulers use them."""

# The time that an attempt has for a last checkpoint after its launcher has ended.
ORPHAN_GRACE_SECONDS = 5.0


def signal_to_forward(signum: int) -> int:
    """Return the signal to send for a received signal: the same signal if it has no forwarded
    form."""
    return _FORWARDED_AS.get(signum, signum)


def choose_stop_signal(environ: Mapping[str, str]) -> signal.Signals:
    """Return the signal with which a launcher asks an attempt to stop.

    It is SIGTERM, except under submitit, where SIGTERM means a preemption. There it is SIGINT,
    unless this process ignores SIGINT, like anything that a shell script starts with ``&``.
    """
    if UNDER_SUBMITIT not in environ:
        return signal.SIGTERM
    is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    return signal.SIGUSR2 if is_ignored else signal.SIGINT


def keep_exit_status_of_children() -> bool:
    """Make the kernel keep the exit status of children, and return whether SIGCHLD was ignored. A
    process may inherit the ignored signal, and then every child seems to have succeeded."""
    is_ignored = signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    if is_ignored:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return is_ignored


# The exception hook that ours replaces, and the error that the job has already shown.
_show_uncaught = sys.excepthook
_shown: BaseException | None = None


def is_at_prompt() -> bool:
    """Return whether this interpreter has an interactive prompt."""
    return bool(sys.flags.interactive) or hasattr(sys, "ps1")


def end_without_traceback_if_uncaught(shown: BaseException | None = None) -> None:
    """Make the interpreter end without a traceback, with the error's exit code, if no one catches
    a `ConfigError`, a stop, or the error ``shown``.

    No traceback is needed, because the job's last lines explain a stop and ``shown``, and a
    `ConfigError` prints its message. An interactive prompt still shows the error and stays.
    """
    global _show_uncaught, _shown
    if is_at_prompt():
        return
    _shown = shown
    if sys.excepthook is not _end_if_ours:
        _show_uncaught = sys.excepthook
        sys.excepthook = _end_if_ours


def _end_if_ours(
    kind: type[BaseException], error: BaseException, frames: TracebackType | None
) -> None:
    if isinstance(error, ConfigError):
        print(error, file=sys.stderr)
    if isinstance(error, ConfigError | KeyboardInterrupt):
        raise SystemExit(getattr(error, "exit_code", 130))
    if error is _shown:
        raise SystemExit(getattr(error, "exit_code", EXIT_FAILED))
    _show_uncaught(kind, error, frames)


class SignalWatch:
    """While active, records a signal, or passes it to a handler. A context manager.

    No exception is raised when a signal arrives, because it would leave an arbitrary line half
    done. Instead, waiting code calls `check`. The watch does nothing outside the main thread, where
    Python does not allow handlers.

    Attributes:
        is_pausing: whether only the attempt is being stopped, and the job continues.
    """

    def __init__(self) -> None:
        # The first signal that ends the job, or 0. Only the signal handler sets it.
        self._ended_by = 0
        self.is_pausing = False
        self._is_paused = False  # whether the signal that starts the pause has arrived
        self._handler: Callable[[int], None] | None = None
        # The handlers that were replaced, and the signals that were unblocked.
        self._previous: dict[int, Any] = {}
        self._blocked: set[int] = set()
        self._delivered = 0  # the signal that `deliver` stands for
        # Signals received directly, and forwarded signals received.
        self._counts = [0, 0]
        self._ignores_children = False

    @property
    def received(self) -> int:
        """The first signal that arrived, including that of a pause, or 0."""
        if not self._ended_by and self._is_paused:
            return signal.SIGTERM
        return self._ended_by

    def __enter__(self) -> SignalWatch:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._ignores_children = keep_exit_status_of_children()
        for forwarded, signum in FORWARDED.items():
            previous = signal.getsignal(signum)
            # nohup ignores SIGHUP. None stands for a handler in C, which cannot be restored.
            if previous in (signal.SIG_IGN, None):
                continue
            if signum == signal.SIGTERM and UNDER_SUBMITIT in os.environ:
                # SIGTERM comes with every preemption, and submitit requeues at another signal.
                continue
            for number in (signum, forwarded):
                self._previous[number] = signal.signal(number, self._on_signal)
        # The parent may have blocked the signal, and then nothing could stop this process.
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._previous)
        self._blocked = mask & self._previous.keys()
        return self

    def __exit__(self, *error: object) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, self._blocked)
        for signum, previous in self._previous.items():
            signal.signal(signum, previous)
        if self._ignores_children:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    def sleep(self, seconds: float, tick: Callable[[], None] = lambda: None) -> None:
        """Sleep, calling ``tick`` at least twice a second.

        Raises:
            JobInterrupted: a signal arrived.
        """

        def tick_unless_received() -> None:
            self.check()
            tick()

        sleep_with_ticks(seconds, tick_unless_received)

    def deliver(self, signum: int) -> None:
        """Act as if the signal had arrived. Any thread may call it."""
        if self._previous:
            self._delivered = signum
            # Under submitit, ``signum`` may not be watched. Any watched signal runs the handler.
            signal.pthread_kill(threading.main_thread().ident or 0, next(iter(self._previous)))

    def pause(self) -> None:
        """Stop the attempt as SIGTERM does. The job continues, unless a signal ends it first."""
        if self._previous and not self.received:
            self.is_pausing = True
            self.deliver(signal.SIGTERM)

    def end_pause(self) -> bool:
        """End a pause, and return whether only the pause stopped the attempt."""
        was_pausing = self.is_pausing
        self.is_pausing = False
        self._is_paused = False
        return was_pausing

    @contextlib.contextmanager
    def hand_signals_to(self, handler: Callable[[int], None]) -> Iterator[None]:
        """Call ``handler(signum)`` for signals within this block."""
        before = self._handler
        self._handler = handler
        try:
            yield
        finally:
            self._handler = before

    @property
    def can_stop(self) -> bool:
        """Whether signals can stop the job. Outside the main thread they cannot."""
        return bool(self._previous)

    def watches(self, signum: int) -> bool:
        """Return whether this signal stops the job."""
        return signum in self._previous

    def call_previous_handler(self) -> None:
        """Call the received signal's previous handler, after the last checkpoint is written.
        Submitit's handler puts the job back into the queue and ends the process."""
        previous = self._previous.get(self.received)
        if self.received in WARNING_SIGNALS and callable(previous):
            previous(self.received, None)

    def check(self) -> None:
        """Raise `JobInterrupted` if a signal has arrived and no handler is set for signals."""
        if self._handler is None:
            self.raise_if_received()

    def raise_if_received(self) -> None:
        """Raise `JobInterrupted` if a signal has arrived."""
        if self.received:
            raise JobInterrupted(self.received)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        delivered = self._delivered
        self._delivered = 0
        signum = delivered or signum
        is_forwarded = signum in FORWARDED
        signum = FORWARDED.get(signum, signum)
        if not self.is_pausing:
            # A signal may arrive twice: forwarded, and sent to all processes of the job.
            others = not is_forwarded
            self._counts[is_forwarded] += 1
            if self._counts[is_forwarded] <= self._counts[others]:
                return
        elif not self._is_paused:
            self._is_paused = True
        else:
            # The attempt is stopping already, so a second signal ends the whole job.
            self._counts[is_forwarded] += 1
            self._ended_by = signum
            self.is_pausing = False
            return
        if not self.is_pausing:
            self._ended_by = self._ended_by or signum
        if self._handler is not None:
            self._handler(signum)
