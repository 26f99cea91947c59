"""Writes the sentences of a job's report: a summary, and advice for the next run.

`story.story_of` calls it. The launcher's log lines and the live status share its words for
outcomes, batch sizes and speeds.
"""

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

_MOST_TROUBLES = 4  # failures that the summary names
_TIGHT = 0.9  # share of a GPU's memory
_MUCH_WAITING_FOR_DATA = 0.2  # share of the time
_MUCH_SLOWER = 1.2  # time of the slowest rank, as a multiple of the usual time
_LEAST_SECONDS = 10.0  # that advice must be able to save

OUTCOMES = {
    "completed": "completed",
    UNFINISHED: "no recorded end",
    **{kind.value: kind.in_words for kind in FailureKind},
}
"""The texts of an attempt's outcomes."""

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
"""The texts of the decisions after an attempt whose names are not clear enough."""


def outcome_in_words(outcome: str) -> str:
    """Return an attempt's outcome as text."""
    return OUTCOMES.get(outcome, outcome.replace("_", " "))


def action_in_words(action: str | None) -> str:
    """Return the decision after an attempt as text, empty if there was none."""
    name = action or ""
    return ACTIONS.get(name, name.replace("_", " "))


def sentence_of(story: Story) -> str:
    """Return how the job ended, which attempts failed before, and the share of useful time."""
    if not story.launches:
        if story.status == "empty":
            return "The folder holds no record of a job."
        return "The journal is missing; only summary.json is left of the job."
    attempts = story.attempts
    wall = story.seconds["wall"]
    is_completed = story.status == "completed"
    parts = [_describe_end(story)]
    has_ended = story.status in ("completed", "failed", "interrupted", "pruned")
    # The first sentence has described the last attempt of a job that has ended.
    earlier = attempts[:-1] if has_ended else attempts
    troubles = list(_describe_failures(earlier))
    more = len(troubles[_MOST_TROUBLES:])
    if more:
        troubles[_MOST_TROUBLES:] = [counted(more, "more failed attempt")]
    if troubles:
        parts.append(_sentence(", then ".join(troubles)))
    inside = _count_ooms_in_steps(story)
    if inside:
        parts.append(f"Memory ran out {inside} inside a step, which was repeated in smaller parts.")
    if is_completed and len(attempts) > 1 and wall > 0:
        useful = percent(story.seconds["useful"] / wall)
        parts.append(f"{useful} of the time was useful.")
    has_saved = any(attempt.checkpoints for attempt in attempts)
    if is_completed and has_saved and not attempts[-1].noted("is_guarded", False):
        parts.append("Its checkpoints were not guarded.")
    return " ".join(parts)


def _count_ooms_in_steps(story: Story) -> str:
    """Return how often memory ran out without ending the attempt, such as ``once``.

    The text is empty if it never did.
    """
    # An attempt that ended because memory ran out has a mark too.
    count = sum(mark.kind == "oom" for mark in story.marks)
    count -= sum(attempt.outcome in OOM for attempt in story.attempts)
    if count == 0:
        return ""
    return "once" if count == 1 else f"{count} times"


def _describe_end(story: Story) -> str:
    """Return the first sentence: how, when and where the job ended."""
    status = story.status
    attempts = story.attempts
    last = attempts[-1] if attempts else None
    nth = ordinal(len(attempts))
    lines = (story.launches[-1].reason or "").strip().splitlines()
    reason = f": {lines[0]}" if lines else ""
    took = duration(story.took)
    if status == "completed" and last is not None:
        which = "" if len(attempts) == 1 else f" at the {nth} attempt"
        batch = batch_in_words(last)
        return f"Completed in {took}{which}, on {last.spec.where} with {batch}{reason}."
    position = _describe_position(last)
    checkpoint = _describe_last_checkpoint(attempts)
    if status in ("interrupted", "pruned"):
        verb = "pruned" if status == "pruned" else "stopped"
        return f"Was {verb} after {took}{position}{reason}.{checkpoint}"
    if status == UNFINISHED:
        return (
            "Has no recorded end: it still runs, or its process was killed. The last record is "
            f"from {took} after its start{position}.{checkpoint}"
        )
    where = "" if last is None else f" in the {nth} attempt, on {last.spec.where}"
    return _sentence(f"{status.replace('_', ' ')} after {took}{where}{reason}")


