"""Recovery inside the steps of Lightning's ``Trainer``.

Loader, counters, batch hooks, loggers, clipping, schedulers and checkpoints stay the Trainer's own:
its automatic optimization gets a subclass that runs the closure for parts of a batch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler

from robust_train.attempt.run import Run
from robust_train.compat import (
    LATEST,
    LOGGED,
    UPDATES,
    accumulates_now,
    logged_by,
)
from robust_train.integrations.metric_objects import MetricObjects, States
from robust_train.integrations.sample_order import SampleOrder
from robust_train.integrations.steering import InStep, OpenStep, framework
from robust_train.step.splitting import Part

log = logging.getLogger("robust_train.integrations")

_automatic: Any = framework("lightning.pytorch.loops.optimization.automatic")
_strategies: Any = framework("lightning.pytorch.strategies")
_LightningModule: Any = framework("lightning.pytorch").LightningModule
_AutomaticOptimization: Any = _automatic._AutomaticOptimization


def recover_in_steps(
    trainer: Any,
    model: Any,
    run: Run,
    callback: Any,
) -> None:
    """Repeat steps and evaluations of ``trainer`` in smaller parts where memory runs out."""
    in_step, logged = InStep(run, "Lightning"), _Logged(trainer)
    reason = why_not(trainer, model)
    _keep_evaluation_batches(
        trainer,
        run,
        callback.micro_batch,
        can_split=not reason,
    )
    if reason is not None:
        in_step.say(reason, on_all_ranks=True)
        return
    if model.automatic_optimization:
        in_parts = _InParts(trainer, in_step, logged, callback)
        trainer.fit_loop.epoch_loop.automatic_optimization = in_parts
    else:
        reason = (
            f"{type(model).__name__}.training_step runs the backward passes by itself"
        )
        in_step.say(f"{reason} (automatic_optimization=False)", on_all_ranks=True)
    for name in ("validation_step", "test_step", "predict_step"):
        step = partial(
            _evaluate,
            trainer,
            in_step,
            logged,
            getattr(trainer.strategy, name),
        )
        setattr(trainer.strategy, name, step)


def _keep_evaluation_batches(
    trainer: Any,
    run: Run,
    micro_batch: int,
    *,
    can_split: bool,
) -> None:
    """Let loaders of validation and test have the batches that they had in the job's first attempt;
    their figures may depend on that, and so does what ``limit_val_batches`` leaves out."""
    asked = micro_batch if run.asked is None else run.asked.batch_size
    if asked == micro_batch:
        return
    process = trainer.strategy.process_dataloader

    @functools.cache
    def say() -> None:
        if can_split:
            log.info(
                "Lightning: evaluates in batches of %d, as in the job's first attempt",
                asked,
            )
            return
        log.warning(
            "Lightning: evaluates in batches of %d, no longer %d: limit_val_batches=2 and the like "
            "are less data, and figures of batches may differ from those of earlier attempts",
            micro_batch,
            asked,
        )

    def process_dataloader(loader: Any) -> Any:
        batches: Any = getattr(loader, "batch_sampler", None)
        is_of_evaluation = type(batches) is BatchSampler and not isinstance(
            batches.sampler, SampleOrder
        )
        if is_of_evaluation and batches.batch_size == micro_batch:
            say()
            if can_split:
                batches.batch_size = asked
        return process(loader)

    trainer.strategy.process_dataloader = process_dataloader


class _InParts(_AutomaticOptimization):  # type: ignore[misc]
    """Lightning's automatic optimization, whose closure may be run for parts of the batch."""

    def __init__(
        self,
        trainer: Any,
        in_step: InStep,
        logged: _Logged,
        callback: Any,
    ) -> None:
        super().__init__(trainer)
        self._callback = callback
        self._in_step = in_step
        self._logged = logged
        self._step: OpenStep | None = None
        self._zero_grad: Callable[[], None] | None = None

    def _make_closure(
        self,
        kwargs: Any,
        optimizer: Any,
        batch_idx: int,
    ) -> Any:
        closure = super()._make_closure(
            kwargs,
            optimizer,
            batch_idx,
        )
        if isinstance(optimizer, torch.optim.LBFGS) and self._in_step.is_on:
            self._in_step.is_on = False
            self._in_step.say("LBFGS runs the closure several times a step")
        # without a backward pass: weight averaging collects BatchNorm's statistics
        if self._in_step.is_on and "batch" in kwargs and not self._skip_backward:
            whole, runs = (
                closure.closure,
                iter(
                    [
                        partial(
                            self._run,
                            kwargs,
                            optimizer,
                            batch_idx,
                        )
                    ]
                ),
            )
            # only the first call is the step's: optimizers of two passes have another gradient
            closure.closure = lambda *args, **named: next(runs, whole)()
        return closure

    @torch.enable_grad()
    def _run(
        self,
        kwargs: Any,
        optimizer: Any,
        batch_idx: int,
    ) -> Any:
        """Run the closure for each part of the batch; return the batch's result."""
        trainer, batch = self.trainer, kwargs["batch"]
        zero_grad = self._make_zero_grad_fn(batch_idx, optimizer)
        if self._step is not None and zero_grad is not None:
            self._step = None  # the last one was left before its last batch
        if self._step is None:
            self._zero_grad = zero_grad
            restore = partial(self._logged.restore, self._logged.state())
            self._step = self._in_step.begin(
                trainer.model,
                on_rewind=restore,
                keeps_gradients=False,
            )
            if self._step is None:
                return (
                    super()
                    ._make_closure(
                        kwargs,
                        optimizer,
                        batch_idx,
                    )
                    .closure()
                )

        number = self._callback.done

        def body(part: Part) -> Any:
            # an earlier batch that is repeated has its own weight
            self._callback.done = number
            is_whole, weight = part.data is batch, part.weight
            inputs = kwargs if is_whole else type(kwargs)(kwargs, batch=part.data)

            def step() -> Any:
                result = self._training_step(inputs)
                if result.closure_loss is not None:
                    scale = trainer.accumulate_grad_batches
                    self._logged.loss = result.closure_loss.detach() * scale
                if weight != 1.0 and result.closure_loss is not None:
                    result.closure_loss = result.closure_loss * weight
                    result.loss = result.closure_loss.detach().clone()
                return result

            backward, zero_grad = self._make_backward_fn(optimizer), self._zero_once
            closure = _automatic.Closure(
                step,
                backward,
                self._zero_grad and zero_grad,
            )
            with self._logged.part(
                part,
                samples,
                is_whole=is_whole,
            ):
                return closure.closure()

        is_last = not accumulates_now(trainer)
        samples = self._in_step.samples_of(batch)
        found = self._step.run_batch(
            batch,
            samples,
            body,
            is_last=is_last,
        )
        self._logged.batch_ends(batch, syncs=is_last)
        if is_last:
            self._step = None
        return found[0][0] if len(found) == 1 else self._merged(found)

    def _merged(self, found: Sequence[tuple[Any, Part]]) -> Any:
        merged = _automatic.ClosureResult(None)
        merged.extra = self._in_step.joined(
            [(result.extra, part) for result, part in found]
        )
        losses = [result.loss for result, _ in found if result.loss is not None]
        merged.loss = sum(losses) if losses else None
        return merged

    def _zero_once(self) -> None:
        zero_grad, self._zero_grad = self._zero_grad, None
        if zero_grad is not None:
            zero_grad()


