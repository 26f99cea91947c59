"""Sets up and limits CUDA's caching allocator, or limits the host memory of this process.

Users call `set_memory_fraction` and `enable_memory_efficient_settings`, which may start CUDA. An
attempt calls `limit_when_cuda_starts` for the key ``memory.fraction``, in the process that trains.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
from dataclasses import dataclass
from typing import Any

from robust_train.compat import set_allocator_settings, when_cuda_starts
from robust_train.config.schema import MemoryConfig
from robust_train.host.allocator import (
    VARIABLE,
    allocator_settings,
    exported_expandable_segments,
    exported_fraction,
    is_wsl,
)
from robust_train.host.memory import read_host_memory
from robust_train.memory.cuda import HOST, gpu_number, ordinal_of
from robust_train.readable import GIB, MIB, first_line

log = logging.getLogger("robust_train")

# If GPU and host share their memory, the host keeps at least this much.
_HOST_KEEPS_BYTES = 8 * GIB


# --- settings ---


def enable_memory_efficient_settings(
    *, fraction: float | None = 0.95, tf32: bool = True
) -> tuple[str, ...]:
    """Set up CUDA's allocator and arithmetic for a GPU with little memory.

    Turns on expandable segments for child processes, through an environment variable, and for this
    process if it has CUDA. A setting that the variable already has stays, and WSL does not support
    expandable segments. Existing segments do not change, so call this before CUDA is used.

    Args:
        fraction: as in `set_memory_fraction`. None: no limit is set.
        tf32: let float32 matrix products use TensorFloat32 if the GPU supports it (Ampere and
            later), as convolutions do by default. It is faster, has a mantissa of 10 bits, and
            saves no memory.

    Returns:
        Sentences that describe the changes.
    """
    exported = exported_expandable_segments(os.environ)
    settings = allocator_settings(os.environ, expandable_segments=True)
    is_possible = exported is None and not is_wsl()
    if is_possible:
        os.environ[VARIABLE] = settings
        done = [f"{VARIABLE}={settings} for programs started from here"]
    elif exported is None:
        done = ["no expandable segments: WSL's driver lacks them"]
    else:
        done = [f"{VARIABLE} has expandable_segments:{exported} already, which stays"]
    torch = _usable_torch()
    if torch is None:
        done.append("no CUDA in this process: nothing else to set")
    else:
        if is_possible:
            done.append(apply_to_allocator(torch, settings))
        if fraction is not None:
            done.append(set_memory_fraction(fraction).description)
        if tf32:
            # This setting has no effect on a GPU that does not support the format.
            torch.set_float32_matmul_precision("high")
            done.append("TensorFloat32 for float32 matrix products if the GPU has it")
    for sentence in done:
        log.info("%s", sentence)
    return tuple(done)


def apply_to_allocator(torch: Any, settings: str) -> str:
    """Apply settings to the allocator of this process, and return a sentence with the result."""
    try:
        set_allocator_settings(torch, settings)
    except (RuntimeError, ValueError) as error:
        return f"torch refuses {settings}: {first_line(error)}"
    return f"the allocator of this process: {settings}"


def _usable_torch() -> Any:
    """Return the module torch if it is imported and has a GPU to use, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None


# --- limits ---


@dataclass(frozen=True)
class MemoryLimit:
    """A memory limit of this process.

    Attributes:
        device: ``cuda:0`` or ``cpu``.
        fraction: the limit as a share of ``total``.
        bytes: the maximum that the caching allocator may reserve. On the host, the maximum of
            writable private memory.
        total: size of the device, or of the host or its cgroup, whichever is smaller.
        in_use: the bytes that count towards the limit now.
    """

    device: str
    fraction: float
    bytes: int
    total: int
    in_use: int

    @property
    def description(self) -> str:
        """The limit in a line for people."""
        memory = self.device
        if self.device == "cpu":
            memory = "no CUDA in this process; host memory (RLIMIT_DATA)"
        text = (
            f"{memory}: at most {self.bytes / MIB:,.0f} of {self.total / MIB:,.0f} MiB "
            f"({self.fraction:g}), {self.in_use / MIB:,.0f} MiB in use"
        )
        if self.in_use > self.bytes:
            text += "; that is more than the limit, so the next larger request will fail"
        return text


