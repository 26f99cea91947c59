"""Runs a part of an optimizer step, and decides what follows if memory runs out in it.

:class:`.engine.Step` inherits from :class:`PartRunner` and calls :meth:`PartRunner.try_part` for
each part, in the process that trains. The pass over a part is a function call. If memory runs out
in it, the frames of the exception are cleared. This drops the graph and all activations, so their
memory is free for the next try. :mod:`.after_shortage` decides whether the step is repeated.
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
from torch import nn

from robust_train.compat import depends_on_batch
from robust_train.failures import classify_failure
from robust_train.failures.shortage import do_without_onednn
from robust_train.memory import cuda
from robust_train.memory.clearing import clear_frames, return_memory
from robust_train.model.errors import RankFailure
from robust_train.model.failure import Failure, FailureKind
from robust_train.readable import first_line
from robust_train.step.after_shortage import AfterShortage, Answer, decide
from robust_train.step.loss_passes import LossOf, describe_error
from robust_train.step.micro_batch_size import MicroBatchSize
from robust_train.step.ranks import RankReport, RanOut
from robust_train.step.recorder import Recorder
from robust_train.step.sharded import RanOutElsewhereError
from robust_train.step.shared_step import SharedStep
from robust_train.step.split_check import Kept, SplitCheck
from robust_train.step.splitting import Part, Parts
from robust_train.step.step_start import PartStart, StepStart

log = logging.getLogger("robust_train")

T = TypeVar("T")

Body = Callable[[Part], T]
"""The pass over a part: forward, and in training backward with the part's weight."""

Results = list[tuple[T, Part]]
"""Each part of a batch with the body's result for it."""


class CannotSplitError(Exception):
    """The pass does not work on a part of the batch. The message gives the reason."""


@dataclass(frozen=True)
class Batch(Generic[T]):
    """A batch of a step, and the functions that compute its loss."""

    parts: Parts
    body: Body[T]
    # Returns the loss of some data without a backward pass. None if only the body can compute it.
    loss_of: LossOf | None = None
    # The user's function. Steps that run the same code are checked once.
    function: Any = None


@dataclass(frozen=True)
class PartEnd:
    """How the pass over a part ended."""

    # False if memory ran out, on this rank or on another rank that runs the part with it.
    went_through: bool
    # The failure and the way to repeat the step, if memory ran out on this rank.
    failure: Failure | None = None
    answer: AfterShortage | None = None


