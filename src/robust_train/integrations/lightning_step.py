"""Recovery inside the steps of Lightning's ``Trainer``.

Loader, counters, batch hooks, loggers, clipping, schedulers and checkpoints stay the Trainer's own:
its automatic optimization gets a subclass that runs the closure for parts of a batch.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from robust_train.attempt.run import Run
from robust_train.compat import LATEST, LOGGED, accumulates_now, logged_by
from robust_train.config.trainers import require
from robust_train.integrations.steering import InStep, OpenStep
from robust_train.step.splitting import Part

_NEEDED_BY = "robust_train.integrations.lightning"
_automatic: Any = require(
    "lightning.pytorch.loops.optimization.automatic", _NEEDED_BY, extra="lightning"
)
_strategies: Any = require(
    "lightning.pytorch.strategies", _NEEDED_BY, extra="lightning"
)
_LightningModule: Any = require(
    "lightning.pytorch", _NEEDED_BY, extra="lightning"
).LightningModule
_AutomaticOptimization: Any = _automatic._AutomaticOptimization


def recover_in_steps(trainer: Any, model: Any, run: Run, callback: Any) -> None:
    """Repeat steps and evaluations of ``trainer`` in smaller parts where memory runs out."""
    in_step, logged = InStep(run, "Lightning"), _Logged(trainer)
    if (reason := why_not(trainer, model)) is not None:
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
            _evaluate, trainer, in_step, logged, getattr(trainer.strategy, name)
        )
        setattr(trainer.strategy, name, step)


class _InParts(_AutomaticOptimization):  # type: ignore[misc]
    """Lightning's automatic optimization, whose closure may be run for parts of the batch."""

    def __init__(
        self, trainer: Any, in_step: InStep, logged: _Logged, callback: Any
    ) -> None:
        super().__init__(trainer)
        self._callback = callback
        self._in_step = in_step
        self._logged = logged
        self._step: OpenStep | None = None
        self._zero_grad: Callable[[], None] | None = None

    def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        closure = super()._make_closure(kwargs, optimizer, batch_idx)
        if isinstance(optimizer, torch.optim.LBFGS) and self._in_step.is_on:
            self._in_step.is_on = False
            self._in_step.say("LBFGS runs the closure several times a step")
        # without a backward pass: weight averaging collects BatchNorm's statistics
        if self._in_step.is_on and "batch" in kwargs and not self._skip_backward:
            whole, runs = (
                closure.closure,
                iter([partial(self._run, kwargs, optimizer, batch_idx)]),
            )
            # only the first call is the step's: optimizers of two passes have another gradient
            closure.closure = lambda *args, **named: next(runs, whole)()
        return closure

    @torch.enable_grad()
    def _run(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        """Run the closure for each part of the batch; return the batch's result."""
        trainer, batch = self.trainer, kwargs["batch"]
        zero_grad = self._make_zero_grad_fn(batch_idx, optimizer)
        if self._step is not None and zero_grad is not None:
            self._step = None  # the last one was left before its last batch
        if self._step is None:
            self._zero_grad = zero_grad
            restore = partial(self._logged.restore, self._logged.state())
            self._step = self._in_step.begin(
                trainer.model, on_rewind=restore, keeps_gradients=False
            )
            if self._step is None:
                return super()._make_closure(kwargs, optimizer, batch_idx).closure()

        number = self._callback.done

        def body(part: Part) -> Any:
            # an earlier batch that is repeated has its own weight
            self._callback.done = number
            is_whole, weight = part.data is batch, part.weight
            inputs = kwargs if is_whole else type(kwargs)(kwargs, batch=part.data)

            def step() -> Any:
                result = self._training_step(inputs)
                if weight != 1.0 and result.closure_loss is not None:
                    result.closure_loss = result.closure_loss * weight
                    result.loss = result.closure_loss.detach().clone()
                return result

            backward, zero_grad = self._make_backward_fn(optimizer), self._zero_once
            closure = _automatic.Closure(step, backward, self._zero_grad and zero_grad)
            if not part.start:
                self._logged.of_parts.clear()
            with self._logged.part(part.data, len(part), is_whole=is_whole):
                return closure.closure()

        is_last = not accumulates_now(trainer)
        found = self._step.run_batch(
            batch, self._in_step.samples_of(batch), body, is_last=is_last
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
        merged.loss = functools.reduce(operator.add, losses) if losses else None
        return merged

    def _zero_once(self) -> None:
        zero_grad, self._zero_grad = self._zero_grad, None
        if zero_grad is not None:
            zero_grad()


def _evaluate(
    trainer: Any, in_step: InStep, logged: _Logged, inner: Any, batch: Any, *rest: Any
) -> Any:
    """Run a validation, test or prediction step for each part of a batch."""

    def body(part: Part) -> Any:
        with logged.part(part.data, len(part), is_whole=part.data is batch):
            return inner(part.data, *rest)

    logged.of_parts.clear()
    found = in_step.evaluate(trainer.model, batch, body)
    logged.batch_ends(batch, syncs=True)
    return in_step.joined(found)


class _Logged:
    """What ``self.log`` has taken, as if each batch was one part."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.of_parts: dict[str, list[tuple[Tensor, int]]] = {}
        self._in_part = False
        self._reduce = trainer.strategy.reduce
        if trainer.world_size > 1:
            trainer.strategy.reduce = self.reduce

    def reduce(self, tensor: Any, *args: Any, **options: Any) -> Any:
        """Reduce over ranks; within a part, which others may not have, leave as it is."""
        return tensor if self._in_part else self._reduce(tensor, *args, **options)

    @contextlib.contextmanager
    def part(self, data: Any, samples: int, *, is_whole: bool) -> Iterator[None]:
        """Let values logged within the block count as a mean over ``data``'s samples."""
        before, results = self.state(), logged_by(self._trainer)
        is_one_of_several = not is_whole or self._trainer.world_size > 1
        if results is not None:
            results.batch, results.batch_size = data, None
        for _, metric in self._values() if is_one_of_several else ():
            setattr(metric, LATEST, None)
        self._in_part = True
        try:
            yield
        except BaseException:
            self.restore(before)
            raise
        finally:
            self._in_part = False
        for key, metric in self._values() if is_one_of_several else ():
            if (latest := getattr(metric, LATEST)) is not None:
                self.of_parts.setdefault(key, []).append((latest, samples))
            elif key in before:
                setattr(metric, LATEST, before[key][LATEST])

    def batch_ends(self, batch: Any, *, syncs: bool) -> None:
        """Make one value of a batch of those of its parts; with ``syncs`` one of all ranks."""
        for key, metric in self._values():
            if found := self.of_parts.get(key):
                value = _reduced(metric.meta, found)
                value = metric.meta.sync(value) if syncs else value
                setattr(metric, LATEST, value)
                if not metric.meta.on_epoch:
                    metric.value = value
        results = logged_by(self._trainer)
        if results is not None and results.batch is not batch:
            results.batch, results.batch_size = batch, None

    def state(self) -> dict[str, dict[str, Any]]:
        """Return what was logged so far."""
        return {
            key: {
                name: getattr(metric, name) for name in LOGGED if hasattr(metric, name)
            }
            for key, metric in self._values()
        }

    def restore(self, state: dict[str, dict[str, Any]]) -> None:
        """Go back to a :meth:`state`."""
        for key, metric in self._values():
            if key not in state:
                del logged_by(self._trainer)[key]
            for name, value in state.get(key, {}).items():
                setattr(metric, name, value)

    def _values(self) -> list[tuple[str, Any]]:
        results = logged_by(self._trainer) or {}
        return [(key, metric) for key, metric in results.items() if metric.is_tensor]


def _reduced(meta: Any, found: list[tuple[Tensor, int]]) -> Tensor:
    values = torch.stack([value for value, _ in found])
    sizes = values.new_tensor([size for _, size in found])
    if not meta.is_mean_reduction or len(found) == 1:
        return torch.as_tensor(meta.reduce_fx(values))
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
