"""Defines the events of a job, and parses them from JSON.

The attempt's process sends its events to the launcher as JSON objects, for example
``{"event": "progress", "step": 7}``. The launcher updates the attempt's record with each event, and
writes it to ``journal.jsonl`` with ``time`` and ``attempt`` in front. Every process that reads a
run folder parses the same events. Memory is in bytes and time in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from robust_train.model.failure import Failure, FailureKind
from robust_train.model.json import Json as Json
from robust_train.model.json import MalformedEventError as MalformedEventError
from robust_train.model.json import fields_as_json
from robust_train.model.json import from_json as from_json
from robust_train.model.parts import load_parts
from robust_train.model.spec import AttemptSpec, Speed

Metrics = Mapping[str, float]

# Version of `state.json`, `summary.json`, `sweep.json` and the journal. Adding fields, events or
# values does not change it, because readers ignore unknown additions.
SCHEMA = 2

EVENTS: dict[str, type[Event]] = {}
"""All events, by name."""


@dataclass(frozen=True)
class Notice:
    """The text of a notification about an event."""

    kind: str  # a value of `notify.on`
    text: str  # the end of a sentence that begins with the job and its host


@dataclass(frozen=True)
class Event:
    """Base of all events. ``name`` is the event's name in JSON."""

    name: ClassVar[str] = ""
    # Whether the event is dropped rather than delay training. Its loss costs a point in a curve.
    may_be_dropped: ClassVar[bool] = False
    # Whether the journal contains it. Other events only inform the launcher.
    is_journaled: ClassVar[bool] = True
    # Whether it may come in every step. The journal then keeps fewer and fewer of them.
    is_frequent: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if cls.name:
            EVENTS[cls.name] = cls

    def notice(self, attempt: int | None) -> Notice | None:
        """Return the text of a notification about the event, None if users get no notification.

        Args:
            attempt: the number of the running attempt, None between attempts.
        """
        return None

    def as_json(self) -> dict[str, Json]:
        """Return the event as a JSON object, ``event`` first."""
        return {"event": self.name, **fields_as_json(self)}


# --- sent by an attempt ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EventOfRank(Event):
    """Base of events that every rank reports. ``rank`` is None for a single process."""

    rank: int | None = None


@dataclass(frozen=True)
class TrainingStarted(Event):
    """The trainer starts training after optimizer step ``step``, which is 0 for a fresh start."""

    name = "training_started"
    step: int


@dataclass(frozen=True)
class Progress(Event):
    """Optimizer step ``step`` is done; the trainer reports its ``metrics`` (loss, lr …)."""

    name = "progress"
    is_frequent = True
    may_be_dropped = True
    step: int
    total_steps: int | None = None
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True)
class SpeedMeasured(Event):
    """The training speed of a rank in this attempt so far."""

    name = "speed"
    is_frequent = True
    speed: Speed
    rank: int = 0


@dataclass(frozen=True)
class EpochEnded(Event):
    """Epoch ``epoch`` (from 1) is done, at optimizer step ``step``."""

    name = "epoch"
    is_frequent = True
    epoch: int
    step: int | None = None
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True)
class ValueReported(Event):
    """The figure that a sweep optimises is ``value`` after optimizer step ``step``."""

    name = "report"
    value: float
    step: int
    # ``min`` or ``max``: which values are better, if the trainer chose the figure itself. None for
    # the direction of the sweep.
    mode: str | None = None


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A complete checkpoint exists at ``path``. ``loss`` is the value in its manifest."""

    name = "checkpoint"
    is_frequent = True
    path: str
    step: int | None = None
    loss: str = "unknown"
    # Whether the newest checkpoint that is known to be good is never deleted.
    is_guarded: bool = False
    # How long saves have delayed training in this attempt so far, 0 if that is not measured.
    saving_seconds: float = 0.0

    @property
    def is_useful(self) -> bool:
        """Whether an attempt may resume from it, because training had not diverged."""
        return self.loss != "diverged"


@dataclass(frozen=True)
class UpdateSkipped(Event):
    """``run.step`` skipped an update that was not finite, the ``in_a_row``-th in succession."""

    name = "update_skipped"
    step: int
    in_a_row: int


@dataclass(frozen=True)
class CheckpointFailed(Event):
    """A checkpoint could not be saved. The attempt tries again in a minute."""

    name = "checkpoint_failed"
    is_frequent = True
    reason: str


@dataclass(frozen=True)
class MemoryReported(EventOfRank):
    """Memory in use at a ``milestone``: on the GPU, or of the process if it uses no GPU."""

    name = "memory"
    is_frequent = True
    may_be_dropped = True
    milestone: str
    allocated: int | None = None
    reserved: int | None = None
    max_allocated: int | None = None
    resident: int | None = None
    max_resident: int | None = None

    @property
    def figures(self) -> dict[str, int]:
        """The available figures, by name."""
        names = ("allocated", "reserved", "max_allocated", "resident", "max_resident")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class MemoryCleared(Event):
    """The attempt released memory. ``of`` is ``reserved`` (GPU) or ``resident`` (host)."""

    name = "memory_cleared"
    is_frequent = True
    reason: str
    of: str
    before_bytes: int
    after_bytes: int
    returned_bytes: int
    seconds: float
    step: int | None = None

    @property
    def figures(self) -> dict[str, Json]:
        """The figures, by name."""
        names = ("of", "before_bytes", "after_bytes", "returned_bytes", "seconds")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class MemoryHeld(Event):
    """A failed attempt in the launcher's process still holds memory."""

    name = "memory_held"
    description: str


