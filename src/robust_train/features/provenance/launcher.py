"""In the launcher, records a job's environment and warns of changes since its last launch."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace

from robust_train.features.provenance.environment import (
    Provenance,
    describe_changes,
    find_variables_read,
)
from robust_train.folder.hydra_state import composed_files
from robust_train.folder.provenance import changed_files, config_digests, read_environment
from robust_train.folder.resume_command import command
from robust_train.folder.state import Summary
from robust_train.launcher.hooks import InLauncher, JobView
from robust_train.model.attempt import Attempt
from robust_train.model.events import DeviceAcquired, Event, JobStarted, Json

log = logging.getLogger("robust_train")


class RecordsProvenance(InLauncher):
    """Warns of changes when a job starts, and writes ``environment.json`` once it has a device."""

    def __init__(self, job: JobView) -> None:
        super().__init__(job)
        self._record: Provenance | None = None
        # The variables that the command mentions, and the digests of the config files.
        self._facts: dict[str, Json] = {}

    def event(self, event: Event, attempt: Attempt | None) -> None:
        """Warn of changes when the job starts, and write the record once its device is known."""
        if isinstance(event, JobStarted):
            self._warn_of_changes()
        elif isinstance(event, DeviceAcquired):
            gpus = tuple(zip(event.gpu_names, event.gpu_uuids, strict=True))
            self._record = Provenance(self.job.plan.run_dir, gpus, self._facts)

    def _warn_of_changes(self) -> None:
        """Warn of variables and config files that changed since the last launch."""
        plan = self.job.plan
        beginning = self.job.beginning
        trainer = plan.config.trainer
        words = [*command(), *(trainer.argv or ()), *trainer.resume_argv]
        variables = find_variables_read(words, trainer.cwd or ".", os.environ)
        arguments = trainer.argv if trainer.argv else sys.argv[1:]
        digests = config_digests(composed_files(), arguments)
        before = read_environment(plan.run_dir)
        changes = describe_changes(before, beginning.job, variables)
        if changes:
            log.warning(
                "the command reads variables that have changed since the last launch: %s", changes
            )
        files = changed_files(before, digests)
        if files and beginning.checkpoint is not None:
            log.warning(
                "this launch uses the current config; changed since the last launch: %s",
                ", ".join(files),
            )
        self._facts = {
            "job": beginning.job,
            "command_variables": variables,
            "config_files": digests,
        }

    def end(self, summary: Summary) -> Summary:
        """Return the summary with a short form of the record added."""
        if self._record is None:
            return summary
        return replace(summary, environment=self._record.read_summary())
