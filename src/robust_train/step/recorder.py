"""How steps report on themselves: to the log, as events, and to what measures their speed."""

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


class StepSpeed(Protocol):
    """The part of the speed meter that a step uses."""

    def batch_begins(self, samples: int) -> None:
        """Count from here on as computing a batch."""
        return

    def pause(self) -> None:
        """Leave the present step out: it has more to do than to train."""
        return

    def alone_until_now(self) -> None:
        """Count from here on as the ranks' waiting for each other."""
        return


class NotMeasured(StepSpeed):
    """Measures nothing."""


@dataclass(frozen=True)
class Recorder:
    """Logs how the size of parts changes, and measures steps."""

    step: Callable[[], int]  # returns the number of the optimizer step, from 1
    on_event: OnEvent = lambda event: None  # called at every change
    # called when memory ran out and the step is repeated, before anything is released
    on_oom: OnOom = lambda error, failure: None
    speed: StepSpeed = field(default_factory=NotMeasured)
    splits: SplitWatch = field(default_factory=SplitWatch)

    def changed(self, sizes: tuple[int, int], reason: str) -> None:
        """Log that the size changes, from the first to the second, though no memory ran out."""
        step = self.step()
        (before, after) = sizes
        log.info("step %d: micro-batch %d → %d: %s", step, before, after, reason)
        self.on_event(MicroBatchChanged(step, True, before, reason, after=after))

    def repeated(self, training: bool, failure: Failure, before: int, after: int | None) -> None:
        """Log that the step (in validation the part) is repeated with a smaller size."""
        step = self.step()
        figures = _figures(failure)
        self.on_event(MicroBatchChanged(step, training, before, after=after, **figures))
        requested = failure.evidence.requested_bytes
        log.warning(
            "step %d: out of memory on the %s%s: micro-batch %d → %s, %s",
            step,
            "host" if failure.kind is FailureKind.HOST_OOM else "GPU",
            "" if requested is None else f" asking for {memory(requested)}",
            before,
            after,
            "the step is repeated" if training else "the part is repeated",
        )

    def leave_out_parts(self, without: int, parts: int) -> None:
        """Log that parts of a step have no loss."""
        log.warning(
            "step %d: %d of %d parts have no loss (NaN) although the others do: left out of this "
            "step. If the loss is a mean over labels, tokens or masks, give count=…",
            self.step(),
            without,
            parts,
        )

    def made_room(self) -> None:
        """Log that the step is repeated with the same size, and more of the GPU's memory."""
        log.warning(
            "step %d: out of memory on the GPU: gradients of earlier batches go to the host during "
            "a step from now on, and the step is repeated; zero_grad(set_to_none=True) before it, "
            "and one call of run.backward with the whole batch, leave none to move",
            self.step(),
        )

    def exhausted(self, training: bool, failure: Failure, used: int, tried: tuple[int, ...]) -> str:
        """Log that memory ran out at the smallest size too, and return the line as a note."""
        step = self.step()
        sizes = ", ".join(map(str, tried))
        note = f"step {step}: memory ran out at every micro-batch tried ({sizes})"
        log.error("%s", note)
        figures = _figures(failure)
        self.on_event(MicroBatchExhausted(step, training, used, tried=tried, **figures))
        return note

    def cannot_repeat(self, reason: str) -> None:
        """Log why memory that ran out ends the attempt."""
        text = "step %d: out of memory, and the step cannot be repeated: %s"
        log.warning(text, self.step(), reason)

    def cannot_split(self, note: str) -> None:
        """Log why a step whose memory ran out is not computed in parts."""
        log.warning("step %d: out of memory: %s", self.step(), note)

    def changes_in_place(self, changed: str) -> None:
        """Log what a pass has changed that cannot be put back."""
        log.warning(
            "step %d: the function changes %s in place, which happens again in what is repeated: "
            "make new tensors in it, or change them after the step",
            self.step(),
            changed,
        )


def _figures(failure: Failure) -> dict[str, Any]:
    names = ("requested_bytes", "allocated_bytes", "free_bytes")
    figures = {name: getattr(failure.evidence, name) for name in names}
    return {"kind": failure.kind, "reason": failure.message, **figures}
