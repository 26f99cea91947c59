"""A script's process: start it, hand signals on, see to it that nothing of it is left behind."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from robust_train.attempt.run import Run
from robust_train.host.linux import (
    TICK_SECONDS,
    become_subreaper,
    children,
    collect,
    kill_descendants,
    readable,
    signal_at_parents_death,
)
from robust_train.host.signals import wakeup_descriptor
from robust_train.model.errors import ConfigError

log = logging.getLogger("robust_train")


class Program:
    """A running script. It stays in the process group of its attempt. Orphans of what it starts
    become children of this process (a subreaper), however far they have detached themselves. Raises
    ConfigError: it cannot be started."""

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str], cwd: Path
    ) -> None:
        become_subreaper()
        self._not_ours = {child.pid for child in children()}
        self._asked: set[int] = set()
        try:
            with _own_input() as stdin:
                self._process = subprocess.Popen(
                    list(argv),
                    env=dict(environ),
                    cwd=cwd,
                    pass_fds=_files_to_inherit(),
                    stdin=stdin,
                    # where the reaper was killed as well
                    preexec_fn=partial(signal_at_parents_death, signal.SIGKILL),
                )
        except OSError as error:
            problem = error.strerror or error
            hint = "; is its first line #!…?" if error.errno == 8 else ""
            raise ConfigError(
                f"trainer.argv: {shlex.join(argv)}: {problem}{hint}"
            ) from error

    @property
    def pid(self) -> int:
        """Process id of the script itself."""
        return self._process.pid

    def wait(
        self, run: Run, stop_grace_seconds: float, on_tick: Callable[[], None]
    ) -> int:
        """Wait until the script and all that it started have ended; return its exit status as
        subprocess has it. Calls ``on_tick`` about twice a second.

        If ``run.stop_requested``, SIGTERM goes to the script, and when that has ended to the
        processes it leaves behind (a shell does not wait for what it runs). What still lives after
        ``stop_grace_seconds`` is killed. Data-loader workers get none: their own parent ends them.
        """
        kill_at: float | None = None
        try:
            with _woken_by_signals() as sleep:
                while True:
                    running = self._running()
                    if run.stop_requested:
                        kill_at = kill_at or time.monotonic() + stop_grace_seconds
                        if not running or time.monotonic() >= kill_at:
                            break
                        self._ask_to_stop(running)
                    elif self._process.returncode is not None:
                        break
                    sleep(TICK_SECONDS)
                    on_tick()
        finally:
            returncode = self._process.poll()
            left = kill_descendants(lambda process: process.pid not in self._not_ours)
            if returncode is None:  # collected by the killing
                self._process.returncode = returncode = -signal.SIGKILL
        if left:
            log.warning(
                "processes %s of the script hang in the kernel; they are left behind",
                left,
            )
        return returncode

    def _running(self) -> list[int]:
        """Return the script and orphans of what it started; collect the dead among them."""
        self._process.poll()
        found = {child.pid for child in children()} - self._not_ours
        return [pid for pid in found if pid == self.pid or collect(pid)]

    def _ask_to_stop(self, pids: Sequence[int]) -> None:
        for pid in set(pids) - self._asked:
            self._asked.add(pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)


@contextlib.contextmanager
def _own_input() -> Iterator[int | None]:
    """Yield a file on standard input opened again: each attempt, and each job, reads all of it."""
    own = None
    with contextlib.suppress(OSError):  # a pipe, or closed
        starts_at = os.lseek(0, 0, os.SEEK_CUR)
        own = os.open("/dev/fd/0", os.O_RDONLY)
        os.lseek(own, starts_at, os.SEEK_SET)
    try:
        yield own
    finally:
        if own is not None:
            os.close(own)


@contextlib.contextmanager
def _woken_by_signals() -> Iterator[Callable[[float], None]]:
    """Yield a function that sleeps, but not past a signal: SIGTERM, or a child's end. Outside the
    main thread, where Python allows no handlers, it sleeps the whole time."""
    is_main = threading.current_thread() is threading.main_thread()
    with wakeup_descriptor() as wakeup:

        def sleep(seconds: float) -> None:
            readable([wakeup], seconds)
            with contextlib.suppress(BlockingIOError):
                os.read(wakeup, 4096)

        old = signal.signal(signal.SIGCHLD, lambda *_: None) if is_main else None
        try:
            yield sleep
        finally:
            if is_main:
                signal.signal(signal.SIGCHLD, old)


def _files_to_inherit() -> list[int]:
    """Return files that this process was given to pass on: a reservation is a lock on one."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        with contextlib.suppress(OSError):  # the one that listed the folder
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            if descriptor > 2 and is_file and os.get_inheritable(descriptor):
                found.append(descriptor)
    return found
