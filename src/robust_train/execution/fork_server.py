"""The launcher's side of the fork server: start it early, load a trainer, run attempts in it."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from robust_train.errors import ConfigError
from robust_train.execution.environment import shared_machine_environment
from robust_train.execution.output import OutputPump
from robust_train.execution.request import AttemptRequest, TrainerRef
from robust_train.execution.signals import SignalWatch
from robust_train.execution.stall import STACKS_SECONDS, StallWatch
from robust_train.execution.wire import (
    ORPHAN_GRACE_SECONDS,
    MessageReader,
    read_events,
    send_message,
)
from robust_train.execution.zygote_handle import (
    ForkedProcess,
    ServerProcess,
    ZygoteHandle,
    for_torch,
)

EventHandler = Callable[[dict[str, Any]], None]


class ServerDied(Exception):
    """The fork server's process ended by itself. ``returncode`` as subprocess has it."""

    def __init__(self, returncode: int) -> None:
        super().__init__(f"the fork server ended with {returncode}")
        self.returncode = returncode


class ServerNeverStarted(ServerDied):
    """The zygote did not fork the server. ``reason`` says why, as the end of a sentence."""

    def __init__(self, returncode: int, reason: str) -> None:
        super().__init__(returncode)
        self.reason = reason


@dataclass(frozen=True)
class Exited:
    """How an attempt's process ended.

    Attributes:
        pid: its process id, None where the fork server died.
        returncode: as subprocess has it.
        max_resident_bytes: the process's peak resident memory.
        stalled: it was killed because it made no progress.
    """

    pid: int | None
    returncode: int
    max_resident_bytes: int = 0
    stalled: bool = False


