"""The story of a job in a sentence or two. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from robust_train.readable import by_processes, duration, ordinal, percent
from robust_train.report.attempts import UNFINISHED, TimedAttempt
from robust_train.report.series import Mark

_MOST_TROUBLES = 4

OUTCOMES = {
    "completed": "completed",
    "device_oom": "GPU memory ran out",
    "host_oom": "host memory ran out",
    "worker_death": "data-loader worker died",
    "device_fault": "device fault",
    "device_unavailable": "device unavailable",
    "comm": "peer or network failed",
    "interrupted": "interrupted",
    "bug": "trainer failed",
    "unknown": "failed for a reason that this version does not know",
    UNFINISHED: "no recorded end",
}
"""An attempt's outcome for people."""

ACTIONS = {
    "halve_batch": "half the batch",
    "halve_batch_on_request": "half the batch, as requested",
    "switch_gpu": "another GPU",
    "fewer_gpus": "fewer GPUs",
    "cpu_fallback": "the CPU",
    "retry": "the same again",
    "wait": "wait for room",
    "none": "",
}
"""The decision after an attempt for people, if its name does not do."""


def sentence_of(
    status: str,
    reason: str | None,
    attempts: Sequence[TimedAttempt],
    seconds: Mapping[str, float],
    marks: Sequence[Mark],
) -> str:
    """Return how the job ended, which attempts failed before, and the share of useful time."""
    wall = seconds["wall"]
    parts = [_ending(status, reason, attempts, wall)]
    before = (
        attempts[:-1] if status in ("completed", "failed", "interrupted") else attempts
    )
    failed = [a for a in before if a.outcome not in ("completed", UNFINISHED)]
    troubles = list(_troubles(failed))
    if more := len(troubles[_MOST_TROUBLES:]):
        troubles[_MOST_TROUBLES:] = [f"{more} more failed attempt{'s' * (more > 1)}"]
    if troubles:
        parts.append(_sentence(", then ".join(troubles)))
    inside = sum(mark.is_inside_a_step for mark in marks)
    if inside:
        times = "once" if inside == 1 else f"{inside} times"
        parts.append(
            f"Memory ran out {times} inside a step, which was repeated in smaller parts."
        )
    if status == "completed" and len(attempts) > 1 and wall > 0:
        parts.append(f"{percent(seconds['useful'] / wall)} of the time was useful.")
    return " ".join(parts)


def _ending(
    status: str, reason: str | None, attempts: Sequence[TimedAttempt], wall: float
) -> str:
    last, nth = attempts[-1] if attempts else None, ordinal(len(attempts))
    why = "" if reason is None else f": {(reason.strip().splitlines() or [''])[0]}"
    if status == "completed" and last is not None:
        which = "" if len(attempts) == 1 else f" at the {nth} attempt"
        return f"Completed in {duration(wall)}{which}, on {last.where} with {_setting(last)}."
    if status == "no_device":
        return _sentence(f"Found no device in {duration(wall)}{why}")
    if status == "interrupted":
        return f"Was stopped after {duration(wall)}{_at(last)}.{_saved(attempts)}"
    if status == UNFINISHED:
        return (
            "Has no recorded end: it still runs, or its process was killed. The last record is "
            f"from {duration(wall)} after its start{_at(last)}.{_saved(attempts)}"
        )
    where = "" if last is None else f" in the {nth} attempt, on {last.where}"
    return _sentence(f"{status.replace('_', ' ')} after {duration(wall)}{where}{why}")


def _setting(attempt: TimedAttempt) -> str:
    """Return ``batch size 16 × accumulation 4 × 2 processes``."""
    size, accumulation = attempt.batch_size, attempt.spec.gradient_accumulation_steps
    if size is None:
        return "an unknown batch size"
    steps = f" × accumulation {accumulation}" if accumulation != 1 else ""
    return f"batch size {size}{steps}{by_processes(attempt.spec.ranks)}"


def _at(last: TimedAttempt | None) -> str:
    if last is None:
        return ", before any attempt had begun"
    step = (
        "before its first step" if last.end_step is None else f"at step {last.end_step}"
    )
    return f", {step} on {last.where}"


def _saved(attempts: Sequence[TimedAttempt]) -> str:
    steps = [step for attempt in attempts for step, _ in attempt.checkpoints]
    if steps:
        return f" The last checkpoint holds step {steps[-1]}, from which the job can resume."
    return " No checkpoint was saved." if attempts else ""


def _troubles(failed: Sequence[TimedAttempt]) -> Iterator[str]:
    for (outcome, where), group in itertools.groupby(
        failed, key=lambda a: (a.outcome, a.where)
    ):
        own = list(group)
        *sizes, last = dict.fromkeys(str(a.batch_size or "?") for a in own)
        listed = f"{', '.join(sizes)} and {last}" if sizes else last
        times = "" if len(own) == 1 else f" {len(own)} times"
        what = OUTCOMES.get(outcome, outcome.replace("_", " "))
        yield {
            "device_oom": f"memory ran out on {where} at batch size {listed}",
            "host_oom": f"host memory ran out at batch size {listed}",
            "worker_death": f"a data-loader worker died{times}",
            "interrupted": f"it was interrupted{times}",
        }.get(outcome, f"{what}{times} on {where}")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
