"""Writes the launcher's log lines about a job and its attempts.

All functions run in the launcher. `RunFolder` calls `log_start` and `log_end` for each attempt. At
the end of the job, `Job` calls `show_end`. If the process ends with the job, it passes
`print_failure` as ``explain``.
"""

from __future__ import annotations

import logging
import os
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from robust_train.folder.state import Summary, figure_of
from robust_train.host.loggers import log_always, standard_error
from robust_train.model.attempt import Attempt
from robust_train.model.events import JobStarted
from robust_train.model.failure import MEMORY_FAILURES, Clue, FailureKind
from robust_train.model.spec import AttemptSpec, Decision, Retry
from robust_train.readable import GIB, align_columns, by_processes, duration, named_line, shorten
from robust_train.readable import number as number_text
from robust_train.report.facts import speed_of
from robust_train.report.sources import Entry, attempts_of, read_entries
from robust_train.report.wording import (
    action_in_words,
    batch_in_words,
    outcome_in_words,
    speed_text,
)

log = logging.getLogger("robust_train")

_LONGEST_REASON = 600  # characters of a job's reason in the last lines
# Clues that describe a failure better than its kind.
_CLUES = {Clue.USER_ERROR: "user error", Clue.STALLED: "hang", Clue.PORT: "port taken"}
# Matches "ended with exit code 3: …" and "ended by SIGSEGV: …".
_ENDING_OF_A_PROCESS = re.compile(r"ended (?:with|by) ([^:]+)")


def log_start(number: int, spec: AttemptSpec) -> None:
    """Log that attempt ``number`` starts."""
    where = spec.where
    if spec.gpu is not None:
        where += f" ({spec.gpu.name})"
    batch = ""
    if spec.has_batch:
        batch = f": {batch_in_words(Attempt(number, spec))}"
        if spec.noted("gradient_checkpointing", False):
            batch += ", gradient checkpointing"
        batch += f", effective batch {spec.effective_batch_size}"
    log.info("attempt %d on %s%s", number, where, batch)


def show_end(explain: Callable[[Summary], object], summary: Summary, how_to_go_on: str) -> None:
    """Log how a job ended: a table of its attempts, then the explanation, then the last lines.

    Args:
        explain: called after the table, such as `print_failure`.
        summary: the summary of the job.
        how_to_go_on: the command that continues the job, empty if there is none.
    """
    if summary.attempts:
        attempts = list[Attempt](attempts_of(_read_earlier_launches(summary.run_dir)))
        attempts += summary.attempts
        has_single_size = len(attempts) == 1 and len(attempts[0].sizes) <= 1
        # If the only attempt completed with its first size, the last lines say everything.
        if summary.status != "completed" or not has_single_size:
            log_line = _choose_log_function(summary)
            log_line("attempts:\n%s", attempts_table(attempts))
        memory = gpu_memory_summary(summary.attempts[-1])
        if memory:
            log.info("%s", memory)
    explain(summary)
    log_last_lines(summary, how_to_go_on)


def _choose_log_function(summary: Summary) -> Callable[..., None]:
    """Return the function that logs a job's last lines. Only good news depend on the log level."""
    went_well = summary.status == "completed" and len(summary.attempts) <= 1
    return log.info if went_well else log_always


def _read_earlier_launches(run_dir: Path) -> Sequence[Entry]:
    """Return the events of the job's earlier launches from its journal, if it can be read."""
    try:
        entries = read_entries(run_dir)
    except Exception as error:  # A job must not fail because its table cannot be shown.
        log.warning("earlier attempts cannot be shown: %s", named_line(error))
        return ()
    starts = []  # of all launches: the position in the journal, and the job's id
    for position, entry in enumerate(entries):
        if isinstance(entry.event, JobStarted):
            starts.append((position, entry.event.job))
    if not starts:
        return ()
    this_launch, job = starts[-1]
    starts_of_job = [position for position, each in starts if each == job]
    return entries[starts_of_job[0] : this_launch]


