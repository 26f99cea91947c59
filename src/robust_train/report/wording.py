"""The story of a job in a sentence or two, and advice for the next run. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from robust_train.config.words import Words
from robust_train.folder.memory_samples import Sample
from robust_train.model.attempt import UNFINISHED, Attempt
from robust_train.model.failure import Failure, FailureKind
from robust_train.model.spec import Speed, find_slowest_rank
from robust_train.readable import (
    by_processes,
    counted,
    duration,
    memory,
    number,
    ordinal,
    percent,
    step_time,
)
from robust_train.report.facts import OOM, Advice, DeviceMemory, Story, seconds_of, speed_of
from robust_train.report.sources import TimedAttempt

_MOST_TROUBLES = 4
_TIGHT = 0.9
_MUCH_WAITING_FOR_DATA = 0.2
_MUCH_SLOWER = 1.2
_LEAST_SECONDS = 10.0
"""Advice that would save less than this is not given."""

OUTCOMES = {
    "completed": "completed",
    UNFINISHED: "no recorded end",
    **{kind.value: kind.in_words for kind in FailureKind},
}
"""An attempt's outcome for people."""

ACTIONS = {
    "halve_batch": "half the micro-batch",
    "split_loss": "smaller parts, another loss",
    "switch_gpu": "another GPU",
    "fewer_gpus": "fewer GPUs",
    "cpu_fallback": "the CPU",
    "retry": "the same again",
    "wait": "wait for room",
    "queue_again": "wait for the next time slice",
    "before_it_diverged": "back to the checkpoint before it",
    "earlier_checkpoint": "the checkpoint before",
    "lower_learning_rate": "a lower learning rate",
    "none": "",
}
"""The decision after an attempt for people, if its name does not do."""


def outcome_in_words(outcome: str) -> str:
    """Return an attempt's outcome as people read it."""
    return OUTCOMES.get(outcome, outcome.replace("_", " "))


def action_in_words(action: str | None) -> str:
    """Return the decision after an attempt as people read it, empty if there was none."""
    name = action or ""
    return ACTIONS.get(name, name.replace("_", " "))


def sentence_of(story: Story) -> str:
    """Return how the job ended, which attempts failed before, and the share of useful time."""
    if not story.launches:
        if story.status == "empty":
            return "The folder holds no record of a job."
        return "The journal is missing; of the job only summary.json is left."
    attempts = story.attempts
    wall = story.seconds["wall"]
    is_completed = story.status == "completed"
    parts = [_ending(story)]
    has_ended = story.status in ("completed", "failed", "interrupted", "pruned")
    troubles = list(_troubles(attempts[:-1] if has_ended else attempts))
    more = len(troubles[_MOST_TROUBLES:])
    if more:
        troubles[_MOST_TROUBLES:] = [counted(more, "more failed attempt")]
    if troubles:
        parts.append(_sentence(", then ".join(troubles)))
    inside = _inside_steps(story)
    if inside:
        parts.append(f"Memory ran out {inside} inside a step, which was repeated in smaller parts.")
    if is_completed and len(attempts) > 1 and wall > 0:
        useful = percent(story.seconds["useful"] / wall)
        parts.append(f"{useful} of the time was useful.")
    has_saved = any(attempt.checkpoints for attempt in attempts)
    if is_completed and has_saved and not attempts[-1].noted("is_guarded", False):
        parts.append("Its checkpoints were not guarded.")
    return " ".join(parts)


def _inside_steps(story: Story) -> str:
    """Return how often memory ran out inside a step, empty for never."""
    # each attempt that it has ended has one mark
    count = sum(mark.kind == "oom" for mark in story.marks)
    count -= sum(attempt.outcome in OOM for attempt in story.attempts)
    return {0: "", 1: "once"}.get(count, f"{count} times")


def _ending(story: Story) -> str:
    status = story.status
    attempts = story.attempts
    last = attempts[-1] if attempts else None
    nth = ordinal(len(attempts))
    lines = (story.launches[-1].reason or "").strip().splitlines()
    why = f": {lines[0]}" if lines else ""
    took = duration(story.took)
    if status == "completed" and last is not None:
        which = "" if len(attempts) == 1 else f" at the {nth} attempt"
        batch = batch_in_words(last)
        return f"Completed in {took}{which}, on {last.spec.where} with {batch}{why}."
    if status in ("interrupted", "pruned"):
        what = "pruned" if status == "pruned" else "stopped"
        return f"Was {what} after {took}{_at(last)}{why}.{_saved(attempts)}"
    if status == UNFINISHED:
        return (
            "Has no recorded end: it still runs, or its process was killed. The last record is "
            f"from {took} after its start{_at(last)}.{_saved(attempts)}"
        )
    where = "" if last is None else f" in the {nth} attempt, on {last.spec.where}"
    return _sentence(f"{status.replace('_', ' ')} after {took}{where}{why}")


