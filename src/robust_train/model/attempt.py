"""The record of an attempt, from its start to the decision after it.

The launcher folds the attempt's events into it. It is the only record: journal, ``state.json``,
``summary.json``, a sweep's row, the table and the report show some of its fields.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

from robust_train.model.events import (
    AttemptProcess,
    BatchKept,
    BatchSizeFound,
    BatchTaken,
    CheckpointSaved,
    Event,
    Failed,
    Finished,
    Json,
    MemoryReported,
    MicroBatchChanged,
    MicroBatchExhausted,
    Progress,
    RankDied,
    ScriptEnded,
    ScriptStarted,
    SplitChecked,
    TrainerSupports,
    TrainingStarted,
)
from robust_train.model.exit import Exit
from robust_train.model.failure import Clue, Evidence, Failure, FailureKind
from robust_train.model.gpu import Group, gpus_of
from robust_train.model.json import finite
from robust_train.model.parts import Part, Record, parts_like
from robust_train.model.spec import AttemptSpec

N = TypeVar("N", bound="Note")

UNFINISHED = "unfinished"
COMPLETED = "completed"

_OF_THE_LAUNCHER = {"number", "spec", "ending", "script", "exit", "keeps_batch", "split_changes"}
_OF_THE_COUNTS = {"began_training", "first_step", "saved_step", "saves"}
_NOT_IN_FILES = _OF_THE_LAUNCHER | _OF_THE_COUNTS


@dataclass(frozen=True)
class Note(Part):
    """A feature's fields in the record of an attempt."""

    # The events that may change it. Other events, such as each step's, are not passed to it.
    folds: ClassVar[tuple[type[Event], ...]] = (Event,)

    def after(self: N, event: Event, attempt: Attempt) -> N:
        """Return the note after another event, which the attempt's own fields have already
        taken."""
        return self


@functools.cache
def _notes_folding(event: type[Event]) -> tuple[type[Note], ...]:
    """Return the notes that an event of this class may change."""
    active = [kind for kind in parts_like(Note) if kind.after is not Note.after]
    return tuple(kind for kind in active if issubclass(event, kind.folds))


