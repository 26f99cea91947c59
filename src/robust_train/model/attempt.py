"""Holds the record of an attempt, from its start to the decision after it.

The launcher creates an :class:`Attempt` and updates it with each event (:meth:`Attempt.after`).
There is no other record: the journal, ``state.json``, ``summary.json``, a sweep's row and the
report all show fields of it, so every process that reads a run folder parses it.
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
from robust_train.model.gpu import Group, select_gpus
from robust_train.model.json import finite
from robust_train.model.parts import Part, Record, parts_like
from robust_train.model.spec import AttemptSpec

N = TypeVar("N", bound="Note")

UNFINISHED = "unfinished"
COMPLETED = "completed"

# Fields that only the launcher reads, so they are not written to files.
_OF_THE_LAUNCHER = {"number", "spec", "ending", "script", "exit", "keeps_batch", "split_changes"}
_OF_THE_COUNTS = {"began_training", "first_step", "saved_step", "saves"}
_NOT_IN_FILES = _OF_THE_LAUNCHER | _OF_THE_COUNTS


@dataclass(frozen=True)
class Note(Part):
    """A feature's fields in the record of an attempt."""

    # The classes of events that may change the note. Frequent events cost less if few notes
    # receive them.
    folds: ClassVar[tuple[type[Event], ...]] = (Event,)

    def after(self: N, event: Event, attempt: Attempt) -> N:
        """Return the note after another event.

        Args:
            event: the event.
            attempt: the attempt, whose own fields are updated already.
        """
        return self


