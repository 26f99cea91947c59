"""Gradients that are there before a step or a call, which it must not lose when it is repeated."""

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
    """The gradient of earlier batches, kept aside while a step computes a new gradient for its
    parameter."""

    def __init__(self, parameter: Tensor, gradient: Tensor) -> None:
        self.parameter = parameter
        # the same tensor until the end: others may have a view of it
        self.gradient = gradient
        self._is_away = False
        self._on_host: Tensor | None = None  # None if all values are 0

    @property
    def may_leave(self) -> bool:
        """Whether it takes memory of a GPU that it can leave, as a view into a bucket cannot."""
        gradient = self.gradient
        is_plain = type(gradient) is Tensor and not gradient.is_sparse
        return (
            is_plain
            and is_on_gpu(gradient)
            and not self._is_away
            and gradient.untyped_storage().nbytes() == gradient.nbytes
        )

    def leave(self) -> None:
        """Move the values to the host. The gradient must not be read until they are back."""
        # zero_grad(set_to_none=False) leaves zeros, which need no copy
        if self.gradient.any():
            self._on_host = self.gradient.detach().to("cpu", copy=True)
        self._is_away = True
        self.gradient.untyped_storage().resize_(0)

    def come_back(self) -> None:
        """Give the gradient its values again."""
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
        """Add the step's gradient, and make the sum the parameter's."""
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

    If gradients are not zeros, the first shows it. A GPU is not asked: the host would wait for it.
    """
    return bool(gradients) and all(
        type(gradient) is Tensor
        and not (gradient.is_sparse or is_on_gpu(gradient))
        and not gradient.any()
        for gradient in gradients
    )


def is_on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor takes memory other than the host's."""
    return tensor.device.type != "cpu"


def _none() -> None: ...


@dataclass(frozen=True)
class _Before:
    """A parameter before a call. Its gradient is not held: most functions make another."""

    parameter: weakref.ref[Tensor]
    gradient: Callable[[], Tensor | None]
    version: int
    values: Tensor | None = None  # a copy on the host
    version_of_weights: int = -1

    @torch.no_grad()
    def restore(self) -> bool:
        """Give the parameter its gradient back, and return whether that is possible."""
        parameter = self.parameter()
        if parameter is None:
            return True
        gradient = self.gradient()
        if self.values is None:
            has_it = gradient is not None and parameter.grad is gradient
            if not has_it:
                parameter.grad = None
            return not has_it or version_of(gradient) == self.version
        if gradient is None:
            gradient = self.values.to(parameter.device)
        elif version_of(gradient) != self.version:
            gradient.copy_(self.values)
        parameter.grad = gradient
        return True

    @property
    def was_written(self) -> bool:
        """Whether the parameter itself has changed, as far as its version shows."""
        parameter = self.parameter()
        return parameter is not None and version_of(parameter) != self.version_of_weights

    @property
    def was_dropped(self) -> bool:
        """Whether the parameter has another gradient now, or none."""
        parameter = self.parameter()
        gradient = self.gradient()
        return parameter is None or gradient is None or parameter.grad is not gradient


class GradientsBefore:
    """The gradients at the start of a call that is repeated if memory runs out.

    A function that drops existing gradients does not need them back. For any other function, values
    are copied to the host before each call. The first complete call shows which kind it is.
    """

    def __init__(self) -> None:
        self._drops: bool | None = None
        self._before: dict[int, _Before] = {}

    def begin(self, trained: Any) -> None:
        """Note the gradients of all that ``trained`` (modules, functions, arguments) reaches."""
        self._before = {}
        for parameter in (parameter for m in modules_of(trained) for parameter in m.parameters()):
            gradient = parameter.grad
            values = None
            if gradient is not None and not self._drops:
                values = gradient.detach().to("cpu", copy=True)
            self._before[id(parameter)] = _Before(
                weakref.ref(parameter),
                _none if gradient is None else weakref.ref(gradient),
                version_of(gradient),
                values,
                version_of(parameter),
            )

    def end(self) -> None:
        """Learn from a complete call whether the next calls need copies."""
        had = [gradient for gradient in self._before.values() if gradient.gradient is not _none]
        if had:
            drops = all(gradient.was_dropped for gradient in had)
            self._drops = drops and self._drops is not False

    @property
    def weights_have_changed(self) -> bool:
        """Whether a backward pass of the call may have updated what was there before it."""
        parameters = (gradient.parameter() for gradient in self._before.values())
        return any(map(has_step_in_backward, parameters))

    @property
    def weights_were_written(self) -> bool:
        """Whether the call has changed weights, for example by an optimizer's step."""
        return any(gradient.was_written for gradient in self._before.values())

    def restore(self, made: Iterable[Tensor] = ()) -> bool:
        """Go back to the start of the call, and return whether that is possible.

        ``made`` are leaves that the failed call trained.
        """
        for tensor in made:
            earlier = self._before.get(id(tensor))
            if earlier is None or earlier.parameter() is not tensor:
                tensor.grad = None
        restored = [gradient.restore() for gradient in self._before.values()]
        return all(restored)
