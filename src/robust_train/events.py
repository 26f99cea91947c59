"""What happens in a job, as frozen values: parsed once where they enter, folded in one place.

An event travels as one JSON object: ``{"event": <name>, …}``, in the pipe between an attempt and
its launcher, and with ``time`` and ``attempt`` in front as a line of ``journal.jsonl``. What a
user's trainer records itself has a namespace of its own (:class:`UserEvent`), and so have its
metrics (``metrics`` of :class:`Progress` and :class:`EpochEnded`): no name or size that a user
chooses can be confused with one of ours. Bytes and seconds throughout. No effects.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from robust_train.values import Failure, FailureKind

Json = Any
"""A value of JSON's types."""

Metrics = Mapping[str, float]


class MalformedEvent(ValueError):
    """An object that is no event of ours; the message says why."""


@dataclass(frozen=True)
class Event:
    """Base of all events. ``name`` is the event's name in JSON.

    ``may_be_dropped``: losing one of these costs a point in a curve and nothing else, so it is
    dropped rather than hold training up.
    """

    name: ClassVar[str] = ""
    may_be_dropped: ClassVar[bool] = False

    def as_json(self) -> dict[str, Json]:
        """Return the event as one JSON object, ``event`` first."""
        return {"event": self.name, **_plain(self)}


# --- from an attempt -------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingStarted(Event):
    """The trainer begins to train after optimizer step ``step``, 0 for a fresh start."""

    name = "training_started"
    step: int


