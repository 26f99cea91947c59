"""One GPU's memory, asked of NVML often: a session and a handle that stay open."""

from __future__ import annotations

import contextlib
from typing import Any

from robust_train.gpu.nvml_session import memory_info, open_session, optional, slice_handles


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
        session = open_session()
        if isinstance(session, str):
            return None
        nvml = session.nvml
        for index in range(optional(nvml, nvml.nvmlDeviceGetCount) or 0):
            with contextlib.suppress(nvml.NVMLError):
                parent = nvml.nvmlDeviceGetHandleByIndex(index)
                slices = slice_handles(nvml, parent) if "MIG-" in uuid else []
                for handle in (parent, *slices):
                    if str(nvml.nvmlDeviceGetUUID(handle)).startswith(uuid):
                        return cls(nvml, handle, index)
        return None

    def memory(self) -> tuple[int, int] | None:
        """Bytes in use by everybody, and bytes there are; None once NVML has failed to answer."""
        if self._handle is None:
            return None
        try:
            info = memory_info(self._nvml, self._handle)
        except self._nvml.NVMLError:
            # a handle of a GPU that was lost can crash the driver's library
            self._handle = None
            return None
        return (int(info.used), int(info.total)) if info.total else None
