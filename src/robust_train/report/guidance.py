"""What to do next time, with the figures of this run; nothing where nothing was tight. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from robust_train.events import MalformedEvent, from_json
from robust_train.failures.advice import advice_for
from robust_train.readable import duration, memory, percent
from robust_train.report.attempts import AttemptStory
from robust_train.report.series import DeviceMemory, Mark
from robust_train.report.times import Span, Use
from robust_train.values import MEMORY_FAILURES, Evidence, FailureKind

_TIGHT = 0.9
_FRAGMENTED = 0.1
_OTHERS = 0.25
_MUCH = 0.1
_MUCH_WAITING = 0.25
_LEAST_SECONDS = 10.0
_OOM = frozenset(kind.value for kind in MEMORY_FAILURES)


@dataclass(frozen=True)
class Advice:
    """One thing that was tight.

    Attributes:
        finding: what was seen, with the figures of this run.
        steps: what may help, most promising first.
        overrides: for the next run, None where there are none.
    """

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
        *_times(attempts, seconds),
    )


def _what_worked(attempts: Sequence[AttemptStory], spans: Sequence[Span]) -> Iterator[Advice]:
    """Advise to begin with the size that held."""
    failed = [a for a in attempts if a.outcome in _OOM]
    if not failed or attempts[-1].outcome != "completed":
        return
    last = attempts[-1]
    same_device = [a for a in failed if a.device == last.device and a.batch_size != last.batch_size]
    if not same_device or last.batch_size is None:
        return
    numbers = {a.number for a in same_device}
    lost = sum(s.seconds for s in spans if s.use is Use.LOST and s.attempt in numbers)
    sizes = ", ".join(dict.fromkeys(str(a.batch_size) for a in same_device))
    yield Advice(
        f"On {last.where} batch size {last.batch_size} held and {sizes} did not; finding that out "
        f"cost {duration(lost)}.",
        ("begin the next run with what held: the effective batch is the same",),
        f"training.batch_size={last.batch_size} "
        f"training.gradient_accumulation_steps={last.gradient_accumulation_steps}",
    )


def _failures(attempts: Sequence[AttemptStory]) -> Iterator[Advice]:
    """Yield the last failure of each kind on each device."""
    latest = {(a.outcome, a.device): a for a in attempts}
    kinds = {kind.value: kind for kind in FailureKind}
    for attempt in latest.values():
        kind = kinds.get(attempt.outcome)
        if kind is None:
            continue
        try:
            evidence = from_json(Evidence, attempt.evidence)
        except MalformedEvent:
            evidence = Evidence()
        steps = advice_for(kind, evidence)
        if steps:
            yield Advice(_finding(attempt, kind, evidence), steps)


def _finding(attempt: AttemptStory, kind: FailureKind, evidence: Evidence) -> str:
    if kind not in MEMORY_FAILURES:
        return f"Attempt {attempt.number} on {attempt.where}: {attempt.message or kind.value}"
    figures = []
    if evidence.requested_bytes is not None:
        figures.append(f"{memory(evidence.requested_bytes)} requested")
    if evidence.free_bytes is not None:
        of = "" if evidence.total_bytes is None else f" of {memory(evidence.total_bytes)}"
        figures.append(f"{memory(evidence.free_bytes)}{of} free")
    if evidence.allocated_bytes is not None:
        figures.append(f"{memory(evidence.allocated_bytes)} in use by tensors")
    if evidence.reserved_unallocated_bytes is not None:
        figures.append(f"{memory(evidence.reserved_unallocated_bytes)} reserved but unused")
    known = f" ({', '.join(figures)})" if figures else ""
    what = "GPU memory" if kind is FailureKind.DEVICE_OOM else "Host memory"
    return (
        f"{what} ran out in attempt {attempt.number} on {attempt.where} at batch size "
        f"{attempt.batch_size}{known}."
    )


def _splits(marks: Sequence[Mark]) -> Iterator[Advice]:
    inside = [mark for mark in marks if mark.is_inside_a_step]
    changes = [mark.text for mark in marks if mark.kind == "batch" and " at step " in mark.text]
    if inside and changes:
        yield Advice(
            f"Inside a step memory ran out {'once' if len(inside) == 1 else f'{len(inside)} times'}"
            "; the last change was: "
            f"{changes[-1]}.",
            ("set training.batch_size to a size that holds: no step is then repeated",),
        )


def _tightness(device: DeviceMemory) -> Iterator[Advice]:
    total, most = device.total_bytes, device.most("reserved")
    if not total or most is None:
        return
    fullest = max(device.samples, key=lambda s: (s.gpu_used or 0, s.reserved or 0))
    used = fullest.gpu_used or most
    if used > _TIGHT * total:
        yield Advice(
            f"{device.device} was {percent(used / total)} full at its fullest "
            f"({memory(used)} of {memory(total)}).",
            (
                "a longer sample or the first validation may not fit: leave some room with a "
                "smaller training.batch_size and more training.gradient_accumulation_steps",
            ),
        )
    unused = max((s.reserved or 0) - (s.allocated or 0) for s in device.samples if s.reserved)
    if used > _TIGHT * total and unused > _FRAGMENTED * total:
        yield Advice(
            f"Up to {memory(unused)} of {device.device} was reserved but not in use.",
            ("set memory.expandable_segments=true: freed blocks can then be used together",),
        )
    others = max((s.gpu_used or 0) - (s.reserved or 0) for s in device.samples)
    if others > _OTHERS * total:
        yield Advice(
            f"Up to {memory(others)} of {device.device} was held by others (a process's CUDA "
            "context counts as well).",
            ("see with robust-train gpus who they are, or ask for more with min_gpu_memory_mb",),
        )


def _growth(stability: str | None) -> Iterator[Advice]:
    if stability is not None and stability.startswith("growing"):
        yield Advice(
            f"Memory was {stability}.",
            (
                "keep numbers, not tensors: loss.item() or loss.detach() where losses are "
                "collected, for a tensor keeps its whole graph",
            ),
        )
    elif stability is not None and stability.startswith("fragmenting"):
        yield Advice(f"Memory was {stability}.", ("set memory.expandable_segments=true",))


def _times(attempts: Sequence[AttemptStory], seconds: Mapping[str, float]) -> Iterator[Advice]:
    wall = seconds["wall"]
    # what was lost by attempts that never trained is no matter of checkpoints
    trained = any(a.training_began is not None and a.outcome != "completed" for a in attempts)
    if trained and seconds["lost"] > max(_MUCH * wall, _LEAST_SECONDS):
        yield Advice(
            f"{duration(seconds['lost'])} ({percent(seconds['lost'] / wall)}) was lost: done "
            "again, or saved nowhere.",
            ("save more often: training.checkpoint_every_minutes or checkpoint_every_steps",),
        )
    if seconds["wait"] > max(_MUCH_WAITING * wall, _LEAST_SECONDS):
        yield Advice(
            f"{duration(seconds['wait'])} ({percent(seconds['wait'] / wall)}) was spent waiting.",
            ("a smaller min_gpu_memory_mb gets a GPU sooner; robust-train queue lists who waits",),
        )
