"""What to do next time, with the figures of this run; nothing if nothing was tight. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from robust_train.events import MalformedEvent, from_json
from robust_train.failures.advice import advice_for
from robust_train.readable import duration, memory, percent
from robust_train.report.attempts import AttemptStory
from robust_train.report.series import OOM, DeviceMemory, Mark
from robust_train.report.times import Span, Use
from robust_train.speed import speed_advice
from robust_train.values import Evidence, FailureKind

_TIGHT = 0.9
_FRAGMENTED = 0.1
_OTHERS = 0.25
_MUCH_LOST = 0.1
_MUCH_WAITING = 0.25
_LEAST_SECONDS = 10.0


@dataclass(frozen=True)
class Advice:
    """One thing that was tight: what was found, advice, and overrides for the next run."""

    finding: str
    steps: tuple[str, ...] = ()
    overrides: str | None = None


def advice_of(
    attempts: Sequence[AttemptStory],
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


def _what_worked(attempts: Sequence[AttemptStory], spans: Sequence[Span]) -> Iterator[Advice]:
    """Advise to begin with the size that held."""
    if not attempts or attempts[-1].outcome != "completed" or attempts[-1].batch_size is None:
        return
    last = attempts[-1]
    failed = {
        a.number: str(a.batch_size)
        for a in attempts
        if a.outcome in OOM and a.device == last.device and a.batch_size != last.batch_size
    }
    if failed:
        lost = sum(s.seconds for s in spans if s.use is Use.LOST and s.attempt in failed)
        sizes = ", ".join(dict.fromkeys(failed.values()))
        yield Advice(
            f"On {last.where} batch size {last.batch_size} held and {sizes} did not; finding that "
            f"out cost {duration(lost)}.",
            ("begin the next run with what held: the effective batch is the same",),
            f"training.batch_size={last.batch_size} "
            f"training.gradient_accumulation_steps={last.gradient_accumulation_steps}",
        )


def _failures(attempts: Sequence[AttemptStory]) -> Iterator[Advice]:
    """Yield the last failure of each kind on each device."""
    kinds = {kind.value: kind for kind in FailureKind}
    for attempt in {(a.outcome, a.device): a for a in attempts}.values():
        kind = kinds.get(attempt.outcome)
        if kind is None:
            continue
        try:
            evidence = from_json(Evidence, attempt.evidence)
        except MalformedEvent:
            evidence = Evidence()
        # what fitted the trainer then; journals of earlier versions do not have it
        recorded = attempt.evidence.get("advice")
        steps = tuple(map(str, recorded)) if isinstance(recorded, list) else None
        if steps := advice_for(kind, evidence) if steps is None else steps:
            yield Advice(_finding(attempt, kind, evidence), steps)


def _finding(attempt: AttemptStory, kind: FailureKind, evidence: Evidence) -> str:
    if not kind.is_memory:
        return f"Attempt {attempt.number} on {attempt.where}: {attempt.message or kind.value}"
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
    what = "GPU memory" if kind is FailureKind.DEVICE_OOM else "Host memory"
    return (
        f"{what} ran out in attempt {attempt.number} on {attempt.where} at batch size "
        f"{attempt.batch_size}{known}."
    )


def _splits(marks: Sequence[Mark]) -> Iterator[Advice]:
    inside = sum(mark.is_inside_a_step for mark in marks)
    changes = [mark.text for mark in marks if mark.kind == "batch" and " at step " in mark.text]
    if inside and changes:
        times = "once" if inside == 1 else f"{inside} times"
        yield Advice(
            f"Inside a step memory ran out {times}; the last change was: {changes[-1]}.",
            ("set training.batch_size to a size that holds: no step is then repeated",),
        )


def _tightness(device: DeviceMemory) -> Iterator[Advice]:
    name, total, most = device.device, device.most("gpu_total"), device.most("reserved")
    if not total or most is None:
        return
    fullest = max(device.samples, key=lambda s: (s.gpu_used or 0, s.reserved or 0))
    used = fullest.gpu_used or most
    unused = max((s.reserved or 0) - (s.allocated or 0) for s in device.samples if s.reserved)
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
            ("set memory.expandable_segments=true: freed blocks can then be used together",),
        )
    if others > _OTHERS * total:
        yield Advice(
            f"Up to {memory(others)} of {name} was held by others (a process's CUDA context "
            "counts as well).",
            ("see with robust-train gpus who they are, or ask for more with min_gpu_memory_mb",),
        )


def _growth(stability: str | None) -> Iterator[Advice]:
    steps = {
        "growing": "keep numbers, not tensors: loss.item() or loss.detach() where losses are "
        "collected, for a tensor keeps its whole graph",
        "fragmenting": "set memory.expandable_segments=true",
    }
    for kind, step in steps.items():
        if (stability or "").startswith(kind):
            yield Advice(f"Memory was {stability}.", (step,))


def _speed(attempts: Sequence[AttemptStory]) -> Iterator[Advice]:
    for a in [a for a in attempts if a.speed][-1:]:
        for sentence in speed_advice.advice_of(a.speed, a.faster_before, a.num_workers):
            yield Advice(f"{sentence[:1].upper()}{sentence[1:]}.")


def _times(attempts: Sequence[AttemptStory], seconds: Mapping[str, float]) -> Iterator[Advice]:
    wall, lost, wait = seconds["wall"], seconds["lost"], seconds["wait"]
    # what was lost by attempts that never trained is no matter of checkpoints
    trained = any(a.training_began is not None and a.outcome != "completed" for a in attempts)
    if trained and lost > max(_MUCH_LOST * wall, _LEAST_SECONDS):
        yield Advice(
            f"{duration(lost)} ({percent(lost / wall)}) was lost: done again, or saved nowhere.",
            ("save more often: training.checkpoint_every_minutes or checkpoint_every_steps",),
        )
    if wait > max(_MUCH_WAITING * wall, _LEAST_SECONDS):
        yield Advice(
            f"{duration(wait)} ({percent(wait / wall)}) was spent waiting.",
            ("a smaller min_gpu_memory_mb gets a GPU sooner; robust-train queue lists who waits",),
        )
