"""What a job leaves behind: ``summary.json``, and the table on the screen at its end."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from robust_train.files import replacing
from robust_train.memory.stability import Stability
from robust_train.runfolder.journal import strict_json
from robust_train.values import GIB, Attempt, Decision, Outcome

log = logging.getLogger("robust_train")

SCHEMA = 1


@dataclass(frozen=True)
class AttemptRecord:
    """A finished attempt, what was decided after it (None after the last one), and whether its
    memory was stable (None without samples)."""

    attempt: Attempt
    decision: Decision | None = None
    stability: Stability | None = None

    def as_json(self, index: int) -> dict[str, Any]:
        """The record as ``summary.json`` has it."""
        spec, outcome = self.attempt.spec, self.attempt.outcome
        failure = outcome.failure
        if self.decision is not None:
            action, reason = self.decision.action, self.decision.reason
        else:
            action, reason = "none", "completed" if failure is None else failure.message
        return {
            "index": index,
            "device": spec.device,
            "gpu_uuid": spec.gpu.uuid if spec.gpu is not None else None,
            "gpu_uuids": [gpu.uuid for gpu in spec.gpus],
            "ranks": spec.ranks,
            "batch_size": spec.batch_size,
            "gradient_accumulation_steps": spec.gradient_accumulation_steps,
            "effective_batch_size": spec.effective_batch_size,
            "num_workers": spec.num_workers,
            "outcome": outcome.label,
            "message": None if failure is None else failure.message,
            "action": action,
            "reason": reason,
            "seconds": round(outcome.seconds, 3),
            "start_step": outcome.start_step,
            "end_step": outcome.end_step,
            "batch_size_found": outcome.batch_search,
            "peak_memory_bytes": outcome.peak_memory_bytes,
            "memory_returned": outcome.memory_returned,
            "memory_stability": None if self.stability is None else asdict(self.stability),
        }


@dataclass(frozen=True)
class Summary:
    """How a job went.

    Attributes:
        status: ``completed``, ``failed``, ``no_device`` or ``interrupted``.
        reason: one sentence for any status but ``completed``.
        result: what the trainer returned, in JSON's types.
        wall_seconds: from the launcher's start of the job to its end.
        wait_seconds: of those, waiting for a GPU.
        attempts: every attempt, first to last.
        run_dir: the run folder.
        checkpoint: the last checkpoint that a trainer reported, None if none.
    """

    status: str
    run_dir: Path
    reason: str | None = None
    result: Any = None
    wall_seconds: float = 0.0
    wait_seconds: float = 0.0
    attempts: tuple[AttemptRecord, ...] = ()
    checkpoint: Path | None = field(default=None)

    @property
    def objective(self) -> Any:
        """What a sweeper optimises."""
        return objective_of(self.result)

    def as_json(self) -> dict[str, Any]:
        """The content of ``summary.json``."""
        content = {
            "schema": SCHEMA,
            "status": self.status,
            "reason": self.reason,
            "result": self.result,
            "wall_seconds": round(self.wall_seconds, 3),
            "wait_seconds": round(self.wait_seconds, 3),
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
            "attempts": [record.as_json(index) for index, record in enumerate(self.attempts)],
        }
        return strict_json(content)  # type: ignore[no-any-return]

    def write(self) -> None:
        """Put ``summary.json`` into the run folder, whole or not at all."""
        path = self.run_dir / "summary.json"
        text = json.dumps(self.as_json(), indent=2, ensure_ascii=False) + "\n"
        try:
            with replacing(path) as temporary:
                temporary.write_text(text)
        except OSError as error:
            log.warning("cannot write %s: %s", path, error.strerror)


def objective_of(result: Any) -> Any:
    """The part of a trainer's result that a sweeper optimises: its ``objective`` where it has one,
    else all of it."""
    return result.get("objective", result) if isinstance(result, dict) else result


def attempts_table(records: Sequence[AttemptRecord]) -> str:
    """The attempts as plain columns, for terminals, pipes and log files alike."""
    header = (
        "attempt",
        "device",
        "batch",
        "accum.",
        "effective",
        "steps",
        "outcome",
        "next",
        "time",
    )
    rows = [header]
    for number, record in enumerate(records, start=1):
        spec, outcome = record.attempt.spec, record.attempt.outcome
        end = "?" if outcome.end_step is None else str(outcome.end_step)
        rows.append(
            (
                str(number),
                spec.device,
                str(spec.batch_size),
                str(spec.gradient_accumulation_steps),
                str(spec.effective_batch_size),
                f"{outcome.start_step}-{end}",
                outcome.label,
                "" if record.decision is None else record.decision.action,
                f"{outcome.seconds:.1f} s",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def gpu_memory_summary(record: AttemptRecord) -> str | None:
    """The block of memory figures for an attempt that used CUDA, None for one that did not."""
    memory = record.attempt.outcome.memory
    if memory is None:
        return None
    return (
        f"GPU Memory Summary ({record.attempt.spec.device}):\n"
        f"  Allocated: {memory['allocated'] / GIB:.2f} GB\n"
        f"  Reserved: {memory['reserved'] / GIB:.2f} GB\n"
        f"  Max Allocated: {memory['max_allocated'] / GIB:.2f} GB"
    )


def evidence_of(outcome: Outcome) -> dict[str, Any]:
    """Return what is known about a failure, for the journal; empty for a completed attempt."""
    if outcome.failure is None:
        return {}
    return {
        **asdict(outcome.failure.evidence),
        "gpu_free_before_bytes": outcome.gpu_free_before_bytes,
        "gpu_free_after_bytes": outcome.gpu_free_after_bytes,
        "micro_batch": outcome.micro_batch,
        "traceback": outcome.traceback,
    }
