"""Repeats steps of Lightning's ``Trainer`` in smaller parts if memory runs out.

`lightning.fit` calls `recover_in_steps` before a fit, in the attempt's process, on every rank. The
Trainer keeps its loader, counters, batch hooks, loggers, clipping, schedulers and checkpoints. Only
its automatic optimization is replaced, by a subclass that runs the closure for parts of a batch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler

from robust_train.attempt.run import Run, live_of
from robust_train.compat import accumulates_now
from robust_train.integrations.lightning_logs import BatchLogs, Outcomes, PartLog
from robust_train.integrations.sample_order import SampleOrder
from robust_train.integrations.steering import lightning
from robust_train.integrations.step_recovery import OpenStep, StepRecovery
from robust_train.step.splitting import Part

log = logging.getLogger("robust_train.integrations")

_automatic: Any = lightning(".loops.optimization.automatic")
_strategies: Any = lightning(".strategies")
_LightningModule: Any = lightning().LightningModule
_AutomaticOptimization: Any = _automatic._AutomaticOptimization


def recover_in_steps(trainer: Any, model: Any, run: Run, callback: Any) -> None:
    """Set up ``trainer`` to repeat its steps and evaluations in smaller parts.

    Args:
        trainer: the ``Trainer``, before its fit.
        model: the model of the fit.
        run: the attempt's run.
        callback: the `RobustCallback` of the fit, which counts micro-batches.
    """
    recovery = StepRecovery(run, "Lightning")
    logs = BatchLogs(trainer)
    obstacle = find_obstacle(trainer, model)
    _keep_evaluation_batches(trainer, run, callback, can_split=obstacle is None)
    if obstacle is not None:
        recovery.warn_once(obstacle, on_all_ranks=True)
        return
    if model.automatic_optimization:
        optimization = _OptimizationInParts(trainer, recovery, logs, callback)
        trainer.fit_loop.epoch_loop.automatic_optimization = optimization
    else:
        reason = f"{type(model).__name__}.training_step runs the backward passes by itself"
        recovery.warn_once(f"{reason} (automatic_optimization=False)", on_all_ranks=True)
    for name in ("validation_step", "test_step", "predict_step"):
        inner = getattr(trainer.strategy, name)
        setattr(trainer.strategy, name, partial(_evaluate, trainer, recovery, logs, inner))


def find_obstacle(trainer: Any, model: Any) -> str | None:
    """Return why a step cannot run in parts, or None if it can."""
    # The strategies of DeepSpeed and XLA derive from DDP's, so isinstance would accept them.
    strategy = trainer.strategy
    if type(strategy) not in (_strategies.SingleDeviceStrategy, _strategies.DDPStrategy):
        return f"{type(strategy).__name__} runs the model"
    inherited = _LightningModule.optimizer_zero_grad
    if getattr(type(model), "optimizer_zero_grad", inherited) is not inherited:
        return f"{type(model).__name__}.optimizer_zero_grad decides about gradients"
    return None


def _keep_evaluation_batches(trainer: Any, run: Run, callback: Any, *, can_split: bool) -> None:
    """Give loaders of validation and test the batch size that the user requested.

    This attempt's micro-batch may be smaller. Figures, and the effect of ``limit_val_batches``,
    depend on the batch size.
    """
    micro_batch: int = callback.shares.micro_batch
    spec = live_of(run).parts.asked
    batch_size = micro_batch if spec is None else spec.batch_size
    if batch_size == micro_batch:
        return
    process = trainer.strategy.process_dataloader

    @functools.cache
    def warn_once() -> None:
        log.warning(
            "Lightning: evaluates in batches of %d, no longer %d: limit_val_batches=2 and the like "
            "are less data, and figures of batches may differ from those of earlier attempts",
            micro_batch,
            batch_size,
        )

    def process_dataloader(loader: Any) -> Any:
        batches: Any = getattr(loader, "batch_sampler", None)
        is_plain = type(batches) is BatchSampler
        # The loader of training samples has our order.
        is_for_evaluation = is_plain and not isinstance(batches.sampler, SampleOrder)
        if is_for_evaluation and batches.batch_size == micro_batch:
            if can_split:
                batches.batch_size = batch_size
            else:
                warn_once()
        return process(loader)

    trainer.strategy.process_dataloader = process_dataloader


class _OptimizationInParts(_AutomaticOptimization):  # type: ignore[misc]
    """Lightning's automatic optimization, whose closure may run for parts of a batch.

    Lightning creates a closure for each batch: call ``training_step``, zero the gradients if a step
    starts, run the backward pass. In a step's last batch, it passes the closure to the optimizer.
    """

    def __init__(
        self, trainer: Any, recovery: StepRecovery, logs: BatchLogs, callback: Any
    ) -> None:
        super().__init__(trainer)
        self._callback = callback
        self._recovery = recovery
        self._logs = logs
        self._step: OpenStep | None = None
        # Zeroes the gradients for the step's first part. None once that is done.
        self._zero_grad: Callable[[], None] | None = None

    def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        """Return Lightning's closure for a batch, which runs in parts if that is possible."""
        closure = super()._make_closure(kwargs, optimizer, batch_idx)
        if isinstance(optimizer, torch.optim.LBFGS) and self._recovery.is_on:
            self._recovery.is_on = False
            self._recovery.warn_once("LBFGS runs the closure several times a step")
        # Lightning skips the backward pass while weight averaging updates BatchNorm's statistics.
        if not self._recovery.is_on or "batch" not in kwargs or self._skip_backward:
            return closure
        run_whole = closure.closure
        has_run = False

        def run_once_in_parts(*args: Any, **named: Any) -> Any:
            # A second call within a step computes another gradient, so it is not part of the step.
            nonlocal has_run
            if has_run:
                return run_whole()
            has_run = True
            return self._run_batch(run_whole, kwargs, optimizer, batch_idx)

        closure.closure = run_once_in_parts
        return closure

    @torch.enable_grad()
    def _run_batch(
        self, run_whole: Callable[[], Any], kwargs: Any, optimizer: Any, batch_idx: int
    ) -> Any:
        """Run the closure for each part of the batch, and return the batch's result."""
        trainer = self.trainer
        zero_grad = self._make_zero_grad_fn(batch_idx, optimizer)
        # A step that was left before its last batch is still open when the next step starts.
        starts_step = self._step is None or zero_grad is not None
        if starts_step:
            self._zero_grad = zero_grad

            def restore_zero_grad() -> None:
                # The user's hook runs again, because a rewind undoes its changes of attributes.
                self._zero_grad = zero_grad

            self._step = self._recovery.begin(
                trainer.model, on_rewind=restore_zero_grad, keeps_gradients=False
            )
        if self._step is None:
            return run_whole()

        number = self._callback.done

        def run_part(part: Part) -> tuple[Any, PartLog]:
            # The callback weights the loss by the batch's number in the step. If a later batch
            # runs out of memory, this batch runs again, so its number is set here.
            self._callback.done = number
            return self._run_part(part, kwargs, optimizer)

        def loss_of(data: Any) -> Tensor:
            with self._logs.discard():
                result = self._training_step(_with_batch(kwargs, data))
            loss: Tensor | None = result.closure_loss
            if loss is None:
                raise ValueError("training_step returned no loss")
            return loss

        is_last = not accumulates_now(trainer)
        outcomes = self._step.run_batch(
            kwargs["batch"],
            run_part,
            is_last=is_last,
            loss_of=loss_of,
            function=trainer.lightning_module.training_step,
        )
        self._logs.log_batch(outcomes)
        if is_last:
            self._step = None
        if len(outcomes) == 1:
            (result, _), _ = outcomes[0]
            return result
        return self._join_results(outcomes)

    def _run_part(self, part: Part, kwargs: Any, optimizer: Any) -> tuple[Any, PartLog]:
        """Run Lightning's closure for a part, whose loss gets the part's weight."""
        inputs = kwargs if part.is_whole else _with_batch(kwargs, part.data)
        with self._logs.collect(part) as part_log:

            def step() -> Any:
                result = self._training_step(inputs)
                loss = result.closure_loss
                if loss is not None:
                    # Lightning has divided the loss by the accumulation.
                    part_log.loss = loss.detach() * self.trainer.accumulate_grad_batches
                if loss is not None and part.weight != 1.0:
                    result.closure_loss = loss * part.weight
                    result.loss = result.closure_loss.detach().clone()
                return result

            backward = self._make_backward_fn(optimizer)
            zero_grad = None if self._zero_grad is None else self._zero_once
            closure = _automatic.Closure(step, backward, zero_grad)
            return closure.closure(), part_log

    def _zero_once(self) -> None:
        """Zero the gradients, unless an earlier part of the step has done it."""
        zero_grad = self._zero_grad
        self._zero_grad = None
        if zero_grad is not None:
            zero_grad()

    def _join_results(self, outcomes: Outcomes) -> Any:
        """Return a batch's result: the sum of its parts' weighted losses, and their outputs."""
        joined = _automatic.ClosureResult(None)
        results = [result for (result, _), _ in outcomes]
        outputs = [(result.extra, part) for (result, _), part in outcomes]
        joined.extra = self._recovery.join(outputs)
        losses = [result.loss for result in results if result.loss is not None]
        joined.loss = sum(losses) if losses else None
        return joined


def _with_batch(kwargs: Any, batch: Any) -> Any:
    """Return a copy of the arguments of ``training_step`` with another batch."""
    return type(kwargs)(kwargs, batch=batch)


def _evaluate(
    trainer: Any, recovery: StepRecovery, logs: BatchLogs, inner: Any, batch: Any, *args: Any
) -> Any:
    """Run a validation, test or prediction step for each part of a batch."""

    def run_part(part: Part) -> tuple[Any, PartLog]:
        with logs.collect(part) as part_log:
            result = inner(part.data, *args)
            loss = result.get("loss") if isinstance(result, dict) else result
            if isinstance(loss, Tensor):
                part_log.loss = loss
            return result, part_log

    outcomes = recovery.evaluate(trainer.model, batch, run_part)
    logs.log_batch(outcomes)
    return recovery.join([(result, part) for (result, _), part in outcomes])
