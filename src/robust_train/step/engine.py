"""One optimizer step in parts that fit: if memory runs out, it starts over with smaller parts.

:class:`.batcher.MicroBatcher` runs each step through a :class:`Step`, in the process that trains.
The pass over a part is a function. When it has raised, its frames are emptied, and with their
variables the graph and all activations are free: nothing has to be searched for.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from robust_train.compat import depends_on_batch
from robust_train.failures import classify_failure
from robust_train.failures.shortage import do_without_onednn
from robust_train.memory import cuda
from robust_train.memory.clearing import clear_frames, return_memory
from robust_train.model.errors import RankFailure
from robust_train.model.failure import Failure, FailureKind
from robust_train.readable import first_line
from robust_train.step.after_shortage import AfterShortage, Answer, decide
from robust_train.step.ranks import RankReport, RanOut, SharedStep
from robust_train.step.recorder import Recorder
from robust_train.step.sharded import RanOutElsewhereError
from robust_train.step.split_check import Checker, Kept, LossOf, SplitCheck, described
from robust_train.step.split_watch import kind_of_step
from robust_train.step.splitting import MicroBatchSize, Part, Parts, bounds
from robust_train.step.step_start import PartStart, StepStart

log = logging.getLogger("robust_train")

T = TypeVar("T")


def needs_several_samples(module: nn.Module) -> bool:
    """Return whether a layer takes its statistics from the samples of a part."""
    return module.training and depends_on_batch(torch, module)


def _add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, which Python shows below its message from 3.11 on."""
    if hasattr(error, "add_note"):
        error.add_note(note)


def without_context(error: BaseException) -> BaseException:
    """Return an exception without what it was raised from, and without its frames."""
    error.__cause__ = None
    error.__context__ = None
    return error.with_traceback(None)


Body = Callable[[Part], T]
"""The pass over a part: forward, and in training backward with the part's weight."""

Results = list[tuple[T, Part]]
"""The body's result for each part of a batch."""


class CannotSplitError(Exception):
    """The pass over a part cannot be made over a smaller part. The message has the reason."""


@dataclass(frozen=True)
class Batch(Generic[T]):
    """A batch of a step: its parts, the pass over a part, and its loss without a backward pass."""

    parts: Parts
    body: Body[T]
    loss_of: LossOf | None = None  # None if it cannot be computed apart from the pass
    function: Any = None  # the user's, by whose code steps of one kind are recognised


@dataclass(frozen=True)
class PartEnd:
    """How the pass over a part ended.

    It has not gone through if memory ran out on this rank or on a rank that computes with it.
    """

    went_through: bool
    # If memory ran out on this rank: the failure, and how the step is repeated.
    failure: Failure | None = None
    answer: AfterShortage | None = None


