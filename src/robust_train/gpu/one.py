"""One GPU's memory, asked of NVML often: a session and a handle that stay open."""

from __future__ import annotations

import contextlib
from typing import Any


class OneGpu:
    """A GPU (or MIG slice) that is looked at again and again.

    Attributes:
        index: NVML's number of the GPU, of the parent GPU for a slice.
    """

    def __init__(self, nvml: Any, handle: Any, index: int) -> None:
        self.index = index
        self._nvml = nvml
        self._handle = handle

    @classmethod
    def find(cls, uuid: str) -> OneGpu | None:
        """The GPU with this UUID, or whose UUID begins so; None where NVML does not show it."""
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # no binding, no driver, or an old package that shadows the binding
            return None
        with contextlib.suppress(pynvml.NVMLError):
            for index in range(pynvml.nvmlDeviceGetCount()):
                with contextlib.suppress(pynvml.NVMLError):
                    parent = pynvml.nvmlDeviceGetHandleByIndex(index)
                    for handle in _itself_and_slices(pynvml, parent, slices="MIG-" in uuid):
                        if str(pynvml.nvmlDeviceGetUUID(handle)).startswith(uuid):
                            return cls(pynvml, handle, index)
        return None

    def memory(self) -> tuple[int, int] | None:
        """Bytes in use by everybody, and bytes there are; None once NVML has failed to answer."""
        if self._handle is None:
            return None
        try:
            info = self._info()
        except self._nvml.NVMLError:
            # a handle of a GPU that was lost can crash the driver's library
            self._handle = None
            return None
        return (int(info.used), int(info.total)) if info.total else None

    def _info(self) -> Any:
        try:
            # version 2 keeps apart what the driver reserves for itself; old drivers lack it
            return self._nvml.nvmlDeviceGetMemoryInfo(self._handle, self._nvml.nvmlMemory_v2)
        except self._nvml.NVMLError:
            return self._nvml.nvmlDeviceGetMemoryInfo(self._handle)


def _itself_and_slices(nvml: Any, parent: Any, *, slices: bool) -> list[Any]:
    found = [parent]
    if slices:
        for slot in range(nvml.nvmlDeviceGetMaxMigDeviceCount(parent)):
            with contextlib.suppress(nvml.NVMLError):
                found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, slot))
    return found
