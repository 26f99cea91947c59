"""What this process runs under Hydra, and how it ends.

There is one :data:`program`, because Hydra itself makes the callbacks and calls the task.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from robust_train.model.errors import ConfigError

if TYPE_CHECKING:
    from robust_train.sweep.current import CurrentJob
    from robust_train.sweep.session import Sweep


@dataclass
class ProgramState:
    """What this process runs, one thing at a time, and how it ends.

    Attributes:
        sweep: the sweep that runs.
        job: the job that Hydra has entered; None without our callback.
        exit_code: that of the first job that did not complete, else 0.
        sets_exit_code: whether a command of ours ends the process with ``exit_code``.
        check: raises ConfigError if a job must not start.
    """

    sweep: Sweep | None = None
    job: CurrentJob | None = None
    exit_code: int = 0
    sets_exit_code: bool = False
    check: Callable[[DictConfig], None] | None = None
    _refusals: set[str] = field(default_factory=set)

    def note(self, exit_code: int) -> None:
        """Record the exit code of a job."""
        self.exit_code = self.exit_code or exit_code

    def job_ended(self, status: str, exit_code: int, reason: str | None) -> None:
        """Record the end of the job that Hydra has entered, if it did not complete."""
        self.note(exit_code)
        if self.job is not None:
            self.job.ended(status, exit_code, reason=reason)

    def refuse(self, error: ConfigError) -> None:
        """Print why a job was refused, once for the jobs of a sweep that share the mistake."""
        message = str(error)
        if message not in self._refusals:
            self._refusals.add(message)
            print(message, file=sys.stderr)


program = ProgramState()