@dataclass(frozen=True)
class _MicroBatchEvent(EventOfRank):
    """Base of changes to the size of a step's parts, in training or in evaluation.

    ``kind`` is the failure's kind if memory ran out. It is None if a larger size is tried again, or
    if a user requested the change.
    """

    step: int
    training: bool
    before: int
    reason: str
    kind: FailureKind | None = None
    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    free_bytes: int | None = None
    last_micro_batch: int | None = None


@dataclass(frozen=True)
class MicroBatchChanged(_MicroBatchEvent):
    """The micro-batch size changed inside an attempt."""

    name = "micro_batch_changed"
    is_frequent = True
    after: int | None = None


@dataclass(frozen=True)
class MicroBatchExhausted(_MicroBatchEvent):
    """Memory ran out even at the smallest micro-batch size."""

    name = "micro_batch_exhausted"
    is_frequent = True
    tried: tuple[int, ...] = ()


@dataclass(frozen=True)
class SplitChecked(Event):
    """A step cannot be split without changing its loss: the losses of its parts do not add up.

    Attributes:
        step: the first step that had to be split.
        kept: whether the loss stays the same: ``no``, ``cannot`` if a part cannot be computed,
            ``unknown`` if the check saw no loss.
        message: the observation and the remedy.
        samples: number of samples in the checked part.
        ends_attempt: whether the attempt ends, because memory has run out. Otherwise the step is
            split anyway.
    """

    name = "split_checked"
    step: int
    kept: str
    message: str
    samples: int = 0
    ends_attempt: bool = False


@dataclass(frozen=True)
class CheckpointUnused(Event):
    """A script's checkpoint cannot be used; ``text`` gives the reason.

    ``path`` is set if the file was cut off while it was written.
    """

    name = "checkpoint_unused"
    text: str
    path: str | None = None


@dataclass(frozen=True)
class BatchKept(Event):
    """No attempt may split the batch in another way, because that would change training."""

    name = "batch_kept"
    reason: str


@dataclass(frozen=True)
class BatchTaken(Event):
    """The trainer's data has its own batch size, ``asked``, which the attempt split like this."""

    name = "batch_taken"
    asked: int
    batch_size: int
    gradient_accumulation_steps: int


@dataclass(frozen=True)
class BatchSizeFound(Event):
    """Probes found the largest micro-batch, or None if even the smallest does not fit.

    ``search`` describes the probes (see :class:`robust_train.step.probing.FoundBatchSize`).
    """

    name = "batch_size_found"
    batch_size: int | None
    gradient_accumulation_steps: int | None
    effective_batch_size: int
    search: Mapping[str, Json] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, Json]:
        """The result and the figures of the search, by name."""
        names = ("batch_size", "gradient_accumulation_steps", "effective_batch_size")
        result = {name: getattr(self, name) for name in names}
        return {**self.search, **result}


@dataclass(frozen=True)
class MemoryTight(EventOfRank):
    """torch's allocator emptied its cache in two steps in a row. Sent once per attempt."""

    name = "memory_tight"
    step: int
    alloc_retries: int


@dataclass(frozen=True)
class OutOfMemory(EventOfRank):
    """Memory ran out. The attempt listed its tensors and allocations in these files."""

    name = "out_of_memory"
    kind: FailureKind
    message: str
    step: int | None = None
    requested_bytes: int | None = None
    tensors: str | None = None
    snapshot: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class RequestDone(Event):
    """The attempt carried out a request that changes it."""

    name = "request"
    is_frequent = True
    verb: str
    step: int | None = None
    sentence: str | None = None


@dataclass(frozen=True)
class AttemptProcess(Event):
    """The attempt, or its rank 0 if it has several ranks, runs in process ``pid``."""

    name = "attempt_process"
    pid: int


@dataclass(frozen=True)
class ScriptStarted(Event):
    """The attempt starts the program of ``trainer=command``."""

    name = "script_started"
    argv: tuple[str, ...]
    cwd: str


