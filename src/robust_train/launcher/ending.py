"""How an attempt ended, and which of its ranks caused the end.

The launcher completes an attempt's record here once, when all the evidence exists. Everything but
:func:`advised` and :func:`error_of` is pure.
"""

from __future__ import annotations

import base64
import io
import pickle
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from robust_train.config.attempt import AttemptRequest
from robust_train.failures import classify_exit
from robust_train.failures.advice import describe_cuda_versions, with_advice
from robust_train.failures.exits import blame_oom_killer
from robust_train.failures.printed import drop_before_last_steps, put_final_error_last
from robust_train.failures.stack import TRACEBACK, NativeStack, native_stack_in
from robust_train.launcher.plan import Plan
from robust_train.model.attempt import Attempt
from robust_train.model.errors import ConfigError, JobInterrupted, NoDeviceError, limit_reached
from robust_train.model.events import Failed, Finished, RankDied, ScriptEnded
from robust_train.model.exit import Exit
from robust_train.model.failure import Clue, Failure, FailureKind
from robust_train.model.spec import Decision, GiveUp

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_LOSS = re.compile(r"loss[\"']?\s{0,3}[=:]?\s{0,3}(\d+\.\d|[-+]?(?:nan|inf)\b)", re.IGNORECASE)
_MOST_LINES = 40
_LINES = 15
# In characters. Every record of the attempt has the message, and state.json is read up to 1 MiB.
_LONGEST_MESSAGE = 20_000
_LONGEST_TRACEBACK = 100_000


def ended(
    attempt: Attempt,  # the attempt with all its events and its exit
    request: AttemptRequest,
    seconds: float,
) -> Attempt:
    """Return the attempt with its failure, from its reports and its process's exit."""
    end = attempt.exit
    memory = attempt.memory
    crash = None if end.failure else native_stack_in(end.stacks or end.output)
    failure = _failure(attempt, crash)
    traceback = getattr(attempt.ending, "traceback", None)
    if failure is None:
        traceback = None
    elif failure is end.failure:
        traceback = end.stacks or None
    elif attempt.script is not None:
        traceback = last_words(end.output, request.log_file.name)
    elif not traceback and crash is not None:
        traceback = str(crash)
    resident: int | None = end.max_resident_bytes
    if not resident:
        resident = memory.get("max_resident")
    if traceback:
        traceback = _without_middle(traceback, _LONGEST_TRACEBACK)
    if failure is not None:
        message = _without_middle(failure.message, _LONGEST_MESSAGE)
        failure = replace(failure, message=message)
    return replace(
        attempt,
        seconds=seconds,
        failure=failure,
        traceback=traceback,
        peak_memory_bytes=memory.get("max_allocated", resident),
    )


def advised(attempt: Attempt, plan: Plan) -> Attempt:
    """Return the attempt with advice on its failure, worded for the job's keys."""
    versions = describe_cuda_versions(attempt, plan.config)
    return plan.words.attempt(with_advice(attempt, plan.config, versions))


def concluded(attempt: Attempt, decision: Decision | None) -> Attempt:
    """Return the attempt with the decision after it.

    An unclear lack of memory that no remedy helped is a bug.
    """
    if decision is None:
        return replace(attempt, reason=attempt.message or attempt.outcome)
    failure = attempt.failure
    if (
        failure is not None
        and failure.evidence.clue == Clue.UNCLEAR
        and isinstance(decision, GiveUp)
    ):
        failure = replace(failure, kind=FailureKind.BUG, advice=())
    return replace(attempt, failure=failure, action=decision.action, reason=decision.reason)


def failure_of_launcher(error: BaseException, pruned: str) -> tuple[str, str, BaseException | None]:
    """Classify an error in the launcher that ends the job.

    Args:
        error: what was raised.
        pruned: why a sweep stopped the job, empty if none did.

    Returns:
        The job's status, the reason, and the exception for the caller, None if the summary is
            enough.
    """
    error = limit_reached(error) or error
    reason = str(error)
    if isinstance(error, JobInterrupted):
        if pruned:
            return "pruned", pruned, None
        return "interrupted", reason, error
    if isinstance(error, NoDeviceError):
        return "no_device", reason, None
    if not isinstance(error, ConfigError):
        reason = f"error in the launcher: {type(error).__name__}: {reason}"
    return "failed", reason, error