class PartRunner(Generic[T]):
    """Runs the parts of a step, and undoes the step after an error.

    Args:
        size: the size of parts, which shrinks if memory runs out.
        start: the state at the start of the step, to which it is undone. None in validation of a
            model that can leave a part at any time. Then only the failed part is repeated.
        shared: the ranks that share the step.
        recorder: logs shortages, and reports them to the launcher.
        training: False for validation.
        part_start: records the state at the start of a part, used if ``start`` is None.

    Attributes:
        repeats: how many times a part of this step has failed for lack of memory.
    """

    def __init__(
        self,
        size: MicroBatchSize,
        start: StepStart | None,
        shared: SharedStep,
        recorder: Recorder,
        *,
        training: bool = True,
        part_start: Callable[[], PartStart] = PartStart,
    ) -> None:
        self.repeats = 0
        self.start = start
        self._size = size
        self._shared = shared
        self._recorder = recorder
        self._is_training = training
        self._part_start = part_start
        self._batches: list[Batch[T]] = []
        self._items = 1.0  # the number of items that this rank's mean loss averages over
        self._ran_out: RanOut | None = None  # this rank's latest shortage, to report to the others
        self._host_ran_out = False
        # The error of the latest shortage on this rank, without its frames.
        self._shortage: BaseException | None = None
        # Whether the other ranks wait for this rank's report after this pass.
        self._ranks_wait = True

    @property
    def is_sharded(self) -> bool:
        """Whether the ranks run their parts together."""
        return self._shared.is_sharded

    @property
    def is_shared(self) -> bool:
        """Whether other ranks take part, so that losses are weighted by each rank's items."""
        return self._shared.is_shared

    # --- overridden for a framework's step ---

    refuses_collectives = True
    """Whether user collectives inside a part are refused, because a rank that runs out of memory
    would leave the other ranks waiting in them."""

    def guard(self) -> AbstractContextManager[object]:
        """Return the context manager in which each body runs."""
        return contextlib.nullcontext()

    def cannot_repeat(self) -> str | None:
        """Return why the step cannot be repeated, or None if it can."""
        if cuda.holds_graphs():
            # torch does not distinguish the memory of graphs from that of user pools.
            return "a CUDA graph was captured, or a memory pool is in use, which keeps its memory"
        if self.start is not None and self.start.is_lost:
            return "it made or changed a large buffer, which no earlier step did"
        return None

    def log_why(self, reason: str) -> None:
        """Log why the step cannot be repeated. The attempt then ends."""
        self._recorder.log_cannot_repeat(reason)

    # --- a part ---

    @functools.cached_property
    def _least_part(self) -> int:
        """The fewest samples in a part: BatchNorm in training cannot take a single sample."""
        if self._size.refuses_lone_samples:
            return 2
        if self.start is None or not self._is_training:
            return 1
        if any(map(_needs_several_samples, self.start.modules)):
            return 2
        return 1

    def try_part(self, part: Part, body: Body[T], used: int, results: Results[T]) -> bool:
        """Run a part of size ``used``. If memory runs out, release it and return False."""
        end = self._run_part(part, body, used, results)
        # The exception no longer exists here, so the memory that its frames held can be released.
        is_done = end.went_through
        if not is_done and self.start is not None:
            results.clear()
        if end.failure is not None and end.answer is not None:
            self._prepare_to_repeat(end.failure, end.answer, used)
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
            # An empty part has no result. It runs only to join the collectives of the other ranks.
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
                if self._was_cut_after_a_shortage(part):
                    self._end_after_error_of_a_part(error, used)
                raise
            answer = self._decide_after(failure, used)
            self._remember_shortage(failure, answer, used)
            if not answer.repeats:
                self._end_after_shortage(error, failure, answer, used)
                raise
            self._recorder.on_oom(error, failure)
            clear_frames(error)
            self._shortage = _strip_context(error)
            return PartEnd(False, failure, answer)

    def _decide_after(self, failure: Failure, used: int) -> AfterShortage:
        """Decide how the step continues after memory ran out in a part of size ``used``."""
        reason = self.cannot_repeat()
        if reason is not None:
            return AfterShortage(Answer.CANNOT_REPEAT, reason)
        if self._make_room(failure):
            return AfterShortage(Answer.REPEAT_WITH_ROOM)
        smaller = self._size.smaller_than(used)
        samples = [batch.parts.samples for batch in self._batches]
        return decide(smaller, used, samples, least=self._least_part)

    def _make_room(self, failure: Failure) -> bool:
        """Move gradients of earlier batches to the host. Return whether that freed GPU memory."""
        # The ranks of a sharded model would all have to move their gradients at the same time.
        if self.start is None or self.is_sharded:
            return False
        if failure.kind is not FailureKind.DEVICE_OOM:
            return False
        return self.start.make_room()

    def _remember_shortage(self, failure: Failure, answer: AfterShortage, used: int) -> None:
        """Keep a shortage for the report to the other ranks. Use smaller parts if necessary."""
        if failure.kind is FailureKind.HOST_OOM:
            self._host_ran_out = True
        if answer.answer is not Answer.REPEAT_WITH_ROOM:
            self._ran_out = RanOut(failure, used, not answer.repeats, self._shared.rank)
        if answer.shrinks:
            self._size.record_failure(used)

    def _prepare_to_repeat(self, failure: Failure, answer: AfterShortage, used: int) -> None:
        """Release the memory of a part that ran out, and log how the step is repeated."""
        return_memory(thorough=self.repeats > 0, workspaces=True)
        do_without_onednn(failure)
        if answer.answer is Answer.REPEAT_WITH_ROOM:
            self._recorder.log_freed_room()
        else:
            self._recorder.log_repeat(self._is_training, failure, used, self._size.current)
        self._warn_of_changes()
        if self.is_sharded:
            self._shared.end_part(ran_out=True)

    def _warn_of_changes(self) -> None:
        """Warn if a pass changed the batch or weights in place, as the repeat will do it again."""
        if any(batch.parts.has_changed for batch in self._batches):
            self._recorder.log_changes_in_place("the batch")
        elif self.start is not None and self.start.has_changed_weights:
            self._recorder.log_changes_in_place("weights")

    def _agree_on_part(self) -> bool:
        """Return whether a part of a sharded model went through on all ranks."""
        agreed = self._agree()
        self._ran_out = None
        return agreed is None or agreed.ran_out is None

    # --- ending a step that is not repeated ---

    def _end_as_shortage(
        self, note: str, used: int, error: BaseException | None = None
    ) -> NoReturn:
        """Raise the latest shortage's error again, because the step cannot run in parts.

        Args:
            note: the reason.
            used: the size of the parts.
            error: the error that a part raised, if it is the reason.
        """
        shortage = self._shortage
        if shortage is None:  # Memory ran out on another rank only.
            shortage = torch.OutOfMemoryError("out of memory on another rank")
        self._recorder.log_cannot_split(note)
        _add_note(shortage, note)
        failure = classify_failure(shortage)
        self._ran_out = RanOut(failure, used, True, self._shared.rank)
        self._end_other_ranks(failure, shortage)
        raise shortage from error

    def _end_other_ranks(self, failure: Failure, error: BaseException) -> None:
        """Report to the other ranks that the attempt ends. They may save a checkpoint first.

        Raises:
            RankFailure: other ranks exist, and have received the report.
        """
        if not self._ranks_wait:
            return
        self._undo()
        if self._agree() is not None:
            rank = self._shared.rank
            raise RankFailure(rank, failure, is_elsewhere=False) from error

    def _end_after_shortage(
        self, error: Exception, failure: Failure, answer: AfterShortage, used: int
    ) -> None:
        """Log why a shortage ends the attempt, and end the other ranks too."""
        if answer.answer is Answer.CANNOT_REPEAT:
            self.log_why(answer.reason)
            _add_note(error, f"this step cannot be split: {answer.reason}")
        else:
            tried = self._size.tried
            note = self._recorder.log_exhausted(self._is_training, failure, used, tried)
            _add_note(error, note)
        if self._ranks_wait and self.is_sharded:
            clear_frames(error)
            return_memory(thorough=True)
            self._shared.end_part(ran_out=True)
        self._end_other_ranks(failure, error)

    def _was_cut_after_a_shortage(self, part: Part) -> bool:
        """Return whether a part is smaller than the batch because memory ran out in this step.

        An error in such a part is not a bug in the program: the whole batch did not raise it.
        """
        return not part.is_whole and self.repeats > 0 and self.start is not None

    def _end_after_error_of_a_part(self, error: Exception, used: int) -> NoReturn:
        """End the attempt after an error that a part of the batch raises, but not the whole."""
        check = SplitCheck(Kept.CANNOT, describe_error(error), used)
        note = check.message
        self._recorder.splits.on_found(self._recorder.step(), check, True)
        if self.is_sharded:
            clear_frames(error)
            self._shared.end_part(ran_out=True)
        self._end_as_shortage(note, used, error)

    def _agree(self, *, returns_more: bool = False) -> RankReport | None:
        """Agree with the other ranks on how this step or part went.

        Returns:
            The combined report of all ranks, or None without other ranks.

        Raises:
            RankFailure: memory ran out on another rank, and no smaller size is left.
        """
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

    # --- going back to the start of the step ---

    @contextlib.contextmanager
    def undone_after_an_error(self) -> Iterator[None]:
        """Undo the step if the block raises."""
        try:
            yield
        except BaseException:
            self._undo()
            raise

    def _undo(self) -> None:
        """Go back to the step's start, without masking the error that is being raised.

        After a device fault, every call to the device raises that fault again.
        """
        try:
            if self.start is not None and self.start.is_open:
                self._shared.reset()
                self.start.rewind()
                self.start.end()
        except Exception as error:
            log.warning("the step's start cannot be restored: %s", first_line(error))


def _needs_several_samples(module: nn.Module) -> bool:
    """Return whether a layer computes statistics over the samples of a part."""
    return module.training and depends_on_batch(torch, module)


def _add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception. Python 3.11 and later show it below the message."""
    if hasattr(error, "add_note"):
        error.add_note(note)


def _strip_context(error: BaseException) -> BaseException:
    """Return an exception without its cause, its context and its frames."""
    error.__cause__ = None
    error.__context__ = None
    return error.with_traceback(None)
