"""The launcher's side of the fork server: start it early, have libraries imported, run attempts.

Why not :mod:`multiprocessing`'s: ours imports libraries at a chosen moment and checks that it may
still be forked; it hands locks and sockets of the launcher to the attempt, gives that a process
group and a parent-death signal, takes in what it leaves running, and ends with the launcher.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import psutil
from omegaconf import DictConfig

from robust_train.errors import ConfigError
from robust_train.events import Event, Failed, Finished
from robust_train.execution.environment import read_at_import, shared_machine_environment
from robust_train.execution.fork_messages import Exited, Fork, Import, Imported, Refused, Signal
from robust_train.execution.linux import JOB_MARKER, become_subreaper, is_marked, kill_descendants
from robust_train.execution.output import OutputPump
from robust_train.execution.request import AttemptRequest
from robust_train.execution.screen import waiting_screens
from robust_train.execution.signals import SignalWatch, stop_signal
from robust_train.execution.stall import DUMP_STACKS, STACKS_SECONDS, StallWatch
from robust_train.execution.trainer_ref import TrainerRef
from robust_train.execution.wire import (
    ORPHAN_GRACE_SECONDS,
    MessageReader,
    read_events,
    send_message,
)

log = logging.getLogger("robust_train")

TICK_SECONDS = 0.5
_AFTER_FAILURE_SECONDS = 10.0
_QUIET_SECONDS = 0.5
_AFTER_KILL_SECONDS = 8.0

_with_a_server: set[str] = set()
"""The tokens of this process's servers."""


class ServerDied(Exception):
    """The fork server's process ended by itself. ``returncode`` as subprocess has it."""

    def __init__(self, returncode: int) -> None:
        super().__init__(f"the fork server ended with {returncode}")
        self.returncode = returncode


