"""Going back to where a step began: gradients, buffers, attributes, random generators.

Here are also the generators' states in a checkpoint, and what a function trains.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from robust_train.compat import (
    modules_below,
    steps_in_backward,
    tensors_of,
    version_of,
    versions_of,
)
from robust_train.host.memory import room_left
from robust_train.memory.tensors import leaves_of
from robust_train.model.errors import UserError
from robust_train.readable import MIB
from robust_train.step.attributes import Attributes
from robust_train.step.copies import ALWAYS_COPIED, Copies

Models = nn.Module | Iterable[nn.Module] | None
"""What learns in a step; None: the modules that the function of the step closes over."""

_MOST_VALUES = 5000
# to an attribute it may be two, by __dict__
_MOST_STEPS, _STEPS_TO_OTHERS = 5, 3
_MOST_ITEMS = 200  # longer lists hold samples; of dictionaries, keys count
_PLAIN = (str, bytes, int, float, type(sys), type)
# bytes of a buffer or of all frozen weights that are copied for a check, which is made once
_MOST_COPIED = 1024 * MIB
# of the host's free memory, for gradients that make room on a GPU: other processes use it, too
_MOST_OF_HOST = 0.5
# bytes of a tensor among a function's variables that is copied for a check: a data set is larger
_MOST_OF_TENSOR = 64 * MIB


# --- random generators ---


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy where something has imported it, and torch on every device."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_rank(seed: int, step: int, rank: int) -> None:
    """Have each rank but the first, whose state a checkpoint holds, draw numbers of its own."""
    if rank:
        seed_everything((seed * 1_000_003 + step * 1009 + rank) % 2**63)


def capture_rng(device: torch.device | None = None) -> dict[str, Any]:
    """Return the states in types that ``torch.load(weights_only=True)`` takes; of a GPU too if
    ``device`` is one."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        state["numpy"] = list(numpy.random.get_state())
        state["numpy"][1] = state["numpy"][1].tolist()
    if device is not None and device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(state: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Invert :func:`capture_rng`; a generator of a device that is absent here is left."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(tuple(state["numpy"]))
    if device is not None and device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


class GeneratorStates:
    """The states at this moment, to go back to within this process. Of all GPUs, whichever the
    model is on: a generator's state lies on the host, and reading it makes no CUDA context.
    ``own`` are generators that the user has made: of torch, NumPy or Python."""

    def __init__(self, own: Iterable[Any] = ()) -> None:
        self._states: list[tuple[Any, Callable[[Any], object]]] = [
            *map(_state_and_setter, own),
            (torch.get_rng_state(), torch.set_rng_state),
            (random.getstate(), random.setstate),
        ]
        if (numpy := sys.modules.get("numpy")) is not None:
            state = numpy.random.get_state()
            self._states.append((state, numpy.random.set_state))
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            all_gpus = torch.cuda.get_rng_state_all()
            self._states.append((all_gpus, torch.cuda.set_rng_state_all))

    def restore(self) -> None:
        """Set the generators back."""
        for state, set_state in self._states:
            set_state(state)

    def equal(self, other: GeneratorStates) -> bool:
        """Return whether no random number was drawn between the two moments."""
        pairs = zip(self._states, other._states, strict=False)
        return all(_are_equal(state, at) for (state, _), (at, _) in pairs)


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return all(map(_are_equal, one, other))
    return bool((one == other).all()) if hasattr(one, "all") else one == other


def _state_and_setter(generator: Any) -> tuple[Any, Callable[[Any], object]]:
    if isinstance(generator, random.Random):
        return generator.getstate(), generator.setstate
    # what a generator of NumPy's draws from
    if (bits := getattr(generator, "bit_generator", None)) is not None:
        return bits.state, partial(setattr, bits, "state")
    return generator.get_state(), generator.set_state


def _generators_in(values: Sequence[Any]) -> list[Any]:
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if (numpy := sys.modules.get("numpy")) is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    found = {one for one in set(map(type, values)) if issubclass(one, kinds)}
    found.discard(random.SystemRandom)  # the system's has no state
    if not found:
        return []
    return list({one for one in values if type(one) in found})


# --- what learns ---


def models_of(model: Models, function: Any) -> list[nn.Module]:
    """Return the modules that are named; if none are, those that a function reaches."""
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

    Beside ``models`` these are those among the variables of the function or attributes of its
    owner, as a criterion with buffers or the other half of a GAN; with all that is in them.
    """
    held = list(_reached(function, most_steps=_STEPS_TO_OTHERS))
    others = (one for one in held if isinstance(one, nn.Module))
    modules = modules_below([*models, *others])
    kinds = set(map(type, modules))
    # torch's own hold none
    own = {one for one in kinds if not one.__module__.startswith("torch.nn.")}
    for module in modules:
        if type(module) in own:
            held += vars(module).values()
    return modules, _generators_in(held)


def parameters_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the parameters of modules that are there: the first pass makes those of lazy ones."""
    homes = [own for own, _ in map(tensors_of, modules) if own]
    found = [one for own in homes for one in own.values() if one is not None]
    # Asking each of a thousand in each step takes longer than asking their types.
    if set(map(type, found)) == {nn.Parameter}:
        return found
    return [one for one in found if not is_lazy(one)]


def _reached(function: Any, most_steps: int = _MOST_STEPS) -> Iterator[Any]:
    """Yield what is a few steps away from a function, each once, the nearest first."""
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
    return held if len(held) <= _MOST_ITEMS else []


def _named_in(function: FunctionType) -> list[Any]:
    found = gc.get_referents(*(function.__closure__ or ()))
    found += function.__defaults__ or ()
    found += (function.__kwdefaults__ or {}).values()
    for name in _names_in(function.__code__):
        value = function.__globals__.get(name)
        # the functions of a library train nothing that they were not given
        is_of_a_library = (
            isinstance(value, FunctionType) and value.__module__ != function.__module__
        )
        if not is_of_a_library:
            found.append(value)
    return found


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


STEPS_IN_BACKWARD = "updates weights within the backward pass"


def why_not_again(model: nn.Module) -> str | None:
    """Return why no step of a model can start over: its weights change before memory runs out."""
    for name, parameter in model.named_parameters():
        if steps_in_backward(parameter):
            return (
                f"{name} has a hook for its gradient (register_post_accumulate_grad_hook), as of "
                f"an optimizer that {STEPS_IN_BACKWARD}"
            )
    return None


# --- a step ---


def with_modules_inside(attributes: Attributes, modules: list[nn.Module]) -> list[nn.Module]:
    """Keep the attributes of ``modules``; return these and what lists and dictionaries of theirs
    hold, as metrics, or a teacher that is hidden from ``parameters()``."""
    inside = attributes.keep(modules)
    while inside and not set(map(id, inside)).issubset(map(id, modules)):
        modules = modules_below([*modules, *inside])
        inside = attributes.keep(modules)
    return modules


class _Buffers:
    """Buffers by their places, since a module may put another tensor there, and their values.

    Quantized weights are buffers too: a large one is copied once a step has changed it.
    """

    def __init__(self, most_bytes: int = ALWAYS_COPIED) -> None:
        # what is where
        self._homes: list[tuple[dict[str, Tensor | None], Any]] = []
        self._copies = Copies(most_bytes)

    def keep(self, modules: Iterable[nn.Module]) -> None:
        """Take what modules have now as the values to go back to."""
        homes = [home for _, home in map(tensors_of, modules) if home]
        self._homes = [(home, dict(home)) for home in homes]
        now = [one for _, found in self._homes for one in found.values()]
        self._copies.take(now)

    @property
    def is_lost(self) -> bool:
        """Whether one was written to of which there is no copy."""
        return self._copies.is_lost

    def restore(self) -> None:
        """Put the tensors and values of the start back."""
        self._copies.restore()
        for home, found in self._homes:
            for name, one in found.items():
                home[name] = one


# a validation may begin in the middle of a step
_OF_A_PART = -1


class PartStart:
    """The state at the start of a part that stands for itself, as in validation: the generators,
    the attributes of modules, and the buffers of those in training mode, as where BatchNorm's
    statistics are collected."""

    def __init__(
        self, models: Iterable[nn.Module] = (), function: Any = None, *, watch: Watch | None = None
    ) -> None:
        models = list(models)
        modules, generators = taking_part(models, function)
        self._generators = GeneratorStates(generators)
        self._attributes = Attributes()
        if watch is not None:
            self._attributes = watch.attributes_with(models, _OF_A_PART)
        modules = with_modules_inside(self._attributes, modules)
        self._buffers = _Buffers()
        self._buffers.keep(one for one in modules if one.training)

    def restore(self) -> None:
        """Go back to it."""
        self._attributes.restore()
        self._buffers.restore()
        self._generators.restore()


class PassState:
    """All that a pass may change besides gradients, to go back to any number of times."""

    def __init__(
        self,
        models: Iterable[nn.Module],
        function: Any = None,
        named: set[str] | None = None,  # of which a line says already that they change
    ) -> None:
        modules, self.generators = taking_part(models, function)
        self._attributes = Attributes(named)
        self.modules = with_modules_inside(self._attributes, modules)
        self.random_numbers = GeneratorStates(self.generators)
        self._buffers = _Buffers(most_bytes=_MOST_COPIED)
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
    frozen = [one for one in weights if not one.requires_grad]
    # A trained one that is sharded is not copied to the host.
    plain = [one for one in weights if one.requires_grad and type(one) in (Tensor, nn.Parameter)]
    for found in ([*frozen, *plain], frozen):
        if sum(one.nbytes for one in found) <= _MOST_COPIED:
            return found
    return []


class _Originals:
    """Tensors with copies of their values. One that was not written to stays untouched, since its
    version shows other checks whether the step has changed it."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        # Memory is short on the device: that of what is trained is needed for activations.
        self._copies = [
            one.detach().to("cpu", copy=True) if one.requires_grad else one.detach().clone()
            for one in tensors
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
    """Variables that a function names, as counters, lists of losses, meters and centers are, to go
    back to: those that it closes over, global ones, and its owner's attributes. Containers and
    objects are kept one level deep."""

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
        for name in _names_in(function.__code__):
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
        elif isinstance(value, _CONTAINERS) and len(value) <= _MOST_ITEMS:
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
    """Put nothing back: no one can rebind a default."""


class Watch:
    """Remembers from step to step what is known of models, without keeping them alive."""

    def __init__(self) -> None:
        self._buffers = weakref.WeakKeyDictionary[nn.Module, _Buffers]()
        self._attributes = weakref.WeakKeyDictionary[nn.Module, dict[int, Attributes]]()
        self.named: set[str] = set()
        self._checked = weakref.WeakSet[nn.Module]()
        # whether gradients of earlier batches spend a step on the host, since memory ran out
        self.keeps_aside_on_host = False

    def check(self, model: nn.Module) -> None:
        """Raise UserError if no step of ``model`` can start over; looked up once."""
        if model in self._checked:
            return
        if (reason := why_not_again(model)) is not None:
            raise UserError(
                f"run.backward: {reason}, so a step cannot start over where memory runs out; "
                "step after run.backward, or call loss.backward() yourself"
            )
        self._checked.add(model)

    def buffers_with(self, models: Sequence[nn.Module]) -> _Buffers:
        """Return those of the last step that began with these models."""
        new = _Buffers()
        return self._buffers.setdefault(models[0], new) if models else new

    def attributes_with(self, models: Sequence[nn.Module], batch: int = 0) -> Attributes:
        """Return those of this batch of the last step that began with these models."""
        if not models:
            return Attributes(self.named)
        kept = self._attributes.setdefault(models[0], {})
        if batch not in kept:
            kept[batch] = Attributes(self.named)
        return kept[batch]


class _LaidAside:
    """The gradient of earlier batches, while a step computes another one for its parameter."""

    def __init__(self, parameter: Tensor, gradient: Tensor) -> None:
        self.parameter = parameter
        # the same tensor until the end: others may have a view of it
        self.gradient = gradient
        self._is_away = False
        self._on_host: Tensor | None = None  # None if all values are 0

    @property
    def may_leave(self) -> bool:
        """Whether it takes memory of a GPU that it can leave, as a view into a bucket cannot."""
        one = self.gradient
        is_plain = type(one) is Tensor and not one.is_sparse
        return (
            is_plain
            and is_on_gpu(one)
            and not self._is_away
            and one.untyped_storage().nbytes() == one.nbytes
        )

    def leave(self) -> None:
        """Move the values to the host; nobody may read the gradient until they are back."""
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
        new, before = self.parameter.grad, self.gradient
        self.come_back()
        self.parameter.grad = before
        if new is not None and before.is_sparse == new.is_sparse:
            before.add_(new)
        elif new is not None:
            self.parameter.grad = before + new


def are_zeros(gradients: Sequence[Tensor]) -> bool:
    """Return whether gradients are all zeros, as ``zero_grad(set_to_none=False)`` leaves them.

    Of other gradients the first one shows it. A GPU is not asked: the host would wait for it.
    """
    return bool(gradients) and all(
        type(one) is Tensor and not (one.is_sparse or is_on_gpu(one)) and not one.any()
        for one in gradients
    )


def is_on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor takes memory other than the host's."""
    return tensor.device.type != "cpu"


class StepStart:
    """The state at the start of an optimizer step.

    Gradients that are there already (of earlier batches) are laid aside, so that those of the step
    can be dropped; :meth:`end` adds them again. No sum can be taken apart without rounding, so both
    have to be there. If memory is short, the earlier ones go to the host until then, and the step
    takes no more of the GPU than one that adds to them in place. Zeros on the host are added to in
    place: they are easily made again. Without ``keeps_gradients`` all stay, for a framework that
    drops them itself once the step has begun. ``function`` may use other modules beside ``models``,
    which learn.
    """

    def __init__(
        self,
        watch: Watch,
        models: Sequence[nn.Module],
        function: Any = None,
        *,
        keeps_gradients: bool = True,
    ) -> None:
        self.models = models
        for model in models:
            watch.check(model)
        modules, generators = taking_part(models, function)
        self._watch = watch
        self._attributes = [watch.attributes_with(models)]
        self.modules = with_modules_inside(self._attributes[0], modules)
        parameters = parameters_of(self.modules)
        # each once
        self._known = dict(zip(map(id, parameters), parameters, strict=True))
        self._versions = versions_of(list(self._known.values()))
        self.is_open = True
        self._keeps_gradients = keeps_gradients
        self._aside: list[_LaidAside] = []
        self._zeros: list[tuple[Tensor, Tensor]] = []
        self._generators = GeneratorStates(generators)
        self._buffers = watch.buffers_with(models)
        self._buffers.keep(self.modules)
        # last: from here on end() has to be called
        self._lay_aside(self._known.values())

    def _lay_aside(self, parameters: Iterable[Tensor]) -> None:
        if not self._keeps_gradients:
            return
        found = [
            (parameter, parameter.grad) for parameter in parameters if parameter.grad is not None
        ]
        if are_zeros([gradient for _, gradient in found]):
            self._zeros += found
            return
        for parameter, gradient in found:
            self._aside.append(_LaidAside(parameter, gradient))
            parameter.grad = None
        if self._watch.keeps_aside_on_host:
            self.move_aside_to_host()

    def move_aside_to_host(self) -> bool:
        """Have the gradients that are laid aside spend the step on the host, if it has room for
        them; return whether that has freed any memory."""
        leaving = [one for one in self._aside if one.may_leave]
        size = sum(one.gradient.nbytes for one in leaving)
        if not leaving or size > _MOST_OF_HOST * room_left():
            return False
        for one in leaving:
            one.leave()
        return True

    def make_room(self) -> bool:
        """Do so in this step and, if that frees memory, in all that follow; return whether."""
        has_freed = self.move_aside_to_host()
        self._watch.keeps_aside_on_host |= has_freed
        return has_freed

    def notice(self, loss: Tensor) -> None:
        """Take the parameters of ``loss``, whose gradients it is going to change, as the step's."""
        new = [one for one in leaves_of(loss) if id(one) not in self._known]
        self._known.update(zip(map(id, new), new, strict=True))
        self._versions += versions_of(new)
        self._lay_aside(new)

    @property
    def named(self) -> set[str]:
        """Which attributes a line has said that they cannot be put back."""
        return self._watch.named

    def parameters(self) -> list[Tensor]:
        """Return what the step trains, each once."""
        found = (one for model in self.models for one in model.parameters())
        return list(dict.fromkeys(found))

    def make_gradients(self) -> None:
        """Give every parameter a gradient of zeros, as in all parts of a step but the first."""
        for parameter in self.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    @property
    def has_changed_weights(self) -> bool:
        """Whether the step has changed weights, of which there is no copy."""
        return versions_of(list(self._known.values())) != self._versions

    @property
    def is_lost(self) -> bool:
        """Whether the step has changed what there is no copy of, so that nobody can go back."""
        return self._buffers.is_lost

    def rewind(self) -> None:
        """Drop the step's gradients; put buffers, attributes and generators of the start back."""
        # looked up again: the pass may have made parameters, whose gradients would count twice
        now = parameters_of(modules_below(self.modules))
        for parameter in (*now, *self._known.values()):
            parameter.grad = None
        for parameter, zeros in self._zeros:
            parameter.grad = zeros.zero_()
        self.enter_batch(0)
        self._buffers.restore()
        self._generators.restore()

    def begin_batch(self) -> None:
        """Take the attributes at the start of the step's next batch: since the one before, hooks of
        a framework may have changed some, which do not run again."""
        number = len(self._attributes)
        attributes = self._watch.attributes_with(self.models, number)
        attributes.keep(self.modules)
        self._attributes.append(attributes)

    def enter_batch(self, number: int) -> None:
        """Put back the attributes that there were at the start of a batch of the step."""
        self._attributes[number].restore()

    def end(self) -> None:
        """Add the gradients that were laid aside; a second call does nothing."""
        if not self.is_open:
            return
        self.is_open = False
        with torch.no_grad():
            for one in self._aside:
                one.add()
        self._aside, self._zeros = [], []
        for attributes in self._attributes:
            attributes.drop()


# --- a call ---


def _none() -> None: ...


@dataclass(frozen=True)
class _Before:
    """A parameter before a call. Its gradient is not held: most functions make another."""

    parameter: weakref.ref[Tensor]
    gradient: Callable[[], Tensor | None]
    version: int
    values: Tensor | None = None  # on the host
    version_of_weights: int = -1

    @torch.no_grad()
    def restore(self) -> bool:
        """Give the parameter its gradient back; return whether that is possible."""
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
        parameter, gradient = self.parameter(), self.gradient()
        return parameter is None or gradient is None or parameter.grad is not gradient


class GradientsBefore:
    """The gradients at the start of a call that is repeated if memory runs out.

    A function that drops the gradients it finds needs none of them back. Of any other, values are
    copied to the host before each call; which kind it is shows after the first complete call.
    """

    def __init__(self) -> None:
        self._drops: bool | None = None
        self._before: dict[int, _Before] = {}

    def begin(self, trained: Any) -> None:
        """Note the gradients of all that ``trained`` (modules, functions, arguments) reaches."""
        self._before = {}
        for parameter in (one for m in modules_of(trained) for one in m.parameters()):
            gradient, values = parameter.grad, None
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
        """Learn from a complete call whether the next ones need copies."""
        had = [one for one in self._before.values() if one.gradient is not _none]
        if had:
            drops = all(one.was_dropped for one in had)
            self._drops = drops and self._drops is not False

    @property
    def weights_have_changed(self) -> bool:
        """Whether a backward pass of the call may have updated what was there before it."""
        known = (one.parameter() for one in self._before.values())
        return any(map(steps_in_backward, known))

    @property
    def weights_were_written(self) -> bool:
        """Whether the call has changed weights, for example by an optimizer's step."""
        return any(one.was_written for one in self._before.values())

    def restore(self, made: Iterable[Tensor] = ()) -> bool:
        """Go back to the start of the call; return whether that is possible.

        ``made`` are leaves that the failed call trained.
        """
        for tensor in made:
            known = self._before.get(id(tensor))
            if known is None or known.parameter() is not tensor:
                tensor.grad = None
        restored = [one.restore() for one in self._before.values()]
        return all(restored)
