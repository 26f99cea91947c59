"""Computes whether the memory of an ended attempt was stable, from its samples, in the launcher."""

from __future__ import annotations

from robust_train.features.memory_samples.record import StabilityNote
from robust_train.folder.memory_samples import attempt_stability
from robust_train.launcher.hooks import History, InLauncher, compute_or_warn
from robust_train.model.attempt import Attempt
from robust_train.model.json import as_json


class MemorySamples(InLauncher):
    """Adds the stability of memory to each attempt that has ended."""

    def evidence(self, attempt: Attempt, history: History) -> Attempt:
        """Add the stability of its memory to the attempt, None without samples."""
        stability = compute_or_warn(
            "the stability of memory",
            lambda: attempt_stability(self.job.plan.run_dir, attempt.number),
        )
        return attempt.having(StabilityNote(as_json(stability)))
