"""Measures peaks of memory: within a block of code, or since a reset.

Users call these functions in their own process, and a live attempt resets its peaks on request.
Without CUDA, the peak is that of the resident memory of this process.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from robust_train.host import memory as host
from robust_train.memory import cuda
from robust_train.memory.stats import MemoryStats, get_gpu_memory_stats, show_mib
from robust_train.readable import MIB

log = logging.getLogger("robust_train")

# The device has a single peak counter. A reset must not lose the peaks of open blocks, so they read
# the counter before it.
_peaks_lock = threading.Lock()
_open_contexts: list[GPUMemoryContext] = []


def reset_peak_memory_stats(device: Any = None) -> MemoryStats:
    """Reset the peaks to the memory in use now.

    Without CUDA, this resets the peak of this process's resident memory, if the kernel allows it.
    An open `GPUMemoryContext` keeps its peak.

    Args:
        device: as in `get_gpu_memory_stats`.

    Returns:
        The figures after the reset, in bytes.
    """
    with _peaks_lock:
        was_reset = _reset_peak(device)
    stats = get_gpu_memory_stats(device)
    if not was_reset:
        log.warning("%s; the kernel does not allow a reset of the peak", stats.description)
    elif not stats.on_gpu:
        log.info("reset the peak: %s", stats.description)
    return stats


class GPUMemoryContext:
    """Measure the memory that a block of code uses::

        with GPUMemoryContext("forward") as memory:
            loss = model(x)
        print(memory.peak, memory.delta)

    Blocks may be nested. The figures are set even if the block raises. The device's own peak
    counter is reset when the block starts.

    Args:
        name: the block's name in the log. Without a name, nothing is logged.
        device: as in `get_gpu_memory_stats`.

    Attributes:
        device: ``cuda:0``, or ``cpu`` if the figures are the host's: resident memory.
        before: bytes in use when the block started.
        peak: maximum number of bytes in use within the block.
        after: bytes in use when the block ended.
        delta: ``after - before``.
    """

    def __init__(self, name: str = "", *, device: Any = None) -> None:
        self.name = name
        self.device = "cpu"
        self.before = 0
        self.peak = 0
        self.after = 0
        self._requested_device = device
        self._earlier_peak = 0  # a peak of the counter that is from before the block

    @property
    def delta(self) -> int:
        """Change in the bytes in use over the block. It is negative if the block freed memory."""
        return self.after - self.before

    @property
    def description(self) -> str:
        """The figures in a line for people."""
        memory = "host memory (resident)" if self.device == "cpu" else self.device
        return (
            f"{memory}: {show_mib(self.before)} before, {show_mib(self.peak)} at the peak, "
            f"{show_mib(self.after)} after ({self.delta / MIB:+,.1f})"
        )

    def __enter__(self) -> GPUMemoryContext:
        with _peaks_lock:
            was_reset = _reset_peak(self._requested_device)
            self.device, self.before, peak = _now_and_peak(self._requested_device)
            self.peak = self.before
            # If the counter cannot be reset, only a higher peak is certain to be the block's.
            self._earlier_peak = 0 if was_reset else peak
            _open_contexts.append(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        with _peaks_lock:
            _open_contexts.remove(self)
            try:
                self._update()
            except RuntimeError:
                # After a device fault, CUDA repeats its error, which must not hide the block's own.
                if error is None:
                    raise
        if self.name:
            log.info("%s: %s", self.name, self.description)

    def _update(self) -> None:
        device, now, peak = _now_and_peak(self._requested_device)
        if device != self.device:
            # CUDA was started within the block, so nothing was in use on the GPU before it.
            self.device = device
            self.before = 0
            self.peak = 0
            self._earlier_peak = 0
        self.after = now
        self.peak = max(self.peak, now)
        if peak > self._earlier_peak:
            self.peak = max(self.peak, peak)


def _reset_peak(device: Any) -> bool:
    """Reset the peak after the open blocks have read it. Return False if the kernel refuses."""
    for context in _open_contexts:
        context._update()
    gpu = cuda.started_gpu(device)
    if gpu is None:
        return host.reset_peak()
    torch, index = gpu
    torch.cuda.reset_peak_memory_stats(index)
    return True


def _now_and_peak(device: Any) -> tuple[str, int, int]:
    """Return the device, its bytes in use now, and those at the peak."""
    gpu = cuda.started_gpu(device)
    if gpu is None:
        memory = host.read_own_memory()
        return "cpu", memory.get("VmRSS", 0), memory.get("VmHWM", 0)
    torch, index = gpu
    now = torch.cuda.memory_allocated(index)
    return f"cuda:{index}", now, torch.cuda.max_memory_allocated(index)