class Step(Generic[T]):
    """A step in progress: the batches so far, and what is needed to run them again.

    Most steps have a single batch. A framework that accumulates hands over several in turn.
    """

    def __init__(
        self,
        size: MicroBatchSize,
        start: StepStart | None,  # None if each part stands for itself
        shared: SharedStep,
        recorder: Recorder,
        *,
        training: bool = True,
        part_start: Callable[[], PartStart] = PartStart,  # makes the start of such a part
    ) -> None:
        self.repeats = 0  # how often passes of this step started over
        self.start = start
        self._size = size
        self._shared = shared
        self._recorder = recorder
        self._is_training = training
        self._part_start = part_start
        self._batches: list[Batch[T]] = []
        self._items = 1.0  # the weight of this rank's mean among all ranks
        self._ran_out: RanOut | None = None  # the last time on this rank
        self._host_ran_out = False
        # The error with which memory ran out in this step, without its frames.
        self._shortage: BaseException | None = None
        self._agrees = True  # the other ranks reach the same agreement

    def run(self, batch: Batch[T], *, is_last: bool = True) -> Results[T]:
        """Run a batch, and return what the body returned for each of its parts.

        If memory runs out, the step's batches so far go through their bodies again in smaller
        parts. If that does not help, or with any other error, the step is undone. In validation of
        a model that can leave a part at any time, only a part that fails is repeated.

        Args:
            batch: with its body.
            is_last: :meth:`end` follows. Until then ranks do not wait for each other.
        """
        if self.start is None:
            return self._run_each(batch)
        if self._batches:
            self.start.begin_batch()
        self._batches.append(batch)
        self._agrees = is_last
        with self.undone_after_an_error(), self._shared.without_collectives():
            results = self._pass(self._batches[-1:])
            return self._from_its_start() if results is None else results

    def run_again(self) -> Results[T]:
        """Run the step's batches from its start once more, as their bodies are now."""
        with self.undone_after_an_error(), self._shared.without_collectives():
            return self._from_its_start()

    def _from_its_start(self) -> Results[T]:
        """Run the step's batches again, in smaller parts each time that memory runs out."""
        assert self.start is not None
        results = None
        while results is None:
            self._shared.reset()
            self.start.rewind()
            self.rewound()
            results = self._pass(self._batches)
        return results

    def _run_each(self, batch: Batch[T]) -> Results[T]:
        """Run a batch whose parts stand for themselves: only a part that fails is repeated."""
        self._agrees = False
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
                if self._goes_through(part, body, used, results):
                    done = stop
                else:
                    start_of_part.restore()
        return results

    @property
    def is_sharded(self) -> bool:
        """Whether the ranks run their parts together."""
        return self._shared.is_sharded

    @property
    def is_shared(self) -> bool:
        """Whether other ranks take part, so that each rank's items count."""
        return self._shared.is_shared

    def end(
        self, loss: Tensor | None = None, *, items: float = 1.0, returns_more: bool = False
    ) -> tuple[Tensor | None, bool]:
        """End the step on all ranks.

        Returns:
            The mean of all ranks' losses, each a mean of ``items``, and whether the bodies of any
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
        return loss, returns_more if agreed is None else agreed.returns_more

    def leave(self) -> None:
        """End the step early: gradients of earlier batches are as before it."""
        if self.start is not None:
            self.start.end()

    @contextlib.contextmanager
    def undone_after_an_error(self) -> Iterator[None]:
        """Undo the step if the block raises."""
        try:
            yield
        except BaseException:
            self._undo()
            raise

    def _undo(self) -> None:
        """Go back to the step's start while an error is on its way, which must not be lost.

        After a fault of the device every call that reaches it raises once more.
        """
        try:
            if self.start is not None and self.start.is_open:
                self._shared.reset()
                self.start.rewind()
                self.start.end()
        except Exception as error:
            log.warning("the step's start cannot be restored: %s", first_line(error))

    # --- what a framework changes ---

    refuses_collectives = True
    """Whether a user collective in a part is refused, before a rank waits in it."""

    def rewound(self) -> None:
        """Go back to the step's start with what else a pass has changed."""

    def guard(self) -> AbstractContextManager[object]:
        """Return a context for each body."""
        return contextlib.nullcontext()

    def cannot_repeat(self) -> str | None:
        """Return why memory that runs out now has to end the attempt, or None if it does not."""
        if cuda.holds_graphs():
            # torch shows both as private pools of segments
            return "a CUDA graph was captured, or a memory pool is in use, which keeps its memory"
        if self.start is not None and self.start.is_lost:
            return "it has made or changed a large buffer as no step before it"
        return None

    def say_why(self, reason: str) -> None:
        """Log why memory that ran out ends the attempt."""
        self._recorder.cannot_repeat(reason)

    # --- the passes ---

    def _pass(self, batches: list[Batch[T]]) -> Results[T] | None:
        """Run batches. Return the results of the last batch, or None if memory ran out."""
        results: Results[T] = []
        for number, batch in enumerate(batches):
            if number and self.start is not None:
                self.start.enter_batch(number)
            results = []
            used = self._size.for_batch(batch.parts.samples)
            for part in self._parts_of(batch, used):
                if not self._goes_through(part, batch.body, used, results):
                    return None
        return results

    def _parts_of(self, batch: Batch[T], used: int) -> Iterator[Part]:
        """Yield a batch's parts. With a sharded model, every rank yields the same number."""
        parts = batch.parts
        with_samples = bounds(parts.samples, used, least=self._least_part)
        wants_check = len(with_samples) > 1 and self._is_unchecked(batch)
        factor = 1.0
        most = len(with_samples)
        if self.is_sharded:
            self._items = parts.items
            most, factor, wants_check = self._shared.plan(most, parts.items, wants_check)
        if wants_check:
            self._check_split(batch, used)
        for number in range(most):
            if number < len(with_samples):
                start, stop = with_samples[number]
                yield parts.part(start, stop, factor=factor)
            else:
                yield parts.without_weight()

    @functools.cached_property
    def _least_part(self) -> int:
        """The fewest samples in a part: BatchNorm in training cannot take a single sample."""
        if self._size.refuses_lone_samples:
            return 2
        if self.start is None or not self._is_training:
            return 1
        return 2 if any(map(needs_several_samples, self.start.modules)) else 1

    # --- whether the parts have the loss of the whole ---

    def _is_unchecked(self, batch: Batch[T]) -> bool:
        if not self._is_training:
            return False
        kind = kind_of_step(batch.parts, batch.function)
        return not self._recorder.splits.knows(kind)

    def _check_split(self, batch: Batch[T], used: int) -> None:
        """Compare a part's loss with those of its halves before the first part is computed."""
        assert self.start is not None
        self._recorder.speed.pause()
        splits = self._recorder.splits
        check = SplitCheck(Kept.UNKNOWN, "its loss is not known apart from its step")
        if batch.loss_of is not None:
            check = self._compare_losses(batch, batch.loss_of, used)
        kind = kind_of_step(batch.parts, batch.function)
        ran_out = self.repeats > 0
        if not splits.take(kind, check, self._recorder.step(), ran_out=ran_out):
            self._end_as_shortage(check.message, used)

    def _compare_losses(self, batch: Batch[T], loss_of: LossOf, used: int) -> SplitCheck:
        assert self.start is not None
        # Weights that are gathered would be taken for weights of the model.
        self._shared.reset()

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            with self.guard(), self._recorder.splits.muted():
                if not self.refuses_collectives:
                    yield
                    return
                with self._shared.extra_pass():
                    yield

        checker = Checker(
            loss_of,
            batch.parts,
            used,
            self.start.models,
            batch.function,
            around=around,
            figures=self._shared.figures,
            named=self.start.named,
            host_memory_ran_out=self._host_ran_out,
        )
        check = checker.check()
        if self.repeats:  # memory is short
            return_memory(workspaces=True)
        return check

    def _end_as_shortage(
        self, note: str, used: int, error: BaseException | None = None
    ) -> NoReturn:
        """Raise what memory ran out with: the step cannot be repeated in parts.

        Args:
            note: why not.
            used: the size of the parts.
            error: what a part raised, if that is why.
        """
        shortage = self._shortage
        if shortage is None:  # it ran out on another rank
            shortage = torch.OutOfMemoryError("out of memory on another rank")
        self._recorder.cannot_split(note)
        _add_note(shortage, note)
        failure = classify_failure(shortage)
        self._ran_out = RanOut(failure, used, True, self._shared.rank)
        self._tell_other_ranks(failure, shortage)
        raise shortage from error

    def _tell_other_ranks(self, failure: Failure, error: BaseException) -> None:
        """Tell the other ranks to end as well. They may save before that."""
        if not self._agrees:
            return
        self._undo()
        if self._agree() is not None:
            rank = self._shared.rank
            raise RankFailure(rank, failure, is_elsewhere=False) from error

    def _goes_through(self, part: Part, body: Body[T], used: int, results: Results[T]) -> bool:
        """Run a part. Return False if memory ran out, once all that the pass held is free."""
        end = self._run_part(part, body, used, results)
        # Nothing refers to the exception any longer, so that what its frames held can be freed.
        is_done = end.went_through
        if not is_done and self.start is not None:
            results.clear()
        if end.failure is not None and end.answer is not None:
            self._make_ready_to_repeat(end.failure, end.answer, used)
        if self.is_sharded:
            is_done = self._agree_on_part()
        if not is_done:
            self.repeats += 1
        return is_done

    def _run_part(self, part: Part, body: Body[T], used: int, results: Results[T]) -> PartEnd:
        """Run a part, and decide what follows if memory runs out in it.

        Raises:
            Exception: the error of the part, if the step is not repeated.
        """
        is_watched = self.start is not None and self.refuses_collectives
        if is_watched:
            self._shared.begin_part(training=self._is_training, has_weight=bool(part.weight))
        try:
            with self.guard():
                result = body(part)
            if is_watched:
                self._shared.end_part(ran_out=False)
            # An empty part serves the other ranks only.
            if len(part) or not self.is_sharded:
                results.append((result, part))
            return PartEnd(went_through=True)
        except RanOutElsewhereError as error:
            clear_frames(error)
            return PartEnd(went_through=False)
        except CannotSplitError:
            raise
        except Exception as error:
            failure = classify_failure(error, host_memory_ran_out=self._host_ran_out)
            if not failure.kind.is_memory:
                if self._is_cut_after_a_shortage(part):
                    self._end_after_error_of_a_part(error, used)
                raise
            answer = self._decide_after(failure, used)
            self._remember(failure, answer, used)
            if not answer.repeats:
                self._end_after_shortage(error, failure, answer, used)
                raise
            self._recorder.on_oom(error, failure)
            clear_frames(error)
            self._shortage = without_context(error)
            return PartEnd(False, failure, answer)

    def _decide_after(self, failure: Failure, used: int) -> AfterShortage:
        """Return what follows after memory ran out in a part of this size."""
        reason = self.cannot_repeat()
        if reason is not None:
            return AfterShortage(Answer.CANNOT_REPEAT, reason)
        if self._makes_room(failure):
            return AfterShortage(Answer.REPEAT_WITH_ROOM)
        smaller = self._size.smaller_than(used)
        samples = [batch.parts.samples for batch in self._batches]
        return decide(smaller, used, samples, least=self._least_part)

    def _makes_room(self, failure: Failure) -> bool:
        """Move gradients of earlier batches off the GPU, which may be all that the step lacks."""
        # ranks that compute together would have to do so together
        if self.start is None or self.is_sharded:
            return False
        if failure.kind is not FailureKind.DEVICE_OOM:
            return False
        return self.start.make_room()

    def _remember(self, failure: Failure, answer: AfterShortage, used: int) -> None:
        """Remember what ran out, for this step's sizes and for the other ranks."""
        if failure.kind is FailureKind.HOST_OOM:
            self._host_ran_out = True
        if answer.answer is not Answer.REPEAT_WITH_ROOM:
            self._ran_out = RanOut(failure, used, not answer.repeats, self._shared.rank)
        if answer.shrinks:
            self._size.failed_at(used)

    def _end_after_shortage(
        self, error: Exception, failure: Failure, answer: AfterShortage, used: int
    ) -> None:
        """Log why memory that ran out ends the attempt, and let the other ranks end as well."""
        if answer.answer is Answer.CANNOT_REPEAT:
            self.say_why(answer.reason)
            _add_note(error, f"this step cannot be split: {answer.reason}")
        else:
            tried = self._size.tried
            _add_note(error, self._recorder.exhausted(self._is_training, failure, used, tried))
        if self._agrees and self.is_sharded:
            clear_frames(error)
            return_memory(thorough=True)
            self._shared.end_part(ran_out=True)
        self._tell_other_ranks(failure, error)

    def _make_ready_to_repeat(self, failure: Failure, answer: AfterShortage, used: int) -> None:
        """Release memory after a part that ran out of it, and log how the step is repeated."""
        return_memory(thorough=self.repeats > 0, workspaces=True)
        do_without_onednn(failure)
        if answer.answer is Answer.REPEAT_WITH_ROOM:
            self._recorder.made_room()
        else:
            self._recorder.repeated(self._is_training, failure, used, self._size.current)
        self._warn_of_changes()
        if self.is_sharded:
            self._shared.end_part(ran_out=True)

    def _agree_on_part(self) -> bool:
        """Return whether a part of a sharded step went through on all ranks."""
        agreed = self._agree()
        self._ran_out = None
        return agreed is None or agreed.ran_out is None

    def _is_cut_after_a_shortage(self, part: Part) -> bool:
        """Return whether a part is smaller than the batch because memory ran out in this step.

        An error that such a part raises does not show a bug: the whole batch did not raise it.
        """
        return not part.is_whole and self.repeats > 0 and self.start is not None

    def _end_after_error_of_a_part(self, error: Exception, used: int) -> NoReturn:
        check = SplitCheck(Kept.CANNOT, described(error), used)
        note = check.message
        self._recorder.splits.on_found(self._recorder.step(), check, True)
        if self.is_sharded:
            clear_frames(error)
            self._shared.end_part(ran_out=True)
        self._end_as_shortage(note, used, error)

    def _warn_of_changes(self) -> None:
        """Log what a pass has changed that cannot be put back: it happens again."""
        changed = "the batch"
        if not any(batch.parts.has_changed for batch in self._batches):
            if self.start is None or not self.start.has_changed_weights:
                return
            changed = "weights"
        self._recorder.changes_in_place(changed)

    def _agree(self, *, returns_more: bool = False) -> RankReport | None:
        """Agree with the other ranks on how this step or part went. None without other ranks."""
        self._recorder.speed.alone_until_now()
        ran_out_here = self._ran_out
        size = self._size
        report = RankReport(ran_out_here, size.current, self._items, (), returns_more)
        agreed = self._shared.agree(report)
        if agreed is None or (ran_out_here is not None and ran_out_here.is_exhausted):
            return agreed
        ran_out = agreed.ran_out
        if ran_out is not None and ran_out.is_exhausted:
            raise RankFailure(ran_out.rank, ran_out.failure, is_elsewhere=True)
        failed = 0 if ran_out is None else ran_out.size
        size.agree(agreed.size, failed=failed, is_known=ran_out_here is not None)
        return agreed
