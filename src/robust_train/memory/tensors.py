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
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import FrameType
from typing import Any, TypeVar

from robust_train.files import Json
from robust_train.memory.cuda import started_torch
from robust_train.readable import mib

StorageKey = tuple[str, int]  # A storage: its device and its address there

_MOST_VALUES = 5000
_MOST_DEPTH = 4


def live_objects(base: Any) -> list[Any]:
    """Return every object of a type (or a union of types) that the garbage collector knows."""
    # type(), not isinstance(): proxies may compute their __class__
    return [item for item in gc.get_objects() if issubclass(type(item), base)]


def live_tensors() -> list[Any]:
    """Return every tensor that Python knows, gradients too; nothing if torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    found = live_objects(torch.Tensor)
    known = set(map(id, found))
    for tensor in list(found):
        gradient = tensor.grad if tensor.is_leaf and tensor.requires_grad else None
        if gradient is not None and id(gradient) not in known:
            found.append(gradient)
    return found


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
    if torch is not None:
        for index in range(torch.cuda.device_count()):
            # also what only the autograd graph knows
            counted[f"cuda:{index}"] = torch.cuda.memory_allocated(index)
    return counted


def training_devices() -> frozenset[str]:
    """Return the devices of large tensors: the GPUs, or without CUDA the host."""
    torch = started_torch()
    if torch is not None:
        return frozenset(f"cuda:{index}" for index in range(torch.cuda.device_count()))
    return frozenset({"cpu"})


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


def largest(
    tensors: Iterable[Any],
    owners: Mapping[int, str],  # by id, as from `variables_of`
    *,
    devices: Collection[str],
    top: int,
    known: Collection[StorageKey] = (),
) -> list[HeldTensor]:
    """Return the largest tensors on ``devices`` outside of ``known`` storages."""
    by_storage: dict[StorageKey, Any] = {}
    for tensor in tensors:
        key = storage_of(tensor)
        if key is None or key[0] not in devices or key in known:
            continue
        # of the tensors that share a storage, one that a variable holds
        if key not in by_storage or id(tensor) in owners:
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
            owner=owners.get(id(tensor)),
            has_graph=tensor.grad_fn is not None,
        )
        for tensor in by_size[:top]
    ]


def variables_of(frames: Iterable[FrameType]) -> dict[int, tuple[Any, str]]:
    """Return the tensors that the variables of functions lead to, by id, each with the shortest way
    there: ``kept[0] (local variable of train, train.py:12)``. Looks at a few thousand values."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    found: dict[int, tuple[Any, str]] = {}
    seen: set[int] = set()
    # breadth first: the shortest way is the one that a person recognises
    todo = deque((value, name, where, 0) for value, name, where in _variables(frames))
    while todo and len(seen) < _MOST_VALUES:
        value, name, where, depth = todo.popleft()
        if id(value) in seen or isinstance(
            value, (str, bytes, int, float, type(sys), type)
        ):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found[id(value)] = value, f"{name} ({where})"
            if value.is_leaf and value.grad is not None:
                todo.append((value.grad, f"{name}.grad", where, depth))
        elif depth < _MOST_DEPTH:
            with contextlib.suppress(
                Exception
            ):  # another thread may change it meanwhile
                # memory may have run out, so the values that wait are few as well
                room = max(_MOST_VALUES - len(todo), 0)
                for item, step in itertools.islice(
                    _items(value, torch.nn.Module), room
                ):
                    todo.append((item, name + step, where, depth + 1))
    return found


def _items(value: Any, module: type) -> Iterator[tuple[Any, str]]:
    """Yield the parts of a value, each with the way to write it."""
    if isinstance(value, module):
        tensors = (*value.named_parameters(), *value.named_buffers())  # type: ignore[attr-defined]
        yield from ((tensor, f".{name}") for name, tensor in tensors)
    elif isinstance(value, dict):
        for key, item in dict.items(value):
            is_plain = isinstance(key, (str, int, float, bool))
            yield item, f"[{key!r}]" if is_plain else f"[{type(key).__name__}]"
    elif isinstance(value, (list, tuple, deque)):
        yield from ((item, f"[{index}]") for index, item in enumerate(value))
    else:
        own = object.__getattribute__(value, "__dict__")
        yield from ((item, f".{name}") for name, item in own.items())


