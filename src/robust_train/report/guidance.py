"""Advice for the next run, with the figures of this one; none if nothing was tight. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from robust_train.model.failure import Failure, FailureKind
from robust_train.readable import duration, memory, percent
from robust_train.report import speed_advice
from robust_train.report.attempts import TimedAttempt
from robust_train.report.series import OOM, DeviceMemory, Mark
from robust_train.report.times import Span, Use

_TIGHT = 0.9
_FRAGMENTED = 0.1
_OTHERS = 0.25
_MUCH_LOST = 0.1
_MUCH_WAITING = 0.25
_LEAST_SECONDS = 10.0


@dataclass(frozen=True)
class Advice:
    """One thing that was tight, advice, and overrides for the next run."""

    finding: str
    steps: tuple[str, ...] = ()
    overrides: str | None = None


def advice_of(
    attempts: Sequence[TimedAttempt],
    devices: Sequence[DeviceMemory],
    marks: Sequence[Mark],
    spans: Sequence[Span],
    seconds: Mapping[str, float],
    stability: str | None = None,
) -> tuple[Advice, ...]:
    """Return findings and advice, most promising first."""
    return (
        *_what_worked(attempts, spans),
        *_failures(attempts),
        *_splits(marks),
        *(finding for device in devices for finding in _tightness(device)),
        *_growth(stability),
        *_speed(attempts),
        *_times(attempts, seconds),
    )


def _what_worked(
    attempts: Sequence[TimedAttempt], spans: Sequence[Span]
) -> Iterator[Advice]:
    """Advise to begin with the size that fitted."""
    if (
        not attempts
        or attempts[-1].outcome != "completed"
        or attempts[-1].batch_size is None
    ):
        return
    last = attempts[-1]
    failed = {
        a.number: str(a.batch_size)
        for a in attempts
        if a.outcome in OOM
        and a.device == last.device
        and a.batch_size != last.batch_size
    }
    if failed:
        lost = sum(
            s.seconds for s in spans if s.use is Use.LOST and s.attempt in failed
        )
        sizes = ", ".join(dict.fromkeys(failed.values()))
        yield Advice(
            f"On {last.where} batch size {last.batch_size} fitted and {sizes} did not. Finding "
            f"this out cost {duration(lost)}.",
            (
                "begin the next run with the size that fitted: the effective batch is the same",
            ),
            f"training.batch_size={last.batch_size} "
            f"training.gradient_accumulation_steps={last.spec.gradient_accumulation_steps}",
        )


def _failures(attempts: Sequence[TimedAttempt]) -> Iterator[Advice]:
    """Yield the last failure of each kind on each device."""
    for attempt in {(a.outcome, a.device): a for a in attempts}.values():
        if attempt.failure is not None and attempt.failure.advice:
            yield Advice(_finding(attempt, attempt.failure), attempt.failure.advice)


def _finding(attempt: TimedAttempt, failure: Failure) -> str:
    evidence = failure.evidence
    if not failure.kind.is_memory:
        return f"Attempt {attempt.number} on {attempt.where}: {failure.message}"
    of = "" if evidence.total_bytes is None else f" of {memory(evidence.total_bytes)}"
    figures = [
        f"{memory(size)}{what}"
        for size, what in (
            (evidence.requested_bytes, " requested"),
            (evidence.free_bytes, f"{of} free"),
            (evidence.allocated_bytes, " in use by tensors"),
            (evidence.reserved_unallocated_bytes, " reserved but unused"),
        )
        if size is not None
    ]
    known = f" ({', '.join(figures)})" if figures else ""
    what = "GPU memory" if failure.kind is FailureKind.DEVICE_OOM else "Host memory"
    return (
        f"{what} ran out in attempt {attempt.number} on {attempt.where} at batch size "
        f"{attempt.batch_size}{known}."
    )


def _splits(marks: Sequence[Mark]) -> Iterator[Advice]:
    inside = sum(mark.is_inside_a_step for mark in marks)
    changes = [
        mark.text for mark in marks if mark.kind == "batch" and " at step " in mark.text
    ]
    if inside and changes:
        times = "once" if inside == 1 else f"{inside} times"
        yield Advice(
            f"Memory ran out {times} inside a step; the last change was: {changes[-1]}.",
            ("set training.batch_size to a size that fits: then no step is repeated",),
        )


def _tightness(device: DeviceMemory) -> Iterator[Advice]:
    name, total, most = device.device, device.most("gpu_total"), device.most("reserved")
    if not total or most is None:
        return
    fullest = max(device.samples, key=lambda s: (s.gpu_used or 0, s.reserved or 0))
    used = fullest.gpu_used or most
    unused = max(
        (s.reserved or 0) - (s.allocated or 0) for s in device.samples if s.reserved
    )
    others = max((s.gpu_used or 0) - (s.reserved or 0) for s in device.samples)
    if used > _TIGHT * total:
        yield Advice(
            f"{name} was {percent(used / total)} full at its fullest "
            f"({memory(used)} of {memory(total)}).",
            (
                "a longer sample or the first validation may not fit: leave some room with a "
                "smaller training.batch_size and more training.gradient_accumulation_steps",
            ),
        )
    if used > _TIGHT * total and unused > _FRAGMENTED * total:
        yield Advice(
            f"Up to {memory(unused)} of {name} was reserved but not in use.",
            (
                "set memory.expandable_segments=true: freed blocks can then be used together",
            ),
        )
    if others > _OTHERS * total:
        yield Advice(
            f"Other processes used up to {memory(others)} of {name} (this process's CUDA context "
            "counts as well).",
            (
                "robust-train gpus lists them; a higher min_gpu_memory_mb waits for a freer GPU",
            ),
        )


def _growth(stability: str | None) -> Iterator[Advice]:
    steps = {
        "growing": "collect numbers, not tensors: loss.item() or loss.detach(), because a tensor "
        "keeps the whole graph that it was computed by",
        "fragmenting": "set memory.expandable_segments=true",
    }
    for kind, step in steps.items():
        if (stability or "").startswith(kind):
            yield Advice(f"Memory was {stability}.", (step,))


def _speed(attempts: Sequence[TimedAttempt]) -> Iterator[Advice]:
    for a in [a for a in attempts if a.speed][-1:]:
        for sentence in speed_advice.advice_of(a.speed, a.spec.num_workers):
            yield Advice(f"{sentence[:1].upper()}{sentence[1:]}.")


def _times(
    attempts: Sequence[TimedAttempt], seconds: Mapping[str, float]
) -> Iterator[Advice]:
    wall, lost, wait = seconds["wall"], seconds["lost"], seconds["wait"]
    # checkpoints do not help attempts that never trained
    trained = any(
        a.training_began is not None and a.outcome != "completed" for a in attempts
    )
    if trained and lost > max(_MUCH_LOST * wall, _LEAST_SECONDS):
        yield Advice(
            f"{duration(lost)} ({percent(lost / wall)}) was lost: repeated, or in no checkpoint.",
            (
                "save more often: "
                "lower training.checkpoint_every_minutes or checkpoint_every_steps",
            ),
        )
    if wait > max(_MUCH_WAITING * wall, _LEAST_SECONDS):
        yield Advice(
            f"{duration(wait)} ({percent(wait / wall)}) was spent waiting.",
            (
                "a lower min_gpu_memory_mb gets a GPU sooner; robust-train queue lists who waits",
            ),
        )
