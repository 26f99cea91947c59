"""Snapshots of GPUs and their processes, as frozen values. Memory is in bytes.

:mod:`robust_train.gpu` creates them from NVML in the launcher and in commands. The queue, the
policy and the attempt's spec pass them on.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuProcess:
    """A process that NVML lists on a GPU."""

    # Process id as the driver sees it. A container may number processes differently.
    pid: int
    used_bytes: int | None = None  # GPU memory of the process, None if unavailable
    # Whether NVML lists it as a CUDA process; False for a process that only draws.
    computes: bool = True


@dataclass(frozen=True)
class GpuInfo:
    """A GPU (or a MIG slice) at one moment."""

    # `GPU-…` or `MIG-…`. Only the UUID identifies a device; its index may change.
    uuid: str
    name: str  # product name
    # The number that `nvidia-smi` shows for the GPU, or for the parent GPU of a slice.
    index: int
    pci_bus_id: str  # `domain:bus:device.function` in lower-case hexadecimal
    # NVML reports all three figures. Free and used memory need not add up to the total.
    total_bytes: int
    free_bytes: int
    used_bytes: int
    # Recent utilization, None if not supported.
    utilization_percent: int | None = None
    # `default`, `exclusive_process`, `exclusive_thread` or `prohibited`
    compute_mode: str = "default"
    # The processes on the GPU, None if unavailable or not requested.
    processes: tuple[GpuProcess, ...] | None = None
    parent_uuid: str | None = None  # the UUID of a MIG slice's GPU, None for a whole GPU
    # Whether the GPU shares the host's memory (integrated), which the memory figures then describe.
    unified_memory: bool = False
    throttled: str | None = None  # why its clocks are reduced (such as heat), None if they are not
    unusable: str | None = None  # why no job may start on it now, None if a job may
    # Whether `unusable` is due to a process that uses it alone (exclusive mode) and may end.
    owned: bool = False
    # Whether NVIDIA's Multi-Process Service owns it, so that exclusive mode does not matter.
    mps: bool = False
    # The GPU's number in CUDA with `CUDA_DEVICE_ORDER=PCI_BUS_ID` and without a mask. None if CUDA
    # may list other GPUs than NVML.
    cuda_index: int | None = None

    @property
    def capacity_bytes(self) -> int:
        """Memory for processes, without what the driver keeps for itself."""
        return min(self.free_bytes + self.used_bytes, self.total_bytes)


Group = tuple[GpuInfo, ...]
"""The GPUs that an attempt uses together, one for each rank. Empty for the CPU."""


@dataclass(frozen=True)
class SkippedGpu:
    """A GPU that could not be read."""

    index: int  # its number in NVML
    reason: str  # why it could not be read
    uuid: str | None = None  # its UUID, None if unknown


@dataclass(frozen=True)
class Inventory:
    """All GPUs of the machine at one moment."""

    # The GPUs that could be read, ordered by PCI address. MIG slices replace their GPU.
    gpus: tuple[GpuInfo, ...] = ()
    skipped: tuple[SkippedGpu, ...] = ()  # the GPUs that could not be read
    # Why the list is empty, for example because the NVIDIA library is missing. None if the list has
    # a GPU.
    problem: str | None = None
    driver_version: str | None = None  # version of the NVIDIA driver, None if unknown
    cuda_version: str | None = None  # newest CUDA that the driver supports, None if unknown
    answered: bool = True  # False if the driver hangs, so that nothing is known about the GPUs
    may_have_gpus: bool = True  # False without a driver, or if the driver lists no GPU

    def cuda_versions(self, torch_cuda: str | None) -> str:
        """Describe the CUDA versions of the driver and of torch, as far as they are known.

        Args:
            torch_cuda: torch's CUDA version, ``none`` if torch was built without CUDA, None if
                unknown.
        """
        versions = []
        if self.cuda_version:
            versions.append(f"the driver supports CUDA {self.cuda_version}")
        if torch_cuda == "none":
            versions.append("this torch was built without CUDA")
        elif torch_cuda:
            versions.append(f"this torch was built for CUDA {torch_cuda}")
        return ", ".join(versions)

    def may_run(self, torch_cuda: str | None) -> bool:
        """Return whether the driver probably supports a torch that was built for this CUDA.

        The answer is a guess: a container may bring libraries with which an older driver suffices.
        """
        if torch_cuda == "none":
            return False
        if torch_cuda is None or self.cuda_version is None:
            return True
        # A driver supports all minor versions of its major version.
        torch_major = int(torch_cuda.split(".")[0])
        driver_major = int(self.cuda_version.split(".")[0])
        return torch_major <= driver_major


def select_gpus(group: Group, rank: int | None) -> Group:
    """Return the GPU of ``rank``, or the whole group if the rank is None."""
    if rank is None:
        return group
    return group[rank : rank + 1]


def device_name(gpus: Group) -> str:
    """Return a name such as ``cuda:0,cuda:1``, by the numbers of ``nvidia-smi``, or ``cpu``."""
    return ",".join(f"cuda:{gpu.index}" for gpu in gpus) or "cpu"
