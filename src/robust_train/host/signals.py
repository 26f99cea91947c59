"""Ctrl-C, SIGTERM, SIGHUP and a scheduler's warning, as a launcher and a sweep receive them.

:class:`.job.Job` and :class:`.gpu_queue.GpuQueue` each have a `SignalWatch`, in the main thread of
their processes. An attempt handles its signals by ``attempt.signals``.
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

FORWARDED = {
    signal.SIGRTMIN + number: signum
    for number, signum in enumerate(
        (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *WARNING_SIGNALS), start=1
    )
}
"""What a sweep sends its jobs, or a node another node, for the signal that it received. A process
that receives the original as well counts both once."""
_FORWARDED_AS: dict[int, int] = {original: sent for sent, original in FORWARDED.items()}

UNDER_SUBMITIT = "SUBMITIT_EXECUTOR"
"""Set in the environment of submitit's jobs, where SIGTERM comes with every preemption."""

DUMP_STACKS = signal.SIGRTMAX - 1
"""Makes an attempt write the stacks of its threads. Trainers and schedulers use SIGUSR1 and 2."""

# An attempt has this long for a last checkpoint after its launcher has ended.
ORPHAN_GRACE_SECONDS = 5.0


def forwarded(signum: int) -> int:
    """Return the signal that is sent on. It is the same signal if it is not forwarded."""
    return _FORWARDED_AS.get(signum, signum)


def stop_signal(environ: Mapping[str, str]) -> signal.Signals:
    """Return the signal with which a launcher asks an attempt to stop. An attempt may ignore
    SIGINT, like anything that a shell script starts with ``&``."""
    if UNDER_SUBMITIT not in environ:
        return signal.SIGTERM
    is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    return signal.SIGUSR2 if is_ignored else signal.SIGINT


def keep_ends_of_children() -> bool:
    """Make the kernel keep the exit status of children, and return whether SIGCHLD was ignored. A
    process may inherit that from its parent, and then each child seems to have succeeded."""
    is_ignored = signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    if is_ignored:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return is_ignored


_show_uncaught = sys.excepthook
_shown: BaseException | None = None


def is_at_prompt() -> bool:
    """Return whether a person types what this interpreter runs."""
    return bool(sys.flags.interactive) or hasattr(sys, "ps1")


def end_without_traceback_if_uncaught(shown: BaseException | None = None) -> None:
    """Make an uncaught stop or refusal end the interpreter with its exit code, as well as the error
    that is ``shown`` already.

    The last lines of the job explain a stop, and a `ConfigError` prints one line. An interactive
    prompt shows the error and stays.
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
    """While active, records a signal, or passes it to a handler. Waiting code calls `check`,
    because an exception at an arbitrary line would leave that line half done. Does nothing outside
    the main thread, where Python does not allow handlers."""

    def __init__(self) -> None:
        # the first signal that ends the job, 0 before; only the handler sets it
        self._ended_by = 0
        # only the attempt is being stopped, and the job continues
        self.is_pausing = False
        self._is_paused = False  # the pause's own signal has come
        self._handler: Callable[[int], None] | None = None
        self._previous: dict[int, Any] = {}
        self._blocked: set[int] = set()
        self._delivered = 0
        self._counts = [0, 0]  # numbers of direct and of forwarded signals
        self._ignores_children = False

    @property
    def received(self) -> int:
        """The first signal that came, including a pause, or 0."""
        if not self._ended_by and self._is_paused:
            return signal.SIGTERM
        return self._ended_by

    def __enter__(self) -> SignalWatch:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._ignores_children = keep_ends_of_children()
        for forwarded, signum in FORWARDED.items():
            previous = signal.getsignal(signum)
            # ignored under nohup; None: a handler in C, which cannot be put back
            if previous in (signal.SIG_IGN, None):
                continue
            if signum == signal.SIGTERM and UNDER_SUBMITIT in os.environ:
                # it comes with every preemption, and submitit requeues at another signal
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
        """Let time pass, calling ``tick`` at least twice a second.

        Raises:
            JobInterrupted: a signal came.
        """

        def tick_unless_received() -> None:
            self.check()
            tick()

        sleep_with_ticks(seconds, tick_unless_received)

    def deliver(self, signum: int) -> None:
        """Act as if the signal had come, from any thread."""
        if self._previous:
            self._delivered = signum
            # any watched signal wakes the main thread; under submitit ``signum`` may not be one
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
    def handed_to(self, handler: Callable[[int], None]) -> Iterator[None]:
        """Call ``handler(signum)`` for signals within this block."""
        before = self._handler
        self._handler = handler
        try:
            yield
        finally:
            self._handler = before

    @property
    def can_stop(self) -> bool:
        """Whether any signal stops the job: outside the main thread none does."""
        return bool(self._previous)

    def watches(self, signum: int) -> bool:
        """Return whether that signal stops the job."""
        return signum in self._previous

    def pass_on(self) -> None:
        """Call the previous handler of the signal, now that the checkpoint is written.
        Submitit's handler puts the job back into the queue and ends the process."""
        previous = self._previous.get(self.received)
        if self.received in WARNING_SIGNALS and callable(previous):
            previous(self.received, None)

    def check(self) -> None:
        """Raise `JobInterrupted` if a signal has come that no handler takes."""
        if self._handler is None:
            self.raise_if_received()

    def raise_if_received(self) -> None:
        """Raise `JobInterrupted` if a signal has come."""
        if self.received:
            raise JobInterrupted(self.received)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        delivered = self._delivered
        self._delivered = 0
        signum = delivered or signum
        is_forwarded = signum in FORWARDED
        signum = FORWARDED.get(signum, signum)
        if not self.is_pausing:
            # a signal may come twice: forwarded, and to all processes of the job
            others = not is_forwarded
            self._counts[is_forwarded] += 1
            if self._counts[is_forwarded] <= self._counts[others]:
                return
        elif not self._is_paused:
            self._is_paused = True
        else:
            # a second signal ends the job, whose attempt is already stopping
            self._counts[is_forwarded] += 1
            self._ended_by = signum
            self.is_pausing = False
            return
        if not self.is_pausing:
            self._ended_by = self._ended_by or signum
        if self._handler is not None:
            self._handler(signum)
