"""Reads the GPUs of this machine and their memory from NVML, in any process.

If a call fails, only its metric is unknown, or at most its GPU is skipped. A call that hangs is
abandoned. The session stays open while GPUs are read often, because opening a session may take
seconds. A process that reads them seldom closes it (`close_session`), because an open session
blocks a reset of the GPUs.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import psutil

from robust_train.gpu.bounded import NoAnswerError, ask
from robust_train.gpu.other_hardware import accelerator_without_nvml
from robust_train.gpu.processes import is_mps_server
from robust_train.model.gpu import GpuInfo, GpuProcess, Inventory, SkippedGpu

_T = TypeVar("_T")

# The time limit of the first call. If no process uses the GPUs, that call wakes each of them, which
# takes seconds.
OPENING_SECONDS = 30.0
_ANSWER_SECONDS = 5.0  # the time limit of later calls
_CLOSING_SECONDS = 1.0
_HEALTH_SECONDS = 10.0  # the time for which a GPU's health is not read again

_COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
# Products that share the host's memory. A discrete GPU may not report its memory either (no
# permission, a fault), so the name decides.
_INTEGRATED = re.compile(r"\b(GB10|Thor|Orin|Xavier|Tegra|nvgpu|Jetson|N1X)\b", re.IGNORECASE)

# The bits `nvmlClocksEventReason…` in nvml.h.
_THROTTLES = {
    0x04: "power limit",
    0x08: "slowed down by the hardware",
    0x20: "too hot",
    0x40: "too hot, by the hardware",
    0x80: "power brake",
}

# The value `nvmlDeviceGpuRecoveryAction_t` in nvml.h.
_RECOVERY = {
    1: "it has to be reset (nvidia-smi --gpu-reset)",
    2: "the host has to be rebooted",
    3: "it has to be drained of peer-to-peer traffic",
    4: "it has to be drained and reset",
    5: "its IMEX domain has to be recovered (restart nvidia-imex on all nodes of the domain)",
    6: "its bus has to be reset (nvidia-smi --gpu-reset does not suffice: reboot the host)",
    7: "the whole system has to be rebooted, all nodes that share its NVLink switches",
}

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
_LOST = ": reboot the host (see NVRM and Xid lines in dmesg)"


def read_inventory(*, processes: bool = True) -> Inventory:
    """Return the current state of all GPUs of this machine, whatever CUDA_VISIBLE_DEVICES contains.

    Never raises because of a GPU or a driver. A GPU that cannot be read is in ``skipped`` with the
    reason, and ``problem`` has the reason if there are no GPUs at all. Returns within 5 s (30 s for
    the first call of a process) even if the driver hangs.

    Args:
        processes: whether to list the processes on each GPU. That takes some milliseconds per GPU
            and contends for a lock of the driver, so leave it out when polling.
    """
    limit_seconds = OPENING_SECONDS if known_session() is None else _ANSWER_SECONDS
    try:
        return ask(lambda: _read_inventory(processes), limit_seconds)
    except NoAnswerError as silence:
        return Inventory(problem=str(silence), answered=False)


def find_gpu(name: str) -> GpuInfo | None:
    """Return the current state of a GPU or MIG slice, None if it does not exist. ``name`` is its
    number or the start of its UUID."""
    for gpu in read_inventory(processes=False).gpus:
        if gpu.uuid.startswith(name) or str(gpu.index) == name:
            return gpu
    return None


def ask_health_again() -> None:
    """Make the next call read the GPUs' health again, even if it was read a moment ago."""
    session = known_session()
    if session is not None:
        session.health.clear()


def known_session() -> NvmlSession | None:
    """Return this process's session, None if it has none."""
    session = _session  # Another thread may set the global to None.
    is_own = session is not None and session.pid == os.getpid()
    return session if is_own else None


def close_session() -> None:
    """End this process's session if it has one. A driver that hangs is abandoned after a second."""
    session = known_session()
    forget_session()
    if session is not None:
        with contextlib.suppress(NoAnswerError, session.nvml.NVMLError):
            ask(session.nvml.nvmlShutdown, _CLOSING_SECONDS)


def forget_session() -> None:
    """Make the next call open a new session."""
    global _session
    _session = None


