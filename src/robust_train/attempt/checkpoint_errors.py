"""Errors of checkpoints, and a function that raises one rank's error on all ranks.

The other checkpoint modules and the integrations use it in the process that trains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from robust_train.failures import classify_failure
from robust_train.model.errors import RankFailure
from robust_train.model.failure import FailureKind
from robust_train.readable import first_line


class UnusableError(Exception):
    """A checkpoint is damaged."""


class RefusedError(UnusableError):
    """A checkpoint is intact, but another trainer or another version of torch saved it."""


def is_disk_error(error: BaseException) -> bool:
    """Return whether a save failed because of the disk, whichever library raised the error."""
    return isinstance(error, OSError) or classify_failure(error).kind is FailureKind.DISK_FULL


def run_on_all_ranks(act: Callable[[], Any], gather: Callable[[Any], list[Any]]) -> Any:
    """Call ``act`` and return its result. Every rank must call this function.

    If ``act`` fails on a rank because of the disk, memory or the checkpoint, all ranks raise the
    error of the first such rank. Otherwise the other ranks would wait for it in the next
    collective.

    Args:
        act: the function to call.
        gather: takes this rank's value, and returns the values of all ranks.

    Raises:
        RankFailure: ``act`` succeeded here but failed on another rank, and neither the disk nor the
            checkpoint is the reason.
    """
    result = None
    error = None
    try:
        result = act()
    except (OSError, MemoryError, RuntimeError, UnusableError) as raised:
        error = raised
    except Exception as raised:  # safetensors raises its own exception class
        if not is_disk_error(raised):
            raise
        error = OSError(first_line(raised))
    for rank, rank_error in enumerate(gather(error)):
        if rank_error is None:
            continue
        if error is None and not isinstance(rank_error, (OSError, UnusableError)):
            failure = classify_failure(rank_error)
            raise RankFailure(rank, failure, is_elsewhere=True) from rank_error
        if error is not None and rank_error is not error:
            # The gathered error has no traceback; this rank's error has one.
            rank_error.__cause__ = error
        raise rank_error
    return result