def batch_in_words(attempt: Attempt) -> str:
    """Return the batch of an attempt, such as ``micro-batch 64 → 16 × accumulation 4``.

    The arrow leads to a size that was found within the attempt.
    """
    spec = attempt.spec
    if not spec.has_batch:
        return "an unknown micro-batch"
    size = " → ".join(str(each) for each in attempt.sizes)
    if spec.noted("searches", False):
        size = "auto"
    steps = f" × accumulation {spec.accumulation}" if spec.accumulation != 1 else ""
    return f"micro-batch {size}{steps}{by_processes(spec.ranks)}"


def _describe_position(last: TimedAttempt | None) -> str:
    """Return the step and the device of the last attempt."""
    if last is None:
        return ", before any attempt started"
    if last.end_step is None:
        return f", before its first step on {last.spec.where}"
    return f", at step {last.end_step} on {last.spec.where}"


def _describe_last_checkpoint(attempts: Sequence[TimedAttempt]) -> str:
    """Return a sentence about the last usable checkpoint, empty if there was no attempt."""
    steps = [
        (step, attempt.noted("is_guarded", False))
        for attempt in attempts
        for step, _ in attempt.checkpoints
        if _is_good(attempt, step)
    ]
    if steps:
        step, is_guarded = steps[-1]
        text = f" The last checkpoint holds step {step}, from which the job can resume."
        if not is_guarded:
            text += (
                " It is not guarded: after a loss that is not finite, all kept checkpoints may be "
                "unusable."
            )
        return text
    return " No checkpoint was saved." if attempts else ""


def _is_good(attempt: TimedAttempt, step: int) -> bool:
    """Return whether training had not diverged by this step."""
    diverged_at: int | None = attempt.evidence.noted("bad_step", None)
    good_step: int | None = attempt.evidence.noted("good_step", None)
    return diverged_at is None or step <= (good_step or 0)


def _outcome_and_place(attempt: TimedAttempt) -> tuple[str, str]:
    return attempt.outcome, attempt.spec.where


def _describe_failures(attempts: Sequence[TimedAttempt]) -> Iterator[str]:
    """Yield a text for each group of consecutive failures of the same kind on the same device."""
    failed = [
        attempt
        for attempt in attempts
        if attempt.outcome not in ("completed", UNFINISHED) and attempt.action != "stopped"
    ]
    for (outcome, where), group in itertools.groupby(failed, key=_outcome_and_place):
        members = list(group)
        sizes = dict.fromkeys(str(a.batch_size) for a in members if a.batch_size)
        times = ""
        size = ""
        if outcome in OOM and sizes:
            size = f" at micro-batch {', '.join(sizes)}"
        elif len(members) > 1:
            times = f" {len(members)} times"
        # A program that got no GPU from the launcher chose its device itself.
        place = f" on {where}" if members[0].spec.gpus else ""
        yield f"{outcome_in_words(outcome)}{times}{place}{size}"


def _sentence(text: str) -> str:
    """Return a text with a capital at its start and a full stop at its end."""
    ending = "" if text.endswith((".", "!", "?")) else "."
    return text[:1].upper() + text[1:] + ending


def advice_of(story: Story, keys: Mapping[str, str] | None) -> Iterator[Advice]:
    """Yield findings and advice, the most promising first.

    ``keys`` are the names that a project uses for our keys.
    """
    words = Words(keys)
    for advice in _find_advice(story):
        steps = tuple(words.reword(step) for step in advice.steps)
        overrides = words.reword(advice.overrides or "") or None
        yield replace(advice, steps=steps, overrides=overrides)
    for finding in speed_advice(story.attempts):
        yield Advice(_sentence(words.reword(finding)))


def _find_advice(story: Story) -> Iterator[Advice]:
    """Yield advice with our own keys."""
    yield from _advise_size_that_fitted(story)
    yield from _advise_after_failures(story.attempts)
    inside = _count_ooms_in_steps(story)
    if inside:
        yield Advice(
            f"Memory ran out {inside} inside a step.",
            ("set training.batch_size to a size that fits: then no step is repeated",),
        )
    for device in story.memory:
        yield from _advise_on_full_gpu(device)
    if (story.stability or "").startswith("growing"):
        yield Advice(
            f"Memory was {story.stability}.",
            (
                "collect numbers, not tensors: loss.item() or loss.detach(), because a tensor "
                "keeps the whole graph that it was computed by",
            ),
        )