def _variables(frames: Iterable[FrameType]) -> Iterator[tuple[Any, str, str]]:
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
        yield from [
            (value, name, f"global of module {module}")
            for name, value in list(content.items())
        ]


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
    return [as_json(tensor) for tensor in largest_alive(top, devices)]


def largest_alive(
    top: int,
    devices: Collection[str] | None = None,
    known: Collection[StorageKey] = (),
) -> list[HeldTensor]:
    """Return :func:`largest_tensors` as values, without those in ``known`` storages."""
    owners = {key: name for key, (_, name) in variables_of(running_frames()).items()}
    wanted = training_devices() if devices is None else devices
    return largest(live_tensors(), owners, devices=wanted, top=top, known=known)


def largest_of_failure(
    error: BaseException, top: int = 20, devices: Collection[str] | None = None
) -> list[HeldTensor]:
    """Return the largest tensors that variables of failed and running functions lead to. It neither
    searches the heap nor allocates much, so it can be called when memory has run out."""
    found = variables_of([*frames_of(error), *running_frames()])
    tensors = [tensor for tensor, _ in found.values()]
    owners = {key: name for key, (_, name) in found.items()}
    wanted = training_devices() if devices is None else devices
    return largest(tensors, owners, devices=wanted, top=top)


def as_json(tensor: HeldTensor) -> TensorFacts:
    """Return a tensor's fields in JSON's types."""
    return {**vars(tensor), "shape": list(tensor.shape)}


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
    if isinstance(value, base):
        result = _copy(value)
        copied[id(value)] = (value, result)
        return result
    if isinstance(value, (str, bytes, type)):
        return value
    if isinstance(value, tuple):
        items = [_to_cpu(item, base, copied) for item in value]
        named = hasattr(value, "_fields")
        return type(value)(*items) if named else type(value)(items)
    if isinstance(value, (set, frozenset)):
        return type(value)(_to_cpu(item, base, copied) for item in value)
    if isinstance(value, (Mapping, list, deque)) or is_dataclass(value):
        # the class itself may take other arguments than its content
        result = copy.copy(value)
        copied[id(value)] = (value, result)
        _fill(result, value, base, copied)
        return result
    return value


def _fill(result: Any, value: Any, base: type, copied: _Copied) -> None:
    if isinstance(value, Mapping):
        for key, item in list(value.items()):
            moved = _to_cpu(item, base, copied)
            if moved is not item:
                result[key] = moved
    elif isinstance(value, (list, deque)):
        for index, item in enumerate(value):
            result[index] = _to_cpu(item, base, copied)
    else:
        for item in fields(value):
            if hasattr(value, item.name):
                moved = _to_cpu(getattr(value, item.name), base, copied)
                # a frozen class refuses assignments
                object.__setattr__(result, item.name, moved)


def _copy(tensor: Any) -> Any:
    tensor = tensor.detach()
    if tensor.device.type == "cpu" or not has_gaps(tensor):
        return tensor.cpu()
    return copy_with_gaps(tensor)


def copy_with_gaps(tensor: Any) -> Any:
    """Copy a strided tensor with gaps or repeated elements to the host, with no copy on its device.
    The stretch of memory that the tensor lies in is copied as it is, and the tensor's own elements
    are picked out of it on the host."""
    torch = sys.modules["torch"]
    strides = tensor.stride()
    span = 1 + sum(
        (n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True)
    )
    stretch = torch.as_strided(tensor, (span,), (1,), tensor.storage_offset()).cpu()
    return torch.as_strided(stretch, tensor.shape, strides).contiguous()


def has_gaps(tensor: Any) -> bool:
    """Return whether torch would copy the tensor on its device before it copies it to the host."""
    torch = sys.modules["torch"]
    # a subclass (a distributed, a quantised tensor) has its own way to the host
    if (
        type(tensor) is not torch.Tensor
        or tensor.layout is not torch.strided
        or not tensor.numel()
    ):
        return False
    expected = 1
    for size, stride in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]
    ):
        if size != 1:
            if stride != expected:
                return True
            expected *= size
    return False
