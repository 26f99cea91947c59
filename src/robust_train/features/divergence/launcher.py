"""Checkpoints written after training diverged are not resumed from."""

from __future__ import annotations

import contextlib

from robust_train.folder.checkpoints import spoil
from robust_train.launcher.hooks import History, InLauncher
from robust_train.model.attempt import Attempt


class Divergence(InLauncher):
    """Marks the checkpoints of an attempt that diverged."""

    def evidence(self, attempt: Attempt, history: History) -> Attempt:
        """Mark what was saved after the last good step.

        Another rank may have recorded a checkpoint after the rank that diverged had looked.
        """
        evidence = attempt.evidence
        if evidence.bad_step is not None and evidence.good_step is not None:
            folder = self.job.plan.run_dir / "checkpoints"
            with contextlib.suppress(OSError):
                spoil(folder, self.job.beginning.job, evidence.good_step)
        return attempt
