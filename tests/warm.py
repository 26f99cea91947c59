"""Commands that begin as forks of one interpreter that has imported what the launcher imports.

What follows is the real command: its own process, arguments, environment, output and signals; only
the half of a second for imports and for Hydra's first composition is paid once a worker. It becomes
a child of the test's process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_REQUEST_BYTES = 1 << 17
_IMPORTS = ("robust_train.cli.jobs", "robust_train.report.html", "robust_train.execution.at_hand")

_to_server: list[socket.socket] = []


class Command:
    """A command that was started, with the methods of :class:`subprocess.Popen` that tests use."""

    def __init__(self, args: list[str], pid: int, stdout: IO[str], stderr: IO[str]) -> None:
        self.args, self.pid, self.stdout, self.stderr = args, pid, stdout, stderr
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return the exit code."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read all that it prints until it ends."""
        texts = {}
        streams = (self.stdout, self.stderr)
        readers = [
            threading.Thread(target=lambda s=stream: texts.update({s: s.read()}), daemon=True)
            for stream in streams
            if not stream.closed
        ]
        for reader in readers:
            reader.start()
        deadline = None if timeout is None else time.monotonic() + timeout
        for reader in readers:
            reader.join(None if deadline is None else max(deadline - time.monotonic(), 0))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(None if deadline is None else max(deadline - time.monotonic(), 0.1))
        for stream in streams:
            stream.close()
        return texts.get(self.stdout, ""), texts.get(self.stderr, "")

    def send_signal(self, signum: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def start(argv: list[str], cwd: Path, environ: Mapping[str, str]) -> Command:
    """Start ``python argv…`` with these; the caller waits for it."""
    server = _server()
    (stdout, stdout_there), (stderr, stderr_there) = os.pipe(), os.pipe()
    request = json.dumps({"argv": argv, "cwd": str(cwd), "environ": dict(environ)}).encode()
    assert len(request) < _REQUEST_BYTES
    with _adopting_orphans():
        socket.send_fds(server, [request], [stdout_there, stderr_there])
        pid = int(server.recv(64))
        assert server.recv(64) == b"it is yours"
    os.close(stdout_there)
    os.close(stderr_there)
    return Command(argv, pid, os.fdopen(stdout), os.fdopen(stderr))


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _server() -> socket.socket:
    if not _to_server:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        hidden = ("CUDA_", "PYTORCH_", "HYDRA_", "NVIDIA_", "SIMULATED_")
        environ = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
        source = Path(__file__).resolve().parents[1] / "src"
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env={**environ, "PYTHONPATH": str(source)},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        _to_server.append(ours)
        atexit.register(lambda: (ours.close(), process.wait()))
    return _to_server[0]


def _serve(connection: socket.socket) -> None:
    """Fork for each request; return in the fork, which is to be the command."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 2)
        if not data:
            os._exit(0)
        between = os.fork()
        if not between:
            command = os.fork()
            if not command:
                connection.close()
                _become(json.loads(data), descriptors)
                return
            connection.send(str(command).encode())
            os._exit(0)  # so the command is an orphan, which the test's process adopts
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)
        connection.send(b"it is yours")


def _become(request: dict, descriptors: list[int]) -> None:
    for number, descriptor in enumerate(descriptors, start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    # the dynamic loader has read this variable already
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        library = Path(folder) / "libnvidia-ml.so.1"
        if folder and library.exists():
            ctypes.CDLL(str(library))
    sys.argv = request["argv"]
    paths = os.environ.get("PYTHONPATH", "").split(":")
    sys.path[:0] = [sys.argv[0].rpartition("/")[0], *filter(None, paths)]


def _warm_up() -> None:
    from importlib import import_module

    from hydra import compose, initialize_config_module

    for name in _IMPORTS:
        import_module(name)
    with initialize_config_module("robust_train.configs", version_base="1.3"):
        compose("robust", return_hydra_config=True)


if __name__ == "__main__":
    del sys.path[0]  # this folder
    _warm_up()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_path(sys.argv[0], run_name="__main__")
