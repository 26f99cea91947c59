"""Signal handling in a process that runs an attempt, and in the processes that its trainer starts.

:mod:`.interpreter` uses :func:`stop_on_signals`. A launcher that runs the attempt in its own
process has its own handlers, and uses only :func:`shield_workers`.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from robust_train.host.signals import STOP_SIGNALS, UNDER_SUBMITIT

# A data-loader worker ends this long after it gets a stop signal.
_WORKER_GRACE_SECONDS = 5.0
_WAKES_MAIN_THREAD = signal.SIGURG
# Keeps alive the functions that run after a fork: multiprocessing has only weak references to them.
_after_fork: list[Callable[[object], None]] = []


@contextlib.contextmanager
def stop_on_signals(stop: Callable[[], None], *, is_script: bool = False) -> Iterator[None]:
    """Call ``stop`` on a stop signal, in a process that runs only the attempt.

    Processes that the trainer starts keep the default actions of the signals, so that their parent
    can end them. But a signal may go to every process of the job, and the trainer needs its
    data-loader workers to finish its step and save. So the workers postpone a signal that does not
    come from their parent.

    Under submitit, SIGTERM comes with every preemption and is ignored, except if the attempt runs a
    script, which has received it as well.
    """
    me = os.getpid()
    watched, ignored = _watched_signals(is_script=is_script)

    def on_signal(signum: int, frame: FrameType | None) -> None:
        if os.getpid() == me and signum not in ignored:
            stop()

    for signum in watched:
        signal.signal(signum, on_signal)
        signal.siginterrupt(signum, signum not in ignored)
    shield_workers(is_script=is_script)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    yield


def _watched_signals(*, is_script: bool) -> tuple[list[signal.Signals], list[signal.Signals]]:
    """Return the stop signals that this process handles, and which of them it ignores."""
    watched = [signum for signum in STOP_SIGNALS if signal.getsignal(signum) != signal.SIG_IGN]
    ignores_preemption = UNDER_SUBMITIT in os.environ and not is_script
    return watched, [signal.SIGTERM] if ignores_preemption else []


def shield_workers(*, is_script: bool = False) -> None:
    """Keep this process's signal handlers out of the processes that a trainer starts from now on.

    Every forked process runs ``reset_signals``. Processes of ``multiprocessing``, such as
    data-loader workers, then run ``postpone_signals``.
    """
    watched, ignored = _watched_signals(is_script=is_script)

    def reset_signals() -> None:
        with contextlib.suppress(ValueError):  # This fork's only thread is not the main thread.
            for signum in watched:
                signal.signal(signum, signal.SIG_DFL)

    def postpone_signals(_: object) -> None:
        # torch's workers install handlers in C, and a blocked signal does not reach them.
        signal.pthread_sigmask(signal.SIG_BLOCK, watched)
        with contextlib.suppress(ValueError):
            signal.signal(_WAKES_MAIN_THREAD, lambda *_: None)
        threading.Thread(target=_end_at_signal, args=(watched, ignored), daemon=True).start()

    os.register_at_fork(after_in_child=reset_signals)
    multiprocessing.util.register_after_fork(postpone_signals, postpone_signals)
    _after_fork.append(postpone_signals)


def _end_at_signal(watched: Sequence[signal.Signals], ignored: Sequence[signal.Signals]) -> None:
    """Wait for a signal, then end this process. Runs in a thread of a data-loader worker.

    A signal from the parent ends the process at once, any other signal a few seconds later.
    """
    # A process with a handler may survive a signal, and then the next signal must end it.
    while True:
        info = signal.sigwaitinfo(watched)
        if info.si_pid != os.getppid():
            if info.si_signo in ignored:
                continue
            info = signal.sigtimedwait(watched, _WORKER_GRACE_SECONDS) or info
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        os.kill(os.getpid(), info.si_signo)
        # A Python handler runs in the main thread, which may be waiting indefinitely for its next
        # task. So this signal wakes it.
        signal.pthread_kill(threading.main_thread().ident or 0, _WAKES_MAIN_THREAD)
        signal.pthread_sigmask(signal.SIG_BLOCK, watched)
