"""How much memory is in use, and how well the caching allocator uses what it holds.

Imports no torch, and starts no CUDA: a question must not cost a context of hundreds of MiB.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import asdict, dataclass
from typing import IO, Any

from robust_train.compat import has_context
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.visible import visible_gpus
from robust_train.memory import cuda
from robust_train.memory.host import read_host_memory
from robust_train.values import MIB

log = logging.getLogger("robust_train")


@dataclass(frozen=True)
class MemoryStats:
    """Memory of this process on one device at one moment, in bytes.

    Attributes:
        device: ``cuda:0`` as this process counts, or ``cpu``: then the figures are the host's.
        allocated: held by tensors; on the host what of the process is in RAM.
        reserved: held by the caching allocator, used or not; on the host as ``allocated``.
        peak: the most that was allocated since the start or the last reset.
        peak_reserved: the same of ``reserved``.
        free: free on the device, for everybody; on the host what a new program could get. None if
            unknown.
        total: size of the device; of the host, or of the cgroup where that has less.
        largest_free_block: that the caching allocator holds unused; None on the host.
        fragmentation: share of the unused reserved memory outside of that block, 0 (one block) to
            1; None on the host.
        retries: times that the allocator had to return its cache to satisfy a request.
        oom_count: times that it could not satisfy one.
        note: what the figures are about, where that is not plain; else empty.
    """

    device: str
    allocated: int = 0
    reserved: int = 0
    peak: int = 0
    peak_reserved: int = 0
    free: int | None = None
    total: int | None = None
    largest_free_block: int | None = None
    fragmentation: float | None = None
    retries: int | None = None
    oom_count: int | None = None
    note: str = ""

    @property
    def on_gpu(self) -> bool:
        """Whether the figures are a GPU's."""
        return self.device != "cpu"

    @property
    def description(self) -> str:
        """The figures in a line for people."""
        of = "" if self.total is None else f" of {_mib(self.total)}"
        room = "" if self.free is None else f", {_mib(self.free)}{of} free"
        if not self.on_gpu:
            text = f"host memory: {_mib(self.allocated)} resident (peak {_mib(self.peak)}){room}"
        else:
            text = (
                f"{self.device}: {_mib(self.allocated)} in tensors (peak {_mib(self.peak)}), "
                f"{_mib(self.reserved)} reserved{room}"
            )
        if self.fragmentation is not None and self.largest_free_block is not None:
            text += (
                f"; largest unused block {_mib(self.largest_free_block)}, "
                f"fragmentation {self.fragmentation:.0%}, {self.retries} retries, "
                f"{self.oom_count} out of memory"
            )
        return f"{self.note}; {text}" if self.note else text

    def as_dict(self) -> dict[str, str | int | float | None]:
        """Return the figures in JSON's types."""
        return asdict(self)


def get_gpu_memory_stats(device: Any = None) -> MemoryStats:
    """Return the memory of this process on ``device``, and how full the device is.

    Where this process has not started CUDA, the figures are NVML's, of the GPU that would be used;
    where there is no GPU for it either, the host's; ``note`` has which. No CUDA context is made:
    that would take hundreds of MiB.

    Args:
        device: number, ``cuda:1``, ``cpu`` or a torch.device; None for the GPU where this process
            holds most, the current one where it holds nothing.

    Raises:
        ValueError: there is no such device.
    """
    gpu = cuda.started_gpu(device)
    if gpu is not None:
        return _of_cuda(*gpu)
    ordinal = cuda.ordinal_of(device)
    if ordinal == cuda.HOST:
        return _of_host("")
    return _of_nvml(ordinal or 0) or _of_host("no CUDA in this process")


get_cuda_memory_info = get_gpu_memory_stats
"""The other name that people know :func:`get_gpu_memory_stats` by."""


def print_cuda_memory_info(device: Any = None, *, file: IO[str] | None = None) -> None:
    """Print the figures of :func:`get_gpu_memory_stats`, one a line, in MiB."""
    stats = get_gpu_memory_stats(device)
    lines = [("device", stats.device + (f" ({stats.note})" if stats.note else ""))]
    for name, value in stats.as_dict().items():
        if isinstance(value, str) or value is None:
            continue
        shown = _mib(value)
        if name in ("retries", "oom_count"):
            shown = str(value)
        elif name == "fragmentation":
            shown = f"{value:.1%}"
        lines.append((name.replace("_", " "), shown))
    width = max(len(label) for label, _ in lines)
    for label, text in lines:
        print(f"{label:<{width}}  {text}", file=file)


def log_gpu_memory_stats(prefix: str = "", device: Any = None) -> MemoryStats:
    """Log :func:`get_gpu_memory_stats` in one line that begins with ``prefix``; returns them."""
    stats = get_gpu_memory_stats(device)
    log.info("%s%s", f"{prefix}: " if prefix else "", stats.description)
    return stats


def _of_cuda(torch: Any, ordinal: int) -> MemoryStats:
    figures = torch.cuda.memory_stats(ordinal)
    free, total = _room(torch, ordinal)
    segments = cuda.memory_segments(torch)
    largest, unused = (None, None) if segments is None else cuda.unused_blocks(segments, ordinal)
    return MemoryStats(
        device=f"cuda:{ordinal}",
        allocated=figures.get("allocated_bytes.all.current", 0),
        reserved=figures.get("reserved_bytes.all.current", 0),
        peak=figures.get("allocated_bytes.all.peak", 0),
        peak_reserved=figures.get("reserved_bytes.all.peak", 0),
        free=free,
        total=total,
        largest_free_block=largest,
        fragmentation=None if largest is None or unused is None else fragmentation(largest, unused),
        retries=figures.get("num_alloc_retries", 0),
        oom_count=figures.get("num_ooms", 0),
    )


def fragmentation(largest: int, unused: int) -> float:
    """Return the share of ``unused`` bytes outside of the ``largest`` block; 0 without any."""
    return 1 - largest / unused if unused else 0.0


def _room(torch: Any, ordinal: int) -> tuple[int | None, int]:
    """Return bytes free on a GPU, and its size; by NVML where this process has no context there."""
    if has_context(torch, ordinal):
        free, total = torch.cuda.mem_get_info(ordinal)
        return free, total
    about = torch.cuda.get_device_properties(ordinal)
    found = [g for g in read_inventory(processes=False).gpus if g.uuid == f"GPU-{about.uuid}"]
    return found[0].free_bytes if found else None, about.total_memory


def _of_nvml(ordinal: int) -> MemoryStats | None:
    """Return figures of the GPU that CUDA would call ``ordinal`` here, if there is one."""
    torch = sys.modules.get("torch")
    if torch is not None and getattr(getattr(torch, "version", None), "cuda", "") is None:
        return None
    gpus = visible_gpus(read_inventory(processes=False), os.environ).gpus
    if ordinal >= len(gpus):
        return None
    gpu = gpus[ordinal]
    note = f"this process has not started CUDA; GPU {gpu.index} ({gpu.name}) as NVML reports it"
    return MemoryStats(f"cuda:{ordinal}", free=gpu.free_bytes, total=gpu.total_bytes, note=note)


def _of_host(note: str) -> MemoryStats:
    host = read_host_memory()
    return MemoryStats(
        device="cpu",
        allocated=host.resident,
        reserved=host.resident,
        peak=host.peak,
        peak_reserved=host.peak,
        free=host.available,
        total=host.total,
        note=note,
    )


def _mib(size: float) -> str:
    return f"{size / MIB:,.1f} MiB"