class ForkServer:
    """One server process; it imports libraries while the launcher composes and waits for a device.

    Args:
        libraries: what to import right away (see :class:`.fork_messages.Import`).
    """

    def __init__(self, libraries: Sequence[str] = ()) -> None:
        control, control_there = socket.socketpair()
        events, events_there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pump = OutputPump()
        self._control, self._events = control, events
        self._reader = MessageReader(control)
        self._answers_due = 0
        self._unsafe: dict[str, str] = {}
        self._is_running = False
        self._is_stuck = False
        self._token = os.urandom(8).hex()
        environ = shared_machine_environment(os.environ)
        self._read_at_import = read_at_import(environ)
        self._owner = os.getpid()
        # what the server leaves behind if it is killed becomes ours to end
        _with_a_server.add(self._token)
        become_subreaper()
        with control_there, events_there:
            channels = (control_there.fileno(), events_there.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-m", "robust_train.execution.serve", *map(str, channels)],
                pass_fds=channels,
                stdin=subprocess.DEVNULL,
                stdout=self.pump.stdout.child_fd,
                stderr=self.pump.stderr.child_fd,
                start_new_session=True,
                env={**environ, JOB_MARKER: self._token},
            )
        with contextlib.suppress(ServerDied):  # known by the time that anything is wanted of it
            self.begin_import(libraries)

    @property
    def is_alive(self) -> bool:
        """Whether the process runs and can run attempts."""
        return not self._is_stuck and self._process.poll() is None

    def suits(self, environ: Mapping[str, str]) -> bool:
        """Return whether libraries would be imported in the same environment today."""
        return self._read_at_import == read_at_import(shared_machine_environment(environ))

    def begin_import(
        self,
        libraries: Sequence[str],
        trainer: TrainerRef | None = None,
        cfg: DictConfig | None = None,
    ) -> None:
        """Have libraries imported; for the arguments see :class:`.fork_messages.Import`."""
        path = tuple(os.path.abspath(entry) for entry in sys.path)
        self._answers_due += 1
        self._send(Import(path, tuple(libraries), trainer, cfg))

    def poll_import(self, timeout_seconds: float | None, wake: int | None = None) -> bool:
        """Return whether everything is imported, after at most ``timeout_seconds``.

        A descriptor ``wake`` that becomes readable ends the waiting.

        Raises:
            ConfigError: the trainer refuses the configuration.
            ServerDied: an import ended the process.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            for stream in self.pump.streams:
                selector.register(stream.read_fd, selectors.EVENT_READ)
            if wake is not None:
                selector.register(wake, selectors.EVENT_READ)
            while self._answers_due:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                if any(key.fd == wake for key, _ in selector.select(left)):
                    return False
                self.pump.move()
                for message in self._messages():
                    self._answers_due -= 1
                    if isinstance(message, Refused):
                        raise ConfigError(message.reason)
                    if isinstance(message, Imported):
                        self._unsafe |= message.unsafe
        return True

    @property
    def unsafe(self) -> Mapping[str, str]:
        """Libraries after whose import attempts must not be forked, and why."""
        return self._unsafe

    def run(
        self,
        request: AttemptRequest,
        *,
        on_event: Callable[[Event], None],
        signals: SignalWatch,
        hold: tuple[int, ...],
        tick: Callable[[], None],
    ) -> Exited:
        """Run one attempt to its end, whatever that is.

        The first signal asks the attempt to stop, and after ``stop_grace_seconds`` it is killed;
        the second kills it at once. It is also killed when it stalls, after its threads' stacks are
        written; and when its process does not end after it has reported its end.

        Raises:
            ServerDied: the server's process ended under the attempt.
        """
        clock = _KillClock(request.stop_grace_seconds)
        forked = stop_sent = stalled = False
        stall = StallWatch(request.stall_timeout_seconds)

        def send_stop() -> None:
            nonlocal stop_sent
            if forked and not stop_sent:
                stop_sent = True
                self._send(Signal(stop_signal(os.environ)))

        def stop(signum: int) -> None:
            clock.stop()
            send_stop()

        with signals.handed_to(stop) as wakeup, selectors.DefaultSelector() as selector:
            signals.raise_if_received()
            self._is_running = True
            self._send(Fork(request), hold)
            forked = True
            if clock.is_set:  # a signal that came before there was a child to stop
                send_stop()
            for source in (self._control, self._events, wakeup):
                selector.register(source, selectors.EVENT_READ)
            for stream in self.pump.streams:
                selector.register(stream.read_fd, selectors.EVENT_READ)
            while True:
                selector.select(_soonest(TICK_SECONDS, clock.seconds_left(), stall.seconds_left()))
                with contextlib.suppress(BlockingIOError):
                    os.read(wakeup, 4096)
                if clock.kills_now():
                    self._send(Signal(signal.SIGKILL))
                # messages before events and output: what the child sent before it ended is then
                # already there when its end is known
                ended = [m for m in self._messages() if isinstance(m, Exited)]
                self.pump.move()
                for event in read_events(self._events):
                    stall.on_event(event)
                    clock.on_event(event)
                    on_event(event)
                if ended or clock.gives_up:
                    self._is_running = False
                    self.pump.drain()
                if ended:
                    return replace(ended[-1], stalled=stalled)
                if clock.gives_up:
                    self._is_stuck = True
                    log.warning("the attempt's process hangs in the kernel; it is left behind")
                    return Exited(None, -signal.SIGKILL, stalled=stalled)
                if stall.seconds_left() == 0:
                    stalled = True
                    stall.end()
                    self._send(Signal(DUMP_STACKS))
                    clock.kill_in(STACKS_SECONDS)
                for screen in waiting_screens():
                    screen.show()
                tick()

    def close(self) -> None:
        """End the server and whatever it runs."""
        self._control.close()
        if os.getpid() == self._owner:
            if self._is_running:  # the server ends the attempt and all that it started, then itself
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(ORPHAN_GRACE_SECONDS + 1.0)
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_AFTER_KILL_SECONDS)
            self._end_leftovers()
            _with_a_server.discard(self._token)
            if not _with_a_server:
                become_subreaper(on=False)
        self._events.close()
        self.pump.close()

    def _end_leftovers(self) -> None:
        """End what the server could not end itself: it was killed."""
        is_ours = partial(_is_of_job, self._token, self._process.pid)
        quiet_seconds = _QUIET_SECONDS if self._is_running else 0.0
        left = kill_descendants(is_ours=is_ours, quiet_seconds=quiet_seconds)
        if left:
            log.warning("processes %s of the attempt cannot be ended", left)

    def _messages(self) -> list[object]:
        messages = self._reader.read()
        if self._reader.closed and not messages:
            raise self._death()
        return messages

    def _send(self, message: object, descriptors: tuple[int, ...] = ()) -> None:
        try:
            send_message(self._control, message, descriptors)
        except OSError as error:
            raise self._death() from error

    def _death(self) -> ServerDied:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_AFTER_KILL_SECONDS)
        return ServerDied(self._process.poll() or -signal.SIGKILL)


def _is_of_job(token: str, server_pid: int, process: psutil.Process) -> bool:
    return process.pid != server_pid and is_marked(process, token)


def _soonest(*seconds: float | None) -> float:
    return min(one for one in seconds if one is not None)


class _KillClock:
    """When an attempt is killed: it was asked to stop, stalled, or its end does not come."""

    def __init__(self, stop_grace_seconds: float) -> None:
        self._grace_seconds = stop_grace_seconds
        self._kill_at: float | None = None
        self._gone_at: float | None = None
        self._is_stopping = False

    @property
    def is_set(self) -> bool:
        """Whether the attempt is going to be killed."""
        return self._kill_at is not None

    @property
    def gives_up(self) -> bool:
        """Whether it was killed long ago and is still there."""
        return self._gone_at is not None and time.monotonic() >= self._gone_at

    def kill_in(self, seconds: float) -> None:
        """Kill the attempt in so many seconds, if not earlier."""
        at = time.monotonic() + seconds
        self._kill_at = at if self._kill_at is None else min(at, self._kill_at)

    def stop(self) -> None:
        """A signal has come: the first leaves time for a checkpoint, the second none."""
        self.kill_in(0.0 if self._is_stopping else self._grace_seconds)
        self._is_stopping = True

    def on_event(self, event: Event) -> None:
        """Limit the time between the report of an end and the end of the process."""
        if isinstance(event, Finished):
            self.kill_in(self._grace_seconds)
        elif isinstance(event, Failed):
            self.kill_in(_AFTER_FAILURE_SECONDS)

    def kills_now(self) -> bool:
        """Return whether it is time for SIGKILL, which is sent again and again."""
        now = time.monotonic()
        if self._kill_at is None or now < self._kill_at:
            return False
        self._kill_at = now + 1.0
        if self._gone_at is None:
            self._gone_at = now + _AFTER_KILL_SECONDS
        return True

    def seconds_left(self) -> float | None:
        """Return the seconds until the next kill, None if there will be none."""
        return None if self._kill_at is None else max(self._kill_at - time.monotonic(), 0.0)
