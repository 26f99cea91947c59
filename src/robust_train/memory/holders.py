"""Which tensors are alive, and who holds them, by the name that a person knows."""

from __future__ import annotations

import contextlib
import gc
import inspect
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from types import CellType, FrameType, FunctionType
from typing import Any

from robust_train.memory.cuda import started_torch
from robust_train.values import MIB

StorageKey = tuple[str, int]
"""A storage: its device and its address there."""

# a module's weight is found in its table, a person knows it as an attribute
_MODULE_TABLES = re.compile(r"\._(?:parameters|buffers|modules)\['(\w+)'\]")
_DEPTH = 8
_MOST_PATHS = 40  # of one object, at each depth


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
    owner: str  # who holds it, as holder_of returns it
    has_graph: bool  # it keeps the graph that it was computed by, and what that has saved

    def __str__(self) -> str:
        graph = " with the graph it was computed by" if self.has_graph else ""
        return f"{self.bytes / MIB:.1f} MiB {self.dtype} {self.shape}{graph}, held by {self.owner}"


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


def holder_of(item: Any) -> str:
    """Return who holds ``item``, as a person would write it: ``kept[0] (global of module x)``."""
    items = [item]
    return holders_of(items)[0]


def holders_of(items: Sequence[Any], ignore: Collection[int] = ()) -> list[str]:
    """Do :func:`holder_of` for several objects, with one pass over Python's objects a level."""
    names: dict[int, str] = {}
    attributes: dict[int, str] = {}
    ends = dict.fromkeys(range(len(items)), "no Python object")
    seen = {(number, one) for number in ends for one in (*ignore, id(items), id(items[number]))}
    paths = [_Path(number, item) for number, item in enumerate(items)]
    # breadth first: the shortest path to a name is the one that a person recognises
    for _ in range(_DEPTH):
        _look_into_running_functions(paths, names)
        paths = [path for path in paths if path.item not in names]
        if not paths:
            break
        paths = _go_up(paths, names, attributes, seen)
        for path in reversed(paths):
            ends[path.item] = f"a {type(path.owner).__name__}"
    return [_owner(names.get(n), attributes.get(n, ""), end) for n, end in ends.items()]


@dataclass(eq=False)
class _Path:
    """How one gets from ``owner`` to an item: ``text`` is ``.cache['kept'][0]``.

    ``key`` and ``below`` are the last step and the text without it.
    """

    item: int
    owner: Any
    text: str = ""
    key: Any = None
    below: str = ""

    def above(self, owner: Any, text: str, key: Any = None) -> _Path:
        return _Path(self.item, owner, text + self.text, key, self.text)


def _owner(name: str | None, attribute: str, end: str) -> str:
    if name is None:
        return attribute or end
    return _MODULE_TABLES.sub(r".\1", f"{name}, in {attribute}" if attribute else name)


def _go_up(
    paths: list[_Path],
    names: dict[int, str],
    attributes: dict[int, str],
    seen: set[tuple[int, int]],
) -> list[_Path]:
    """Return the paths from those that refer to the owners; finished ones get their names."""
    by_target: dict[int, list[_Path]] = {}
    for path in paths:
        by_target.setdefault(id(path.owner), []).append(path)
    own = {id(paths), *map(id, paths), *(id(vars(path)) for path in paths)}
    above: list[_Path] = []
    counts: dict[int, int] = {}
    for referrer in gc.get_referrers(*[found[0].owner for found in by_target.values()]):
        if id(referrer) in own:
            continue
        targets = {id(target) for target in gc.get_referents(referrer)} & by_target.keys()
        for path in [path for target in targets for path in by_target[target]]:
            if path.item in names or (path.item, id(referrer)) in seen:
                continue
            further = _step(referrer, path)
            if isinstance(further, str):
                names[path.item] = further
            elif further is not None and counts.get(path.item, 0) < _MOST_PATHS:
                above.append(further)
                counts[path.item] = counts.get(path.item, 0) + 1
                seen.add((path.item, id(referrer)))
                if further.text.startswith("."):
                    named = f"{type(referrer).__name__}{further.text}"
                    attributes.setdefault(path.item, named)
    return above


