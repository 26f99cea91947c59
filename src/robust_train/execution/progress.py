"""What an attempt's events add up to, as a frozen value; an attempt's outcome is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from robust_train.events import (
    BatchKept,
    CheckpointSaved,
    Event,
    Failed,
    Finished,
    MemoryCleared,
    MemoryReported,
    MicroBatchChanged,
    MicroBatchExhausted,
    Progress,
    RankDied,
    ScriptEnded,
    ScriptStarted,
    SpeedMeasured,
    TrainingStarted,
)
from robust_train.values import Failure, Outcome, Speed


@dataclass(frozen=True)
class AttemptProgress:
    """How far an attempt has come; of events that come once, the event."""

    start_step: int = 0
    end_step: int | None = None
    began_training: bool = False
    saved_step: int | None = None
    saves: int = 0
    checkpoint: str | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    micro_batch: int | None = None
    keeps_batch: str | None = None
    memory_cleared: MemoryCleared | None = None
    speeds: Mapping[int, Speed] = field(default_factory=dict)  # by rank
    ending: Finished | Failed | None = None
    rank_died: RankDied | None = None
    script_started: ScriptStarted | None = None
    script_ended: ScriptEnded | None = None

    def after(self, event: Event) -> AttemptProgress:
        """Return the progress after one more event."""
        match event:
            case Finished() | Failed():
                step = self.end_step if event.step is None else event.step
                memory = {**self.memory, **event.memory}
                return replace(self, ending=event, end_step=step, memory=memory)
            case RankDied():
                return replace(self, rank_died=event, memory={**self.memory, **event.memory})
            case TrainingStarted():
                return replace(self, start_step=event.step, began_training=True)
            case Progress():
                return replace(self, end_step=event.step)
            case SpeedMeasured():
                return replace(self, speeds={**self.speeds, event.rank: event.speed})
            case CheckpointSaved():
                step = self.end_step if event.step is None else event.step
                saves, path = self.saves + 1, event.path
                return replace(self, saved_step=step, saves=saves, checkpoint=path)
            case MemoryReported(rank=None):
                return replace(self, memory={**self.memory, **event.figures})
            case MicroBatchChanged(training=True):
                return replace(self, micro_batch=event.after or self.micro_batch)
            case MicroBatchExhausted(training=True):
                return replace(self, micro_batch=event.before)
            case BatchKept():
                return replace(self, keeps_batch=event.reason)
            case MemoryCleared(reason="end" | "failure"):
                return replace(self, memory_cleared=event)
            case ScriptStarted():
                return replace(self, script_started=event)
            case ScriptEnded():
                return replace(self, script_ended=event)
        return self

    @property
    def failure(self) -> Failure | None:
        """The failure that the attempt itself reported."""
        return self.ending.failure if isinstance(self.ending, Failed) else None

    def outcome(
        self,
        failure: Failure | None,  # why it failed, None if it completed
        seconds: float,  # wall time
        *,
        max_resident_bytes: int = 0,  # the process's peak, where it is known from outside
        error: BaseException | None = None,  # the exception, where it could be carried over
    ) -> Outcome:
        """Return the outcome of an attempt that has ended."""
        failed = self.ending if isinstance(self.ending, Failed) else None
        on_gpu = "max_allocated" in self.memory
        resident = max_resident_bytes or self.memory.get("max_resident")
        code = None if self.script_ended is None else self.script_ended.returncode
        returned = None if self.memory_cleared is None else self.memory_cleared.as_json()
        return Outcome(
            failure=failure,
            result=self.ending.result if isinstance(self.ending, Finished) else None,
            seconds=seconds,
            start_step=self.start_step,
            end_step=self.end_step,
            began_training=self.began_training,
            saved_step=self.saved_step,
            saves=self.saves,
            checkpoint=self.checkpoint,
            peak_memory_bytes=self.memory["max_allocated"] if on_gpu else resident,
            memory=dict(self.memory) if on_gpu else None,
            memory_returned=returned
            and {key: returned[key] for key in returned if key not in ("event", "reason", "step")},
            micro_batch=self.micro_batch,
            keeps_batch=self.keeps_batch,
            speed=tuple(self.speeds[rank] for rank in sorted(self.speeds)),
            stopped_for=failed.stopped_for if failed else None,
            traceback=failed.traceback if failed else None,
            exit_code=None if code is None else code if code >= 0 else 128 - code,
            exceptions=failed.exceptions if failed else (),
            others_know=failed is not None and failed.others_know,
            error=error,
        )
