"""Reads how much memory this process uses, and how full the device is.

Users call these functions, the command ``memory`` does, and so does the process that trains. The
module neither imports torch nor starts CUDA, whose context would take hundreds of MiB. Without
CUDA, the figures come from NVML or from the host.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import asdict, dataclass
from typing import IO, Any

from robust_train.compat import has_context
from robust_train.gpu.inventory import find_gpu, read_inventory
from robust_train.gpu.visible import visible_gpus
from robust_train.host import memory as host
from robust_train.memory import cuda
from robust_train.readable import MIB

log = logging.getLogger("robust_train")


@dataclass(frozen=True)
class MemoryStats:
    """Memory of this process on a device, in bytes.

    Attributes:
        device: ``cuda:0``, as this process numbers the GPUs, or ``cpu`` for figures of the host.
        allocated: memory in tensors. On the host, the resident memory of the process.
        reserved: memory that the caching allocator holds, used or not. On the host, the same as
            ``allocated``.
        peak: maximum of ``allocated`` since the start or the latest reset.
        peak_reserved: maximum of ``reserved``.
        free: memory that is free on the device for any process. On the host, the memory that a new
            program could get. None if unknown.
        total: size of the device, or of the host or its cgroup, whichever is smaller.
        largest_free_block: the largest unused block of the caching allocator. None on the host.
        fragmentation: share of the unused reserved memory outside of that block, from 0 (a single
            block) to 1. None on the host.
        retries: number of requests for which the allocator had to return its cache.
        oom_count: number of requests that the allocator could not satisfy.
        note: explains the figures if they do not come from CUDA, else empty.
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
        text = describe_figures(self.device, self.allocated, self.peak, self.reserved)
        if self.free is not None:
            of_total = "" if self.total is None else f" of {show_mib(self.total)}"
            text += f", {show_mib(self.free)}{of_total} free"
        if self.fragmentation is not None and self.largest_free_block is not None:
            text += (
                f"; largest unused block {show_mib(self.largest_free_block)}, "
                f"fragmentation {self.fragmentation:.0%}, {self.retries} retries, "
                f"{self.oom_count} out of memory"
            )
        if self.note:
            return f"{self.note}; {text}"
        return text

    def as_dict(self) -> dict[str, str | int | float | None]:
        """Return the figures in JSON's types."""
        return asdict(self)


def get_gpu_memory_stats(device: Any = None) -> MemoryStats:
    """Return the memory that this process uses on ``device``, and how full the device is.

    If this process has not started CUDA, the figures come from NVML, for the GPU that the process
    would use. Without a usable GPU they describe the host. ``note`` says so. No CUDA context is
    created, because that would take hundreds of MiB.

    Args:
        device: number, ``cuda:1``, ``cpu`` or a torch.device. None: the GPU on which this process
            holds the most memory, or the current GPU if it holds none.

    Raises:
        ValueError: the device does not exist.
    """
    gpu = cuda.started_gpu(device)
    if gpu is not None:
        torch, index = gpu
        return _read_cuda(torch, index)
    ordinal = cuda.ordinal_of(device)
    if ordinal == cuda.HOST:
        return _read_host("")
    stats = _read_nvml(ordinal or 0)
    return stats if stats else _read_host("no CUDA in this process")


get_cuda_memory_info = get_gpu_memory_stats
"""An alias of `get_gpu_memory_stats`, under a name that is widely used."""


def print_cuda_memory_info(device: Any = None, *, file: IO[str] | None = None) -> None:
    """Print the figures of `get_gpu_memory_stats`, each on its own line, with sizes in MiB.

    Args:
        device: as in `get_gpu_memory_stats`.
        file: an open text file. None: standard output.
    """
    stats = get_gpu_memory_stats(device)
    note = f" ({stats.note})" if stats.note else ""
    print(f"{'device':<18}  {stats.device}{note}", file=file)
    for name, value in stats.as_dict().items():
        if not isinstance(value, (int, float)):
            continue
        if name == "fragmentation":
            text = f"{value:.1%}"
        elif name in ("retries", "oom_count"):
            text = str(value)
        else:
            text = show_mib(value)
        label = name.replace("_", " ")
        print(f"{label:<18}  {text}", file=file)


