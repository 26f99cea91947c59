"""Logs one value for a batch that Lightning ran in parts.

`lightning_step` uses it in the attempt's process. While a part runs, `PartLog` takes the calls of
``self.log``, so nothing needs to be undone if the part is repeated. Once all parts are done,
`BatchLogs` computes each value for the whole batch and passes it to Lightning. For example, if the
mean losses of parts with 4 and 2 samples are 1.0 and 4.0, it logs (4 * 1.0 + 2 * 4.0) / 6 = 2.0.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from robust_train.compat import LATEST, values_logged_by
from robust_train.step.copies import is_small
from robust_train.step.splitting import Part

log = logging.getLogger("robust_train.integrations")

_aggregation: Any = importlib.import_module("torchmetrics.aggregation")
_Metric: Any = importlib.import_module("torchmetrics").Metric
_Aggregator: Any = _aggregation.BaseAggregator
_REDUCED: Any = (
    (_aggregation.SumMetric, torch.sum),
    (_aggregation.MaxMetric, torch.max),
    (_aggregation.MinMetric, torch.min),
)
_MEANS = ("mean", "avg")  # values of reduce_fx


class _Key(NamedTuple):
    """Identifies a call of ``self.log`` in a part."""

    hook: str  # such as training_step
    name: str
    call: int  # 0 for the first call with this hook and name


@dataclass(frozen=True)
class _LoggedValue:
    """The arguments of a call of ``self.log``."""

    value: Any  # a tensor, or an object of torchmetrics
    figure: Any  # the tensor, or the object's value for this part
    options: dict[str, Any]


@dataclass
class PartLog:
    """The values that ``self.log`` got for a part, and the part's loss."""

    samples: int
    loss: Tensor | None = None
    values: dict[_Key, _LoggedValue] = field(default_factory=dict)

    def take(self, hook: str, name: str, value: Any, **options: Any) -> None:
        """Keep a value until the batch is done. Has the signature of Lightning's own method."""
        if isinstance(value, Tensor):
            figure = value.detach()
            if not options["enable_graph"]:
                value = figure
        else:
            figure = getattr(value, LATEST)
        earlier = [key for key in self.values if (key.hook, key.name) == (hook, name)]
        self.values[_Key(hook, name, len(earlier))] = _LoggedValue(value, figure, options)

    def is_loss(self, value: Tensor) -> bool:
        """Return whether a value is the loss, which is a mean over the samples."""
        if self.loss is None or self.loss.ndim:
            return False
        loss = self.loss.detach().to(value)
        return bool(torch.isclose(loss, value, rtol=1e-6, atol=0))


Outcomes = Sequence[tuple[tuple[Any, PartLog], Part]]
"""The parts of a batch, each with its result and with the values that it logged."""


