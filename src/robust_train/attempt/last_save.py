"""Saves the state at the end of training, and waits for space if the disk is full.

The runner, the integrations and the built-in trainer call it in the process that trains. A
checkpoint during training is skipped if the disk is full. Without the last checkpoint, another
attempt would repeat the last steps.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from robust_train.failures import classify_failure
from robust_train.folder.checkpoint_writing import CheckpointError
from robust_train.folder.full_disk import why_full
from robust_train.host.linux import sleep_with_ticks
from robust_train.model.errors import TrainingStopped
from robust_train.model.events import CheckpointFailed
from robust_train.model.failure import FailureKind
from robust_train.readable import memory

if TYPE_CHECKING:
    from robust_train.attempt.live import LiveAttempt

log = logging.getLogger("robust_train")

T = TypeVar("T")

PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds between two tries if a save fails although the disk reports free space."""
_CHECK_SECONDS = 1.0
_LOG_SECONDS = 60.0


def write_when_there_is_room(live: LiveAttempt, write: Callable[[], T]) -> T:
    """Call ``write``, repeat it while the disk is full, and return its result.

    Raises:
        CheckpointError: the disk has room but fails, or the reason is not the disk.
        TrainingStopped: a stop was requested while the disk was full.
    """
    pauses = list(PAUSES)
    while True:
        try:
            return write()
        except CheckpointError as error:
            if not is_of_full_disk(error) or not pauses:
                raise
            failed = error
        live.reports.send(CheckpointFailed(str(failed)))
        _sleep(live, pauses.pop(0))
        if _wait_for_room(live, failed):
            pauses = list(PAUSES)


def is_of_full_disk(error: CheckpointError) -> bool:
    """Return whether a checkpoint could not be saved because the disk is full or fails."""
    return classify_failure(error).kind is FailureKind.DISK_FULL


def save_result(live: LiveAttempt, write: Callable[[], T]) -> T:
    """Call ``write``, which writes the weights at the end of training, and return its result.

    The weights are the job's result, so a checkpoint that failed earlier need not be written again.
    """
    result = write_when_there_is_room(live, write)
    if live.saving.owed is not None:
        log.warning("the last checkpoint is not saved, but the trained weights are")
        live.saving.settle()
    return result


def save_owed_checkpoint(live: LiveAttempt) -> None:
    """Save the last checkpoint of finished training, if the disk did not take it. An attempt that
    was asked to stop ends without it.

    Raises:
        CheckpointError: it cannot be saved, and the last steps are repeated from an earlier
            checkpoint.
        TrainingStopped: a stop was requested while the disk was full.
    """
    unsaved = live.saving.owed
    if unsaved is None or live.stops.has_stopped_trainer or not is_of_full_disk(unsaved):
        return
    try:
        if write_when_there_is_room(live, live.saves.write_again):
            return
    except CheckpointError as error:
        unsaved = error
    if live.saves.has_checkpoint:
        raise unsaved
    log.warning(
        "training is over, and no checkpoint of it could be saved (%s); it is not trained again",
        unsaved,
    )


def save_last_again(live: LiveAttempt, save: Callable[[], object]) -> None:
    """Let a framework save the final state of training again, if its last checkpoint found a full
    disk. The framework has no copy of that checkpoint, and may change the weights next.

    If the reason is not a full disk, the checkpoint stays owed. Several ranks save together.

    Raises:
        TrainingStopped: a stop was requested while the disk was full.
    """
    if live.world_size > 1:
        _save_together(live, save)
        return
    unsaved = live.saving.owed
    if unsaved is None or not is_of_full_disk(unsaved):
        return
    with contextlib.suppress(CheckpointError):
        write_when_there_is_room(live, lambda: _save_and_finish(live, save))


def settle_by_best(live: LiveAttempt) -> None:
    """Drop an owed last checkpoint after a framework has loaded its best checkpoint, which is on
    the disk."""
    if live.saving.owed is not None:
        log.warning("the last checkpoint is not saved, but the best is, and is loaded")
        live.saving.settle()


def _save_and_finish(live: LiveAttempt, save: Callable[[], object]) -> None:
    """Save, and wait until the checkpoint is written. Raises CheckpointError if that fails."""
    with live.saves.raising():
        save()
        live.saves.finish()


def _save_together(live: LiveAttempt, save: Callable[[], object]) -> None:
    """Save on all ranks once the disk has room. Rank 0 decides, because a checkpoint that was
    written in the background failed on rank 0 only."""
    from robust_train.step.ranks import of_all_ranks

    pauses = list(PAUSES)
    failed = live.saving.owed
    while of_all_ranks(failed is not None and is_of_full_disk(failed) and bool(pauses))[0]:
        if _wait_together(live, failed, pauses.pop(0)):
            pauses = list(PAUSES)
        failed = None
        try:
            _save_and_finish(live, save)
        except CheckpointError as error:
            failed = error


def _wait_together(live: LiveAttempt, failed: CheckpointError | None, pause: float) -> bool:
    """Wait on all ranks for a pause, and then until rank 0 sees that the disk has room. Returns
    whether the disk was full. The ranks meet once per second, so no collective times out."""
    from robust_train.step.ranks import of_all_ranks

    until = time.monotonic() + pause
    next_report = 0.0
    problem: str | None = None
    was_full = False
    while of_all_ranks(bool(problem) or time.monotonic() < until)[0]:
        # A stop is due at the same number of questions on all ranks, so each rank asks once per
        # round.
        _end_if_stopped(live)
        time.sleep(min(_CHECK_SECONDS, pause))
        if not live.is_main or failed is None:
            continue
        problem = why_full(live.run_dir, str(failed), failed.bytes)
        was_full |= bool(problem)
        if problem and time.monotonic() >= next_report:
            next_report = time.monotonic() + _LOG_SECONDS
            _report_wait(live, problem, failed)
    return bool(of_all_ranks(was_full)[0])


def _wait_for_room(live: LiveAttempt, failed: CheckpointError) -> bool:
    """Wait until the disk has room for a checkpoint that could not be written, and return whether
    the disk was full."""
    was_full = False
    next_report = 0.0
    while problem := why_full(live.run_dir, str(failed), failed.bytes):
        was_full = True
        if time.monotonic() >= next_report:
            next_report = time.monotonic() + _LOG_SECONDS
            _report_wait(live, problem, failed)
        _sleep(live, _CHECK_SECONDS)
    return was_full


def _report_wait(live: LiveAttempt, problem: str, failed: CheckpointError | None) -> None:
    needed = "space is"
    if failed is not None and failed.bytes:
        needed = f"{memory(failed.bytes)} are"
    log.warning("training is over; %s: %s needed to save it", problem, needed)
    # A report is a sign of life, so the attempt does not count as hanging.
    live.reports.send(CheckpointFailed(problem))


def _sleep(live: LiveAttempt, seconds: float) -> None:
    """Wait. Raises TrainingStopped if a stop is requested."""
    sleep_with_ticks(seconds, lambda: _end_if_stopped(live))


def _end_if_stopped(live: LiveAttempt) -> None:
    if live.should_stop():
        raise TrainingStopped("stopped while it waited for space on the disk")
