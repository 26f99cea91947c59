"""Runs a script's process in an attempt: starts it, forwards signals, and leaves no process
behind."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import shlex
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil

from robust_train.attempt.run import Run
from robust_train.host.linux import (
    TICK_SECONDS,
    become_subreaper,
    collect,
    describe_processes,
    is_fork,
    kill_descendants,
    list_children,
    signal_at_parents_death,
)
from robust_train.model.errors import ConfigError

log = logging.getLogger("robust_train")

_ORPHANS_SECONDS = 0.05
_SHELLS = frozenset({"sh", "bash", "dash", "ksh", "zsh"})


class Program:
    """A running script. It stays in the process group of its attempt.

    Orphaned descendants become children of this process (a subreaper), however far they have
    detached themselves.

    Raises:
        ConfigError: it cannot be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        cwd: Path,
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        become_subreaper()
        self._stop_signal = stop_signal
        self._not_ours = {child.pid for child in list_children()}
        self._asked: set[int] = set()
        # Whether it and all its descendants ended before a stop was requested.
        self.has_ended_by_itself = False
        program = Path(argv[0])
        self._is_shell = program.name in _SHELLS or program.suffix == ".sh"
        try:
            with _own_input() as stdin:
                self._process = subprocess.Popen(
                    list(argv),
                    env=dict(environ),
                    cwd=cwd,
                    pass_fds=_files_to_inherit(),
                    stdin=stdin,
                    preexec_fn=partial(_begin, stop_signal),
                )
        except OSError as error:
            problem = error.strerror or error
            hint = ""
            if error.errno in (errno.ENOENT, errno.ENOEXEC):
                hint = "; does its first line, #!…, name an interpreter that is there?"
            raise ConfigError(f"trainer.argv: {shlex.join(argv)}: {problem}{hint}") from error

    @property
    def pid(self) -> int:
        """Process id of the script itself."""
        return self._process.pid

    def wait(self, run: Run, stop_grace_seconds: float, on_tick: Callable[[], None]) -> int:
        """Wait until the script and its descendants have ended, and return its exit status like
        subprocess.

        ``on_tick`` is called about twice a second. If ``run.should_stop()``, the stop signal goes
        to the script, and after its end to the programs that it left (a shell does not wait for its
        background programs). Anything alive after ``stop_grace_seconds`` is killed. Data-loader
        workers get no signal: their own parent ends them. Forks of an ended program are killed
        without the signal, because they have its signal handlers, and would save a checkpoint as
        well.
        """
        kill_at = math.inf
        try:
            while True:
                running = self._running()
                if run.should_stop():
                    now = time.monotonic()
                    kill_at = min(kill_at, now + stop_grace_seconds)
                    if not running or now >= kill_at:
                        break
                    forks = set(filter(is_fork, running))
                    programs = [running_pid for running_pid in running if running_pid not in forks]
                    self._ask_to_stop(programs)
                    # A fork of a shell may run a program, which gets the signal next.
                    if self._process.returncode is not None:
                        for pid in forks:
                            _send(pid, signal.SIGKILL)
                elif self._process.returncode is not None:
                    self.has_ended_by_itself = True
                    self._tell_of_background(running)
                    break
                if self._process.returncode is not None:
                    time.sleep(_ORPHANS_SECONDS)  # its leftover programs end, too
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(TICK_SECONDS)
                on_tick()
        finally:
            returncode = self._process.poll()
            left = kill_descendants(lambda process: process.pid not in self._not_ours)
            if returncode is None:  # the kill has collected its status
                self._process.returncode = returncode = -signal.SIGKILL
        if left:
            log.warning("processes %s of the script hang in the kernel; they are left behind", left)
        return returncode

    def _running(self) -> list[int]:
        """Return the script and its orphaned descendants; collect those that have ended."""
        self._process.poll()
        pids = {child.pid for child in list_children()} - self._not_ours
        return [pid for pid in pids if pid == self.pid or collect(pid)]

    def _tell_of_background(self, left: Sequence[int]) -> None:
        """Warn of programs that a shell started in the background without waiting for them."""
        if not (left and self._is_shell and self._process.returncode == 0):
            return
        time.sleep(TICK_SECONDS)  # tee ends with its input
        left = self._running()
        if left:
            log.warning(
                "the script ended while %s still ran, and it ends with the script: let the script "
                "wait for it (without &, or with wait); --detach is for the background",
                describe_processes(map(psutil.Process, left)),
            )

    def _ask_to_stop(self, pids: Sequence[int]) -> None:
        """Send the stop signal to each once, with SIGCONT, because a stopped process would not get
        it."""
        below = list_children(recursive=True)
        # A shell waits for its child to end by this signal.
        if self._stop_signal == signal.SIGINT:
            pids = [*pids, *_run_by_shells(below)]
        newly_asked = set(pids) - self._asked
        self._asked |= newly_asked
        for pid in newly_asked:
            _send(pid, self._stop_signal)
        for process in below if newly_asked else ():
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:
                    _send(process.pid, signal.SIGCONT)


def _send(pid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def _run_by_shells(processes: Sequence[psutil.Process]) -> Iterator[int]:
    """Yield the processes whose parent is a shell: a terminal sends them the signal as well."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            if parent is not None and parent.name() in _SHELLS:
                yield process.pid


def _begin(stop_signal: signal.Signals) -> None:
    """Prepare the script's process."""
    # `nohup … &` makes it ignore some signals.
    signal.signal(stop_signal, signal.SIG_DFL)
    # This covers the case that the reaper was killed as well.
    signal_at_parents_death(signal.SIGKILL)


@contextlib.contextmanager
def _own_input() -> Iterator[int | None]:
    """Reopen a file on standard input, so that each attempt and each job reads all of it."""
    reopened = None
    with contextlib.suppress(OSError):  # a pipe, or closed
        starts_at = os.lseek(0, 0, os.SEEK_CUR)
        reopened = os.open("/dev/fd/0", os.O_RDONLY)
        os.lseek(reopened, starts_at, os.SEEK_SET)
    try:
        yield reopened
    finally:
        if reopened is not None:
            os.close(reopened)


def _files_to_inherit() -> list[int]:
    """Return the files that this process has to pass on: a reservation is a lock on a file."""
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        with contextlib.suppress(OSError):  # the descriptor that listed the folder
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            if descriptor > 2 and is_file and os.get_inheritable(descriptor):
                descriptors.append(descriptor)
    return descriptors
