"""One GPU's memory, read from NVML often: a session and a handle that stay open."""

from __future__ import annotations

import contextlib
from typing import Any

from robust_train.gpu.bounded import NoAnswer, ask
from robust_train.gpu.nvml_session import memory_info, open_session, optional, slice_handles

_OPENING_SECONDS = 30.0
_ANSWER_SECONDS = 5.0


class OneGpu:
    """A GPU (or MIG slice) that is read again and again; ``index`` is NVML's number of it."""

    def __init__(self, nvml: Any, handle: Any, index: int) -> None:
        self.index = index
        self._nvml = nvml
        self._handle = handle

    @classmethod
    def find(cls, name: str) -> OneGpu | None:
        """Return the GPU with this number, or whose UUID begins so; None if there is none."""
        try:
            return ask(lambda: cls._find(name), _OPENING_SECONDS)
        except NoAnswer:
            return None

    @classmethod
    def _find(cls, name: str) -> OneGpu | None:
        session = open_session()
        if isinstance(session, str):
            return None
        nvml = session.nvml
        for index in range(optional(nvml, nvml.nvmlDeviceGetCount) or 0):
            with contextlib.suppress(nvml.NVMLError):
                parent = nvml.nvmlDeviceGetHandleByIndex(index)
                if name.isdecimal():
                    if name == str(index):
                        return cls(nvml, parent, index)
                    continue
                slices = slice_handles(nvml, parent) if "MIG-" in name else []
                for handle in (parent, *slices):
                    if str(nvml.nvmlDeviceGetUUID(handle)).startswith(name):
                        return cls(nvml, handle, index)
        return None

    def memory(self) -> tuple[int, int] | None:
        """Return the bytes in use by everybody and the bytes there are.

        None while the driver hangs, and once NVML has failed to answer.
        """
        if self._handle is None:
            return None
        try:
            info = ask(lambda: memory_info(self._nvml, self._handle), _ANSWER_SECONDS)
        except NoAnswer:
            return None
        except self._nvml.NVMLError:
            # a handle of a GPU that was lost can crash the driver's library
            self._handle = None
            return None
        return (int(info.used), int(info.total)) if info.total else None