@dataclass(frozen=True)
class ScriptEnded(Event):
    """The program of ``trainer=command`` ended."""

    name = "script_ended"
    returncode: int
    pid: int


@dataclass(frozen=True)
class UserEvent(Event):
    """A custom event of the trainer, with any fields of JSON's types."""

    name = "user"
    is_frequent = True
    event_name: str
    fields: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Ending(Event):
    """Base of the two events by which a trainer ends."""

    is_journaled = False
    step: int | None = None  # last optimizer step that was reported
    memory: Mapping[str, int] = field(default_factory=dict)  # `MemoryReported.figures`
    # When the rank sent it, by the monotonic clock of this machine.
    at: float = 0.0


@dataclass(frozen=True)
class Finished(_Ending):
    """The trainer returned ``result``."""

    name = "finished"
    result: Json = None


@dataclass(frozen=True)
class Failed(_Ending):
    """The trainer ended with an exception."""

    name = "failed"
    failure: Failure  # the classified failure
    traceback: str = ""  # the trainer's traceback; empty for a mistake of the user
    config_error: str = ""  # the message of a ConfigError, empty for other failures
    error: str = ""  # the pickled exception in base64, empty if it cannot be pickled
    others_know: bool = False  # whether the other ranks know of it, and end by themselves
    caused_by_rank: int | None = None  # the rank that failed, if this rank only follows it
    # Dotted names of the exception's class and its bases.
    exceptions: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankDied(Event):
    """A rank's process ended without an event, and thus made the other ranks fail."""

    name = "rank_died"
    is_journaled = False
    rank: int
    pid: int
    returncode: int
    memory: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared(Event):
    """The interpreter has finished its early imports."""

    name = "prepared"
    is_journaled = False
    refusal: str = ""  # why the trainer refuses the config, empty if it accepts the config
    # Whether an import has started CUDA. The GPU can then no longer be chosen, so the interpreter
    # ends.
    is_unfit: bool = False
    culprit: str = ""  # the module whose import started CUDA


@dataclass(frozen=True)
class TrainerSupports(Event):
    """The trainer reads these values of an attempt, so the launcher may change them.

    Possible values are ``gradient_checkpointing``, and for a script also ``batch_size`` and
    ``gradient_accumulation_steps``.
    """

    name = "trainer_supports"
    is_journaled = False
    features: tuple[str, ...]


@dataclass(frozen=True)
class LibrariesImported(Event):
    """The trainer has imported these installed modules, in this order."""

    name = "libraries_imported"
    is_journaled = False
    modules: tuple[str, ...]
    resident_bytes: int  # host memory of the interpreter after these imports


# --- created by the launcher; `AttemptEnded` is defined beside the attempt's record ---------


@dataclass(frozen=True)
class PauseLearned(Event):
    """The longest pause between two reports of progress so far."""

    name = "pause_learned"
    seconds: float


@dataclass(frozen=True)
class JobStarted(Event):
    """A launch starts; ``job`` identifies the job in all its launches."""

    name = "job_started"
    run_dir: str
    trainer: str
    job: str = ""
    # The job's name, model, data set, overrides and command.
    about: Mapping[str, str] = field(default_factory=dict)
    schema: int = 1  # version of the journal's lines from here on
    # The project's names for this package's keys, None if it uses the keys themselves.
    keys: Mapping[str, str] | None = None


@dataclass(frozen=True)
class DeviceAcquired(Event):
    """The job has acquired its device; ``gpu_uuids`` is empty for the CPU."""

    name = "device_acquired"
    device: str
    gpu_uuids: tuple[str, ...] = ()
    gpu_names: tuple[str, ...] = ()
    wait_seconds: float = 0.0


@dataclass(frozen=True)
class AttemptStarted(Event):
    """An attempt starts."""

    name = "attempt_started"
    spec: AttemptSpec
    resume_checkpoint: str | None = None


@dataclass(frozen=True)
class DecidedAgain(Event):
    """The last decision could not be carried out, so the launcher made another decision."""

    name = "decided_again"
    why: str  # `waited_in_vain` or `lost_race`
    problem: str
    action: str
    reason: str


@dataclass(frozen=True)
class JobEnded(Event):
    """A launch ended, with the ``status`` and ``reason`` of ``summary.json``."""

    name = "job_ended"
    status: str
    reason: str | None = None


def parse(data: object) -> Event:
    """Return the event in a JSON object. Unknown keys are ignored.

    Raises:
        MalformedEventError: the event is unknown, or a field is missing or has another type.
    """
    if not isinstance(data, Mapping):
        raise MalformedEventError("not an object")
    name = str(data.get("event"))
    load_parts()  # features declare their events beside their parts
    if name not in EVENTS:
        raise MalformedEventError(f"unknown event {name!r}")
    return from_json(EVENTS[name], data)
