"""What a job leaves behind: ``summary.json``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from robust_train.files import from_json, strict_json, write_json
from robust_train.model.attempt import Attempt
from robust_train.model.errors import AttemptsExhausted, NoDevice, TrainerFailed
from robust_train.model.events import SCHEMA, Json

log = logging.getLogger("robust_train")

FILE_NAME = "summary.json"


@dataclass(frozen=True)
class Summary:
    """How a job went."""

    status: str  # `completed`, `failed`, `no_device` or `interrupted`
    run_dir: Path = Path()  # the run folder
    reason: str | None = None  # one sentence for any status but `completed`
    result: Any = None  # what the trainer returned, in JSON's types
    wall_seconds: float | None = None  # from the launcher's start of the job to its end
    wait_seconds: float | None = None  # of those, waiting for a GPU
    checkpoint: Path | None = None  # the last one that a trainer reported
    environment: Mapping[str, Json] | None = (
        None  # the short form of `environment.json`
    )
    advice: tuple[str, ...] = ()  # what would make the job faster, a sentence each
    attempts: tuple[Attempt, ...] = ()  # of this launch, first to last
    # --- of the job that has just ended, not in the file ---
    earlier_seconds: float = 0.0  # duration of the job's launches before
    error: BaseException | None = None  # the trainer's own exception

    def raise_unless_completed(self) -> None:
        """Raise what ended the job, if it did not complete.

        Raises:
            NoDevice: no device in time, and the CPU is not allowed.
            AttemptsExhausted: memory ran out on every device that may be used.
            TrainerFailed: the trainer failed otherwise; or its own exception.
        """
        reason = str(self.reason)
        if self.status == "completed":
            return
        if self.status == "no_device" or not self.attempts:
            raise NoDevice(reason)
        last = self.attempts[-1]
        if last.failure is not None and last.failure.kind.is_memory:
            raise AttemptsExhausted(reason)
        text = reason
        if (
            last.traceback is not None
        ):  # a crash's stack does not name the signal that ended it
            text = (
                last.traceback
                if text in last.traceback
                else f"{text}\n{last.traceback}"
            )
        raise (
            TrainerFailed(text) if self.error is None else self.error
        ) from TrainerFailed(text)

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
                "wall_seconds": _rounded(self.wall_seconds),
                "wait_seconds": _rounded(self.wait_seconds),
                "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
                "environment": self.environment,
                "advice": self.advice,
                "attempts": [attempt.as_json() for attempt in self.attempts],
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


def read_summary(folder: Path) -> Summary | None:
    """Return the summary in a run folder, None if there is none that can be read.

    The attempts of a file that another version wrote may be missing.
    """
    try:
        text = (folder / FILE_NAME).read_text(encoding="utf-8", errors="replace")
        content = json.loads(text)
        attempts = content.pop("attempts", ()) if isinstance(content, dict) else ()
        summary = replace(from_json(Summary, content), run_dir=folder)
    except (OSError, ValueError, RecursionError):
        return None
    try:
        return replace(summary, attempts=tuple(Attempt.parse(one) for one in attempts))
    except (ValueError, TypeError, AttributeError):
        return summary


def objective_of(result: Any) -> Any:
    """Return what a sweeper optimises of a trainer's result: its ``objective``, else all of it."""
    return result.get("objective", result) if isinstance(result, dict) else result


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
