"""The events of a job, as frozen values. The launcher parses and folds each event in one place.

An event travels as a JSON object: ``{"event": <name>, …}``, between an attempt and its launcher,
and with ``time`` and ``attempt`` in front as a line of ``journal.jsonl``. A trainer's own events
(:class:`UserEvent`) and metrics have namespaces of their own. Bytes and seconds throughout.
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

SCHEMA = 2
"""Version of ``state.json``, ``summary.json``, ``sweep.json`` and the journal. It stays the same as
long as fields, events and values are only added, because readers ignore unknown additions."""


EVENTS: dict[str, type[Event]] = {}
"""All events, by name."""


@dataclass(frozen=True)
class Notice:
    """The text of a notification about an event."""

    kind: str  # a value of `notify.on`
    text: str  # continues a sentence that begins with the job and its host


@dataclass(frozen=True)
class Event:
    """Base of all events. ``name`` is the event's name in JSON.

    ``may_be_dropped``: losing such an event costs only a point in a curve, so it is dropped rather
    than hold training up. ``is_journaled``: the journal has it. Other events travel only from an
    interpreter to the launcher. ``is_frequent``: it may come in every step, so the journal keeps
    fewer and fewer.
    """

    name: ClassVar[str] = ""
    may_be_dropped: ClassVar[bool] = False
    is_journaled: ClassVar[bool] = True
    is_frequent: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if cls.name:
            EVENTS[cls.name] = cls

    def notice(self, attempt: int | None) -> Notice | None:
        """Return what a notification says of the event; None if there is none of it.

        Args:
            attempt: the number of the attempt that runs.
        """
        return None

    def as_json(self) -> dict[str, Json]:
        """Return the event as a JSON object, ``event`` first."""
        return {"event": self.name, **fields_as_json(self)}


# --- from an attempt -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EventOfRank(Event):
    """Base of events that each of several ranks reports. ``rank`` is None for a single process."""

    rank: int | None = None


@dataclass(frozen=True)
class TrainingStarted(Event):
    """The trainer begins to train after optimizer step ``step``, 0 for a fresh start."""

    name = "training_started"
    step: int


@dataclass(frozen=True)
class Progress(Event):
    """Optimizer step ``step`` is done; ``metrics`` are the trainer's own (loss, lr …)."""

    name = "progress"
    is_frequent = True
    may_be_dropped = True
    step: int
    total_steps: int | None = None
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True)
class SpeedMeasured(Event):
    """How fast a rank has trained in this attempt so far."""

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
    # ``min`` or ``max``, the better end of a figure that no one has named. None for the sweep's
    # direction.
    mode: str | None = None


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A complete checkpoint lies at ``path``; ``loss`` as in its manifest."""

    name = "checkpoint"
    is_frequent = True
    path: str
    step: int | None = None
    loss: str = "unknown"
    # Whether the last checkpoint that is known to be good stays.
    is_guarded: bool = False
    # For how long saves have held training up in this attempt so far, if that is measured.
    saving_seconds: float = 0.0

    @property
    def is_useful(self) -> bool:
        """Whether an attempt may resume from it: it is not known to be spoiled."""
        return self.loss != "diverged"


@dataclass(frozen=True)
class UpdateSkipped(Event):
    """``run.step`` left an update out that was not finite, ``in_a_row`` of them by now."""

    name = "update_skipped"
    step: int
    in_a_row: int


@dataclass(frozen=True)
class CheckpointFailed(Event):
    """A checkpoint could not be saved; it is tried again in a minute."""

    name = "checkpoint_failed"
    is_frequent = True
    reason: str


@dataclass(frozen=True)
class MemoryReported(EventOfRank):
    """Memory in use at a ``milestone``: of CUDA, or of the process without it."""

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
        """Return the available figures by name."""
        names = ("allocated", "reserved", "max_allocated", "resident", "max_resident")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class MemoryCleared(Event):
    """A clearing returned memory. ``of`` is ``reserved`` (CUDA) or ``resident`` (host) memory."""

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
        """Return the figures by name."""
        names = ("of", "before_bytes", "after_bytes", "returned_bytes", "seconds")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class MemoryHeld(Event):
    """A failed attempt in this process still holds memory."""

    name = "memory_held"
    description: str


@dataclass(frozen=True)
class _MicroBatchEvent(EventOfRank):
    """Base of changes to the size of a step's parts, in training or in evaluation.

    ``kind`` is the failure's kind if memory ran out, None if a larger size is tried again or
    someone asked for it.
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
    """Memory ran out at the smallest micro-batch size as well."""

    name = "micro_batch_exhausted"
    is_frequent = True
    tried: tuple[int, ...] = ()


@dataclass(frozen=True)
class SplitChecked(Event):
    """A step cannot be split without a change: the losses of parts do not add up.

    Attributes:
        step: the first step that had to be split.
        kept: ``no``, ``cannot`` if a part cannot be computed, ``unknown`` if nothing was seen.
        message: the observation and the remedy.
        samples: number of samples in the checked part.
        ends_attempt: whether memory has run out and the attempt ends. Otherwise the step is split
            anyway.
    """

    name = "split_checked"
    step: int
    kept: str
    message: str
    samples: int = 0
    ends_attempt: bool = False


@dataclass(frozen=True)
class CheckpointUnused(Event):
    """A script's checkpoint cannot be used, for the reason in ``text``; ``path``: it is cut off."""

    name = "checkpoint_unused"
    text: str
    path: str | None = None