@dataclass(frozen=True)
class Progress(Event):
    """Optimizer step ``step`` is done; ``metrics`` are the trainer's own (loss, lr …)."""

    name = "progress"
    may_be_dropped = True
    step: int
    total_steps: int | None = None
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True)
class EpochEnded(Event):
    """Epoch ``epoch`` (from 1) is done, at optimizer step ``step``."""

    name = "epoch"
    epoch: int
    step: int | None = None
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A complete checkpoint lies at ``path``."""

    name = "checkpoint"
    path: str
    step: int | None = None


@dataclass(frozen=True)
class MemoryReported(Event):
    """Memory in use at a moment called ``milestone``: of CUDA, or of the process without it."""

    name = "memory"
    may_be_dropped = True
    milestone: str
    allocated: int | None = None
    reserved: int | None = None
    max_allocated: int | None = None
    resident: int | None = None
    max_resident: int | None = None
    rank: int | None = None

    @property
    def figures(self) -> dict[str, int]:
        """Return the figures that are known, by name."""
        names = ("allocated", "reserved", "max_allocated", "resident", "max_resident")
        known = {name: getattr(self, name) for name in names}
        return {name: value for name, value in known.items() if value is not None}


@dataclass(frozen=True)
class MemoryCleared(Event):
    """A clearing returned memory. ``of`` is ``reserved`` (CUDA) or ``resident`` (host) memory."""

    name = "memory_cleared"
    reason: str
    of: str
    before_bytes: int
    after_bytes: int
    returned_bytes: int
    seconds: float
    step: int | None = None


@dataclass(frozen=True)
class MemoryHeld(Event):
    """A failed attempt in this process still holds memory; ``description`` names the holders."""

    name = "memory_held"
    description: str


@dataclass(frozen=True)
class MicroBatchChanged(Event):
    """The micro-batch size changed inside an attempt, in training or in evaluation.

    ``kind`` is the failure's where memory ran out, None where a larger size is tried again or
    somebody asked for it.
    """

    name = "micro_batch_changed"
    step: int
    training: bool
    before: int
    after: int | None
    reason: str
    kind: FailureKind | None = None
    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    free_bytes: int | None = None
    last_micro_batch: int | None = None
    rank: int | None = None


@dataclass(frozen=True)
class MicroBatchExhausted(Event):
    """Memory ran out at the smallest micro-batch size as well; ``tried`` lists all sizes."""

    name = "micro_batch_exhausted"
    step: int
    training: bool
    before: int
    reason: str
    tried: tuple[int, ...] = ()
    kind: FailureKind | None = None
    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    free_bytes: int | None = None
    last_micro_batch: int | None = None
    rank: int | None = None


@dataclass(frozen=True)
class BatchSizeFound(Event):
    """Probes before training found the largest micro-batch; None if not even the smallest fits.

    ``search`` describes the probes (see :class:`robust_train.microbatch.probing.FoundBatchSize`).
    """

    name = "batch_size_found"
    batch_size: int | None
    gradient_accumulation_steps: int | None
    effective_batch_size: int
    key: str = ""
    search: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class OutOfMemory(Event):
    """What filled the memory when it ran out was written to files of the run folder."""

    name = "out_of_memory"
    kind: FailureKind
    message: str
    step: int | None = None
    requested_bytes: int | None = None
    tensors: str | None = None
    snapshot: str | None = None
    seconds: float = 0.0
    rank: int | None = None


@dataclass(frozen=True)
class RequestDone(Event):
    """The attempt carried out a request that changes it."""

    name = "request"
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
    """The program ended; ``failure_kind`` and ``message`` are its own report, if it made one."""

    name = "script_ended"
    returncode: int
    pid: int
    failure_kind: FailureKind | None = None
    message: str | None = None


@dataclass(frozen=True)
class UserEvent(Event):
    """An event of the trainer's own: any name, any fields of JSON's types."""

    name = "user"
    event_name: str
    fields: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class Finished(Event):
    """The trainer returned ``result``. ``memory`` holds figures of :class:`MemoryReported`."""

    name = "finished"
    result: Json = None
    step: int | None = None
    memory: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed(Event):
    """The trainer ended with an exception.

    Attributes:
        failure: why, classified.
        step: last optimizer step that was reported.
        memory: figures of :class:`MemoryReported`.
        traceback: the trainer's own, as text; None for a mistake of the user's.
        config_error: the message where the configuration cannot be used.
        error: the exception, pickled, in base64; None where it cannot be carried over.
        stopped_for: what it was asked to stop for, so that another attempt goes on.
        others_know: the other ranks end by themselves.
        caused_by_rank: the failure is that of another rank, which is known.
    """

    name = "failed"
    failure: Failure
    step: int | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    traceback: str | None = None
    config_error: str | None = None
    error: str | None = None
    stopped_for: str | None = None
    others_know: bool = False
    caused_by_rank: int | None = None


@dataclass(frozen=True)
class RankDied(Event):
    """A rank's process ended without an event of its own; the cause of the group's failure."""

    name = "rank_died"
    rank: int
    pid: int
    returncode: int
    memory: Mapping[str, int] = field(default_factory=dict)


# --- of the launcher -------------------------------------------------------------------------


@dataclass(frozen=True)
class JobStarted(Event):
    """A launch begins in the run folder; ``job`` identifies the job through all its launches."""

    name = "job_started"
    run_dir: str
    trainer: str
    job: str = ""


@dataclass(frozen=True)
class DeviceAcquired(Event):
    """The job has its device; ``gpu_uuids`` is empty for the CPU."""

    name = "device_acquired"
    device: str
    gpu_uuids: tuple[str, ...] = ()
    gpu_names: tuple[str, ...] = ()
    wait_seconds: float = 0.0


@dataclass(frozen=True)
class KnownBatchUsed(Event):
    """The job begins with a micro-batch that earlier jobs have shown to fit."""

    name = "known_batch_used"
    batch_size: int
    reason: str


@dataclass(frozen=True)
class AttemptStarted(Event):
    """An attempt begins."""

    name = "attempt_started"
    device: str
    batch_size: int
    gradient_accumulation_steps: int
    ranks: int = 1
    gpu_uuids: tuple[str, ...] = ()
    num_workers: int = 0
    prefetch_factor: int = 2
    expandable_segments: bool = True
    resume_checkpoint: str | None = None


@dataclass(frozen=True)
class Stalled(Event):
    """The attempt made no progress for ``seconds``; ``stacks`` is what its threads were doing."""

    name = "stalled"
    seconds: float
    stacks: str = ""


@dataclass(frozen=True)
class AttemptEnded(Event):
    """An attempt ended, and what comes next is decided.

    Attributes:
        record: the attempt as ``summary.json`` has it.
        evidence: figures of the failure, the traceback among them; empty where it completed.
    """

    name = "attempt_ended"
    record: Mapping[str, Json]
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


_CLASSES: dict[str, type[Event]] = {
    found.name: found for found in Event.__subclasses__() if found.name
}


def parse(data: object) -> Event:
    """Return the event in one JSON object; keys that it does not know are ignored.

    Raises:
        MalformedEvent: it is no event of ours, or a field is missing or of another type.
    """
    if not isinstance(data, Mapping):
        raise MalformedEvent("not an object")
    found = _CLASSES.get(str(data.get("event")))
    if found is None:
        raise MalformedEvent(f"no event is called {data.get('event')!r}")
    event: Event = _build(found, data, found.name)
    return event


T = TypeVar("T")


def from_json(cls: type[T], data: object) -> T:
    """Return the frozen dataclass ``cls`` from one JSON object; unknown keys are ignored.

    Raises:
        MalformedEvent: a field is missing or of another type.
    """
    if not isinstance(data, Mapping):
        raise MalformedEvent("not an object")
    found: T = _build(cls, data, cls.__name__)
    return found


def _build(cls: type[Any], data: Mapping[str, Any], where: str) -> Any:
    hints = _hints(cls)
    given: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        if item.name in data:
            given[item.name] = _value(hints[item.name], data[item.name], f"{where}.{item.name}")
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise MalformedEvent(f"{where} needs {item.name}")
    return cls(**given)


_known_hints: dict[type[Any], dict[str, Any]] = {}


def _hints(cls: type[Any]) -> dict[str, Any]:
    if cls not in _known_hints:
        _known_hints[cls] = typing.get_type_hints(cls)
    return _known_hints[cls]


def _value(hint: Any, value: Any, where: str) -> Any:
    """Return ``value`` as the field's type, which is one of the few that events use."""
    if hint is Any:
        return value
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
        return None if value is None else _value(inner, value, where)
    if origin is tuple and isinstance(value, (list, tuple)):
        item = typing.get_args(hint)[0]
        return tuple(_value(item, one, where) for one in value)
    if isinstance(value, Mapping):
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return _build(hint, value, where)
        if origin in (Mapping, dict) or hint in (Mapping, dict):
            return dict(value)
        origin_name = getattr(origin, "__name__", "")
        if origin_name == "Mapping":
            return dict(value)
    if hint is FailureKind and isinstance(value, str):
        try:
            return FailureKind(value)
        except ValueError:
            raise MalformedEvent(f"{where}: no failure kind {value!r}") from None
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint in (str, bool) and isinstance(value, hint):
        return value
    raise MalformedEvent(f"{where}: {value!r} is not of type {getattr(hint, '__name__', hint)}")


def _plain(value: Any) -> Any:
    """Return a value in JSON's types; fields that are None stay, so that a reader sees them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, FailureKind):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
