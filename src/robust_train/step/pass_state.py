"""Records all that a pass may change, and restores it any number of times.

The check of a split uses a :class:`PassState` in the process that trains. It computes several
losses of the same samples, and each must begin in the same state and leave no trace. Unlike
:mod:`.step_start`, it also restores weights and the variables of the user's function.
"""

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
    MAX_ITEMS,
    find_participants,
    keep_attributes,
    names_in,
    parameters_of,
)
from robust_train.step.rng import GeneratorStates

# A buffer, or all frozen weights together, are copied up to this size. A check runs only once.
_MAX_COPIED_BYTES = 1024 * MIB
# A tensor among a function's variables is copied up to this size. A data set is larger.
_MAX_VARIABLE_BYTES = 64 * MIB
_FRAMEWORKS = frozenset(
    (
        *("torch", "robust_train", "lightning", "pytorch_lightning"),
        *("transformers", "accelerate", "builtins", "logging", "threading"),
    )
)
_CONTAINERS = (list, dict, set, deque)


class PassState:
    """All that a pass may change, except gradients.

    Args:
        models: the modules that learn.
        function: the function of the pass, which may reach further modules and variables.
        reported: attributes that a log line has already reported as impossible to restore.
    """

    def __init__(
        self, models: Iterable[nn.Module], function: Any = None, reported: set[str] | None = None
    ) -> None:
        modules, self.generators = find_participants(models, function)
        self._attributes = Attributes(reported)
        self.modules = keep_attributes(self._attributes, modules)
        self.random_numbers = GeneratorStates(self.generators)
        self._buffers = Buffers(most_bytes=_MAX_COPIED_BYTES)
        self._buffers.keep(self.modules)
        self._weights = _Originals(_weights_in(self.modules))
        self._variables = _Variables(function)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state."""
        self._attributes.restore()
        self._buffers.restore()
        self.random_numbers.restore()
        self._variables.restore()
        self._weights.restore()


def _weights_in(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the weights that a pass may change.

    A moving average of weights is updated within passes, and may be trainable or frozen. If all of
    them are too large, only frozen weights are returned, and if those are too large, none: they are
    a base model, which does not change.
    """
    weights = parameters_of(modules)
    frozen = [weight for weight in weights if not weight.requires_grad]
    # Sharded weights that are trained are not copied to the host.
    plain = [
        weight
        for weight in weights
        if weight.requires_grad and type(weight) in (Tensor, nn.Parameter)
    ]
    for candidates in ([*frozen, *plain], frozen):
        if sum(weight.nbytes for weight in candidates) <= _MAX_COPIED_BYTES:
            return candidates
    return []


class _Originals:
    """Tensors with copies of their values.

    A tensor that was not written to is not restored, because its new version would look like a
    change by the step.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        # Copies of trained tensors go to the host: the device's memory is needed for activations.
        self._copies = [
            tensor.detach().to("cpu", copy=True)
            if tensor.requires_grad
            else tensor.detach().clone()
            for tensor in tensors
        ]
        self._versions = versions_of(tensors)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the values of the tensors that were written to."""
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
    """The variables that a function names, with their values: counters, lists of losses, meters.

    They are variables that it closes over, global variables, and attributes of the object whose
    method it is. Containers and objects are kept one level deep.
    """

    def __init__(self, function: Any) -> None:
        # Functions that assign to a variable, each with the value to assign.
        self._assignments: list[tuple[Callable[[Any], None], Any]] = []
        # Containers, each with a copy of its content.
        self._contents: list[tuple[Any, Any]] = []
        self._tensors: list[Tensor] = []
        owner = getattr(function, "__self__", None)
        plain = getattr(function, "__func__", function)
        if owner is not None and not isinstance(owner, (nn.Module, type)):
            self._keep_attributes(owner)
        if isinstance(plain, FunctionType):
            self._keep_variables(plain)
        self._values = _Originals(self._tensors)

    def _keep_variables(self, function: FunctionType) -> None:
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # The variable may have no value yet.
                self._keep(cell.cell_contents, partial(setattr, cell, "cell_contents"))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._keep(value, _assign_nothing)
        variables = function.__globals__
        for name in names_in(function.__code__):
            if name in variables:
                self._keep(variables[name], partial(variables.__setitem__, name))

    def _keep(self, value: Any, assign: Callable[[Any], None], *, is_inside: bool = False) -> None:
        if value is None or isinstance(value, (bool, int, float, str)):
            self._assignments.append((assign, value))
        elif isinstance(value, Tensor):
            self._assignments.append((assign, value))
            if not value.requires_grad and value.nbytes <= _MAX_VARIABLE_BYTES:
                self._tensors.append(value)
        elif isinstance(value, _CONTAINERS) and len(value) <= MAX_ITEMS:
            self._contents.append((value, copy(value)))
        elif not is_inside and _is_of_user(value):
            self._keep_attributes(value)

    def _keep_attributes(self, owner: Any) -> None:
        home = getattr(owner, "__dict__", {})
        for name, value in list(home.items()):
            self._keep(value, partial(home.__setitem__, name), is_inside=True)

    def restore(self) -> None:
        """Restore the values of the variables and the content of the containers."""
        for assign, value in self._assignments:
            assign(value)
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
    """Return whether an object is of a user's class, for example a meter.

    The attributes of a framework's objects may be changed by threads at any time.
    """
    if isinstance(value, (nn.Module, type, FunctionType, type(sys))):
        return False
    package = type(value).__module__.partition(".")[0]
    return package not in _FRAMEWORKS


def _assign_nothing(value: Any) -> None:
    """Do nothing, because the default of a parameter cannot be assigned to."""