@dataclass(frozen=True)
class BatchKept(Event):
    """No attempt may split the batch in another way, for that would change training."""

    name = "batch_kept"
    reason: str


@dataclass(frozen=True)
class BatchTaken(Event):
    """The trainer's data has a batch size of its own, ``asked``; the attempt makes these of it."""

    name = "batch_taken"
    asked: int
    batch_size: int
    gradient_accumulation_steps: int


@dataclass(frozen=True)
class BatchSizeFound(Event):
    """Probes found the largest micro-batch; None if not even the smallest fits.

    ``search`` describes the probes (see :class:`robust_train.step.probing.FoundBatchSize`).
    """

    name = "batch_size_found"
    batch_size: int | None
    gradient_accumulation_steps: int | None
    effective_batch_size: int
    search: Mapping[str, Json] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, Json]:
        """Return the result and its figures by name."""
        names = ("batch_size", "gradient_accumulation_steps", "effective_batch_size")
        return {**self.search, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True)
class MemoryTight(EventOfRank):
    """torch's allocator emptied its cache in two steps in a row (once an attempt)."""

    name = "memory_tight"
    step: int
    alloc_retries: int


@dataclass(frozen=True)
class OutOfMemory(EventOfRank):
    """Memory ran out; what filled it was written to these files."""

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
    """The attempt runs in process ``pid``; of several ranks, rank 0."""

    name = "attempt_process"
    pid: int


@dataclass(frozen=True)
class ScriptStarted(Event):
    """``trainer=command`` starts its program."""

    name = "script_started"
    argv: tuple[str, ...]
    cwd: str


@dataclass(frozen=True)
class ScriptEnded(Event):
    """The program ended."""

    name = "script_ended"
    returncode: int
    pid: int


@dataclass(frozen=True)
class UserEvent(Event):
    """An event of the trainer's own, with any fields of JSON's types."""

    name = "user"
    is_frequent = True
    event_name: str
    fields: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Ending(Event):
    """Base of the two ends of a trainer."""

    is_journaled = False
    step: int | None = None  # last optimizer step that was reported
    # Figures as in MemoryReported.
    memory: Mapping[str, int] = field(default_factory=dict)
    # When a rank sent it, by the monotonic clock of this machine.
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
    traceback: str = ""  # the trainer's traceback; empty if the user made the mistake
    # The message if the configuration cannot be used.
    config_error: str = ""
    # The pickled exception in base64, if it can be sent.
    error: str = ""
    others_know: bool = False  # whether the other ranks end by themselves
    # The failure is that of another rank, with this number.
    caused_by_rank: int | None = None
    # Dotted names of the exception's class and its bases.
    exceptions: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankDied(Event):
    """A rank's process ended without an event, which caused the group's failure."""

    name = "rank_died"
    is_journaled = False
    rank: int
    pid: int
    returncode: int
    memory: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared(Event):
    """The interpreter has done its early imports."""

    name = "prepared"
    is_journaled = False
    refusal: str = ""  # why the trainer does not accept the config
    # Whether an import has started CUDA, so the GPU can no longer be chosen, and the interpreter
    # ends.
    is_unfit: bool = False
    culprit: str = ""  # the module whose import started it


@dataclass(frozen=True)
class TrainerSupports(Event):
    """The trainer reads these values, so an attempt may choose them: ``gradient_checkpointing``,
    and for a script also ``batch_size`` and ``gradient_accumulation_steps``."""

    name = "trainer_supports"
    is_journaled = False
    features: tuple[str, ...]


@dataclass(frozen=True)
class LibrariesImported(Event):
    """The installed modules that the trainer has imported, in this order."""

    name = "libraries_imported"
    is_journaled = False
    modules: tuple[str, ...]
    resident_bytes: int  # memory that the interpreter holds with them


# --- of the launcher ----------------------------------------------------------------------


@dataclass(frozen=True)
class PauseLearned(Event):
    """The longest pause between two reports of progress so far."""

    name = "pause_learned"
    seconds: float


# --- of the job as a whole; `AttemptEnded` is beside its record --------------------------


@dataclass(frozen=True)
class JobStarted(Event):
    """A launch begins; ``job`` identifies the job through all launches."""

    name = "job_started"
    run_dir: str
    trainer: str
    job: str = ""
    # How the page names the job.
    about: Mapping[str, str] = field(default_factory=dict)
    schema: int = 1  # version of the journal's lines from here on
    # A project's keys that stand for this package's keys; None if the keys are at the root.
    keys: Mapping[str, str] | None = None


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
    spec: AttemptSpec
    resume_checkpoint: str | None = None


@dataclass(frozen=True)
class DecidedAgain(Event):
    """The last decision was not carried out; ``why``: ``waited_in_vain`` or ``lost_race``."""

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


def parse(data: object) -> Event:
    """Return the event in a JSON object. Unknown keys are ignored.

    Raises:
        MalformedEventError: the event is unknown, or a field is missing or of another type.
    """
    if not isinstance(data, Mapping):
        raise MalformedEventError("not an object")
    name = str(data.get("event"))
    load_parts()  # features declare their events beside their parts
    if name not in EVENTS:
        raise MalformedEventError(f"unknown event {name!r}")
    return from_json(EVENTS[name], data)
