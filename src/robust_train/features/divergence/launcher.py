"""Excludes checkpoints that were written after training diverged, in the launcher."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from robust_train.features.divergence.record import DivergedFinding
from robust_train.folder.checkpoints import spoil
from robust_train.launcher.hooks import History, InLauncher
from robust_train.model.attempt import Attempt


class Divergence(InLauncher):
    """Marks the checkpoints that an attempt saved after it diverged."""

    def evidence(self, attempt: Attempt, history: History) -> Attempt:
        """Mark the checkpoints after the last good step as spoiled. They do not count as progress.

        Another rank may have saved a checkpoint after the diverged rank looked for one, so the
        launcher looks on the disk again for a checkpoint to resume from.
        """
        failure = attempt.failure
        steps = attempt.evidence.of(DivergedFinding)
        if failure is None or steps.bad_step is None:
            return attempt
        if steps.good_step is not None:
            folder = self.job.plan.run_dir / "checkpoints"
            with contextlib.suppress(OSError):
                spoil(folder, self.job.beginning.job, steps.good_step)
        has_checkpoint = self.job.look_for_checkpoint() is not None
        evidence = replace(failure.evidence, has_checkpoint=has_checkpoint)
        attempt = replace(attempt, failure=replace(failure, evidence=evidence))
        good = steps.good_step or 0
        if attempt.saved_step is None or attempt.saved_step <= good:
            return attempt
        return replace(attempt, saved_step=good, checkpoint=None)
