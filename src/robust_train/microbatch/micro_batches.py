"""The parts of one batch: the loop that starts over where memory runs out in one of them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from robust_train.failures import classify_failure
from robust_train.failures.shortage import do_without_onednn
from robust_train.memory.cleanup import clear_frames, return_memory
from robust_train.microbatch import record, splitting
from robust_train.microbatch.part import MicroBatch
from robust_train.microbatch.ranks import SharedStep, is_sharded, ran_out_elsewhere
from robust_train.microbatch.rewind import Models, StepStart, Watch, cut_graphs
from robust_train.microbatch.rng import GeneratorStates
from robust_train.microbatch.sharded import RanOutElsewhere
from robust_train.microbatch.size import MicroBatchSize
from robust_train.readable import first_line
from robust_train.speed.meter import SpeedMeter
from robust_train.values import Failure, FailureKind

log = logging.getLogger("robust_train")

NO_WEIGHT = (
    "a backward pass without weight: the gradients of several micro-batches would add up wrongly; "
    "use micro.backward(loss), or multiply the loss by micro.weight"
)


class Batcher(Protocol):
    """What the parts of a batch need of :class:`robust_train.microbatch.batcher.MicroBatcher`."""

    watch: Watch
    speed: SpeedMeter
    on_event: record.OnEvent
    on_oom: Callable[[BaseException], None]

    def step_number(self, *, begins: bool) -> int: ...
    def probe(self, batches: MicroBatches, start: StepStart) -> Iterator[MicroBatch]: ...


class MicroBatches:
    """The parts of one batch, to loop over; each loop has a loss and results of its own."""

    def __init__(
        self,
        batcher: Batcher,
        size: MicroBatchSize,
        parts: splitting.Parts,
        model: Models,
        training: bool,
    ) -> None:
        self.samples = parts.samples  # in the whole batch
        self.repeats = 0  # how often the step has started over (training) or a part was repeated
        # what the bodies gave to :meth:`MicroBatch.keep`, each sample's once, in their order
        self.kept: list[Any] = []
        self._batcher = batcher
        self._size = size
        self._parts = parts
        self._model = model
        self._is_training = training
        self._number = 0
        self._loss: Tensor | None = None
        self._start: StepStart | None = None
        self._shared: SharedStep | None = None
        self._host_ran_out = False
        self._factor: float | None = None  # what weights are times, of a sharded model

    @property
    def loss(self) -> Tensor:
        """Mean loss over the batch (detached), of :meth:`MicroBatch.backward`'s."""
        return torch.zeros(()) if self._loss is None else self._loss

    def __iter__(self) -> Iterator[MicroBatch]:
        self.forget()  # an optimizer's closure loops over the same parts again
        if self._is_training:
            self._batcher.speed.batch_begins(self.samples)
        else:
            self._batcher.speed.pause()
        self._number = self._batcher.step_number(begins=self._is_training)
        is_repeated_whole = self._is_training or is_sharded(self._batcher.watch, self._model)
        return self._step() if is_repeated_whole else self._once_each()

    def _step(self) -> Iterator[MicroBatch]:
        """Yield all parts, again and finer until they go through on every rank."""
        self._start = start = StepStart(self._batcher.watch, self._model)
        try:
            self._shared = shared = SharedStep(start.models)
            if not shared.is_sharded:
                yield from self._batcher.probe(self, start)
            with shared.without_collectives():
                parts = self._sharded_parts if shared.is_sharded else self._all_parts
                while (yield from parts(shared)):
                    shared.reset()
                    start.rewind()
                    self.forget()
            self._loss = shared.sum_gradients(self._loss)
            start.end(is_complete=True)
            shared.share_buffers()
        finally:
            # also when the loop is left early
            start.end()
        self._step_done()

    def _step_done(self) -> None:
        grown = self._size.step_done()
        if grown is not None:
            reason = "memory has sufficed for long enough to try the larger size again"
            record.changed(self._batcher.on_event, self._number, *grown, reason)

    @property
    def _items(self) -> float:
        """What this rank's mean counts among those of all ranks."""
        return self._parts.items

    def _all_parts(self, shared: SharedStep) -> Generator[MicroBatch, None, bool]:
        """Yield the parts, up to one in which memory runs out; return whether all are repeated."""
        waiting, failed = self._bounds(0), None
        while waiting and failed is None:
            micro = self._next(waiting)
            shared.begin_part()
            yield micro
            micro.must_have_been_used()
            failed = micro if micro.failure is not None else None
            shared.end_part(ran_out=not micro.done)
        if failed is not None:
            self._recover(failed)
        return self._must_repeat(shared, failed)

    def _sharded_parts(self, shared: SharedStep) -> Generator[MicroBatch, None, bool]:
        """Yield as many parts as the other ranks do; all agree after each of them."""
        waiting = self._bounds(0)
        most, self._factor = shared.plan(len(waiting), self._items)
        for _ in range(most):
            micro = self._next(waiting) if waiting else self._without_weight()
            shared.begin_part(training=self._is_training)
            yield micro
            micro.must_have_been_used()
            failed = micro if micro.failure is not None else None
            if failed is not None:
                self._recover(failed)
            elif not micro.done:
                cut_graphs(micro.since)
            if micro.done or failed is not None:
                shared.end_part(ran_out=failed is not None)
            if self._must_repeat(shared, failed):
                return True
        return False

    def _must_repeat(self, shared: SharedStep, failed: MicroBatch | None) -> bool:
        """Return whether the step has to start over, here or on another rank."""
        failure, used = (None, 0) if failed is None else (failed.failure, failed.size)
        self._batcher.speed.alone_until_now()
        agreed = shared.agree(self._size, self._items, failure, used)
        if agreed is None:
            return failed is not None
        if agreed.state.is_exhausted:
            self._restore(rewinds=True)
            raise ran_out_elsewhere(agreed)
        is_known = failed is not None
        self.repeats += agreed.rank is not None and not is_known
        self._size.agree(agreed.size, failed=agreed.failed_size, is_known=is_known)
        return agreed.rank is not None

    def _once_each(self) -> Iterator[MicroBatch]:
        """Yield the parts of a validation: only the one that failed is repeated."""
        waiting = self._bounds(0)
        while waiting:
            generators = GeneratorStates()
            micro = self._next(waiting)
            yield micro
            micro.must_have_been_used()
            if micro.failure is not None:
                self._recover(micro)
                generators.restore()
                waiting = self._bounds(micro.start)

    def _bounds(self, start: int) -> deque[tuple[int, int]]:
        at_most = max(self._size.for_batch(self.samples), 1)
        return deque(splitting.bounds(self.samples, at_most, start))

    def _next(self, waiting: deque[tuple[int, int]]) -> MicroBatch:
        start, stop = waiting.popleft()
        data, weight = self._parts.part(start, stop)
        if self._factor is None:
            return MicroBatch(self, data, weight, start, stop)
        return MicroBatch(self, data, weight * self._factor, start, stop, is_sharded=True)

    def _without_weight(self) -> MicroBatch:
        """Return a part for a rank that has no more of its own while another one has."""
        data, _ = self._parts.part(0, 1)
        return MicroBatch(self, data, 0.0, 0, 0, is_sharded=True)

    def _recover(self, failed: MicroBatch) -> None:
        """Free what the failed pass holds. The ``with`` is over: nobody has its exception now."""
        failure = failed.failure
        assert failure is not None
        self.repeats += 1
        cut_graphs(failed.since)
        return_memory(thorough=self.repeats > 1, workspaces=True)
        do_without_onednn(failure)
        where = self._batcher.on_event, self._number, self._is_training
        record.repeated(*where, failure, failed.size, self._size.current)

    # --- what a part and the search for a size call ---

    def probe(self, size: int) -> MicroBatch:
        """Return the first ``size`` samples as a part that is only measured."""
        return MicroBatch(self, *self._parts.part(0, size), 0, size, is_probe=True)

    def forget(self) -> None:
        """Drop losses and results of the parts so far."""
        self.kept, self._loss = [], None

    def leave(self) -> None:
        """End the step early: gradients of earlier batches are as before it."""
        if self._start is not None:
            self._start.end()

    def must_have_no_gradients(self) -> None:
        """Refuse a loop that does not weight its losses."""
        if self._start is not None and self._start.has_gradients():
            self.leave()
            raise RuntimeError(NO_WEIGHT)

    def part_done(self, loss: Tensor | None, kept: list[Any]) -> None:
        """Take the results of a part whose body went through."""
        self.kept += kept
        if loss is not None:
            self._loss = loss if self._loss is None else self._loss + loss

    def part_failed(self, micro: MicroBatch, error: Exception) -> bool:
        """Return whether the step is repeated after this failure; if not, undo its effects."""
        if isinstance(error, RanOutElsewhere):
            clear_frames(error)
            return True
        failure = classify_failure(error, host_memory_ran_out=self._host_ran_out)
        self._host_ran_out |= failure.kind is FailureKind.HOST_OOM
        if not failure.kind.is_memory:
            self._restore(rewinds=micro.is_probe)
            return False
        if micro.is_probe:
            clear_frames(error)
            return True
        used = self._size.for_batch(self.samples)
        if not self._is_training:
            used = min(used, len(micro))
        smaller = self._size.smaller_than(used)
        self._size.failed_at(used)
        if smaller is not None:
            self._batcher.on_oom(error)
            micro.size, micro.failure = used, failure
            clear_frames(error)
            return True
        self._give_up(error, failure, used)
        return False

    def _give_up(self, error: Exception, failure: Failure, used: int) -> None:
        """Leave model and generators as they were before the step, and report what was tried."""
        if self._shared is not None and self._shared.is_sharded:
            clear_frames(error)
            return_memory(thorough=True)
            self._shared.end_part(ran_out=True)
        self._restore(rewinds=True)
        if self._shared is not None:
            agreed = self._shared.agree(self._size, self._items, failure, used, is_exhausted=True)
            # the other ranks end as well, and may save before that
            if agreed is not None:
                error.others_know = True  # type: ignore[attr-defined]
        self._report_exhausted(failure, used, error)

    def _report_exhausted(self, failure: Failure, used: int, error: Exception) -> None:
        where = self._batcher.on_event, self._number, self._is_training
        record.exhausted(*where, failure, used, self._size.tried, error)

    def _restore(self, *, rewinds: bool) -> None:
        """Go back to the step's start while an error is on its way, which must not be lost. After a
        fault of the device every call that reaches it raises once more."""
        if self._start is None:
            return
        try:
            if rewinds:
                if self._shared is not None:
                    self._shared.reset()
                self._start.rewind()
            self._start.end()
        except Exception as error:
            log.warning("the step's start cannot be restored: %s", first_line(error))
