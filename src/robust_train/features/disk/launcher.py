"""Recognises that a disk ended an attempt, and waits until a full disk has space again, in the
launcher."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from robust_train.folder.checkpoints import pass_over_damaged
from robust_train.folder.full_disk import full_folder, is_read_only, paths_in, why_full
from robust_train.launcher.hooks import History, InLauncher
from robust_train.model.attempt import Attempt
from robust_train.model.failure import Clue, Failure, FailureKind
from robust_train.model.spec import Retry

log = logging.getLogger("robust_train")

_POLL_SECONDS = 5.0
_LOG_SECONDS = 60.0


class Disk(InLauncher):
    """Adds the disk's state to the evidence of a failure, and waits for space before a retry."""

    def evidence(self, attempt: Attempt, history: History) -> Attempt:
        """Return the attempt with the disk's state in its failure.

        An attempt that could not write to a read-only file system failed because of the disk if an
        error made the file system read-only. Otherwise the user chose a wrong folder. A checkpoint
        that the script could not read is skipped from now on.
        """
        failure = attempt.failure
        if failure is None:
            return attempt
        run_dir = self.job.plan.run_dir
        if os.strerror(errno.EROFS) in failure.message and is_read_only(run_dir):
            failure = replace(failure, kind=FailureKind.DISK_FULL)
        elif failure.kind is FailureKind.DISK_FULL:
            failure = self._with_folder(failure)
        else:
            failure = self._with_damaged(attempt, failure)
        return replace(attempt, failure=failure)

    def _with_folder(self, failure: Failure) -> Failure:
        """Return the failure with the name of the full folder, unless its message names it.

        torch.save names no file, and a program may write outside of the run folder. So folders in
        its command, and usual folders, are checked too.
        """
        if full_folder(paths_in(failure.message)) is not None:
            return failure
        plan = self.job.plan
        folders = [plan.run_dir]
        for word in plan.config.trainer.argv or ():
            value = word.rpartition("=")[2]
            if "/" in value:
                folders.append(Path(value).absolute())
        folders += [Path.cwd(), Path(tempfile.gettempdir()), Path.home() / ".cache"]
        folder = full_folder(folders)
        if folder is None:
            return failure
        message = f"{failure.message}; no space is left in {folder}"
        return replace(failure, message=message)

    def _with_damaged(self, attempt: Attempt, failure: Failure) -> Failure:
        """Skip a checkpoint that the script could not read, and return the failure with whether an
        earlier checkpoint exists. Other failures stay unchanged."""
        path = attempt.checkpoint or attempt.resumed_from
        lacks_file = f"No such file or directory: '{path}/" in failure.message
        is_damaged = lacks_file or failure.evidence.clue == Clue.DAMAGED
        has_begun = attempt.end_step is not None or attempt.saves > 1
        if path is None or not is_damaged or attempt.script is None or has_begun:
            return failure
        has_earlier = pass_over_damaged(
            self.job.plan.run_dir / "checkpoints",
            self.job.beginning.job,
            Path(path),
            lacks_file=lacks_file,
        )
        if has_earlier:
            has_earlier = self.job.look_for_checkpoint() is not None
        evidence = replace(failure.evidence, has_checkpoint=has_earlier, clue=Clue.DAMAGED)
        return replace(failure, evidence=evidence)

    def before(self, retry: Retry) -> None:
        """Wait for space if a full disk ended the last attempt."""
        last = self.job.state.attempt
        failure = None if last is None else last.failure
        if failure is None or failure.kind is not FailureKind.DISK_FULL:
            return
        next_log = 0.0
        what_follows = "training continues"
        if self.job.checkpoint is None:
            what_follows = "training starts from the beginning, because no checkpoint is known"
        needed_bytes = failure.evidence.requested_bytes or 0
        while problem := why_full(self.job.plan.run_dir, failure.message, needed_bytes):
            if time.monotonic() >= next_log:
                next_log = time.monotonic() + _LOG_SECONDS
                log.warning("%s: waiting for space, then %s", problem, what_follows)
            self.job.sleep(_POLL_SECONDS)
