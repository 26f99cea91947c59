"""Recovery inside the steps of transformers' ``Trainer``.

Loader, counters, callbacks, logging, clipping and checkpoints stay the Trainer's own: its
``training_step``, ``prediction_step`` and its accelerator's ``backward`` are wrapped.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor, nn

from robust_train.attempt.run import Run
from robust_train.compat import prepared_inputs, prepares_inputs_itself, shifts_labels
from robust_train.config.trainers import require
from robust_train.integrations.steering import CannotSplit, InStep, OpenStep
from robust_train.step.splitting import Part, length_of, part_of

_transformers: Any = require(
    "transformers", "robust_train.integrations.transformers", extra="transformers"
)
_TrainerCallback: Any = _transformers.TrainerCallback
_IGNORED = -100  # the label of positions without loss


def recover_in_steps(trainer: Any, run: Run) -> None:
    """Repeat steps and evaluations of ``trainer`` in smaller parts where memory runs out."""
    in_step = InStep(run, "transformers")
    if (reason := _why_not(trainer)) is not None:
        in_step.say(reason, on_all_ranks=True)
    else:
        trainer.add_callback(StepsInParts(trainer, in_step))


class StepsInParts(_TrainerCallback):  # type: ignore[misc]
    """The wrapped methods, and the step in progress."""

    def __init__(self, trainer: Any, in_step: InStep) -> None:
        self._trainer = trainer
        self._in_step = in_step
        self._step: OpenStep | None = None
        self._shares: list[Tensor] = []  # of the step's loss, a part each
        self._logged: Tensor | float = 0.0  # what the Trainer got of it
        self._weight = 1.0  # of the part in progress
        self._is_weighted = True
        self._is_sum: bool | None = None
        self._training_step = trainer.training_step
        self._prediction_step = trainer.prediction_step
        self._backward = trainer.accelerator.backward
        trainer.training_step = self.training_step
        trainer.prediction_step = self.prediction_step
        trainer.accelerator.backward = self.backward

    def on_step_begin(self, *args: Any, **named: Any) -> None:
        """Forget a step that was left before its last batch; its gradients stay."""
        if self._step is not None:
            self._step.leave()
        self._step = None

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run the accelerator's backward pass for this part's share of the batch's loss."""
        self._is_weighted = True
        if self._weight:
            self._backward(_share(loss, self._weight), **options)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None, **more: Any
    ) -> Tensor:
        """Run the Trainer's for each part; return what the step's loss has grown by."""
        if self._step is None:
            self._shares = []
            self._step, self._logged = (
                self._in_step.begin(model, on_rewind=self._shares.clear),
                0.0,
            )
        if self._step is None:
            loss: Tensor = self._training_step(
                model, inputs, num_items_in_batch, **more
            )
            return loss

        def body(part: Part) -> None:
            self._weight = part.weight
            self._is_weighted = part.weight in (0.0, 1.0)
            try:
                loss = self._training_step(model, part.data, num_items_in_batch, **more)
            finally:
                self._weight = 1.0
            if not self._is_weighted:
                name = type(self._trainer).__name__
                raise CannotSplit(
                    f"{name}.training_step does not call self.accelerator.backward"
                )
            self._shares.append(_share(loss, part.weight).detach())

        def count(data: Any) -> float | Tensor:
            return (
                1.0
                if self.adds_up(model, data, num_items_in_batch)
                else self.items(data)
            )

        is_last = self._trainer.accelerator.gradient_state.sync_gradients
        samples = self._in_step.samples_of(inputs)
        self._step.run_batch(inputs, samples, body, count=count, is_last=is_last)
        # if the step started over, the earlier batches' losses were computed again
        total = functools.reduce(operator.add, self._shares)
        loss = total.to(self._trainer.args.device) - self._logged
        self._logged = total
        if is_last:
            self._step = None
        return loss

    def prediction_step(
        self, model: nn.Module, inputs: Any, *rest: Any, **more: Any
    ) -> Any:
        """Run the Trainer's for each part; return mean loss, logits and labels of the batch."""
        found = self._in_step.evaluate(
            model,
            inputs,
            lambda part: self._prediction_step(model, part.data, *rest, **more),
        )
        if len(found) == 1:
            return found[0][0]
        losses, *tensors = zip(*(result for result, _ in found), strict=True)
        loss = None
        if losses[0] is not None:
            items = [float(self.items(part.data)) for _, part in found]
            shares = [
                _share(one, n / max(sum(items), 1))
                for one, n in zip(losses, items, strict=True)
            ]
            loss = functools.reduce(operator.add, shares)
        concat = _transformers.trainer_pt_utils.nested_concat
        return loss, *(
            None if parts[0] is None else functools.reduce(concat, parts)
            for parts in tensors
        )

    def items(self, data: Any) -> float | Tensor:
        """Return of how many items the loss over ``data`` is a mean."""
        labels = data.get("shift_labels", data.get("labels"))
        if (
            not isinstance(labels, Tensor)
            or labels.is_floating_point()
            or not labels.ndim
        ):
            return length_of(data)
        if (
            "shift_labels" not in data
            and shifts_labels(self._trainer)
            and labels.ndim > 1
        ):
            labels = labels[..., 1:]
        return labels.ne(_IGNORED).sum()

    def adds_up(self, model: nn.Module, data: Any, items: Any) -> bool:
        """Return whether losses are divided by the step's items, so that those of parts add up.

        What the Trainer takes for such a loss may ignore the count: two samples show it.
        """
        if items is None or self._trainer.loss_is_scaled_for_ga is False:
            return False
        if self._is_sum is None:
            trainer, few = self._trainer, part_of(data, 0, 2)
            model.eval()
            with torch.no_grad(), trainer.compute_loss_context_manager():
                once, twice = (
                    trainer.compute_loss(
                        model, prepared_inputs(trainer, few), num_items_in_batch=n
                    )
                    for n in (items, items * 2)
                )
            model.train()
            # the mean over samples without labels is NaN
            self._is_sum = bool(twice.abs() <= 0.75 * once.abs())
        return self._is_sum


def _share(loss: Tensor, weight: float) -> Tensor:
    # the mean of an empty part is NaN, also when multiplied by 0
    return (
        loss if weight == 1.0 else loss * weight if weight else torch.zeros_like(loss)
    )


def _why_not(trainer: Any) -> str | None:
    """Return what makes it impossible to run a step in parts, if anything."""
    args, kind = trainer.args, trainer.accelerator.distributed_type.value
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        return f"the model is run by {kind}"
    if getattr(trainer.accelerator, "parallelism_config", None) is not None:
        return "parallelism_config: the ranks share a sample"
    if args.optim in ("lomo", "adalomo"):
        return f"optim={args.optim.value} updates weights within the backward pass"
    if args.torch_compile and args.torch_compile_mode in (
        "reduce-overhead",
        "max-autotune",
    ):
        return f"torch_compile_mode={args.torch_compile_mode} captures CUDA graphs"
    if prepares_inputs_itself(trainer, _transformers.Trainer):
        return f"{type(trainer).__name__}._prepare_inputs makes batches of its own"
    return None
