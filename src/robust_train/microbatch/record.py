"""What is logged of micro-batches: a line, and an event for the journal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from robust_train.batch.search import BatchSearch
from robust_train.events import BatchSizeFound, Event, MicroBatchChanged, MicroBatchExhausted
from robust_train.microbatch.probing import FoundBatchSize
from robust_train.values import GIB, Failure

log = logging.getLogger("robust_train")

OnEvent = Callable[[Event], None]


def changed(on_event: OnEvent, step: int, before: int, after: int, reason: str) -> None:
    """Log that the size changes though no memory ran out."""
    log.info("step %d: micro-batch %d → %d: %s", step, before, after, reason)
    on_event(MicroBatchChanged(step, True, before, after, reason))


def repeated(
    on_event: OnEvent, step: int, training: bool, failure: Failure, before: int, after: int | None
) -> None:
    """Log that the step (in validation the part) is repeated with a smaller size."""
    on_event(MicroBatchChanged(step, training, before, after, failure.message, **_figures(failure)))
    requested = failure.evidence.requested_bytes
    log.warning(
        "step %d: out of memory (%s)%s: micro-batch %d → %s, %s",
        step,
        failure.kind.value,
        "" if requested is None else f" asking for {requested / GIB:.2f} GiB",
        before,
        after,
        "the step is repeated" if training else "the part is repeated",
    )


def exhausted(
    on_event: OnEvent,
    step: int,
    training: bool,
    failure: Failure,
    used: int,
    tried: Sequence[int],
    error: Exception,
) -> None:
    """Log that memory ran out at the smallest size too; note it on ``error``, which is raised."""
    note = f"step {step}: memory ran out at every micro-batch tried ({', '.join(map(str, tried))})"
    log.error("%s", note)
    if hasattr(error, "add_note"):
        error.add_note(note)
    figures = _figures(failure)
    on_event(MicroBatchExhausted(step, training, used, failure.message, tuple(tried), **figures))


def found(on_event: OnEvent, search: BatchSearch, result: FoundBatchSize) -> None:
    """Log which size fits."""
    log.info("training.batch_size=auto: %s", result)
    effective, size = search.effective_batch_size, result.batch_size
    accumulation = None if size is None else -(-effective // size)
    on_event(BatchSizeFound(size, accumulation, effective, search.key, result.as_json()))


def _figures(failure: Failure) -> dict[str, Any]:
    names = ("requested_bytes", "allocated_bytes", "free_bytes")
    return {"kind": failure.kind, **{name: getattr(failure.evidence, name) for name in names}}
