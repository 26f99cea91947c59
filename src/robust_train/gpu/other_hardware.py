"""Recognises accelerators that robust-train does not use, by the files of their drivers.

`inventory` calls this on a machine without NVML, to explain why no GPU is found.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from robust_train.compat import torch_built_for

_NOT_USED = "robust-train uses NVIDIA GPUs that NVML shows, and no others"
_JETSON = ("dev/nvhost-gpu", "dev/nvhost-ctrl-gpu", "etc/nv_tegra_release")
_INTEL = "0x8086"  # PCI's number of the vendor

ABSENT = "libnvidia-ml.so.1"
"""The NVML library, which is missing on such a machine."""


def accelerator_without_nvml(root: Path = Path("/")) -> str | None:
    """Return a sentence about an accelerator on a machine without NVML, or None if there is
    none."""
    if not _is_absent(ABSENT):
        # The library exists, but is damaged or hidden on purpose.
        return None
    if any((root / trace).exists() for trace in _JETSON):
        return f"this is a Jetson, whose driver has no NVML here; {_NOT_USED}"
    if list((root / "dev").glob("nvidia[0-9]*")):
        return (
            "/dev shows NVIDIA GPUs, but their driver's NVML (libnvidia-ml.so.1) is missing; "
            "start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
    if (root / "dev/kfd").exists():
        return f"this machine has AMD GPUs (/dev/kfd); {_NOT_USED}"
    if _has_intel_gpu(root) and torch_built_for("xpu") is not None:
        return f"this machine has an Intel GPU, and torch is built for it; {_NOT_USED}"
    if sys.platform == "darwin":
        return f"this machine has an Apple GPU (MPS); {_NOT_USED}"
    return None


def _is_absent(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return "No such file" in str(error)
    return False


def _has_intel_gpu(root: Path) -> bool:
    vendors = (root / "sys/class/drm").glob("renderD*/device/vendor")
    return any(vendor.read_text().strip() == _INTEL for vendor in vendors)