@dataclass(frozen=True)
class Attempt(Record[Note]):
    """The spec, progress, end and following decision of an attempt.

    Features keep their fields in notes, for example ``attempt.of(SlowNote)``. None means that a
    value is not known, or not known yet. Memory is in bytes and time in seconds.
    """

    kind_of_part = Note

    number: int  # counted from 1, over all launches of the run folder
    # Includes the micro-batch that a search found in the attempt.
    spec: AttemptSpec
    started: float = 0.0  # seconds since the epoch
    resumed_from: str | None = None  # the checkpoint from which it resumed
    # --- its progress ---
    pid: int | None = None  # process id of rank 0
    # Whether the trainer reported that training starts. Some trainers never report that.
    began_training: bool = False
    start_step: int = 0  # optimizer step at which it started (0 for a fresh start)
    first_step: int | None = None  # first optimizer step that it reported
    end_step: int | None = None  # last optimizer step that it reported
    total_steps: int | None = None
    loss: float | None = None
    checkpoint: str | None = None  # path of the last checkpoint that it reported
    saved_step: int | None = None  # step of that checkpoint
    saves: int = 0  # number of checkpoints that it reported
    # The current micro-batch, if the trainer itself has changed it.
    micro_batch: int | None = None
    keeps_batch: str = ""  # why no attempt may split the batch in another way
    # The problem, if it ended because the losses of parts do not add up to the batch's loss.
    split_changes: str = ""
    # Bytes in use at the last milestone, by name. With several ranks, the figures are those of the
    # rank with the highest peak.
    memory: Mapping[str, int] = field(default_factory=dict)
    # --- the evidence of its end ---
    # The report of the trainer, or the end that caused the ends of the other ranks.
    ending: Finished | Failed | RankDied | None = None
    # The last event of its script, None for other trainers.
    script: ScriptStarted | ScriptEnded | None = None
    exit: Exit = field(default_factory=Exit)
    # --- its end ---
    seconds: float | None = None  # wall time
    failure: Failure | None = None  # None if it completed
    # The trainer's traceback, or the last lines of a script's output.
    traceback: str | None = None
    # Peak memory on the device, or of the process on the CPU.
    peak_memory_bytes: int | None = None
    # --- the decision after it ---
    action: str = "none"  # the remedy's name
    reason: str | None = None  # one sentence

    def after(self, event: Event) -> Attempt:
        """Return the attempt, with its notes, after another event."""
        attempt = self._after(event)
        for kind in _find_notes_for(type(event)):  # type: ignore[arg-type]  # it is hashable
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
                return self._after_progress(event)
            case CheckpointSaved(is_useful=False):
                return self
            case CheckpointSaved():
                step = event.step
                if step is None:
                    step = self.end_step
                return replace(self, checkpoint=event.path, saved_step=step, saves=self.saves + 1)
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
                size = event.batch_size
                accumulation = event.gradient_accumulation_steps
                return replace(self, spec=self.spec.with_batch(size, accumulation))
            case TrainerSupports():
                return replace(self, spec=self.spec.supporting(event.features))
            case RankDied():
                return replace(self, ending=event, memory={**self.memory, **event.memory})
            case ScriptStarted() | ScriptEnded():
                return replace(self, script=event)
            case Finished() | Failed():
                step = event.step
                if step is None:
                    step = self.end_step
                memory = {**self.memory, **event.memory}
                return replace(self, ending=event, end_step=step, memory=memory)
        return self

    def _after_progress(self, event: Progress) -> Attempt:
        first_step = self.first_step
        if first_step is None:
            first_step = event.step
        total_steps = event.total_steps
        if total_steps is None:
            total_steps = self.total_steps
        # A metric may have any type.
        loss = finite(event.metrics.get("loss", self.loss))
        after = replace(
            self, first_step=first_step, end_step=event.step, total_steps=total_steps, loss=loss
        )
        if self.step is None:
            return after._correct_start_step(event.step)
        return after

    def _correct_start_step(self, reported: int) -> Attempt:
        """Correct the start step of a resumed attempt from the first step that it reported."""
        before = max(reported - 1, 0)
        is_known = self.resumed_from is None or 0 < self.start_step <= before
        return self if is_known else replace(self, start_step=before)

    def infer_start_step(self, first: Attempt) -> Attempt:
        """Correct the start step of a program that found a checkpoint by itself.

        Such a program reports its first step later than the job's ``first`` attempt did.
        """
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
        """Whether a failure ended the attempt, and not a request to stop."""
        return self.kind not in (None, FailureKind.INTERRUPTED)

    @property
    def is_sure_bug(self) -> bool:
        """Whether the trainer's code failed, and will fail again until someone changes it."""
        return self.kind is FailureKind.BUG and self.evidence.clue in (None, Clue.USER_ERROR)

    @property
    def message(self) -> str | None:
        """The reason for its failure, in one line."""
        return None if self.failure is None else self.failure.message

    @property
    def evidence(self) -> Evidence:
        """The known facts about the failure."""
        return Evidence() if self.failure is None else self.failure.evidence

    @property
    def failed_gpus(self) -> Group:
        """The GPU on which the attempt failed, or all of its GPUs if that is unknown."""
        rank = None if self.failure is None else self.failure.rank
        return select_gpus(self.spec.gpus, rank)

    @property
    def cuda_cannot_work(self) -> bool:
        """Whether the attempt had GPUs, but CUDA does not work with any of them."""
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
        if not isinstance(self.script, ScriptEnded):
            return None
        code = self.script.returncode
        return code if code >= 0 else 128 - code

    @property
    def step(self) -> int | None:
        """The number of finished optimizer steps, None if unknown."""
        if self.end_step is not None:
            return self.end_step
        return self.start_step if self.began_training else None

    @property
    def has_begun(self) -> bool:
        """Whether the attempt certainly reached its first step."""
        reached = self.end_step is not None or self.micro_batch is not None
        return self.began_training or reached

    @property
    def is_retried(self) -> bool:
        """Whether the decision after it was to run another attempt."""
        return self.action not in ("none", "give_up", "stopped")

    def as_json(self) -> dict[str, Json]:
        """Return the record in JSON's types, for the journal and ``summary.json``."""
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
        """Parse the result of :meth:`as_json`, whose keys include the keys of the spec.

        Raises:
            MalformedEventError: a field is missing or has another type.
        """
        return cls.from_fields({**data, "number": data.get("attempt"), "spec": data})


@functools.cache
def _find_notes_for(event: type[Event]) -> tuple[type[Note], ...]:
    """Return the notes that an event of this class may change."""
    active = [kind for kind in parts_like(Note) if kind.after is not Note.after]
    return tuple(kind for kind in active if issubclass(event, kind.folds))


@dataclass(frozen=True)
class AttemptEnded(Event):
    """An attempt ended, and the launcher has decided what comes next."""

    name = "attempt_ended"
    record: Attempt  # the record, as in `summary.json`
