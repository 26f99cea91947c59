"""Copies of a checkpoint's content in host memory, which are written while training continues.

:class:`.checkpoints.CheckpointFolder` makes them in the process that trains. Filling fresh memory
takes five to seven times as long as filling memory that was used before, so the memory of a copy
comes from an :class:`.arena.Arena`, which keeps it for the next save. Copies of GPU tensors use
pinned memory, into which a GPU copies at full speed and without waiting between tensors.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from robust_train.attempt.arena import Arena
from robust_train.attempt.checkpoint_content import map_tensors
from robust_train.failures import classify_failure
from robust_train.folder.checkpoint_writing import Content
from robust_train.host.memory import read_host_memory

LARGEST_COPY = 0.5
"""The largest size of all copies, as a share of the host memory that would be available without
them."""


class HostCopies:
    """Copies the content of one save after the other into the same memory.

    ``copies`` is how many ranks of this host copy a checkpoint at the same time.
    """

    def __init__(self, copies: int = 1) -> None:
        self._copies = copies
        self.arenas = {is_pinned: Arena(pinned=is_pinned) for is_pinned in (False, True)}

    def begin(self) -> None:
        """Start a save: the copy of the previous save is no longer needed."""
        for arena in self.arenas.values():
            arena.begin()

    def copy(self, content: Content) -> Content | None:
        """Return a copy with all tensors in host memory, or None if there is no room. Tensors that
        share their memory, such as tied weights, are copied once and share it again."""
        tensors = _collect_tensors(content)
        shared = _find_shared_storages(tensors)
        sources: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            source_name, source = shared.get(name, (name, tensor))
            sources[source_name] = source
        layouts = _plan_layouts(sources)
        if not self._has_room(self._bytes_to_allocate(sources, layouts)):
            return None
        copies = None
        try:
            copies = self._copy_sources(sources, layouts)
        except Exception as error:
            if not classify_failure(error).kind.is_memory:
                raise
        if copies is None:
            # The frames that held the new copies have ended by now.
            self._clear()
            return None

        def find_copy(name: str, tensor: Tensor) -> Tensor:
            if name not in shared:
                return copies[name]
            source_name, _ = shared[name]
            return _view_like(tensor, copies[source_name])

        return map_tensors(find_copy, content, _copy_value)

    def _bytes_to_allocate(self, sources: Mapping[str, Tensor], layouts: Layouts) -> int:
        """Return how many bytes of new memory the copies need."""
        total = 0
        for is_pinned, arena_layouts in layouts.items():
            total += self.arenas[is_pinned].bytes_to_add(_sizes_of(arena_layouts))
        planned = {name for arena_layouts in layouts.values() for name in arena_layouts}
        for name, source in sources.items():
            if name not in planned:
                total += _size_of(source)
        return total

    def _copy_sources(self, sources: Mapping[str, Tensor], layouts: Layouts) -> dict[str, Tensor]:
        copies: dict[str, Tensor] = {}
        for is_pinned, arena_layouts in layouts.items():
            pieces = self.arenas[is_pinned].take(_sizes_of(arena_layouts))
            for name, piece in zip(arena_layouts, pieces, strict=True):
                layout = arena_layouts[name]
                target = torch.empty(0, dtype=layout.dtype)
                target.set_(piece, 0, layout.size(), layout.stride())
                copies[name] = target.copy_(sources[name], non_blocking=is_pinned)
        for name, source in sources.items():
            if name not in copies:
                copies[name] = source.to("cpu", copy=True)
        for device in {source.device for source in sources.values() if source.is_cuda}:
            torch.cuda.synchronize(device)
        return copies

    def shrink(self) -> None:
        """Return the memory that the last save did not need, or all of it if other processes need
        it."""
        for arena in self.arenas.values():
            arena.trim()
        if not self._has_room(0):
            self._clear()

    def _clear(self) -> None:
        for arena in self.arenas.values():
            arena.clear()

    def _has_room(self, more_bytes: int) -> bool:
        """Return whether the copies stay within :data:`LARGEST_COPY` if they grow by this much."""
        kept = sum(arena.taken for arena in self.arenas.values()) * self._copies
        more = more_bytes * self._copies
        return kept + more <= LARGEST_COPY * (read_host_memory().available + kept)


def _collect_tensors(content: Content) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}

    def collect(name: str, tensor: Tensor) -> Tensor:
        tensors[name] = tensor.detach()
        return tensor

    map_tensors(collect, content)
    return tensors


def _find_shared_storages(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, Tensor]]:
    """Return, for each tensor that shares its storage, the name of the storage's first tensor and
    all bytes of the storage. Tensors of different dtypes do not count as sharing, because
    torch.save refuses a storage with two dtypes."""
    names: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if _is_plain(tensor):
            storage = tensor.untyped_storage()
            key = tensor.device, storage.data_ptr(), tensor.dtype
            if storage.nbytes():
                names.setdefault(key, []).append(name)
    storages = {}
    for group in names.values():
        if len(group) > 1:
            storage = tensors[group[0]].untyped_storage()
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
            flat.set_(storage, 0, (storage.nbytes(),), (1,))
            storages.update(dict.fromkeys(group, (group[0], flat)))
    return storages


Layouts = Mapping[bool, Mapping[str, Tensor]]
"""For each arena, by whether it is pinned: the tensors that it gets, by name. Meta tensors without
values stand for them, with the strides and the size of the copies."""


def _plan_layouts(sources: Mapping[str, Tensor]) -> Layouts:
    layouts: dict[bool, dict[str, Tensor]] = {False: {}, True: {}}
    for name, source in sources.items():
        if _is_plain(source):
            layouts[source.is_cuda][name] = torch.empty_like(source, device="meta")
    return layouts


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor consists only of values in a single stretch of memory."""
    is_strided = type(tensor) is Tensor and tensor.layout is torch.strided
    return is_strided and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def _sizes_of(layouts: Mapping[str, Tensor]) -> list[int]:
    return [layout.untyped_storage().nbytes() for layout in layouts.values()]


def _size_of(tensor: Tensor) -> int:
    """Return the size in bytes of this rank's part of a tensor. The size of a sparse tensor is
    unknown; the result is an upper limit."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size())


def _view_like(tensor: Tensor, copied: Tensor) -> Tensor:
    """Return the part of a storage's copied bytes that belongs to the tensor."""
    view = torch.empty(0, dtype=tensor.dtype, device=copied.device)
    return view.set_(
        copied.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def _copy_value(value: Any) -> Any:
    """Return a copy of a value that training may change, or the value itself if it cannot be
    copied."""
    with contextlib.suppress(Exception):
        return copy.deepcopy(value)
    return value
