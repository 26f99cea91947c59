"""What a function trains, and going back to the gradients that were there before it was called."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from robust_train.compat import version_of
from robust_train.memory.tensors import parts_of, reach

_MOST_ITEMS = 100


def modules_of(function: Any) -> list[nn.Module]:
    """Return the modules that a function can reach by the names in its code.

    These are the variables it closes over, its defaults, the globals it names, the object it is a
    method of, and what these hold in attributes, lists and dictionaries a few steps away.
    """
    reached = reach([(function, "", "")], _parts_of)
    return [value for value, _, _ in reached if isinstance(value, nn.Module)]


@dataclass(frozen=True)
class _Gradient:
    """A gradient before a call. It is not held: most functions drop it and make another."""

    parameter: weakref.ref[Tensor]
    gradient: weakref.ref[Tensor]
    version: int
    values: Tensor | None  # on the host

    @classmethod
    def of(cls, parameter: Tensor, gradient: Tensor, *, copies: bool) -> _Gradient:
        """Return what is kept of a parameter's gradient."""
        return cls(
            weakref.ref(parameter),
            weakref.ref(gradient),
            version_of(gradient),
            gradient.detach().to("cpu", copy=True) if copies else None,
        )

    @property
    def was_dropped(self) -> bool:
        """Whether the parameter has another gradient now, or none."""
        parameter = self.parameter()
        return (
            parameter is None
            or parameter.grad is None
            or parameter.grad is not self.gradient()
        )

    @torch.no_grad()
    def restore(self) -> bool:
        """Give the parameter this gradient back; return whether that is possible."""
        parameter, gradient = self.parameter(), self.gradient()
        if parameter is None:
            return True
        if self.values is None:
            if not self.was_dropped:
                return gradient is not None and version_of(gradient) == self.version
            parameter.grad = None
        elif gradient is None:
            parameter.grad = self.values.to(parameter.device)
        else:
            if version_of(gradient) != self.version:
                gradient.copy_(self.values)
            parameter.grad = gradient
        return True


class GradientsBefore:
    """The gradients at the start of a call that is repeated if memory runs out.

    A function that drops the gradients it finds needs none of them back. Of any other, values are
    copied to the host before each call; which kind it is shows after the first complete call.
    """

    def __init__(self) -> None:
        self._drops: bool | None = None
        self._known: dict[int, weakref.ref[Tensor]] = {}
        self._before: list[_Gradient] = []

    def begin(self, trained: Any) -> None:
        """Note the gradients of all that ``trained`` (modules, functions, arguments) reaches."""
        self._known, self._before = {}, []
        for module in modules_of(trained):
            for parameter in module.parameters():
                self._known[id(parameter)] = weakref.ref(parameter)
                if parameter.grad is not None:
                    copies = self._drops is not True
                    self._before.append(
                        _Gradient.of(parameter, parameter.grad, copies=copies)
                    )

    def end(self) -> None:
        """Learn from a complete call whether the next ones need copies."""
        if self._before:
            drops = all(gradient.was_dropped for gradient in self._before)
            self._drops = drops and self._drops is not False

    def restore(self, made: Iterable[Tensor] = ()) -> bool:
        """Go back to the start of the call; return whether that is possible.

        ``made`` are leaves that the failed call trained.
        """
        had = {id(gradient.parameter()) for gradient in self._before}
        known = [reference() for reference in self._known.values()]
        for tensor in (*known, *made):
            if tensor is not None and id(tensor) not in had:
                tensor.grad = None
        restored = [gradient.restore() for gradient in self._before]
        return all(restored)


def _parts_of(value: Any) -> list[tuple[Any, str]]:
    if isinstance(value, FunctionType):
        held = _named_in(value)
    elif isinstance(value, MethodType):
        held = [value.__self__, value.__func__]
    elif isinstance(value, functools.partial):
        held = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, (dict, list, tuple, set)):
        # longer ones hold samples
        return list(parts_of(value)) if len(value) <= _MOST_ITEMS else []
    elif isinstance(value, (nn.Module, Tensor)) or _is_from_torch(value):
        return []
    else:
        return list(parts_of(value))
    return [(item, "") for item in held]


def _is_from_torch(value: Any) -> bool:
    """Return whether torch has made an object, as an optimizer: it holds none of a user's."""
    return type(value).__module__.partition(".")[0] == "torch"


def _named_in(function: FunctionType) -> list[Any]:
    held: list[Any] = [
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
    ]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # a variable that is not assigned yet
            continue
    for name in _names_in(function.__code__):
        value = function.__globals__.get(name)
        # the functions of a library train nothing that they were not given
        if (
            not isinstance(value, FunctionType)
            or value.__module__ == function.__module__
        ):
            held.append(value)
    return held


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
