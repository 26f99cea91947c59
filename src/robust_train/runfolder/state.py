"""``state.json``: the state of a job, for every reader of its run folder."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from robust_train.events import (
    AttemptProcess,
    BatchSizeFound,
    CheckpointSaved,
    Event,
    Json,
    MemoryReported,
    MicroBatchChanged,
    PauseLearned,
    Progress,
    SpeedMeasured,
    TrainingStarted,
    from_json,
)
from robust_train.files import finite, parse_json, read_small, write_json
from robust_train.runfolder.journal import AttemptStarted, JobStarted
from robust_train.values import Speed

log = logging.getLogger("robust_train")

STATE_FILE = "state.json"
SCHEMA = 1
FINAL = frozenset({"completed", "failed", "no_device", "interrupted"})
REQUESTED = "requested by 'robust-train run halve-batch'"
"""Why a micro-batch changed on request, as the event has it."""
_INTERVAL_SECONDS = 1.0
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class RunState:
    """State of a job. Bytes and seconds (of the epoch); None if unknown."""

    id: str  # the job's id in `robust-train queue`, or `0-…` for one that never queued
    name: str  # `job_name`, or how model and dataset, the function or the script are called
    run_dir: str  # where the folder was when the job started
    pid: int  # of the launcher, on `host`
    host: str
    user: str
    started: float  # when this launch began
    since: float  # when it came into this state
    # `starting`, `waiting`, `running`, `between attempts`, `stopping`, or how the job ended:
    # `completed`, `failed`, `no_device`, `interrupted`
    state: str = "starting"
    updated: float = 0.0  # when this was written
    schema: int = SCHEMA
    earlier_ids: tuple[str, ...] = ()  # ids that the job had before
    job: str | None = None  # identity of the job through all its launches
    earlier_seconds: float = 0.0  # duration of the job's launches before
    # `position`, `reason` and `seconds_left` while it waits for a GPU
    waiting: Mapping[str, Json] | None = None
    attempt: int | None = None  # number of the attempt, from 1; what follows is of it
    attempt_pid: int | None = None  # of rank 0
    # `cuda:<number>` as `nvidia-smi` counts, several with commas, or `cpu`
    device: str | None = None
    gpu_uuids: tuple[str, ...] = ()
    ranks: int | None = None
    batch_size: int | None = None  # samples in one forward and backward pass of one rank
    gradient_accumulation_steps: int | None = None
    effective_batch_size: int | None = None
    micro_batch: int | None = None  # what `batch_size` is split into since
    num_workers: int | None = None
    prefetch_factor: int | None = None
    expandable_segments: bool | None = None
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    # of each rank: `rank`, `steps`, `seconds_per_step`, … as in `summary.json`
    speed: tuple[Speed, ...] | None = None
    memory: Mapping[str, int] | None = None  # bytes in use, by name, at the last milestone
    checkpoint: str | None = None  # the last one that was reported
    checkpoint_step: int | None = None
    longest_pause: float | None = None  # between two reports of progress, seconds
    # the micro-batch that `robust-train run halve-batch` has led to, for the next launch too
    requested_micro_batch: int | None = None
    reason: str | None = None  # why the last attempt, or the job, ended
    exit_code: int | None = None  # of the job that ended
    resume_command: str | None = None  # what goes on with the job after it was interrupted

    def seconds(self, now: float) -> float:
        """Return the duration of all launches of the job until ``now``."""
        return max(self.earlier_seconds + now - self.started, 0.0)

    @property
    def is_final(self) -> bool:
        """Whether the job has ended."""
        return self.state in FINAL

    @classmethod
    def parse(cls, data: bytes | str) -> RunState | None:
        """Return the state in the content of a file; None where that is not a state of ours."""
        try:
            found = from_json(cls, parse_json(data))
        except ValueError:  # MalformedEvent among them
            return None
        return found if found.schema == SCHEMA else None


_NAMES = [item.name for item in fields(RunState)]
_OF_AN_ATTEMPT = _NAMES[_NAMES.index("attempt_pid") : _NAMES.index("checkpoint")]
_WRITTEN_AT_ONCE = ("id", "state", "attempt", "attempt_pid", "checkpoint", "micro_batch")


def with_attempt(state: RunState, number: int, started: AttemptStarted) -> RunState:
    """Return the state at the start of attempt ``number``."""
    fresh: dict[str, Json] = {name: getattr(started, name, None) for name in _OF_AN_ATTEMPT}
    state = replace(state, state="running", waiting=None, attempt=number, reason=None, **fresh)
    return _with_effective_batch(state)


def after_event(state: RunState, event: Event) -> RunState:
    """Return the state after one event of the attempt."""
    if isinstance(event, Progress):
        loss = event.metrics.get("loss", state.loss)
        loss = loss if isinstance(loss, float) else finite(loss)  # a metric may be anything
        total = event.total_steps if event.total_steps is not None else state.total_steps
        return replace(state, step=event.step, total_steps=total, loss=loss)
    if isinstance(event, SpeedMeasured):
        speed = event.speed if state.batch_size else event.speed.without_samples()
        others = (one for one in state.speed or () if one.rank != event.rank)
        return replace(state, speed=tuple(sorted((*others, speed), key=lambda one: one.rank)))
    if isinstance(event, TrainingStarted):
        return replace(state, step=event.step)
    if isinstance(event, CheckpointSaved):
        return replace(state, checkpoint=event.path, checkpoint_step=event.step)
    if isinstance(event, MemoryReported) and event.rank is None:
        return replace(state, memory=event.figures)
    if isinstance(event, MicroBatchChanged) and event.training:
        if event.reason == REQUESTED:
            state = replace(state, requested_micro_batch=event.after)
        return replace(state, micro_batch=event.after)
    if isinstance(event, BatchSizeFound) and event.batch_size is not None:
        steps = event.gradient_accumulation_steps or state.gradient_accumulation_steps
        found = replace(state, batch_size=event.batch_size, gradient_accumulation_steps=steps)
        return _with_effective_batch(found)
    if isinstance(event, PauseLearned):
        return replace(state, longest_pause=event.seconds)
    if isinstance(event, JobStarted):
        # what another job in this folder has taught does not count
        if state.job != event.job:
            state = replace(
                state, longest_pause=None, requested_micro_batch=None, earlier_seconds=0.0
            )
        return replace(state, job=event.job)
    if isinstance(event, AttemptProcess):
        return replace(state, attempt_pid=event.pid)
    return state


def _with_effective_batch(state: RunState) -> RunState:
    size, steps = state.batch_size, state.gradient_accumulation_steps
    if size is None or steps is None:
        return state
    return replace(state, effective_batch_size=size * steps * (state.ranks or 1))


def read_state(run_dir: Path) -> RunState | None:
    """Return the state that a run folder holds; None where it holds none that can be read."""
    try:
        return RunState.parse(read_small(run_dir / STATE_FILE, _MAX_BYTES)[0])
    except OSError:
        return None


class StateFile:
    """Keeps ``state.json``: written at once at a change of state, else once a second at most.

    A disk that is full costs the file and not the job.
    """

    def __init__(self, run_dir: Path, state: RunState) -> None:
        self.state = state
        self._path = run_dir / STATE_FILE
        self._is_due = True
        self._next_write = 0.0
        self._has_warned = False
        # in-process attempts: their thread ticks, the main thread sends events
        self._lock = threading.RLock()

    def update(self, change: Callable[[RunState], RunState]) -> None:
        """Change the state, and write it if that is important or time to."""
        with self._lock:
            before, state = self.state, change(self.state)
            if state == before:
                return
            if state.state != before.state:
                state = replace(state, since=time.time())
            self.state, self._is_due = state, True
            if any(getattr(state, name) != getattr(before, name) for name in _WRITTEN_AT_ONCE):
                self._next_write = 0.0
        self.write_if_due()

    def write_if_due(self) -> None:
        """Write what has changed, unless the last time is less than a second ago."""
        with self._lock:
            now = time.monotonic()
            if not self._is_due or now < self._next_write:
                return
            self._is_due, self._next_write = False, now + _INTERVAL_SECONDS
            try:
                write_json(self._path, asdict(replace(self.state, updated=time.time())))
            except OSError as error:
                self._is_due = True
                if not self._has_warned:
                    self._has_warned = True
                    log.warning("cannot write %s: %s; the job goes on", self._path, error.strerror)
