"""One optimizer step in parts that fit: if memory runs out, it starts over with smaller ones.

The pass over a part is a function. When it has raised, its frames are emptied, and with their
variables the graph and all activations are free: nothing has to be searched for.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor, nn

from robust_train.compat import depends_on_batch
from robust_train.failures import classify_failure
from robust_train.failures.shortage import do_without_onednn
from robust_train.memory import cuda
from robust_train.memory.clearing import clear_frames, return_memory
from robust_train.model.errors import RankFailure
from robust_train.model.events import Event, MicroBatchChanged, MicroBatchExhausted
from robust_train.model.failure import Failure, FailureKind
from robust_train.readable import first_line, memory
from robust_train.step.ranks import RankReport, RanOut, SharedStep
from robust_train.step.sharded import RanOutElsewhereError
from robust_train.step.split_check import Checker, Kept, LossOf, SplitCheck, described
from robust_train.step.split_watch import SplitWatch, kind_of_step
from robust_train.step.splitting import MicroBatchSize, Part, Parts, bounds
from robust_train.step.step_start import PartStart, StepStart

log = logging.getLogger("robust_train")

T = TypeVar("T")


def needs_several_samples(module: nn.Module) -> bool:
    """Return whether a layer takes its statistics from the samples of a part."""
    return module.training and depends_on_batch(torch, module)


def without_context(error: BaseException) -> BaseException:
    """Return an exception without what it was raised from, and without its frames."""
    error.__cause__ = None
    error.__context__ = None
    return error.with_traceback(None)


Body = Callable[[Part], T]
"""The pass over a part: forward, and in training backward with the part's weight."""

Results = list[tuple[T, Part]]
"""What a body returned for each part of a batch."""

OnEvent = Callable[[Event], None]
OnOom = Callable[[BaseException, Failure], None]


class CannotSplitError(Exception):
    """What a part does cannot be done for a smaller one; the message has the reason."""


@dataclass(frozen=True)
class Batch(Generic[T]):
    """A batch of a step: its parts, the pass over one, and its loss without a backward pass."""

    parts: Parts
    body: Body[T]
    loss_of: LossOf | None = None  # None if it cannot be computed apart from the pass
    function: Any = None  # the user's, by whose code steps of one kind are recognised


class StepSpeed(Protocol):
    """What measures the speed of steps."""

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
    # called when memory ran out and a smaller size is tried, before anything is released
    on_oom: OnOom = lambda error, failure: None
    speed: StepSpeed = field(default_factory=NotMeasured)
    splits: SplitWatch = field(default_factory=SplitWatch)

    def changed(self, sizes: tuple[int, int], reason: str) -> None:
        """Log that the size changes, from one to the other, though no memory ran out."""
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
        """Log that memory ran out at the smallest size too; return that as a note."""
        step = self.step()
        sizes = ", ".join(map(str, tried))
        note = f"step {step}: memory ran out at every micro-batch tried ({sizes})"
        log.error("%s", note)
        figures = _figures(failure)
        self.on_event(MicroBatchExhausted(step, training, used, tried=tried, **figures))
        return note