def log_gpu_memory_stats(prefix: str = "", device: Any = None) -> MemoryStats:
    """Log the figures of `get_gpu_memory_stats` in a line that starts with ``prefix``.

    Args:
        prefix: the start of the line, to which a colon is added. Empty: no prefix.
        device: as in `get_gpu_memory_stats`.

    Returns:
        The figures, in bytes.
    """
    stats = get_gpu_memory_stats(device)
    text = stats.description
    if prefix:
        text = f"{prefix}: {text}"
    log.info("%s", text)
    return stats


def _read_cuda(torch: Any, ordinal: int) -> MemoryStats:
    figures = torch.cuda.memory_stats(ordinal)
    free, total = _read_free_and_total(torch, ordinal)
    largest_free_block = None
    fragmentation = None
    segments = cuda.memory_segments(torch)
    if segments is not None:
        largest_free_block, fragmentation = cuda.unused_blocks(segments, ordinal)
    return MemoryStats(
        device=f"cuda:{ordinal}",
        allocated=figures.get("allocated_bytes.all.current", 0),
        reserved=figures.get("reserved_bytes.all.current", 0),
        peak=figures.get("allocated_bytes.all.peak", 0),
        peak_reserved=figures.get("reserved_bytes.all.peak", 0),
        free=free,
        total=total,
        largest_free_block=largest_free_block,
        fragmentation=fragmentation,
        retries=figures.get("num_alloc_retries", 0),
        oom_count=figures.get("num_ooms", 0),
    )


def _read_free_and_total(torch: Any, ordinal: int) -> tuple[int | None, int]:
    """Return the free bytes of a GPU, and its size."""
    if has_context(torch, ordinal):
        free, total = torch.cuda.mem_get_info(ordinal)
        return free, total
    # torch.cuda.mem_get_info would create a context, so NVML gives the free memory.
    gpu = find_gpu(cuda.gpu_uuid(torch, ordinal))
    total = torch.cuda.get_device_properties(ordinal).total_memory
    return None if gpu is None else gpu.free_bytes, total


def _read_nvml(ordinal: int) -> MemoryStats | None:
    """Return the figures of the GPU with this number in CUDA, or None if no such GPU exists."""
    torch = sys.modules.get("torch")
    # A torch that was built without CUDA cannot use any GPU. Its torch.version.cuda is None.
    if getattr(getattr(torch, "version", None), "cuda", "") is None:
        return None
    gpus = visible_gpus(read_inventory(processes=False), os.environ).gpus
    if ordinal >= len(gpus):
        return None
    gpu = gpus[ordinal]
    source = f"GPU {gpu.index} ({gpu.name}) as NVML reports it"
    return MemoryStats(
        f"cuda:{ordinal}",
        free=gpu.free_bytes,
        total=gpu.total_bytes,
        note=f"this process has not started CUDA; {source}",
    )


def _read_host(note: str) -> MemoryStats:
    figures = host.read_host_memory()
    return MemoryStats(
        device="cpu",
        allocated=figures.resident,
        reserved=figures.resident,
        peak=figures.peak,
        peak_reserved=figures.peak,
        free=figures.available,
        total=figures.total,
        note=note,
    )


def describe_figures(device: str, allocated: int, peak: int, reserved: int = 0) -> str:
    """Describe figures that are in bytes. For the device ``cpu``, they are the process's."""
    if device == "cpu":
        return f"host memory: {show_mib(allocated)} resident (peak {show_mib(peak)})"
    in_tensors = f"{show_mib(allocated)} in tensors (peak {show_mib(peak)})"
    return f"{device}: {in_tensors}, {show_mib(reserved)} reserved"


def show_mib(size: float) -> str:
    """Return a size in bytes as text in MiB, with a comma between thousands."""
    return f"{size / MIB:,.1f} MiB"
