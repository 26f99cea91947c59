"""What a job leaves behind: ``summary.json``, and the table on the screen at its end."""

from __future__ import annotations

import json
import logging
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from robust_train.errors import AttemptsExhausted, NoDevice, TrainerFailed
from robust_train.events import Json, from_json
from robust_train.files import strict_json, write_json
from robust_train.memory.stability import Stability
from robust_train.readable import by_processes, changed, shortened
from robust_train.values import (
    GIB,
    Attempt,
    Clue,
    Decision,
    FailureKind,
    Outcome,
    Pace,
    Retry,
    Speed,
)

log = logging.getLogger("robust_train")

FILE_NAME = "summary.json"
SCHEMA = 2
_ENDING_OF_A_PROCESS = re.compile(r"ended (?:with|by) ([^:]+)")


@dataclass(frozen=True)
class AttemptSummary:
    """An attempt as ``summary.json`` and the journal have it: its number, what it used, how it
    ended, and what was decided then. Schema 1 had ``index``, from 0, in place of ``attempt``."""

    device: str
    outcome: str
    attempt: int | None = None
    gpu_uuid: str | None = None
    gpu_uuids: tuple[str, ...] = ()
    ranks: int = 1
    batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    effective_batch_size: int | None = None
    num_workers: int | None = None
    message: str | None = None
    action: str | None = None
    reason: str | None = None
    seconds: float = 0.0
    start_step: int = 0
    end_step: int | None = None
    batch_size_found: Mapping[str, Json] | None = None
    peak_memory_bytes: int | None = None
    memory_returned: Mapping[str, Json] | None = None
    memory_stability: Stability | None = None
    speed: tuple[Speed, ...] = ()
    faster_before: Pace | None = None


@dataclass(frozen=True)
class SavedSummary:
    """A ``summary.json`` that was read; see :class:`Summary`."""

    status: str
    reason: str | None = None
    result: Any = None
    wall_seconds: float | None = None
    wait_seconds: float | None = None
    checkpoint: str | None = None
    attempts: tuple[AttemptSummary, ...] = ()

    @property
    def objective(self) -> Any:
        """What a sweeper optimises."""
        return objective_of(self.result)


def read_summary(folder: Path) -> SavedSummary | None:
    """Read the summary of a run folder; None where there is none that can be read."""
    try:
        text = (folder / FILE_NAME).read_text(encoding="utf-8", errors="replace")
        return from_json(SavedSummary, json.loads(text))
    except (OSError, ValueError, RecursionError):
        return None


@dataclass(frozen=True)
class AttemptRecord:
    """A finished attempt, what was decided after it (None after the last one), and whether its
    memory was stable (None without samples)."""

    attempt: Attempt
    decision: Decision | None = None
    stability: Stability | None = None

    def as_json(self, number: int) -> dict[str, Json]:
        """Return the record as ``summary.json`` has it; ``number``: in all launches of the job."""
        return asdict(self.summarized(number))

    def summarized(self, number: int) -> AttemptSummary:
        """Return the record in short."""
        spec, outcome = self.attempt.spec, self.attempt.outcome
        message = None if outcome.failure is None else outcome.failure.message
        action, reason = "none", message or "completed"
        if self.decision is not None:
            action, reason = self.decision.action, self.decision.reason
        sizes = (spec.batch_size, spec.gradient_accumulation_steps, spec.effective_batch_size)
        batch_size, accumulation, effective = sizes if spec.has_batch else (None, None, None)
        return AttemptSummary(
            attempt=number,
            device=spec.device,
            gpu_uuid=None if spec.gpu is None else spec.gpu.uuid,
            gpu_uuids=tuple(gpu.uuid for gpu in spec.gpus),
            ranks=spec.ranks,
            batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            effective_batch_size=effective,
            num_workers=spec.num_workers,
            outcome=outcome.label,
            message=message,
            action=action,
            reason=reason,
            seconds=round(outcome.seconds, 3),
            start_step=outcome.start_step,
            end_step=outcome.end_step,
            batch_size_found=outcome.batch_search,
            peak_memory_bytes=outcome.peak_memory_bytes,
            memory_returned=outcome.memory_returned,
            memory_stability=self.stability,
            speed=tuple(s if spec.has_batch else s.without_samples() for s in outcome.speed),
            faster_before=outcome.faster_before,
        )


