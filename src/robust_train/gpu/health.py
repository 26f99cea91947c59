"""Whether a GPU reports that no job should start on it. Each query is optional."""

from __future__ import annotations

from typing import Any

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
    return _recovery_action(nvml, handle) or _rows(nvml, handle) or _pages(nvml, handle)


def _recovery_action(nvml: Any, handle: Any) -> str | None:
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", 230)
    try:
        answer = nvml.nvmlDeviceGetFieldValues(handle, [field])[0]
    except nvml.NVMLError:
        return None
    # each field has a return code of its own; on some drivers the value is of another width
    action = answer.value.uiVal if answer.nvmlReturn == 0 else 0
    if action == 0:
        return None
    return f"the driver reports that {_RECOVERY.get(action, f'it needs recovery action {action}')}"


def _rows(nvml: Any, handle: Any) -> str | None:
    """Since Ampere: memory rows that failed are replaced by spare ones, while there are some."""
    try:
        _, _, _, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    except nvml.NVMLError:
        return None
    return "a memory row failed and could not be remapped" if failed else None


def _pages(nvml: Any, handle: Any) -> str | None:
    """Before Ampere: pages that failed are retired at the next reset."""
    try:
        pending = nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle)
    except nvml.NVMLError:
        return None
    return "memory pages wait to be retired: reset it or reboot" if pending else None
