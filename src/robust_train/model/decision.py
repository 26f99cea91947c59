"""What was decided after an attempt, and the rules that a user gives for it."""

from __future__ import annotations

from dataclasses import dataclass

from robust_train.model.spec import AttemptSpec


@dataclass(frozen=True)
class RetryRule:
    """What the user wants done after a failure to which all that the rule names applies."""

    then: str  # `retry`, `stop`, `exclude_gpu` or `smaller_batch`
    exit_code: int | None = None  # of a script
    message: str | None = None  # pattern that is found in message, traceback or output
    exception: str | None = None  # class, or dotted name of one, as `except` has it
    times: int | None = (
        None  # at most, without progress in between; None: `max_retries`
    )


@dataclass(frozen=True)
class Room:
    """Free memory that must be there first."""

    # on all of these GPUs; empty: on `counts` of them, whichever they are
    gpu_uuids: tuple[str, ...]
    free_bytes: int  # on each of them
    exclude: tuple[str, ...] = ()  # GPUs that will not do
    counts: tuple[int, ...] = (
        1,
    )  # of GPUs where none are named: the first that can be had


@dataclass(frozen=True)
class Retry:
    """Decision: run ``spec`` next."""

    spec: AttemptSpec  # what to use
    action: str  # the remedy's name, as `summary.json` spells it
    reason: str  # one sentence
    warning: str | None = None  # what the user should know besides, or None
    pause_seconds: float = 0.0  # to let pass before
    room: Room | None = None  # to wait for before, or None
    otherwise: Decision | None = None  # what to do if there is no room in time


@dataclass(frozen=True)
class GiveUp:
    """Decision: no further attempt. ``action`` is ``stopped`` where the user stopped the job."""

    reason: str
    action: str = "give_up"


Decision = Retry | GiveUp
