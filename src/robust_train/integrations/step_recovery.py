"""Repeats a step of a framework's trainer in smaller parts if memory runs out in it.

Lightning's and transformers' ``Trainer`` own the training loop, so they cannot call
``run.backward``. `lightning_step` and `transformers_step` replace their methods for a batch: these
ask `StepRecovery` for an `OpenStep` and run the method's work as its body. They run in the
attempt's process, on every rank.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from robust_train.attempt.run import Run, live_of
from robust_train.compat import TorchDispatchMode
from robust_train.integrations.steering import keep_batch
from robust_train.model.errors import UserError
from robust_train.model.failure import Failure, FailureKind
from robust_train.step import ranks, splitting
from robust_train.step.engine import Step
from robust_train.step.loss_passes import LossOf
from robust_train.step.part_runner import Batch, Body, CannotSplitError
from robust_train.step.reachable import why_not_again
from robust_train.step.shared_step import SharedStep
from robust_train.step.splitting import Count, Part, Parts

log = logging.getLogger("robust_train.integrations")


def _do_nothing() -> None:
    pass


class StepRecovery:
    """Decides whether a trainer's steps and evaluations can be repeated, and opens them.

    Attributes:
        is_on: False once the model turned out to be one whose batches cannot be split.
    """

    def __init__(self, run: Run, framework: str) -> None:
        self.is_on = True
        self._run = run
        self._framework = framework
        self._batcher = run.micro_batcher
        self._has_warned = False
        self._has_begun = False

    def warn_once(self, reason: str, *, on_all_ranks: bool = False) -> None:
        """Log why running out of memory ends the attempt. Later reasons are not logged.

        Args:
            reason: why a step cannot be repeated.
            on_all_ranks: every rank has this reason, so only the first rank logs it as a warning.
        """
        if self._has_warned:
            return
        self._has_warned = True
        kept_because = live_of(self._run).parts.keeps_batch
        next_attempt = "has the same batch" if kept_because else "has half the micro-batch"
        reasons = reason
        if kept_because and kept_because != reason:
            reasons += f"; {kept_because}"
        level = logging.WARNING
        if on_all_ranks and not self._run.is_main:
            level = logging.DEBUG
        log.log(
            level,
            "%s: if memory runs out, a new attempt %s; no step is repeated in smaller parts: %s",
            self._framework,
            next_attempt,
            reasons,
        )
        live_of(self._run).parts.stop_splitting()

    def keep_batch(self, reason: str) -> None:
        """Repeat no step, and forbid later attempts to split the batch in another way."""
        self.is_on = False
        keep_batch(self._run, reason)
        self.warn_once(reason, on_all_ranks=True)

    def begin(
        self,
        model: nn.Module,
        *,
        on_rewind: Callable[[], None] = _do_nothing,
        keeps_gradients: bool = True,
    ) -> OpenStep | None:
        """Open an optimizer step, or return None if the framework has to run the step itself."""
        if self.is_on and not self._has_begun:
            # The framework has created its optimizer by this point.
            self._has_begun = True
            reason = why_not_again(model)
            if reason is not None:
                self.keep_batch(reason)
        shared = self._shared_step(model)
        if shared is None:
            return None
        return self._batcher.open_step(
            partial(OpenStep, warn=self.warn_once, on_rewind=on_rewind),
            model,
            shared,
            keeps_gradients=keeps_gradients,
        )

    def evaluate(self, model: nn.Module, batch: Any, body: Body[Any]) -> list[tuple[Any, Part]]:
        """Run a validation batch in parts that fit, and return each part's result."""
        shared = self._shared_step(model)
        if shared is None:
            whole = Part(batch, 1.0)
            return [(body(whole), whole)]
        kind = partial(OpenStep, warn=self.warn_once)
        step = self._batcher.open_evaluation(kind, model, shared)
        return step.run_batch(batch, body)

    def join(self, results: Sequence[tuple[Any, Part]]) -> Any:
        """Join the results of a batch's parts.

        Raises an out-of-memory error if they cannot be joined, so that a new attempt tries smaller
        batches.
        """
        values = [result for result, _ in results]
        sizes = [len(part) for _, part in results]
        try:
            return splitting.join_parts(values, sizes)
        except ValueError as error:
            self.warn_once(f"the results of parts cannot be put together: {error}")
            raise memory_error_like(None) from None

    def _shared_step(self, model: nn.Module) -> SharedStep | None:
        """Return the ranks' part in a step, or None if the model's steps cannot be repeated."""
        if not self.is_on:
            return None
        try:
            shared = SharedStep([model])
        except UserError as error:
            reason = str(error)
        else:
            if not shared.is_sharded:
                return shared
            reason = "its weights are sharded"
        self.is_on = False
        self.warn_once(reason)
        return None


