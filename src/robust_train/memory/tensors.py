"""Which tensors are alive, which variables hold them, and their way to the host."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import itertools
import sys
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import FrameType
from typing import Any, TypeVar

from robust_train.memory.cuda import started_torch
from robust_train.model.json import Json
from robust_train.readable import mib

StorageKey = tuple[str, int]  # A storage: its device and its address there
Reached = tuple[Any, str, str]  # A value, the way to write it, and where that begins

_MOST_VALUES = 5000
_MOST_DEPTH = 4
_PLAIN = (str, bytes, int, float, type(sys), type)


def live_objects(base: Any) -> list[Any]:
    """Return every object of a type (or a union of types) that the garbage collector knows."""
    # type(), not isinstance(): proxies may compute their __class__
    return [item for item in gc.get_objects() if issubclass(type(item), base)]


def live_tensors() -> list[Any]:
    """Return every tensor that Python knows, gradients too; nothing if torch is not loaded."""
    torch = sys.modules.get("torch")
    found = {} if torch is None else {id(t): t for t in live_objects(torch.Tensor)}
    gradients = [t.grad for t in found.values() if t.is_leaf and t.requires_grad]
    found |= {id(gradient): gradient for gradient in gradients if gradient is not None}
    return list(found.values())


def storage_of(tensor: Any) -> StorageKey | None:
    """Return the storage; None if it has no memory of its own: meta, fake, sparse tensors."""
    try:
        address = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return (str(tensor.device), address) if address else None


def storages(tensors: Iterable[Any]) -> dict[StorageKey, int]:
    """Return the bytes of each storage that the tensors share."""
    keys = ((storage_of(tensor), tensor) for tensor in tensors)
    return {
        key: tensor.untyped_storage().nbytes()
        for key, tensor in keys
        if key is not None
    }


def bytes_on(tensors: Iterable[Any]) -> dict[str, int]:
    """Return bytes by device: the host's of the tensors' storages, a GPU's of its allocator."""
    counted: dict[str, int] = {}
    for (device, _), size in storages(tensors).items():
        counted[device] = counted.get(device, 0) + size
    torch = started_torch()
    for device in () if torch is None else training_devices():
        # also what only the autograd graph knows
        counted[device] = torch.cuda.memory_allocated(device)
    return counted


def training_devices() -> list[str]:
    """Return the devices of large tensors: the GPUs, or without CUDA the host."""
    torch = started_torch()
    if torch is None:
        return ["cpu"]
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


# --- which variables lead to them ---


@dataclass(frozen=True)
class HeldTensor:
    """A tensor that is alive."""

    bytes: int  # of its storage, which it may share with others
    shape: tuple[int, ...]  # its own
    dtype: str  # `float32`
    device: str  # `cuda:0`, `cpu`
    # `kept[0] (global of module x)`; None if no variable of a known function leads there
    owner: str | None
    has_graph: (
        bool  # it keeps the graph that it was computed by, and what that has saved
    )

    def __str__(self) -> str:
        graph = " with the graph it was computed by" if self.has_graph else ""
        held = "" if self.owner is None else f", held by {self.owner}"
        return f"{mib(self.bytes, 1)} {self.dtype} {self.shape} on {self.device}{graph}{held}"

    def as_json(self) -> TensorFacts:
        """Return the fields in JSON's types."""
        return {**vars(self), "shape": list(self.shape)}


TensorFacts = dict[str, Json]  # The fields of `HeldTensor`


def largest_tensors(
    top: int = 20, *, devices: Collection[str] | None = None
) -> list[TensorFacts]:
    """Return the largest tensors that are alive, the largest first, in JSON's types.

    Tensors that share a storage count once. ``owner`` is the variable of a running function, or the
    global, that leads to a tensor; None if there is none.

    Args:
        top: how many at most.
        devices: ``cuda:0``, ``cpu`` …; by default the GPUs, or without CUDA the host.
    """
    return [tensor.as_json() for tensor in largest_alive(top, devices)]


