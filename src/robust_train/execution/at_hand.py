"""A fork server that this process has ready before it is known what it will run."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from robust_train.execution.fork_server import ForkServer

_lock = threading.Lock()
_parked: list[ForkServer] = []
_keeps: list[bool] = []


def warm_up(libraries: Sequence[str]) -> None:
    """Start a server for this process's next job, and keep servers for later jobs from now on."""
    _keeps.append(True)
    park(ForkServer(libraries))


def take() -> ForkServer:
    """Return the server that was parked, if it is of use today, else a new one."""
    with _lock:
        server = _parked.pop() if _parked else None
    if server is not None and server.is_alive and server.suits(os.environ):
        return server
    if server is not None:
        server.close()
    return ForkServer()


def park(server: ForkServer) -> None:
    """Keep a server for the next job of this process, or end it where none is expected."""
    with _lock:
        old = _parked[:]
        _parked.clear()
        if _keeps:
            _parked.append(server)
        else:
            old.append(server)
    for one in old:
        one.close()


def discard() -> None:
    """End the parked server; of a fork of this process, forget its parent's."""
    _keeps.clear()
    with _lock:
        old = _parked[:]
        _parked.clear()
    for server in old:
        server.close()
