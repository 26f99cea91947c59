"""What this process has ready before it is known what it will run: a fork server, or a zygote."""

from __future__ import annotations

import os

from robust_train.execution.environment import shared_machine_environment
from robust_train.execution.fork_server import ForkServer, ServerDied
from robust_train.execution.request import TrainerRef
from robust_train.execution.zygote_handle import ZygoteHandle

_COMMAND = "robust_train.script.trainer.train"

_parked: ForkServer | None = None
_zygote: ZygoteHandle | None = None


def warm_up(*, warm: bool = True) -> None:
    """Start a fork server for this process before it is known what it will run.

    Where there is a zygote to fork it from, that can wait until it is known.

    Args:
        warm: have it import torch, for which a script (``trainer=command``) has no use.
    """
    if _zygote is None:
        park(ForkServer(warm=warm))


def take(trainer: TrainerRef) -> ForkServer:
    """The server that was parked, or a new one, which is a fork of the zygote if there is one."""
    global _parked
    server, _parked = _parked, None
    if server is not None and server.is_alive:
        return server
    if trainer.path == _COMMAND:  # a script's own process imports what it needs
        return ForkServer(warm=False)
    return ForkServer(forked=None if _zygote is None else (_zygote, trainer))


def park(server: ForkServer) -> None:
    """Keep a server for the next job of this process (a sweep's next one)."""
    global _parked
    _discard_parked()
    _parked = server


def share() -> None:
    """Have a zygote from which the forks of this process get their servers.

    A parked server becomes the zygote if nothing was imported in it but torch.
    """
    global _parked, _zygote
    if _zygote is None or _zygote.poll() is not None or not _zygote.suits(os.environ):
        _discard_zygote()
        if _parked is not None and not _parked.suits(os.environ):
            _discard_parked()
        server, _parked = _parked or ForkServer(), None
        try:
            _zygote = server.share()
        except ServerDied:  # each job's own server will tell why
            server.close()
    if _zygote is not None:
        _zygote.environ, _zygote.cwd = shared_machine_environment(os.environ), os.getcwd()


def zygote_output() -> tuple[int, ...]:
    """Descriptors that become readable when the zygote prints; :func:`watch_zygote` reads them."""
    return () if _zygote is None else _zygote.output


def watch_zygote() -> tuple[str, int | None]:
    """What the zygote printed, and how it ended if it did; it is not asked any more then."""
    if _zygote is None:
        return "", None
    printed, returncode = _zygote.read(), _zygote.poll()
    if returncode is not None:
        _discard_zygote()
    return printed, returncode


def discard() -> None:
    """End the parked server and the zygote; in a fork of this process, do without its zygote."""
    _discard_parked()
    _discard_zygote()


def _discard_parked() -> None:
    global _parked
    server, _parked = _parked, None
    if server is not None:
        server.close()


def _discard_zygote() -> None:
    global _zygote
    zygote, _zygote = _zygote, None
    if zygote is not None:
        zygote.close()
