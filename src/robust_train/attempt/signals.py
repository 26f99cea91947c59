"""How a process that runs an attempt handles signals, and how its child processes do."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from robust_train.host.signals import STOP_SIGNALS, UNDER_SUBMITIT

_WORKER_REPRIEVE_SECONDS = 5.0
_WAKES_MAIN_THREAD = signal.SIGURG
_shields: list[Callable[[object], None]] = []


@contextlib.contextmanager
def stop_on_signals(stop: Callable[[], None], *, is_script: bool = False) -> Iterator[None]:
    """Let signals call ``stop``, in a process that runs only the attempt.

    Processes that the trainer starts keep the signals' default actions, or their parent could not
    end them. Data-loader workers postpone a signal that does not come from their parent, but
    perhaps went to every process of the job: the trainer needs them to reach the end of its step
    and save. Under submitit SIGTERM comes with every preemption, and changes nothing unless a
    script has received it, too.
    """
    me = os.getpid()
    watched, no_stop = _watched_signals(is_script=is_script)

    def on_signal(signum: int, frame: FrameType | None) -> None:
        if os.getpid() == me and signum not in no_stop:
            stop()

    for signum in watched:
        signal.signal(signum, on_signal)
        signal.siginterrupt(signum, signum not in no_stop)
    shield_workers(is_script=is_script)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    yield


def _watched_signals(*, is_script: bool) -> tuple[list[signal.Signals], list[signal.Signals]]:
    """Return the signals that ask for a stop, and those among them that change nothing."""
    watched = [s for s in STOP_SIGNALS if signal.getsignal(s) != signal.SIG_IGN]
    is_preempted_by_it = UNDER_SUBMITIT in os.environ and not is_script
    return watched, [signal.SIGTERM] if is_preempted_by_it else []


def shield_workers(*, is_script: bool = False) -> None:
    """Remove this process's handlers from the processes that a trainer starts from here on.

    Any fork runs ``in_fork``. Processes of ``multiprocessing``, such as data-loader workers, run
    ``in_worker`` after it.
    """
    watched, no_stop = _watched_signals(is_script=is_script)

    def in_fork() -> None:
        with contextlib.suppress(ValueError):  # forked by a thread
            for signum in watched:
                signal.signal(signum, signal.SIG_DFL)

    def in_worker(of: object) -> None:
        # torch's workers have handlers in C, which a blocked signal does not reach.
        signal.pthread_sigmask(signal.SIG_BLOCK, watched)
        with contextlib.suppress(ValueError):
            signal.signal(_WAKES_MAIN_THREAD, lambda *_: None)
        threading.Thread(target=_end_at_signal, args=(watched, no_stop), daemon=True).start()

    os.register_at_fork(after_in_child=in_fork)
    multiprocessing.util.register_after_fork(in_worker, in_worker)
    _shields.append(in_worker)  # torch keeps only a weak reference


def _end_at_signal(watched: Sequence[signal.Signals], no_stop: Sequence[signal.Signals]) -> None:
    """End this process at a signal: at once if its parent sent it, else a few seconds later, or not
    at all."""
    while True:  # it may ignore one signal, and the next must still end it
        info = signal.sigwaitinfo(watched)
        if info.si_pid != os.getppid():
            if info.si_signo in no_stop:
                continue
            info = signal.sigtimedwait(watched, _WORKER_REPRIEVE_SECONDS) or info
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        os.kill(os.getpid(), info.si_signo)
        # A handler in Python runs in the main thread, which may wait for its next task without a
        # time limit.
        signal.pthread_kill(threading.main_thread().ident or 0, _WAKES_MAIN_THREAD)
        signal.pthread_sigmask(signal.SIG_BLOCK, watched)
