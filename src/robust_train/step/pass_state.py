"""All that a pass may change, to go back to when a split is checked."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterable
from copy import copy
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from robust_train.compat import versions_of
from robust_train.readable import MIB
from robust_train.step.attributes import Attributes
from robust_train.step.buffers import Buffers
from robust_train.step.reachable import (
    MOST_ITEMS,
    names_in,
    parameters_of,
    taking_part,
    with_modules_inside,
)
from robust_train.step.rng import GeneratorStates

# bytes of a buffer or of all frozen weights that are copied for a check, which is made once
_MOST_COPIED = 1024 * MIB
# bytes of a tensor among a function's variables that is copied for a check: a data set is larger
_MOST_OF_TENSOR = 64 * MIB


class PassState:
    """All that a pass may change besides gradients, to go back to any number of times."""

    def __init__(
        self, models: Iterable[nn.Module], function: Any = None, reported: set[str] | None = None
    ) -> None:
        modules, self.generators = taking_part(models, function)
        self._attributes = Attributes(reported)
        self.modules = with_modules_inside(self._attributes, modules)
        self.random_numbers = GeneratorStates(self.generators)
        self._buffers = Buffers(most_bytes=_MOST_COPIED)
        self._buffers.keep(self.modules)
        self._weights = _Originals(_weights_in(self.modules))
        self._variables = _Variables(function)

    @torch.no_grad()
    def restore(self) -> None:
        """Go back to the state at the beginning."""
        self._attributes.restore()
        self._buffers.restore()
        self.random_numbers.restore()
        self._variables.restore()
        self._weights.restore()


def _weights_in(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the weights that a pass may change: a moving average is updated in passes, and few
    freeze it. More weights than a usual network has are a base model, which stays as it is."""
    weights = parameters_of(modules)
    frozen = [weight for weight in weights if not weight.requires_grad]
    # A trained one that is sharded is not copied to the host.
    plain = [
        weight
        for weight in weights
        if weight.requires_grad and type(weight) in (Tensor, nn.Parameter)
    ]
    for candidates in ([*frozen, *plain], frozen):
        if sum(weight.nbytes for weight in candidates) <= _MOST_COPIED:
            return candidates
    return []


class _Originals:
    """Tensors with copies of their values. One that was not written to stays untouched, since its
    version shows other checks whether the step has changed it."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        # Memory is short on the device: that of what is trained is needed for activations.
        self._copies = [
            tensor.detach().to("cpu", copy=True)
            if tensor.requires_grad
            else tensor.detach().clone()
            for tensor in tensors
        ]
        self._versions = versions_of(tensors)

    @torch.no_grad()
    def restore(self) -> None:
        """Put back the values of the tensors that were written to."""
        versions = versions_of(self._tensors)
        if versions == self._versions:
            return
        for tensor, values, now, before in zip(
            self._tensors, self._copies, versions, self._versions, strict=True
        ):
            if now != before:
                tensor.copy_(values)
        self._versions = versions_of(self._tensors)


class _Variables:
    """The values of variables that a function names (counters, lists of losses, meters, centers),
    for restoring them. They are variables that it closes over, global variables, and attributes of
    its owner. Containers and objects are kept one level deep."""

    def __init__(self, function: Any) -> None:
        self._places: list[tuple[Callable[[Any], None], Any]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._tensors: list[Tensor] = []
        owner = getattr(function, "__self__", None)
        plain = getattr(function, "__func__", function)
        if owner is not None and not isinstance(owner, (nn.Module, type)):
            self._take_attributes(owner)
        if isinstance(plain, FunctionType):
            self._take_all_of(plain)
        self._values = _Originals(self._tensors)

    def _take_all_of(self, function: FunctionType) -> None:
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # It may have no value yet.
                self._take(cell.cell_contents, partial(setattr, cell, "cell_contents"))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._take(value, _ignore)
        variables = function.__globals__
        for name in names_in(function.__code__):
            if name in variables:
                self._take(variables[name], partial(variables.__setitem__, name))

    def _take(
        self, value: Any, put_back: Callable[[Any], None], *, is_inside: bool = False
    ) -> None:
        if value is None or isinstance(value, (bool, int, float, str)):
            self._places.append((put_back, value))
        elif isinstance(value, Tensor):
            self._places.append((put_back, value))
            if not value.requires_grad and value.nbytes <= _MOST_OF_TENSOR:
                self._tensors.append(value)
        elif isinstance(value, _CONTAINERS) and len(value) <= MOST_ITEMS:
            self._contents.append((value, copy(value)))
        elif not is_inside and _is_of_user(value):
            self._take_attributes(value)

    def _take_attributes(self, owner: Any) -> None:
        home = getattr(owner, "__dict__", {})
        for name, value in list(home.items()):
            self._take(value, partial(home.__setitem__, name), is_inside=True)

    def restore(self) -> None:
        """Give the variables and containers what they had."""
        for put_back, value in self._places:
            put_back(value)
        self._values.restore()
        for container, content in self._contents:
            if isinstance(container, list):
                container[:] = content
                continue
            container.clear()
            if isinstance(container, deque):
                container.extend(content)
            else:
                container.update(content)


def _is_of_user(value: Any) -> bool:
    """Return whether an object is a meter or the like: of others, threads may change attributes."""
    if isinstance(value, (nn.Module, type, FunctionType, type(sys))):
        return False
    package = type(value).__module__.partition(".")[0]
    return package not in _OF_FRAMEWORKS


_OF_FRAMEWORKS = frozenset(
    (
        *("torch", "robust_train", "lightning", "pytorch_lightning"),
        *("transformers", "accelerate", "builtins", "logging", "threading"),
    )
)
_CONTAINERS = (list, dict, set, deque)


def _ignore(value: Any) -> None:
    """Restore nothing: a default cannot be rebound."""
