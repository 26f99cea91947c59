"""Reading this process's memory: the host's part, the caching allocator's, the GPU's as a whole.

Nothing here starts CUDA or imports torch.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from robust_train.gpu.one import OneGpu
from robust_train.memory.holders import started_torch
from robust_train.memory.segments import cached_on

_PAGE = resource.getpagesize()


def host_memory_of_this_process() -> tuple[int, int]:
    """Bytes resident, and those of them that are its own (see proc(5), statm)."""
    with open("/proc/self/statm", "rb") as file:
        return _resident_and_anonymous(file.read())


def _resident_and_anonymous(statm: bytes) -> tuple[int, int]:
    _, resident, shared, *_ = map(int, statm.split())
    return resident * _PAGE, (resident - shared) * _PAGE


def _memory_of_tree(pid: int) -> tuple[int, int]:
    """Bytes resident in a process and its descendants, and those of them that are their own.

    Pages of files count once, as those of the process that has most. Pages that a fork still shares
    with its parent count for both: only a walk through all of them could tell, which takes long.
    """
    own, shared = 0, 0
    for member in _tree(pid):
        with contextlib.suppress(OSError):
            resident, anonymous = _resident_and_anonymous(
                Path(f"/proc/{member}/statm").read_bytes()
            )
            own, shared = own + anonymous, max(shared, resident - anonymous)
    return own + shared, own


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # one that has ended meanwhile
            for child in listed.read_text().split():
                yield from _tree(int(child))


def device_index(device: str) -> int | None:
    """The number in ``cuda:1`` (``cuda`` is 0), None for any other device."""
    kind, _, number = device.partition(":")
    return int(number or 0) if kind == "cuda" else None


class Probe:
    """Reads all there is about one attempt's memory, cheaply and often. For one thread.

    Args:
        device: what the attempt trains on, in this process's own numbering.
        whole_tree: all that this process has started counts with it, as where a script trains.
    """

    def __init__(self, device: str, *, whole_tree: bool = False) -> None:
        self._device = device
        self._whole_tree = whole_tree
        self._index = device_index(device)
        self._gpu: OneGpu | None = None
        self._asked: str | None = None
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Give the file descriptor back."""
        os.close(self._statm)

    def read(self) -> dict[str, Any]:
        """Fields of a :class:`robust_train.memory.samples.Sample`."""
        if self._whole_tree:
            resident, anonymous = _memory_of_tree(os.getpid())
        else:
            resident, anonymous = _resident_and_anonymous(os.pread(self._statm, 256, 0))
        fields: dict[str, Any] = {"resident": resident, "anonymous": anonymous}
        if self._index is None:
            return {"device": self._device, **fields}
        self._find_gpu()
        cached = cached_on(self._index)
        if cached is not None:
            fields |= {"allocated": cached.allocated, "reserved": cached.reserved}
        whole = None if self._gpu is None else self._gpu.memory()
        if whole is not None:
            fields["gpu_used"], fields["gpu_total"] = whole
        device = self._device if self._gpu is None else f"cuda:{self._gpu.index}"
        return {"device": device, **fields}

    def _find_gpu(self) -> None:
        """Look the GPU up by the UUID that CUDA knows it by, once that is known."""
        if self._gpu is not None:
            return
        assert self._index is not None
        uuid = _uuid_of(self._index)
        if uuid is not None and uuid != self._asked:
            self._asked = uuid
            self._gpu = OneGpu.find(uuid)


def _uuid_of(index: int) -> str | None:
    """By ``CUDA_VISIBLE_DEVICES`` where that holds UUIDs, else by torch once CUDA has started."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if index < len(visible) and visible[index].strip().startswith(("GPU-", "MIG-")):
        return visible[index].strip()
    torch = started_torch()
    if torch is None:
        return None
    try:
        return f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    except (AttributeError, RuntimeError, AssertionError):
        return None
