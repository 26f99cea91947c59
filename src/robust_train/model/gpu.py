"""GPUs and their processes at a moment. Memory is in bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuProcess:
    """A process that NVML lists on a GPU."""

    # Process id as the driver sees it. A container may number processes differently.
    pid: int
    used_bytes: int | None = None  # memory it holds, None if unavailable
    # Whether NVML lists it as a CUDA process; False for a process that only draws.
    computes: bool = True


@dataclass(frozen=True)
class GpuInfo:
    """A GPU (or a MIG slice) at a moment."""

    # The device's identity, `GPU-…` or `MIG-…`. Indices are never an identity.
    uuid: str
    name: str  # product name
    # NVML's number of the GPU (of the parent GPU for a slice), as `nvidia-smi` shows it
    index: int
    pci_bus_id: str  # `domain:bus:device.function` in lower-case hexadecimal
    total_bytes: int  # memory of the device
    # free_bytes, used_bytes: as NVML reports them, never computed as a difference.
    free_bytes: int
    used_bytes: int
    # how busy the GPU was lately, None if not supported
    utilization_percent: int | None = None
    # `default`, `exclusive_process`, `exclusive_thread` or `prohibited`
    compute_mode: str = "default"
    # The processes on it; None if unavailable or not requested.
    processes: tuple[GpuProcess, ...] | None = None
    # For a MIG slice, the UUID of its GPU.
    parent_uuid: str | None = None
    # Whether the GPU shares the host's memory (integrated). The figures are those of the host.
    unified_memory: bool = False
    # Why its clocks are low, for example because of heat; None if they are not.
    throttled: str | None = None
    unusable: str | None = None  # why no job may start on it now, or None
    # Whether the reason is a process that has it alone (exclusive mode), which may end.
    owned: bool = False
    # Whether NVIDIA's Multi-Process Service owns it, so that exclusive mode does not matter.
    mps: bool = False
    # CUDA's number of it under `CUDA_DEVICE_ORDER=PCI_BUS_ID` without a mask; None if NVML's and
    # CUDA's lists may differ.
    cuda_index: int | None = None

    @property
    def capacity_bytes(self) -> int:
        """Memory for processes, without what the driver keeps for itself."""
        return min(self.free_bytes + self.used_bytes, self.total_bytes)


Group = tuple[GpuInfo, ...]
"""The GPUs that an attempt uses together, one for each rank. Empty for the CPU."""


@dataclass(frozen=True)
class SkippedGpu:
    """A GPU that could not be read: its NVML index, its UUID if known, and why."""

    index: int
    reason: str
    uuid: str | None = None


@dataclass(frozen=True)
class Inventory:
    """All GPUs of the machine at a moment."""

    # The GPUs that answered, MIG slices instead of their GPU, ordered by PCI address.
    gpus: tuple[GpuInfo, ...] = ()
    skipped: tuple[SkippedGpu, ...] = ()  # the GPUs that did not answer, with reasons
    # A sentence if the list is empty (library missing, driver and library differ, no GPUs), else
    # None.
    problem: str | None = None
    driver_version: str | None = None  # version of the NVIDIA driver, None if unknown
    # the newest CUDA that the driver supports, None if unknown
    cuda_version: str | None = None
    # False if the driver hangs, so that nothing is known of the GPUs.
    answered: bool = True
    # False without a driver, and if the driver lists no GPU.
    may_have_gpus: bool = True

    def cuda_versions(self, torch_cuda: str | None) -> str:
        """Return the CUDA versions that the driver supports and that torch was built for, if known.

        Args:
            torch_cuda: ``13.0``, ``none`` for a build without CUDA, None if unknown.
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
        """Return whether the driver is likely to run a torch that was built for this CUDA.

        It is a guess: a container may bring libraries that make an older driver sufficient.
        """
        if torch_cuda is None or self.cuda_version is None or torch_cuda == "none":
            return torch_cuda != "none"
        # Within a major version any driver will do.
        return int(torch_cuda.split(".")[0]) <= int(self.cuda_version.split(".")[0])


def gpus_of(group: Group, rank: int | None) -> Group:
    """Return the GPU of ``rank``; all of them if the rank is unknown."""
    return group if rank is None else group[rank : rank + 1]


def device_name(gpus: Group) -> str:
    """Return ``cuda:0,cuda:1`` as ``nvidia-smi`` counts, ``cpu`` if there are none."""
    return ",".join(f"cuda:{gpu.index}" for gpu in gpus) or "cpu"
