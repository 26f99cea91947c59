"""Recovery inside the steps of transformers' ``Trainer``.

Loader, counters, callbacks, logging, clipping and checkpoints stay the Trainer's own: its
``training_step``, ``prediction_step`` and its accelerator's ``backward`` are wrapped.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robust_train.attempt.run import Run, live_of
from robust_train.compat import (
    TOKENS_SEEN,
    figures_of_passes,
    has_own_inputs,
    prepare_inputs,
    shifts_labels,
)
from robust_train.integrations.steering import InStep, OpenStep, framework
from robust_train.model.spec import AttemptSpec
from robust_train.step.part_runner import CannotSplitError
from robust_train.step.ranks import of_all_ranks
from robust_train.step.reachable import STEPS_IN_BACKWARD
from robust_train.step.rng import GeneratorStates
from robust_train.step.splitting import Part, length_of, part_of

log = logging.getLogger("robust_train.integrations")

_transformers: Any = framework("transformers")
_TrainerCallback: Any = _transformers.TrainerCallback
_IGNORED = -100  # the label of positions without loss


def recover_in_steps(trainer: Any, run: Run) -> None:
    """Repeat steps and evaluations of ``trainer`` in smaller parts if memory runs out."""
    args = trainer.args
    loss = TrainersLoss(trainer)
    in_step = InStep(run, "transformers")
    accumulation = args.gradient_accumulation_steps, run.world_size
    spec = live_of(run).parts.asked
    if spec and (spec.gradient_accumulation_steps, spec.ranks) != accumulation:
        loss.weigh_as(spec)
    if args.optim in ("lomo", "adalomo"):
        in_step.keep_batch(f"optim={args.optim.value} {STEPS_IN_BACKWARD}")
        return
    reason = _why_not(trainer)
    if reason is not None:
        in_step.say(reason, on_all_ranks=True)
        _evaluate_in_own_batches(trainer, run)
    else:
        trainer.add_callback(StepsInParts(trainer, in_step, loss))


def _evaluate_in_own_batches(trainer: Any, run: Run) -> None:
    """Evaluate in this attempt's batches, for the job's cannot be repeated in parts."""
    args = trainer.args
    spec = live_of(run).parts.asked
    batch_size = args.per_device_train_batch_size
    evaluated = args.per_device_eval_batch_size
    if spec is None or batch_size == spec.batch_size or evaluated != spec.batch_size:
        return
    args.per_device_eval_batch_size = batch_size
    log.warning(
        "transformers: evaluates in batches of %d, no longer %d, so eval_loss, a mean over "
        "batches, may differ from that of earlier attempts",
        batch_size,
        spec.batch_size,
    )


class TrainersLoss:
    """The items that a ``Trainer``'s loss averages over, found out with two samples."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._compute = trainer.compute_loss
        self._is_sum: bool | None = None
        self._shifts: bool | None = None
        self._asked: AttemptSpec | None = None
        self._has_said = False

    # --- in an attempt that splits the batch in another way than the job was asked for ---

    def weigh_as(self, spec: AttemptSpec) -> None:
        """Give losses that the Trainer adds up although they are means of their micro-batch the
        weight that they have with the split of ``spec``."""
        self._asked = spec
        self._trainer.compute_loss = self._compute_weighted

    def _compute_weighted(self, model: nn.Module, inputs: Any, *args: Any, **named: Any) -> Any:
        items = named.get("num_items_in_batch")
        weight = self._weight(model, inputs, items) if model.training else 1.0
        result = self._compute(model, inputs, *args, **named)
        if weight == 1.0:
            return result
        if isinstance(result, tuple):
            loss, outputs = result
            return loss * weight, outputs
        return result * weight

    def _weight(self, model: nn.Module, inputs: Any, items: Any) -> float:
        trainer = self._trainer
        spec = self._asked
        assert spec is not None
        is_scaled = trainer.loss_is_scaled_for_ga
        if is_scaled is None:
            has_items = trainer.model_accepts_loss_kwargs and items is not None
            is_scaled = has_items or trainer.compute_loss_func is not None
        if not is_scaled or self.adds_up(model, inputs, items):
            return 1.0
        steps = trainer.args.gradient_accumulation_steps
        now = trainer.current_gradient_accumulation_steps
        # fewer in an epoch's last step
        before = -(-now * spec.gradient_accumulation_steps // steps)
        of_ranks: float = 1.0
        if trainer.args.average_tokens_across_devices and items is not None:
            # the Trainer multiplies by their number
            of_ranks = spec.ranks / trainer.args.world_size
        if not self._has_said:
            self._has_said = True
            log.info(
                "transformers: the loss ignores num_items_in_batch, so the Trainer adds up the "
                "means of a step's micro-batches; they are weighted as the job's first %d × %d, "
                "now that there are %d × %d. A mean over tokens counts each micro-batch alike",
                spec.gradient_accumulation_steps,
                spec.batch_size,
                steps,
                trainer.args.per_device_train_batch_size,
            )
        return float(before / now * of_ranks)

    # --- two samples ---

    def adds_up(self, model: nn.Module, data: Any, items: Any) -> bool:
        """Return whether losses are divided by the step's items, so that those of parts add up.

        What the Trainer takes for such a loss may ignore the count.
        """
        if items is None or self._trainer.loss_is_scaled_for_ga is False:
            return False
        if self._is_sum is None:
            few = part_of(data, 0, 2)
            once = self._of(model, few, items)
            twice = self._of(model, few, items * 2)
            # the mean over samples without labels is NaN
            is_mean = bool(twice.abs() <= 0.75 * once.abs())
            self._is_sum = all(of_all_ranks(is_mean)) if self._asked else is_mean
        return self._is_sum

    def items(self, model: nn.Module, data: Any, items: Any = None) -> float | Tensor:
        """Return of how many items the loss over ``data`` is a mean."""
        labels = data.get("shift_labels", data.get("labels"))
        if not isinstance(labels, Tensor) or labels.is_floating_point() or not labels.ndim:
            return length_of(data)
        if "shift_labels" not in data and labels.ndim > 1:
            if items is None:
                items = labels.ne(_IGNORED).sum()
            # what adds up is divided by the Trainer's count
            adds_up = self._trainer.model_accepts_loss_kwargs and self.adds_up(model, data, items)
            if shifts_labels(self._trainer) if adds_up else self._shifts_labels(model, data):
                labels = labels[..., 1:]
        return labels.ne(_IGNORED).sum()

    def _shifts_labels(self, model: nn.Module, data: Any) -> bool:
        """Return whether a mean over labels leaves out the first of each sample."""
        few = part_of(data, 0, 2)
        labels = few["labels"]
        if self._shifts is None and bool(labels[..., 0].ne(_IGNORED).any()):
            without = labels.clone()
            without[..., 0] = _IGNORED
            items = labels.ne(_IGNORED).sum()
            loss_of_few = self._of(model, few, items)
            other = self._of(model, type(few)({**few, "labels": without}), items)
            self._shifts = bool(torch.isclose(loss_of_few, other, rtol=1e-5, atol=0))
        return shifts_labels(self._trainer) if self._shifts is None else self._shifts

    @torch.no_grad()
    def _of(self, model: nn.Module, data: Any, items: Any) -> Tensor:
        """Return the loss of ``data`` in evaluation, without side effects."""
        was_training = model.training
        generators = GeneratorStates()
        model.eval()
        try:
            return self.of(model, data, items)
        finally:
            model.train(was_training)
            generators.restore()

    def of(self, model: nn.Module, data: Any, items: Any) -> Tensor:
        """Return the loss that the Trainer computes for ``data``, without a backward pass."""
        logged = LoggedOfPasses(self._trainer)
        try:
            with self._trainer.compute_loss_context_manager():
                inputs = prepare_inputs(self._trainer, data)
                loss: Tensor = self._compute(model, inputs, num_items_in_batch=items)
        finally:
            logged.restore()
        return loss


class LoggedOfPasses:
    """The current values that TRL's trainers collect of each pass until they log the mean."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._lists = {}
        for mode, lists in figures_of_passes(trainer).items():
            self._lists[mode] = {name: list(values) for name, values in lists.items()}
        self._tokens = getattr(trainer, TOKENS_SEEN, None)

    def restore(self) -> None:
        """Go back to this moment."""
        for mode, lists in figures_of_passes(self._trainer).items():
            lists.clear()
            lists.update((name, list(values)) for name, values in self._lists.get(mode, {}).items())
        if self._tokens is not None:
            setattr(self._trainer, TOKENS_SEEN, self._tokens)

    def join(self, weights: Sequence[float]) -> None:
        """Merge the values that passes with these ``weights`` have added since."""
        for mode, lists in figures_of_passes(self._trainer).items():
            for name, values in lists.items():
                count = len(self._lists.get(mode, {}).get(name, ()))
                added = values[count:]
                if len(added) == len(weights) and any(weights):
                    shares = zip(added, weights, strict=True)
                    values[count:] = [sum(v * w for v, w in shares) / sum(weights)]


class StepsInParts(_TrainerCallback):  # type: ignore[misc]
    """The wrapped methods, and the step in progress."""

    def __init__(self, trainer: Any, in_step: InStep, loss: TrainersLoss) -> None:
        self._trainer = trainer
        self._loss = loss
        self._in_step = in_step
        self._step: OpenStep | None = None
        self._weight = 1.0  # the current part's weight
        self._is_weighted = True
        self._training_step = trainer.training_step
        self._prediction_step = trainer.prediction_step
        self._backward = trainer.accelerator.backward
        trainer.training_step = self.training_step
        trainer.prediction_step = self.prediction_step
        trainer.accelerator.backward = self.backward

    def on_step_begin(self, *args: Any, **named: Any) -> None:
        """Forget a step that was left before its last batch. Its gradients stay."""
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
        """Run the Trainer's method for each part, and return the batch's share of the step's
        loss."""
        if self._step is None:
            on_rewind = LoggedOfPasses(self._trainer).restore
            self._step = self._in_step.begin(model, on_rewind=on_rewind)
        if self._step is None:
            loss: Tensor = self._training_step(model, inputs, num_items_in_batch, **more)
            return loss

        passes = _Passes(self._trainer)

        def body(part: Part) -> Tensor:
            self._weight = part.weight
            self._is_weighted = part.weight in (0.0, 1.0)
            try:
                with passes.part(part):
                    loss = self._training_step(model, part.data, num_items_in_batch, **more)
            finally:
                self._weight = 1.0
            if not self._is_weighted:
                name = type(self._trainer).__name__
                raise CannotSplitError(
                    f"{name}.training_step does not call self.accelerator.backward"
                )
            return _share(loss, part.weight).detach()

        def count(data: Any) -> float | Tensor:
            if self._loss.adds_up(model, data, num_items_in_batch):
                return 1.0
            return self._loss.items(model, data, num_items_in_batch)

        is_last = self._trainer.accelerator.gradient_state.sync_gradients
        results = self._step.run_batch(
            inputs,
            body,
            count=count,
            is_last=is_last,
            loss_of=lambda data: self._loss.of(model, data, num_items_in_batch),
            function=self._trainer.compute_loss,
        )
        if is_last:
            self._step = None
        shares: list[Tensor] = [share for share, _ in results]
        return sum(shares[1:], shares[0]).to(self._trainer.args.device)

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's method for each part, and return mean loss, logits and labels of the
        batch."""
        passes = _Passes(self._trainer)

        def body(part: Part) -> Any:
            with passes.part(part):
                return self._prediction_step(model, part.data, *args, **kwargs)

        outcomes = self._in_step.evaluate(model, inputs, body)
        if len(outcomes) == 1:
            return outcomes[0][0]
        results = (result for result, _ in outcomes)
        losses, logits, labels = zip(*results, strict=True)
        loss = None
        if losses[0] is not None:
            items = [float(self._loss.items(model, part.data)) for _, part in outcomes]
            pairs = zip(losses, items, strict=True)
            loss = sum(_share(result, n / max(sum(items), 1)) for result, n in pairs)
        return loss, _concatenated(logits), _concatenated(labels)


def _concatenated(parts: Sequence[Any]) -> Any:
    concat = _transformers.trainer_pt_utils.nested_concat
    return None if parts[0] is None else functools.reduce(concat, parts)


class _Passes:
    """The passes over the parts of a batch, which are logged together."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._before = LoggedOfPasses(trainer)
        self._weights: list[float] = []

    @contextlib.contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """Keep the values logged within the block, unless it raises. After a batch's last part,
        join the values of all parts."""
        before = LoggedOfPasses(self._trainer)
        if not part.start:
            self._before = before
            self._weights = []
        try:
            yield
        except BaseException:
            before.restore()
            raise
        if not figures_of_passes(self._trainer) or part.is_whole:
            return
        self._weights.append(_next_tokens(part.data))
        if part.is_last:
            self._before.join(self._weights)


def _next_tokens(data: Any) -> float:
    """Return of how many tokens TRL's figures of a pass are means, whatever the Trainer counts: the
    first of a sample is predicted by none."""
    labels = data.get("shift_labels", data.get("labels"))
    if not isinstance(labels, Tensor) or labels.ndim < 2:
        return length_of(data)
    if "shift_labels" not in data:
        labels = labels[..., 1:]
    return float(labels.ne(_IGNORED).sum())


def _share(loss: Tensor, weight: float) -> Tensor:
    if weight == 1.0:
        return loss
    # the mean of an empty part is NaN, also when multiplied by 0
    return loss * weight if weight else torch.zeros_like(loss)


def _why_not(trainer: Any) -> str | None:
    """Return what makes it impossible to run a step in parts, if anything."""
    args = trainer.args
    kind = trainer.accelerator.distributed_type.value
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        return f"the model is run by {kind}"
    if getattr(trainer.accelerator, "parallelism_config", None) is not None:
        return "parallelism_config: the ranks share a sample"
    if args.torch_compile and args.torch_compile_mode in ("reduce-overhead", "max-autotune"):
        return f"torch_compile_mode={args.torch_compile_mode} captures CUDA graphs"
    if has_own_inputs(trainer, _transformers.Trainer):
        return f"{type(trainer).__name__}._prepare_inputs makes batches of its own"
    return None
