"""The most that was in use: reset the counter, and measure the peak of one block of code."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

from robust_train.memory import host
from robust_train.memory.cuda import started_gpu
from robust_train.memory.stats import MemoryStats, get_gpu_memory_stats
from robust_train.readable import mib
from robust_train.values import MIB

log = logging.getLogger("robust_train")

_lock = threading.Lock()
_open_contexts: list[GPUMemoryContext] = []


def reset_peak_memory_stats(device: Any = None) -> MemoryStats:
    """Let the peaks start anew from what is in use now; return the figures after that.

    Without CUDA it is the peak of this process's resident memory, where the kernel allows that.
    Blocks that a :class:`GPUMemoryContext` watches at the moment keep their peaks.
    """
    with _lock:
        was_reset = _reset(device)
    stats = get_gpu_memory_stats(device)
    if not was_reset:
        log.warning("%s; the kernel does not let its peak be reset", stats.description)
    elif not stats.on_gpu:
        log.info("reset the peak: %s", stats.description)
    return stats


class GPUMemoryContext:
    """Measure what a block of code does to memory::

        with GPUMemoryContext("forward") as memory:
            loss = model(x)
        print(memory.peak, memory.delta)

    Blocks may be nested. The figures are there also when the block raised. The device's own peak
    counter starts anew at the block's beginning.

    Args:
        name: what to call the block in the log; no log line without one.
        device: as in :func:`robust_train.memory.get_gpu_memory_stats`.

    Attributes:
        device: ``cuda:0``, or ``cpu`` where the figures are the host's: resident memory.
        before: bytes in use when the block began.
        peak: the most within it.
        after: when it had ended.
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
        """Bytes that the block has left in use, negative where it has freed some."""
        return self.after - self.before

    @property
    def description(self) -> str:
        """The figures in a line for people."""
        what = "host memory (resident)" if self.device == "cpu" else self.device
        return (
            f"{what}: {mib(self.before, 1)} before, {self.peak / MIB:.1f} at the peak, "
            f"{self.after / MIB:.1f} after ({self.delta / MIB:+.1f})"
        )

    def __enter__(self) -> GPUMemoryContext:
        with _lock:
            was_reset = _reset(self._wanted)
            self.device, self.before, peak = _figures(self._wanted)
            self.peak = self.before
            # where the counter cannot be reset, only what goes beyond it is known to be the block's
            self._earlier_peak = 0 if was_reset else peak
            _open_contexts.append(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        with _lock:
            _open_contexts.remove(self)
            # after a fault of the device it answers with the same error; the block's own counts
            with contextlib.suppress(RuntimeError) if error else contextlib.nullcontext():
                self._update()
        if self.name:
            log.info("%s: %s", self.name, self.description)

    def _update(self) -> None:
        device, now, peak = _figures(self._wanted)
        if device != self.device:
            # CUDA was started inside of the block
            self.device, self.before, self.peak, self._earlier_peak = device, 0, 0, 0
        self.after = now
        self.peak = max(self.peak, now, peak if peak > self._earlier_peak else 0)


def _reset(device: Any) -> bool:
    """Reset the peak after the open blocks have read it."""
    for context in _open_contexts:
        context._update()
    gpu = started_gpu(device)
    if gpu is None:
        return host.reset_peak()
    torch, index = gpu
    torch.cuda.reset_peak_memory_stats(index)
    return True


def _figures(device: Any) -> tuple[str, int, int]:
    """Return the device, and its bytes in use now and at the peak."""
    gpu = started_gpu(device)
    if gpu is None:
        own = host.own_memory()
        return "cpu", own["VmRSS"], own["VmHWM"]
    torch, index = gpu
    cuda = torch.cuda
    return f"cuda:{index}", cuda.memory_allocated(index), cuda.max_memory_allocated(index)
