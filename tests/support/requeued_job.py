"""A job as people hand it to submitit: a callable whose ``checkpoint`` submits it again."""

from pathlib import Path


class RequeuedJob:
    def __call__(self, run_dir: Path):
        from robust_train import launch

        return launch("trainers.stops_once_then_completes", {}, run_dir=run_dir).result

    def checkpoint(self, run_dir: Path):
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, run_dir)
