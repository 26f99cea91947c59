"""This process's NVML session, or why there is none.

It stays open while GPUs are read often: opening one may cost seconds. Who waits for long closes it
(:func:`close_session`), because an open session blocks a reset of the GPUs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from robust_train.gpu.bounded import NoAnswer, ask

_T = TypeVar("_T")

NO_DRIVER = (
    "no NVIDIA driver on this machine (libnvidia-ml.so.1 was not found); "
    "inside a container, start it with GPU access, e.g. --gpus all"
)
_LEGACY_BINDING = (
    "the module pynvml is a legacy package that shadows nvidia-ml-py: "
    "pip uninstall pynvml nvidia-ml-py3, then pip install --force-reinstall nvidia-ml-py"
)
_NO_BINDING = "the package nvidia-ml-py is not installed: pip install nvidia-ml-py"
_MISMATCH = (
    "the NVIDIA kernel module and its libraries are of different versions (a driver was upgraded "
    "under a running system): reboot, or reload the nvidia kernel module; inside a container, "
    "restart the container"
)
_NOT_LOADED = (
    "the NVIDIA kernel module is not loaded: modprobe nvidia, or reinstall the driver; "
    "inside a container, start it with GPU access, e.g. --gpus all"
)


@dataclass(frozen=True)
class Static:
    """A GPU's properties that do not change, with its handle."""

    handle: Any
    uuid: str
    name: str
    pci_bus_id: str
    can_be_sliced: bool


@dataclass
class Session:
    """An open NVML session of one process."""

    nvml: Any
    pid: int
    driver_version: str | None
    count: int = 0
    known: dict[int, Static] = field(default_factory=dict)
    health: dict[int, tuple[float, str | None]] = field(default_factory=dict)


_session: Session | None = None


def known_session() -> Session | None:
    """Return this process's session, None if it has none."""
    session = _session  # another thread may forget it
    return session if session is not None and session.pid == os.getpid() else None


def open_session() -> Session | str:
    """Return this process's session, or one sentence: why there is none."""
    global _session
    if (session := known_session()) is not None:
        return session
    try:
        import pynvml
    except ImportError:
        return _NO_BINDING
    if not hasattr(pynvml, "nvmlMemory_v2"):
        return _LEGACY_BINDING
    try:
        # after a fork only this: a shutdown would act on the parent's session
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return init_problem(pynvml, error)
    try:
        driver: str | None = str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        driver = None
    _session = Session(pynvml, os.getpid(), driver)
    return _session


def forget_session() -> None:
    """Have the next call open another one."""
    global _session
    _session = None


def close_session(limit_seconds: float = 1.0) -> None:
    """End this process's session, if it has one; a driver that hangs has some seconds."""
    session = known_session()
    forget_session()
    if session is not None:
        with contextlib.suppress(NoAnswer, session.nvml.NVMLError):
            ask(session.nvml.nvmlShutdown, limit_seconds)


def init_problem(nvml: Any, error: Exception) -> str:
    """Return why the driver does not answer, and what helps."""
    code = getattr(error, "value", None)
    return {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: NO_DRIVER,
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: _NOT_LOADED,
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: _MISMATCH,
    }.get(
        code,
        f"the NVIDIA driver does not answer ({error}); see what nvidia-smi reports",
    )


def optional(nvml: Any, call: Callable[..., _T], *arguments: Any) -> _T | None:
    """Return a metric that a GPU may lack: None on any error."""
    try:
        return call(*arguments)
    except nvml.NVMLError:
        return None


def memory_info(nvml: Any, handle: Any) -> Any:
    """Return memory by version 2 of the call, which does not count the driver's own as used. Else
    by version 1: some drivers have the symbol of version 2 and refuse it (seen on WSL)."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetMemoryInfo(handle)


def slice_handles(nvml: Any, parent: Any) -> list[Any]:
    """Return handles of a GPU's MIG slices."""
    most = optional(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, parent) or 0
    get = nvml.nvmlDeviceGetMigDeviceHandleByIndex
    # an empty slot answers NOT_FOUND
    found = (optional(nvml, get, parent, slot) for slot in range(most))
    return [handle for handle in found if handle is not None]


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