class OpenStep(Step[Any]):
    """The step in progress. Call `run_batch` for each of its batches, then drop the object.

    The parts of a batch do not communicate, so each rank runs its batches independently. The ranks
    exchange one message after the step's last batch.

    Args:
        warn: called with the reason if the step cannot be repeated.
        on_rewind: called whenever the step goes back to its start.
    """

    # A framework may log with collectives. `guard` refuses them only while a step is repeated.
    refuses_collectives = False

    def __init__(
        self,
        *args: Any,
        warn: Callable[[str], None],
        on_rewind: Callable[[], None] = _do_nothing,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._warn = warn
        self._on_rewind = on_rewind
        self._can_be_cut = True

    def run_batch(
        self,
        data: Any,
        body: Body[Any],
        *,
        count: Count | None = None,
        is_last: bool = True,
        loss_of: LossOf | None = None,
        function: Any = None,
    ) -> list[tuple[Any, Part]]:
        """Return the results of a batch's parts. In training, the last batch ends the step."""
        samples = self._count_samples(data)
        # A single sample cannot be cut, even if several texts were packed into it.
        self._can_be_cut = samples > 1
        whole = data
        if self._can_be_cut:
            # The body may change the batch's structure, so keep views of the tensors as they are.
            whole = splitting.part_of(data, 0, samples)
        parts = Parts(whole, max(samples, 1), count=count, counts_whole=False)

        def run_body(part: Part) -> Any:
            # The whole batch runs as the framework's own object, not as the views.
            if part.is_whole:
                part = replace(part, data=data)
            return body(part)

        try:
            results = self.run(Batch(parts, run_body, loss_of, function), is_last=is_last)
            if is_last and self.start is not None:
                self.end()
        except CannotSplitError as reason:
            self._warn(str(reason))
            failure = None
            if self._ran_out is not None:
                failure = self._ran_out.failure
            raise memory_error_like(failure) from None
        return results

    def _count_samples(self, batch: Any) -> int:
        """Return the number of samples in a batch, 1 if the batch cannot be cut."""
        try:
            return splitting.length_of(batch, is_strict=True)
        except (TypeError, ValueError) as error:
            self._warn(str(error).partition(";")[0])
            return 1

    def rewind_framework(self) -> None:
        self._on_rewind()

    def guard(self) -> AbstractContextManager[object]:
        """Refuse collectives while this rank repeats work that the other ranks do only once.

        Such a collective would wait forever, or be paired with a different call of another rank.
        """
        is_alone = ranks.here() is None
        if is_alone or not self.repeats:
            return contextlib.nullcontext()
        mode: AbstractContextManager[object] = _NoCollectives()  # type: ignore[no-untyped-call]
        return mode

    def cannot_repeat(self) -> str | None:
        if not self._can_be_cut:
            return "the batch is a lone sample, or several that are packed into one"
        return super().cannot_repeat()

    def log_why(self, reason: str) -> None:
        self._warn(reason)


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises CannotSplitError for every collective that runs within the block."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise CannotSplitError(
                f"it calls the collective {func.name().partition('::')[2]}, for which the other "
                "ranks would wait"
            )
        return func(*args, **(kwargs or {}))


def memory_error_like(failure: Failure | None) -> Exception:
    """Return an out-of-memory error that is classified like ``failure``: of the host or the GPU."""
    message = ""
    if failure is not None:
        message = failure.message.removeprefix("OutOfMemoryError: ")
    message = message or "out of memory"
    if failure is not None and failure.kind is FailureKind.HOST_OOM:
        return MemoryError(message)
    return torch.OutOfMemoryError(message)
