"""Gradients from before a step or a call, which a repeat must neither lose nor count twice.

:class:`LaidAside` serves :mod:`.step_start`, which knows when a step ends. :class:`GradientsBefore`
serves :mod:`.oom_handler`, which repeats any user function. Both work in the process that
trains.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from robust_train.compat import has_step_in_backward, version_of
from robust_train.step.reachable import modules_of


class LaidAside:
    """The gradient of earlier batches, kept aside while a step computes a new gradient."""

    def __init__(self, parameter: Tensor, gradient: Tensor) -> None:
        self.parameter = parameter
        # The same tensor until the end, because a view of it may exist elsewhere.
        self.gradient = gradient
        self._is_away = False
        self._on_host: Tensor | None = None  # None if all values are 0

    @property
    def can_leave(self) -> bool:
        """Whether moving the gradient to the host would free GPU memory."""
        gradient = self.gradient
        is_plain = type(gradient) is Tensor and not gradient.is_sparse
        if self._is_away or not is_plain or not is_on_gpu(gradient):
            return False
        # A view into a larger storage, such as DDP's buckets, cannot free that storage.
        return gradient.untyped_storage().nbytes() == gradient.nbytes

    def leave(self) -> None:
        """Move the values to the host. Do not read the gradient before `come_back`."""
        # zero_grad(set_to_none=False) leaves zeros, which need no copy.
        if self.gradient.any():
            self._on_host = self.gradient.detach().to("cpu", copy=True)
        self._is_away = True
        self.gradient.untyped_storage().resize_(0)

    def come_back(self) -> None:
        """Move the values back to the GPU."""
        if not self._is_away:
            return
        self.gradient.untyped_storage().resize_(self.gradient.nbytes)
        if self._on_host is None:
            self.gradient.zero_()
        else:
            self.gradient.copy_(self._on_host)
        self._on_host = None
        self._is_away = False

    def add(self) -> None:
        """Add the step's gradient to this gradient, and give the sum to the parameter."""
        new = self.parameter.grad
        before = self.gradient
        self.come_back()
        self.parameter.grad = before
        if new is not None and before.is_sparse == new.is_sparse:
            before.add_(new)
        elif new is not None:
            self.parameter.grad = before + new


def are_zeros(gradients: Sequence[Tensor]) -> bool:
    """Return whether gradients are all zeros, as ``zero_grad(set_to_none=False)`` leaves them.

    Gradients on a GPU count as other values, because the host would have to wait for the answer.
    """
    return bool(gradients) and all(
        type(gradient) is Tensor
        and not (gradient.is_sparse or is_on_gpu(gradient))
        and not gradient.any()
        for gradient in gradients
    )


def is_on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on a device other than the host."""
    return tensor.device.type != "cpu"


def _no_gradient() -> None:
    """Stand for the weak reference to a gradient that does not exist."""


@dataclass(frozen=True)
class _Before:
    """A parameter and its gradient before a call.

    The gradient is not kept alive, because most functions drop it and make a new gradient.
    """

    parameter: weakref.ref[Tensor]
    gradient: Callable[[], Tensor | None]
    version: int
    values: Tensor | None = None  # a copy on the host
    version_of_weights: int = -1

    @torch.no_grad()
    def restore(self) -> bool:
        """Restore the parameter's gradient, and return whether that was possible."""
        parameter = self.parameter()
        if parameter is None:
            return True
        gradient = self.gradient()
        if self.values is None:
            is_same = gradient is not None and parameter.grad is gradient
            if is_same:
                return version_of(gradient) == self.version
            parameter.grad = None
            return True
        if gradient is None:
            gradient = self.values.to(parameter.device)
        elif version_of(gradient) != self.version:
            gradient.copy_(self.values)
        parameter.grad = gradient
        return True

    @property
    def was_written(self) -> bool:
        """Whether the parameter itself was written to, judged by its version counter."""
        parameter = self.parameter()
        return parameter is not None and version_of(parameter) != self.version_of_weights

    @property
    def was_dropped(self) -> bool:
        """Whether the parameter has a new gradient now, or none."""
        parameter = self.parameter()
        gradient = self.gradient()
        return parameter is None or gradient is None or parameter.grad is not gradient


class GradientsBefore:
    """The gradients at the start of a call that is repeated if memory runs out.

    If the function drops existing gradients, they need no copy. For any other function, they are
    copied to the host before each call. The first complete call shows which kind it is.
    """

    def __init__(self) -> None:
        self._drops: bool | None = None
        self._before: dict[int, _Before] = {}

    def begin(self, trained: Any) -> None:
        """Record the gradients of all modules that ``trained`` reaches.

        Args:
            trained: modules, functions, their arguments, or any nesting of these.
        """
        self._before = {}
        for parameter in _parameters_of(trained):
            gradient = parameter.grad
            values = None
            if gradient is not None and not self._drops:
                values = gradient.detach().to("cpu", copy=True)
            self._before[id(parameter)] = _Before(
                weakref.ref(parameter),
                _no_gradient if gradient is None else weakref.ref(gradient),
                version_of(gradient),
                values,
                version_of(parameter),
            )

    def end(self) -> None:
        """Find out after a complete call whether the next calls need copies."""
        existing = [
            before for before in self._before.values() if before.gradient is not _no_gradient
        ]
        if existing:
            drops = all(before.was_dropped for before in existing)
            self._drops = drops and self._drops is not False

    @property
    def has_optimizer_in_backward(self) -> bool:
        """Whether an optimizer steps within the backward passes of the call."""
        parameters = (before.parameter() for before in self._before.values())
        return any(map(has_step_in_backward, parameters))

    @property
    def weights_were_written(self) -> bool:
        """Whether the call has changed weights, for example in ``optimizer.step()``."""
        return any(before.was_written for before in self._before.values())

    def restore(self, trained: Iterable[Tensor] = ()) -> bool:
        """Restore the gradients from the start of the call, and return whether that was possible.

        Args:
            trained: leaf tensors of the failed call. New tensors among them lose their gradients.
        """
        for tensor in trained:
            earlier = self._before.get(id(tensor))
            if earlier is None or earlier.parameter() is not tensor:
                tensor.grad = None
        restored = [before.restore() for before in self._before.values()]
        return all(restored)


def _parameters_of(trained: Any) -> list[Tensor]:
    parameters: list[Tensor] = []
    for module in modules_of(trained):
        parameters += module.parameters()
    return parameters