class BatchLogs:
    """Collects the values logged by a batch's parts, and logs them once for the whole batch."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._warned_names: set[str] = set()
        self._checked_names: set[str] = set()  # of aggregating metrics
        # Whether a value with reduce_fx=max, for example, is the loss, by its name.
        self._are_losses: dict[str, bool] = {}
        # The states of the model's metrics by their ids, before the first part of the batch.
        self._states: dict[int, _States] = {}

    @contextlib.contextmanager
    def collect(self, part: Part) -> Iterator[PartLog]:
        """Yield an object that collects the values that a part logs within the block."""
        results = values_logged_by(self._trainer)
        part_log = PartLog(len(part))
        is_first = part.start == 0
        if is_first and not part.is_whole:
            self._states = {id(metric): _copy_states(metric) for metric in self._metrics}
        if results is not None:
            results.log = part_log.take
        try:
            yield part_log
        finally:
            if results is not None:
                del results.log

    @contextlib.contextmanager
    def discard(self) -> Iterator[None]:
        """Log nothing within the block, which only checks the loss."""
        results = values_logged_by(self._trainer)
        if results is None:
            yield
            return
        results.log = _ignore
        try:
            yield
        finally:
            del results.log

    def log_batch(self, outcomes: Outcomes) -> None:
        """Pass each value that the parts logged to Lightning, as one value for the batch."""
        results = values_logged_by(self._trainer)
        part_logs = [part_log for (_, part_log), _ in outcomes]
        keys = dict.fromkeys(key for part_log in part_logs for key in part_log.values)
        for key in keys:
            logging_parts = [part_log for part_log in part_logs if key in part_log.values]
            first = logging_parts[0].values[key]
            value = first.value
            options = first.options
            reduce_fx = options["reduce_fx"]
            kind = str(getattr(reduce_fx, "__name__", reduce_fx)).lower()
            if isinstance(value, Tensor) and kind not in _MEANS:
                self._compare_with_loss(key, logging_parts)
            if len(part_logs) > 1:
                sizes = [each.values[key].options["batch_size"] for each in logging_parts]
                if None not in sizes:
                    options["batch_size"] = sum(sizes)
                figures = [each.values[key].figure for each in logging_parts]
                if isinstance(value, Tensor):
                    value = self._join_values(key.name, logging_parts, figures, kind)
                elif isinstance(first.figure, Tensor):
                    latest = self._join_metric(key.name, value, logging_parts, figures, options)
                    setattr(value, LATEST, latest)
            results.log(key.hook, key.name, value, **options)
        if len(part_logs) > 1:
            self._check_aggregators()

    # --- values that are tensors ---

    def _compare_with_loss(self, key: _Key, parts: Sequence[PartLog]) -> None:
        """Find out once whether a value is the loss.

        A part with a single sample cannot answer: its maximum, for example, equals its mean.
        """
        if key.name in self._are_losses:
            return
        for part_log in parts:
            if part_log.samples > 1:
                figure = part_log.values[key].figure
                self._are_losses[key.name] = part_log.is_loss(figure)
                return

    def _join_values(
        self, name: str, parts: Sequence[PartLog], figures: Sequence[Tensor], kind: str
    ) -> Tensor:
        """Return the value for the batch from the values of its parts.

        The mean by samples is right for means, and for the loss whatever its ``reduce_fx``. Other
        values are reduced as ``reduce_fx`` says, which is right if they are values of samples.
        """
        is_mean = kind in _MEANS or len(parts) == 1
        if is_mean or self._are_losses.get(name, True):
            return _mean_by_samples(parts, figures)
        values = torch.stack(list(figures))
        if values.tolist() == [part_log.samples for part_log in parts]:
            return values.sum()
        is_count = kind == "sum" and bool((values % 1 == 0).all())
        if not is_count:
            self._warn_once(
                name,
                "self.log(%r, reduce_fx=%s): for a split batch, the logged value is the %s of the "
                "parts' values, which is right for a %s over samples, not for a mean",
                name,
                kind,
                kind,
                kind,
            )
        return torch.as_tensor(getattr(torch, kind)(values))

    # --- values that are objects of torchmetrics ---

    def _join_metric(
        self,
        name: str,
        metric: Any,
        parts: Sequence[PartLog],
        figures: Sequence[Tensor],
        options: dict[str, Any],
    ) -> Tensor:
        """Return the value that a metric would have for the whole batch."""
        for kind, reduce in _REDUCED:
            if isinstance(metric, kind):
                return torch.as_tensor(reduce(torch.stack(list(figures))))
        mean = _mean_by_samples(parts, figures)
        needs_check = options["on_step"] and not isinstance(metric, _Aggregator)
        if needs_check and not self._is_value_of_batch(metric, mean):
            self._warn_once(
                name,
                "self.log(%r, %s, on_step=True): if a batch is split, the value of the step is "
                "the mean of its parts' values by samples; the value of the epoch counts each "
                "sample once",
                name,
                type(metric).__name__,
            )
        return mean

    def _is_value_of_batch(self, metric: Any, figure: Tensor) -> bool:
        """Return whether a figure is certainly the metric's value for this batch alone."""
        before = self._states.get(id(metric))
        if not before:
            return False
        value = _value_since(metric, before)
        if not isinstance(value, Tensor):
            return False
        return torch.allclose(value.to(figure), figure, equal_nan=True)

    def _check_aggregators(self) -> None:
        """Warn about aggregating metrics, which count each part of a batch as a separate value."""
        for name, metric in self._aggregators:
            if name in self._checked_names or not metric.update_called:
                continue
            self._checked_names.add(name)
            kind = type(metric).__name__
            if isinstance(metric, _aggregation.MeanMetric):
                weight = getattr(metric, "weight", None)
                has_weights = weight is not None and float(weight) != metric.update_count
                if has_weights:
                    continue
                hint = "give it the weight of its samples: metric(loss, weight=len(batch))"
            elif isinstance(metric, _aggregation.SumMetric):
                is_count = float(metric.compute()) % 1 == 0
                if is_count:
                    continue
                hint = "that is right for a sum over samples, not for a sum of means"
            else:
                hint = "that is right for values of samples, not for means"
            self._warn_once(
                name,
                "%s (%s): if a batch is split, it gets one value for each part; %s",
                name,
                kind,
                hint,
            )

    @functools.cached_property
    def _metrics(self) -> list[Any]:
        """The model's metrics that do more than aggregate values."""
        return [
            module
            for module in self._trainer.lightning_module.modules()
            if isinstance(module, _Metric) and not isinstance(module, _Aggregator)
        ]

    @functools.cached_property
    def _aggregators(self) -> list[tuple[str, Any]]:
        """The model's aggregating metrics, with their names."""
        modules = self._trainer.lightning_module.named_modules()
        return [(name, module) for name, module in modules if isinstance(module, _Aggregator)]

    def _warn_once(self, name: str, text: str, *args: Any) -> None:
        """Log a warning about the value ``name``, which gets no further warnings."""
        if name not in self._warned_names:
            self._warned_names.add(name)
            log.warning(text, *args)


def _ignore(*args: Any, **options: Any) -> None:
    pass


_States = dict[str, Any]
"""A metric's states by name: a tensor, or the length of a list, which only grows."""


def _copy_states(metric: Any) -> _States:
    """Return a metric's states, from which `_value_since` finds out later what was added.

    Empty if a state is large, or if torchmetrics is too old to list states.
    """
    states: _States = getattr(metric, "metric_state", {})
    copies: _States = {}
    for name, state in states.items():
        if not isinstance(state, Tensor):
            copies[name] = len(state)
        elif is_small(state):
            copies[name] = state.clone()
        else:
            return {}
    return copies


def _value_since(metric: Any, before: _States) -> Any:
    """Return a metric's value for what was added to its states, None if that is impossible."""
    added = copy(metric)
    try:
        for name, start in before.items():
            now = getattr(metric, name)
            is_list = isinstance(now, list)
            setattr(added, name, now[start:] if is_list else now - start)
        # The object's own ``compute`` would return its cached value.
        return type(metric).compute(added)
    # A user's metric may not expect states other than its own.
    except Exception:
        return None


def _mean_by_samples(parts: Sequence[PartLog], figures: Sequence[Tensor]) -> Tensor:
    """Return the mean of the parts' values, weighted by their samples."""
    if len(figures) == 1:
        return figures[0]
    values = torch.stack(list(figures))
    sizes = values.new_tensor([part_log.samples for part_log in parts])
    return (values * sizes).sum() / sizes.sum()
