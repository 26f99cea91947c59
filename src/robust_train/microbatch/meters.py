"""How much memory a pass takes, and how much there is. All in bytes.

``begin`` releases what nobody uses, lets the peak start anew and returns what is in use; ``peak``
is the most in use since then, ``limit`` the most that could be.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from robust_train.memory import host
from robust_train.memory.cleanup import return_memory


class GpuMeter:
    """What the caching allocator of this process holds in tensors."""

    def __init__(self, index: int, share: float) -> None:
        self._index = index
        self._share = share

    def begin(self) -> int:
        return_memory(thorough=False)
        torch.cuda.synchronize(self._index)
        torch.cuda.reset_peak_memory_stats(self._index)
        return torch.cuda.memory_allocated(self._index)

    def peak(self) -> int:
        torch.cuda.synchronize(self._index)
        return torch.cuda.max_memory_allocated(self._index)

    def limit(self) -> int:
        free, total = torch.cuda.mem_get_info(self._index)
        # the allocator's limit by memory.fraction; torch before 2.8 does not say
        known = getattr(torch.cuda, "get_per_process_memory_fraction", lambda index: 1.0)
        share = min(self._share, known(self._index))
        return min(int(share * total), free + torch.cuda.memory_reserved(self._index))


class HostMeter:
    """This process's anonymous memory: without the files that are mapped into it. Where the kernel
    does not let the peak be reset it is that of all that went before: too much at worst, since
    larger sizes are tried after smaller ones."""

    def begin(self) -> int:
        return_memory(thorough=False)
        host.reset_peak()
        return host.own_memory().get("RssAnon", 0)

    def peak(self) -> int:
        own = host.own_memory()
        # pages of libraries that were read meanwhile stay, so they are in the peak as well
        return own.get("VmHWM", 0) - own.get("RssFile", 0) - own.get("RssShmem", 0)

    def limit(self) -> int:
        return host.own_memory().get("RssAnon", 0) + host.room_left()


Meter = GpuMeter | HostMeter


def meter_of(device: torch.device, share: float) -> Meter:
    """Return what measures memory there."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return GpuMeter(index, share)
    return HostMeter()


def device_of(parameters: Iterable[torch.Tensor]) -> torch.device:
    """Return the GPU that the parameters are on, or the first of their devices. Without any: the
    current GPU where this process has started CUDA, else the CPU."""
    found = list(dict.fromkeys(parameter.device for parameter in parameters))
    is_on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    found.append(torch.device("cuda" if is_on_gpu else "cpu"))
    return next((device for device in found if device.type == "cuda"), found[0])