def _without_middle(text: str, longest: int) -> str:
    """Shorten a text in its middle: an exception may quote a whole file."""
    half = longest // 2
    if len(text) <= longest:
        return text
    return f"{text[:half]} … {text[-half:]}"


def _failure(attempt: Attempt, crash: NativeStack | None) -> Failure | None:
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
            return _with_file(failure_of_script(attempt.script, end), attempt)
        return blame_oom_killer(ending.failure) if end.oom_killed else ending.failure
    if end.was_stopped:
        why = "did not stop in time and was killed"
        if end.was_hurried:
            why = "killed at once by a second signal"
        return Failure(FailureKind.INTERRUPTED, why)
    oom_killed = end.oom_killed
    rank = None
    returncode = end.returncode
    if isinstance(ending, RankDied):
        rank = ending.rank
        returncode = ending.returncode
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


def failure_of_script(ended: ScriptEnded, end: Exit) -> Failure:
    """Return why a script failed, as if its exit were the attempt's exit."""
    output = without_escapes(end.output)
    failure = classify_exit(ended.returncode, output, oom_killed=end.oom_killed)
    is_unknown = failure.evidence.clue == Clue.UNKNOWN
    if end.shortage and is_unknown and TRACEBACK not in output:
        return classify_exit(ended.returncode, end.shortage)
    return failure


def _with_file(failure: Failure, attempt: Attempt) -> Failure:
    """Add the checkpoint that its script could not load, with advice, to a failure."""
    if failure.evidence.clue != Clue.REFUSED:
        return failure
    file = attempt.checkpoint or attempt.resumed_from or "the file"
    how = (
        f"torch.load takes weights only, and {file} holds more: write torch.load(…, "
        "weights_only=False) for a file of your own, or export "
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 where a library loads it"
    )
    return replace(failure, message=f"{failure.message.partition(': ')[0]}: {how}")


def doubt_of(attempt: Attempt) -> str:
    """Return the sign that a script which ended with 0 may have failed; empty without such a
    sign."""
    if attempt.failure is not None or not isinstance(attempt.script, ScriptEnded):
        return ""
    printed = without_escapes(attempt.exit.output)
    output = drop_before_last_steps(put_final_error_last(printed)).rstrip()
    seen = classify_exit(1, output)
    what = seen.message.removeprefix("ended with exit code 1: ")
    is_workers = seen.kind is FailureKind.WORKER_DEATH
    if not (seen.kind.is_memory or is_workers or TRACEBACK in output):
        return _doubt_of_loss(printed)
    return (
        f"the script ended with exit code 0, but its output shows a failure: {what} (a shell has "
        "the exit code of its last command, such as tee: set -eo pipefail)"
    )


def _doubt_of_loss(printed: str) -> str:
    """Return a sentence if the last loss in an output is not finite, otherwise empty."""
    for line in reversed(re.split(r"[\r\n]", printed)):
        losses = _LOSS.findall(line)
        bad = [loss for loss in losses if not loss[0].isdigit()]
        if bad:
            return (
                f"the script ended with exit code 0, but the last loss that it printed is {bad[0]}"
            )
        if losses:
            break
    return ""


def last_words(output: str, log_name: str) -> str:
    """Return the end of a script's output for people: its last traceback or its last lines."""
    # A progress bar rewrites its line, so only its last state is shown.
    lines = [
        line.rstrip("\r").rpartition("\r")[2]
        for line in put_final_error_last(without_escapes(output)).split("\n")
    ]
    lines = [line.rstrip() for line in lines if line.strip()]
    starts = [number for number, line in enumerate(lines) if TRACEBACK in line]
    shown = lines[starts[-1] :] if starts else lines[-_LINES:]
    text = "\n".join(shown[-_MOST_LINES:]) or "(it printed nothing)"
    return f"the end of the script's output ({log_name}):\n{text}\n"


