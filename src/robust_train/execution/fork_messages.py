"""What the launcher and its fork server send each other over the control socket."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig

from robust_train.execution.request import AttemptRequest
from robust_train.execution.trainer_ref import TrainerRef


@dataclass(frozen=True)
class Import:
    """Import libraries; the answer is :class:`Imported` or :class:`Refused`.

    Attributes:
        path: the launcher's ``sys.path``.
        libraries: modules, or ``module:attribute`` where the attribute may be a submodule.
        trainer: one of robust-train's own, whose module is a library too; None for a user's.
        cfg: the composed config, which such a trainer checks.
    """

    path: tuple[str, ...]
    libraries: tuple[str, ...]
    trainer: TrainerRef | None = None
    cfg: DictConfig | None = None


@dataclass(frozen=True)
class Fork:
    """Run an attempt in a child, which keeps open the descriptors that come with the message."""

    request: AttemptRequest


@dataclass(frozen=True)
class Signal:
    """Send a signal to the attempt, if there is one."""

    signum: int


@dataclass(frozen=True)
class Imported:
    """The libraries are imported; ``unsafe``: after which attempts must not be forked, and why."""

    unsafe: dict[str, str]


@dataclass(frozen=True)
class Refused:
    """The trainer does not accept the configuration."""

    reason: str


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
