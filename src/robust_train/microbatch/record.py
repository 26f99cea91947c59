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

NO_WEIGHT = (
    "a backward pass without weight: the gradients of several micro-batches would add up wrongly; "
    "use micro.backward(loss), or multiply the loss by micro.weight"
)

NOT_ENTERED = (
    "a micro-batch was not used as a context manager; write `with micro:` around the loop's body, "
    "so that running out of memory can be repaired"
)


def changed(on_event: OnEvent, step: int, before: int, after: int, reason: str) -> None:
    """The size changes though no memory ran out."""
    log.info("step %d: micro-batch %d → %d: %s", step, before, after, reason)
    on_event(MicroBatchChanged(step, True, before, after, reason))


def repeated(
    on_event: OnEvent, step: int, training: bool, failure: Failure, before: int, after: int | None
) -> None:
    """Memory ran out, and the step (in validation the part) is repeated with a smaller size."""
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
    """Memory ran out at the smallest size as well; ``error``, which is raised, says so too."""
    sizes = ", ".join(map(str, tried))
    note = f"step {step}: memory ran out at every micro-batch tried ({sizes})"
    log.error("%s", note)
    if hasattr(error, "add_note"):
        error.add_note(note)
    on_event(
        MicroBatchExhausted(
            step, training, used, failure.message, tuple(tried), **_figures(failure)
        )
    )


def found(on_event: OnEvent, search: BatchSearch, result: FoundBatchSize) -> None:
    """Probes have told which size fits."""
    log.info("training.batch_size=auto: %s", result)
    effective, size = search.effective_batch_size, result.batch_size
    accumulation = None if size is None else -(-effective // size)
    on_event(BatchSizeFound(size, accumulation, effective, search.key, result.as_json()))


def _figures(failure: Failure) -> dict[str, Any]:
    evidence = failure.evidence
    return {
        "kind": failure.kind,
        "requested_bytes": evidence.requested_bytes,
        "allocated_bytes": evidence.allocated_bytes,
        "free_bytes": evidence.free_bytes,
    }