@dataclass(frozen=True)
class Summary:
    """How a job went."""

    status: str  # `completed`, `failed`, `no_device` or `interrupted`
    run_dir: Path  # the run folder
    reason: str | None = None  # one sentence for any status but `completed`
    result: Any = None  # what the trainer returned, in JSON's types
    wall_seconds: float = 0.0  # from the launcher's start of the job to its end
    wait_seconds: float = 0.0  # of those, waiting for a GPU
    attempts: tuple[AttemptRecord, ...] = ()  # every attempt, first to last
    checkpoint: Path | None = None  # the last checkpoint that a trainer reported, None if none
    environment: Mapping[str, Json] | None = None  # the short form of `environment.json`
    advice: tuple[str, ...] = ()  # what would make the job faster, a sentence each
    first_attempt: int = 1  # the number of the first, in all launches of the run folder
    earlier_seconds: float = 0.0  # duration of the job's launches before

    def raise_unless_completed(self) -> None:
        """Raise what ended the job, if it did not complete. Raises NoDevice: no device in time, and
        the CPU is not allowed; AttemptsExhausted: memory ran out on every device that may be used;
        TrainerFailed: the trainer failed otherwise; or its own exception."""
        reason = str(self.reason)
        if self.status == "completed":
            return
        if self.status == "no_device" or not self.attempts:
            raise NoDevice(reason)
        last = self.attempts[-1].attempt.outcome
        if last.failure is not None and last.failure.kind.is_memory:
            raise AttemptsExhausted(reason)
        text = reason
        if last.traceback is not None:  # a crash's stack does not name the signal that ended it
            text = last.traceback if text in last.traceback else f"{text}\n{last.traceback}"
        raise TrainerFailed(text) if last.error is None else last.error from TrainerFailed(text)

    @property
    def objective(self) -> Any:
        """What a sweeper optimises."""
        return objective_of(self.result)

    def as_json(self) -> dict[str, Json]:
        """Return the content of ``summary.json``."""
        content: dict[str, Json] = strict_json(
            {
                "schema": SCHEMA,
                "status": self.status,
                "reason": self.reason,
                "result": self.result,
                "wall_seconds": round(self.wall_seconds, 3),
                "wait_seconds": round(self.wait_seconds, 3),
                "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
                "environment": self.environment,
                "advice": self.advice,
                "attempts": [
                    record.as_json(number)
                    for number, record in enumerate(self.attempts, start=self.first_attempt)
                ],
            }
        )
        return content

    def write(self) -> None:
        """Write ``summary.json``, whole or not at all; a full disk costs a warning."""
        path = self.run_dir / FILE_NAME
        try:
            write_json(path, self.as_json(), indent=2, durable=True)
        except OSError as error:
            log.warning("cannot write %s: %s", path, error.strerror)


def objective_of(result: Any) -> Any:
    """Return what a sweeper optimises of a trainer's result: its ``objective``, else all of it."""
    return result.get("objective", result) if isinstance(result, dict) else result


def attempts_table(summary: Summary) -> str:
    """Return the attempts, by their numbers, as plain columns of 80 characters for any output."""
    rows = [["#", "device", "batch", "effective", "steps", "time", "outcome"]]
    for number, record in enumerate(summary.attempts, start=summary.first_attempt):
        spec, outcome, decision = record.attempt.spec, record.attempt.outcome, record.decision
        where = spec.device + by_processes(spec.ranks)
        is_stop = decision is not None and decision.action == "stopped"
        ending = ending_of(outcome, is_stop=is_stop)
        if isinstance(decision, Retry):
            ending += f" → {decision.action}"
        seconds = f"{outcome.seconds:.1f} s"
        rows.append([str(number), where, *_sizes(record.attempt), seconds, ending])
    lines = aligned(rows)
    below = " " * lines[0].index(rows[0][-1])
    wrap = textwrap.TextWrapper(80, subsequent_indent=below, break_long_words=False)
    return "\n".join(line for row in lines for line in wrap.wrap(row))


def _sizes(attempt: Attempt) -> tuple[str, str, str]:
    """Return micro-batch (and what it became), effective batch, steps."""
    spec, outcome = attempt.spec, attempt.outcome
    steps = f"{outcome.start_step}-{'?' if outcome.end_step is None else outcome.end_step}"
    if outcome.end_step is None and not outcome.start_step:
        steps = "-"
    if not spec.has_batch:
        return "-", "-", steps
    return changed(spec.batch_size, outcome.micro_batch), str(spec.effective_batch_size), steps


def ending_of(outcome: Outcome, *, is_stop: bool) -> str:
    """Return in a few words how an attempt ended; ``is_stop``: somebody had stopped the job."""
    failure = outcome.failure
    if is_stop and (failure is None or failure.kind is FailureKind.INTERRUPTED):
        return "stopped"
    words = {Clue.USER_ERROR: "user error", Clue.STALLED: "hang"}
    if failure is not None and failure.evidence.clue in words:
        return words[failure.evidence.clue]
    if failure is not None and failure.kind is FailureKind.INTERRUPTED:
        return shortened(failure.message, 60)
    process = failure and _ENDING_OF_A_PROCESS.match(failure.message)
    if process and failure is not None and failure.kind is FailureKind.BUG:
        return process[1]  # a script's may mean anything
    return outcome.label


def aligned(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> list[str]:
    """Return rows of cells as lines of plain columns; those numbered in ``right`` end flush."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def gpu_memory_summary(record: AttemptRecord) -> str | None:
    """Return the memory figures of an attempt that used CUDA, None for one that did not."""
    memory = record.attempt.outcome.memory
    if memory is None:
        return None
    return (
        f"GPU Memory Summary ({record.attempt.spec.device}):\n"
        f"  Allocated: {memory.get('allocated', 0) / GIB:.2f} GB\n"
        f"  Reserved: {memory.get('reserved', 0) / GIB:.2f} GB\n"
        f"  Max Allocated: {memory.get('max_allocated', 0) / GIB:.2f} GB"
    )


def evidence_of(outcome: Outcome) -> dict[str, Json]:
    """Return what is known about a failure, for the journal; empty for a completed attempt."""
    if outcome.failure is None:
        return {}
    return {
        **asdict(outcome.failure.evidence),
        "gpu_free_before_bytes": outcome.gpu_free_before_bytes,
        "gpu_free_after_bytes": outcome.gpu_free_after_bytes,
        "micro_batch": outcome.micro_batch,
        "traceback": outcome.traceback,
        "advice": list(outcome.failure.advice),
    }