def _read_inventory(processes: bool) -> Inventory:
    for _ in range(2):
        try:
            session = known_session()
            if not session:
                session = _open_session()
            return session.read(processes)
        except _NoGpusError as error:
            problem = str(error)
            forget_session()  # The driver may have been reloaded since it was opened.
    if problem == NO_DRIVER:
        other = accelerator_without_nvml()
        return Inventory(problem=other or problem, may_have_gpus=other is not None)
    return Inventory(problem=problem)


def _open_session() -> NvmlSession:
    global _session
    try:
        import pynvml
    except ImportError:
        raise _NoGpusError(_NO_BINDING) from None
    if not hasattr(pynvml, "nvmlMemory_v2"):
        raise _NoGpusError(_LEGACY_BINDING)
    try:
        # In a forked child the parent's session is not shut down, because that would affect the
        # parent.
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _no_gpus(pynvml, error) from None
    _session = NvmlSession(pynvml)
    return _session


class _NoGpusError(Exception):
    """No session can be opened, or it ended. The message gives the reason and the fix."""


def _no_gpus(nvml: Any, error: Exception) -> _NoGpusError:
    """Return the error to raise for an error of NVML."""
    sentences = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: NO_DRIVER,
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: _NOT_LOADED,
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: _MISMATCH,
    }
    unknown = f"the NVIDIA driver does not answer ({error}); see what nvidia-smi reports"
    return _NoGpusError(sentences.get(getattr(error, "value", None), unknown))


class _UnreadableError(Exception):
    """A GPU cannot be used, although NVML raised no error."""


@dataclass(frozen=True)
class _Device:
    """The handle of a GPU or a MIG slice, and its properties that do not change."""

    index: int
    handle: Any
    uuid: str
    name: str
    pci_bus_id: str
    parent: _Device | None = None  # the GPU of a MIG slice


