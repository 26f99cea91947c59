"""torchmetrics objects of a model, which count each batch once whatever its parts.

The parts of a batch update them as they come. After the last part the objects go back to the
batch's start and are updated once with all that the parts gave them: that is exact for a mean of
means or a maximum too, and their latest value is the whole batch's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from robust_train.compat import METRIC_NOTES, tree_leaves, tree_map_with_path
from robust_train.readable import MIB
from robust_train.step.splitting import joined

log = logging.getLogger("robust_train.integrations")

# Lightning needs it
_Metric: Any = importlib.import_module("torchmetrics").Metric

_MOST_BYTES = 64 * MIB
"""Of what the parts of a batch give, kept until the last one; more stays as the parts left it."""

_CALLS = ("forward", "update")

Call = tuple[Any, str, tuple[Any, ...], dict[str, Any]]
"""A metric, the method that was called, and its arguments."""

States = list[tuple[Any, dict[str, Any]]]
"""Metrics and what they hold; no dictionary, for their hash changes with it."""


class MetricObjects:
    """The torchmetrics objects of a model, looked up when they are needed first."""

    def __init__(self, model: Callable[[], nn.Module | None]) -> None:
        self._model = model
        self._found: list[Any] | None = None
        self._before: States = []  # at the batch's start
        # None: too large to keep
        self._parts: list[tuple[int, list[Call]]] | None = None
        self._exact: list[Any] = []
        self._bytes = 0
        self._is_inside = False  # a metric that calls others counts itself

    def state(self) -> States:
        """Return copies of what the objects hold."""
        return [(metric, _state_of(metric)) for metric in self._metrics()]

    def restore(self, states: States) -> None:
        """Go back to a :meth:`state`."""
        self._is_inside = False
        for metric, state in states:
            for name, value in state.items():
                setattr(metric, name, _copy(value))

    def batch_begins(self, states: States) -> None:
        """Begin a batch in which the objects hold ``states``."""
        self._before, self._parts, self._bytes = states, [], 0

    @contextlib.contextmanager
    def part(self, samples: int) -> Iterator[None]:
        """Note within this block what the objects are given of a part."""
        calls: list[Call] = []
        with contextlib.ExitStack() as stack:
            for metric, name in itertools.product(self._metrics(), _CALLS):
                attributes, noting = (
                    vars(metric),
                    self._noting(metric, name, calls),
                )
                if name in attributes:
                    stack.callback(attributes.update, {name: attributes[name]})
                else:
                    stack.callback(attributes.pop, name)
                attributes[name] = noting
            yield
        if self._parts is not None:
            tensors = (
                leaf for call in calls for leaf in tree_leaves(call[2:])
            )
            self._bytes += sum(
                t.nbytes for t in tensors if isinstance(t, Tensor)
            )
            self._parts.append((samples, calls))
            if self._bytes > _MOST_BYTES:
                self._parts = None

    def batch_ends(self) -> None:
        """Count the batch's parts as one, where that is possible."""
        parts, self._parts, self._exact = self._parts or [], None, []
        sizes = [samples for samples, _ in parts]
        names = {
            tuple((id(m), name) for m, name, _, _ in calls)
            for _, calls in parts
        }
        if len(sizes) < 2 or len(names) != 1 or not parts[0][1]:
            return
        called = [call[0] for call in parts[0][1]]
        # another of a collection's group takes over what the first one holds
        touched = {
            id(inner) for metric in called for inner in metric.modules()
        }
        before = [one for one in self._before if id(one[0]) in touched]
        after = [(metric, _state_of(metric)) for metric, _ in before]
        self.restore(before)
        try:
            with torch.no_grad():
                for calls in zip(*(calls for _, calls in parts), strict=True):
                    metric, name = calls[0][:2]
                    args, named = joined(
                        [call[2:] for call in calls],
                        sizes,
                        any_length=True,
                    )
                    getattr(metric, name)(*args, **named)
        except Exception as error:
            # what the parts gave cannot be put together, or that does not fit
            log.debug(
                "torchmetrics objects stay as the parts left them: %s", error
            )
            self.restore(after)
        else:
            self._exact = called

    def is_exact(self, metric: Any) -> bool:
        """Return whether an object has counted the last batch as one."""
        return any(metric is one for one in self._exact)

    def _metrics(self) -> list[Any]:
        model = self._model()
        if self._found is None and model is not None:
            self._found = [
                m for m in model.modules() if isinstance(m, _Metric)
            ]
        return self._found or []

    def _noting(
        self,
        metric: Any,
        name: str,
        calls: list[Call],
    ) -> Callable[..., Any]:
        """Return the method, which notes its calls, but none that another metric makes."""
        call = getattr(metric, name)

        @functools.wraps(call)
        def noted(*args: Any, **named: Any) -> Any:
            if self._is_inside:
                return call(*args, **named)
            calls.append((metric, name, *_detached((args, named))))
            self._is_inside = True
            try:
                return call(*args, **named)
            finally:
                self._is_inside = False

        return noted


def _state_of(metric: Any) -> dict[str, Any]:
    states = {
        name: _copy(value) for name, value in metric.metric_state.items()
    }
    return states | {name: getattr(metric, name) for name in METRIC_NOTES}


def _copy(value: Any) -> Any:
    if isinstance(value, list):
        return list(value)  # tensors are added to it, and none is changed
    return value.detach().clone() if isinstance(value, Tensor) else value


def _detached(value: Any) -> Any:
    def change(_: object, leaf: Any) -> Any:
        return leaf.detach() if isinstance(leaf, Tensor) else leaf

    return tree_map_with_path(change, value)
