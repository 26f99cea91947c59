"""Read from NVML what GPUs there are and how full.

A call that fails concerns its own metric, or at most its own GPU. A call that hangs is given up.
"""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import replace
from typing import Any

import psutil

from robust_train.gpu.bounded import NoAnswer, ask
from robust_train.gpu.nvml_session import (
    NO_DRIVER,
    Session,
    Static,
    forget_session,
    init_problem,
    known_session,
    memory_info,
    open_session,
    optional,
    slice_handles,
)
from robust_train.gpu.processes import is_mps_server
from robust_train.model.gpu import GpuInfo, GpuProcess, Inventory, SkippedGpu

_HEALTH_SECONDS = 10.0
# where nothing keeps the driver awake, the first call wakes all GPUs, which takes seconds for each
OPENING_SECONDS = 30.0
_ANSWER_SECONDS = 5.0

_COMPUTE_MODES = ("default", "exclusive_thread", "prohibited", "exclusive_process")
# products that share the host's memory. A discrete card may lack its figures as well (no
# permission, a fault), so the name decides
_INTEGRATED = re.compile(
    r"\b(GB10|Thor|Orin|Xavier|Tegra|nvgpu|Jetson|N1X)\b", re.IGNORECASE
)


class _Unreadable(Exception):
    """A GPU cannot be used for a reason that NVML did not raise."""


def read_inventory(*, processes: bool = True) -> Inventory:
    """Return all GPUs of this machine as they are now, whatever CUDA_VISIBLE_DEVICES contains.

    Never raises because of a GPU or a driver: what cannot be read is in ``skipped`` with its
    reason, and ``problem`` is the reason for nothing at all. Returns within 5 s (30 s for the
    first call of a process) also if the driver hangs.

    Args:
        processes: also list who is on each GPU. That costs some milliseconds per GPU and contends
            for a lock of the driver, so leave it out when polling.
    """
    limit_seconds = OPENING_SECONDS if known_session() is None else _ANSWER_SECONDS
    try:
        return ask(lambda: _read_inventory(processes), limit_seconds)
    except NoAnswer as silence:
        return Inventory(problem=str(silence), answered=False)


def _read_inventory(processes: bool) -> Inventory:
    found = _count()
    if isinstance(found, str):
        return Inventory(problem=found, may_have_gpus=found != NO_DRIVER)
    session, count = found
    if count != session.count:
        session.known.clear()
        session.health.clear()
        session.count = count
    gpus: list[GpuInfo] = []
    skipped: list[SkippedGpu] = []
    for index in range(count):
        read = _read_gpu(session, index, processes)
        if isinstance(read, SkippedGpu):
            skipped.append(read)
        else:
            gpus.extend(read)
    # the sort is stable: the slices of a GPU stay in NVML's order
    gpus.sort(key=lambda gpu: gpu.pci_bus_id)
    is_complete = not skipped and not any(gpu.parent_uuid for gpu in gpus)
    for number, gpu in enumerate(
        gpus
    ):  # CUDA_DEVICE_ORDER=PCI_BUS_ID, mostly NVML's order too
        if gpu.cuda_index != (cuda_index := number if is_complete else None):
            gpus[number] = replace(gpu, cuda_index=cuda_index)
    return Inventory(
        tuple(gpus),
        tuple(skipped),
        _problem(session, gpus, skipped),
        session.driver_version,
        may_have_gpus=count > 0,
    )


def _count() -> tuple[Session, int] | str:
    """Return the session and the number of GPUs, or why there is none."""
    for is_last in (False, True):
        session = open_session()
        if isinstance(session, str):
            return session
        try:
            return session, session.nvml.nvmlDeviceGetCount()
        except session.nvml.NVMLError as error:
            forget_session()  # the driver may have been reloaded under it
            if is_last:
                return init_problem(session.nvml, error)
    raise AssertionError


def _problem(
    session: Session, gpus: list[GpuInfo], skipped: list[SkippedGpu]
) -> str | None:
    if gpus:
        return None
    if not skipped:
        return f"no NVIDIA GPU on this machine (driver {session.driver_version or 'unknown'})"
    reasons = "; ".join(f"GPU {gpu.index}: {gpu.reason}" for gpu in skipped)
    return f"none of the {len(skipped)} GPUs here can be used: {reasons}"