def print_failure(summary: Summary) -> None:
    """Print to stderr why a job failed, unless the screen shows it already.

    It prints the trainer's traceback if there is one, and the reason if the traceback does not
    explain the failure. If stderr and stdout are the same, the log has shown the reason, and a
    script has shown its own traceback.
    """
    last = summary.attempts[-1] if summary.attempts else None
    is_refusal = summary.status == "failed" and last is None
    if is_refusal or summary.status not in ("failed", "no_device"):
        return
    is_log_visible = os.path.sameopenfile(1, 2)
    if is_log_visible and last is not None and last.script is not None:
        return
    kind = None
    traceback = None
    if last is not None:
        kind = last.kind
        # The traceback of an out-of-memory error does not help. For a mistake that the trainer
        # explains itself, there is no traceback.
        if kind not in MEMORY_FAILURES:
            traceback = last.traceback
    if traceback:
        print(traceback, file=standard_error(), end="")
    is_explained = bool(traceback) and kind is FailureKind.BUG
    if not is_log_visible and not is_explained:
        print(f"{summary.status}: {summary.reason}", file=standard_error())


def attempts_table(attempts: Sequence[Attempt]) -> str:
    """Return a table of the attempts in plain text, wrapped at 80 characters."""
    names = ["#", "device", "micro-batch", "effective", "steps", "time", "outcome"]
    rows = [_cells(attempt) for attempt in attempts]
    if not any(attempt.spec.has_batch for attempt in attempts):
        # Leave out the columns of the micro-batch and the effective batch.
        names = names[:2] + names[4:]
        rows = [row[:2] + row[4:] for row in rows]
    lines = align_columns(rows, names)
    indent = " " * lines[0].index("outcome")
    wrapper = textwrap.TextWrapper(80, subsequent_indent=indent, break_long_words=False)
    return "\n".join(line for row in lines for line in wrapper.wrap(row))


def _cells(attempt: Attempt) -> list[object]:
    """Return the cells of an attempt, in the order of the table's columns."""
    spec = attempt.spec
    sizes = None
    effective = None
    if spec.has_batch:
        sizes = " → ".join(str(size) for size in attempt.sizes)
        effective = spec.effective_batch_size
    steps = f"{attempt.start_step}-{attempt.end_step}"
    if attempt.end_step is None:
        steps = f"{attempt.start_step}-?" if attempt.start_step else "-"
    time = None
    if attempt.seconds is not None:
        time = f"{attempt.seconds:.1f} s"
    outcome = describe_outcome(attempt)
    if attempt.is_retried:
        outcome += f" → {action_in_words(attempt.action)}"
    device = spec.device + by_processes(spec.ranks)
    return [attempt.number, device, sizes, effective, steps, time, outcome]


def describe_outcome(attempt: Attempt) -> str:
    """Return how an attempt ended, in a few words."""
    failure = attempt.failure
    is_interruption = attempt.kind in (None, FailureKind.INTERRUPTED)
    if attempt.action == "stopped" and is_interruption:
        return "stopped"
    if failure is None:
        return outcome_in_words(attempt.outcome)
    if failure.evidence.clue in _CLUES:
        return _CLUES[failure.evidence.clue]
    if is_interruption:
        return shorten(failure.message, 60)
    process = _ENDING_OF_A_PROCESS.match(failure.message)
    if process and failure.kind is FailureKind.BUG:
        return process[1]  # A script's exit code may mean anything, so the text says it as it is.
    return outcome_in_words(attempt.outcome)


def gpu_memory_summary(attempt: Attempt) -> str:
    """Return the GPU memory figures of an attempt, empty if it did not use CUDA."""
    if "max_allocated" not in attempt.memory:
        return ""
    lines = [f"GPU Memory Summary ({attempt.spec.device}):"]
    for name in ("allocated", "reserved", "max_allocated"):
        title = name.replace("_", " ").title()
        lines.append(f"  {title}: {attempt.memory.get(name, 0) / GIB:.2f} GiB")
    return "\n".join(lines)


