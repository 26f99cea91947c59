"""Tensors by size and owner, and moving them to the host."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from robust_train.files import Json
from robust_train.memory import holders

_T = TypeVar("_T")


TensorFacts = dict[str, Json]
"""The fields of :class:`robust_train.memory.holders.HeldTensor`."""


def largest_tensors(top: int = 20, *, devices: Collection[str] | None = None) -> list[TensorFacts]:
    """Return the largest tensors that are alive, the largest first, in JSON's types.

    Tensors that share a storage count once. It takes about a second.

    Args:
        top: how many at most.
        devices: ``cuda:0``, ``cpu`` …; by default the GPUs, or without CUDA the host.
    """
    tensors = holders.live_tensors()
    wanted = holders.training_devices() if devices is None else devices
    found = holders.largest(tensors, devices=wanted, top=top)
    return [{**vars(tensor), "shape": list(tensor.shape)} for tensor in found]


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
"""By id: what was met, which keeps the id its own, and what it has become."""


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
                # a frozen class lets nobody assign
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
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True))
    stretch = torch.as_strided(tensor, (span,), (1,), tensor.storage_offset()).cpu()
    return torch.as_strided(stretch, tensor.shape, strides).contiguous()


def has_gaps(tensor: Any) -> bool:
    """Return whether torch would lay the tensor out anew on its device before it copies it."""
    torch = sys.modules["torch"]
    # a subclass (a distributed, a quantised tensor) knows better how it is to be brought over
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or not tensor.numel():
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