def without_escapes(text: str) -> str:
    """Remove colours and cursor movements: Python colours tracebacks on a terminal."""
    return _ESCAPES.sub("", text)


def error_of(attempt: Attempt) -> BaseException | None:
    """Return the trainer's exception, None for a script or if it could not be sent to the
    launcher."""
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
    """Builds exceptions only from modules that are already imported: no torch in the launcher."""

    def find_class(self, module: str, name: str) -> Any:
        if module not in sys.modules:
            raise pickle.UnpicklingError(module)
        return super().find_class(module, name)


# --- of several ranks -------------------------------------------------------------------------


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended, or that it still runs."""

    rank: int
    pid: int = 0
    # The event of its end, None while it runs or if it died without an event.
    ending: Finished | Failed | None = None
    # When it reported its end, else when the launcher saw it dead, in seconds.
    at: float = 0.0
    returncode: int | None = None  # its exit code as subprocess returns it, None while it runs
    was_killed: bool = False  # whether the launcher killed it because another rank had failed

    @property
    def is_over(self) -> bool:
        """Whether the rank has reported its end, or has died."""
        return self.ending is not None or self.returncode is not None

    @property
    def is_failure(self) -> bool:
        """Whether the rank itself failed, and was not killed because another rank had failed."""
        if self.ending is not None:
            return isinstance(self.ending, Failed)
        return self.is_over and not self.was_killed

    @property
    def was_stopped(self) -> bool:
        """Whether a signal stopped the rank."""
        return (
            isinstance(self.ending, Failed) and self.ending.failure.kind is FailureKind.INTERRUPTED
        )

    @property
    def others_know(self) -> bool:
        """Whether the other ranks end by themselves, after a last checkpoint."""
        return self.was_stopped or getattr(self.ending, "others_know", False)

    @property
    def report(self) -> Failed | None:
        """The rank's report of its failure, with the rank in which the failure began."""
        if not isinstance(self.ending, Failed):
            return None
        by = self.ending.caused_by_rank
        rank = self.rank if by is None else by
        failure = replace(self.ending.failure, rank=rank)
        return replace(self.ending, failure=failure)

    @property
    def order(self) -> tuple[int, float]:
        """Sort key: the end with the smallest key caused the other ends.

        A rank that the kernel killed reports nothing, and its peers report a broken connection
        first. So SIGKILL comes before any report. After that the earliest end counts that is not a
        consequence, by its kind (a lost connection, a request to stop) or by its report. A rank
        that left no evidence explains only such consequences.
        """
        if not isinstance(self.ending, Failed):
            ranking = {None: 3, -signal.SIGKILL: 0}
            return ranking.get(self.returncode, 1), self.at
        if self.ending.caused_by_rank is not None:
            return 2, self.at
        return (4 if self.ending.failure.kind.follows_from_others else 1), self.at


def root_cause(ends: Sequence[RankEnd]) -> RankEnd | None:
    """Return the end that caused the others, or None if no rank failed."""
    failed = (end for end in ends if end.is_failure)
    return min(failed, key=lambda end: end.order, default=None)


def event_of(ends: Sequence[RankEnd]) -> Finished | Failed | RankDied | None:
    """Merge the ends of several ranks into a single event, or None if all that failed were
    killed."""
    figures = (end.ending.memory for end in ends if end.ending is not None)
    memory = max(figures, key=_peak_in, default={})
    root = root_cause(ends)
    first = ends[0].ending
    # Rank 0 has done its last step, so its result counts.
    is_late = all(end.was_stopped for end in ends if end.is_failure)
    if root is None or (isinstance(first, Finished) and is_late):
        return None if first is None else replace(first, memory=memory)
    if root.report is None:
        return RankDied(root.rank, root.pid, root.returncode or 0, memory)
    return replace(root.report, memory=memory)


def _peak_in(figures: Mapping[str, int]) -> int:
    """Return the peak among the figures of a rank's memory: of its GPU, else of the host."""
    return figures.get("max_allocated", figures.get("max_resident", 0))
