"""Finds the modules that a function can reach by the names in its code.

``run.backward(loss_of, batch)`` trains the modules that ``loss_of`` closes over, and has to restore
the state of all modules that its passes may change. A step and the check of a split look for them
before the first pass, in the process that trains.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from robust_train.compat import has_step_in_backward, modules_below, tensors_of
from robust_train.step.attributes import Attributes
from robust_train.step.rng import generators_in

Models = nn.Module | Iterable[nn.Module] | None
"""The modules that learn in a step, or None for the modules that the function of the step closes
over."""

_MAX_VALUES = 5000
# The attribute of an object may be two steps away from it, because __dict__ is a step.
_MAX_STEPS = 5
# Modules that take part without being trained are looked for within fewer steps.
_MAX_STEPS_TO_OTHERS = 3
# Longer containers hold samples. In a dictionary, keys count as items, too.
MAX_ITEMS = 200
# Objects of these types lead to no modules.
_PLAIN = (str, bytes, int, float, type(sys), type)


def models_of(model: Models, function: Any) -> list[nn.Module]:
    """Return the modules that the user named, or else the modules that a function reaches."""
    if model is None:
        return modules_of(function)
    return [model] if isinstance(model, nn.Module) else list(model)


def modules_of(function: Any) -> list[nn.Module]:
    """Return the modules that a function can reach by the names in its code.

    The search begins with the variables that the function closes over, its defaults, the global
    variables that it names and the object whose method it is. It follows attributes, lists and
    dictionaries for a few steps.
    """
    return [value for value in _reached(function) if isinstance(value, nn.Module)]


def find_participants(
    models: Iterable[nn.Module], function: Any
) -> tuple[list[nn.Module], list[Any]]:
    """Return the modules whose state a step may change, and the user's random generators.

    In addition to ``models``, they are modules among the variables of the function, such as a
    criterion with buffers or the other half of a GAN, and all submodules.
    """
    held = list(_reached(function, max_steps=_MAX_STEPS_TO_OTHERS))
    others = (module for module in held if isinstance(module, nn.Module))
    modules = modules_below([*models, *others])
    kinds = set(map(type, modules))
    # Modules of torch itself do not hold user generators.
    user_kinds = {kind for kind in kinds if not kind.__module__.startswith("torch.nn.")}
    for module in modules:
        if type(module) in user_kinds:
            held += vars(module).values()
    return modules, generators_in(held)


def keep_attributes(attributes: Attributes, modules: list[nn.Module]) -> list[nn.Module]:
    """Keep the attributes of ``modules`` and of the modules in their lists and dictionaries.

    Metrics are kept in such lists, and so is a teacher that must be hidden from ``parameters()``.

    Returns:
        All these modules.
    """
    inside = attributes.keep(modules)
    while inside and not set(map(id, inside)).issubset(map(id, modules)):
        modules = modules_below([*modules, *inside])
        inside = attributes.keep(modules)
    return modules


def parameters_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the parameters of modules, except those that a lazy module has not created yet."""
    homes = [home for home, _ in map(tensors_of, modules) if home]
    parameters = [
        parameter for home in homes for parameter in home.values() if parameter is not None
    ]
    # With a thousand parameters in each step, the set of types is faster than is_lazy() for each.
    if set(map(type, parameters)) == {nn.Parameter}:
        return parameters
    return [parameter for parameter in parameters if not is_lazy(parameter)]


def _reached(function: Any, max_steps: int = _MAX_STEPS) -> Iterator[Any]:
    """Yield the objects up to ``max_steps`` away from a function, each once, the nearest first."""
    seen: set[int] = set()
    todo = deque([(function, 0)])
    while todo and len(seen) < _MAX_VALUES:
        value, steps = todo.popleft()
        if id(value) in seen or isinstance(value, _PLAIN):
            continue
        seen.add(id(value))
        yield value
        if steps < max_steps:
            todo += [(part, steps + 1) for part in _parts_of(value)]


def _parts_of(value: Any) -> list[Any]:
    """Return the objects that an object refers to, if they may lead to a user's module."""
    if isinstance(value, FunctionType):
        return _values_named_in(value)
    # Objects of torch, such as optimizers, do not refer to a user's modules.
    is_of_torch = type(value).__module__.partition(".")[0] == "torch"
    if is_of_torch or isinstance(value, (nn.Module, Tensor)):
        return []
    held = gc.get_referents(value)
    return held if len(held) <= MAX_ITEMS else []


def _values_named_in(function: FunctionType) -> list[Any]:
    referents = gc.get_referents(*(function.__closure__ or ()))
    referents += function.__defaults__ or ()
    referents += (function.__kwdefaults__ or {}).values()
    for name in names_in(function.__code__):
        value = function.__globals__.get(name)
        # The functions of a library train only modules that they get as arguments.
        is_of_a_library = (
            isinstance(value, FunctionType) and value.__module__ != function.__module__
        )
        if not is_of_a_library:
            referents.append(value)
    return referents


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the global names and attribute names in code, also in functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


STEPS_IN_BACKWARD = "updates weights within the backward pass"


def why_not_again(model: nn.Module) -> str | None:
    """Return why no step of a model can start over, or None if it can.

    If an optimizer steps within the backward pass, weights have changed before memory runs out.
    """
    for name, parameter in model.named_parameters():
        if has_step_in_backward(parameter):
            return (
                f"{name} has a hook for its gradient (register_post_accumulate_grad_hook), as for "
                f"an optimizer that {STEPS_IN_BACKWARD}"
            )
    return None
