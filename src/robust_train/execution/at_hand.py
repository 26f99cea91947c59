"""A fork server that this process has ready before it is known what it will run."""

from __future__ import annotations

import os
from collections.abc import Sequence

from robust_train.execution.fork_server import ForkServer

_parked: list[ForkServer] = []
_keeps: list[bool] = []


def warm_up(libraries: Sequence[str]) -> None:
    """Start a server for this process's next job, and keep servers for later jobs from now on."""
    _keeps.append(True)
    park(ForkServer(libraries))


def take() -> ForkServer:
    """Return the server that was parked, if it is of use today, else a new one."""
    while _parked:
        server = _parked.pop()
        if server.is_alive and server.suits(os.environ):
            return server
        server.close()
    return ForkServer()


def park(server: ForkServer) -> None:
    """Keep a server for the next job of this process, or end it where none is expected."""
    if _keeps and not _parked:
        _parked.append(server)
    else:
        server.close()


def discard() -> None:
    """End the parked server; of a fork of this process, forget its parent's."""
    _keeps.clear()
    while _parked:
        _parked.pop().close()
