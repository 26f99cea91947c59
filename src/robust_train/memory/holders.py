"""Which tensors are alive, and by what name a person finds the one who holds them."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Collection, Iterable, Iterator
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

from robust_train.types import MIB

StorageKey = tuple[str, int]
"""A storage: its device and its address there."""

_DEPTH = 6
_REFERRERS_LOOKED_AT = 50
_IMMEDIATE = (dict, list, tuple, set, frozenset)


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


def largest(
    tensors: Iterable[Any],
    *,
    known: Collection[StorageKey],
    devices: Collection[str],
    top: int,
) -> list[str]:
    """The largest tensors on ``devices`` outside of ``known`` storages, each with who holds it."""
    by_storage: dict[StorageKey, Any] = {}
    for tensor in tensors:
        key = _storage_of(tensor)
        if key is not None and key not in known and key[0] in devices:
            by_storage.setdefault(key, tensor)
    candidates = list(by_storage.values())
    candidates.sort(key=lambda tensor: -tensor.untyped_storage().nbytes())
    lines = []
    own = {id(tensors), id(candidates), id(by_storage)}
    for tensor in candidates[:top]:
        size = tensor.untyped_storage().nbytes() / MIB
        kind = str(tensor.dtype).removeprefix("torch.")
        graph = " with the graph it was computed by" if tensor.grad_fn is not None else ""
        lines.append(
            f"{size:.1f} MiB {kind} {tuple(tensor.shape)}{graph}, held by {holder_of(tensor, own)}"
        )
    return lines


def holder_of(item: Any, ignore: Collection[int] = ()) -> str:
    """Who holds ``item``, as a person would write it: ``cache.kept[0] (global of module x)``.

    Args:
        item: any object that the garbage collector knows.
        ignore: ids of containers that do not count.
    """
    frame: FrameType | None = sys._getframe()
    skip = set(ignore)
    while frame is not None and frame.f_globals.get("__package__") == __package__:
        skip.add(id(frame))
        frame = frame.f_back
    del frame
    # breadth first: the shortest way to a name is the one that a person recognises
    level: list[tuple[Any, str]] = [(item, "")]
    best = None
    for _ in range(_DEPTH):
        above: list[tuple[Any, str]] = []
        for target, path in level:
            for name, owner in _referrers(target, path, skip | {id(level), id(above)}):
                if owner is None:
                    return name
                best = best or f"{type(owner).__name__}{name}"
                above.append((owner, name))
                skip.add(id(owner))
        if not above:
            break
        level = above
    return best or "nothing that Python knows"


def _referrers(target: Any, path: str, skip: set[int]) -> Iterator[tuple[str, Any]]:
    """Each holder of ``target``: a finished name and None, or a way on and the next to look for."""
    referrers = gc.get_referrers(target)[:_REFERRERS_LOOKED_AT]
    skip = skip | {id(referrers)}
    for holder in referrers:
        if id(holder) in skip or holder is sys._getframe():
            continue
        if isinstance(holder, FrameType):
            name = _key_of(holder.f_locals, target)
            if name is not None and holder.f_globals.get("__package__") != __package__:
                yield f"{name}{path} (local variable of {_where(holder)})", None
        elif isinstance(holder, dict):
            yield from _in_dictionary(holder, target, path)
        elif isinstance(holder, (list, tuple)):
            index = next((i for i, value in enumerate(holder) if value is target), None)
            if index is not None:
                yield f"[{index}]{path}", holder
        elif isinstance(holder, CellType):
            yield from _in_closures(holder, path)
        elif not isinstance(holder, type):
            attribute = _key_of(_attributes(holder), target)
            yield (f".{attribute}{path}" if attribute else path), holder


def _in_dictionary(holder: dict[Any, Any], target: Any, path: str) -> Iterator[tuple[str, Any]]:
    key = _key_of(holder, target)
    if key is None:
        return
    module = sys.modules.get(str(holder.get("__name__", "")))
    if module is not None and vars(module) is holder:
        yield f"{key}{path} (global of module {module.__name__})", None
        return
    for owner in gc.get_referrers(holder):
        if not isinstance(owner, (FrameType, ModuleType, *_IMMEDIATE)) and (
            _attributes(owner) is holder
        ):
            yield f".{key}{path}", owner
            return
    yield f"[{key!r}]{path}", holder


def _in_closures(cell: CellType, path: str) -> Iterator[tuple[str, Any]]:
    for closure in gc.get_referrers(cell):
        if not isinstance(closure, tuple):
            continue
        for function in gc.get_referrers(closure):
            if isinstance(function, FunctionType) and function.__closure__ is closure:
                index = next(i for i, other in enumerate(closure) if other is cell)
                name = function.__code__.co_freevars[index]
                yield f"{name}{path} (closure of {function.__qualname__})", None
                return


def _attributes(owner: Any) -> dict[str, Any]:
    with contextlib.suppress(Exception):
        return object.__getattribute__(owner, "__dict__")  # type: ignore[no-any-return]
    return {}


def _key_of(mapping: Any, target: Any) -> Any:
    # a copy: other threads may write while we look
    return next((key for key, value in list(mapping.items()) if value is target), None)


def _where(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_name}, {code.co_filename}:{frame.f_lineno}"


def _storage_of(tensor: Any) -> StorageKey | None:
    """None for what has no memory of its own to speak of: meta, fake and sparse tensors."""
    try:
        address = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return (str(tensor.device), address) if address else None