def largest_alive(
    top: int,
    devices: Collection[str] | None = None,
    known: Collection[StorageKey] = (),
    error: BaseException | None = None,
) -> list[HeldTensor]:
    """Return :func:`largest_tensors` as values, without those in ``known`` storages.

    With ``error`` only those that variables of failed and running functions lead to. That neither
    searches the heap nor allocates much, so it can be called when memory has run out.
    """
    failed = [] if error is None else list(frames_of(error))
    held = variables_of([*failed, *running_frames()])
    wanted = training_devices() if devices is None else devices
    tensors = (
        live_tensors() if error is None else [tensor for tensor, _ in held.values()]
    )
    by_storage: dict[StorageKey, Any] = {}
    for tensor in tensors:
        key = storage_of(tensor)
        if key is None or key[0] not in wanted or key in known:
            continue
        # of the tensors that share a storage, one that a variable holds
        if key not in by_storage or id(tensor) in held:
            by_storage[key] = tensor
    by_size = sorted(
        by_storage.values(), key=lambda tensor: -tensor.untyped_storage().nbytes()
    )
    return [
        HeldTensor(
            bytes=tensor.untyped_storage().nbytes(),
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            device=str(tensor.device),
            owner=held.get(id(tensor), (tensor, None))[1],
            has_graph=tensor.grad_fn is not None,
        )
        for tensor in by_size[:top]
    ]


def variables_of(frames: Iterable[FrameType]) -> dict[int, tuple[Any, str]]:
    """Return the tensors that the variables of functions lead to, by id, each with the shortest way
    there: ``kept[0] (local variable of train, train.py:12)``. Looks at a few thousand values."""
    torch = sys.modules.get("torch")
    return {
        id(value): (value, f"{name} ({where})")
        for value, name, where in reach(_variables(frames), parts_of)
        if torch is not None and isinstance(value, torch.Tensor)
    }


def reach(
    roots: Iterable[Reached],
    parts: Callable[[Any], Iterable[tuple[Any, str]]],
    most_steps: int = _MOST_DEPTH,
) -> Iterator[Reached]:
    """Yield what is a few steps away from ``roots``, each once, by the shortest way: it is the one
    that a person recognises. ``parts`` returns the parts of a value, each with how to write it."""
    seen: set[int] = set()
    todo = deque((*root, 0) for root in roots)
    while todo and len(seen) < _MOST_VALUES:
        value, name, where, depth = todo.popleft()
        if id(value) in seen or isinstance(value, _PLAIN):
            continue
        seen.add(id(value))
        yield value, name, where
        if depth == most_steps:
            continue
        # memory may have run out, so the values that wait are few as well
        room = max(_MOST_VALUES - len(todo), 0)
        with contextlib.suppress(Exception):  # another thread may change it meanwhile
            for part, step in itertools.islice(parts(value), room):
                todo.append((part, name + step, where, depth + 1))


def parts_of(value: Any) -> Iterator[tuple[Any, str]]:
    """Yield the parts of a value, each with the way to write it."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.is_leaf and value.grad is not None:
            yield value.grad, ".grad"
    elif torch is not None and isinstance(value, torch.nn.Module):
        tensors = (*value.named_parameters(), *value.named_buffers())
        yield from ((tensor, f".{name}") for name, tensor in tensors)
    elif isinstance(value, dict):
        for key, item in dict.items(value):
            is_plain = isinstance(key, (str, int, float, bool))
            yield item, f"[{key!r}]" if is_plain else f"[{type(key).__name__}]"
    elif isinstance(value, (list, tuple, set, deque)):
        yield from ((item, f"[{index}]") for index, item in enumerate(value))
    else:
        own = object.__getattribute__(value, "__dict__")
        yield from ((item, f".{name}") for name, item in own.items())


def _variables(frames: Iterable[FrameType]) -> Iterator[Reached]:
    """Yield the local variables of the functions, then the globals of their modules."""
    modules: dict[str, Mapping[str, Any]] = {}
    for frame in frames:
        module, code = str(frame.f_globals.get("__name__")), frame.f_code
        if _is_ours(module):
            continue
        modules[module] = frame.f_globals
        if not code.co_flags & inspect.CO_OPTIMIZED:  # the body of a module or a class
            continue
        where = f"local variable of {code.co_name}, {code.co_filename}:{frame.f_lineno}"
        variables = frame.f_locals
        yield from [(value, name, where) for name, value in list(variables.items())]
        if sys.version_info < (3, 13):
            # the frame keeps this copy, and with it all that the function drops later
            variables.clear()
    for module, content in modules.items():
        where = f"global of module {module}"
        yield from [(value, name, where) for name, value in list(content.items())]


def _is_ours(module: str) -> bool:
    """Return whether a module is the launcher's; the built-in trainer counts as a user's."""
    return module.startswith("robust_train.") and not module.startswith(
        "robust_train.vision."
    )


def frames_of(error: BaseException) -> Iterator[FrameType]:
    """Yield the frames of the functions that failed, with those of the causes."""
    for current in with_causes(error):
        for frame, _ in traceback.walk_tb(current.__traceback__):
            yield frame


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and all that it was raised from, each once."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        pending += [
            current.__cause__,
            current.__context__,
            *getattr(current, "exceptions", ()),
        ]


def running_frames() -> list[FrameType]:
    """Return the frames of all functions of users and libraries that run, in every thread."""
    # a list that holds its own function's frame would keep itself, and so all of these, alive
    return [
        frame
        for top in sys._current_frames().values()
        for frame, _ in traceback.walk_stack(top)
        if not _is_ours(str(frame.f_globals.get("__name__")))
    ]


def reached_by_running(base: Any) -> list[Any]:
    """Return the objects of a type that variables of running functions lead to."""
    found = reach(_variables(running_frames()), parts_of)
    return [value for value, _, _ in found if isinstance(value, base)]


# --- which of them learn ---


def leaves_of(loss: Any) -> Iterator[Any]:
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
            yield node.variable
        waiting += [function for function, _ in node.next_functions]


def leaves_in(error: BaseException) -> list[Any]:
    """Return what the functions that ``error`` has ended were training."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    # a function that runs may hold models of which the failed one knew nothing
    running = {frame for frame, _ in traceback.walk_stack(inspect.currentframe())}
    found: dict[int, Any] = {}
    for frame in frames_of(error):
        for value in () if frame in running else frame.f_locals.values():
            leaves: Iterable[Any] = ()
            if isinstance(value, torch.nn.Module):
                leaves = value.parameters()
            elif isinstance(value, torch.Tensor) and value.requires_grad:
                leaves = [value] if value.is_leaf else leaves_of(value)
            found |= {id(leaf): leaf for leaf in leaves if leaf.requires_grad}
    return list(found.values())