@dataclass(frozen=True)
class Attempt(Record[Note]):
    """The spec, progress, end and following decision of an attempt.

    Fields of features are in their notes: ``attempt.of(SlowNote)``. None means unknown, or not yet
    known. Bytes and seconds.
    """

    kind_of_part = Note

    number: int  # counted from 1, over all launches of the run folder
    # Includes the micro-batch that it found, if it had to search.
    spec: AttemptSpec
    started: float = 0.0  # seconds since the epoch
    resumed_from: str | None = None  # its first checkpoint
    # --- how far it came ---
    pid: int | None = None  # process id of rank 0
    # Whether it reported that training begins. Some trainers never do.
    began_training: bool = False
    start_step: int = 0  # optimizer step it started from (0 for a fresh start)
    first_step: int | None = None  # first optimizer step it reported
    end_step: int | None = None  # last optimizer step it reported
    total_steps: int | None = None
    loss: float | None = None
    checkpoint: str | None = None  # path of the last checkpoint it reported
    saved_step: int | None = None  # step of that checkpoint
    saves: int = 0  # number of checkpoints it reported
    # The current micro-batch, if the trainer itself has changed it.
    micro_batch: int | None = None
    keeps_batch: str = ""  # why no attempt may split the batch in another way
    # Why it ended, if that was because the losses of parts do not add up to the loss of the batch.
    split_changes: str = ""
    # Bytes in use, by name, at the last milestone. With several ranks, of the rank with the highest
    # peak.
    memory: Mapping[str, int] = field(default_factory=dict)
    # --- the evidence of its end ---
    # its own report, or what ended the group of its ranks
    ending: Finished | Failed | RankDied | None = None
    # Its program, if it runs one.
    script: ScriptStarted | ScriptEnded | None = None
    exit: Exit = field(default_factory=Exit)
    # --- how it ended ---
    seconds: float | None = None  # wall time
    failure: Failure | None = None  # None if it completed
    # The trainer's traceback, or the last words of a script.
    traceback: str | None = None
    # Peak of the device, or of the process on the CPU.
    peak_memory_bytes: int | None = None
    # --- what was decided after it ---
    action: str = "none"  # the remedy's name
    reason: str | None = None  # one sentence

    def after(self, event: Event) -> Attempt:
        """Return the attempt after another of its events."""
        attempt = self._after(event)
        for kind in _notes_folding(type(event)):  # type: ignore[arg-type]  # it is hashable
            note = attempt.of(kind)
            changed = note.after(event, attempt)
            if changed is not note:
                attempt = attempt.having(changed)
        return attempt

    def _after(self, event: Event) -> Attempt:
        """Return the attempt with an event's changes to the kernel's fields."""
        match event:
            case AttemptProcess():
                return replace(self, pid=event.pid)
            case TrainingStarted():
                return replace(self, start_step=event.step, began_training=True)
            case Progress():
                total = self.total_steps if event.total_steps is None else event.total_steps
                # A metric may have any type.
                loss = finite(event.metrics.get("loss", self.loss))
                after = replace(
                    self,
                    first_step=event.step if self.first_step is None else self.first_step,
                    end_step=event.step,
                    total_steps=total,
                    loss=loss,
                )
                return after._started_before(event.step) if self.step is None else after
            case CheckpointSaved(is_useful=False):
                return self
            case CheckpointSaved():
                return replace(
                    self,
                    checkpoint=event.path,
                    saved_step=self.end_step if event.step is None else event.step,
                    saves=self.saves + 1,
                )
            case MemoryReported(rank=None):
                return replace(self, memory={**self.memory, **event.figures})
            case MicroBatchChanged(training=True):
                return replace(self, micro_batch=event.after or self.micro_batch)
            case MicroBatchExhausted(training=True):
                return replace(self, micro_batch=event.before)
            case BatchKept():
                return replace(self, keeps_batch=event.reason)
            case SplitChecked(ends_attempt=True, kept="no"):
                return replace(self, split_changes=event.message, micro_batch=None)
            case SplitChecked(ends_attempt=True):
                return replace(self, micro_batch=None)
            case BatchTaken() | BatchSizeFound():
                return self._with_batch_of(event)
            case TrainerSupports():
                return replace(self, spec=self.spec.supporting(event.features))
            case RankDied():
                return replace(self, ending=event, memory={**self.memory, **event.memory})
            case ScriptStarted() | ScriptEnded():
                return replace(self, script=event)
            case Finished() | Failed():
                step = self.end_step if event.step is None else event.step
                memory = {**self.memory, **event.memory}
                return replace(self, ending=event, end_step=step, memory=memory)
        return self

    def _with_batch_of(self, event: BatchTaken | BatchSizeFound) -> Attempt:
        size = event.batch_size
        accumulation = event.gradient_accumulation_steps
        return replace(self, spec=self.spec.with_batch(size, accumulation))

    def _started_before(self, step: int) -> Attempt:
        """Correct the start step, if the attempt did not report it, from its first reported
        step."""
        before = max(step - 1, 0)
        is_known = self.resumed_from is None or 0 < self.start_step <= before
        return self if is_known else replace(self, start_step=before)

    def resumed_like(self, first: Attempt) -> Attempt:
        """Correct the start step of a program that found a checkpoint itself: its first report then
        comes later than the first report of the job's ``first`` attempt."""
        is_known = self.began_training or self.resumed_from is not None
        if is_known or self.first_step is None or first.first_step is None:
            return self
        unreported = first.first_step - first.start_step
        return replace(self, start_step=max(self.first_step - unreported, 0))

    @property
    def outcome(self) -> str:
        """``unfinished``, ``completed`` or the failure's kind."""
        if self.kind is not None:
            return self.kind.value
        return UNFINISHED if self.seconds is None else COMPLETED

    @property
    def sizes(self) -> tuple[int, ...]:
        """The initial micro-batch, and the last micro-batch if its trainer changed it."""
        first = self.spec.batch_size
        last = self.micro_batch
        return (first,) if last in (None, first) else (first, last)

    @property
    def kind(self) -> FailureKind | None:
        """The failure's kind."""
        return None if self.failure is None else self.failure.kind

    @property
    def failed_by_itself(self) -> bool:
        """Whether a failure, and not a request to stop, ended it."""
        return self.kind not in (None, FailureKind.INTERRUPTED)

    @property
    def is_sure_bug(self) -> bool:
        """Whether its trainer's code failed, and will fail again until someone changes it."""
        return self.kind is FailureKind.BUG and self.evidence.clue in (None, Clue.USER_ERROR)

    @property
    def message(self) -> str | None:
        """Why it failed, in one line."""
        return None if self.failure is None else self.failure.message

    @property
    def evidence(self) -> Evidence:
        """The known facts about the failure."""
        return Evidence() if self.failure is None else self.failure.evidence

    @property
    def failed_gpus(self) -> Group:
        """The GPU on which it failed; all of its GPUs if that is unknown."""
        return gpus_of(self.spec.gpus, None if self.failure is None else self.failure.rank)

    @property
    def cuda_cannot_work(self) -> bool:
        """Whether it had GPUs, and CUDA works with none of them."""
        return self.kind is FailureKind.SETUP and bool(self.spec.gpus)

    @property
    def result(self) -> Json:
        """The trainer's result."""
        return self.ending.result if isinstance(self.ending, Finished) else None

    @property
    def exceptions(self) -> tuple[str, ...]:
        """The dotted names of the trainer's exception and its bases."""
        return self.ending.exceptions if isinstance(self.ending, Failed) else ()

    @property
    def exit_code(self) -> int | None:
        """A script's exit code as shells report it (128 + signal)."""
        code = self.script.returncode if isinstance(self.script, ScriptEnded) else None
        return code if code is None or code >= 0 else 128 - code

    @property
    def step(self) -> int | None:
        """The number of finished optimizer steps."""
        began = self.start_step if self.began_training else None
        return began if self.end_step is None else self.end_step

    @property
    def has_begun(self) -> bool:
        """Whether the attempt certainly reached its first step."""
        reached = self.end_step is not None or self.micro_batch is not None
        return self.began_training or reached

    @property
    def is_retried(self) -> bool:
        """Whether another attempt was decided after it."""
        return self.action not in ("none", "give_up", "stopped")

    def as_json(self) -> dict[str, Json]:
        """Return the record in JSON's types, as the journal and ``summary.json`` contain it."""
        seconds = self.seconds
        return {
            "attempt": self.number,
            **self.spec.as_json(),
            **self.fields_as_json(_NOT_IN_FILES),
            "started": round(self.started, 6),
            "seconds": None if seconds is None else round(seconds, 3),
            "outcome": self.outcome,
            "message": self.message,
        }

    @classmethod
    def parse(cls, data: Mapping[str, Json]) -> Attempt:
        """Parse :meth:`as_json`, whose keys include the keys of its spec.

        Raises:
            MalformedEventError: a field is missing or has another type.
        """
        return cls.from_fields({**data, "number": data.get("attempt"), "spec": data})


@dataclass(frozen=True)
class AttemptEnded(Event):
    """An attempt ended, and what comes next is decided."""

    name = "attempt_ended"
    record: Attempt  # the record, as in `summary.json`
