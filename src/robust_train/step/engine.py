"""Runs an optimizer step in parts that fit, and starts over in smaller parts if memory runs out.

:class:`.batcher.MicroBatcher` and the integrations run each step through a :class:`Step`, in the
process that trains::

    run ─▶ _pass: each part ─▶ _run_part ──went through──▶ results ─▶ end: gradients of all ranks
             ▲                     └─ memory ran out ─▶ release it, choose a smaller size
             └───── _run_from_start: rewind the step ◀────────┘

This module handles batches, their parts, and the check whether splitting keeps the loss.
:mod:`.part_runner` runs a single part and handles its failures.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

from torch import Tensor

from robust_train.memory.clearing import return_memory
from robust_train.step.loss_passes import LossOf, LossPasses
from robust_train.step.part_runner import Batch, PartRunner, Results
from robust_train.step.split_check import Kept, SplitCheck
from robust_train.step.split_checker import SplitChecker
from robust_train.step.split_watch import kind_of_step
from robust_train.step.splitting import Part, bounds

T = TypeVar("T")


class Step(PartRunner[T]):
    """A step in progress, with all that is needed to run its batches again.

    Most steps have a single batch. A framework that accumulates gradients passes several in turn.
    """

    def run(self, batch: Batch[T], *, is_last: bool = True) -> Results[T]:
        """Run a batch, and return the result of its body for each part.

        If memory runs out, all batches of the step run again in smaller parts. If that does not
        help, or after any other error, the step is undone.

        Args:
            is_last: whether this is the step's last batch, so that :meth:`end` follows. Before it,
                ranks do not wait for each other.
        """
        if self.start is None:
            return self._run_each(batch)
        if self._batches:
            self.start.begin_batch()
        self._batches.append(batch)
        self._ranks_wait = is_last
        with self.undone_after_an_error(), self._shared.without_collectives():
            results = self._pass(self._batches[-1:])
            if results is None:
                results = self._run_from_start()
            return results

    def run_again(self) -> Results[T]:
        """Run all batches of the step once more, because their bodies now compute another loss."""
        with self.undone_after_an_error(), self._shared.without_collectives():
            return self._run_from_start()

    def _run_from_start(self) -> Results[T]:
        """Run all batches again from the step's start, in smaller parts after each shortage."""
        assert self.start is not None
        results = None
        while results is None:
            self._shared.reset()
            self.start.rewind()
            self.rewind_framework()
            results = self._pass(self._batches)
        return results

    def _run_each(self, batch: Batch[T]) -> Results[T]:
        """Run a batch of independent parts. If memory runs out, only that part is repeated."""
        self._ranks_wait = False
        self._batches = [batch]
        parts = batch.parts
        body = batch.body
        results: Results[T] = []
        done = 0
        with self._shared.without_collectives():
            while done < parts.samples:
                start_of_part = self._part_start()
                size = self._size.for_batch(parts.samples)
                start, stop = bounds(parts.samples, size, done)[0]
                part = parts.part(start, stop)
                used = min(size, stop - start)
                if self.try_part(part, body, used, results):
                    done = stop
                else:
                    start_of_part.restore()
        return results

    def end(
        self, loss: Tensor | None = None, *, items: float = 1.0, returns_more: bool = False
    ) -> tuple[Tensor | None, bool]:
        """End the step on all ranks.

        Returns:
            The mean loss of all ranks, weighted by their ``items``, and whether the bodies of any
            rank returned more than a loss.
        """
        assert self.start is not None
        with self.undone_after_an_error():
            agreed = None
            if not self.is_sharded:
                self._items = items
                agreed = self._agree(returns_more=returns_more)
            loss = self._shared.sum_gradients(agreed, loss, items)
        self.start.end()
        self._shared.share_buffers()
        if agreed is not None:
            returns_more = agreed.returns_more
        return loss, returns_more

    def leave(self) -> None:
        """End a step without combining the ranks' losses, in a validation or if it is given up."""
        if self.start is not None:
            self.start.end()

    def rewind_framework(self) -> None:
        """Restore the framework's own state to its value at the step's start."""

    # --- batches and their parts ---

    def _pass(self, batches: list[Batch[T]]) -> Results[T] | None:
        """Run batches. Return the results of the last batch, or None if memory ran out."""
        results: Results[T] = []
        for number, batch in enumerate(batches):
            if number and self.start is not None:
                self.start.enter_batch(number)
            results = []
            used = self._size.for_batch(batch.parts.samples)
            for part in self._parts_of(batch, used):
                if not self.try_part(part, batch.body, used, results):
                    return None
        return results

    def _parts_of(self, batch: Batch[T], used: int) -> Iterator[Part]:
        """Yield a batch's parts. With a sharded model, every rank yields the same number."""
        parts = batch.parts
        bounds_here = bounds(parts.samples, used, least=self._least_part)
        wants_check = len(bounds_here) > 1 and self._is_unchecked(batch)
        factor = 1.0
        count = len(bounds_here)
        if self.is_sharded:
            self._items = parts.items
            count, factor, wants_check = self._shared.plan(count, parts.items, wants_check)
        if wants_check:
            self._check_split(batch, used)
        for start, stop in bounds_here:
            yield parts.part(start, stop, factor=factor)
        for _ in range(count - len(bounds_here)):
            yield parts.without_weight()

    # --- checking whether splitting keeps the loss ---

    def _is_unchecked(self, batch: Batch[T]) -> bool:
        if not self._is_training:
            return False
        kind = kind_of_step(batch.parts, batch.function)
        return not self._recorder.splits.knows(kind)

    def _check_split(self, batch: Batch[T], used: int) -> None:
        """Check, before the first part runs, whether a part's loss is that of its halves."""
        self._recorder.speed.pause()
        splits = self._recorder.splits
        check = SplitCheck(Kept.UNKNOWN, "its loss cannot be computed without the step")
        if batch.loss_of is not None:
            check = self._compare_losses(batch, batch.loss_of, used)
        kind = kind_of_step(batch.parts, batch.function)
        ran_out = self.repeats > 0
        if not splits.accept(kind, check, self._recorder.step(), ran_out=ran_out):
            self._end_as_shortage(check.message, used)

    def _compare_losses(self, batch: Batch[T], loss_of: LossOf, used: int) -> SplitCheck:
        assert self.start is not None
        # Otherwise FSDP's gathered weights would be mistaken for weights of the model.
        self._shared.reset()
        passes = LossPasses(
            loss_of,
            self.start.models,
            batch.function,
            around=self._extra_pass,
            exchange=self._shared.exchange_figures,
            reported=self.start.reported,
            host_memory_ran_out=self._host_ran_out,
        )
        check = SplitChecker(passes, batch.parts, used).check()
        if self.repeats:  # memory is short
            return_memory(workspaces=True)
        return check

    @contextlib.contextmanager
    def _extra_pass(self) -> Iterator[None]:
        """Surround each pass of the check, which is not a part of the step."""
        with self.guard(), self._recorder.splits.muted():
            if not self.refuses_collectives:
                yield
                return
            with self._shared.extra_pass():
                yield
