"""Run folders written event by event, without any job."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from attempts import gpu
from robust_train.failures.advice import advice_for
from robust_train.model.attempt import Attempt, AttemptEnded
from robust_train.model.events import (
    AttemptStarted,
    CheckpointSaved,
    DeviceAcquired,
    Event,
    JobEnded,
    JobStarted,
    Progress,
    TrainingStarted,
)
from robust_train.model.failure import Evidence, Failure, FailureKind
from robust_train.model.spec import AttemptSpec
from robust_train.readable import GIB
from robust_train.report.facts import Story
from robust_train.report.sources import read_sources
from robust_train.report.story import story_of
from robust_train.sweep.record import SweepJob, SweepTable, read_row

STARTED = JobStarted("/run", "trainers.train")
COMPLETED = JobEnded("completed")
OOM = {
    "outcome": "device_oom",
    "message": "CUDA out of memory.",
    "action": "halve_batch",
    "reason": "out of memory: micro-batch 64 → 32",
}
HOSTILE = "</script><script>console.error('got in')</script><img src=x onerror=alert(1)>\u2028"
FIGURES = {"requested_bytes": 2 * GIB, "free_bytes": GIB, "total_bytes": 16 * GIB}


class Journal:
    """Writes a run folder event by event; ``at`` is the time of the next one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.at = 1_795_000_000.0
        self.attempts: dict[int, Attempt] = {}

    def __call__(self, seconds: float, event: Event, attempt: int | None = None) -> None:
        """Write an event that happens ``seconds`` seconds after the event before it."""
        self.at += seconds
        if attempt in self.attempts:
            self.attempts[attempt] = self.attempts[attempt].after(event)
        content = {"time": self.at, "attempt": attempt, **event.as_json()}
        with (self.folder / "journal.jsonl").open("a") as file:
            file.write(json.dumps(content) + "\n")

    def start(self, number: int, *, device: str = "cuda:0", size: int = 64) -> None:
        gpus = () if device == "cpu" else (gpu(int(device.removeprefix("cuda:")), 1),)
        spec = AttemptSpec(gpus, size, 64 // size)
        self(0, AttemptStarted(spec), number)
        self.attempts[number] = Attempt(number, spec, self.at)

    def steps(self, number: int, first: int, last: int) -> None:
        """A step a second."""
        for step in range(first, last + 1):
            self(1, Progress(step, metrics={"loss": 1 / step}), number)

    def end(self, number: int, outcome: str = "completed", seconds: float = 0, **more: Any) -> None:
        attempt, message = self.attempts[number], more.pop("message", None)
        evidence, figures = Evidence(**more.pop("evidence", {})), more
        if outcome != "completed":
            kind = FailureKind(outcome)
            failure = Failure(kind, message or kind.value, evidence)
            advice = figures.pop("advice", advice_for(kind, evidence))
            figures["failure"] = replace(failure, advice=advice)
        lasted = self.at + seconds - attempt.started
        self(seconds, AttemptEnded(replace(attempt, seconds=lasted, **figures)), number)

    @property
    def story(self) -> Story:
        return story_of(read_sources(self.folder))


def write_recovered(journal: Journal) -> Journal:
    """Waits 10 s; runs out of memory at step 8, 3 after its checkpoint; continues with half."""
    journal(0, STARTED)
    journal(11, DeviceAcquired("cuda:0", wait_seconds=10))
    journal.start(1)
    journal(2, TrainingStarted(0), 1)
    journal.steps(1, 1, 5)
    journal(0, CheckpointSaved("/five", 5), 1)
    journal.steps(1, 6, 8)
    journal.end(1, evidence=FIGURES, **OOM)
    journal.at += 4
    journal.start(2, size=32)
    journal(2, TrainingStarted(5), 2)
    journal.steps(2, 6, 12)
    journal.end(2)
    journal(1, COMPLETED)
    return journal


def write_failed(journal: Journal) -> Journal:
    """Fails with texts that would be scripts if they were let."""
    journal(0, STARTED)
    journal.start(1)
    journal(1, Progress(1, metrics={"loss": float("nan"), HOSTILE: 0.5}), 1)
    journal.end(1, "bug", message=HOSTILE, traceback=f"Traceback: {HOSTILE}")
    journal(0, JobEnded("failed", HOSTILE))
    return journal


def write_sweep(folder: Path) -> None:
    """Three jobs, the last of which fails."""
    rows = []
    for number, status in enumerate(("completed", "completed", "failed")):
        job = folder / str(number)
        job.mkdir()
        reason = "this learning rate is not for me" if status == "failed" else None
        journal = Journal(job)
        if reason is None:
            write_recovered(journal)
        else:
            journal(0, STARTED)
            journal.start(1)
            journal.end(1, "bug", message=reason, seconds=2)
            journal(0, JobEnded("failed", reason))
        code, overrides = int(number == 2), (f"training.lr=0.{number}",)
        record = SweepJob(number, overrides, "sweep-id", status, code, reason=reason)
        record.write(job)
        rows.append(read_row(job))
    SweepTable("sweep-id", "basic", "ended", 1, 40.0, tuple(rows)).write(folder)
