"""Which tensors are alive, and by what name a person finds the one who holds them."""

from __future__ import annotations

import contextlib
import gc
import inspect
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FrameType, FunctionType
from typing import Any

from robust_train.values import MIB

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


def storages(tensors: Iterable[Any]) -> dict[StorageKey, int]:
    """Bytes of each storage that the tensors share among them."""
    sizes: dict[StorageKey, int] = {}
    for tensor in tensors:
        key = storage_of(tensor)
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
        key = storage_of(tensor)
        if key is not None and key not in known and key[0] in devices:
            by_storage.setdefault(key, tensor)
    candidates = list(by_storage.values())
    by_storage.clear()
    candidates.sort(key=lambda tensor: -tensor.untyped_storage().nbytes())
    chosen = candidates[:top]
    owners = holders_of(chosen, {id(tensors), id(candidates)})
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


@dataclass(eq=False)
class _Way:
    """How one gets from ``owner`` to the object in question: ``.cache['kept'][0]``."""

    owner: Any
    path: str
    key: Any = None


@dataclass(eq=False)
class _Search:
    """For who holds one object: the ways that are followed at present, and what they have found."""

    level: list[_Way]
    seen: set[int]
    nearest: str = ""
    name: str | None = None
    is_over: bool = False

    def holder(self) -> str:
        if self.name is not None:
            return _with_nearest(self.name, self.nearest)
        first = self.level[0]
        return self.nearest or (
            f"a {type(first.owner).__name__}" if first.path else "no Python object"
        )


def holder_of(item: Any, ignore: Collection[int] = ()) -> str:
    """Who holds ``item``, as a person would write it: ``history.kept[0] (global of module x)``.

    Args:
        item: any object that the garbage collector knows.
        ignore: ids of containers that do not count.
    """
    items = [item]
    return holders_of(items, ignore)[0]


def holders_of(items: Sequence[Any], ignore: Collection[int] = ()) -> list[str]:
    """:func:`holder_of` for several objects, for which all of Python's are looked through at once.

    Args:
        items: objects that the garbage collector knows; this container does not count.
        ignore: ids of other containers that do not count.
    """
    searches = [_Search([_Way(item, "")], {*ignore, id(items), id(item)}) for item in items]
    # breadth first: the shortest way to a name is the one that a person recognises
    for _ in range(_DEPTH):
        _look_into_running_functions(searches)
        open_searches = [search for search in searches if not search.is_over]
        if not open_searches:
            break
        _go_up(open_searches)
    return [search.holder() for search in searches]


def _ways_to(searches: Iterable[_Search]) -> dict[int, list[tuple[_Search, _Way]]]:
    """The ways that are still followed, by the id of what they have come to."""
    ways: dict[int, list[tuple[_Search, _Way]]] = {}
    for search in searches:
        if not search.is_over:
            for way in search.level:
                ways.setdefault(id(way.owner), []).append((search, way))
    return ways


def _go_up(searches: Sequence[_Search]) -> None:
    """One step further from the objects: to those that refer to where the ways are now."""
    ways = _ways_to(searches)
    own = {id(part) for search in searches for part in (search.level, *search.level)}
    own |= {id(vars(way)) for search in searches for way in search.level}
    above: dict[int, list[_Way]] = {id(search): [] for search in searches}
    # one pass over all objects for all searches
    referrers = gc.get_referrers(*[found[0][1].owner for found in ways.values()])
    for referrer in referrers:
        if id(referrer) in own:
            continue
        targets = {id(target) for target in gc.get_referents(referrer)} & ways.keys()
        for search, way in [pair for target in targets for pair in ways[target]]:
            if id(referrer) not in search.seen and search.name is None:
                _follow(search, referrer, way, above[id(search)])
    del referrers
    for search in searches:
        search.is_over = search.name is not None or not above[id(search)]
        search.level = above[id(search)] or search.level


