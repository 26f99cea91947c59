"""Report changes of the size of parts to the log, as events, and to the speed meter.

The engine and the batcher call a :class:`Recorder` in the process that trains. In an attempt of the
launcher, events go to the launcher. A program without the launcher may pass ``on_event`` to its
batcher.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from robust_train.model.events import Event, MicroBatchChanged, MicroBatchExhausted
from robust_train.model.failure import Failure, FailureKind
from robust_train.readable import memory
from robust_train.step.split_watch import SplitWatch

log = logging.getLogger("robust_train")

OnEvent = Callable[[Event], None]
OnOom = Callable[[BaseException, Failure], None]


def ignore_event(event: Event) -> None:
    """Do nothing with an event."""


def ignore_oom(error: BaseException, failure: Failure) -> None:
    """Do nothing when memory runs out."""


class StepSpeed(Protocol):
    """The part of the speed meter that a step uses."""

    def batch_begins(self, samples: int) -> None:
        """Count the time from now on as computing a batch."""
        return

    def pause(self) -> None:
        """Do not measure the current step, because it does more than train."""
        return

    def alone_until_now(self) -> None:
        """Count the time from now on as waiting for other ranks."""
        return


class NotMeasured(StepSpeed):
    """Measures nothing."""


@dataclass(frozen=True)
class Recorder:
    """Logs how the size of parts changes, and measures steps."""

    step: Callable[[], int]  # returns the number of the optimizer step, from 1
    on_event: OnEvent = ignore_event  # called for each change of the size
    # Called after memory ran out in a step that is repeated, before any memory is released.
    on_oom: OnOom = ignore_oom
    speed: StepSpeed = field(default_factory=NotMeasured)
    splits: SplitWatch = field(default_factory=SplitWatch)

    def log_change(self, sizes: tuple[int, int], reason: str) -> None:
        """Log that the size changes on request.

        Args:
            sizes: the sizes before and after.
        """
        step = self.step()
        before, after = sizes
        log.info("step %d: micro-batch %d → %d: %s", step, before, after, reason)
        self.on_event(MicroBatchChanged(step, True, before, reason, after=after))

    def log_repeat(self, training: bool, failure: Failure, before: int, after: int | None) -> None:
        """Log that the step, or in validation the part, is repeated with a smaller size."""
        step = self.step()
        fields = _event_fields(failure)
        self.on_event(MicroBatchChanged(step, training, before, after=after, **fields))
        device = "host" if failure.kind is FailureKind.HOST_OOM else "GPU"
        repeated = "step" if training else "part"
        request = ""
        if failure.evidence.requested_bytes is not None:
            request = f" asking for {memory(failure.evidence.requested_bytes)}"
        log.warning(
            "step %d: out of memory on the %s%s: micro-batch %d → %s, the %s is repeated",
            step,
            device,
            request,
            before,
            after,
            repeated,
        )

    def log_parts_without_loss(self, without: int, parts: int) -> None:
        """Log that some parts of a step have no loss and are left out of it."""
        log.warning(
            "step %d: %d of %d parts have no loss (NaN) although other parts do: left out of this "
            "step. If the loss is a mean over labels, tokens or masks, give count=…",
            self.step(),
            without,
            parts,
        )

    def log_freed_room(self) -> None:
        """Log that the step is repeated with the same size, after GPU memory was freed."""
        log.warning(
            "step %d: out of memory on the GPU: the step is repeated, and gradients of earlier "
            "batches go to the host during each step from now on; to avoid that, call "
            "zero_grad(set_to_none=True) before a step, and run.backward once for the whole batch",
            self.step(),
        )

    def log_exhausted(
        self, training: bool, failure: Failure, used: int, tried: tuple[int, ...]
    ) -> str:
        """Log that memory ran out even at the smallest size, and return that line."""
        step = self.step()
        sizes = ", ".join(map(str, tried))
        note = f"step {step}: memory ran out at every micro-batch tried ({sizes})"
        log.error("%s", note)
        fields = _event_fields(failure)
        self.on_event(MicroBatchExhausted(step, training, used, tried=tried, **fields))
        return note

    def log_cannot_repeat(self, reason: str) -> None:
        """Log why the step cannot be repeated. The attempt then ends."""
        text = "step %d: out of memory, and the step cannot be repeated: %s"
        log.warning(text, self.step(), reason)

    def log_cannot_split(self, note: str) -> None:
        """Log why a step that ran out of memory is not repeated in parts."""
        log.warning("step %d: out of memory: %s", self.step(), note)

    def log_changes_in_place(self, changed: str) -> None:
        """Log that a pass has changed the batch or weights, which are not restored."""
        log.warning(
            "step %d: the function changes %s in place, and does so again when the step is "
            "repeated: make new tensors in the function, or change the tensors after the step",
            self.step(),
            changed,
        )


def _event_fields(failure: Failure) -> dict[str, Any]:
    """Return the fields of an event that describe a failure."""
    return {
        "kind": failure.kind,
        "reason": failure.message,
        "requested_bytes": failure.evidence.requested_bytes,
        "allocated_bytes": failure.evidence.allocated_bytes,
        "free_bytes": failure.evidence.free_bytes,
    }
