"""The launcher's side of the fork server: start it early, have libraries imported, run attempts.

Why not :mod:`multiprocessing`'s: see ``docs/decisions/0002-one-warm-interpreter.md``.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import psutil
from omegaconf import DictConfig

from robust_train.errors import ConfigError
from robust_train.events import Event
from robust_train.execution import TICK_SECONDS
from robust_train.execution.attempt_clock import AttemptClock
from robust_train.execution.attempt_output import OutputPump, has_input
from robust_train.execution.environment import read_at_import, shared_machine_environment
from robust_train.execution.fork_messages import Exited, Import, Imported, send_descriptors
from robust_train.execution.linux import JOB_MARKER, become_subreaper, kill_descendants
from robust_train.execution.request import AttemptRequest
from robust_train.execution.screen import show_waiting
from robust_train.execution.signals import (
    DUMP_STACKS,
    ORPHAN_GRACE_SECONDS,
    STOP_SIGNALS,
    SignalWatch,
    stop_signal,
)
from robust_train.execution.stall import Standstill
from robust_train.execution.stall_stacks import dump_stacks
from robust_train.execution.stall_watch import StallWatch
from robust_train.execution.trainer_ref import TrainerRef
from robust_train.execution.wire import read_events
from robust_train.memory.host import process_limits

log = logging.getLogger("robust_train")

_QUIET_SECONDS = 0.5
_AFTER_KILL_SECONDS = 8.0
_MOST_EVENTS = 1000

_START = (
    "import sys; sys.path[:] = eval(sys.argv.pop(1)); "
    "import robust_train.execution.server; robust_train.execution.server.main()"
)
"""With our own path: ``python -m`` would look for the standard library in the working directory."""

_alive: set[str] = set()
"""The tokens of this process's servers."""


class OtherNodes(Protocol):
    """What of an attempt runs on other nodes."""

    @property
    def descriptors(self) -> Sequence[int]:
        """What becomes readable when one of them sends something."""

    def poll_nodes(self) -> float | None:
        """Return in how many seconds the attempt is to end here as well; None: it goes on."""

    @property
    def stalled(self) -> Standstill | None:
        """How another node has seen that the attempt hangs, None if it has not."""

    def on_stall(self, found: Standstill) -> None:
        """Take in that the attempt hangs, before it is ended."""


class ServerDied(Exception):
    """The fork server's process ended by itself. ``returncode`` as subprocess has it."""

    def __init__(self, returncode: int) -> None:
        super().__init__(f"the fork server ended with {returncode}")
        self.returncode = returncode


