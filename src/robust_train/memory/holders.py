"""Which tensors are alive, and by what name a person finds the one who holds them."""

from __future__ import annotations

import contextlib
import gc
import inspect
import re
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from types import CellType, FrameType, FunctionType
from typing import Any

from robust_train.types import MIB

StorageKey = tuple[str, int]
"""A storage: its device and its address there."""

# a module's weight is found in its table, a person knows it as an attribute
_MODULE_TABLES = re.compile(r"\._(?:parameters|buffers|modules)\['(\w+)'\]")
_DEPTH = 8
_LOOKED_AT = 40


def started_torch() -> Any:
    """The module torch, where it is loaded and has started CUDA in this process; else None."""
    torch = sys.modules.get("torch")
    # another thread may be importing it at this moment
    cuda = getattr(torch, "cuda", None)
    is_initialized = getattr(cuda, "is_initialized", None)
    return torch if is_initialized is not None and is_initialized() else None


def live_tensors() -> list[Any]:
    """Every tensor that Python knows, gradients included; empty where torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    base = torch.Tensor
    # type(), not isinstance(): proxies may compute their __class__
    found = [item for item in gc.get_objects() if issubclass(type(item), base)]
    known = set(map(id, found))
    for tensor in list(found):
        gradient = tensor.grad if tensor.is_leaf and tensor.requires_grad else None
        if gradient is not None and id(gradient) not in known:
            found.append(gradient)
    return found


def storages(tensors: Iterable[Any]) -> dict[StorageKey, int]:
    """Bytes of each storage that the tensors share among them."""
    sizes: dict[StorageKey, int] = {}
    for tensor in tensors:
        key = _storage_of(tensor)
        if key is not None:
            sizes[key] = tensor.untyped_storage().nbytes()
    return sizes


def bytes_on(tensors: Iterable[Any]) -> dict[str, int]:
    """Bytes that tensors hold by device: the host's as their storages, a GPU's as the allocator
    counts them.
    """
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
    """Where this process's large tensors are expected: its GPUs, or without CUDA the host."""
    torch = started_torch()
    if torch is not None:
        return frozenset(f"cuda:{index}" for index in range(torch.cuda.device_count()))
    return frozenset({"cpu"})


