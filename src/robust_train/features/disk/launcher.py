"""Recognises a disk that ended an attempt, and waits until a full disk has space again."""

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
_LINE_SECONDS = 60.0


class Disk(InLauncher):
    """Adds the disk's part to the evidence of a failure, and waits for space before a retry."""

    def evidence(self, attempt: Attempt, history: History) -> Attempt:
        """Return the attempt with the disk's evidence of its failure.

        If the file system became read-only because of an error, an attempt that could not write
        there failed because of the disk. Otherwise that is the user's mistake. A checkpoint that
        its script could not read is passed over from now on.
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
        """Return the failure with the folder that is full, unless its message has it: torch.save
        names no file, and what a program writes need not be in the run folder."""
        if full_folder(paths_in(failure.message)) is not None:
            return failure
        plan = self.job.plan
        words = (word.rpartition("=")[2] for word in plan.config.trainer.argv or ())
        named = [Path(word).absolute() for word in words if "/" in word]
        places = [
            plan.run_dir,
            *named,
            Path.cwd(),
            Path(tempfile.gettempdir()),
            Path.home() / ".cache",
        ]
        folder = full_folder(places)
        if folder is None:
            return failure
        message = f"{failure.message}; no space is left in {folder}"
        return replace(failure, message=message)

    def _with_damaged(self, attempt: Attempt, failure: Failure) -> Failure:
        """Return the failure with whether a checkpoint exists before an unreadable checkpoint."""
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
        next_line = 0.0
        what_follows = "training continues"
        if self.job.checkpoint is None:
            what_follows = "training begins again, for no checkpoint is known"
        needed_bytes = failure.evidence.requested_bytes or 0
        while problem := why_full(self.job.plan.run_dir, failure.message, needed_bytes):
            if time.monotonic() >= next_line:
                next_line = time.monotonic() + _LINE_SECONDS
                log.warning("%s: waiting for space, then %s", problem, what_follows)
            self.job.sleep(_POLL_SECONDS)
