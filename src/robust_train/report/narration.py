"""The launcher's log lines about a job.

:class:`.run_folder.RunFolder` calls :func:`announce` and :func:`log_end` for each attempt.
:class:`.job.Job` calls :func:`show_end` last, with :func:`print_failure` as ``explain`` if the
process ends with the job.
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

_LONGEST_REASON = 600
_CLUES = {Clue.USER_ERROR: "user error", Clue.STALLED: "hang", Clue.PORT: "port taken"}
_ENDING_OF_A_PROCESS = re.compile(r"ended (?:with|by) ([^:]+)")


def announce(number: int, spec: AttemptSpec) -> None:
    """Log that attempt ``number`` begins."""
    where = spec.where if spec.gpu is None else f"{spec.where} ({spec.gpu.name})"
    batch = ""
    if spec.has_batch:
        batch = f": {batch_in_words(Attempt(number, spec))}"
        batch += ", gradient checkpointing" * spec.noted("gradient_checkpointing", False)
        batch += f", effective batch {spec.effective_batch_size}"
    log.info("attempt %d on %s%s", number, where, batch)


def show_end(explain: Callable[[Summary], object], summary: Summary, how_to_go_on: str) -> None:
    """Log how a job ended: its attempts, including those of earlier launches in its journal, then
    what ``explain`` shows, then the last lines."""
    if summary.attempts:
        attempts = list[Attempt](attempts_of(_earlier(summary.run_dir)))
        attempts += summary.attempts
        # the last lines say everything about one attempt that completed at its first size
        if len(attempts) > 1 or summary.status != "completed" or len(attempts[0].sizes) > 1:
            say = _logging_of(summary)
            say("attempts:\n%s", attempts_table(attempts))
        memory = gpu_memory_summary(summary.attempts[-1])
        if memory:
            log.info("%s", memory)
    explain(summary)
    conclude(summary, how_to_go_on)


def _logging_of(summary: Summary) -> Callable[..., None]:
    """Return the function that logs a job's last lines. A log level may hide good news."""
    went_well = summary.status == "completed" and len(summary.attempts) <= 1
    return log.info if went_well else log_always


def _earlier(run_dir: Path) -> Sequence[Entry]:
    """Return the events of the job's earlier launches in a journal, if it can be read."""
    try:
        entries = read_entries(run_dir)
    except Exception as error:  # a missing table must not end a job
        log.warning("earlier attempts cannot be shown: %s", named_line(error))
        return ()
    starts = [
        (number, entry.event.job)
        for number, entry in enumerate(entries)
        if isinstance(entry.event, JobStarted)
    ]
    if not starts:
        return ()
    last, job = starts[-1]
    first = next(number for number, started in starts if started == job)
    return entries[first:last]


def print_failure(summary: Summary) -> None:
    """Print to stderr why a job failed, unless the screen shows it already.

    Prints the trainer's traceback if it explains more than a sentence, otherwise or additionally
    the reason. If stderr and stdout are the same, the log has the reason, and a script has shown
    its own end.
    """
    last = summary.attempts[-1] if summary.attempts else None
    is_refusal = summary.status == "failed" and last is None
    if is_refusal or summary.status not in ("failed", "no_device"):
        return
    is_shown = os.path.sameopenfile(1, 2)
    kind = None if last is None else last.kind
    if is_shown and last is not None and last.script is not None:
        return
    traceback = last.traceback if last and kind not in MEMORY_FAILURES else ""
    if traceback:  # empty for a mistake that the trainer explains itself
        print(traceback, file=standard_error(), end="")
    if not is_shown and not (traceback and kind is FailureKind.BUG):
        print(f"{summary.status}: {summary.reason}", file=standard_error())


