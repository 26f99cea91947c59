"""Runs a script's process: starts it, passes on requests to stop, and ends all its descendants.

The trainer behind ``trainer=command`` uses it in the attempt's process. That process is a
subreaper: the kernel makes orphaned descendants of the script its children, so it can end them.
"""

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

# After the script itself has ended, its descendants are polled at this interval.
_ORPHANS_SECONDS = 0.05
_SHELLS = frozenset({"sh", "bash", "dash", "ksh", "zsh"})


class Program:
    """A running script, in the process group of its attempt.

    Attributes:
        has_ended_by_itself: whether the script and all its descendants ended before a stop was
            requested.

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
        self.has_ended_by_itself = False
        program = Path(argv[0])
        self._is_shell = program.name in _SHELLS or program.suffix == ".sh"
        try:
            with _reopened_input() as stdin:
                self._process = subprocess.Popen(
                    list(argv),
                    env=dict(environ),
                    cwd=cwd,
                    pass_fds=_files_to_inherit(),
                    stdin=stdin,
                    preexec_fn=partial(_prepare_process, stop_signal),
                )
        except OSError as error:
            problem = error.strerror or error
            hint = ""
            if error.errno in (errno.ENOENT, errno.ENOEXEC):
                hint = "; does its first line, #!…, name an interpreter that exists?"
            raise ConfigError(f"trainer.argv: {shlex.join(argv)}: {problem}{hint}") from error

    @property
    def pid(self) -> int:
        """Process id of the script itself."""
        return self._process.pid

    def wait(self, run: Run, stop_grace_seconds: float, on_tick: Callable[[], None]) -> int:
        """Wait until the script and its descendants have ended, and return its exit status as
        subprocess does.

        ``on_tick`` is called about twice a second. When ``run.should_stop()`` is true, the stop
        signal goes to the script, and after its end to the programs that it left: a shell does not
        wait for its background programs. Processes that still run after ``stop_grace_seconds`` are
        killed. Data-loader workers get no signal, because their parent ends them. Forks of a
        program that has ended are killed without the signal: they have its signal handlers, and
        would save a checkpoint as well.
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
                    forks = [pid for pid in running if is_fork(pid)]
                    self._ask_to_stop([pid for pid in running if pid not in forks])
                    # While the script runs, a fork of a shell may become a program, which then gets
                    # the signal.
                    if self._process.returncode is not None:
                        for pid in forks:
                            _send(pid, signal.SIGKILL)
                elif self._process.returncode is not None:
                    self.has_ended_by_itself = True
                    self._warn_of_background_programs(running)
                    break
                if self._process.returncode is not None:
                    # Give its remaining programs time to end.
                    time.sleep(_ORPHANS_SECONDS)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(TICK_SECONDS)
                on_tick()
        finally:
            returncode = self._process.poll()
            left = kill_descendants(lambda process: process.pid not in self._not_ours)
            if returncode is None:
                # The kill has collected its exit status.
                returncode = -signal.SIGKILL
                self._process.returncode = returncode
        if left:
            log.warning("processes %s of the script hang in the kernel and cannot be ended", left)
        return returncode

    def _running(self) -> list[int]:
        """Return the running processes of the script: itself and its orphaned descendants. Those
        that have ended are collected."""
        self._process.poll()
        pids = {child.pid for child in list_children()} - self._not_ours
        return [pid for pid in pids if pid == self.pid or collect(pid)]

    def _warn_of_background_programs(self, left: Sequence[int]) -> None:
        """Warn of programs that a shell started in the background without waiting for them."""
        if not (left and self._is_shell and self._process.returncode == 0):
            return
        # A program that reads the script's output, such as tee, ends a moment later.
        time.sleep(TICK_SECONDS)
        left = self._running()
        if left:
            log.warning(
                "the script ended while %s still ran, which is ended too: let the script wait for "
                "it (without &, or with wait); --detach is for the background",
                describe_processes(map(psutil.Process, left)),
            )

    def _ask_to_stop(self, pids: Sequence[int]) -> None:
        """Send the stop signal once to each of these processes. Suspended processes get SIGCONT
        first, because they would not handle the signal."""
        descendants = list_children(recursive=True)
        if self._stop_signal == signal.SIGINT:
            # A shell ends by SIGINT only if the program that it runs does.
            pids = [*pids, *_run_by_shells(descendants)]
        newly_asked = set(pids) - self._asked
        if not newly_asked:
            return
        self._asked |= newly_asked
        for pid in newly_asked:
            _send(pid, self._stop_signal)
        for process in descendants:
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:
                    _send(process.pid, signal.SIGCONT)


def _send(pid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def _run_by_shells(processes: Sequence[psutil.Process]) -> Iterator[int]:
    """Yield the ids of the processes whose parent is a shell. Ctrl-C in a terminal reaches them
    too."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            if parent is not None and parent.name() in _SHELLS:
                yield process.pid


def _prepare_process(stop_signal: signal.Signals) -> None:
    """Set the signals of the script's process. Runs between fork and exec."""
    # The attempt may ignore the signal, for example under `nohup … &`, and a child inherits that.
    signal.signal(stop_signal, signal.SIG_DFL)
    # Usually the reaper ends the script if the attempt is killed. The reaper may be killed too.
    signal_at_parents_death(signal.SIGKILL)


@contextlib.contextmanager
def _reopened_input() -> Iterator[int | None]:
    """Reopen a file on standard input, so that each attempt and each job reads all of it. Yields
    None if standard input is not a file."""
    reopened = None
    with contextlib.suppress(OSError):  # It is a pipe, or closed.
        starts_at = os.lseek(0, 0, os.SEEK_CUR)
        reopened = os.open("/dev/fd/0", os.O_RDONLY)
        os.lseek(reopened, starts_at, os.SEEK_SET)
    try:
        yield reopened
    finally:
        if reopened is not None:
            os.close(reopened)


def _files_to_inherit() -> list[int]:
    """Return the descriptors that the script must inherit. A reservation of a GPU is a lock on an
    open file, which holds until the last process with the descriptor has ended."""
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        with contextlib.suppress(OSError):  # The descriptor that listed the folder is closed.
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            if descriptor > 2 and is_file and os.get_inheritable(descriptor):
                descriptors.append(descriptor)
    return descriptors
