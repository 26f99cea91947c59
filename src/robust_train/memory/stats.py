"""How much memory is in use, its peaks, and how well the caching allocator uses what it holds.

Imports no torch, and starts no CUDA: a question must not cost a context of hundreds of MiB.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import IO, Any

import psutil

from robust_train.compat import has_context
from robust_train.gpu.inventory import find_gpu, read_inventory
from robust_train.gpu.visible import visible_gpus
from robust_train.host import memory as host
from robust_train.memory import cuda
from robust_train.readable import MIB

log = logging.getLogger("robust_train")

_peaks_lock = threading.Lock()
_open_contexts: list[GPUMemoryContext] = []


@dataclass(frozen=True)
class MemoryStats:
    """Memory of this process on a device at a moment, in bytes.

    Attributes:
        device: ``cuda:0`` as this process counts, or ``cpu``: then the figures are the host's.
        allocated: bytes in tensors. On the host, the resident memory of the process.
        reserved: held by the caching allocator, used or not. On the host, equal to ``allocated``.
        peak: the most that was allocated since the start or the last reset.
        peak_reserved: the most that was reserved.
        free: free on the device for any process. On the host, the memory that a new program could
            get. None if unknown.
        total: size of the device, the host, or the cgroup if that has less.
        largest_free_block: the largest unused block of the caching allocator. None on the host.
        fragmentation: share of the unused reserved memory outside of that block, from 0 (a single
            block) to 1. None on the host.
        retries: times that the allocator had to return its cache to satisfy a request.
        oom_count: times that the allocator could not satisfy a request.
        note: the meaning of the figures if it is not obvious, else empty.
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
        text = _in_words(self.device, self.allocated, self.peak, self.reserved)
        if self.free is not None:
            text += f", {_mib(self.free)}{of} free"
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

    If this process has not started CUDA, the figures come from NVML, for the GPU that it would use.
    Without a usable GPU they are the host's. ``note`` says which. No CUDA context is created,
    because that would take hundreds of MiB.

    Args:
        device: number, ``cuda:1``, ``cpu`` or a torch.device. None: the GPU on which this process
            holds the most memory, or the current GPU if it holds none.

    Raises:
        ValueError: the device does not exist.
    """
    gpu = cuda.started_gpu(device)
    if gpu is not None:
        torch, index = gpu
        return _of_cuda(torch, index)
    ordinal = cuda.ordinal_of(device)
    if ordinal == cuda.HOST:
        return _of_host("")
    stats = _of_nvml(ordinal or 0)
    return stats if stats else _of_host("no CUDA in this process")


get_cuda_memory_info = get_gpu_memory_stats
"""The other name that people know `get_gpu_memory_stats` by."""


def print_cuda_memory_info(device: Any = None, *, file: IO[str] | None = None) -> None:
    """Print the figures of `get_gpu_memory_stats`, each on its own line, in MiB.

    Args:
        device: as in `get_gpu_memory_stats`.
        file: an open text file. None: standard output.
    """
    stats = get_gpu_memory_stats(device)
    note = f" ({stats.note})" if stats.note else ""
    print(f"{'device':<18}  {stats.device}{note}", file=file)
    for name, value in stats.as_dict().items():
        if isinstance(value, (int, float)):
            text = f"{value:.1%}" if name == "fragmentation" else _mib(value)
            text = str(value) if name in ("retries", "oom_count") else text
            print(f"{name.replace('_', ' '):<18}  {text}", file=file)


def log_gpu_memory_stats(prefix: str = "", device: Any = None) -> MemoryStats:
    """Log the figures of `get_gpu_memory_stats` in a line that starts with ``prefix``.

    Args:
        prefix: the start of the line, followed by a colon. Empty: none.
        device: as in `get_gpu_memory_stats`.

    Returns:
        The figures, in bytes.
    """
    stats = get_gpu_memory_stats(device)
    log.info("%s%s", f"{prefix}: " if prefix else "", stats.description)
    return stats


def reset_peak_memory_stats(device: Any = None) -> MemoryStats:
    """Reset the peaks to the memory in use now.

    Without CUDA, this resets the peak of this process's resident memory, if the kernel allows it.
    Blocks inside a `GPUMemoryContext` keep their peaks.

    Args:
        device: as in `get_gpu_memory_stats`.

    Returns:
        The figures after the reset, in bytes.
    """
    with _peaks_lock:
        was_reset = _reset_peak(device)
    stats = get_gpu_memory_stats(device)
    if not was_reset:
        log.warning("%s; the kernel does not let its peak be reset", stats.description)
    elif not stats.on_gpu:
        log.info("reset the peak: %s", stats.description)
    return stats


class GPUMemoryContext:
    """Measure the memory that a block of code uses::

        with GPUMemoryContext("forward") as memory:
            loss = model(x)
        print(memory.peak, memory.delta)

    Blocks may be nested. The figures exist even if the block raised. The device's own peak counter
    is reset when the block starts.

    Args:
        name: the block's name in the log. Without a name, nothing is logged.
        device: as in `get_gpu_memory_stats`.

    Attributes:
        device: ``cuda:0``, or ``cpu`` if the figures are the host's: resident memory.
        before: bytes in use when the block started.
        peak: the maximum within it.
        after: bytes in use when it ended.
        delta: ``after - before``.
    """

    def __init__(self, name: str = "", *, device: Any = None) -> None:
        self.name = name
        self.device = "cpu"
        self.before = self.peak = self.after = 0
        self._wanted = device
        self._earlier_peak = 0

    @property
    def delta(self) -> int:
        """Bytes that the block has left in use, negative if it has freed some."""
        return self.after - self.before

    @property
    def description(self) -> str:
        """The figures in a line for people."""
        what = "host memory (resident)" if self.device == "cpu" else self.device
        return (
            f"{what}: {_mib(self.before)} before, {_mib(self.peak)} at the peak, "
            f"{_mib(self.after)} after ({self.delta / MIB:+,.1f})"
        )

    def __enter__(self) -> GPUMemoryContext:
        with _peaks_lock:
            was_reset = _reset_peak(self._wanted)
            self.device, self.before, peak = _now_and_peak(self._wanted)
            self.peak = self.before
            # If the counter cannot be reset, only a peak above it is known to be the block's.
            self._earlier_peak = 0 if was_reset else peak
            _open_contexts.append(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        with _peaks_lock:
            _open_contexts.remove(self)
            # after a fault of the device it answers with the same error; the block's own counts
            with contextlib.suppress(RuntimeError) if error else contextlib.nullcontext():
                self._update()
        if self.name:
            log.info("%s: %s", self.name, self.description)

    def _update(self) -> None:
        device, now, peak = _now_and_peak(self._wanted)
        if device != self.device:
            # CUDA was started inside the block
            self.device = device
            self.before = 0
            self.peak = 0
            self._earlier_peak = 0
        self.after = now
        self.peak = max(self.peak, now, peak if peak > self._earlier_peak else 0)


def memory_in_use(*, context: bool = True) -> dict[str, int]:
    """Return the bytes in use for the journal: CUDA's if this process started it, else the
    process's. Never raises.

    Has ``allocated``, ``reserved`` and ``max_allocated`` of the GPU on which it holds the most, and
    the figures of `beside_cache`. Without CUDA, or after a device fault, when CUDA may refuse to
    answer, has ``resident`` and ``max_resident``.
    """
    torch = cuda.started_torch()
    if torch is not None:
        with contextlib.suppress(Exception):
            index = cuda.busiest_gpu(torch)
            figures = {
                "allocated": torch.cuda.memory_allocated(index),
                "reserved": torch.cuda.memory_reserved(index),
                "max_allocated": torch.cuda.max_memory_allocated(index),
            }
            with contextlib.suppress(Exception):
                figures |= beside_cache(torch, index) if context else {}
            return figures
    with contextlib.suppress(OSError, psutil.Error):
        return {
            "resident": host.resident_bytes(psutil.Process())[0],
            "max_resident": host.read_largest_resident(),
        }
    return {}


def describe_memory(figures: Mapping[str, int]) -> str:
    """Return the figures of `memory_in_use` as a line for people."""
    if "allocated" in figures:
        allocated = figures["allocated"]
        peak = figures["max_allocated"]
        return _in_words("GPU memory", allocated, peak, figures["reserved"])
    if figures:
        return _in_words("cpu", figures["resident"], figures["max_resident"])
    return "memory in use is unknown"


def beside_cache(torch: Any, index: int) -> dict[str, int]:
    """Return ``context_bytes``: what this process holds on a GPU outside torch's cache, by NVML.

    That is the CUDA context with its kernels and the memory of cuBLAS, cuDNN and NCCL. If NVML does
    not list the process (a container), ``context_at_most_bytes``: others' memory counts too.
    """
    uuid = cuda.gpu_uuid(torch, index)
    gpus = read_inventory(processes=True).gpus
    gpu = next((gpu for gpu in gpus if gpu.uuid == uuid), None)
    if gpu is None or gpu.unified_memory:
        return {}
    computing = [process for process in gpu.processes or () if process.computes]
    # In a container this process may have another number. Then it is known only if it is alone.
    candidates = [process for process in computing if process.pid == os.getpid()] or computing
    name = "context_at_most_bytes"
    used = gpu.used_bytes
    if len(candidates) == 1 and candidates[0].used_bytes is not None:
        name = "context_bytes"
        used = candidates[0].used_bytes
    beside = used - torch.cuda.memory_reserved(index)
    return {name: beside} if beside > 0 else {}


def _of_cuda(torch: Any, ordinal: int) -> MemoryStats:
    figures = torch.cuda.memory_stats(ordinal)
    free, total = _room(torch, ordinal)
    segments = cuda.memory_segments(torch)
    unused = (None, None) if segments is None else cuda.unused_blocks(segments, ordinal)
    return MemoryStats(
        device=f"cuda:{ordinal}",
        allocated=figures.get("allocated_bytes.all.current", 0),
        reserved=figures.get("reserved_bytes.all.current", 0),
        peak=figures.get("allocated_bytes.all.peak", 0),
        peak_reserved=figures.get("reserved_bytes.all.peak", 0),
        free=free,
        total=total,
        largest_free_block=unused[0],
        fragmentation=unused[1],
        retries=figures.get("num_alloc_retries", 0),
        oom_count=figures.get("num_ooms", 0),
    )


def _room(torch: Any, ordinal: int) -> tuple[int | None, int]:
    """Return the free bytes of a GPU, and its size, from NVML if this process has no context
    there."""
    if has_context(torch, ordinal):
        free, total = torch.cuda.mem_get_info(ordinal)
        return free, total
    gpu = find_gpu(cuda.gpu_uuid(torch, ordinal))
    total = torch.cuda.get_device_properties(ordinal).total_memory
    return None if gpu is None else gpu.free_bytes, total


def _of_nvml(ordinal: int) -> MemoryStats | None:
    """Return figures of the GPU that CUDA would call ``ordinal`` here, if it exists."""
    torch = sys.modules.get("torch")
    if getattr(getattr(torch, "version", None), "cuda", "") is None:
        return None
    gpus = visible_gpus(read_inventory(processes=False), os.environ).gpus
    for gpu in gpus[ordinal : ordinal + 1]:
        return MemoryStats(
            f"cuda:{ordinal}",
            free=gpu.free_bytes,
            total=gpu.total_bytes,
            note="this process has not started CUDA; "
            f"GPU {gpu.index} ({gpu.name}) as NVML reports it",
        )
    return None


def _of_host(note: str) -> MemoryStats:
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


def _reset_peak(device: Any) -> bool:
    """Reset the peak after the open blocks have read it."""
    for context in _open_contexts:
        context._update()
    gpu = cuda.started_gpu(device)
    if gpu is None:
        return host.reset_peak()
    torch, index = gpu
    torch.cuda.reset_peak_memory_stats(index)
    return True


def _now_and_peak(device: Any) -> tuple[str, int, int]:
    """Return the device, and its bytes in use now and at the peak."""
    gpu = cuda.started_gpu(device)
    if gpu is None:
        memory = host.read_own_memory()
        return "cpu", memory.get("VmRSS", 0), memory.get("VmHWM", 0)
    torch, index = gpu
    now = torch.cuda.memory_allocated(index)
    return f"cuda:{index}", now, torch.cuda.max_memory_allocated(index)


def _in_words(device: str, allocated: int, peak: int, reserved: int = 0) -> str:
    if device == "cpu":
        return f"host memory: {_mib(allocated)} resident (peak {_mib(peak)})"
    return f"{device}: {_mib(allocated)} in tensors (peak {_mib(peak)}), {_mib(reserved)} reserved"


def _mib(size: float) -> str:
    return f"{size / MIB:,.1f} MiB"