def _read_gpu(
    session: Session, index: int, processes: bool
) -> list[GpuInfo] | SkippedGpu:
    """Return one GPU, or its slices if it is cut into some."""
    nvml = session.nvml
    try:
        return _read_gpu_once(session, index, processes)
    except (nvml.NVMLError, _Unreadable) as error:
        static = session.known.pop(index, None)
        passing = (
            nvml.NVML_ERROR_TIMEOUT,
            nvml.NVML_ERROR_IN_USE,
            nvml.NVML_ERROR_INSUFFICIENT_RESOURCES,
            nvml.NVML_ERROR_NOT_READY,
        )
        if getattr(error, "value", None) in passing:
            with contextlib.suppress(nvml.NVMLError, _Unreadable):
                return _read_gpu_once(session, index, processes)
        # a handle of a GPU that was lost can crash the driver's library
        session.known.pop(index, None)
        return SkippedGpu(index, str(error), None if static is None else static.uuid)


def _read_gpu_once(session: Session, index: int, processes: bool) -> list[GpuInfo]:
    nvml = session.nvml
    static = session.known.get(index)
    if static is None:
        static = session.known[index] = _read_static(nvml, index)
    if _is_sliced(nvml, static):
        devices = _read_slices(nvml, static, index, processes)
    else:
        devices = [_read_device(nvml, static, static.handle, index, processes)]
    why = _health(session, static, index)
    return (
        devices
        if why is None
        else [replace(device, unusable=why) for device in devices]
    )


def _health(session: Session, static: Static, index: int) -> str | None:
    """Return why no job should start on a GPU; changes seldom, so it is not read each time."""
    now = time.monotonic()
    read_at, why = session.health.get(index, (-_HEALTH_SECONDS, None))
    if now - read_at >= _HEALTH_SECONDS:
        why = why_unhealthy(session.nvml, static.handle)
        session.health[index] = (now, why)
    return why


def ask_health_again() -> None:
    """Have the next call read the GPUs' health, however lately that was done."""
    if (session := known_session()) is not None:
        session.health.clear()


def _read_static(nvml: Any, index: int) -> Static:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid = str(nvml.nvmlDeviceGetUUID(handle))
    name = optional(nvml, nvml.nvmlDeviceGetName, handle)
    pci = optional(nvml, nvml.nvmlDeviceGetPciInfo, handle)
    return Static(
        handle=handle,
        uuid=uuid,
        name="unknown GPU" if name is None else str(name),
        pci_bus_id=""
        if pci is None
        else f"{pci.domain:08x}:{pci.bus:02x}:{pci.device:02x}.0",
        can_be_sliced=optional(nvml, nvml.nvmlDeviceGetMigMode, handle) is not None,
    )


def _is_sliced(nvml: Any, gpu: Static) -> bool:
    mode = (
        optional(nvml, nvml.nvmlDeviceGetMigMode, gpu.handle)
        if gpu.can_be_sliced
        else None
    )
    return mode is not None and mode[0] == nvml.NVML_DEVICE_MIG_ENABLE


def _read_slices(
    nvml: Any, parent: Static, index: int, processes: bool
) -> list[GpuInfo]:
    """Return the slices of a GPU: nothing can run on it as a whole while MIG is on."""
    slices: list[GpuInfo] = []
    reason = "MIG is on but no slice has been made: nvidia-smi mig -cgi … -C"
    for handle in slice_handles(nvml, parent.handle):
        try:
            static = replace(
                parent,
                uuid=str(nvml.nvmlDeviceGetUUID(handle)),
                name=str(
                    optional(nvml, nvml.nvmlDeviceGetName, handle)
                    or f"{parent.name} MIG"
                ),
            )
            info = _read_device(
                nvml, static, handle, index, processes, mode_of=parent.handle
            )
        except (nvml.NVMLError, _Unreadable) as error:
            reason = f"its MIG slices cannot be read: {error}"
            continue
        slices.append(replace(info, parent_uuid=parent.uuid))
    if not slices:
        raise _Unreadable(reason)
    return slices