def _follow(search: _Search, referrer: Any, way: _Way, above: list[_Way]) -> None:
    name, further = _step(referrer, way)
    if name is not None:
        search.name = name
    elif further is not None and len(above) < _LOOKED_AT:
        above.append(further)
        search.seen.add(id(referrer))
        if not search.nearest and further.path.startswith("."):
            search.nearest = f"{type(referrer).__name__}{further.path}"


def _with_nearest(name: str, nearest: str) -> str:
    said = f"{name}, in {nearest}" if nearest else name
    return _MODULE_TABLES.sub(r".\1", said)


def _shown(key: Any) -> str:
    """A key as it is written; of an optimizer's state, whose keys are parameters, their type."""
    return repr(key) if isinstance(key, (str, int, float, bool)) else type(key).__name__


def _step(referrer: Any, way: _Way) -> tuple[str | None, _Way | None]:
    """From what ``way`` begins with to ``referrer``: a finished name, a longer way, or neither."""
    target, path = way.owner, way.path
    if isinstance(referrer, FrameType):
        # of a function that has failed: whoever keeps the exception keeps its variables
        return (None if _is_own(referrer) else _variable(referrer, way)), None
    if isinstance(referrer, dict):
        key = _key_of(referrer, target)
        if key is None:
            return None, None
        module = sys.modules.get(str(referrer.get("__name__", "")))
        if module is not None and vars(module) is referrer:
            return f"{key}{path} (global of module {module.__name__})", None
        return None, _Way(referrer, f"[{_shown(key)}]{path}", key=(key, path))
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


def _look_into_running_functions(searches: Sequence[_Search]) -> None:
    """Whether their variables are at the ways' ends; the collector does not know them."""
    ways = _ways_to(searches)
    frames = _running_frames()
    try:
        for frame in frames:
            for search, way in _ways_in(frame, ways):
                if not search.is_over:
                    search.name, search.is_over = _variable(frame, way), True
    finally:
        # a frame that a running function of ours refers to would keep that function's variables
        frame = None  # type: ignore[assignment]
        frames.clear()


def _ways_in(
    frame: FrameType, ways: Mapping[int, list[tuple[_Search, _Way]]]
) -> list[tuple[_Search, _Way]]:
    values = _variables(frame)
    ids = [id(value) for value in values.values()]
    _let_go(values)
    return [pair for one in ids for pair in ways.get(one, ())]


def _variable(frame: FrameType, way: _Way) -> str | None:
    name = _name_in(frame, way.owner)
    if name is None:
        return None
    code = frame.f_code
    where = f"{code.co_name}, {code.co_filename}:{frame.f_lineno}"
    return f"{name}{way.path} (local variable of {where})"


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(__package__)


def _running_frames() -> list[FrameType]:
    """Of all threads, without this package's own."""
    frames = []
    tops = list(sys._current_frames().values())
    while tops:
        frame: FrameType | None = tops.pop()
        while frame is not None:
            if not _is_own(frame):
                frames.append(frame)
            frame = frame.f_back
    return frames


def _name_in(frame: FrameType, target: Any) -> str | None:
    variables = _variables(frame)
    name: str | None = _key_of(variables, target)
    _let_go(variables)
    return name


def _variables(frame: FrameType) -> dict[str, Any]:
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return {}  # a module's or class's body: its dictionary is known to the collector
    return frame.f_locals


def _let_go(variables: dict[str, Any]) -> None:
    if sys.version_info < (3, 13):
        # the frame keeps this copy, and with it all that the function lets go of later
        variables.clear()


def _attributes(owner: Any) -> dict[str, Any]:
    with contextlib.suppress(Exception):
        return object.__getattribute__(owner, "__dict__")  # type: ignore[no-any-return]
    return {}


def _key_of(mapping: Any, target: Any) -> Any:
    # a copy: other threads may write while we look
    return next((key for key, value in list(mapping.items()) if value is target), None)


def storage_of(tensor: Any) -> StorageKey | None:
    """None for what has no memory of its own to speak of: meta, fake and sparse tensors."""
    try:
        address = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return (str(tensor.device), address) if address else None