def _figures(failure: Failure) -> dict[str, Any]:
    names = ("requested_bytes", "allocated_bytes", "free_bytes")
    figures = {name: getattr(failure.evidence, name) for name in names}
    return {"kind": failure.kind, "reason": failure.message, **figures}


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
        *,
        training: bool = True,
        part_start: Callable[[], PartStart] = PartStart,  # of such a part
    ) -> None:
        self.repeats = 0  # how often passes of this step started over
        self.start = start
        self._size = size
        self._shared = shared
        self._recorder = recorder
        self._is_training = training
        self._part_start = part_start
        self._batches: list[Batch[T]] = []
        self._items = 1.0  # what this rank's mean counts among those of all
        self._ran_out: RanOut | None = None  # on this rank, the last time
        self._host_ran_out = False
        # what memory ran out with in this step, without its frames
        self._shortage: BaseException | None = None
        self._has_made_room = False  # the last time that memory ran out
        self._agrees = True  # the other ranks come to the same agreement

    def run(self, batch: Batch[T], *, is_last: bool = True) -> Results[T]:
        """Run a batch; return what the body returned for each of its parts.

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
        """Run a batch of which each part stands for itself: only one that fails is repeated."""
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
        """End the step on all ranks; return the mean of their losses, each a mean of ``items``.

        With it whether on any rank the bodies returned more than a loss.
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
    """Whether a collective of the user's in a part is refused, before a rank waits in one."""

    def rewound(self) -> None:
        """Go back to the step's start with what else a pass has changed."""

    def guard(self) -> AbstractContextManager[object]:
        """Return a context for each body."""
        return contextlib.nullcontext()

    def cannot_repeat(self) -> str | None:
        """Return why memory that runs out now has to end the attempt; None if it does not."""
        if cuda.holds_graphs():
            # torch shows both as private pools of segments
            return "a CUDA graph was captured, or a memory pool is in use, which keeps its memory"
        if self.start is not None and self.start.is_lost:
            return "it has made or changed a large buffer as no step before it"
        return None

    def say_why(self, reason: str) -> None:
        """Log why memory that ran out ends the attempt."""
        text = "step %d: out of memory, and the step cannot be repeated: %s"
        log.warning(text, self._recorder.step(), reason)

    # --- the passes ---

    def _pass(self, batches: list[Batch[T]]) -> Results[T] | None:
        """Run batches; return the results of the last one, None if memory ran out."""
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
        """Yield a batch's parts; with a sharded model as many as the other ranks have."""
        parts = batch.parts
        own = bounds(parts.samples, used, least=self._least_part)
        wants_check = len(own) > 1 and self._is_unchecked(batch)
        factor = 1.0
        most = len(own)
        if self.is_sharded:
            self._items = parts.items
            most, factor, wants_check = self._shared.plan(len(own), parts.items, wants_check)
        if wants_check:
            self._check_split(batch, used)
        for number in range(most):
            if number < len(own):
                start, stop = own[number]
                yield parts.part(start, stop, factor=factor)
            else:
                yield parts.without_weight()

    @functools.cached_property
    def _least_part(self) -> int:
        """The fewest samples in a part: BatchNorm in training cannot take a lone one."""
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
        log.warning("step %d: out of memory: %s", self._recorder.step(), note)
        if hasattr(shortage, "add_note"):  # from Python 3.11 on
            shortage.add_note(note)
        failure = classify_failure(shortage)
        self._ran_out = RanOut(failure, used, True, self._shared.rank)
        self._tell_other_ranks(failure, shortage)
        raise shortage from error

    def _tell_other_ranks(self, failure: Failure, error: BaseException) -> None:
        """Let the other ranks end as well; they may save before that."""
        if not self._agrees:
            return
        self._undo()
        if self._agree() is not None:
            rank = self._shared.rank
            raise RankFailure(rank, failure, is_elsewhere=False) from error

    def _goes_through(self, part: Part, body: Body[T], used: int, results: Results[T]) -> bool:
        """Run one part; False if memory ran out, and all that the pass held is free again."""
        is_watched = self.start is not None and self.refuses_collectives
        failure: Failure | None = None
        went_through = False
        if is_watched:
            self._shared.begin_part(training=self._is_training, has_weight=bool(part.weight))
        try:
            with self.guard():
                result = body(part)
            if is_watched:
                self._shared.end_part(ran_out=False)
            went_through = True
            if len(part) or not self.is_sharded:  # else only others needed it
                results.append((result, part))
            del result
        except RanOutElsewhereError as error:
            clear_frames(error)
        except CannotSplitError:
            raise
        except Exception as error:
            failure = self._failure_to_repeat_after(error, used)
            if failure is None and self._hides_a_shortage(part, error):
                self._end_after_error_of_a_part(error, used)
            if failure is None:
                raise
            clear_frames(error)
            self._shortage = without_context(error)
        # no one has the exception any more
        if not went_through and self.start is not None:
            results.clear()
        if failure is not None:
            return_memory(thorough=self.repeats > 0, workspaces=True)
            do_without_onednn(failure)
            size = self._size.current
            if self._has_made_room:
                self._recorder.made_room()
                self._has_made_room = False
            else:
                self._recorder.repeated(self._is_training, failure, used, size)
            self._warn_of_changes()
            if self.is_sharded:
                self._shared.end_part(ran_out=True)
        if self.is_sharded:
            agreed = self._agree()
            self._ran_out = None
            went_through = agreed is None or agreed.ran_out is None
        self.repeats += not went_through
        return went_through

    def _hides_a_shortage(self, part: Part, error: Exception) -> bool:
        """Return whether a part raised what the whole batch, which ran out of memory, did not."""
        is_cut = not part.is_whole and self.repeats > 0 and self.start is not None
        failure = classify_failure(error, host_memory_ran_out=self._host_ran_out)
        return is_cut and not failure.kind.is_memory

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
        log.warning(
            "step %d: the function changes %s in place, which happens again in what is repeated: "
            "make new tensors in it, or change them after the step",
            self._recorder.step(),
            changed,
        )

    def _failure_to_repeat_after(self, error: Exception, used: int) -> Failure | None:
        """Return the failure if the step is repeated; if no smaller part is left, log what was
        tried, and have the other ranks end as well."""
        failure = classify_failure(error, host_memory_ran_out=self._host_ran_out)
        self._host_ran_out |= failure.kind is FailureKind.HOST_OOM
        if not failure.kind.is_memory:
            return None
        reason = self.cannot_repeat()
        self._has_made_room = reason is None and self._makes_room(failure)
        if self._has_made_room:
            self._recorder.on_oom(error, failure)
            return failure
        smaller = None
        if reason is None:
            smaller = self._size.smaller_than(used)
            if smaller is not None and not self._can_use(smaller, used):
                smaller = None
                reason = "BatchNorm cannot take a lone sample, which smaller parts would have"
        rank = self._shared.rank
        self._ran_out = RanOut(failure, used, smaller is None, rank)
        if reason is not None:
            self.say_why(reason)
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(f"this step cannot be split: {reason}")
        else:
            self._size.failed_at(used)
        if smaller is not None:
            self._recorder.on_oom(error, failure)
            return failure
        if reason is None:
            tried = self._size.tried
            note = self._recorder.exhausted(self._is_training, failure, used, tried)
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(note)
        if self._agrees and self.is_sharded:
            clear_frames(error)
            return_memory(thorough=True)
            self._shared.end_part(ran_out=True)
        self._tell_other_ranks(failure, error)
        return None

    def _can_use(self, smaller: int, used: int) -> bool:
        """Return whether every batch of the step has more parts of this size than of the last."""
        least = self._least_part
        for batch in self._batches:
            samples = batch.parts.samples
            parts = bounds(samples, smaller, least=least)
            if samples >= used and max(stop - start for start, stop in parts) >= used:
                return False
        return True

    def _makes_room(self, failure: Failure) -> bool:
        """Move gradients of earlier batches off the GPU, which may be all that the step lacks."""
        # ranks that compute together would have to do so together
        if self.start is None or self.is_sharded:
            return False
        if failure.kind is not FailureKind.DEVICE_OOM:
            return False
        return self.start.make_room()

    def _agree(self, *, returns_more: bool = False) -> RankReport | None:
        """Agree with the other ranks how this step, or part, went; None if there are none."""
        self._recorder.speed.alone_until_now()
        mine = self._ran_out
        size = self._size
        report = RankReport(mine, size.current, self._items, (), returns_more)
        agreed = self._shared.agree(report)
        if agreed is None or (mine is not None and mine.is_exhausted):
            return agreed
        theirs = agreed.ran_out
        if theirs is not None and theirs.is_exhausted:
            raise RankFailure(theirs.rank, theirs.failure, is_elsewhere=True)
        failed = 0 if theirs is None else theirs.size
        size.agree(agreed.size, failed=failed, is_known=mine is not None)
        return agreed
