"""Signal handling of a process that runs an attempt, and of the processes that its trainer starts.

:mod:`.interpreter` uses :func:`stop_on_signals`. A launcher that runs the attempt in its own
process has other handlers, and uses :func:`shield_workers` only.
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

# A data-loader worker that gets a stop signal ends this much later.
_WORKER_GRACE_SECONDS = 5.0
_WAKES_MAIN_THREAD = signal.SIGURG
# Functions that run in forked processes. multiprocessing keeps only weak references to them.
_after_fork: list[Callable[[object], None]] = []


@contextlib.contextmanager
def stop_on_signals(stop: Callable[[], None], *, is_script: bool = False) -> Iterator[None]:
    """Let signals call ``stop``, in a process that runs only the attempt.

    Processes that the trainer starts keep the default actions of the signals, so that their parent
    can end them. A signal may go to every process of the job, and the trainer needs its data-loader
    workers to reach the end of its step and save. So the workers postpone a signal that does not
    come from their parent.

    Under submitit, SIGTERM comes with every preemption. It is ignored, except for a script, which
    has received it as well.
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
    """Return the stop signals that this process handles, and those among them that it ignores."""
    watched = [signum for signum in STOP_SIGNALS if signal.getsignal(signum) != signal.SIG_IGN]
    ignores_preemption = UNDER_SUBMITIT in os.environ and not is_script
    return watched, [signal.SIGTERM] if ignores_preemption else []


def shield_workers(*, is_script: bool = False) -> None:
    """Remove this process's signal handlers from the processes that a trainer starts from now on.

    Every fork runs ``reset_signals``. Processes of ``multiprocessing``, such as data-loader
    workers, run ``postpone_signals`` after it.
    """
    watched, ignored = _watched_signals(is_script=is_script)

    def reset_signals() -> None:
        with contextlib.suppress(ValueError):  # This fork's only thread is not the main thread.
            for signum in watched:
                signal.signal(signum, signal.SIG_DFL)

    def postpone_signals(_: object) -> None:
        # torch's workers have handlers in C, which a blocked signal does not reach.
        signal.pthread_sigmask(signal.SIG_BLOCK, watched)
        with contextlib.suppress(ValueError):
            signal.signal(_WAKES_MAIN_THREAD, lambda *_: None)
        threading.Thread(target=_end_at_signal, args=(watched, ignored), daemon=True).start()

    os.register_at_fork(after_in_child=reset_signals)
    multiprocessing.util.register_after_fork(postpone_signals, postpone_signals)
    _after_fork.append(postpone_signals)


def _end_at_signal(watched: Sequence[signal.Signals], ignored: Sequence[signal.Signals]) -> None:
    """Wait for a signal and end this process: at once if its parent sent the signal, else a few
    seconds later. Runs in a thread of a data-loader worker."""
    # A process with a handler may survive a signal, and the next signal must still end it.
    while True:
        info = signal.sigwaitinfo(watched)
        if info.si_pid != os.getppid():
            if info.si_signo in ignored:
                continue
            info = signal.sigtimedwait(watched, _WORKER_GRACE_SECONDS) or info
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        os.kill(os.getpid(), info.si_signo)
        # A handler in Python runs in the main thread, which may wait for its next task without a
        # time limit.
        signal.pthread_kill(threading.main_thread().ident or 0, _WAKES_MAIN_THREAD)
        signal.pthread_sigmask(signal.SIG_BLOCK, watched)