class NvmlSession:
    """An open NVML session of this process."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.pid = os.getpid()
        self.health: dict[int, tuple[float, str | None]] = {}
        self._count = 0
        self._known: dict[int, _Device] = {}
        self._driver = self._optional(nvml.nvmlSystemGetDriverVersion)
        cuda = self._optional(nvml.nvmlSystemGetCudaDriverVersion)
        self._cuda = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None

    def read(self, processes: bool) -> Inventory:
        """Return the current state of all GPUs.

        Raises:
            _NoGpusError: the session has ended.
        """
        try:
            count = self.nvml.nvmlDeviceGetCount()
        except self.nvml.NVMLError as error:
            raise _no_gpus(self.nvml, error) from None
        if count != self._count:
            self._known.clear()
            self.health.clear()
            self._count = count
        gpus: list[GpuInfo] = []
        skipped: list[SkippedGpu] = []
        for index in range(count):
            try:
                gpus += self._read_gpu(index, processes)
            except (self.nvml.NVMLError, ValueError, _UnreadableError) as error:
                # The handle of a lost GPU can crash the driver's library, so it is dropped.
                lost = self._known.pop(index, None)
                uuid = None if lost is None else lost.uuid
                reason = str(error)
                if isinstance(error, self.nvml.NVMLError_GpuIsLost):
                    reason += _LOST
                skipped.append(SkippedGpu(index, reason, uuid))
        # The sort is stable, so the slices of a GPU stay in NVML's order.
        gpus.sort(key=lambda gpu: gpu.pci_bus_id)
        is_complete = not skipped and not any(gpu.parent_uuid for gpu in gpus)
        if is_complete:
            # CUDA uses these numbers with CUDA_DEVICE_ORDER=PCI_BUS_ID.
            gpus = [replace(gpu, cuda_index=n) for n, gpu in enumerate(gpus)]
        return Inventory(
            tuple(gpus),
            tuple(skipped),
            None if gpus else self._problem(skipped),
            None if self._driver is None else str(self._driver),
            self._cuda,
            may_have_gpus=count > 0,
        )

    def _problem(self, skipped: list[SkippedGpu]) -> str:
        if not skipped:
            return f"no NVIDIA GPU on this machine (driver {self._driver or 'unknown'})"
        reasons = "; ".join(f"GPU {gpu.index}: {gpu.reason}" for gpu in skipped)
        return f"none of the {len(skipped)} GPUs here can be used: {reasons}"

    def _read_gpu(self, index: int, processes: bool) -> list[GpuInfo]:
        """Return a GPU, or its MIG slices. It is read a second time after a transient error."""
        try:
            return self._read_gpu_once(index, processes)
        except self.nvml.NVMLError as error:
            transient = (
                self.nvml.NVML_ERROR_TIMEOUT,
                self.nvml.NVML_ERROR_IN_USE,
                self.nvml.NVML_ERROR_INSUFFICIENT_RESOURCES,
                self.nvml.NVML_ERROR_NOT_READY,
            )
            if error.value not in transient:
                raise
            return self._read_gpu_once(index, processes)

    def _read_gpu_once(self, index: int, processes: bool) -> list[GpuInfo]:
        device = self._known.get(index)
        if device is None:
            handle = self.nvml.nvmlDeviceGetHandleByIndex(index)
            device = self._open_device(index, handle)
            self._known[index] = device
        # MIG may be turned on at any time. Most GPUs do not support it.
        mig = self._optional(self.nvml.nvmlDeviceGetMigMode, device.handle)
        if mig is not None and mig[0] == self.nvml.NVML_DEVICE_MIG_ENABLE:
            gpus_read = self._read_slices(device, processes)
        else:
            gpus_read = [self._read_device(device, processes)]
        why = self._health_of(device)
        if why is None:
            return gpus_read
        return [replace(gpu, unusable=why, owned=False) for gpu in gpus_read]

    def _open_device(self, index: int, handle: Any, parent: _Device | None = None) -> _Device:
        name = self._optional(self.nvml.nvmlDeviceGetName, handle)
        unknown = "unknown GPU" if parent is None else f"{parent.name} MIG"
        return _Device(
            index,
            handle,
            str(self.nvml.nvmlDeviceGetUUID(handle)),
            str(name or unknown),
            self._pci_bus_id(handle) if parent is None else parent.pci_bus_id,
            parent,
        )

    def _pci_bus_id(self, handle: Any) -> str:
        pci = self._optional(self.nvml.nvmlDeviceGetPciInfo, handle)
        if pci is None:
            return ""
        return f"{pci.domain:08x}:{pci.bus:02x}:{pci.device:02x}.0"

    def _read_slices(self, parent: _Device, processes: bool) -> list[GpuInfo]:
        """Return the MIG slices of a GPU. While MIG is on, no program can use the whole GPU."""
        nvml = self.nvml
        slices: list[GpuInfo] = []
        reason = "MIG is on, but no slice exists: create one with nvidia-smi mig -cgi … -C"
        most = self._optional(nvml.nvmlDeviceGetMaxMigDeviceCount, parent.handle)
        get = nvml.nvmlDeviceGetMigDeviceHandleByIndex
        for slot in range(most or 0):
            handle = self._optional(get, parent.handle, slot)
            if handle is None:  # The slot is empty.
                continue
            try:
                device = self._open_device(parent.index, handle, parent)
                slices.append(self._read_device(device, processes))
            except (nvml.NVMLError, ValueError, _UnreadableError) as error:
                reason = f"its MIG slices cannot be read: {error}"
        if not slices:
            raise _UnreadableError(reason)
        return slices

    def _read_device(self, device: _Device, processes: bool) -> GpuInfo:
        nvml = self.nvml
        handle = device.handle
        parent = device.parent
        total, free, used, is_unified = self._read_memory(device)
        utilization = self._optional(nvml.nvmlDeviceGetUtilizationRates, handle)
        whole = handle if parent is None else parent.handle
        mode = self._optional(nvml.nvmlDeviceGetComputeMode, whole)
        compute_mode = _COMPUTE_MODES.get(mode or 0, f"unknown ({mode})")
        return GpuInfo(
            uuid=device.uuid,
            name=device.name,
            index=device.index,
            pci_bus_id=device.pci_bus_id,
            total_bytes=total,
            free_bytes=free,
            used_bytes=used,
            utilization_percent=None if utilization is None else utilization.gpu,
            compute_mode=compute_mode,
            processes=self._read_processes(handle) if processes else None,
            throttled=self._why_throttled(handle) if processes else None,
            parent_uuid=None if parent is None else parent.uuid,
            unified_memory=is_unified,
            **self._consequences_of_mode(handle, compute_mode),
        )

    def _why_throttled(self, handle: Any) -> str | None:
        """Return why heat or power limits the clocks, None if nothing does."""
        bits = 0
        # The name of the call depends on the version of the binding.
        for name in ("Throttle", "Event"):
            read = getattr(self.nvml, f"nvmlDeviceGetCurrentClocks{name}Reasons", None)
            if read is not None and not bits:
                bits = self._optional(read, handle) or 0
        return ", ".join(text for bit, text in _THROTTLES.items() if bits & bit) or None

    def _consequences_of_mode(self, handle: Any, compute_mode: str) -> dict[str, Any]:
        """Return the fields of `GpuInfo` that depend on the compute mode, such as ``unusable``."""
        if compute_mode == "prohibited":
            return {"unusable": "compute mode is prohibited"}
        if not compute_mode.startswith("exclusive"):
            return {}
        # A graphics process does not count, because the mode only limits CUDA contexts.
        owners = self._list_processes(handle, "Compute") or []
        if any(is_mps_server(owner.pid) for owner in owners):
            return {"mps": True}
        if not owners:
            return {}
        why = f"compute mode is {compute_mode} and pid {owners[0].pid} owns it"
        return {"unusable": why, "owned": True}

    def _read_memory(self, device: _Device) -> tuple[int, int, int, bool]:
        """Return total, free and used bytes, and whether the memory is the host's."""
        nvml = self.nvml
        handle = device.handle
        # Version 2 of the call does not count the driver's own memory as used. Some drivers, such
        # as WSL's, have the call but do not support it.
        memory = self._optional(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
        problem = "NVML reports no memory for it (a total of 0)"
        try:
            if not memory:
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            if memory.total > 0:
                return memory.total, memory.free, memory.used, False
        except nvml.NVMLError_NotSupported:
            problem = "NVML does not report its memory (Not Supported)"
        if _INTEGRATED.search(device.name) is None:
            raise _UnreadableError(problem)
        host = psutil.virtual_memory()
        return host.total, host.available, host.total - host.available, True

    def _read_processes(self, handle: Any) -> tuple[GpuProcess, ...] | None:
        """Return the processes on a device. NVML lists a process that computes and draws twice."""
        compute = self._list_processes(handle, "Compute")
        graphics = self._list_processes(handle, "Graphics")
        if compute is None and graphics is None:
            return None
        computing = {process.pid for process in compute or ()}
        used: dict[int, int | None] = {}
        for process in (*(compute or ()), *(graphics or ())):
            earlier = used.get(process.pid)
            size = process.usedGpuMemory
            used[process.pid] = size if earlier is None else max(earlier, size or 0)
        return tuple(GpuProcess(pid, size, pid in computing) for pid, size in used.items())

    def _list_processes(self, handle: Any, kind: str) -> list[Any] | None:
        """Return NVML's list, or None on any error."""
        call = getattr(self.nvml, f"nvmlDeviceGet{kind}RunningProcesses_v3")
        return self._optional(call, handle)

    def _health_of(self, device: _Device) -> str | None:
        """Return why no job should start on a GPU, None if it is healthy. The answer is kept for
        some seconds, because it seldom changes."""
        now = time.monotonic()
        read_at, fault = self.health.get(device.index, (-_HEALTH_SECONDS, None))
        if now - read_at >= _HEALTH_SECONDS:
            fault = self._find_fault(device.handle)
            self.health[device.index] = (now, fault)
        return fault

    def _find_fault(self, handle: Any) -> str | None:
        """Return the first fault that a GPU reports, None if it reports none."""
        nvml = self.nvml
        field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", 230)
        answers = self._optional(nvml.nvmlDeviceGetFieldValues, handle, [field])
        # Each field has its own return code.
        if answers and answers[0].nvmlReturn == 0:
            action = answers[0].value.uiVal
            if action:
                what = _RECOVERY.get(action, f"it needs recovery action {action}")
                return f"the driver reports that {what}"
        # Since Ampere, spare memory rows replace failed rows as long as there are any.
        rows = self._optional(nvml.nvmlDeviceGetRemappedRows, handle)
        if rows is not None and rows[3]:
            return "a memory row failed and could not be remapped"
        # Before Ampere, failed memory pages are retired at the next reset.
        if self._optional(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle):
            return "memory pages wait to be retired: reset it or reboot"
        return None

    def _optional(self, call: Callable[..., _T], *args: Any) -> _T | None:
        """Return a metric that a GPU may lack, None on any error."""
        try:
            return call(*args)
        except (self.nvml.NVMLError, ValueError):  # ValueError: a name is not valid UTF-8.
            return None


# The open session of this process, or after a fork of its parent.
_session: NvmlSession | None = None
