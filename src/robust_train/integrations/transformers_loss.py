"""Finds out how a transformers ``Trainer`` averages its loss, and corrects the loss of parts.

`transformers_step` creates a `TrainersLoss` in the attempt's process, on every rank. The Trainer
passes the loss function the number of items (labels) in the whole optimizer step. A loss that is
divided by that number can be added up over micro-batches. A model may also ignore the number and
return the mean of its micro-batch. No attribute shows the difference, so the loss of two samples is
computed twice, with different numbers.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from robust_train.compat import prepare_inputs, shifts_labels
from robust_train.integrations.transformers_figures import IGNORED, PassFigures
from robust_train.model.spec import AttemptSpec
from robust_train.step.ranks import of_all_ranks
from robust_train.step.rng import GeneratorStates
from robust_train.step.splitting import length_of, part_of

log = logging.getLogger("robust_train.integrations")


class TrainersLoss:
    """The loss of a ``Trainer``, and the items that it averages over."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._compute_loss = trainer.compute_loss
        # Both are determined when they are first needed.
        self._adds_up: bool | None = None
        self._shifts: bool | None = None
        self._requested: AttemptSpec | None = None
        self._has_logged = False

    # --- losses of parts ---

    def compute(self, model: nn.Module, data: Any, items: Any) -> Tensor:
        """Return the loss that the Trainer computes for ``data``, without a backward pass."""
        figures = PassFigures(self._trainer)
        try:
            with self._trainer.compute_loss_context_manager():
                inputs = prepare_inputs(self._trainer, data)
                loss: Tensor = self._compute_loss(model, inputs, num_items_in_batch=items)
        finally:
            figures.restore()
        return loss

    def adds_up(self, model: nn.Module, data: Any, items: Any) -> bool:
        """Return whether the losses of parts add up, because each is divided by the step's items.

        ``loss_is_scaled_for_ga`` is not enough: the Trainer sets it for every model that accepts
        the number of items, and a model may ignore it.
        """
        if items is None or self._trainer.loss_is_scaled_for_ga is False:
            return False
        if self._adds_up is None:
            few = part_of(data, 0, 2)
            loss = self._evaluate(model, few, items)
            loss_of_twice_the_items = self._evaluate(model, few, items * 2)
            # A loss that is divided by the items is half as large with twice the items. A mean
            # over samples without labels is NaN, which is not smaller either.
            is_divided = bool(loss_of_twice_the_items.abs() <= 0.75 * loss.abs())
            if self._requested is not None:
                is_divided = all(of_all_ranks(is_divided))
            self._adds_up = is_divided
        return self._adds_up

    def count_items(self, model: nn.Module, data: Any, items: Any = None) -> float | Tensor:
        """Return the number of items (labels, else samples) that the loss over ``data`` averages.

        ``items`` is the number of items in the whole optimizer step, None in an evaluation.
        """
        labels = data.get("shift_labels", data.get("labels"))
        if not isinstance(labels, Tensor) or labels.is_floating_point() or not labels.ndim:
            return length_of(data)
        if "shift_labels" not in data and labels.ndim > 1:
            if items is None:
                items = labels.ne(IGNORED).sum()
            can_add_up = self._trainer.model_accepts_loss_kwargs
            if can_add_up and self.adds_up(model, data, items):
                # The loss is divided by the number of items that the Trainer counted.
                leaves_out_first = shifts_labels(self._trainer)
            else:
                leaves_out_first = self._leaves_out_first(model, data)
            if leaves_out_first:
                labels = labels[..., 1:]
        return labels.ne(IGNORED).sum()

    def _leaves_out_first(self, model: nn.Module, data: Any) -> bool:
        """Return whether the model's mean leaves out each sample's first label.

        A causal language model does, because no token precedes the first. Then the loss is the same
        without the first label.
        """
        few = part_of(data, 0, 2)
        labels = few["labels"]
        has_first_label = bool(labels[..., 0].ne(IGNORED).any())
        if self._shifts is None and has_first_label:
            without_first = labels.clone()
            without_first[..., 0] = IGNORED
            items = labels.ne(IGNORED).sum()
            loss = self._evaluate(model, few, items)
            other = self._evaluate(model, type(few)({**few, "labels": without_first}), items)
            self._shifts = bool(torch.isclose(loss, other, rtol=1e-5, atol=0))
        if self._shifts is None:
            return shifts_labels(self._trainer)
        return self._shifts

    @torch.no_grad()
    def _evaluate(self, model: nn.Module, data: Any, items: Any) -> Tensor:
        """Return the loss of ``data`` in evaluation mode, without side effects."""
        was_training = model.training
        generators = GeneratorStates()
        model.eval()
        try:
            return self.compute(model, data, items)
        finally:
            model.train(was_training)
            generators.restore()

    # --- losses in an attempt with another split of the batch than the user requested ---

    def weigh_as(self, requested: AttemptSpec) -> None:
        """Weight losses so that their sum is the same as with the split that the user requested.

        The Trainer adds up losses that ignore the number of items, although each is the mean of its
        micro-batch. With 4 micro-batches in place of 2, the sum would be twice as large.
        """
        self._requested = requested
        self._trainer.compute_loss = self._compute_weighted

    def _compute_weighted(self, model: nn.Module, inputs: Any, *args: Any, **named: Any) -> Any:
        """Replace the Trainer's ``compute_loss``."""
        weight = 1.0
        if model.training:
            weight = self._find_weight(model, inputs, named.get("num_items_in_batch"))
        result = self._compute_loss(model, inputs, *args, **named)
        if weight == 1.0:
            return result
        if isinstance(result, tuple):
            loss, outputs = result
            return loss * weight, outputs
        return result * weight

    def _find_weight(self, model: nn.Module, inputs: Any, items: Any) -> float:
        """Return the factor for a micro-batch's loss, 1.0 if the loss is right as it is."""
        trainer = self._trainer
        requested = self._requested
        assert requested is not None
        is_scaled = trainer.loss_is_scaled_for_ga
        if is_scaled is None:
            has_items = trainer.model_accepts_loss_kwargs and items is not None
            is_scaled = has_items or trainer.compute_loss_func is not None
        if not is_scaled or self.adds_up(model, inputs, items):
            return 1.0
        steps = trainer.args.gradient_accumulation_steps
        # An epoch's last optimizer step may have fewer micro-batches than `steps`.
        micro_batches = trainer.current_gradient_accumulation_steps
        requested_steps = requested.gradient_accumulation_steps
        requested_micro_batches = -(-micro_batches * requested_steps // steps)
        rank_factor: float = 1.0
        if trainer.args.average_tokens_across_devices and items is not None:
            # The Trainer multiplies the loss by the number of ranks.
            rank_factor = requested.ranks / trainer.args.world_size
        if not self._has_logged:
            self._has_logged = True
            log.info(
                "transformers: the loss ignores num_items_in_batch, so the Trainer adds up the "
                "means of a step's micro-batches; this attempt has %d × %d samples in a step, and "
                "weights them like the requested %d × %d. A mean over tokens counts each "
                "micro-batch alike",
                steps,
                trainer.args.per_device_train_batch_size,
                requested_steps,
                requested.batch_size,
            )
        return float(requested_micro_batches / micro_batches * rank_factor)