def attempts_table(attempts: Sequence[Attempt]) -> str:
    """Return a table of the attempts in plain text, wrapped at 80 characters."""
    names = ["#", "device", "micro-batch", "effective"]
    names += ["steps", "time", "outcome"]
    rows: list[list[object]] = []
    for attempt in attempts:
        spec = attempt.spec
        ending = ending_of(attempt)
        end = attempt.end_step
        if attempt.is_retried:
            ending += f" → {action_in_words(attempt.action)}"
        steps = f"{attempt.start_step}-{'?' if end is None else end}"
        rows.append(
            [
                attempt.number,
                spec.device + by_processes(spec.ranks),
                " → ".join(map(str, attempt.sizes)) if spec.has_batch else None,
                spec.effective_batch_size if spec.has_batch else None,
                "-" if steps == "0-?" else steps,
                None if attempt.seconds is None else f"{attempt.seconds:.1f} s",
                ending,
            ]
        )
    if not any(attempt.spec.has_batch for attempt in attempts):
        names = names[:2] + names[4:]
        rows = [row[:2] + row[4:] for row in rows]
    lines = align_columns(rows, names)
    below = " " * lines[0].index("outcome")
    wrap = textwrap.TextWrapper(80, subsequent_indent=below, break_long_words=False)
    return "\n".join(line for row in lines for line in wrap.wrap(row))


def ending_of(attempt: Attempt) -> str:
    """Return in a few words how an attempt ended."""
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
        return process[1]  # a script's exit code may mean anything
    return outcome_in_words(attempt.outcome)


def gpu_memory_summary(attempt: Attempt) -> str:
    """Return the memory figures of an attempt, empty if it did not use CUDA."""
    if "max_allocated" not in attempt.memory:
        return ""
    lines = [f"GPU Memory Summary ({attempt.spec.device}):"]
    for name in ("allocated", "reserved", "max_allocated"):
        title = name.replace("_", " ").title()
        lines.append(f"  {title}: {attempt.memory.get(name, 0) / GIB:.2f} GB")
    return "\n".join(lines)


def conclude(summary: Summary, how_to_go_on: str) -> None:
    """Log the last lines: how and where a job ended, its run folder, how to continue. The time
    covers all its launches."""
    wall = summary.wall_seconds or 0.0
    last = summary.attempts[-1] if summary.attempts else None
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
        ending += "; result: none"  # a trainer that forgets to return it would spoil a sweep
    if summary.status == "no_device" or (
        last is not None and summary.status in ("failed", "pruned")
    ):
        ending += f"; {shorten(str(summary.reason), _LONGEST_REASON)}"
    say = _logging_of(summary)
    say("%s", ending)
    speed = () if last is None else speed_of(last)
    if last is not None and speed:
        log.info("speed: %s", speed_text(speed, last.spec.ranks))
    for sentence in summary.advice:
        log.info("to be faster: %s", sentence)
    best = summary.best
    if best is not None:
        figure = str(best["figure"]).replace("_", " ")
        value = number_text(best["value"])
        say("best checkpoint: %s (%s %s after step %s)", best["path"], figure, value, best["step"])
    say("run folder: %s", summary.run_dir)
    if summary.status == "completed" or not how_to_go_on:
        return
    first = "to continue"
    if summary.status == "failed" and last and last.kind is FailureKind.BUG:
        first = "after fixing it"
    elif summary.checkpoint is None:
        first = "to start over (no checkpoint is known)"
    if last is not None or summary.status == "interrupted":
        say("%s: %s", first, how_to_go_on)


def _what_is_lost(attempt: Attempt) -> str:
    """Return which steps a second signal lost, empty if there was none."""
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
        log.info("attempt %d: stopped%s", attempt.number, _what_is_lost(attempt))
        return
    # the full reason follows at the job's end
    is_bug = failure.kind is FailureKind.BUG
    names = attempt.exceptions
    what = failure.kind.in_words
    if is_bug and attempt.script is not None:
        what = ending_of(attempt)
    elif is_bug and names:
        what = names[0].rpartition(".")[2]
    log.error("attempt %d failed: %s", attempt.number, what)
    # if CUDA cannot work, the job's reason has the advice
    if failure.advice and not is_bug and failure.kind is not FailureKind.SETUP:
        log.error("advice: %s", "; ".join(failure.advice))
