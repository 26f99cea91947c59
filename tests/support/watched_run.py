"""A run without a launcher that keeps what it is told."""

from pathlib import Path
from typing import Any

from disks import fill
from robust_train.attempt.run import Run, live_of


class WatchedRun(Run):
    """A run that keeps its events, and asks the trainer to stop when a step, or the checkpoint of a
    step, is reported. ``resume`` is the checkpoint to resume from."""

    def __init__(self, folder, *, resume=None, stop_at_step=None, stop_at_checkpoint=None, **more):
        self.events: list[dict[str, Any]] = []
        self.stop_at_step = stop_at_step
        self.stop_at_checkpoint = stop_at_checkpoint
        super().__init__(run_dir=folder, resume_checkpoint=resume, report=self._keep, **more)

    def _keep(self, event):
        content = event.as_json()
        self.events.append(content)
        if content["event"] == "checkpoint" and content["step"] == self.stop_at_checkpoint:
            live_of(self).stops.request_stop()

    def progress(self, step, *, total_steps=None, **scalars):
        was_told = super().progress(step, total_steps=total_steps, **scalars)
        if step == self.stop_at_step:
            live_of(self).stops.request_stop()
        return was_told

    def of(self, event: str) -> list[dict[str, Any]]:
        return [event_of_kind for event_of_kind in self.events if event_of_kind["event"] == event]

    @property
    def saved_at(self) -> dict[int, Path]:
        return {event["step"]: Path(event["path"]) for event in self.of("checkpoint")}

    @property
    def last_checkpoint(self) -> Path:
        return Path(self.of("checkpoint")[-1]["path"])


class RunOnAFullDisk(WatchedRun):
    """A run whose disk, which the file ``filler`` fills, has room once two saves have failed."""

    def __init__(self, folder, filler, **more):
        self._filler = filler
        self.failures = 0
        super().__init__(folder, **more)

    def _keep(self, event):
        super()._keep(event)
        if self.events[-1]["event"] == "checkpoint_failed":
            self.failures += 1
            if self.failures > 1:
                self._filler.unlink(missing_ok=True)


class FillsTheDisk(WatchedRun):
    """A run whose disk is full once it has taken the first checkpoint."""

    def _keep(self, event):
        super()._keep(event)
        if self.events[-1]["event"] == "checkpoint" and not (self.run_dir / "filler").exists():
            fill(self.run_dir)