def batch_in_words(attempt: Attempt) -> str:
    """Return ``micro-batch 64 → 16 × accumulation 4 × 2 processes``. The arrow leads to the size to
    which its trainer changed it."""
    spec = attempt.spec
    if not spec.has_batch:
        return "an unknown micro-batch"
    size = "auto" if spec.noted("searches", False) else " → ".join(map(str, attempt.sizes))
    steps = f" × accumulation {spec.accumulation}" if spec.accumulation != 1 else ""
    return f"micro-batch {size}{steps}{by_processes(spec.ranks)}"


def _at(last: TimedAttempt | None) -> str:
    if last is None:
        return ", before any attempt had begun"
    if last.end_step is None:
        return f", before its first step on {last.spec.where}"
    return f", at step {last.end_step} on {last.spec.where}"


def _saved(attempts: Sequence[TimedAttempt]) -> str:
    steps = [
        (step, attempt.noted("is_guarded", False))
        for attempt in attempts
        for step, _ in attempt.checkpoints
        if _is_good(attempt, step)
    ]
    if steps:
        step, is_guarded = steps[-1]
        text = f" The last checkpoint holds step {step}, from which the job can resume."
        bad = " It is not guarded: a loss that is not finite may spoil those that are kept."
        return text if is_guarded else text + bad
    return " No checkpoint was saved." if attempts else ""


def _is_good(attempt: TimedAttempt, step: int) -> bool:
    """Return whether training had not diverged by this step."""
    diverged_at: int | None = attempt.evidence.noted("bad_step", None)
    good_step: int | None = attempt.evidence.noted("good_step", None)
    return diverged_at is None or step <= (good_step or 0)


def _troubles(attempts: Sequence[TimedAttempt]) -> Iterator[str]:
    failed = [
        attempt
        for attempt in attempts
        if attempt.outcome not in ("completed", UNFINISHED) and attempt.action != "stopped"
    ]
    for (outcome, where), group in itertools.groupby(
        failed, key=lambda a: (a.outcome, a.spec.where)
    ):
        members = list(group)
        sizes = dict.fromkeys(str(a.batch_size) for a in members if a.batch_size)
        times = ""
        size = ""
        if outcome in OOM and sizes:
            size = f" at micro-batch {', '.join(sizes)}"
        elif len(members) > 1:
            times = f" {len(members)} times"
        # a process without a launcher's GPU chose its device itself
        place = f" on {where}" if members[0].spec.gpus else ""
        yield f"{outcome_in_words(outcome)}{times}{place}{size}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def advice_of(story: Story, keys: Mapping[str, str] | None) -> Iterator[Advice]:
    """Yield findings and advice, most promising first, or none if nothing was tight. ``keys`` are a
    project's keys that stand for ours."""
    words = Words(keys)
    for advice in _advice_of(story):
        steps = tuple(map(words.reword, advice.steps))
        overrides = words.reword(advice.overrides or "") or None
        yield replace(advice, steps=steps, overrides=overrides)
    for finding in speed_advice(story.attempts):
        yield Advice(_sentence(words.reword(finding)))


def _advice_of(story: Story) -> Iterator[Advice]:
    yield from _what_worked(story)
    yield from _failures(story.attempts)
    inside = _inside_steps(story)
    if inside:
        yield Advice(
            f"Memory ran out {inside} inside a step.",
            ("set training.batch_size to a size that fits: then no step is repeated",),
        )
    for device in story.memory:
        yield from _tightness(device)
    if (story.stability or "").startswith("growing"):
        yield Advice(
            f"Memory was {story.stability}.",
            (
                "collect numbers, not tensors: loss.item() or loss.detach(), because a tensor "
                "keeps the whole graph that it was computed by",
            ),
        )


def _what_worked(story: Story) -> Iterator[Advice]:
    """Advise to begin with the size that fitted."""
    if not story.attempts or story.attempts[-1].outcome != "completed":
        return
    last = story.attempts[-1]
    failed = [
        attempt
        for attempt in story.attempts
        if attempt.outcome in OOM
        and attempt.device == last.device
        and attempt.batch_size != last.batch_size
    ]
    if failed and last.batch_size is not None:
        lost = sum(seconds_of(story.spans, "lost", attempt.number) for attempt in failed)
        sizes = ", ".join(dict.fromkeys(str(attempt.batch_size) for attempt in failed))
        yield Advice(
            f"On {last.spec.where} micro-batch {last.batch_size} fitted and {sizes} did not. "
            f"Finding this out cost {duration(lost)}.",
            ("begin the next run with the size that fitted",),
            f"training.batch_size={last.batch_size} "
            f"training.gradient_accumulation_steps={last.spec.accumulation}",
        )


def _failures(attempts: Sequence[TimedAttempt]) -> Iterator[Advice]:
    """Yield the last failure of each kind on each device."""
    for attempt in {(a.outcome, a.device): a for a in attempts}.values():
        if attempt.failure is not None and attempt.failure.advice:
            yield Advice(_finding(attempt, attempt.failure), attempt.failure.advice)


