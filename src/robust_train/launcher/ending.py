"""Completes the record of an attempt that has ended, and decides how an error ends the job.

:class:`.job.Job` calls these functions in the launcher's process. After each attempt,
:func:`add_ending` adds its failure, :func:`add_advice` the advice, and :func:`add_decision` the
decision. Only :func:`add_advice` and :func:`load_error` have effects.
"""

from __future__ import annotations

import base64
import io
import pickle
import sys
from dataclasses import dataclass, replace
from typing import Any

from robust_train.config.attempt import AttemptRequest
from robust_train.failures import classify_exit
from robust_train.failures.advice import describe_cuda_versions, with_advice
from robust_train.failures.exits import blame_oom_killer
from robust_train.failures.stack import NativeStack, native_stack_in
from robust_train.launcher.plan import Plan
from robust_train.launcher.script_output import (
    classify_script_exit,
    name_refused_file,
    quote_output_end,
)
from robust_train.model.attempt import Attempt
from robust_train.model.errors import ConfigError, JobInterrupted, NoDeviceError, find_limit_error
from robust_train.model.events import Failed, Finished, RankDied, ScriptEnded
from robust_train.model.failure import Clue, Failure, FailureKind
from robust_train.model.spec import Decision, GiveUp

# Limits in characters. Several records repeat the message, and readers of state.json refuse a file
# of more than 1 MiB.
_LONGEST_MESSAGE = 20_000
_LONGEST_TRACEBACK = 100_000


def add_ending(
    attempt: Attempt,  # the attempt with all its events and its exit
    request: AttemptRequest,
    seconds: float,
) -> Attempt:
    """Return the attempt with its failure, as shown by its reports and the exit of its process."""
    end = attempt.exit
    crash = None
    if end.failure is None:
        crash = native_stack_in(end.stacks or end.output)
    failure = _find_failure(attempt, crash)
    traceback = None
    if failure is not None:
        traceback = _find_traceback(attempt, failure, crash, request.log_file.name)
        message = _cut_middle(failure.message, _LONGEST_MESSAGE)
        failure = replace(failure, message=message)
    if traceback:
        traceback = _cut_middle(traceback, _LONGEST_TRACEBACK)
    resident: int | None = end.max_resident_bytes
    if not resident:
        resident = attempt.memory.get("max_resident")
    return replace(
        attempt,
        seconds=seconds,
        failure=failure,
        traceback=traceback,
        peak_memory_bytes=attempt.memory.get("max_allocated", resident),
    )


def _find_failure(attempt: Attempt, crash: NativeStack | None) -> Failure | None:
    """Return why the attempt failed, None if it completed."""
    end = attempt.exit
    ending = attempt.ending
    if isinstance(ending, Finished):
        return None
    if end.failure is not None and not end.was_stopped:
        return end.failure
    if isinstance(ending, Failed):
        is_interrupted = ending.failure.kind is FailureKind.INTERRUPTED
        if isinstance(attempt.script, ScriptEnded) and not is_interrupted:
            return name_refused_file(classify_script_exit(attempt.script, end), attempt)
        if end.oom_killed:
            return blame_oom_killer(ending.failure)
        return ending.failure
    if end.was_stopped:
        why = "did not stop in time and was killed"
        if end.was_hurried:
            why = "killed at once by a second signal"
        return Failure(FailureKind.INTERRUPTED, why)
    return _classify_silent_end(attempt, crash)


def _classify_silent_end(attempt: Attempt, crash: NativeStack | None) -> Failure:
    """Return why an attempt failed if its process ended without a report."""
    end = attempt.exit
    rank = None
    returncode = end.returncode
    oom_killed = end.oom_killed
    if isinstance(attempt.ending, RankDied):
        rank = attempt.ending.rank
        returncode = attempt.ending.returncode
    elif end.pid is None:
        oom_killed = None
    if not returncode:
        why = "the trainer ended its process without returning"
        return Failure(FailureKind.BUG, why, rank=rank)
    output = end.output
    if crash is not None and end.stacks:
        output += f"\n{crash}"
    failure = classify_exit(returncode, output, oom_killed=oom_killed)
    return replace(failure, rank=rank)


def _find_traceback(
    attempt: Attempt, failure: Failure, crash: NativeStack | None, log_name: str
) -> str | None:
    """Return the text that shows where the attempt failed, None if nothing does."""
    end = attempt.exit
    if failure is end.failure:
        return end.stacks or None
    if attempt.script is not None:
        return quote_output_end(end.output, log_name)
    traceback: str | None = getattr(attempt.ending, "traceback", None)
    if not traceback and crash is not None:
        return str(crash)
    return traceback


def _cut_middle(text: str, longest: int) -> str:
    """Return the text without its middle if it is too long. An error may quote a whole file."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} … {text[-half:]}"


def add_advice(attempt: Attempt, plan: Plan) -> Attempt:
    """Return the attempt with advice on its failure, worded for the job's keys."""
    versions = describe_cuda_versions(attempt, plan.config)
    return plan.words.reword_attempt(with_advice(attempt, plan.config, versions))


def add_decision(attempt: Attempt, decision: Decision | None) -> Attempt:
    """Return the attempt with the decision after it.

    If the launcher gives up on a failure that may or may not have been a lack of memory, the
    failure counts as a bug.
    """
    if decision is None:
        return replace(attempt, reason=attempt.message or attempt.outcome)
    failure = attempt.failure
    is_unclear = failure is not None and failure.evidence.clue == Clue.UNCLEAR
    if failure is not None and is_unclear and isinstance(decision, GiveUp):
        failure = replace(failure, kind=FailureKind.BUG, advice=())
    return replace(attempt, failure=failure, action=decision.action, reason=decision.reason)


@dataclass(frozen=True)
class JobEnd:
    """How an error in the launcher ends a job."""

    status: str
    reason: str
    error: BaseException | None  # the exception to raise, None if the summary is enough


def classify_launcher_error(error: BaseException, pruned: str) -> JobEnd:
    """Return how an error in the launcher ends the job.

    Args:
        error: the exception.
        pruned: why a sweep stopped the job, empty if no sweep did.
    """
    error = find_limit_error(error) or error
    reason = str(error)
    if isinstance(error, JobInterrupted):
        if pruned:
            return JobEnd("pruned", pruned, None)
        return JobEnd("interrupted", reason, error)
    if isinstance(error, NoDeviceError):
        return JobEnd("no_device", reason, None)
    if not isinstance(error, ConfigError):
        reason = f"error in the launcher: {type(error).__name__}: {reason}"
    return JobEnd("failed", reason, error)


def load_error(attempt: Attempt) -> BaseException | None:
    """Return the trainer's exception, None if the launcher did not receive it.

    A script sends no exception, and some exceptions cannot be pickled.
    """
    ran_inline = attempt.exit.pid is None
    if ran_inline or attempt.script is not None:
        return attempt.exit.error
    if not isinstance(attempt.ending, Failed) or not attempt.ending.error:
        return None
    try:
        error = _LoadedOnlyUnpickler(io.BytesIO(base64.b64decode(attempt.ending.error))).load()
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None


class _LoadedOnlyUnpickler(pickle.Unpickler):
    """Loads only classes from modules that the launcher has already imported.

    Otherwise, one of torch's exceptions would import torch into the launcher.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module not in sys.modules:
            raise pickle.UnpicklingError(module)
        return super().find_class(module, name)
