"""GPUs and their processes at one moment. Memory is in bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuProcess:
    """A process that NVML lists on a GPU."""

    # process id as the driver sees it, which a container may number differently
    pid: int
    used_bytes: int | None = None  # memory it holds, None if unavailable
    # NVML lists it as a CUDA process; False for one that only draws
    computes: bool = True


@dataclass(frozen=True)
class GpuInfo:
    """One GPU (or one MIG slice) at one moment."""

    # the device's identity, `GPU-…` or `MIG-…`; indices are never an identity
    uuid: str
    name: str  # product name
    # NVML's number of the GPU (of the parent GPU for a slice), as `nvidia-smi` shows it
    index: int
    pci_bus_id: str  # `domain:bus:device.function` in lower-case hexadecimal
    total_bytes: int  # memory of the device
    # free_bytes, used_bytes: as NVML has them; never computed as a difference
    free_bytes: int
    used_bytes: int
    # how busy the GPU was lately, None if not supported
    utilization_percent: int | None = None
    # `default`, `exclusive_process`, `exclusive_thread` or `prohibited`
    compute_mode: str = "default"
    # who is on it; None if unavailable or not asked for
    processes: tuple[GpuProcess, ...] | None = None
    # for a MIG slice the UUID of the GPU it is a part of
    parent_uuid: str | None = None
    # the GPU shares the host's memory (integrated); the figures are the host's
    unified_memory: bool = False
    # why its clocks are low, of heat or power; None if they are not
    throttled: str | None = None
    unusable: str | None = None  # why no job may start on it now, or None
    # that is because a process has it alone (exclusive mode), which may end
    owned: bool = False
    # NVIDIA's Multi-Process Service owns it, so that exclusive mode is no obstacle
    mps: bool = False
    # CUDA's number of it under `CUDA_DEVICE_ORDER=PCI_BUS_ID` with no mask; None if NVML's and
    # CUDA's lists may differ
    cuda_index: int | None = None


Group = tuple[GpuInfo, ...]
"""The GPUs that an attempt has together, one for each rank; empty for the CPU."""


@dataclass(frozen=True)
class SkippedGpu:
    """A GPU that could not be read: its NVML index, its UUID if known, and why."""

    index: int
    reason: str
    uuid: str | None = None


@dataclass(frozen=True)
class Inventory:
    """All GPUs of the machine at one moment."""

    # those that answered, MIG slices in place of their parent, ordered by PCI address
    gpus: tuple[GpuInfo, ...] = ()
    skipped: tuple[SkippedGpu, ...] = ()  # those that did not, with reasons
    # a sentence if there is nothing to list (library missing, driver and library differ, no
    # GPUs), else None
    problem: str | None = None
    driver_version: str | None = None  # of the NVIDIA driver, None if unknown
    # the newest CUDA that the driver supports, None if unknown
    cuda_version: str | None = None
    # False if the driver hangs, so that nothing is known of the GPUs
    answered: bool = True
    # False without any driver, and where it lists no GPU
    may_have_gpus: bool = True

    def cuda_versions(self, torch_cuda: str | None) -> str:
        """Return which CUDA the driver supports and torch was built for, as far as known.

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

        A guess: a container may bring libraries with which an older driver does.
        """
        if torch_cuda is None or self.cuda_version is None or torch_cuda == "none":
            return torch_cuda != "none"
        # within a major version any driver will do
        return int(torch_cuda.split(".")[0]) <= int(self.cuda_version.split(".")[0])


def gpus_of(group: Group, rank: int | None) -> Group:
    """Return the GPU of ``rank``; all of them if the rank is unknown."""
    return group if rank is None else group[rank : rank + 1]


def device_name(gpus: Group) -> str:
    """Return ``cuda:0,cuda:1`` as ``nvidia-smi`` counts, ``cpu`` if there are none."""
    return ",".join(f"cuda:{gpu.index}" for gpu in gpus) or "cpu"
