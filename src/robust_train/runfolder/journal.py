"""The record of a job: one JSON line per event, on disk as soon as it happens."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from robust_train.events import BatchSizeFound, CheckpointSaved, Event, Json, parse
from robust_train.files import LineFile, MalformedEvent, json_lines, strict_json
from robust_train.runfolder.thinning import THINNED, thin

log = logging.getLogger("robust_train")

_MOST_OWED = 100


@dataclass(frozen=True)
class JobStarted(Event):
    """A launch begins in the run folder; ``job`` identifies the job through all its launches."""

    name = "job_started"
    run_dir: str
    trainer: str
    job: str = ""
    about: Mapping[str, str] = field(default_factory=dict)  # see settings.about_job


@dataclass(frozen=True)
class DeviceAcquired(Event):
    """The job has its device; ``gpu_uuids`` is empty for the CPU."""

    name = "device_acquired"
    device: str
    gpu_uuids: tuple[str, ...] = ()
    gpu_names: tuple[str, ...] = ()
    wait_seconds: float = 0.0


@dataclass(frozen=True)
class AttemptStarted(Event):
    """An attempt begins."""

    name = "attempt_started"
    device: str
    batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    ranks: int = 1
    gpu_uuids: tuple[str, ...] = ()
    num_workers: int = 0
    prefetch_factor: int = 2
    expandable_segments: bool = True
    gradient_checkpointing: bool = False
    resume_checkpoint: str | None = None


@dataclass(frozen=True)
class AttemptEnded(Event):
    """An attempt ended, and what comes next is decided."""

    name = "attempt_ended"
    record: Mapping[str, Json]  # the attempt as `summary.json` has it
    # figures of the failure, the traceback among them; empty where it completed
    evidence: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class DecidedAgain(Event):
    """The last decision could not be carried out; why: ``waited_in_vain`` or ``lost_race``."""

    name = "decided_again"
    why: str
    problem: str
    action: str
    reason: str


@dataclass(frozen=True)
class JobEnded(Event):
    """A launch ended; ``status`` and ``reason`` as ``summary.json`` has them."""

    name = "job_ended"
    status: str
    reason: str | None = None


class Journal:
    """Appends events to ``journal.jsonl``, which stays small however long a job runs. A disk that
    is full or gone costs one warning; events that matter are written once it works."""

    def __init__(self, path: Path, *, slack_bytes: int = 512 * 1024) -> None:
        self.path = path
        self._has_warned = False
        self._file = LineFile(path)
        self._owed: list[bytes] = []
        self._slack = slack_bytes
        self._grown = 0
        with contextlib.suppress(OSError):
            self._grown = path.stat().st_size

    def write(self, event: Event, attempt: int | None = None) -> None:
        """Append one event of attempt number ``attempt``, or of the job; NaN becomes null."""
        whose = {} if attempt is None else {"attempt": attempt}
        content = strict_json({"time": round(time.time(), 6), **whose, **event.as_json()})
        text = json.dumps(content, ensure_ascii=False, default=repr)
        line = (text + "\n").encode(errors="replace")
        is_many = event.name in THINNED
        matters = not is_many or isinstance(event, CheckpointSaved)
        try:
            self._file.append(b"".join((*self._owed, line)), durable=matters)
            self._owed.clear()
        except OSError as error:
            if matters and len(self._owed) < _MOST_OWED:
                self._owed.append(line)
            self._warn(error)
            return
        self._grown += len(line) if is_many else 0
        if self._grown > self._slack:
            self._grown = 0
            try:
                thin(self.path)
            except OSError as error:
                self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("cannot write %s: %s; training goes on", self.path, error.strerror)


@dataclass(frozen=True)
class Earlier:
    """What earlier launches left in a run folder: the highest number of an attempt so far, and the
    micro-batches that probes have found, by what memory depends on."""

    attempts: int = 0
    found: Mapping[str, int] = field(default_factory=dict)


def read_earlier(path: Path) -> Earlier:
    """Read what earlier launches have written to the same journal; torn lines are skipped. Raises
    OSError: it cannot be read just now."""
    attempts, found = 0, {}
    with contextlib.suppress(FileNotFoundError):
        for content in filter(None, json_lines(path)):
            number = content.get("attempt")
            attempts = max(attempts, number if isinstance(number, int) else 0)
            with contextlib.suppress(MalformedEvent):
                event = parse(content)
                if isinstance(event, BatchSizeFound) and event.batch_size:
                    found[event.key] = event.batch_size
    return Earlier(attempts, found)
