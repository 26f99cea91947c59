"""What the launcher and its fork server send each other, pickled by :mod:`multiprocessing`.

An :class:`.AttemptRequest` has an attempt forked; the descriptors that it holds open follow. A
number is a signal for the attempt, if there is one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from omegaconf import DictConfig

from robust_train.execution.stall import Standstill
from robust_train.execution.trainer_ref import TrainerRef

_MOST_DESCRIPTORS = 8


@dataclass(frozen=True)
class Import:
    """Import libraries; the answer is :class:`Imported`."""

    path: tuple[str, ...]  # the launcher's `sys.path`
    # modules; a name that proves to be another module's attribute is skipped
    libraries: tuple[str, ...]
    # one of robust-train's own, whose module is a library too; None for a user's
    trainer: TrainerRef | None = None
    cfg: DictConfig | None = None  # the composed config, which such a trainer checks


@dataclass(frozen=True)
class Imported:
    """The libraries are imported."""

    unsafe: dict[str, str]  # after which of them attempts must not be forked, and why
    refusal: str | None = None  # why the trainer does not accept the config, else None


@dataclass(frozen=True)
class Exited:
    """How an attempt's process ended."""

    pid: int | None  # its process id, None where the fork server died
    returncode: int  # as subprocess has it
    max_resident_bytes: int = 0  # the process's peak resident memory
    stalled: Standstill | None = None  # it was killed because it hung


def send_descriptors(connection: Connection, descriptors: Sequence[int]) -> None:
    """Send copies of open descriptors, perhaps of none."""
    with socket.socket(fileno=os.dup(connection.fileno())) as channel:
        socket.send_fds(channel, [b"\0"], list(descriptors))


def receive_descriptors(connection: Connection) -> list[int]:
    """Receive what :func:`send_descriptors` sends; programs that are started inherit it."""
    with socket.socket(fileno=os.dup(connection.fileno())) as channel:
        data, descriptors, _, _ = socket.recv_fds(channel, 1, _MOST_DESCRIPTORS)
    if not data:
        raise EOFError  # it was killed in between: nothing may start without its locks
    return list(descriptors)
