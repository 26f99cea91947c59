"""The launcher's log lines about a job, and the event of an attempt's start."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from robust_train.readable import by_processes, duration, shortened
from robust_train.readable import number as number_text
from robust_train.report.attempts import AttemptStory, attempts_of
from robust_train.report.sources import Entry, Sources
from robust_train.runfolder.journal import AttemptStarted, DeviceAcquired, JobStarted
from robust_train.runfolder.summary import (
    AttemptRecord,
    Summary,
    attempts_table,
    gpu_memory_summary,
)
from robust_train.speed.speed_advice import advice_of, text_of
from robust_train.values import (
    Attempt,
    AttemptSpec,
    Decision,
    Evidence,
    Failure,
    FailureKind,
    GiveUp,
    GpuInfo,
    Group,
    Outcome,
    Retry,
    device_name,
)

log = logging.getLogger("robust_train")

_MOST_EARLIER = 20  # attempts of earlier launches


def started(spec: AttemptSpec, resume_checkpoint: Path | None) -> AttemptStarted:
    """Return the event of an attempt that begins with ``spec``."""
    return AttemptStarted(
        device=spec.device,
        gpu_uuids=tuple(gpu.uuid for gpu in spec.gpus),
        ranks=spec.ranks,
        batch_size=spec.batch_size if spec.has_batch else None,
        gradient_accumulation_steps=spec.gradient_accumulation_steps if spec.has_batch else None,
        num_workers=spec.num_workers,
        prefetch_factor=spec.prefetch_factor,
        expandable_segments=spec.expandable_segments,
        gradient_checkpointing=spec.gradient_checkpointing,
        resume_checkpoint=None if resume_checkpoint is None else str(resume_checkpoint),
    )


def acquired(group: Group, wait_seconds: float) -> DeviceAcquired:
    """Return the event for a job's first device, after waiting ``wait_seconds``."""
    uuids, names = tuple(gpu.uuid for gpu in group), tuple(gpu.name for gpu in group)
    return DeviceAcquired(device_name(group), uuids, names, round(wait_seconds, 3))


def announce(number: int, spec: AttemptSpec, *, is_searched: bool = False) -> None:
    """Log that attempt ``number`` begins; ``is_searched``: its batch size is still to be found."""
    where = "the CPU" if spec.gpu is None else f"{spec.device} ({spec.gpu.name})"
    if not spec.has_batch:
        log.info("attempt %d on %s", number, where)
        return
    size = f"batch size {spec.batch_size} × accumulation {spec.gradient_accumulation_steps}"
    chosen = "batch size auto" if is_searched else size + by_processes(spec.ranks)
    if spec.gradient_checkpointing:
        chosen += ", gradient checkpointing"
    effective = spec.effective_batch_size
    log.info("attempt %d on %s: %s, effective %d", number, where, chosen, effective)


def show_end(
    summary: Summary, found: Sources, explain: Callable[[Summary], object], how_to_go_on: str | None
) -> None:
    """Log how a job ended: its attempts, what ``explain`` shows, and the last lines."""
    if summary.attempts:
        before = tuple(map(_record, attempts_of(_earlier(found.entries))[-_MOST_EARLIER:]))
        first = summary.first_attempt - len(before)
        whole = replace(summary, attempts=(*before, *summary.attempts), first_attempt=first)
        log.info("attempts:\n%s", attempts_table(whole))
        memory = gpu_memory_summary(summary.attempts[-1])
        if memory is not None:
            log.info("%s", memory)
    explain(summary)
    conclude(summary, how_to_go_on)


def _earlier(entries: Sequence[Entry]) -> Sequence[Entry]:
    """Return what a journal has of the job's launches before the last one."""
    starts = [number for number, one in enumerate(entries) if isinstance(one.event, JobStarted)]
    jobs = [getattr(entries[start].event, "job", "") for start in starts]
    return entries[starts[jobs.index(jobs[-1])] : starts[-1]] if starts else ()