# --- to the host ---


_T = TypeVar("_T")


def safe_tensor_to_cpu(value: _T) -> _T:
    """Return ``value`` with every tensor in it on the host and cut off its graph.

    Mappings, lists, tuples, sets and dataclasses are rebuilt as what they are, nested in any depth;
    everything else is passed on as it is. A tensor that occurs twice is one tensor in the result.
    Nothing is allocated on the GPU: torch's own ``cpu()`` first makes a contiguous copy there of a
    tensor with gaps. A tensor that is on the host already shares its memory with the result.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return value
    result: _T = _to_cpu(value, torch.Tensor, {})
    return result


_Copied = dict[int, tuple[Any, Any]]
"""By id: the original, kept so that its id stays its own, and its copy."""


def _to_cpu(value: Any, base: type, copied: _Copied) -> Any:
    if id(value) in copied:
        return copied[id(value)][1]
    if isinstance(value, tuple):
        items = [_to_cpu(item, base, copied) for item in value]
        named = hasattr(value, "_fields")
        return type(value)(*items) if named else type(value)(items)
    if isinstance(value, (set, frozenset)):
        return type(value)(_to_cpu(item, base, copied) for item in value)
    if isinstance(value, base):
        result = tensor_to_cpu(value)
    elif isinstance(value, (Mapping, list, deque)) or _is_dataclass(value):
        # the class itself may take other arguments than its content
        result = copy.copy(value)
    else:
        return value
    copied[id(value)] = (value, result)
    if isinstance(value, (Mapping, list, deque)):
        keys = value if isinstance(value, Mapping) else range(len(value))
        for key in list(keys):
            moved = _to_cpu(value[key], base, copied)
            if moved is not value[key]:
                result[key] = moved
    elif _is_dataclass(value):
        for item in fields(value):
            if hasattr(value, item.name):
                moved = _to_cpu(getattr(value, item.name), base, copied)
                # a frozen class refuses assignments
                object.__setattr__(result, item.name, moved)
    return result


def _is_dataclass(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def tensor_to_cpu(tensor: Any) -> Any:
    """Copy a tensor to the host, with no copy on its device.

    Of one with gaps or repeated elements the stretch of memory that it lies in is copied as it is,
    and the tensor's own elements are picked out of it on the host.
    """
    torch = sys.modules["torch"]
    tensor = tensor.detach()
    # a subclass (a distributed, a quantised tensor) has its own way to the host
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    is_moved = tensor.device.type != "cpu"
    if not (is_plain and is_moved and tensor.numel()) or tensor.is_contiguous():
        return tensor.cpu()
    return picked_out(tensor)


def picked_out(tensor: Any) -> Any:
    """Return a strided tensor on the host, by way of the stretch that it lies in."""
    torch = sys.modules["torch"]
    strides = tensor.stride()
    span = 1 + sum(
        (n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True)
    )
    stretch = torch.as_strided(tensor, (span,), (1,), tensor.storage_offset()).cpu()
    return torch.as_strided(stretch, tensor.shape, strides).clone()
