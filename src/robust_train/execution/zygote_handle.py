"""The launcher's side of a sweep's zygote: ask it for fork servers, know what became of them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from robust_train.execution.environment import shared_machine_environment
from robust_train.execution.output import OutputPump
from robust_train.execution.request import TrainerRef
from robust_train.execution.wire import MessageReader, send_packet

_ENDED_WITHOUT_A_WORD = "the process that the sweep's jobs are forked from has ended"
_PATIENCE_SECONDS = 0.5  # it may be importing torch


class ServerProcess(Protocol):
    """What is needed of a fork server's process, as :class:`subprocess.Popen` has it."""

    def poll(self) -> int | None:
        """The exit code, None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once there is one."""

    def kill(self) -> None:
        """SIGKILL, if it still runs."""


class ForkedProcess:
    """A fork server that a zygote forks for this process: no child of it, but as good as one.

    Args:
        answer: where the zygote says what became of the request.

    Attributes:
        refusal: why there never was such a process; None where there was, or may yet be.
    """

    def __init__(self, answer: socket.socket) -> None:
        self._answer = answer
        self._reader = MessageReader(answer)
        self._pidfd: int | None = None
        self._returncode: int | None = None
        self.refusal: str | None = None

    def poll(self) -> int | None:
        """The exit code, None while it runs or may yet be forked.

        Where its parent died before it could say, it is that of SIGKILL, which needs no reason.
        """
        for message in self._reader.read() if not self._reader.closed else ():
            if message["kind"] == "born":
                self._pidfd = self._reader.descriptors.pop()
            elif message["kind"] == "ended":
                self._returncode = message["returncode"]
            else:
                self.refusal = message["reason"]
        if self._reader.closed and self._returncode is None:
            if self._pidfd is None:
                self.refusal = self.refusal or _ENDED_WITHOUT_A_WORD
                self._returncode = -signal.SIGKILL
            elif _is_readable(self._pidfd, 0):
                self._returncode = -signal.SIGKILL
        return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once there is one.

        Raises:
            subprocess.TimeoutExpired: not within ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (returncode := self.poll()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired("fork server", timeout or 0.0)
            known_by = self._pidfd if self._reader.closed else self._answer.fileno()
            assert known_by is not None
            _is_readable(known_by, left)
        return returncode

    def kill(self) -> None:
        """SIGKILL; one that is not forked yet will find that it is no longer wanted."""
        if self.poll() is None and self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._reader.closed = True  # no need to be told how it ended

    def close(self) -> None:
        """Release what belongs to an ended process."""
        self._answer.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class ZygoteHandle:
    """The way to a zygote, for the process that started it and for what that forks.

    Args:
        process: the zygote.
        requests: where it takes requests.
        pump: what it prints.
        environ: the environment in which it imported torch.

    Attributes:
        environ: the environment for the fork servers.
        cwd: their working directory.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        requests: socket.socket,
        pump: OutputPump,
        environ: Mapping[str, str],
    ) -> None:
        self._process = process
        self._requests = requests
        self._pump = pump
        self._environ_of_torch = for_torch(environ)
        self._owner = os.getpid()
        self.environ = dict(environ)
        self.cwd = os.getcwd()

    def suits(self, environ: Mapping[str, str]) -> bool:
        """Whether torch would be imported in the same environment today."""
        return self._environ_of_torch == for_torch(shared_machine_environment(environ))

    def poll(self) -> int | None:
        """The zygote's exit code, None while it runs; for the process that started it."""
        return self._process.poll()

    @property
    def output(self) -> tuple[int, ...]:
        """Where its output can be read."""
        return tuple(stream.read_fd for stream in self._pump.streams)

    def read(self) -> str:
        """What it printed: warnings of torch's import, as a rule nothing."""
        data = b"".join(stream.read() for stream in self._pump.streams)
        return data.decode(errors="replace")

    def fork_server(
        self, trainer: TrainerRef, path: Sequence[str], descriptors: Sequence[int]
    ) -> ForkedProcess:
        """Ask for a server; what becomes of that, the :class:`ForkedProcess` will know.

        Args:
            trainer: what it shall have imported.
            path: the ``sys.path`` to import from.
            descriptors: its control and events sockets, stdout and stderr.
        """
        answer, answer_there = socket.socketpair()
        # one that cannot be asked lets go of its end of the answer without a word
        with answer_there, contextlib.suppress(OSError):
            given = [*descriptors, answer_there.fileno()]
            send_packet(self._requests, (trainer, tuple(path)), given)
        return ForkedProcess(answer)

    def close(self) -> None:
        """End the zygote, or in a fork of the process that started it only this way to it."""
        self._requests.close()
        if os.getpid() != self._owner:
            for stream in self._pump.streams:
                stream.close()
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_SECONDS)
        self._process.kill()
        self._process.wait()
        self._pump.close()


def for_torch(environ: Mapping[str, str]) -> dict[str, str]:
    """What of an environment a library may read; not what Hydra's doors and our sweeps add."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(("HYDRA_", "ROBUST_TRAIN_"))
    }


def _is_readable(descriptor: int, timeout_seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout_seconds is None else timeout_seconds * 1000))