def _read_device(
    nvml: Any,
    static: Static,
    handle: Any,
    index: int,
    processes: bool,
    mode_of: Any = None,
) -> GpuInfo:
    total, free, used, is_unified = _read_memory(nvml, static, handle)
    utilization = optional(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    mode = optional(nvml, nvml.nvmlDeviceGetComputeMode, mode_of or handle)
    compute_mode = _COMPUTE_MODES[mode or 0]
    unusable, mps = _read_mode(nvml, handle, compute_mode)
    return GpuInfo(
        uuid=static.uuid,
        name=static.name,
        index=index,
        pci_bus_id=static.pci_bus_id,
        total_bytes=total,
        free_bytes=free,
        used_bytes=used,
        utilization_percent=None if utilization is None else utilization.gpu,
        compute_mode=compute_mode,
        processes=_read_processes(nvml, handle) if processes else None,
        unified_memory=is_unified,
        unusable=unusable,
        mps=mps,
        cuda_index=index,
    )


def _read_mode(nvml: Any, handle: Any, compute_mode: str) -> tuple[str | None, bool]:
    """Return why the compute mode lets no job start now, and whether MPS owns the GPU."""
    if compute_mode == "prohibited":
        return "compute mode is prohibited", False
    if compute_mode.startswith("exclusive"):
        # a graphics process does not count: the mode is about CUDA contexts
        owners = _list_processes(nvml, handle, "Compute") or []
        if any(is_mps_server(owner.pid) for owner in owners):
            return None, True
        if owners:
            return (
                f"compute mode is {compute_mode} and pid {owners[0].pid} owns it",
                False,
            )
    return None, False


def _read_memory(nvml: Any, static: Static, handle: Any) -> tuple[int, int, int, bool]:
    """Return total, free and used bytes, and whether they are the host's."""
    problem = "NVML reports no memory for it (a total of 0)"
    try:
        memory = memory_info(nvml, handle)
        if memory.total > 0:
            return memory.total, memory.free, memory.used, False
    except nvml.NVMLError_NotSupported:
        problem = "NVML does not report its memory (Not Supported)"
    if _INTEGRATED.search(static.name) is None:
        raise _Unreadable(problem)
    host = psutil.virtual_memory()
    return host.total, host.available, host.total - host.available, True


def _read_processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...] | None:
    """Return who is on a device; NVML lists a process that computes and draws twice."""
    compute = _list_processes(nvml, handle, "Compute")
    graphics = _list_processes(nvml, handle, "Graphics")
    if compute is None and graphics is None:
        return None
    computing = {process.pid for process in compute or []}
    used: dict[int, int | None] = {}
    for process in [*(compute or []), *(graphics or [])]:
        known = used.get(process.pid)
        size = process.usedGpuMemory
        used[process.pid] = size if known is None else max(known, size or 0)
    return tuple(GpuProcess(pid, size, pid in computing) for pid, size in used.items())


def _list_processes(nvml: Any, handle: Any, kind: str) -> list[Any] | None:
    """Return NVML's list; None on any error."""
    listed: list[Any] | None = optional(
        nvml, getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses_v3"), handle
    )
    return listed


# nvmlDeviceGpuRecoveryAction_t
_RECOVERY = {
    1: "it has to be reset (nvidia-smi --gpu-reset)",
    2: "the host has to be rebooted",
    3: "it has to be drained of peer-to-peer traffic",
    4: "it has to be drained and reset",
    5: "its IMEX domain has to be recovered (restart nvidia-imex on all nodes of the domain)",
    6: "its bus has to be reset (nvidia-smi --gpu-reset does not suffice: reboot the host)",
    7: "the whole system has to be rebooted, all nodes that share its NVLink switches",
}


def why_unhealthy(nvml: Any, handle: Any) -> str | None:
    """Return why no job should start on a whole GPU; None if it is healthy or does not report."""
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", 230)
    answers = optional(nvml, nvml.nvmlDeviceGetFieldValues, handle, [field])
    # each field has a return code of its own; on some drivers the value is of another width
    action = answers[0].value.uiVal if answers and answers[0].nvmlReturn == 0 else 0
    if action:
        what = _RECOVERY.get(action, f"it needs recovery action {action}")
        return f"the driver reports that {what}"
    # since Ampere: memory rows that failed are replaced by spare ones, while there are some
    rows = optional(nvml, nvml.nvmlDeviceGetRemappedRows, handle)
    if rows is not None and rows[3]:
        return "a memory row failed and could not be remapped"
    # before Ampere: pages that failed are retired at the next reset
    if optional(nvml, nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle):
        return "memory pages wait to be retired: reset it or reboot"
    return None
