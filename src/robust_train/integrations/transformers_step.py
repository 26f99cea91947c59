"""Repeats steps of transformers' ``Trainer`` in smaller parts if memory runs out.

`transformers.fit` calls `recover_in_steps` before training, in the attempt's process, on every
rank. It wraps the Trainer's ``training_step`` and ``prediction_step`` and its accelerator's
``backward``. The Trainer keeps its loader, counters, callbacks, logging, clipping and checkpoints.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robust_train.attempt.run import Run, live_of
from robust_train.compat import has_own_inputs
from robust_train.integrations.steering import framework
from robust_train.integrations.step_recovery import OpenStep, StepRecovery
from robust_train.integrations.transformers_figures import BatchFigures, PassFigures
from robust_train.integrations.transformers_loss import TrainersLoss
from robust_train.step.part_runner import CannotSplitError
from robust_train.step.reachable import STEPS_IN_BACKWARD
from robust_train.step.splitting import Part

log = logging.getLogger("robust_train.integrations")

_transformers: Any = framework("transformers")
_TrainerCallback: Any = _transformers.TrainerCallback


def recover_in_steps(trainer: Any, run: Run) -> None:
    """Set up ``trainer`` to repeat its steps and evaluations in smaller parts."""
    args = trainer.args
    loss = TrainersLoss(trainer)
    recovery = StepRecovery(run, "transformers")
    requested = live_of(run).parts.asked
    if requested is not None:
        requested_split = (requested.gradient_accumulation_steps, requested.ranks)
        if requested_split != (args.gradient_accumulation_steps, run.world_size):
            loss.weigh_as(requested)
    if args.optim in ("lomo", "adalomo"):
        recovery.keep_batch(f"optim={args.optim.value} {STEPS_IN_BACKWARD}")
        return
    obstacle = _find_obstacle(trainer)
    if obstacle is not None:
        recovery.warn_once(obstacle, on_all_ranks=True)
        _evaluate_in_micro_batches(trainer, run)
    else:
        trainer.add_callback(StepsInParts(trainer, recovery, loss))


def _find_obstacle(trainer: Any) -> str | None:
    """Return why a step cannot run in parts, or None if it can."""
    args = trainer.args
    kind = trainer.accelerator.distributed_type.value
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        return f"the model is run by {kind}"
    if getattr(trainer.accelerator, "parallelism_config", None) is not None:
        return "parallelism_config: the ranks share a sample"
    if args.torch_compile and args.torch_compile_mode in ("reduce-overhead", "max-autotune"):
        return f"torch_compile_mode={args.torch_compile_mode} captures CUDA graphs"
    if has_own_inputs(trainer, _transformers.Trainer):
        return f"{type(trainer).__name__}._prepare_inputs makes its own batches"
    return None


def _evaluate_in_micro_batches(trainer: Any, run: Run) -> None:
    """Evaluate in this attempt's micro-batches, because a batch cannot be repeated in parts.

    The batch that the user requested may have run out of memory.
    """
    args = trainer.args
    requested = live_of(run).parts.asked
    if requested is None:
        return
    micro_batch = args.per_device_train_batch_size
    evaluates_requested = args.per_device_eval_batch_size == requested.batch_size
    if micro_batch == requested.batch_size or not evaluates_requested:
        return
    args.per_device_eval_batch_size = micro_batch
    log.warning(
        "transformers: evaluates in batches of %d, no longer %d, so eval_loss, a mean over "
        "batches, may differ from that of earlier attempts",
        micro_batch,
        requested.batch_size,
    )


class StepsInParts(_TrainerCallback):  # type: ignore[misc]
    """Replaces the Trainer's methods for a batch, and holds the step in progress."""

    def __init__(self, trainer: Any, recovery: StepRecovery, loss: TrainersLoss) -> None:
        self._trainer = trainer
        self._loss = loss
        self._recovery = recovery
        self._step: OpenStep | None = None
        self._weight = 1.0  # of the current part's loss in the batch's loss
        self._was_weighted = True  # whether `backward` has applied that weight
        self._inner_training_step = trainer.training_step
        self._inner_prediction_step = trainer.prediction_step
        self._inner_backward = trainer.accelerator.backward
        trainer.training_step = self.training_step
        trainer.prediction_step = self.prediction_step
        trainer.accelerator.backward = self.backward

    def on_step_begin(self, *args: Any, **named: Any) -> None:
        """Drop a step that was left before its last batch. Its gradients stay."""
        if self._step is not None:
            self._step.leave()
        self._step = None

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None, **more: Any
    ) -> Tensor:
        """Run the Trainer's method for each part. Return the batch's share of the step's loss."""
        if self._step is None:
            restore_figures = PassFigures(self._trainer).restore
            self._step = self._recovery.begin(model, on_rewind=restore_figures)
        if self._step is None:
            loss: Tensor = self._inner_training_step(model, inputs, num_items_in_batch, **more)
            return loss

        figures = BatchFigures(self._trainer)

        def run_part(part: Part) -> Tensor:
            self._weight = part.weight
            self._was_weighted = part.weight in (0.0, 1.0)
            try:
                with figures.collect(part):
                    loss = self._inner_training_step(model, part.data, num_items_in_batch, **more)
            finally:
                self._weight = 1.0
            if not self._was_weighted:
                name = type(self._trainer).__name__
                raise CannotSplitError(
                    f"{name}.training_step does not call self.accelerator.backward"
                )
            return _weigh(loss, part.weight).detach()

        def count_items(data: Any) -> float | Tensor:
            if self._loss.adds_up(model, data, num_items_in_batch):
                # The losses of parts are added up, so each part has the weight of the batch.
                return 1.0
            return self._loss.count_items(model, data, num_items_in_batch)

        def loss_of(data: Any) -> Tensor:
            return self._loss.compute(model, data, num_items_in_batch)

        is_last = self._trainer.accelerator.gradient_state.sync_gradients
        results = self._step.run_batch(
            inputs,
            run_part,
            count=count_items,
            is_last=is_last,
            loss_of=loss_of,
            function=self._trainer.compute_loss,
        )
        if is_last:
            self._step = None
        losses: list[Tensor] = [loss for loss, _ in results]
        return sum(losses[1:], losses[0]).to(self._trainer.args.device)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run the accelerator's backward pass for the current part's share of the batch's loss."""
        self._was_weighted = True
        if self._weight:
            self._inner_backward(_weigh(loss, self._weight), **options)

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's method for each part.

        Return the batch's mean loss, its logits and its labels.
        """
        figures = BatchFigures(self._trainer)

        def run_part(part: Part) -> Any:
            with figures.collect(part):
                return self._inner_prediction_step(model, part.data, *args, **kwargs)

        outcomes = self._recovery.evaluate(model, inputs, run_part)
        results = [result for result, _ in outcomes]
        if len(results) == 1:
            return results[0]
        losses, logits, labels = zip(*results, strict=True)
        mean_loss = None
        if losses[0] is not None:
            counts = [float(self._loss.count_items(model, part.data)) for _, part in outcomes]
            total = max(sum(counts), 1)
            pairs = zip(losses, counts, strict=True)
            mean_loss = sum(_weigh(loss, count / total) for loss, count in pairs)
        return mean_loss, _concatenate(logits), _concatenate(labels)


def _weigh(loss: Tensor, weight: float) -> Tensor:
    """Return ``loss`` times ``weight``. With weight 0 it is 0, even if the loss is NaN.

    The mean of a part without labels is NaN.
    """
    if weight == 1.0:
        return loss
    if weight == 0.0:
        return torch.zeros_like(loss)
    return loss * weight


def _concatenate(parts: Sequence[Any]) -> Any:
    """Concatenate the logits or labels of parts, which may be nested in tuples. None stays None."""
    if parts[0] is None:
        return None
    return functools.reduce(_transformers.trainer_pt_utils.nested_concat, parts)