def _finding(attempt: TimedAttempt, failure: Failure) -> str:
    evidence = failure.evidence
    if not failure.kind.is_memory:
        return f"Attempt {attempt.number} on {attempt.spec.where}: {failure.message}"
    total = evidence.total_bytes
    sizes = {
        "requested": evidence.requested_bytes,
        "free" if total is None else f"of {memory(total)} free": evidence.free_bytes,
        "in use by tensors": evidence.allocated_bytes,
        "reserved but unused": evidence.reserved_unallocated_bytes,
    }
    figures = [f"{memory(n)} {what}" for what, n in sizes.items() if n is not None]
    in_brackets = f" ({', '.join(figures)})" if figures else ""
    what = "GPU memory" if failure.kind is FailureKind.DEVICE_OOM else "Host memory"
    size = "" if attempt.batch_size is None else f" at micro-batch {attempt.batch_size}"
    return f"{what} ran out in attempt {attempt.number} on {attempt.spec.where}{size}{in_brackets}."


def _tightness(device: DeviceMemory) -> Iterator[Advice]:
    total = device.most("gpu_total")
    used = device.most("gpu_used")
    if used > _TIGHT * total > 0:
        others = max(_used_by_others(sample) for sample in device.samples)
        yield Advice(
            f"{device.device} was {percent(used / total)} full at its fullest ({memory(used)} of "
            f"{memory(total)}), up to {memory(others)} of it outside of this job's cache.",
            (
                "a longer sample or the first validation may not fit: leave some room with a "
                "smaller training.batch_size and more training.gradient_accumulation_steps",
                "robust-train gpus lists the processes on it; a higher min_gpu_memory_mb waits for "
                "a freer GPU",
            ),
        )


def _used_by_others(sample: Sample) -> int:
    used = sample.gpu_used or 0
    reserved = sample.reserved or 0
    return used - reserved


def held_memory(attempts: Sequence[Attempt]) -> str:
    """Return the most that a job's processes held of a GPU, empty if that was not measured."""
    peak = max((attempt.memory.get("gpu_peak", 0) for attempt in attempts), default=0)
    return f"{memory(peak)} at its peak, CUDA and libraries included" if peak else ""


def speed_advice(attempts: Sequence[Attempt]) -> Iterator[str]:
    """Yield what would make the job faster, by the last attempt whose speed is known."""
    measured = [attempt for attempt in attempts if speed_of(attempt)]
    for last in measured[-1:]:
        yield from _data(last)
        yield from _slow_ranks(speed_of(last))


def _data(attempt: Attempt) -> Iterator[str]:
    speed = speed_of(attempt)
    num_workers = attempt.spec.noted("num_workers", 0)
    worst = max(speed, key=lambda rank: rank.data_share or 0)
    share = worst.data_share or 0
    seconds = share * worst.steps * worst.seconds_per_step
    if share > _MUCH_WAITING_FOR_DATA and seconds >= _LEAST_SECONDS:
        who = "training" if len(speed) == 1 else f"rank {worst.rank}"
        # a disk is suspected only when workers already prepare the samples
        disk = ", or move the data to a faster disk if it is read from one" if num_workers else ""
        yield (
            f"{who} waited for data {percent(share)} of the time: raise "
            f"training.num_workers (now {num_workers}){disk}"
        )


def _slow_ranks(speed: Sequence[Speed]) -> Iterator[str]:
    slowest = find_slowest_rank(speed)
    if slowest is None:
        return
    rank, most, usual = slowest
    lost = (most - usual) * min(rank.steps for rank in speed)
    if most > _MUCH_SLOWER * usual and lost >= _LEAST_SECONDS:
        yield (
            f"rank {rank} is slow: {number(most)} s a step until the ranks meet, the others "
            f"{number(usual)} s; robust-train gpus shows the other processes on its GPU"
        )


def seconds_per_step(speed: Sequence[Speed]) -> float:
    """Return what a step has lately taken on the slowest rank, or 0 if unknown."""
    seconds = (rank.seconds_per_step_now or rank.seconds_per_step for rank in speed)
    return max(seconds, default=0.0)


def samples_per_second(speed: Sequence[Speed], ranks: int) -> float | None:
    """Return the samples of all ranks, None if unknown. Ranks share a step alike, and of a script's
    only the first reports."""
    rates = [s.samples_per_second for s in speed if s.samples_per_second is not None]
    if not speed or len(rates) < len(speed):
        return None
    return sum(rates) * ranks / len(speed)


def speed_text(speed: Sequence[Speed], ranks: int) -> str:
    """Return the figures of all ranks in short, empty without any."""
    if not speed:
        return ""
    slowest = max(speed, key=lambda rank: rank.seconds_per_step)
    shares = [rank.data_share for rank in speed if rank.data_share is not None]
    between = [rank.between_share for rank in speed if rank.between_share is not None]
    rate = samples_per_second(speed, ranks)
    parts = [] if rate is None else [f"{number(rate)} samples/s while training"]
    parts.append(
        f"{step_time(slowest.seconds_per_step)} a step "
        f"(median; 95 %: {step_time(slowest.seconds_per_step_p95)})"
    )
    if shares:
        parts.append(f"{percent(max(shares))} waiting for data")
    elif between:
        parts.append(f"{percent(max(between))} between steps")
    return ", ".join(parts)
