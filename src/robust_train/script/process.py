"""A script's process: start it, hand signals on, see to it that nothing of it is left behind."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shlex
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from robust_train.errors import ConfigError
from robust_train.execution.linux import become_subreaper, children, collect, kill_descendants
from robust_train.run import Run

TICK_SECONDS = 0.5

log = logging.getLogger("robust_train")


class Script:
    """A running script.

    It stays in the process group of its attempt. Orphans of what it starts become children of this
    process (a subreaper), however far they have detached themselves.

    Args:
        argv: program and arguments.
        environ: its whole environment.
        cwd: its working directory.

    Raises:
        ConfigError: it cannot be started.
    """

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], cwd: Path) -> None:
        become_subreaper()
        self._not_ours = set(children())
        try:
            self._process = subprocess.Popen(
                list(argv),
                env=dict(environ),
                cwd=cwd,
                pass_fds=_files_to_inherit(),
            )
        except OSError as error:
            problem = error.strerror or error
            hint = "; is its first line #!…?" if error.errno == 8 else ""
            raise ConfigError(f"trainer.argv: {shlex.join(argv)}: {problem}{hint}") from error
        self._asked: set[int] = set()

    @property
    def pid(self) -> int:
        """Process id of the script itself."""
        return self._process.pid

    def wait(self, run: Run, stop_grace_seconds: float, on_tick: Callable[[], None]) -> int:
        """Wait until the script has ended, and with it all that it started.

        When the attempt is asked to stop, SIGTERM goes to the script, and when that ends to those
        whom it leaves behind (a shell does not wait for what it runs); whoever is there after
        ``stop_grace_seconds`` is killed. Data-loader workers get none: their own parent ends them.

        Args:
            run: whose ``stop_requested`` counts.
            stop_grace_seconds: see above.
            on_tick: called about twice a second.

        Returns:
            The script's exit status, as subprocess has it.
        """
        kill_at: float | None = None
        try:
            with _woken_by_signals() as wakeup:
                while True:
                    running = self._running()
                    if run.stop_requested:
                        if kill_at is None:
                            kill_at = time.monotonic() + stop_grace_seconds
                        if not running or time.monotonic() >= kill_at:
                            break
                        self._ask_to_stop(running)
                    elif self._process.returncode is not None:
                        break
                    wakeup(TICK_SECONDS)
                    on_tick()
        finally:
            returncode = self._process.poll()
            left = kill_descendants(spare=self._not_ours)
            if returncode is None:  # collected by the killing
                self._process.returncode = returncode = -signal.SIGKILL
        if left:
            log.warning("processes %s of the script hang in the kernel; they are left behind", left)
        return returncode

    def _running(self) -> list[int]:
        """Return the script and orphans of what it started; collect the dead among them."""
        self._process.poll()
        running = []
        for pid in children():
            if pid in self._not_ours:
                continue
            if pid == self.pid:
                running.append(pid)
                continue
            if collect(pid):
                running.append(pid)
        return running

    def _ask_to_stop(self, pids: Sequence[int]) -> None:
        for pid in pids:
            if pid not in self._asked:
                self._asked.add(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGTERM)


@contextlib.contextmanager
def _woken_by_signals() -> Iterator[Callable[[float], None]]:
    """Yield a function that sleeps, but not past a signal: SIGTERM, or a child's end.

    Outside the main thread, where Python allows no handlers, it sleeps the whole time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield time.sleep
        return
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    poll = select.poll()
    poll.register(read_end, select.POLLIN)

    def sleep(seconds: float) -> None:
        poll.poll(seconds * 1000)
        with contextlib.suppress(BlockingIOError):
            os.read(read_end, 4096)

    old_handler = signal.signal(signal.SIGCHLD, lambda *_: None)
    old_wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        yield sleep
    finally:
        signal.set_wakeup_fd(old_wakeup)
        signal.signal(signal.SIGCHLD, old_handler)
        os.close(read_end)
        os.close(write_end)


def _files_to_inherit() -> list[int]:
    """Files that this process was given to pass on: a reservation is a lock on one."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        with contextlib.suppress(OSError):  # the one that listed the folder
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            if descriptor > 2 and is_file and os.get_inheritable(descriptor):
                found.append(descriptor)
    return found
