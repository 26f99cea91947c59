"""Which tensors are alive, which of them a failure holds or training changes, and their way to the
host."""

from __future__ import annotations

import copy
import gc
import inspect
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import FrameType
from typing import Any, TypeVar

from robust_train.memory.cuda import started_torch
from robust_train.model.json import Json
from robust_train.readable import mib

StorageKey = tuple[str, int]  # A storage: its device and its address there


def live_objects(base: Any) -> list[Any]:
    """Return every object of a type (or a union of types) that the garbage collector knows."""
    # type(), not isinstance(): proxies may compute their __class__
    return [item for item in gc.get_objects() if issubclass(type(item), base)]


def live_tensors() -> list[Any]:
    """Return every tensor that Python knows, including gradients. Empty if torch is not loaded."""
    torch = sys.modules.get("torch")
    live = {} if torch is None else {id(t): t for t in live_objects(torch.Tensor)}
    gradients = [t.grad for t in live.values() if t.is_leaf and t.requires_grad]
    live |= {id(gradient): gradient for gradient in gradients if gradient is not None}
    return list(live.values())


def storage_of(tensor: Any) -> StorageKey | None:
    """Return the storage, or None if it has no memory of its own: meta, fake, sparse tensors."""
    try:
        address = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return (str(tensor.device), address) if address else None


def storages(tensors: Iterable[Any]) -> dict[StorageKey, int]:
    """Return the bytes of each storage that the tensors share."""
    storage_of_tensor = {storage_of(tensor): tensor for tensor in tensors}
    return {
        key: tensor.untyped_storage().nbytes()
        for key, tensor in storage_of_tensor.items()
        if key is not None
    }


def bytes_on(tensors: Iterable[Any]) -> dict[str, int]:
    """Return bytes by device: the host's of the tensors' storages, a GPU's of its allocator."""
    counted = Counter[str]()
    for (device, _), size in storages(tensors).items():
        counted[device] += size
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


# --- the largest ---


@dataclass(frozen=True)
class LiveTensor:
    """A tensor that is alive."""

    bytes: int  # the size of its storage, which it may share
    shape: tuple[int, ...]  # its own
    dtype: str  # `float32`
    device: str  # `cuda:0`, `cpu`
    has_graph: (
        # it keeps the graph that it was computed by, and what that has saved
        bool
    )

    def __str__(self) -> str:
        graph = " with the graph it was computed by" if self.has_graph else ""
        return f"{mib(self.bytes, 1)} {self.dtype} {self.shape} on {self.device}{graph}"

    def as_json(self) -> dict[str, Json]:
        """Return the fields in JSON's types."""
        return {**vars(self), "shape": list(self.shape)}


def largest_tensors(
    top: int = 20, *, devices: Collection[str] | None = None
) -> list[dict[str, Json]]:
    """Return the largest tensors that are alive, the largest first, in JSON's types.

    Tensors that share a storage count once.

    Args:
        top: how many at most.
        devices: ``cuda:0``, ``cpu`` …. The default is the GPUs, or without CUDA the host.
    """
    return [tensor.as_json() for tensor in largest_alive(top, devices)]


def largest_alive(
    top: int, devices: Collection[str] | None = None, seen: Collection[StorageKey] = ()
) -> list[LiveTensor]:
    """Return `largest_tensors` as values, without those in ``known`` storages."""
    wanted = training_devices() if devices is None else devices
    alive = live_tensors()
    by_storage = {storage_of(tensor): tensor for tensor in alive}
    sizes = storages(alive)
    new = [key for key in sizes if key[0] in wanted and key not in seen]
    largest = sorted(new, key=lambda key: sizes[key], reverse=True)[:top]
    return [
        LiveTensor(
            sizes[key],
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            str(tensor.device),
            has_graph=tensor.grad_fn is not None,
        )
        for key in largest
        for tensor in [by_storage[key]]
    ]


# --- what a failure holds ---


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
        pending += [current.__cause__, current.__context__]
        pending += getattr(current, "exceptions", ())


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
    leaves_by_id: dict[int, Any] = {}
    for frame in frames_of(error):
        for value in () if frame in running else frame.f_locals.values():
            leaves: Iterable[Any] = ()
            if isinstance(value, torch.nn.Module):
                leaves = value.parameters()
            elif isinstance(value, torch.Tensor) and value.requires_grad:
                leaves = [value] if value.is_leaf else leaves_of(value)
            leaves_by_id |= {id(leaf): leaf for leaf in leaves if leaf.requires_grad}
    return list(leaves_by_id.values())


# --- to the host ---


_T = TypeVar("_T")


def safe_tensor_to_cpu(value: _T) -> _T:
    """Return ``value`` with every tensor in it on the host and cut off its graph.

    Mappings, lists, tuples, sets and dataclasses keep their types, at any depth. All other values
    are passed on unchanged. A tensor that occurs twice is a single tensor in the result. Nothing is
    allocated on the GPU: torch's own ``cpu()`` first makes a contiguous copy there of a tensor with
    gaps. A tensor that is on the host already shares its memory with the result.

    Args:
        value: tensors in any nesting of containers, or any other value.

    Returns:
        The same structure, with detached tensors on the host.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return value

    def moved(item: Any, name: str) -> Any:
        return tensor_to_cpu(item) if isinstance(item, torch.Tensor) else WALKED

    result: _T = rebuilt(value, moved)
    return result


WALKED = object()
"""The result of a change for a value that `rebuilt` has to walk into."""


def rebuilt(
    value: Any,
    change: Callable[[Any, str], Any],
    name: str = "batch",
    seen: dict[int, tuple[Any, Any]] | None = None,
) -> Any:
    """Rebuild mappings, sequences, sets and dataclasses, with their types, around the results of
    ``change`` for their values. It gets each value with its place, and repeated values once."""
    seen = {} if seen is None else seen
    if id(value) in seen:
        return seen[id(value)][1]
    changed = change(value, name)
    if changed is not WALKED:
        # Keep the value too, so that its id is not reused.
        seen[id(value)] = value, changed
        return changed
    if isinstance(value, (tuple, set, frozenset)):
        items = [
            rebuilt(item, change, f"{name}[{index}]", seen) for index, item in enumerate(value)
        ]
        # named tuples take their fields one by one
        return getattr(value, "_make", type(value))(items)
    if isinstance(value, (Mapping, list, deque)):
        # the class itself may take other arguments than its content
        result: Any = copy.copy(value)
        seen[id(value)] = value, result
        keys = value if isinstance(value, Mapping) else range(len(value))
        for key in list(keys):
            result[key] = rebuilt(value[key], change, f"{name}[{key!r}]", seen)
        return result
    if not is_dataclass(value) or isinstance(value, type):
        return value
    result = copy.copy(value)
    for item in fields(value):
        if hasattr(value, item.name):
            part = rebuilt(getattr(value, item.name), change, f"{name}.{item.name}", seen)
            # a frozen class refuses assignments
            object.__setattr__(result, item.name, part)
    return result


def tensor_to_cpu(tensor: Any) -> Any:
    """Copy a tensor to the host, with no copy on its device.

    For a tensor with gaps or repeated elements, the stretch of memory that contains it is copied as
    it is, and its elements are selected on the host.
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
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True))
    at = tensor.storage_offset()
    stretch = torch.as_strided(tensor, (span,), (1,), at).cpu()
    return torch.as_strided(stretch, tensor.shape, strides).clone()
