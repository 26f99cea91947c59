"""Which tensors are alive, and who holds them, by the name that a person knows."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import re
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import FrameType, FunctionType, ModuleType
from typing import Any, TypeVar

from robust_train.files import Json
from robust_train.memory.cuda import started_torch
from robust_train.readable import mib

StorageKey = tuple[str, int]  # A storage: its device and its address there

# a module's weight is found in its table, a person knows it as an attribute
_MODULE_TABLES = re.compile(r"\._(?:parameters|buffers|modules)\['(\w+)'\]")
_IS_A_LIBRARYS = re.compile(r"[/\\](?:(?:site|dist)-packages|lib[/\\]python3[.\d]*)[/\\]|<frozen")
MOST_PATHS = 200_000


def live_objects(base: Any) -> list[Any]:
    """Return every object of a type (or a union of types) that the garbage collector knows."""
    # type(), not isinstance(): proxies may compute their __class__
    return [item for item in gc.get_objects() if issubclass(type(item), base)]


def live_tensors() -> list[Any]:
    """Return every tensor that Python knows, gradients too; nothing where torch is not loaded."""
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
    """Return the storage; None for what has no memory of its own: meta, fake, sparse tensors."""
    try:
        address = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return (str(tensor.device), address) if address else None


def storages(tensors: Iterable[Any]) -> dict[StorageKey, int]:
    """Return the bytes of each storage that the tensors share."""
    keys = ((storage_of(tensor), tensor) for tensor in tensors)
    return {key: tensor.untyped_storage().nbytes() for key, tensor in keys if key is not None}


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
    """Return where large tensors are expected: the GPUs, or without CUDA the host."""
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
    owner: str  # who holds it, as holders_of returns it
    has_graph: bool  # it keeps the graph that it was computed by, and what that has saved

    def __str__(self) -> str:
        graph = " with the graph it was computed by" if self.has_graph else ""
        return f"{mib(self.bytes, 1)} {self.dtype} {self.shape}{graph}, held by {self.owner}"


def largest(
    tensors: Iterable[Any],
    *,
    devices: Collection[str],
    top: int,
    known: Collection[StorageKey] = (),
) -> list[HeldTensor]:
    """Return the largest tensors on ``devices`` outside of ``known`` storages, and their owners."""
    by_storage: dict[StorageKey, Any] = {}
    for tensor in tensors:
        key = storage_of(tensor)
        if key is not None and key not in known and key[0] in devices:
            by_storage.setdefault(key, tensor)
    candidates = sorted(by_storage.values(), key=lambda tensor: -tensor.untyped_storage().nbytes())
    by_storage.clear()
    chosen = candidates[:top]
    owners = holders_of(chosen, {id(tensors), id(candidates), id(by_storage)})
    return [
        HeldTensor(
            bytes=tensor.untyped_storage().nbytes(),
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            device=str(tensor.device),
            owner=owner,
            has_graph=tensor.grad_fn is not None,
        )
        for tensor, owner in zip(chosen, owners, strict=True)
    ]


def holders_of(items: Sequence[Any], ignore: Collection[int] = ()) -> list[str]:
    """Return who holds each item, as a person would write it: ``kept[0] (global of module x)``.
    ``ignore``: ids of what holds them here."""
    wanted, names = {id(item) for item in items}, {}
    seen = {id(items), *ignore}
    # breadth first: the shortest path from a name is the one that a person recognises
    paths = deque(_variables())
    for _ in range(MOST_PATHS):
        if not paths or not wanted:
            break
        path = paths.popleft()
        if id(path.value) in wanted:
            wanted.remove(id(path.value))
            names[id(path.value)] = str(path)
        elif id(path.value) not in seen and gc.is_tracked(path.value):
            seen.add(id(path.value))
            paths.extend(path.further())
    paths.clear()
    return [names.get(id(item)) or _kind_of_holder(item, {id(items), *ignore}) for item in items]


@dataclass(frozen=True, eq=False)
class _Path:
    """How one gets to ``value``: ``text`` (``table['kept'][0]``) from the variables ``where``."""

    value: Any
    text: str
    where: str

    def __str__(self) -> str:
        return _MODULE_TABLES.sub(r".\1", f"{self.text} ({self.where})")

    def to(self, value: Any, step: str) -> _Path:
        """Return the path one step further."""
        return _Path(value, self.text + step, self.where)

    def further(self) -> Iterator[_Path]:
        """Yield the paths to all that ``value`` refers to."""
        value = self.value
        if isinstance(value, dict):
            for key, one in list(value.items()):  # other threads may write meanwhile
                yield self.to(one, f"[{_shown(key)}]")
        elif isinstance(value, (list, tuple)):
            for index, one in enumerate(value):
                yield self.to(one, f"[{index}]")
        elif isinstance(value, FunctionType):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                with contextlib.suppress(ValueError):  # not assigned yet
                    yield _Path(cell.cell_contents, name, f"closure of {value.__qualname__}")
        elif not isinstance(value, (type, ModuleType, FrameType)):
            attributes = _attributes(value)
            for name, one in list(attributes.items()):
                yield self.to(one, f".{name}")
            for one in gc.get_referents(value):  # in slots, in sets, of bound methods
                if one is not attributes:
                    yield self.to(one, "")


def _variables() -> Iterator[_Path]:
    """Yield the variables of running and of failed functions, then the user's modules'."""
    frames = [frame for top in sys._current_frames().values() for frame in _stack(top)]
    # whoever keeps the exception of a failed function keeps its frame
    frames += [item for item in gc.get_objects() if type(item) is FrameType]
    try:
        for frame in frames:
            code = frame.f_code
            # a module's or class's body has no variables of its own
            if _is_ours(frame.f_globals) or not code.co_flags & inspect.CO_OPTIMIZED:
                continue
            where = f"local variable of {code.co_name}, {code.co_filename}:{frame.f_lineno}"
            variables = frame.f_locals
            yield from [_Path(value, name, where) for name, value in list(variables.items())]
            if sys.version_info < (3, 13):
                # the frame keeps this copy, and with it all that the function drops later
                variables.clear()
    finally:
        # a frame that a running function of ours refers to would keep that function's variables
        frame = None  # type: ignore[assignment]
        frames.clear()
    for name, module in list(sys.modules.items()):
        if not _IS_A_LIBRARYS.search(getattr(module, "__file__", None) or "<frozen"):
            content = vars(module)
            if not _is_ours(content):
                for key, value in list(content.items()):
                    yield _Path(value, key, f"global of module {name}")


def _kind_of_holder(item: Any, ignore: Collection[int]) -> str:
    """Describe an object that holds an item and leads to no name."""
    for referrer in gc.get_referrers(item):
        if id(referrer) not in ignore and not isinstance(referrer, FrameType):
            return f"a {type(referrer).__name__}"
    return "no Python object"


def _shown(key: Any) -> str:
    """Return a key as it is written; of a parameter, as in an optimizer's state, the type."""
    return repr(key) if isinstance(key, (str, int, float, bool)) else type(key).__name__


def _stack(top: FrameType | None) -> Iterator[FrameType]:
    while top is not None:
        yield top
        top = top.f_back


def _is_ours(variables: Mapping[str, Any]) -> bool:
    """Return whether a module is the launcher's; the built-in trainer counts as a user."""
    module = str(variables.get("__name__", ""))
    return module.startswith("robust_train.") and not module.startswith("robust_train.vision.")


def _attributes(owner: Any) -> dict[str, Any]:
    with contextlib.suppress(Exception):
        return object.__getattribute__(owner, "__dict__")  # type: ignore[no-any-return]
    return {}


_T = TypeVar("_T")


TensorFacts = dict[str, Json]  # The fields of `HeldTensor`


def largest_tensors(top: int = 20, *, devices: Collection[str] | None = None) -> list[TensorFacts]:
    """Return the largest tensors that are alive, the largest first, in JSON's types.

    Tensors that share a storage count once. It takes about a second.

    Args:
        top: how many at most.
        devices: ``cuda:0``, ``cpu`` …; by default the GPUs, or without CUDA the host.
    """
    tensors = live_tensors()
    wanted = training_devices() if devices is None else devices
    found = largest(tensors, devices=wanted, top=top)
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