def _step(referrer: Any, path: _Path) -> _Path | str | None:
    """Return the path from ``referrer``, or a finished name; None where it leads nowhere."""
    target = path.owner
    if isinstance(referrer, FrameType):
        # of a failed function: whoever keeps the exception keeps its variables
        return None if _is_own(referrer) else _variable(referrer, path)
    if isinstance(referrer, dict):
        key = _key_of(referrer, target)
        module = sys.modules.get(str(referrer.get("__name__", "")))
        if key is not None and module is not None and vars(module) is referrer:
            return f"{key}{path.text} (global of module {module.__name__})"
        return None if key is None else path.above(referrer, f"[{_shown(key)}]", key)
    if isinstance(referrer, (list, tuple)):
        index = next((i for i, value in enumerate(referrer) if value is target), None)
        return None if index is None else path.above(referrer, f"[{index}]", index)
    if isinstance(referrer, FunctionType):
        if referrer.__closure__ is not target:
            return None
        name = referrer.__code__.co_freevars[path.key]
        return f"{name}{path.below} (closure of {referrer.__qualname__})"
    if isinstance(referrer, CellType):
        return path.above(referrer, "")
    if isinstance(referrer, type):
        return None
    attributes = _attributes(referrer)
    if attributes is target:
        return _Path(path.item, referrer, f".{path.key}{path.below}")
    name = _key_of(attributes, target)
    return path.above(referrer, "" if name is None else f".{name}")


def _shown(key: Any) -> str:
    """Return a key as it is written; of a parameter, as in an optimizer's state, the type."""
    return repr(key) if isinstance(key, (str, int, float, bool)) else type(key).__name__


def _look_into_running_functions(paths: list[_Path], names: dict[int, str]) -> None:
    """Name the items whose paths begin in variables, which the collector does not know."""
    owners = {id(path.owner) for path in paths}
    frames = [frame for top in sys._current_frames().values() for frame in _stack(top)]
    try:
        for frame in frames:
            variables = _variables(frame)
            if not owners.isdisjoint(map(id, variables.values())):
                for path in paths:
                    name = _key_of(variables, path.owner)
                    if name is not None:
                        names.setdefault(path.item, _described(frame, f"{name}{path.text}"))
            _clear_copy(variables)
    finally:
        # a frame that a running function of ours refers to would keep that function's variables
        frame = None  # type: ignore[assignment]
        frames.clear()


def _stack(top: FrameType | None) -> list[FrameType]:
    """Return the frames from ``top`` on, without this package's own."""
    frames = []
    while top is not None:
        if not _is_own(top):
            frames.append(top)
        top = top.f_back
    return frames


def _variable(frame: FrameType, path: _Path) -> str | None:
    variables = _variables(frame)
    name = _key_of(variables, path.owner)
    _clear_copy(variables)
    return None if name is None else _described(frame, f"{name}{path.text}")


def _described(frame: FrameType, text: str) -> str:
    code = frame.f_code
    return f"{text} (local variable of {code.co_name}, {code.co_filename}:{frame.f_lineno})"


def _is_own(frame: FrameType) -> bool:
    """Return whether a frame is the launcher's; the built-in trainer counts as a user."""
    module = str(frame.f_globals.get("__name__", ""))
    return module.startswith("robust_train.") and not module.startswith("robust_train.vision.")


def _variables(frame: FrameType) -> dict[str, Any]:
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return {}  # a module's or class's body: its dictionary is known to the collector
    return frame.f_locals


def _clear_copy(variables: dict[str, Any]) -> None:
    if sys.version_info < (3, 13):
        # the frame keeps this copy, and with it all that the function drops later
        variables.clear()


def _attributes(owner: Any) -> dict[str, Any]:
    with contextlib.suppress(Exception):
        return object.__getattribute__(owner, "__dict__")  # type: ignore[no-any-return]
    return {}


def _key_of(mapping: Any, target: Any) -> Any:
    # a copy: other threads may write meanwhile
    return next((key for key, value in list(mapping.items()) if value is target), None)
