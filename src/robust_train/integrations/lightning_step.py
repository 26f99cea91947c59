"""Recovery inside the steps of Lightning's ``Trainer``.

``integrations.lightning`` calls `recover_in_steps` before a fit, in the process of each rank. The
Trainer keeps its loader, counters, batch hooks, loggers, clipping, schedulers and checkpoints. Its
automatic optimization is replaced by a subclass that runs the closure for parts of a batch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler

from robust_train.attempt.run import Run, live_of
from robust_train.compat import LATEST, accumulates_now, values_logged_by
from robust_train.integrations.sample_order import SampleOrder
from robust_train.integrations.steering import InStep, OpenStep, lightning
from robust_train.step.copies import is_small
from robust_train.step.splitting import Part

log = logging.getLogger("robust_train.integrations")

_automatic: Any = lightning(".loops.optimization.automatic")
_strategies: Any = lightning(".strategies")
_LightningModule: Any = lightning().LightningModule
_aggregation: Any = importlib.import_module("torchmetrics.aggregation")
_Metric: Any = importlib.import_module("torchmetrics").Metric
_AutomaticOptimization: Any = _automatic._AutomaticOptimization


def recover_in_steps(trainer: Any, model: Any, run: Run, callback: Any) -> None:
    """Repeat steps and evaluations of ``trainer`` in smaller parts if memory runs out."""
    in_step = InStep(run, "Lightning")
    logs = _Logs(trainer)
    reason = why_not(trainer, model)
    _keep_evaluation_batches(trainer, run, callback, can_split=not reason)
    if reason is not None:
        in_step.say(reason, on_all_ranks=True)
        return
    if model.automatic_optimization:
        in_parts = _InParts(trainer, in_step, logs, callback)
        trainer.fit_loop.epoch_loop.automatic_optimization = in_parts
    else:
        reason = f"{type(model).__name__}.training_step runs the backward passes by itself"
        in_step.say(f"{reason} (automatic_optimization=False)", on_all_ranks=True)
    for name in ("validation_step", "test_step", "predict_step"):
        step = partial(_evaluate, trainer, in_step, logs, getattr(trainer.strategy, name))
        setattr(trainer.strategy, name, step)


def _keep_evaluation_batches(trainer: Any, run: Run, callback: Any, *, can_split: bool) -> None:
    """Give loaders of validation and test the batch size that the user requested, because figures
    and the effect of ``limit_val_batches`` depend on it."""
    micro_batch: int = callback.shares.micro_batch
    spec = live_of(run).parts.asked
    batch_size = micro_batch if spec is None else spec.batch_size
    if batch_size == micro_batch:
        return
    process = trainer.strategy.process_dataloader

    @functools.cache
    def warn() -> None:
        log.warning(
            "Lightning: evaluates in batches of %d, no longer %d: limit_val_batches=2 and the like "
            "are less data, and figures of batches may differ from those of earlier attempts",
            micro_batch,
            batch_size,
        )

    def process_dataloader(loader: Any) -> Any:
        batches: Any = getattr(loader, "batch_sampler", None)
        is_of_evaluation = type(batches) is BatchSampler and not isinstance(
            batches.sampler, SampleOrder
        )
        if is_of_evaluation and batches.batch_size == micro_batch:
            if can_split:
                batches.batch_size = batch_size
            else:
                warn()
        return process(loader)

    trainer.strategy.process_dataloader = process_dataloader


class _InParts(_AutomaticOptimization):  # type: ignore[misc]
    """Lightning's automatic optimization, whose closure may be run for parts of the batch."""

    def __init__(self, trainer: Any, in_step: InStep, logs: _Logs, callback: Any) -> None:
        super().__init__(trainer)
        self._callback = callback
        self._in_step = in_step
        self._logs = logs
        self._step: OpenStep | None = None
        self._zero_grad: Callable[[], None] | None = None

    def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        closure = super()._make_closure(kwargs, optimizer, batch_idx)
        if isinstance(optimizer, torch.optim.LBFGS) and self._in_step.is_on:
            self._in_step.is_on = False
            self._in_step.say("LBFGS runs the closure several times a step")
        # weight averaging collects BatchNorm's statistics without a backward pass
        if self._in_step.is_on and "batch" in kwargs and not self._skip_backward:
            whole = closure.closure
            runs = iter([partial(self._run, whole, kwargs, optimizer, batch_idx)])
            # only the first call runs in parts: a second call in a step computes another gradient
            closure.closure = lambda *args, **named: next(runs, whole)()
        return closure

    @torch.enable_grad()
    def _run(self, whole: Callable[[], Any], kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        """Run the closure for each part of the batch, and return the batch's result."""
        trainer = self.trainer
        batch = kwargs["batch"]
        zero_grad = self._make_zero_grad_fn(batch_idx, optimizer)
        # the previous step may have been left before its last batch
        if self._step is None or zero_grad is not None:
            self._zero_grad = zero_grad
            # a rewind restores attributes that its hook may have changed, so it runs again
            again = partial(setattr, self, "_zero_grad", zero_grad)
            self._step = self._in_step.begin(trainer.model, on_rewind=again, keeps_gradients=False)
            if self._step is None:
                return whole()

        number = self._callback.done

        def body(part: Part) -> tuple[Any, _OfPart]:
            # the weight depends on the batch, and an earlier batch may be repeated
            self._callback.done = number
            weight = part.weight
            inputs = kwargs
            if not part.is_whole:
                inputs = type(kwargs)(kwargs, batch=part.data)

            def step() -> Any:
                result = self._training_step(inputs)
                loss = result.closure_loss
                if loss is not None:
                    logged.loss = loss.detach() * trainer.accumulate_grad_batches
                if weight != 1.0 and loss is not None:
                    result.closure_loss = loss * weight
                    result.loss = result.closure_loss.detach().clone()
                return result

            backward = self._make_backward_fn(optimizer)
            zero_grad = self._zero_once if self._zero_grad else None
            closure = _automatic.Closure(step, backward, zero_grad)
            with self._logs.part(part) as logged:
                return closure.closure(), logged

        def loss_of(data: Any) -> Tensor:
            inputs = type(kwargs)(kwargs, batch=data)
            with self._logs.unheard():
                loss: Tensor | None = self._training_step(inputs).closure_loss
            if loss is None:
                raise ValueError("training_step returned no loss")
            return loss

        is_last = not accumulates_now(trainer)
        results = self._step.run_batch(
            batch,
            body,
            is_last=is_last,
            loss_of=loss_of,
            function=trainer.lightning_module.training_step,
        )
        self._logs.log(results)
        if is_last:
            self._step = None
        (result, _), _ = results[0]
        return result if len(results) == 1 else self._merged(results)

    def _merged(self, outcomes: _Outcomes) -> Any:
        merged = _automatic.ClosureResult(None)
        results = [result for (result, _), _ in outcomes]
        extras = [(result.extra, part) for (result, _), part in outcomes]
        merged.extra = self._in_step.joined(extras)
        losses = [result.loss for result in results if result.loss is not None]
        merged.loss = sum(losses) if losses else None
        return merged

    def _zero_once(self) -> None:
        zero_grad = self._zero_grad
        self._zero_grad = None
        if zero_grad is not None:
            zero_grad()


def _evaluate(
    trainer: Any, in_step: InStep, logs: _Logs, inner: Any, batch: Any, *args: Any
) -> Any:
    """Run a validation, test or prediction step for each part of a batch."""

    def body(part: Part) -> tuple[Any, _OfPart]:
        with logs.part(part) as logged:
            result = inner(part.data, *args)
            loss = result.get("loss") if isinstance(result, dict) else result
            logged.loss = loss if isinstance(loss, Tensor) else None
            return result, logged

    results = in_step.evaluate(trainer.model, batch, body)
    logs.log(results)
    return in_step.joined([(result, part) for (result, _), part in results])


_Aggregator: Any = _aggregation.BaseAggregator
_REDUCED: Any = (
    (_aggregation.SumMetric, torch.sum),
    (_aggregation.MaxMetric, torch.max),
    (_aggregation.MinMetric, torch.min),
)

_Key = tuple[str, str, int]
_MEANS = ("mean", "avg")


@dataclass
class _OfPart:
    """The values that ``self.log`` got for a part, and the part's loss."""

    samples: int
    loss: Tensor | None = None
    # The value to log, its figure and options, by hook, name, and number of earlier calls.
    values: dict[_Key, tuple[Any, Any, dict[str, Any]]] = field(default_factory=dict)

    def take(self, hook: str, name: str, value: Any, **options: Any) -> None:
        """Keep a value until the batch is done."""
        if isinstance(value, Tensor):
            figure = value.detach()
            value = value if options["enable_graph"] else figure
        else:  # an object of torchmetrics
            figure = getattr(value, LATEST)
        nth = sum(key[:2] == (hook, name) for key in self.values)
        self.values[hook, name, nth] = value, figure, options

    def is_loss(self, value: Tensor) -> bool:
        """Return whether a value is the loss, a mean over the samples."""
        if self.loss is None or self.loss.ndim:
            return False
        loss = self.loss.detach().to(value)
        return bool(torch.isclose(loss, value, rtol=1e-6, atol=0))


_Outcomes = Sequence[tuple[tuple[Any, _OfPart], Part]]
"""The parts of a batch, each with its result and with what it logged."""


class _Logs:
    """Collects the values logged by a batch's parts, and logs them once for the whole batch.

    So nothing has to be undone if a part is repeated.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._has_warned: set[str] = set()
        self._checked: set[str] = set()  # names of objects that aggregate
        self._are_losses: dict[str, bool] = {}  # whether values that are not means are the loss
        # States of metrics by their ids, at the start of the split batch.
        self._states: dict[int, _States] = {}

    @contextlib.contextmanager
    def part(self, part: Part) -> Iterator[_OfPart]:
        """Yield an object that collects what a part of a batch logs within the block."""
        results = values_logged_by(self._trainer)
        logged = _OfPart(len(part))
        if not part.start and not part.is_whole:
            self._states = {id(metric): _states_of(metric) for metric in self._metrics}
        if results is not None:
            results.log = logged.take
        try:
            yield logged
        finally:
            if results is not None:
                del results.log

    @contextlib.contextmanager
    def unheard(self) -> Iterator[None]:
        """Log nothing within the block, for a pass that only checks something."""
        results = values_logged_by(self._trainer)
        if results is None:
            yield
            return
        results.log = lambda *args, **options: None
        try:
            yield
        finally:
            del results.log

    def log(self, outcomes: _Outcomes) -> None:
        """Log the values of a batch's parts, each once."""
        results = values_logged_by(self._trainer)
        parts = [part for (_, part), _ in outcomes]
        for key in dict.fromkeys(key for part in parts for key in part.values):
            logging_parts = [part for part in parts if key in part.values]
            value, figure, options = logging_parts[0].values[key]
            reduce_fx = options["reduce_fx"]
            kind = str(getattr(reduce_fx, "__name__", reduce_fx)).lower()
            if isinstance(value, Tensor) and kind not in _MEANS:
                self._compare(key, logging_parts)
            if len(parts) > 1:
                sizes = [part.values[key][2]["batch_size"] for part in logging_parts]
                if None not in sizes:
                    options["batch_size"] = sum(sizes)
                figures = [part.values[key][1] for part in logging_parts]
                if isinstance(value, Tensor):
                    value = self._joined(key[1], logging_parts, figures, kind)
                elif isinstance(figure, Tensor):
                    latest = self._latest(key[1], value, logging_parts, figures, options)
                    setattr(value, LATEST, latest)
            hook, name, _ = key
            results.log(hook, name, value, **options)
        if len(parts) > 1:
            self._check_aggregations()

    def _latest(
        self,
        name: str,
        metric: Any,
        parts: Sequence[_OfPart],
        figures: Sequence[Tensor],
        options: dict[str, Any],
    ) -> Tensor:
        """Return the value that a metric would have for the whole batch."""
        for kind, reduce in _REDUCED:
            if isinstance(metric, kind):
                return torch.as_tensor(reduce(torch.stack(list(figures))))
        mean = _mean(parts, figures)
        is_checked = isinstance(metric, _Aggregator) or not options["on_step"]
        if not is_checked and not self._is_of_batch(metric, mean):
            self._warn(
                name,
                "self.log(%r, %s, on_step=True): where a batch is split, the value of the step is "
                "the mean of its parts' values by samples; that of the epoch counts each sample "
                "once",
                name,
                type(metric).__name__,
            )
        return mean

    def _is_of_batch(self, metric: Any, figure: Tensor) -> bool:
        """Return whether a figure is the metric's value for this batch alone."""
        before = self._states.get(id(metric))
        value = None if not before else _value_since(metric, before)
        if not isinstance(value, Tensor):
            return False
        return torch.allclose(value.to(figure), figure, equal_nan=True)

    @functools.cached_property
    def _metrics(self) -> list[Any]:
        modules = self._trainer.lightning_module.modules()
        return [
            module
            for module in modules
            if isinstance(module, _Metric) and not isinstance(module, _Aggregator)
        ]

    def _check_aggregations(self) -> None:
        """Warn about objects that count each part of a batch as a separate value."""
        for name, metric in self._aggregations:
            if name in self._checked or not metric.update_called:
                continue
            self._checked.add(name)
            kind = type(metric).__name__
            if isinstance(metric, _aggregation.MeanMetric):
                weight = getattr(metric, "weight", None)
                if weight is not None and float(weight) != metric.update_count:
                    continue
                help_ = "give it the weight of its samples: metric(loss, weight=len(batch))"
            elif isinstance(metric, _aggregation.SumMetric):
                if float(metric.compute()) % 1 == 0:
                    continue
                help_ = "that is right for a sum over samples, not for a sum of means"
            else:
                help_ = "that is right for values of samples, not for means"
            self._warn(
                name,
                "%s (%s): where a batch is split, it gets a value of each part; %s",
                name,
                kind,
                help_,
            )

    @functools.cached_property
    def _aggregations(self) -> list[tuple[str, Any]]:
        modules = self._trainer.lightning_module.named_modules()
        return [pair for pair in modules if isinstance(pair[1], _Aggregator)]

    def _warn(self, name: str, text: str, *args: Any) -> None:
        if name not in self._has_warned:
            self._has_warned.add(name)
            log.warning(text, *args)

    def _compare(self, key: _Key, parts: Sequence[_OfPart]) -> None:
        """Learn once whether a value is the loss. A single sample's extreme is always its loss."""
        if key[1] in self._are_losses:
            return
        several = (part for part in parts if part.samples > 1)
        part = next(several, None)
        if part is not None:
            self._are_losses[key[1]] = part.is_loss(part.values[key][1])

    def _joined(
        self, name: str, parts: Sequence[_OfPart], figures: Sequence[Tensor], kind: str
    ) -> Tensor:
        """Return a batch's value from the values of its parts."""
        is_mean = kind in _MEANS or len(parts) == 1
        if is_mean or self._are_losses.get(name, True):
            return _mean(parts, figures)
        values = torch.stack(list(figures))
        if values.tolist() == [part.samples for part in parts]:
            return values.sum()
        is_count = kind == "sum" and bool((values % 1 == 0).all())
        if not is_count:
            self._warn(
                name,
                "self.log(%r, reduce_fx=%s): where a batch is split, its value is the %s of its "
                "parts' values, which is that of a %s over samples, not of a mean",
                name,
                kind,
                kind,
                kind,
            )
        return torch.as_tensor(getattr(torch, kind)(values))


_States = dict[str, Any]
"""A metric's states by name: a tensor, or the length of a list, which only grows."""


def _states_of(metric: Any) -> _States:
    """Return a metric's states, to find later what was added. Empty if they are large, or if
    torchmetrics is too old to list them."""
    states: _States = getattr(metric, "metric_state", {})
    tensors = [state for state in states.values() if isinstance(state, Tensor)]
    if not all(map(is_small, tensors)):
        return {}
    return {
        name: state.clone() if isinstance(state, Tensor) else len(state)
        for name, state in states.items()
    }


def _value_since(metric: Any, before: _States) -> Any:
    """Return a metric's value for what was added to its states, None if that is impossible."""
    added = copy(metric)
    try:
        for name, start in before.items():
            now = getattr(metric, name)
            is_list = isinstance(now, list)
            setattr(added, name, now[start:] if is_list else now - start)
        # The object's own function would return its cached value.
        return type(metric).compute(added)
    # A user's metric may not expect states other than its own.
    except Exception:
        return None


def _mean(parts: Sequence[_OfPart], figures: Sequence[Tensor]) -> Tensor:
    if len(figures) == 1:
        return figures[0]
    values = torch.stack(list(figures))
    sizes = values.new_tensor([part.samples for part in parts])
    return (values * sizes).sum() / sizes.sum()


def why_not(trainer: Any, model: Any) -> str | None:
    """Return why a step cannot run in parts, or None if it can."""
    strategy = trainer.strategy  # DeepSpeed's and XLA's derive from DDP's
    if type(strategy) not in (_strategies.SingleDeviceStrategy, _strategies.DDPStrategy):
        return f"{type(strategy).__name__} runs the model"
    inherited = _LightningModule.optimizer_zero_grad
    if getattr(type(model), "optimizer_zero_grad", inherited) is not inherited:
        return f"{type(model).__name__}.optimizer_zero_grad decides about gradients"
    return None
