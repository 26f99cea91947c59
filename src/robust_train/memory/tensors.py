"""Finds the tensors that are alive, that a failure holds, or that training changes.

This module does not import torch, because no tensors exist without it. It is called in the process
that trains, after a failure and on a user's request. :func:`safe_tensor_to_cpu` moves tensors to
the host.
"""

from __future__ import annotations

import gc
import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

from robust_train.memory.cuda import started_torch
from robust_train.memory.nesting import DESCEND, rebuild
from robust_train.model.json import Json
from robust_train.readable import mib

StorageKey = tuple[str, int]
"""Identifies a storage by its device and its address there."""


def live_objects(base: Any) -> list[Any]:
    """Return every object of a type (or a union of types) that the garbage collector knows."""
    # isinstance() would run the code of proxies that compute their __class__.
    return [item for item in gc.get_objects() if issubclass(type(item), base)]


def live_tensors() -> list[Any]:
    """Return every tensor that Python knows, including gradients. Empty if torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    by_id = {id(tensor): tensor for tensor in live_objects(torch.Tensor)}
    for tensor in list(by_id.values()):
        if tensor.is_leaf and tensor.requires_grad and tensor.grad is not None:
            by_id[id(tensor.grad)] = tensor.grad
    return list(by_id.values())


def storage_of(tensor: Any) -> StorageKey | None:
    """Return the storage of a tensor, or None for a meta, fake or sparse tensor without storage."""
    try:
        address = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return (str(tensor.device), address) if address else None


def storages(tensors: Iterable[Any]) -> dict[StorageKey, int]:
    """Return the storages of tensors, each once, with their sizes in bytes."""
    storage_of_tensor = {storage_of(tensor): tensor for tensor in tensors}
    return {
        key: tensor.untyped_storage().nbytes()
        for key, tensor in storage_of_tensor.items()
        if key is not None
    }


def bytes_on(tensors: Iterable[Any]) -> dict[str, int]:
    """Return the bytes of tensors on each device.

    For a GPU, this is the allocator's figure, which includes tensors that only the autograd graph
    refers to. For the host, it is the size of the tensors' storages.
    """
    totals = Counter[str]()
    for (device, _), size in storages(tensors).items():
        totals[device] += size
    torch = started_torch()
    if torch is not None:
        for device in training_devices():
            totals[device] = torch.cuda.memory_allocated(device)
    return totals


def training_devices() -> list[str]:
    """Return the devices that hold a model: the GPUs, or the host without CUDA."""
    torch = started_torch()
    if torch is None:
        return ["cpu"]
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


# --- the largest tensors ---


@dataclass(frozen=True)
class LiveTensor:
    """A tensor that is alive."""

    bytes: int  # the size of its storage, which it may share
    shape: tuple[int, ...]
    dtype: str  # `float32`
    device: str  # `cuda:0`, `cpu`
    has_graph: bool  # it keeps its autograd graph alive, with the tensors saved there

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
        top: the maximum number of tensors.
        devices: ``cuda:0``, ``cpu`` …. The default is the GPUs, or the host without CUDA.
    """
    return [tensor.as_json() for tensor in largest_alive(top, devices)]


def largest_alive(
    top: int, devices: Collection[str] | None = None, ignored: Collection[StorageKey] = ()
) -> list[LiveTensor]:
    """Return the tensors of `largest_tensors`, except tensors in ``ignored`` storages."""
    if devices is None:
        devices = training_devices()
    alive = live_tensors()
    by_storage = {storage_of(tensor): tensor for tensor in alive}
    sizes = storages(alive)
    candidates = [key for key in sizes if key[0] in devices and key not in ignored]
    candidates.sort(key=lambda key: sizes[key], reverse=True)
    return [_describe(by_storage[key], sizes[key]) for key in candidates[:top]]


def _describe(tensor: Any, size: int) -> LiveTensor:
    return LiveTensor(
        size,
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        str(tensor.device),
        has_graph=tensor.grad_fn is not None,
    )


# --- tensors that a failure holds ---


def frames_of(error: BaseException) -> Iterator[FrameType]:
    """Yield the frames in the tracebacks of an exception and of its causes."""
    for current in with_causes(error):
        for frame, _ in traceback.walk_tb(current.__traceback__):
            yield frame


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and the exceptions that it was raised from, each once."""
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


# --- tensors that training changes ---


def leaves_of(loss: Any) -> Iterator[Any]:
    """Yield the tensors to which the backward pass of ``loss`` adds a gradient.

    The tensors inside reentrant checkpointing, which computes them in the backward pass, are
    missing.
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
    """Return the leaf tensors that the failed functions were training, found in their variables."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    # A function that still runs may hold models that have nothing to do with the failure.
    running = {frame for frame, _ in traceback.walk_stack(inspect.currentframe())}
    leaves_by_id: dict[int, Any] = {}
    for frame in frames_of(error):
        if frame in running:
            continue
        for value in frame.f_locals.values():
            leaves: Iterable[Any] = ()
            if isinstance(value, torch.nn.Module):
                leaves = value.parameters()
            elif isinstance(value, torch.Tensor) and value.requires_grad:
                leaves = [value] if value.is_leaf else leaves_of(value)
            leaves_by_id |= {id(leaf): leaf for leaf in leaves if leaf.requires_grad}
    return list(leaves_by_id.values())


# --- copies on the host ---


_T = TypeVar("_T")


def safe_tensor_to_cpu(value: _T) -> _T:
    """Return ``value`` with every tensor in it moved to the host and detached from its graph.

    Mappings, lists, tuples, sets and dataclasses keep their types, at any depth. All other values
    stay unchanged. A tensor that occurs twice is a single tensor in the result. Nothing is
    allocated on the GPU, whereas ``tensor.cpu()`` first makes a contiguous copy there of a tensor
    with gaps. A tensor that is already on the host shares its memory with the result.

    Args:
        value: tensors in any nesting of containers, or any other value.

    Returns:
        The same structure, with detached tensors on the host.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return value

    def move(item: Any, name: str) -> Any:
        return tensor_to_cpu(item) if isinstance(item, torch.Tensor) else DESCEND

    result: _T = rebuild(value, move)
    return result


def tensor_to_cpu(tensor: Any) -> Any:
    """Copy a tensor to the host, without a copy on its device."""
    torch = sys.modules["torch"]
    tensor = tensor.detach()
    # Subclasses, such as distributed and quantised tensors, implement cpu() themselves.
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    is_moved = tensor.device.type != "cpu"
    if not (is_plain and is_moved and tensor.numel()) or tensor.is_contiguous():
        return tensor.cpu()
    return copy_strided(tensor)


def copy_strided(tensor: Any) -> Any:
    """Copy a tensor with gaps or repeated elements to the host.

    The contiguous stretch of memory that contains the tensor is copied, and the elements are
    selected on the host.
    """
    torch = sys.modules["torch"]
    strides = tensor.stride()
    length = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True))
    stretch = torch.as_strided(tensor, (length,), (1,), tensor.storage_offset()).cpu()
    return torch.as_strided(stretch, tensor.shape, strides).clone()