def _record(story: AttemptStory) -> AttemptRecord:
    """Return an attempt of an earlier launch as one of this launch would be."""
    gpus = tuple(GpuInfo("", "", int(n), "", 0, 0, 0) for n in re.findall(r"\d+", story.device))
    sizes = (story.batch_size or 1, story.gradient_accumulation_steps or 1, story.ranks)
    spec = AttemptSpec(gpus, *sizes, has_batch=story.batch_size is not None)
    failure, decision, action = None, None, story.action
    if story.outcome != "completed":
        is_known = story.outcome in set(FailureKind)  # not `unfinished`
        kind = FailureKind(story.outcome) if is_known else FailureKind.INTERRUPTED
        evidence = Evidence(clue=str(story.evidence.get("clue")))
        failure = Failure(kind, story.message or story.outcome, evidence)
    if action is not None and failure is not None:
        is_end = action in ("give_up", "stopped")
        decision = GiveUp("", action) if is_end else Retry(spec, action, "")
    outcome = Outcome(failure, None, story.seconds, story.start_step, story.end_step)
    return AttemptRecord(Attempt(spec, outcome), decision)


def speed_advice(records: Sequence[AttemptRecord]) -> tuple[str, ...]:
    """Return what would make the job faster, by the last attempt whose speed is known."""
    known = [one.summarized(0) for one in records if one.attempt.outcome.speed]
    if not known:
        return ()
    last = known[-1]
    return advice_of(last.speed, last.faster_before, last.num_workers)


def conclude(summary: Summary, how_to_go_on: str | None = None) -> None:
    """Log the last lines: how and where a job ended, its run folder, how it goes on. The time is
    the job's, in all its launches."""
    ending = f"{summary.status} after {duration(summary.earlier_seconds + summary.wall_seconds)}"
    if summary.earlier_seconds:
        ending += f" (this launch: {duration(summary.wall_seconds)})"
    if summary.attempts:
        last = summary.attempts[-1].attempt
        ending += f" on {last.spec.device}"
        if last.spec.has_batch:
            ending += f" with micro-batch {last.outcome.micro_batch or last.spec.batch_size}"
    if summary.result is not None:
        result = summary.objective
        text = number_text(result) if isinstance(result, float) else str(result)
        ending += f"; result: {shortened(text, 100)}"
    if summary.attempts and summary.status == "failed":
        ending += f"; {shortened(str(summary.reason), 160)}"
    log.info("%s", ending)
    for record in summary.attempts[-1:]:
        about = record.summarized(0)
        if speed := text_of(about.speed, about.ranks):
            log.info("speed: %s", speed)
    for sentence in summary.advice:
        log.info("to be faster: %s", sentence)
    log.info("run folder: %s", summary.run_dir)
    can_go_on = summary.attempts or summary.status == "interrupted"
    if can_go_on and summary.status != "completed" and how_to_go_on:
        failures = [record.attempt.outcome.failure for record in summary.attempts[-1:]]
        is_bug = any(failure and failure.kind is FailureKind.BUG for failure in failures)
        first = "after mending it" if is_bug and summary.status == "failed" else "to go on"
        log.info("%s: %s", first, how_to_go_on)


def log_outcome(number: int, outcome: Outcome, decision: Decision | None) -> None:
    """Log why attempt ``number`` ended, unless it completed."""
    if outcome.failure is None or decision is None:
        return
    if isinstance(decision, Retry):
        log.warning("attempt %d: %s", number, decision.reason)
        if decision.warning is not None:
            log.warning("%s", decision.warning)
        return
    if decision.action == "stopped":  # by its user
        log.info("attempt %d: stopped", number)
        return
    # the reason follows at the job's end, whole
    is_bug, names = outcome.failure.kind is FailureKind.BUG, outcome.exceptions
    what = names[0].rpartition(".")[2] if is_bug and names else outcome.label
    log.error("attempt %d failed: %s", number, what)
    if outcome.failure.advice and outcome.failure.kind is not FailureKind.BUG:
        log.error("advice: %s", "; ".join(outcome.failure.advice))