def _evaluate(
    trainer: Any,
    in_step: InStep,
    logged: _Logged,
    inner: Any,
    batch: Any,
    *rest: Any,
) -> Any:
    """Run a validation, test or prediction step for each part of a batch."""

    samples = in_step.samples_of(batch) if in_step.is_on else None

    def body(part: Part) -> Any:
        with logged.part(
            part,
            samples,
            is_whole=part.data is batch,
        ):
            result = inner(part.data, *rest)
            loss = result.get("loss") if isinstance(result, dict) else result
            logged.loss = loss if isinstance(loss, Tensor) else None
            return result

    found = in_step.evaluate(trainer.model, batch, body)
    logged.batch_ends(batch, syncs=True)
    return in_step.joined(found)


class _Logged:
    """What ``self.log`` has taken, as if each batch was one part."""

    def __init__(self, trainer: Any) -> None:
        self.loss: Tensor | None = None  # of the part in progress
        self._trainer = trainer
        self._objects = MetricObjects(lambda: trainer.lightning_module)
        self._of_parts: dict[str, list[_OfPart]] = {}
        self._whole: dict[str, Tensor] = {}  # of the last batch that was split
        self._before: _Logs = {}, []  # at the batch's start
        self._has_warned: set[str] = set()
        self._in_part = False
        self._reduce = trainer.strategy.reduce
        if trainer.world_size > 1:
            trainer.strategy.reduce = self.reduce

    def reduce(
        self,
        tensor: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Reduce over ranks; within a part, which others may not have, leave as it is."""
        return tensor if self._in_part else self._reduce(tensor, *args, **options)

    @contextlib.contextmanager
    def part(
        self,
        part: Part,
        samples: int | None,
        *,
        is_whole: bool,
    ) -> Iterator[None]:
        """Let values logged within the block count as a mean over the part's samples, of so many
        ``samples`` in the batch."""
        before, results = self.state(), logged_by(self._trainer)
        if not part.start:
            self._of_parts, self._whole, self._before = {}, {}, before
            self._objects.batch_begins(before[1])
        self.loss = None
        is_one_of_several = not is_whole or self._trainer.world_size > 1
        if results is not None:
            results.batch, results.batch_size = part.data, None
        for _, metric in self._values() if is_one_of_several else ():
            setattr(metric, LATEST, None)
            if not is_whole and _is_extreme_or_sum(metric):
                metric.value = torch.full_like(metric.value, _nothing(metric.meta))
        self._in_part = True
        try:
            with (
                contextlib.nullcontext() if is_whole else self._objects.part(len(part))
            ):
                yield
        except BaseException:
            self.restore(before)
            raise
        finally:
            self._in_part = False
        for key, metric in self._values() if is_one_of_several else ():
            known = before[0].get(key, {})
            value = getattr(metric, LATEST)
            if not is_whole and _is_extreme_or_sum(metric):
                # also if it is logged for the epoch alone
                is_new = getattr(metric, UPDATES) != known.get(UPDATES, 0)
                value = metric.value if is_new else None
            if value is not None:
                found = _OfPart(value, len(part), self.loss)
                self._of_parts.setdefault(key, []).append(found)
            elif known:
                setattr(metric, LATEST, known[LATEST])
        if not is_whole and part.stop == samples:
            self._join()

    def _join(self) -> None:
        """Make one value of a batch of those of its parts."""
        exact = self._objects.batch_ends()
        for key, metric in self._values():
            found = self._of_parts.get(key)
            if not found:
                continue
            if metric.is_tensor:
                self._whole[key] = whole = self._reduced(key, metric, found)
                if _is_extreme_or_sum(metric):
                    self._count_once(key, metric, whole)
            elif any(metric.value is one for one in exact):
                setattr(metric, LATEST, getattr(metric.value, LATEST))
            else:
                setattr(metric, LATEST, _mean(found))

    def _count_once(
        self,
        key: str,
        metric: Any,
        whole: Tensor,
    ) -> None:
        """Let the epoch's figure go on from the batch's start by this value alone."""
        known = self._before[0].get(key)
        both = [whole] if known is None else [known["value"].to(whole), whole]
        metric.value = torch.as_tensor(metric.meta.reduce_fx(torch.stack(both)))

    def batch_ends(
        self,
        batch: Any,
        *,
        syncs: bool,
    ) -> None:
        """Show a batch's values; with ``syncs`` of all ranks."""
        for key, metric in self._values():
            if metric.is_tensor and (found := self._of_parts.get(key)):
                value = self._whole.get(key, found[-1].value)
                value = metric.meta.sync(value) if syncs else value
                if metric.meta.on_step:
                    setattr(metric, LATEST, value)
                if not metric.meta.on_epoch:
                    metric.value = value
        results = logged_by(self._trainer)
        if results is not None and results.batch is not batch:
            results.batch, results.batch_size = batch, None

    def state(self) -> _Logs:
        """Return what was logged so far, and what torchmetrics objects hold."""
        values = {
            key: {
                name: getattr(metric, name) for name in LOGGED if hasattr(metric, name)
            }
            for key, metric in self._values()
        }
        return values, self._objects.state()

    def restore(self, state: _Logs) -> None:
        """Go back to a :meth:`state`."""
        values, objects = state
        for key, metric in self._values():
            if key not in values:
                del logged_by(self._trainer)[key]
            for name, value in values.get(key, {}).items():
                setattr(metric, name, value)
        self._objects.restore(objects)

    def _values(self) -> list[tuple[str, Any]]:
        return list((logged_by(self._trainer) or {}).items())

    def _reduced(
        self,
        key: str,
        metric: Any,
        found: list[_OfPart],
    ) -> Tensor:
        """Return a batch's value of those of its parts."""
        values = torch.stack([one.value for one in found])
        if metric.meta.is_mean_reduction or len(found) == 1:
            return _mean(found)
        if all(one.is_loss for one in found):
            return _mean(found)
        if all(float(one.value) == one.samples for one in found):
            return values.sum()
        name = metric.meta.reduce_fx.__name__
        is_count = metric.meta.is_sum_reduction and bool((values % 1 == 0).all())
        if not is_count and key not in self._has_warned:
            self._has_warned.add(key)
            log.warning(
                "self.log(%r, reduce_fx=%s): where a batch is split, its value is the %s of its "
                "parts' values, which is that of a %s over samples, not of a mean",
                metric.meta.name,
                *(name, name, name),
            )
        return torch.as_tensor(metric.meta.reduce_fx(values))


_Logs = tuple[dict[str, dict[str, Any]], States]


@dataclass(frozen=True)
class _OfPart:
    """A value that was logged of a part, and what its step returned."""

    value: Tensor
    samples: int
    loss: Tensor | None

    @property
    def is_loss(self) -> bool:
        """Whether the value is the loss, a mean over the samples."""
        loss = self.loss
        return (
            loss is not None
            and loss.ndim == 0
            and torch.isclose(
                loss.detach().to(self.value),
                self.value,
                rtol=1e-6,
                atol=0,
            ).item()
            is True
        )


def _is_extreme_or_sum(metric: Any) -> bool:
    """Return whether the epoch's figure has values of batches in it that are not their means."""
    meta = metric.meta
    return bool(metric.is_tensor and meta.on_epoch and not meta.is_mean_reduction)


def _nothing(meta: Any) -> float:
    """Return what a value begins with in an epoch."""
    if meta.is_sum_reduction:
        return 0.0
    return float("-inf") if meta.is_max_reduction else float("inf")


def _mean(found: list[_OfPart]) -> Tensor:
    values = torch.stack([one.value for one in found])
    if len(found) == 1:
        return values[0]
    sizes = values.new_tensor([one.samples for one in found])
    return (values * sizes).sum() / sizes.sum()


def why_not(trainer: Any, model: Any) -> str | None:
    """Return what makes it impossible to run a step in parts, if anything."""
    strategy = trainer.strategy  # DeepSpeed's and XLA's derive from DDP's
    if type(strategy) not in (
        _strategies.SingleDeviceStrategy,
        _strategies.DDPStrategy,
    ):
        return f"{type(strategy).__name__} runs the model"
    name = "optimizer_zero_grad"
    if getattr(type(model), name, None) not in (None, getattr(_LightningModule, name)):
        return f"{type(model).__name__}.optimizer_zero_grad decides about gradients"
    return None