class ForkServer:
    """One server process; it imports torch while the launcher composes and chooses a device.

    Args:
        warm: import torch now. False for a bare interpreter in which every attempt imports afresh.
        forked: the zygote to fork it from, and the trainer it is for; None to start an interpreter.
    """

    def __init__(
        self, *, warm: bool = True, forked: tuple[ZygoteHandle, TrainerRef] | None = None
    ) -> None:
        control, control_there = socket.socketpair()
        events, events_there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pump = OutputPump()
        self._control, self._events = control, events
        self._reader = MessageReader(control)
        self._unsafe: str | None = None
        self._loaded: TrainerRef | None = None
        self._is_running = False
        self._is_fresh = True
        self._environ = shared_machine_environment(os.environ)
        self._process: ServerProcess
        path = [os.path.abspath(entry) for entry in sys.path]
        hello = {"kind": "hello", "path": path, "warm": warm, "environ": None, "cwd": None}
        with control_there, events_there:
            channels = (control_there.fileno(), events_there.fileno())
            if forked is None:
                self._process = self._start(channels)
            else:
                zygote, trainer = forked
                output = [stream.child_fd for stream in self.pump.streams]
                self._process = zygote.fork_server(trainer, path, [*channels, *output])
                hello |= {"environ": zygote.environ, "cwd": zygote.cwd}
        with contextlib.suppress(OSError):  # known by the time that anything is wanted of it
            send_message(control, hello)

    def _start(self, channels: tuple[int, int]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "robust_train.execution.serve", *map(str, channels)],
            pass_fds=channels,
            stdin=subprocess.DEVNULL,
            stdout=self.pump.stdout.child_fd,
            stderr=self.pump.stderr.child_fd,
            start_new_session=True,
            env=self._environ,
        )

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def begin_loading(self, trainer: TrainerRef, cfg: Any) -> None:
        """Have the trainer's module imported; :meth:`poll_loading` tells when it is."""
        self._loaded = None
        self._is_fresh = False
        self._send({"kind": "load", "trainer": trainer, "cfg": cfg})

    def poll_loading(
        self, trainer: TrainerRef, timeout_seconds: float | None, wake: int | None = None
    ) -> bool:
        """Whether ``trainer`` is imported, waiting at most ``timeout_seconds`` (None: until it is).

        A descriptor ``wake`` that becomes readable ends the waiting.

        Raises:
            ConfigError: it cannot be imported.
            ServerDied: the import ended the process.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            for stream in self.pump.streams:
                selector.register(stream.read_fd, selectors.EVENT_READ)
            if wake is not None:
                selector.register(wake, selectors.EVENT_READ)
            while self._loaded is None:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                if any(key.fd == wake for key, _ in selector.select(left)):
                    return False
                self.pump.move()
                for message in self._messages():
                    if message["kind"] == "refused":
                        raise ConfigError(message["reason"])
                    if message["kind"] == "loaded":
                        self._loaded, self._unsafe = trainer, message["unsafe"]
        return True

    @property
    def unsafe(self) -> str | None:
        """Why attempts must not be forked from this server; None if they may."""
        return self._unsafe

    def run(
        self,
        request: AttemptRequest,
        *,
        on_event: EventHandler,
        signals: SignalWatch,
        stop_grace_seconds: float,
        hold: tuple[int, ...] = (),
        tick: Callable[[], None] = lambda: None,
    ) -> Exited:
        """Run one attempt to its end, whatever that is.

        The first signal asks the attempt to stop, and after ``stop_grace_seconds`` it is killed;
        the second kills it at once.

        An attempt that stalls writes its threads' stacks and is killed. It and what it starts keep
        copies of the descriptors ``hold`` open. ``tick`` is called at least twice a second.

        Raises:
            ServerDied: the server's process ended under the attempt.
        """
        kill_at: float | None = None
        forked = stop_sent = stalled = False
        stall = StallWatch(request.stall_timeout_seconds)

        def send_stop() -> None:
            nonlocal stop_sent
            if forked and not stop_sent:
                stop_sent = True
                self._send({"kind": "signal", "signum": signal.SIGTERM})

        def stop(signum: int) -> None:
            nonlocal kill_at
            kill_at = time.monotonic() + (stop_grace_seconds if kill_at is None else 0.0)
            send_stop()

        with signals.handed_to(stop) as wakeup, selectors.DefaultSelector() as selector:
            signals.raise_if_received()
            self._is_running = True
            self._send({"kind": "fork", "request": request}, hold)
            forked = True
            if kill_at is not None:  # a signal that came before there was a child to stop
                send_stop()
            for source in (self._control, self._events, wakeup):
                selector.register(source, selectors.EVENT_READ)
            for stream in self.pump.streams:
                selector.register(stream.read_fd, selectors.EVENT_READ)
            while True:
                left = None if kill_at is None else max(kill_at - time.monotonic(), 0)
                tick()
                selector.select(_sooner(0.5, _sooner(left, stall.seconds_left())))
                with contextlib.suppress(BlockingIOError):
                    os.read(wakeup, 4096)
                if kill_at is not None and time.monotonic() >= kill_at:
                    self._send({"kind": "kill"})
                    kill_at = time.monotonic() + 1.0
                # messages before events and output: what the child sent before it ended is then
                # already there when its end is known
                ended = [m for m in self._messages() if m["kind"] == "exited"]
                self.pump.move()
                for event in read_events(self._events):
                    stall.hear(event)
                    on_event(event)
                if ended:
                    self._is_running = False
                    self.pump.drain()
                    end = ended[-1]
                    return Exited(end["pid"], end["returncode"], end["max_resident_bytes"], stalled)
                if stall.seconds_left() == 0:
                    stalled = True
                    stall.end()
                    self._send({"kind": "dump_stacks"})
                    kill_at = time.monotonic() + STACKS_SECONDS

    def close(self) -> None:
        """End the server and whatever it runs."""
        self._control.close()
        if self._is_running:  # the server ends the attempt and all that it started, then itself
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(ORPHAN_GRACE_SECONDS + 1.0)
        self._process.kill()
        self._process.wait()
        if isinstance(self._process, ForkedProcess):
            self._process.close()
        self._events.close()
        self.pump.close()

    def suits(self, environ: Mapping[str, str]) -> bool:
        """Whether it can become a zygote for jobs in this environment."""
        same = for_torch(self._environ) == for_torch(shared_machine_environment(environ))
        return self._is_fresh and self.is_alive and same

    def share(self) -> ZygoteHandle:
        """Make a zygote of it; nothing else can be done with it then.

        Raises:
            ServerDied: it has ended.
        """
        assert isinstance(self._process, subprocess.Popen)
        requests, requests_there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with requests_there:
            self._send({"kind": "share"}, (requests_there.fileno(),))
        self._control.close()
        self._events.close()
        return ZygoteHandle(self._process, requests, self.pump, self._environ)

    def _messages(self) -> list[Any]:
        messages = self._reader.read()
        if self._reader.closed and not messages:
            raise self._death()
        return messages

    def _send(self, message: Any, descriptors: tuple[int, ...] = ()) -> None:
        try:
            send_message(self._control, message, descriptors)
        except OSError as error:
            raise self._death() from error

    def _death(self) -> ServerDied:
        returncode = self._process.wait()
        if isinstance(self._process, ForkedProcess) and self._process.refusal is not None:
            return ServerNeverStarted(returncode, self._process.refusal)
        return ServerDied(returncode)


def _sooner(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return one if other is None else other
    return min(one, other)
