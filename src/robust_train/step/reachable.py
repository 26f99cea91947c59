"""The modules that a function can reach: those that learn in a step, and others that take part.

A step, or the check of a split, asks before its first pass, in the process that trains.
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

_MOST_VALUES = 5000
# An attribute may be two steps away, by __dict__.
_MOST_STEPS = 5
_STEPS_TO_OTHERS = 3
# Longer lists hold samples. Of dictionaries, keys count.
MOST_ITEMS = 200
_PLAIN = (str, bytes, int, float, type(sys), type)


def models_of(model: Models, function: Any) -> list[nn.Module]:
    """Return the named modules, or without names, those that a function reaches."""
    if model is None:
        return modules_of(function)
    return [model] if isinstance(model, nn.Module) else list(model)


def modules_of(function: Any) -> list[nn.Module]:
    """Return the modules that a function can reach by the names in its code.

    These are the variables it closes over, its defaults, the globals it names, the object it is a
    method of, and what these hold in attributes, lists and dictionaries a few steps away.
    """
    return [value for value in _reached(function) if isinstance(value, nn.Module)]


def taking_part(models: Iterable[nn.Module], function: Any) -> tuple[list[nn.Module], list[Any]]:
    """Return the modules whose state a step may change, and the user's generators.

    In addition to ``models``, these are modules among the variables of the function or attributes
    of its owner, such as a criterion with buffers or the other half of a GAN, with their
    submodules.
    """
    held = list(_reached(function, most_steps=_STEPS_TO_OTHERS))
    others = (module for module in held if isinstance(module, nn.Module))
    modules = modules_below([*models, *others])
    kinds = set(map(type, modules))
    # torch's own hold none
    user_kinds = {kind for kind in kinds if not kind.__module__.startswith("torch.nn.")}
    for module in modules:
        if type(module) in user_kinds:
            held += vars(module).values()
    return modules, generators_in(held)


def with_modules_inside(attributes: Attributes, modules: list[nn.Module]) -> list[nn.Module]:
    """Keep the attributes of ``modules``, and return these and the modules in their lists and
    dictionaries, for example metrics, or a teacher that is hidden from ``parameters()``."""
    inside = attributes.keep(modules)
    while inside and not set(map(id, inside)).issubset(map(id, modules)):
        modules = modules_below([*modules, *inside])
        inside = attributes.keep(modules)
    return modules


def parameters_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the existing parameters of modules. The first pass creates those of lazy modules."""
    homes = [home for home, _ in map(tensors_of, modules) if home]
    parameters = [
        parameter for home in homes for parameter in home.values() if parameter is not None
    ]
    # Asking each of a thousand in each step takes longer than asking their types.
    if set(map(type, parameters)) == {nn.Parameter}:
        return parameters
    return [parameter for parameter in parameters if not is_lazy(parameter)]


def _reached(function: Any, most_steps: int = _MOST_STEPS) -> Iterator[Any]:
    """Yield the objects a few steps away from a function, each once, the nearest first."""
    seen: set[int] = set()
    todo = deque([(function, 0)])
    while todo and len(seen) < _MOST_VALUES:
        value, steps = todo.popleft()
        if id(value) in seen or isinstance(value, _PLAIN):
            continue
        seen.add(id(value))
        yield value
        if steps < most_steps:
            todo += [(part, steps + 1) for part in _parts_of(value)]


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, FunctionType):
        return _named_in(value)
    # what torch has made, as an optimizer, holds none of a user's
    is_torchs = type(value).__module__.partition(".")[0] == "torch"
    if is_torchs or isinstance(value, (nn.Module, Tensor)):
        return []
    held = gc.get_referents(value)
    return held if len(held) <= MOST_ITEMS else []


def _named_in(function: FunctionType) -> list[Any]:
    referents = gc.get_referents(*(function.__closure__ or ()))
    referents += function.__defaults__ or ()
    referents += (function.__kwdefaults__ or {}).values()
    for name in names_in(function.__code__):
        value = function.__globals__.get(name)
        # the functions of a library train nothing that they were not given
        is_of_a_library = (
            isinstance(value, FunctionType) and value.__module__ != function.__module__
        )
        if not is_of_a_library:
            referents.append(value)
    return referents


def names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


STEPS_IN_BACKWARD = "updates weights within the backward pass"


def why_not_again(model: nn.Module) -> str | None:
    """Return why no step of a model can start over: its weights change before memory runs out."""
    for name, parameter in model.named_parameters():
        if has_step_in_backward(parameter):
            return (
                f"{name} has a hook for its gradient (register_post_accumulate_grad_hook), as of "
                f"an optimizer that {STEPS_IN_BACKWARD}"
            )
    return None