def log_last_lines(summary: Summary, how_to_go_on: str) -> None:
    """Log how and where a job ended, its speed, its best checkpoint, and how to continue it."""
    last = summary.attempts[-1] if summary.attempts else None
    log_line = _choose_log_function(summary)
    log_line("%s", _describe_end(summary, last))
    speed = () if last is None else speed_of(last)
    if last is not None and speed:
        log.info("speed: %s", speed_text(speed, last.spec.ranks))
    for sentence in summary.advice:
        log.info("to be faster: %s", sentence)
    best = summary.best
    if best is not None:
        figure = str(best["figure"]).replace("_", " ")
        value = number_text(best["value"])
        log_line(
            "best checkpoint: %s (%s %s after step %s)", best["path"], figure, value, best["step"]
        )
    log_line("run folder: %s", summary.run_dir)
    if summary.status == "completed" or not how_to_go_on:
        return
    introduction = "to continue"
    if summary.status == "failed" and last and last.kind is FailureKind.BUG:
        introduction = "after fixing it"
    elif summary.checkpoint is None:
        introduction = "to start over (no checkpoint is known)"
    if last is not None or summary.status == "interrupted":
        log_line("%s: %s", introduction, how_to_go_on)


def _describe_end(summary: Summary, last: Attempt | None) -> str:
    """Return how a job ended, in one line. The time covers all its launches."""
    wall = summary.wall_seconds or 0.0
    ending = f"{summary.status} after {duration(summary.earlier_seconds + wall)}"
    if summary.earlier_seconds:
        ending += f" (this launch: {duration(wall)})"
    if last is not None:
        ending += f" on {last.spec.device}"
        if last.spec.has_batch:
            ending += f" with micro-batch {last.sizes[-1]}"
    if summary.result is not None:
        result = summary.objective
        text = number_text(result) if isinstance(result, float) else str(result)
        ending += f"; result: {shorten(text, 100)}"
        figure = figure_of(summary.result)
        if figure is not None:
            ending += f" ({figure.replace('_', ' ')})"
    elif summary.status == "completed" and last is not None and last.script is None:
        # A trainer that forgets to return its result would spoil a sweep, so the line says so.
        ending += "; result: none"
    has_failed = summary.status in ("failed", "pruned") and last is not None
    if has_failed or summary.status == "no_device":
        ending += f"; {shorten(str(summary.reason), _LONGEST_REASON)}"
    return ending


def _describe_lost_steps(attempt: Attempt) -> str:
    """Return which steps were lost to a second stop signal, empty without such a signal."""
    if not attempt.exit.was_hurried or attempt.ending is not None:
        return ""
    lost = attempt.end_step
    saved = attempt.saved_step
    if lost is None:
        return " at once by a second signal, without a last checkpoint"
    kept = attempt.start_step if saved is None else saved
    if lost <= kept:
        return f" at once by a second signal; the checkpoint of step {kept} has all"
    steps = f"step {lost} is" if lost == kept + 1 else f"steps {kept + 1} to {lost} are"
    since = f"resumes from step {kept}" if kept else "starts over"
    return f" at once by a second signal: {steps} lost, it {since}"


def log_end(attempt: Attempt, decision: Decision | None) -> None:
    """Log why an attempt ended, unless it completed."""
    failure = attempt.failure
    if failure is None or decision is None:
        return
    if isinstance(decision, Retry):
        log.warning("attempt %d: %s", attempt.number, decision.reason)
        if decision.warning:
            log.warning("%s", decision.warning)
        return
    if decision.action == "stopped":  # The user stopped it.
        log.info("attempt %d: stopped%s", attempt.number, _describe_lost_steps(attempt))
        return
    # A short text is enough, because the full reason follows at the job's end.
    is_bug = failure.kind is FailureKind.BUG
    text = failure.kind.in_words
    if is_bug and attempt.script is not None:
        text = describe_outcome(attempt)
    elif is_bug and attempt.exceptions:
        text = attempt.exceptions[0].rpartition(".")[2]
    log.error("attempt %d failed: %s", attempt.number, text)
    # If CUDA cannot work at all, the job's reason has the advice.
    if failure.advice and not is_bug and failure.kind is not FailureKind.SETUP:
        log.error("advice: %s", "; ".join(failure.advice))
