"""What happened in a job, in a sentence or two. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from robust_train.report.attempts import UNFINISHED, AttemptStory
from robust_train.report.series import Mark
from robust_train.report.units import duration, ordinal, percent

_MOST_TROUBLES = 4

OUTCOMES = {
    "completed": "completed",
    "device_oom": "GPU memory ran out",
    "host_oom": "host memory ran out",
    "worker_death": "data-loader worker died",
    "device_fault": "device fault",
    "device_unavailable": "device unavailable",
    "comm": "peer or network failed",
    "interrupted": "stopped",
    "bug": "trainer failed",
    UNFINISHED: "no recorded end",
}
"""An attempt's outcome for people."""

ACTIONS = {
    "halve_batch": "half the batch",
    "halve_batch_on_request": "half the batch, as asked",
    "switch_gpu": "another GPU",
    "cpu_fallback": "the CPU",
    "expandable_segments": "expandable segments",
    "no_expandable_segments": "no expandable segments",
    "retry": "the same again",
    "wait": "wait for room",
    "stopped": "stopped",
    "fewer_workers": "fewer workers",
    "give_up": "give up",
    "none": "",
}
"""What was decided after an attempt, for people."""


def sentence_of(
    status: str,
    reason: str | None,
    attempts: Sequence[AttemptStory],
    seconds: dict[str, float],
    marks: Sequence[Mark],
) -> str:
    """What happened: how it ended, what went wrong on the way, how much of the time was useful."""
    parts = [_ending(status, reason, attempts, seconds["wall"])]
    before = attempts[:-1] if status in ("completed", "failed", "interrupted") else attempts
    troubles = _troubles([a for a in before if a.outcome not in ("completed", UNFINISHED)])
    if troubles:
        parts.append(_capital(", then ".join(troubles)) + ".")
    inside = sum(mark.kind == "oom" and mark.text.startswith("inside") for mark in marks)
    if inside:
        times = "once" if inside == 1 else f"{inside} times"
        parts.append(f"Memory ran out {times} inside a step, which was repeated in smaller parts.")
    if status == "completed" and len(attempts) > 1:
        parts.append(f"{percent(seconds['useful'] / seconds['wall'])} of the time was useful.")
    return " ".join(parts)


def setting(attempt: AttemptStory) -> str:
    """``batch size 16 × accumulation 4 × 2 processes``."""
    size, accumulation = attempt.batch_size, attempt.gradient_accumulation_steps
    if size is None:
        return "an unknown batch size"
    steps = f" × accumulation {accumulation}" if accumulation != 1 else ""
    return f"batch size {size}{steps}" + (
        f" × {attempt.ranks} processes" if attempt.ranks != 1 else ""
    )


def _ending(status: str, reason: str | None, attempts: Sequence[AttemptStory], wall: float) -> str:
    last = attempts[-1] if attempts else None
    why = "" if reason is None else f": {_first_line(reason)}"
    if status == "completed" and last is not None:
        which = "" if len(attempts) == 1 else f" at the {ordinal(len(attempts))} attempt"
        return f"Completed in {duration(wall)}{which}, on {last.place} with {setting(last)}."
    if status == "no_device":
        return _stop(f"Found no device in {duration(wall)}{why}")
    if status == "interrupted":
        return _stop(f"Was stopped after {duration(wall)}{_at(last)}") + _saved(attempts)
    if status == UNFINISHED:
        return (
            "Has no recorded end: it still runs, or its process died without a word. The last "
            f"sign of life came after {duration(wall)}{_at(last)}." + _saved(attempts)
        )
    where = "" if last is None else f" in the {ordinal(len(attempts))} attempt, on {last.place}"
    return _stop(f"{_capital(status.replace('_', ' '))} after {duration(wall)}{where}{why}")


def _at(last: AttemptStory | None) -> str:
    if last is None:
        return ", before any attempt had begun"
    step = "before its first step" if last.end_step is None else f"at step {last.end_step}"
    return f", {step} on {last.place}"


def _saved(attempts: Sequence[AttemptStory]) -> str:
    steps = [step for attempt in attempts for step, _ in attempt.checkpoints]
    if not attempts:
        return ""
    if not steps:
        return " No checkpoint was saved."
    return f" The last checkpoint holds step {steps[-1]}: the same command goes on from there."


def _troubles(failed: Sequence[AttemptStory]) -> list[str]:
    told = list(_told(failed))
    if len(told) > _MOST_TROUBLES:
        more = len(told) - _MOST_TROUBLES
        told = [*told[:_MOST_TROUBLES], f"{more} more failed attempt{'s' * (more > 1)}"]
    return told


def _told(failed: Sequence[AttemptStory]) -> Iterator[str]:
    for (outcome, place), group in itertools.groupby(failed, key=lambda a: (a.outcome, a.place)):
        own = list(group)
        sizes = _and([str(a.batch_size) for a in own if a.batch_size is not None])
        times = "" if len(own) == 1 else f" {len(own)} times"
        if outcome == "device_oom":
            yield f"memory ran out on {place} at batch size {sizes}"
        elif outcome == "host_oom":
            yield f"host memory ran out at batch size {sizes}"
        elif outcome == "worker_death":
            yield f"a data-loader worker died{times}"
        elif outcome == "interrupted":
            yield f"it was stopped{times}"
        else:
            what = OUTCOMES.get(outcome, outcome.replace("_", " "))
            yield f"{what}{times} on {place}"


def _and(words: Sequence[str]) -> str:
    words = list(dict.fromkeys(words))
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else "?"


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else ""


def _stop(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
