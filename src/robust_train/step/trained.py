"""What a function trains, and going back to the gradients that were there before it was called."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from robust_train.compat import version_of
from robust_train.memory.tensors import frames_of

_MOST_STEPS = (
    4  # from the function to a module: attributes of attributes, items of lists
)
_MOST_ITEMS = 100  # longer lists hold samples


def modules_of(function: Any) -> list[nn.Module]:
    """Return the modules that a function can reach by the names in its code.

    These are the variables it closes over, its defaults, the globals it names, the object it is a
    method of, and what these hold in attributes, lists and dictionaries a few steps away.
    """
    found: dict[int, nn.Module] = {}
    seen: dict[int, Any] = {}
    nearest = [function]
    for _ in range(_MOST_STEPS + 1):
        further: list[Any] = []
        for item in nearest:
            if id(item) in seen:
                continue
            seen[id(item)] = item
            if isinstance(item, nn.Module):
                found[id(item)] = item
            else:
                further += _held_by(item)
        nearest = further
    return list(found.values())


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors to which the backward pass of ``loss`` adds a gradient.

    A part that is computed again in the backward pass (reentrant checkpointing) hides its own.
    """
    seen = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable  # type: ignore[attr-defined]
        waiting += [function for function, _ in node.next_functions]


def leaves_in(error: BaseException) -> list[Tensor]:
    """Return what the functions that ``error`` has ended were training."""
    found: dict[int, Tensor] = {}
    running: set[FrameType] = set()
    caller = inspect.currentframe()
    while caller is not None:
        running.add(caller)
        caller = caller.f_back
    for frame in frames_of(error):
        if (
            frame in running
        ):  # it may hold models of which the failed function knew nothing
            continue
        for value in frame.f_locals.values():
            leaves: Iterable[Tensor] = ()
            if isinstance(value, nn.Module):
                leaves = value.parameters()
            elif isinstance(value, Tensor) and value.requires_grad:
                leaves = [value] if value.is_leaf else leaves_of(value)
            found |= {id(leaf): leaf for leaf in leaves if leaf.requires_grad}
    return list(found.values())


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


def _held_by(item: Any) -> list[Any]:
    if isinstance(item, FunctionType):
        return _named_in(item)
    if isinstance(item, MethodType):
        return [item.__self__, item.__func__]
    if isinstance(item, functools.partial):
        return [item.func, *item.args, *item.keywords.values()]
    if isinstance(item, Mapping) and len(item) <= _MOST_ITEMS:
        return list(item.values())
    if isinstance(item, (list, tuple, set)):
        return list(item) if len(item) <= _MOST_ITEMS else []
    is_plain = isinstance(item, (type, ModuleType, Tensor)) or not hasattr(
        item, "__dict__"
    )
    if is_plain or type(item).__module__.partition(".")[0] == "torch":
        return []
    return list(vars(item).values())


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