def set_memory_fraction(fraction: float = 0.8, device: Any = None) -> MemoryLimit:
    """Limit this process to a share of the device's memory.

    On a GPU this limits torch's caching allocator, as if the GPU were smaller. CUDA contexts and
    NCCL's memory do not count. The call starts CUDA. Without CUDA, it limits the writable private
    memory of this process to a share of the host's memory (RLIMIT_DATA, see setrlimit(2)), and a
    larger request raises MemoryError. Each child process inherits a limit of the same size.

    Args:
        fraction: a number above 0 and up to 1. 1 removes the limit, except for the limit in
            PYTORCH_CUDA_ALLOC_CONF (``per_process_memory_fraction``).
        device: as in `get_gpu_memory_stats`.

    Returns:
        The limit, in bytes.

    Raises:
        ValueError: the fraction or device is invalid, or the process already uses more host memory
            and would fail at once.
    """
    is_number = isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
    if not (is_number and 0 < fraction <= 1):
        raise ValueError(f"fraction={fraction!r}: accepted is a number over 0, up to 1")
    ordinal = ordinal_of(device)
    torch = _usable_torch()
    if ordinal == HOST or torch is None:
        limit = _limit_host(float(fraction))
    else:
        index = gpu_number(torch, ordinal)
        fraction = _limit_cache(torch, fraction, index)
        total = torch.cuda.get_device_properties(index).total_memory
        in_use = torch.cuda.memory_reserved(index)
        limit = MemoryLimit(f"cuda:{index}", fraction, int(fraction * total), total, in_use)
    log.info("%s", limit.description)
    return limit


def _limit_cache(torch: Any, fraction: float, index: int) -> float:
    """Limit the allocator on a GPU to a share of its memory, and return that share.

    It is smaller than ``fraction`` if the user exported a smaller limit.
    """
    limit = min(float(fraction), exported_fraction(os.environ))
    # The call makes the GPU torch's current device, and the context restores the previous device.
    with torch.cuda.device(index):
        torch.cuda.set_per_process_memory_fraction(limit, index)
    return limit


def _limit_host(fraction: float) -> MemoryLimit:
    """Limit the writable private memory of this process to a share of the host's memory."""
    memory = read_host_memory()
    most = int(fraction * memory.total)
    if memory.data >= most:
        raise ValueError(
            f"fraction={fraction:g}: that is {most / MIB:,.0f} MiB of host memory, and this "
            f"process has {memory.data / MIB:,.0f} already"
        )
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = hard if fraction == 1 else most
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    return MemoryLimit("cpu", fraction, most, memory.total, memory.data)


def limit_when_cuda_starts(fraction: float, index: int | None) -> bool:
    """Limit this process's caching allocator to a share of a GPU's memory once torch starts CUDA.

    A refusal by torch is logged.

    Args:
        fraction: the share, from 0 to 1.
        index: the number of the GPU. None: the CPU, which has no limit.

    Returns:
        False if torch is not imported yet. The caller then has to call again later.
    """
    if index is None:
        if fraction != MemoryConfig.fraction:
            log.info("memory.fraction=%g: has no effect on the CPU", fraction)
        return True
    torch = sys.modules.get("torch")
    if torch is None:
        return False

    def limit() -> None:
        try:
            share = _share_that_host_can_spare(torch, fraction, index)
            _limit_cache(torch, share, index)
        except (RuntimeError, ValueError) as error:
            log.warning("memory.fraction=%g: %s", fraction, first_line(error))

    when_cuda_starts(torch, limit)
    return True


def _share_that_host_can_spare(torch: Any, fraction: float, index: int) -> float:
    """Return the share of a GPU that may be used without taking memory from the host.

    If it is less than ``fraction``, the reason is logged.
    """
    if fraction == 1:
        return fraction
    properties = torch.cuda.get_device_properties(index)
    total = properties.total_memory
    if getattr(properties, "is_integrated", False):
        free = read_host_memory().available
        share = share_of_unified_memory(fraction, total, free)
        reason = "it shares the host's memory"
    elif is_wsl():
        free, _ = torch.cuda.mem_get_info(index)
        share = fraction * min(free / total, 1.0)
        reason = "under WSL more would spill into the host's memory, which is many times slower"
    else:
        return fraction
    if share < fraction:
        log.info(
            "memory.fraction=%g: GPU %d is limited to %.2f of its memory, of which %.0f MiB are "
            "free: %s",
            fraction,
            index,
            share,
            free / MIB,
            reason,
        )
    return share


def share_of_unified_memory(fraction: float, total: int, available: int) -> float:
    """Return the share of unified memory that a GPU may use without starving the host.

    If the GPU takes more, CUDA raises no error: the kernel kills processes, or the machine freezes.

    Args:
        fraction: the share that the user wants.
        total: size of the memory, in bytes.
        available: bytes that are available now.
    """
    kept_for_host = min(_HOST_KEEPS_BYTES, total // 4)
    largest = max(available - kept_for_host, total // 16)
    return min(fraction, largest / total)
