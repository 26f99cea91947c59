"""What is logged of a step's parts: a line, and an event for the journal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from robust_train.model.events import (
    BatchSizeFound,
    Event,
    MicroBatchChanged,
    MicroBatchExhausted,
)
from robust_train.model.failure import Failure
from robust_train.policy.batch_search import BatchSearch
from robust_train.readable import GIB
from robust_train.step.probing import FoundBatchSize

log = logging.getLogger("robust_train")

OnEvent = Callable[[Event], None]
OnOom = Callable[[BaseException, Failure], None]


class StepSpeed(Protocol):
    """What measures the speed of steps."""

    def batch_begins(self, samples: int) -> None:
        """Count from here on as computing a batch."""

    def pause(self) -> None:
        """Leave the present step out: it has more to do than to train."""

    def alone_until_now(self) -> None:
        """Count from here on as the ranks' waiting for each other."""


class NotMeasured:
    """Measures nothing."""

    def batch_begins(self, samples: int) -> None: ...
    def pause(self) -> None: ...
    def alone_until_now(self) -> None: ...


class Recorder:
    """Logs how the size of parts changes.

    Args:
        on_event: called with an event at every change.
        on_oom: called with error and failure when memory ran out and a smaller size is tried.
        step: returns the number of the optimizer step, from 1.
    """

    def __init__(
        self, on_event: OnEvent, on_oom: OnOom, step: Callable[[], int]
    ) -> None:
        self.on_event = on_event
        self.on_oom = on_oom
        self._step = step

    def changed(self, before: int, after: int, reason: str) -> None:
        """Log that the size changes though no memory ran out."""
        step = self._step()
        log.info("step %d: micro-batch %d → %d: %s", step, before, after, reason)
        self.on_event(MicroBatchChanged(step, True, before, reason, after=after))

    def repeated(
        self, training: bool, failure: Failure, before: int, after: int | None
    ) -> None:
        """Log that the step (in validation the part) is repeated with a smaller size."""
        step = self._step()
        self.on_event(
            MicroBatchChanged(
                step,
                training,
                before,
                failure.message,
                after=after,
                **_figures(failure),
            )
        )
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
        self,
        training: bool,
        failure: Failure,
        used: int,
        tried: Sequence[int],
        error: Exception,
    ) -> None:
        """Log that memory ran out at the smallest size too; note it on ``error``, which follows."""
        step, sizes = self._step(), ", ".join(map(str, tried))
        note = f"step {step}: memory ran out at every micro-batch tried ({sizes})"
        log.error("%s", note)
        if hasattr(error, "add_note"):
            error.add_note(note)
        self.on_event(
            MicroBatchExhausted(
                step,
                training,
                used,
                failure.message,
                tried=tuple(tried),
                **_figures(failure),
            )
        )

    def found(self, search: BatchSearch, result: FoundBatchSize) -> None:
        """Log which size fits."""
        log.info("training.batch_size=auto: %s", result)
        effective, size = search.effective_batch_size, result.batch_size
        accumulation = None if size is None else -(-effective // size)
        self.on_event(
            BatchSizeFound(size, accumulation, effective, search.key, result.as_json())
        )


def _figures(failure: Failure) -> dict[str, Any]:
    names = ("requested_bytes", "allocated_bytes", "free_bytes")
    return {
        "kind": failure.kind,
        **{name: getattr(failure.evidence, name) for name in names},
    }
