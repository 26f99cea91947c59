"""An optimizer step whose batches a framework hands over one at a time.

Each batch is run at once, in parts that fit. Where memory runs out, the step's batches so far are
run again in smaller parts. Several ranks do so each by itself, since parts send nothing; they
exchange one message after the step's last batch.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from robust_train.compat import TorchDispatchMode
from robust_train.memory.cuda import memory_segments, started_torch
from robust_train.microbatch import ranks, splitting
from robust_train.microbatch.batcher import MicroBatcher
from robust_train.microbatch.micro_batches import MicroBatches
from robust_train.microbatch.part import MicroBatch
from robust_train.microbatch.ranks import SharedStep
from robust_train.microbatch.rewind import Models, StepStart
from robust_train.values import Failure, FailureKind


class CannotSplit(Exception):
    """What a part does cannot be done for a smaller one; the message has the reason."""


@dataclass
class _Batch:
    whole: Any
    is_cut: bool
    parts: splitting.Parts
    body: Callable[[MicroBatch], Any]


class OpenStep(MicroBatches):
    """The step in progress. Call :meth:`run` for each of its batches, then drop it.

    ``on_rewind`` is called when the step starts over, ``say`` with the reason why it cannot.
    """

    def __init__(
        self,
        batcher: MicroBatcher,
        model: Models,
        shared: SharedStep,
        *,
        on_rewind: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda reason: None,
        keeps_gradients: bool = True,
    ) -> None:
        super().__init__(batcher, batcher.training_size, splitting.Parts((), 0), model, True)
        self.batches: list[_Batch] = []
        self._number = batcher.step_number(begins=True)
        self._on_rewind = on_rewind
        self._say = say
        self._now: _Batch | None = None
        self._failed: MicroBatch | None = None
        self._is_last = False
        self._shared = shared
        self._start = StepStart(batcher.watch, model, keeps_gradients=keeps_gradients)

    @property
    def _items(self) -> float:
        # the framework averages over ranks by itself
        return 1.0

    def run(
        self,
        data: Any,  # any structure
        samples: int | None,  # in it; None where it cannot be cut
        # forward and backward pass of a part, weighted by `micro.weight`; where memory
        # runs out, all batches so far go through theirs again
        body: Callable[[MicroBatch], Any],
        *,
        # of how many items the loss over some data is a mean; None: the samples
        count: splitting.Count | None = None,
        is_last: bool,  # it ends the step: ranks agree, and gradients become one
    ) -> list[tuple[Any, int]]:
        """Return the results of a batch's parts, and how many samples each has."""
        start, shared = self._start, self._shared
        assert start is not None
        assert shared is not None
        # views: the structure as it is now, whatever a body does to it
        whole = data if samples is None else splitting.part_of(data, 0, samples)
        parts = splitting.Parts(whole, samples or 1, count=count)
        self.batches.append(_Batch(data, samples is not None, parts, body))
        todo, self._is_last = self.batches[-1:], is_last
        try:
            with shared.without_collectives():
                while isinstance(results := self._pass(todo), MicroBatch):
                    self._failed, todo = results, self.batches
                    self._recover(results)
                    start.rewind()
                    self.forget()
                    self._on_rewind()
            if is_last:
                # this rank is through: the answer is about later steps' size
                self._must_repeat(shared, self._failed)
                shared.sum_gradients(None)
                start.end(is_complete=True)
                shared.share_buffers()
                self._step_done()
        except CannotSplit as reason:
            self._say(str(reason))
            self._restore(rewinds=True)
            raise like(None if self._failed is None else self._failed.failure) from None
        except BaseException:
            self.leave()
            raise
        return results

    def _pass(self, batches: list[_Batch]) -> list[tuple[Any, int]] | MicroBatch:
        """Run the parts of ``batches``; return the last one's results, or where memory ran out."""
        results: list[tuple[Any, int]] = []
        guard = no_collectives if self.repeats else contextlib.nullcontext
        for batch in batches:
            self._now, self._parts, self.samples = batch, batch.parts, batch.parts.samples
            results = []
            waiting = self._bounds(0)
            while waiting:
                with guard():
                    micro = self._next(waiting)
                # the guard is left before a failure is sent to the other ranks
                with micro, guard():
                    results.append((batch.body(micro), len(micro)))
                if micro.failure is not None:
                    return micro
        return results

    def _next(self, waiting: deque[tuple[int, int]]) -> MicroBatch:
        assert self._now is not None
        if waiting[0] != (0, self.samples):
            return super()._next(waiting)
        waiting.popleft()
        return MicroBatch(self, self._now.whole, 1.0, 0, self.samples)

    def part_failed(self, micro: MicroBatch, error: Exception) -> bool:
        """Return whether the step is repeated for this failure."""
        if self._now is not None and self._now.is_cut and _has_graphs():
            self._say("a CUDA graph was captured, which holds its memory")
            self._now.is_cut, self.samples = False, 1
        return super().part_failed(micro, error)

    def _give_up(self, error: Exception, failure: Failure, used: int) -> None:
        if not self._is_last:
            # the others are at the framework's own collectives, between two batches
            self._shared = None
        super()._give_up(error, failure, used)

    def _report_exhausted(self, failure: Failure, used: int, error: Exception) -> None:
        if self._now is None or self._now.is_cut:
            super()._report_exhausted(failure, used, error)
        else:
            self._say("the batch is a lone sample, or several that are packed into one")


def like(failure: Failure | None) -> Exception:
    """Return an error of the same kind as the one that a pass was to be repeated for."""
    message = "" if failure is None else failure.message
    message = message.removeprefix("OutOfMemoryError: ") or "out of memory"
    is_hosts = failure is not None and failure.kind is FailureKind.HOST_OOM
    return MemoryError(message) if is_hosts else torch.OutOfMemoryError(message)


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise CannotSplit(
                f"it calls the collective {func.name().partition('::')[2]}, for which the other "
                "ranks would wait"
            )
        return func(*args, **(kwargs or {}))


def no_collectives() -> AbstractContextManager[object]:
    """Let collectives raise :class:`CannotSplit`, where there are other ranks.

    A rank that repeats what others do once would leave them waiting, or pair the wrong ones.
    """
    if ranks.here() is None:
        return contextlib.nullcontext()
    mode: AbstractContextManager[object] = _NoCollectives()  # type: ignore[no-untyped-call]
    return mode


def _has_graphs() -> bool:
    torch = started_torch()
    segments = None if torch is None else memory_segments(torch)
    return any(segment.is_private for segment in segments or ())
