"""Defines the exceptions that a user of the package may catch or raise, and their exit codes.

Any process may raise them.
"""

from __future__ import annotations

import errno
import resource
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from robust_train.model.failure import Failure

# Slurm and submitit send these signals before they take a job off its node.
WARNING_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)

# Exit codes of a job.
EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2
EXIT_TRY_LATER = 75  # EX_TEMPFAIL in sysexits.h
EXIT_NO_PROGRESS = 76


class ConfigError(ValueError):
    """The user's configuration cannot be used. The message names the key, value and remedy."""

    exit_code = EXIT_BAD_CONFIG


class NotDoneError(Exception):
    """A command or a request was not carried out.

    The message is one line with the reason and the remedy.
    """

    exit_code = EXIT_FAILED


class NoProgressError(ConfigError):
    """Several launches of the run folder saved no new checkpoint, so no attempt was started."""

    exit_code = EXIT_NO_PROGRESS


class RunFolderUnavailableError(ConfigError):
    """The run folder cannot be used now, but may be usable later.

    Another host holds it, or its disk is full or unreachable.
    """

    exit_code = EXIT_TRY_LATER


class RunFolderLostError(ConfigError):
    """The run folder was removed and created again, and now belongs to another job.

    The job that raises this error ends.
    """


class LimitReachedError(ConfigError):
    """The system refuses this process another file, process or thread."""

    exit_code = EXIT_TRY_LATER


# `threading` raises an error with this message, and does not pass on the system's error number.
_NO_THREAD = "can't start new thread"


def find_limit_error(error: BaseException) -> LimitReachedError | None:
    """Return the error to raise if files or processes have run out, or None for another error."""
    number = None
    if isinstance(error, OSError):
        number = error.errno
    elif isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        number = errno.EAGAIN
    if number == errno.ENFILE:
        return LimitReachedError("too many files are open on this machine; try later")
    if number == errno.EMFILE:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return LimitReachedError(
            f"too many open files: the limit of a process is {most}; raise it: ulimit -n 1024"
        )
    if number == errno.EAGAIN:
        most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        limit = "its limit" if most == resource.RLIM_INFINITY else f"ulimit -u is {most}"
        return LimitReachedError(
            "no other process or thread can be started, because this user or container has "
            f"reached its maximum ({limit}); end some processes, or raise the limit"
        )
    return None


# Disk errors that may have passed by the next try.
_PASSING = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENOTCONN,
    errno.EREMOTEIO,
    errno.EBUSY,
)


def make_folder_error(problem: str, error: OSError) -> ConfigError:
    """Return the error to raise for a run folder that ``error`` makes unusable.

    If the disk problem may pass, the error asks to try the same command later.
    """
    if error.errno in _PASSING:
        return RunFolderUnavailableError(f"{problem}; the same command may succeed later")
    return ConfigError(problem)


class UserError(RuntimeError):
    """Raised by a trainer for a mistake of its user. The message is shown without a traceback."""


class TrainingStopped(KeyboardInterrupt):
    """Raised by a trainer that stopped on request, after its last checkpoint.

    It derives from KeyboardInterrupt, so a trainer's ``except Exception`` does not swallow it.
    """


class NoDeviceError(RuntimeError):
    """No device became free in time, and the CPU is not allowed."""

    exit_code = EXIT_TRY_LATER


class TrainerFailedError(RuntimeError):
    """The trainer failed in a way that is not retried. The message is its traceback."""

    exit_code = EXIT_FAILED


class AttemptsExhaustedError(RuntimeError):
    """Memory ran out, and no remedy is left to try. The message lists the attempts."""

    exit_code = EXIT_FAILED


class JobInterrupted(KeyboardInterrupt):
    """The signal ``signum`` stopped the job."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.signum = signum

    def __reduce__(self) -> tuple[type[JobInterrupted], tuple[int]]:
        """Pickle the exception, so that a worker can send it to the process that submitted it."""
        return JobInterrupted, (self.signum,)

    @property
    def exit_code(self) -> int:
        """128 + signal, as in shells: 130 for Ctrl-C, 143 for SIGTERM and for preemption."""
        if self.signum in WARNING_SIGNALS:
            return 128 + signal.SIGTERM
        return 128 + self.signum


class TrainingDiverged(RuntimeError):  # noqa: N818 - an event
    """Raised in a trainer whose training has diverged. Its ``failure`` names the step."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return self.failure.message


class RankFailure(RuntimeError):  # noqa: N818 - it says where an error began
    """Raised on every rank when one rank cannot continue, after all ranks have agreed on it.

    Attributes:
        rank: the rank that failed.
        failure: its failure.
        is_elsewhere: whether ``rank`` is not the process that raises this.
    """

    def __init__(self, rank: int, failure: Failure, is_elsewhere: bool) -> None:
        super().__init__(rank, failure, is_elsewhere)
        self.rank = rank
        self.failure = failure
        self.is_elsewhere = is_elsewhere

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.failure.message}"