@dataclass(frozen=True)
class HeldTensor:
    """A tensor that is alive.

    Attributes:
        bytes: of its storage, which it may share with others.
        shape: its own.
        dtype: ``float32``.
        device: ``cuda:0``, ``cpu``.
        owner: who holds it, as :func:`holder_of` says.
        has_graph: it keeps the graph that it was computed by, and what that has saved.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    owner: str
    has_graph: bool

    def __str__(self) -> str:
        graph = " with the graph it was computed by" if self.has_graph else ""
        return f"{self.bytes / MIB:.1f} MiB {self.dtype} {self.shape}{graph}, held by {self.owner}"


def largest(
    tensors: Iterable[Any],
    *,
    known: Collection[StorageKey],
    devices: Collection[str],
    top: int,
) -> list[HeldTensor]:
    """The largest tensors on ``devices`` outside of ``known`` storages, each with who holds it."""
    by_storage: dict[StorageKey, Any] = {}
    for tensor in tensors:
        key = _storage_of(tensor)
        if key is not None and key not in known and key[0] in devices:
            by_storage.setdefault(key, tensor)
    candidates = list(by_storage.values())
    by_storage.clear()
    candidates.sort(key=lambda tensor: -tensor.untyped_storage().nbytes())
    own = {id(tensors), id(candidates)}
    found = []
    # no loop over a slice: that would be one more list that holds them
    for index in range(min(top, len(candidates))):
        tensor = candidates[index]
        found.append(
            HeldTensor(
                bytes=tensor.untyped_storage().nbytes(),
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                device=str(tensor.device),
                owner=holder_of(tensor, own),
                has_graph=tensor.grad_fn is not None,
            )
        )
    return found


@dataclass(eq=False)
class _Way:
    """How one gets from ``owner`` to the object in question: ``.cache['kept'][0]``."""

    owner: Any
    path: str
    key: Any = None


def holder_of(item: Any, ignore: Collection[int] = ()) -> str:
    """Who holds ``item``, as a person would write it: ``history.kept[0] (global of module x)``.

    Args:
        item: any object that the garbage collector knows.
        ignore: ids of containers that do not count.
    """
    seen = {*ignore, id(item)}
    level = [_Way(item, "")]
    nearest = ""
    # breadth first: the shortest way to a name is the one that a person recognises
    for _ in range(_DEPTH):
        name = _local_variable(level)
        if name is not None:
            return _with_nearest(name, nearest)
        above: list[_Way] = []
        own = {id(level), id(above), *map(id, level), *(id(vars(way)) for way in level)}
        # one pass over all objects for the whole level
        referrers = gc.get_referrers(*[way.owner for way in level])
        for referrer in referrers:
            if id(referrer) in seen | own or isinstance(referrer, FrameType):
                continue
            for way in level:
                name, further = _step(referrer, way)
                if name is not None:
                    return _with_nearest(name, nearest)
                if further is not None and len(above) < _LOOKED_AT:
                    above.append(further)
                    seen.add(id(referrer))
                    if not nearest and further.path.startswith("."):
                        nearest = f"{type(referrer).__name__}{further.path}"
        del referrers
        if not above:
            break
        level = above
    return nearest or (
        f"a {type(level[0].owner).__name__}" if level[0].path else "no Python object"
    )


def _with_nearest(name: str, nearest: str) -> str:
    said = f"{name}, in {nearest}" if nearest else name
    return _MODULE_TABLES.sub(r".\1", said)


def _step(referrer: Any, way: _Way) -> tuple[str | None, _Way | None]:
    """From what ``way`` begins with to ``referrer``: a finished name, a longer way, or neither."""
    target, path = way.owner, way.path
    if isinstance(referrer, dict):
        key = _key_of(referrer, target)
        if key is None:
            return None, None
        module = sys.modules.get(str(referrer.get("__name__", "")))
        if module is not None and vars(module) is referrer:
            return f"{key}{path} (global of module {module.__name__})", None
        return None, _Way(referrer, f"[{key!r}]{path}", key=(key, path))
    if isinstance(referrer, (list, tuple)):
        index = next((i for i, value in enumerate(referrer) if value is target), None)
        return None, None if index is None else _Way(referrer, f"[{index}]{path}", (index, path))
    if isinstance(referrer, FunctionType):
        if referrer.__closure__ is not target:
            return None, None
        index, rest = way.key
        name = referrer.__code__.co_freevars[index]
        return f"{name}{rest} (closure of {referrer.__qualname__})", None
    if isinstance(referrer, CellType):
        return None, _Way(referrer, path) if referrer.cell_contents is target else None
    if isinstance(referrer, type):
        return None, None
    attributes = _attributes(referrer)
    if attributes is target:
        key, rest = way.key
        return None, _Way(referrer, f".{key}{rest}")
    name = _key_of(attributes, target)
    return None, _Way(referrer, path if name is None else f".{name}{path}")


def _local_variable(level: Iterable[_Way]) -> str | None:
    """The name in a running function; the collector does not know what those refer to."""
    frames = _running_frames()
    try:
        for frame in frames:
            for way in level:
                name = _name_in(frame, way.owner)
                if name is not None:
                    code = frame.f_code
                    where = f"{code.co_name}, {code.co_filename}:{frame.f_lineno}"
                    return f"{name}{way.path} (local variable of {where})"
    finally:
        # a frame that a running function of ours refers to would keep that function's variables
        frame = None  # type: ignore[assignment]
        frames.clear()
    return None


def _running_frames() -> list[FrameType]:
    """Of all threads, without this package's own."""
    frames = []
    tops = list(sys._current_frames().values())
    while tops:
        frame: FrameType | None = tops.pop()
        while frame is not None:
            if not str(frame.f_globals.get("__name__", "")).startswith(__package__):
                frames.append(frame)
            frame = frame.f_back
    return frames


def _name_in(frame: FrameType, target: Any) -> str | None:
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return None  # a module's or class's body: its dictionary is known to the collector
    variables = frame.f_locals
    name: str | None = _key_of(variables, target)
    if sys.version_info < (3, 13):
        # the frame keeps this copy, and with it all that the function lets go of later
        variables.clear()
    return name


def _attributes(owner: Any) -> dict[str, Any]:
    with contextlib.suppress(Exception):
        return object.__getattribute__(owner, "__dict__")  # type: ignore[no-any-return]
    return {}


def _key_of(mapping: Any, target: Any) -> Any:
    # a copy: other threads may write while we look
    return next((key for key, value in list(mapping.items()) if value is target), None)


def _storage_of(tensor: Any) -> StorageKey | None:
    """None for what has no memory of its own to speak of: meta, fake and sparse tensors."""
    try:
        address = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return (str(tensor.device), address) if address else None
