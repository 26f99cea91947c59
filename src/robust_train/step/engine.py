"""One optimizer step in parts that fit: if memory runs out, it starts over with smaller ones.

The pass over a part is a function. When it has raised, its frames are emptied, and with their
variables the graph and all activations are free: nothing has to be searched for.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

from torch import Tensor

from robust_train.failures import classify_failure
from robust_train.failures.shortage import do_without_onednn
from robust_train.memory.clearing import clear_frames, return_memory
from robust_train.memory.cuda import holds_graphs as _holds_graphs
from robust_train.memory.cuda import memory_segments, started_torch
from robust_train.model.errors import RankFailure
from robust_train.model.failure import Failure, FailureKind
from robust_train.readable import first_line
from robust_train.step.ranks import Agreement, RanOut, SharedStep
from robust_train.step.record import Recorder, StepSpeed
from robust_train.step.rewind import StepStart
from robust_train.step.rng import GeneratorStates
from robust_train.step.sharded import RanOutElsewhere
from robust_train.step.size import MicroBatchSize
from robust_train.step.splitting import Part, Parts, bounds

log = logging.getLogger("robust_train")

T = TypeVar("T")

Body = Callable[[Part], T]
"""The pass over a part: forward, and in training backward with the part's weight."""


class Step(Generic[T]):
    """A step in progress: the batches so far, and what is needed to run them again.

    Most steps have one batch. A framework that accumulates hands over several, one after the other.
    """

    def __init__(
        self,
        size: MicroBatchSize,
        start: StepStart | None,  # None if each part stands for itself
        shared: SharedStep,
        recorder: Recorder,
        speed: StepSpeed,
        *,
        training: bool = True,
    ) -> None:
        self.repeats = 0  # how often passes of this step started over
        self._start = start
        self._size = size
        self._shared = shared
        self._recorder = recorder
        self._speed = speed
        self._is_training = training
        self._batches: list[tuple[Parts, Body[T]]] = []
        self._items = 1.0  # what this rank's mean counts among those of all
        self._ran_out: RanOut | None = None  # on this rank, the last time
        self._host_ran_out = False
        self._agrees = True  # the other ranks come to the same agreement

    def run(
        self, parts: Parts, body: Body[T], *, is_last: bool = True
    ) -> list[tuple[T, Part]]:
        """Run a batch; return what the body returned for each of its parts.

        If memory runs out, the step's batches so far go through their bodies again in smaller
        parts. If that does not help, or with any other error, the step is undone.

        Args:
            parts: the batch.
            body: the pass over a part.
            is_last: :meth:`end` follows. Until then ranks do not wait for each other.
        """
        self._batches.append((parts, body))
        self._agrees = is_last
        todo = self._batches[-1:]
        assert self._start is not None
        try:
            with self._shared.without_collectives():
                while (results := self._pass(todo)) is None:
                    todo = self._batches
                    self._shared.reset()
                    self._start.rewind()
                    self.rewound()
        except BaseException:
            self.undo()
            raise
        return results

    @property
    def is_sharded(self) -> bool:
        """Whether the ranks run their parts together."""
        return self._shared.is_sharded

    def end(
        self,
        loss: Tensor | None = None,
        *,
        items: float = 1.0,
        returns_more: bool = False,
    ) -> tuple[Tensor | None, bool]:
        """End the step on all ranks; return the mean of their losses, each a mean of ``items``.

        With it whether on any rank the bodies returned more than a loss.
        """
        assert self._start is not None
        try:
            agreed = None
            if not self.is_sharded:
                self._items = items
                agreed = self._agree(returns_more=returns_more)
            loss = self._shared.sum_gradients(agreed, loss)
        except BaseException:
            self.undo()
            raise
        self._start.end(is_complete=True)
        self._shared.share_buffers()
        grown = self._size.step_done()
        if grown is not None:
            reason = "memory has sufficed for long enough to try the larger size again"
            self._recorder.changed(*grown, reason)
        return loss, returns_more if agreed is None else agreed.returns_more

    def run_each(self, parts: Parts, body: Body[T]) -> list[tuple[T, Part]]:
        """Run a batch of which each part stands for itself: only one that fails is repeated."""
        self._agrees = False
        results: list[tuple[T, Part]] = []
        done = 0
        while done < parts.samples:
            generators = GeneratorStates()
            size = max(self._size.for_batch(parts.samples), 1)
            start, stop = bounds(parts.samples, size, done)[0]
            if self._goes_through(
                parts.part(start, stop), body, min(size, stop - start), results
            ):
                done = stop
            else:
                generators.restore()
        return results

    def leave(self) -> None:
        """End the step early: gradients of earlier batches are as before it."""
        if self._start is not None:
            self._start.end()

    def undo(self) -> None:
        """Go back to the step's start while an error is on its way, which must not be lost.

        After a fault of the device every call that reaches it raises once more.
        """
        if self._start is None or not self._start.is_open:
            return
        try:
            self._shared.reset()
            self._start.rewind()
            self._start.end()
        except Exception as error:
            log.warning("the step's start cannot be restored: %s", first_line(error))

    # --- what a framework changes ---

    refuses_collectives = True
    """Whether a collective of the user's in a part is refused, before a rank waits in one."""

    def rewound(self) -> None:
        """Go back to the step's start with what else a pass has changed."""

    def guard(self) -> AbstractContextManager[object]:
        """Return a context for each body."""
        return contextlib.nullcontext()

    def cannot_repeat(self) -> bool:
        """Return whether memory that runs out now has to end the attempt."""
        return holds_graphs()

    # --- the passes ---

    def _pass(
        self, batches: list[tuple[Parts, Body[T]]]
    ) -> list[tuple[T, Part]] | None:
        """Run batches; return the results of the last one, None if memory ran out."""
        results: list[tuple[T, Part]] = []
        for parts, body in batches:
            if self._shared.is_sharded:
                return self._pass_with_others(parts, body)
            results = []
            used = max(self._size.for_batch(parts.samples), 1)
            for start, stop in bounds(parts.samples, used):
                if not self._goes_through(parts.part(start, stop), body, used, results):
                    return None
        return results

    def _pass_with_others(
        self, parts: Parts, body: Body[T]
    ) -> list[tuple[T, Part]] | None:
        """Run as many parts as the other ranks; all agree after each of them."""
        results: list[tuple[T, Part]] = []
        used = max(self._size.for_batch(parts.samples), 1)
        own = bounds(parts.samples, used)
        self._items = parts.items
        most, factor = self._shared.plan(len(own), parts.items)
        for number in range(most):
            self._ran_out = None
            part = parts.without_weight()
            if number < len(own):
                part = parts.part(*own[number], factor=factor)
            self._goes_through(part, body, used, results)
            agreed = self._agree()
            if agreed is not None and agreed.rank is not None:
                self.repeats += self._ran_out is None
                return None
        return [(result, part) for result, part in results if len(part)]

    def _goes_through(
        self, part: Part, body: Body[T], used: int, results: list[tuple[T, Part]]
    ) -> bool:
        """Run one part; False if memory ran out, and all that the pass held is free again."""
        ran_out_here = True
        if self._start is not None and self.refuses_collectives:
            self._shared.begin_part(training=self._is_training)
        try:
            with self.guard():
                results.append((body(part), part))
            if self._start is not None and self.refuses_collectives:
                self._shared.end_part(ran_out=False)
            return True
        except RanOutElsewhere as error:
            ran_out_here = False
            clear_frames(error)
        except Exception as error:
            if not self._is_repeated_after(error, used):
                raise
            clear_frames(error)
        # no one has the exception any more
        if self._start is not None:
            results.clear()
        if ran_out_here:
            self._recover(used)
        return False

    def _is_repeated_after(self, error: Exception, used: int) -> bool:
        """Return whether the step is repeated; if no smaller part is left, log what was tried."""
        failure = classify_failure(error, host_memory_ran_out=self._host_ran_out)
        self._host_ran_out |= failure.kind is FailureKind.HOST_OOM
        if not failure.kind.is_memory:
            return False
        can_repeat = not self.cannot_repeat()
        smaller = self._size.smaller_than(used) if can_repeat else None
        self._ran_out = RanOut(failure, used, is_exhausted=smaller is None)
        if can_repeat:
            self._size.failed_at(used)
        if smaller is not None:
            self._recorder.on_oom(error, failure)
            return True
        if can_repeat:
            self._recorder.exhausted(
                self._is_training, failure, used, self._size.tried, error
            )
        if self._agrees:
            self._give_up(error, failure)
        return False

    def _give_up(self, error: Exception, failure: Failure) -> None:
        """Let the other ranks end as well; they may save before that."""
        if self._shared.is_sharded:
            clear_frames(error)
            return_memory(thorough=True)
            self._shared.end_part(ran_out=True)
        self.undo()
        agreed = self._agree()
        if agreed is not None:
            raise RankFailure(agreed.rank or 0, failure, is_elsewhere=False) from error

    def _recover(self, used: int) -> None:
        assert self._ran_out is not None
        failure = self._ran_out.failure
        self.repeats += 1
        return_memory(thorough=self.repeats > 1, workspaces=True)
        do_without_onednn(failure)
        self._recorder.repeated(self._is_training, failure, used, self._size.current)
        if self._shared.is_sharded:
            self._shared.end_part(ran_out=True)

    def _agree(self, *, returns_more: bool = False) -> Agreement | None:
        """Agree with the other ranks how this step, or part, went; None if there are none."""
        self._speed.alone_until_now()
        mine = self._ran_out
        agreed = self._shared.agree(self._size.current, self._items, mine, returns_more)
        if agreed is None or (mine is not None and mine.is_exhausted):
            return agreed
        theirs = agreed.ran_out
        if theirs is not None and theirs.is_exhausted:
            raise RankFailure(agreed.rank or 0, theirs.failure, is_elsewhere=True)
        failed = 0 if theirs is None else theirs.size
        self._size.agree(agreed.size, failed=failed, is_known=mine is not None)
        return agreed


def holds_graphs() -> bool:
    """Return whether a CUDA graph was captured, whose memory comes back to no one."""
    torch = started_torch()
    segments = None if torch is None else memory_segments(torch)
    return _holds_graphs(segments or ())