class ForkServer:
    """One server process; it imports libraries while the launcher composes and waits for a device.

    Args:
        libraries: what to import right away (see :class:`.fork_messages.Import`).

    Attributes:
        pump: takes what the server and its attempts print.
        unsafe: libraries after whose import attempts must not be forked, and why.
    """

    def __init__(self, libraries: Sequence[str] = ()) -> None:
        self.pump = OutputPump()
        self.unsafe: dict[str, str] = {}
        self._control, control_there = multiprocessing.Pipe()
        self._events, events_there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._events.setblocking(False)
        self._answers_due = 0
        self._is_running = False
        self._is_stuck = False
        self._owner = os.getpid()
        self._token = os.urandom(8).hex()
        environ = shared_machine_environment(os.environ)
        path = repr([*map(str, sys.path)])
        self._read_at_import = read_at_import(environ)
        # what the server leaves behind if it is killed becomes ours to end
        _alive.add(self._token)
        become_subreaper()
        with control_there, events_there:
            channels = (control_there.fileno(), events_there.fileno())
            # a signal to all processes of the job must not end it before it can ignore them
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, path, *map(str, (*channels, *sys.argv))],
                    pass_fds=channels,
                    stdin=None if has_input() else subprocess.DEVNULL,
                    stdout=self.pump.stdout.child_fd,
                    stderr=self.pump.stderr.child_fd,
                    start_new_session=True,
                    env={**environ, JOB_MARKER: self._token},
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
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
        if process_limits():
            self.pump.held = self.pump.held or []
        self._send(Import(path, tuple(libraries), trainer, cfg))

    def poll_import(self, *, waits: bool, tick: Callable[[], None] = lambda: None) -> None:
        """Take in what the server has imported; ``waits``: until that is everything.

        ``tick`` is called twice a second meanwhile; it may raise.

        Raises:
            ConfigError: the trainer refuses the config.
            ServerDied: an import ended the process.
        """
        with self._selector() as selector:
            while self._answers_due:
                is_readable = selector.select(TICK_SECONDS if waits else 0)
                tick()
                if not is_readable and not waits:
                    return
                self.pump.move()
                for message in self._messages():
                    self._answers_due -= 1
                    if isinstance(message, Imported):
                        self.unsafe |= message.unsafe
                        if message.refusal is not None:
                            raise ConfigError(message.refusal)
        self.pump.release()

    def run(
        self,
        request: AttemptRequest,
        *,
        on_event: Callable[[Event], None],
        signals: SignalWatch,
        hold: tuple[int, ...],
        tick: Callable[[], None],
        others: OtherNodes | None = None,
    ) -> Exited:
        """Run one attempt to its end, whatever that is.

        The first signal asks the attempt to stop, the second kills it. It is also killed when it
        does not stop in time, when it stalls, and when its process does not end after its report.

        Raises:
            ServerDied: the server's process ended under the attempt.
        """
        clock = AttemptClock(request.stop_grace_seconds)
        watch = StallWatch(request, self._process.pid, on_event)
        stalled: Standstill | None = None
        forked = stop_sent = False
        unanswered: list[int] = []

        def send_stop() -> None:
            nonlocal stop_sent
            if forked and not stop_sent:
                stop_sent = True
                self._send(int(stop_signal(os.environ)))

        def stop(signum: int) -> None:
            if not clock.is_stopping:
                unanswered.append(signum)
            clock.stop()
            send_stop()

        more = () if others is None else others.descriptors
        with (
            signals.handed_to(stop) as wakeup,
            self._selector(self._events, wakeup, *more) as selector,
        ):
            signals.raise_if_received()
            self._is_running = True
            self._send(request, hold)
            forked = True
            if clock.is_set:  # a signal that came before there was a child to stop
                send_stop()
            while True:
                selector.select(clock.seconds_left(TICK_SECONDS))
                with contextlib.suppress(BlockingIOError):
                    os.read(wakeup, 4096)
                while unanswered:
                    log.info("%s", _stopping(unanswered.pop(), request.stop_grace_seconds))
                if others is not None and (left := others.poll_nodes()) is not None:
                    clock.kill_in(left)
                if clock.kills_now():
                    self._send(int(signal.SIGKILL))
                # messages before events and output: what the child sent before it ended is then
                # already there when its end is known
                ended = [m for m in self._messages() if isinstance(m, Exited)]
                if self.pump.move():
                    watch.on_output()
                # at its end all; before, a burst must hold up neither signals nor requests
                is_over = bool(ended) or clock.gives_up
                for event in read_events(self._events, None if is_over else _MOST_EVENTS):
                    clock.on_event(event)
                    watch.on_event(event)
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
                there = None if others is None else others.stalled
                if not clock.is_set and (stalled := watch.poll() or there) is not None:
                    if others is not None:
                        others.on_stall(stalled)
                    clock.kill_in(dump_stacks(request, self._process.pid))
                    if not request.runs_script:
                        self._send(int(DUMP_STACKS))
                show_waiting()
                tick()

    def unread_events(self) -> list[Event]:
        """Return the last events of an attempt whose server has died."""
        return list(read_events(self._events))

    def close(self) -> None:
        """End the server and whatever it runs; in a fork of this process only its descriptors."""
        self._control.close()
        if os.getpid() == self._owner:
            if self._is_running:  # the server ends the attempt and all that it started, then itself
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(ORPHAN_GRACE_SECONDS + 1.0)
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_AFTER_KILL_SECONDS)
            # what the server could not end itself: it was killed
            quiet_seconds = _QUIET_SECONDS if self._is_running else 0.0
            left = kill_descendants(self._is_of_job, quiet_seconds=quiet_seconds)
            if left:
                log.warning("processes %s of the attempt cannot be ended", left)
            _alive.discard(self._token)
            if not _alive:
                become_subreaper(on=False)
        self._events.close()
        self.pump.close()

    def _is_of_job(self, process: psutil.Process) -> bool:
        """Recognise a process by its session, also a zombie, or by its environment."""
        with contextlib.suppress(psutil.Error, OSError):
            is_in_session = os.getsid(process.pid) == self._process.pid
            return is_in_session or process.environ().get(JOB_MARKER) == self._token
        return False

    def _selector(self, *more: socket.socket | int) -> selectors.BaseSelector:
        selector = selectors.DefaultSelector()
        outputs = (stream.read_fd for stream in self.pump.streams)
        for source in (self._control, *outputs, *more):
            selector.register(source, selectors.EVENT_READ)
        return selector

    def _messages(self) -> list[object]:
        """Return the messages that have arrived; after the last of them raises ServerDied."""
        messages: list[object] = []
        try:
            while self._control.poll():
                messages.append(self._control.recv())
        except (EOFError, OSError) as error:
            if not messages:
                raise self._death() from error
        return messages

    def _send(self, message: object, descriptors: Sequence[int] | None = None) -> None:
        try:
            self._control.send(message)
            if descriptors is not None:
                send_descriptors(self._control, descriptors)
        except OSError as error:
            raise self._death() from error

    def _death(self) -> ServerDied:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_AFTER_KILL_SECONDS)
        return ServerDied(self._process.poll() or -signal.SIGKILL)


def _stopping(signum: int, grace_seconds: float) -> str:
    again = "press Ctrl-C" if signum == signal.SIGINT else f"send {signal.Signals(signum).name}"
    return f"stopping: saving a checkpoint, at most {grace_seconds:g} s; {again} again to kill"
