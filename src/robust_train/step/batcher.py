"""Runs training steps and validation in parts that fit into memory: `backward` and `forward`.

Programs use a :class:`MicroBatcher` directly or through ``run.backward``, and the integrations
through `open_step`, all in the process that trains. It remembers the size that fits from step to
step. A :class:`.engine.Step` runs each step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from robust_train.config.training_plans import MicroBatchPlan, SplitRule
from robust_train.model.errors import UserError
from robust_train.step import ranks
from robust_train.step.engine import Step
from robust_train.step.micro_batch_size import MicroBatchSize, SizeState
from robust_train.step.part_runner import Batch, Body, Results
from robust_train.step.reachable import Models, models_of
from robust_train.step.recorder import OnEvent, Recorder, ignore_event
from robust_train.step.shared_step import SharedStep
from robust_train.step.split_watch import SplitWatch
from robust_train.step.splitting import Count, Length, Part, Parts, Split
from robust_train.step.step_start import PartStart, StepStart, Watch

if TYPE_CHECKING:
    from robust_train.step.probing import FoundBatchSize

T = TypeVar("T")
S = TypeVar("S", bound=Step[Any])
Backward = Callable[[Tensor], object]
SizeSearch = Callable[[int, Callable[[int], object], StepStart], "FoundBatchSize | None"]
"""Finds the largest size that fits. ``search(samples, run, start)`` calls ``run(size)`` for sizes
up to ``samples``, and returns None if that is not enough to find it."""


class MicroBatcher:
    """Splits batches so that they fit into memory, and remembers what fits.

    Args:
        batch_size: the maximum number of samples in a forward and backward pass. None starts with
            the whole batch.
        min_batch_size: parts of this size are not split further. If they still do not fit, the
            out-of-memory error is raised.
        gradient_accumulation_steps: the requested accumulation. Divisors of the effective batch are
            preferred.
        on_event: called with an event for each change of the size.
        search: finds the largest size that fits in the first step, in an attempt of the launcher.
        recorder: replaces ``on_event`` in an attempt of the launcher.
        exact: raise an error instead of logging a warning if splitting would change the loss.

    Raises:
        ValueError: a size is below 1.
    """

    def __init__(
        self,
        batch_size: int | None = None,
        *,
        min_batch_size: int = 1,
        gradient_accumulation_steps: int = 1,
        on_event: OnEvent = ignore_event,
        search: SizeSearch | None = None,
        recorder: Recorder | None = None,
        exact: bool = False,
    ) -> None:
        for name, value in (
            ("batch_size", batch_size),
            ("min_batch_size", min_batch_size),
            ("gradient_accumulation_steps", gradient_accumulation_steps),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be 1 or more")
        plan = MicroBatchPlan(batch_size, gradient_accumulation_steps, min_batch_size)
        self._training = MicroBatchSize(plan)
        self._validation = MicroBatchSize(plan)
        if not recorder:
            splits = SplitWatch(SplitRule(is_exact=exact))
            recorder = Recorder(self._current_step, on_event, splits=splits)
        self._recorder = recorder
        self._watch = Watch()
        self._search = search
        self._steps_begun = 0

    def _current_step(self) -> int:
        return self._steps_begun

    @property
    def training_size(self) -> MicroBatchSize:
        """The size in use for training, with the sizes at which memory ran out."""
        return self._training

    @property
    def size(self) -> int | None:
        """The maximum number of samples in a training pass. None: the whole batch."""
        return self._training.current

    def backward(
        self,
        loss_of: Callable[[Any], Any],
        batch: Any,
        model: Models = None,
        *,
        count: Count | None = None,
        split: Split | None = None,
        length: Length | None = None,
        backward: Backward | None = None,
        training: bool = True,
    ) -> Any:
        """Add the gradients of a batch's mean loss, and return that mean, detached::

            def loss_of(batch):                 # any part of the batch
                x, y = batch
                return cross_entropy(model(x.to(device)), y.to(device))

            loss = batcher.backward(loss_of, batch, model)

        If memory runs out, the step starts over with smaller parts. Gradients, buffers, plain
        attributes of modules and random generators are restored first. Before a batch is split for
        the first time, the loss of a part is compared with the losses of its halves. If they do not
        add up, for example with a contrastive loss, a warning says so, or an error with
        ``exact=True``.

        Args:
            loss_of: returns the mean loss of its part (a tensor with one element), or a tuple of
                that loss and any other value. Values that it stores outside modules stay there
                after a failed pass.
            batch: tensors, arrays or lists in any nesting of tuples, mappings and dataclasses, all
                with one sample per index of their first dimension.
            model: the module that learns, or several. None: the modules that ``loss_of`` closes
                over. Required with several ranks.
            count: returns the number of items that the loss of some data averages over, if the
                items are not the samples: tokens, or labels that are not -100. For a sum, use
                ``lambda data: 1``.
            split: ``split(batch, start, stop)``, if the batch cannot be sliced.
            length: returns the number of samples of such a batch, if that is not its ``len``.
            backward: runs the backward pass of a part's share of the loss, for example ``lambda
                loss: scaler.scale(loss).backward()``.
            training: False for validation, which computes the loss without a backward pass. Then
                only a part that fails is repeated.

        Returns:
            The mean loss, of shape ``()``. In training, it averages over the samples of all ranks.
            If ``loss_of`` returned tuples, a tuple of the mean loss and the list of the parts'
            other values.

        Raises:
            TypeError, ValueError: the number of samples is unknown or 0.
            UserError: the step of this model cannot be split. The message has the reason.
            RankFailure: a rank cannot continue.
        """
        parts = Parts.of(batch, length, split, count)
        if not parts.samples and ranks.here() is None:
            raise ValueError("The batch is empty, so its mean loss is undefined")
        step = self._begin("backward", loss_of, parts, model, training)
        start = step.start
        returns_more = False
        # The bounds and weights of parts whose loss is NaN, which do not count in this step.
        without_loss: dict[tuple[int, int], float] = {}

        def run_part(part: Part) -> tuple[Tensor, list[Any]]:
            nonlocal returns_more
            loss, more = _separate_loss(loss_of(part.data))
            returns_more = bool(more)
            weight = part.weight
            if without_loss:
                weight = _weight_among_others(part, without_loss)
            share = loss if weight == 1.0 else loss * weight
            if training and (weight or step.is_sharded):
                if model is None and start is not None:
                    start.notice(loss)
                if backward is None:
                    torch.autograd.backward(share)
                else:
                    backward(share)
            if not weight:
                # The loss of a part without items is NaN, even if multiplied by 0.
                return torch.zeros_like(share), more
            return share.detach(), more

        def loss_alone(data: Any) -> Tensor:
            loss, _ = _separate_loss(loss_of(data))
            return loss

        if training:
            self._probe(step, parts, run_part)
        results = step.run(Batch(parts, run_part, loss_alone, loss_of))
        if training and count is None and not step.is_sharded:
            while new := _parts_without_loss(results):
                self._recorder.log_parts_without_loss(len(new), len(results))
                without_loss.update(new)
                results = step.run_again()
        shares = [share for (share, _), _ in results]
        loss = sum(shares[1:], shares[0]) if shares else torch.zeros(())
        if training:
            # Counting labels on a GPU waits for the GPU, so items are counted only for other ranks.
            items = parts.items if step.is_shared else 1.0
            loss, returns_more = step.end(loss, items=items, returns_more=returns_more)
        else:
            step.leave()
        if returns_more:
            return loss, [more[0] for (_, more), _ in results]
        return loss

    def forward(
        self,
        function: Callable[[Any], T],
        batch: Any,
        model: Models = None,
        *,
        split: Split | None = None,
        length: Length | None = None,
    ) -> list[T]:
        """Call ``function`` for the parts of a batch, for validation or prediction.

        If memory runs out, the failed part is repeated in smaller parts. Call it under
        ``torch.no_grad()``. The arguments are those of `backward`.

        Returns:
            The results of ``function`` for the parts, in order. Each sample occurs once.
        """
        parts = Parts.of(batch, length, split)
        step = self._begin("forward", function, parts, model, training=False)

        def run_part(part: Part) -> T:
            return function(part.data)

        results = step.run(Batch(parts, run_part))
        step.leave()
        return [result for result, _ in results]

    def open_step(
        self, kind: Callable[..., S], model: nn.Module, shared: SharedStep, *, keeps_gradients: bool
    ) -> S:
        """Start a step whose batches a framework passes one at a time."""
        self._steps_begun += 1
        start = StepStart(self._watch, [model], keeps_gradients=keeps_gradients)
        return kind(self._training, start, shared, self._recorder)

    def open_evaluation(self, kind: Callable[..., S], model: nn.Module, shared: SharedStep) -> S:
        """Start a batch of a framework's validation."""
        self._recorder.speed.pause()
        return kind(
            self._validation,
            None,
            shared,
            self._recorder,
            training=False,
            part_start=partial(PartStart, [model], watch=self._watch),
        )

    def shrink(self, reason: str) -> tuple[int, int] | None:
        """Use the next smaller size from the next batch on, on request.

        Returns:
            The sizes before and after, or None if no smaller size is left.
        """
        sizes = self._training.shrink()
        if sizes:
            self._validation.shrink()
            self._recorder.log_change(sizes, reason)
        return sizes

    def state(self) -> dict[str, SizeState]:
        """Return the sizes in use, for a checkpoint."""
        return {"training": self._training.state(), "other": self._validation.state()}

    def restore(self, state: dict[str, SizeState]) -> None:
        """Restore a result of `state`, unless another batch size has been requested since."""
        self._training.restore(state["training"])
        self._validation.restore(state["other"])

    def _begin(
        self, name: str, function: Any, parts: Parts, model: Models, training: bool
    ) -> Step[Any]:
        if model is None and ranks.here() is not None:
            raise UserError(
                f"run.{name}: several ranks share a step: name the model, as in "
                f"run.{name}({getattr(function, '__name__', 'function')}, batch, model)"
            )
        if training:
            self._steps_begun += 1
            self._recorder.speed.batch_begins(parts.samples)
        else:
            self._recorder.speed.pause()
        size = self._training if training else self._validation
        models = models_of(model, function)
        shared = SharedStep(models, function)
        start = None
        if training or shared.is_sharded:
            start = StepStart(self._watch, models, function)
        return Step[Any](
            size,
            start,
            shared,
            self._recorder,
            training=training,
            part_start=partial(PartStart, models, function, watch=self._watch),
        )

    def _probe(self, step: Step[Any], parts: Parts, body: Body[Any]) -> None:
        """Search for the size before the first step, if a search was requested."""
        search = self._search
        self._search = None
        if search is None or step.start is None:
            return

        def run(size: int) -> None:
            body(parts.part(0, size))

        with step.undone_after_an_error():
            result = search(parts.samples, run, step.start)
        if result is not None:
            self._training.begin_at(result.batch_size)
            self._validation.begin_at(result.batch_size)