def _advise_size_that_fitted(story: Story) -> Iterator[Advice]:
    """Advise starting the next run with the size that fitted."""
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
            ("start the next run with the size that fitted",),
            f"training.batch_size={last.batch_size} "
            f"training.gradient_accumulation_steps={last.spec.accumulation}",
        )


def _advise_after_failures(attempts: Sequence[TimedAttempt]) -> Iterator[Advice]:
    """Yield the advice about the last failure of each kind on each device."""
    last_failures = {(attempt.outcome, attempt.device): attempt for attempt in attempts}
    for attempt in last_failures.values():
        if attempt.failure is not None and attempt.failure.advice:
            yield Advice(_describe_failure(attempt, attempt.failure), attempt.failure.advice)


def _describe_failure(attempt: TimedAttempt, failure: Failure) -> str:
    """Return a sentence about a failure. For an out-of-memory error, it has the known sizes."""
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
    figures = [f"{memory(size)} {label}" for label, size in sizes.items() if size is not None]
    kind = "GPU memory" if failure.kind is FailureKind.DEVICE_OOM else "Host memory"
    text = f"{kind} ran out in attempt {attempt.number} on {attempt.spec.where}"
    if attempt.batch_size is not None:
        text += f" at micro-batch {attempt.batch_size}"
    if figures:
        text += f" ({', '.join(figures)})"
    return f"{text}."


def _advise_on_full_gpu(device: DeviceMemory) -> Iterator[Advice]:
    """Yield advice if a GPU was almost full."""
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
                "a GPU with more free memory",
            ),
        )


def _used_by_others(sample: Sample) -> int:
    """Return the bytes of a GPU that were used outside of this job's cache."""
    used = sample.gpu_used or 0
    reserved = sample.reserved or 0
    return used - reserved


def describe_held_memory(attempts: Sequence[Attempt]) -> str:
    """Return the peak memory of a GPU that the job's processes held, empty if not measured."""
    peak = max((attempt.memory.get("gpu_peak", 0) for attempt in attempts), default=0)
    return f"{memory(peak)} at its peak, CUDA and libraries included" if peak else ""


def speed_advice(attempts: Sequence[Attempt]) -> Iterator[str]:
    """Yield advice that would make the job faster, from the last attempt with a known speed."""
    measured = [attempt for attempt in attempts if speed_of(attempt)]
    if measured:
        last = measured[-1]
        yield from _advise_on_data(last)
        yield from _advise_on_slow_rank(speed_of(last))


def _advise_on_data(attempt: Attempt) -> Iterator[str]:
    """Yield advice if training waited for data for much of the time."""
    speed = speed_of(attempt)
    num_workers = attempt.spec.noted("num_workers", 0)
    worst = max(speed, key=lambda rank: rank.data_share or 0)
    share = worst.data_share or 0
    seconds = share * worst.steps * worst.seconds_per_step
    if share > _MUCH_WAITING_FOR_DATA and seconds >= _LEAST_SECONDS:
        who = "training" if len(speed) == 1 else f"rank {worst.rank}"
        # The disk is only suspected if workers already prepare the samples.
        disk = ", or move the data to a faster disk if it is read from one" if num_workers else ""
        yield (
            f"{who} waited for data {percent(share)} of the time: raise "
            f"training.num_workers (now {num_workers}){disk}"
        )


def _advise_on_slow_rank(speed: Sequence[Speed]) -> Iterator[str]:
    """Yield advice if a rank is much slower than the others."""
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
    """Return the recent time of a step on the slowest rank, 0 if it is unknown."""
    seconds = [rank.seconds_per_step_now or rank.seconds_per_step for rank in speed]
    return max(seconds, default=0.0)


def samples_per_second(speed: Sequence[Speed], ranks: int) -> float | None:
    """Return the samples per second of all ranks, None if unknown.

    In a script, only the first rank reports, and the others process as many samples.
    """
    rates = [s.samples_per_second for s in speed if s.samples_per_second is not None]
    if not speed or len(rates) < len(speed):
        return None
    return sum(rates) * ranks / len(speed)


def speed_text(speed: Sequence[Speed], ranks: int) -> str:
    """Return the speed of all ranks in one line, empty if it is unknown."""
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