def _parts_without_loss(results: Results[Any]) -> dict[tuple[int, int], float]:
    """Return the bounds and weights of parts whose loss is NaN, unless every loss is NaN.

    A mean over labels is NaN in a part without labels, although the whole batch has a loss. Calling
    this waits for the device.
    """
    if len(results) < 2:
        return {}
    shares = torch.stack([share.float() for (share, _), _ in results])
    are_missing = shares.isnan().tolist()
    if all(are_missing):
        return {}
    without_loss = {}
    for (_, part), is_missing in zip(results, are_missing, strict=True):
        if is_missing:
            without_loss[part.start, part.stop] = part.weight
    return without_loss


def _weight_among_others(part: Part, without_loss: dict[tuple[int, int], float]) -> float:
    """Return a part's weight among the parts that have a loss, or 0 if it has no loss."""
    if (part.start, part.stop) in without_loss:
        return 0.0
    return part.weight / (1.0 - sum(without_loss.values()))


def _separate_loss(result: Any) -> tuple[Tensor, list[Any]]:
    """Return the loss in a function's result, and a list of the other value, if there is any."""
    loss = result
    more = []
    if isinstance(result, tuple) and len(result) == 2:
        loss = result[0]
        more = [result[1]]
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(()), more
    shape = f" of shape {tuple(result.shape)}" if isinstance(result, Tensor) else ""
    raise TypeError(
        "run.backward: the function has to return the mean loss of its part, a tensor with one "
        "element, or a tuple of that loss and anything else; it returned "
        f"a {type(result).__name__}{shape}"
    )
