"""CUDA's caching allocator in this process: its devices, figures, settings and limits.

Nothing here starts CUDA, but for the functions that set a limit at a user's request.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import sys
from collections.abc import Iterable
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
from robust_train.readable import GIB, MIB, first_line

log = logging.getLogger("robust_train")

_COMMON_POOL = (0, 0)  # the segment pool that all share; a CUDA graph has its own

_HOST_KEEPS_BYTES = 8 * GIB

HOST = -1  # The host's memory, among the numbers of `ordinal_of`


# --- devices ---


def started_torch() -> Any:
    """Return the module torch if it has started CUDA in this process, else None."""
    torch = sys.modules.get("torch")
    # another thread may be importing it at this moment
    is_initialized = getattr(getattr(torch, "cuda", None), "is_initialized", None)
    return torch if is_initialized is not None and is_initialized() else None


def device_index(device: str) -> int | None:
    """Return the number in ``cuda:1`` (``cuda`` is 0), None if it names another device."""
    kind, _, number = device.partition(":")
    return int(number or 0) if kind == "cuda" else None


def ordinal_of(device: Any) -> int | None:
    """Return CUDA's number of ``device``, `HOST` for the CPU, None if it has no number.
    Raises ValueError: it names no device."""
    if isinstance(device, int) and device >= 0:
        return device
    names = r"None|(?P<host>cpu)(:0)?|cuda(:(?P<number>\d+))?"
    match = re.fullmatch(names, str(device))
    if match is None:
        raise ValueError(f"device {str(device)!r}: accepted are cpu, cuda, cuda:<number>, a number")
    if match["host"]:
        return HOST
    return None if match["number"] is None else int(match["number"])


def started_gpu(device: Any) -> tuple[Any, int] | None:
    """Return torch and the number of ``device`` if that is a GPU and CUDA has started. Raises
    ValueError: this process has no such device."""
    ordinal = ordinal_of(device)
    torch = started_torch()
    if ordinal == HOST or torch is None:
        return None
    return torch, _gpu_number(torch, ordinal)


def _gpu_number(torch: Any, ordinal: int | None) -> int:
    if ordinal is None:
        return busiest_gpu(torch)
    if ordinal >= torch.cuda.device_count():
        raise ValueError(f"device cuda:{ordinal}: this process sees {torch.cuda.device_count()}")
    return ordinal


def busiest_gpu(torch: Any) -> int:
    """Return the GPU on which this process holds the most memory, or CUDA's current GPU if it holds
    none. A trainer may put its model on a GPU that is not the current GPU."""
    held = list(map(torch.cuda.memory_reserved, range(torch.cuda.device_count())))
    return held.index(max(held)) if any(held) else int(torch.cuda.current_device())


def gpu_uuid(torch: Any, index: int) -> str:
    """Return the UUID of a GPU of this process, as NVML names it."""
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


# --- figures ---


@dataclass(frozen=True)
class Cached:
    """Bytes that the allocator holds on a GPU: ``allocated`` to tensors, ``reserved`` in all."""

    allocated: int = 0
    reserved: int = 0

    @property
    def unused_share(self) -> float:
        """Share of the reserved memory that no tensor uses, 0 to 1."""
        return 1 - self.allocated / self.reserved if self.reserved else 0.0


def cached_on(index: int | None) -> Cached | None:
    """Return the figures of a GPU as this process counts, or None if CUDA has not started."""
    torch = started_torch()
    with contextlib.suppress(KeyError, RuntimeError):
        if index is not None and torch is not None:
            figures = torch.cuda.memory_stats_as_nested_dict(index)
            return Cached(
                figures["allocated_bytes"]["all"]["current"],
                figures["reserved_bytes"]["all"]["current"],
            )
    return None


def alloc_retries(index: int | None) -> int | None:
    """Return how often the allocator has emptied its cache to find room on a GPU, or None without
    CUDA. Called in each step, so it builds the figures of that GPU alone."""
    torch = started_torch()
    if torch is None or index is None:
        return None
    try:
        return int(torch.cuda.memory_stats_as_nested_dict(index).get("num_alloc_retries", 0))
    except RuntimeError:  # after a fault
        return None


def memory_segments(torch: Any) -> list[Any] | None:
    """Return the allocator's segments as torch lists them, or None if it has none, as
    ``backend:cudaMallocAsync``."""
    with contextlib.suppress(RuntimeError):
        try:
            # without the recorded history, which may be gigabytes
            return list(torch.cuda.memory_snapshot(include_traces=False))
        except TypeError:
            return list(torch.cuda.memory_snapshot())
    return None


def holds_graphs() -> bool | None:
    """Return whether a CUDA graph was captured, whose memory cannot be reused. None if that is
    unknown, for example without CUDA."""
    torch = started_torch()
    segments = None if torch is None else memory_segments(torch)
    return None if segments is None else any(map(_is_private, segments))


def unused_blocks(segments: Iterable[Any], index: int) -> tuple[int, float]:
    """Return the largest unused block of a GPU, and the share of all unused bytes outside of it,
    from 0 (a single block) to 1. Blocks in private pools (CUDA graphs) do not count: only their
    graph can use them."""
    sizes = [
        int(block["size"])
        for segment in segments
        if segment["device"] == index and not _is_private(segment)
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    largest = max(sizes, default=0)
    return largest, 1 - largest / sum(sizes) if largest else 0.0


def _is_private(segment: Any) -> bool:
    return tuple(segment.get("segment_pool_id", _COMMON_POOL)) != _COMMON_POOL


# --- settings ---


def enable_memory_efficient_settings(
    *, fraction: float | None = 0.95, tf32: bool = True
) -> tuple[str, ...]:
    """Set up CUDA's allocator and arithmetic for a tight GPU, and describe the changes in
    sentences.

    Turns on expandable segments, unless the environment forbids them or this is WSL, which lacks
    them: in the variable, for child processes, and in this process if it has CUDA. Existing
    segments stay as they are, so call it before CUDA is used.

    Args:
        fraction: as in `set_memory_fraction`. None sets no limit.
        tf32: let float32 matrix products use TensorFloat32 if the GPU has it (Ampere and later), as
            convolutions do by default: faster, at 10 bits of mantissa. It saves no memory.
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
            # the flags exist on every GPU and act only where the hardware has the format
            torch.set_float32_matmul_precision("high")
            done.append("TensorFloat32 for float32 matrix products if the GPU has it")
    for sentence in done:
        log.info("%s", sentence)
    return tuple(done)


def apply_to_allocator(torch: Any, settings: str) -> str:
    """Apply settings to the allocator of this process, and describe that in a sentence."""
    try:
        set_allocator_settings(torch, settings)
    except (RuntimeError, ValueError) as error:
        return f"torch refuses {settings}: {first_line(error)}"
    return f"the allocator of this process: {settings}"


def _usable_torch() -> Any:
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None


# --- limits ---


@dataclass(frozen=True)
class MemoryLimit:
    """A memory limit of this process.

    Attributes:
        device: ``cuda:0`` or ``cpu``.
        fraction: of ``total``.
        bytes: the maximum that the caching allocator may reserve, or on the host, the maximum of
            writable private memory.
        total: bytes of the device, the host, or the cgroup if that has less.
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
        is_host = self.device == "cpu"
        host = "no CUDA in this process; host memory (RLIMIT_DATA)"
        over = "; that is more than the limit, so the next larger request will fail"
        return (
            f"{host if is_host else self.device}: at most {self.bytes / MIB:,.0f} of "
            f"{self.total / MIB:,.0f} MiB ({self.fraction:g}), {self.in_use / MIB:,.0f} MiB in use"
            f"{over if self.in_use > self.bytes else ''}"
        )


def set_memory_fraction(fraction: float = 0.8, device: Any = None) -> MemoryLimit:
    """Limit this process to a share of the device's memory. 1 lifts the limit, except for that of
    PYTORCH_CUDA_ALLOC_CONF (``per_process_memory_fraction``).

    On a GPU it limits torch's caching allocator, as if the GPU were smaller. CUDA contexts and
    NCCL's memory do not count. This starts CUDA. Without CUDA the writable private memory of this
    process is limited to that share of the host's (RLIMIT_DATA, see setrlimit(2)): a request beyond
    it raises MemoryError. Each child process inherits the limit for itself.

    Args:
        fraction: over 0, up to 1.
        device: as in `get_gpu_memory_stats`.

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
        index = _gpu_number(torch, ordinal)
        fraction = _limit_cache(torch, fraction, index)
        total = torch.cuda.get_device_properties(index).total_memory
        in_use = torch.cuda.memory_reserved(index)
        most = int(fraction * total)
        limit = MemoryLimit(f"cuda:{index}", fraction, most, total, in_use)
    log.info("%s", limit.description)
    return limit


def _share_that_host_can_spare(torch: Any, fraction: float, index: int) -> float:
    """Return the share of a GPU that may be used without taking memory from the host. Logs the
    reason if it is less than ``fraction``."""
    if fraction == 1:
        return fraction
    properties = torch.cuda.get_device_properties(index)
    total = properties.total_memory
    if getattr(properties, "is_integrated", False):
        free = read_host_memory().available
        share = share_of_unified_memory(fraction, total, free)
        why = "it shares the host's memory"
    elif is_wsl():
        free, _ = torch.cuda.mem_get_info(index)
        share = fraction * min(free / total, 1.0)
        why = "under WSL more would spill into the host's memory, which is many times slower"
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
            why,
        )
    return share


def share_of_unified_memory(fraction: float, total: int, available: int) -> float:
    """Return the share of a GPU's memory that leaves the host enough, if it is the host's memory.

    Beyond it the kernel kills processes or the machine freezes, instead of an error from CUDA.
    """
    kept = min(_HOST_KEEPS_BYTES, total // 4)
    most = max(available - kept, total // 16)
    return min(fraction, most / total)


def _limit_cache(torch: Any, fraction: float, index: int) -> float:
    """Limit the allocator on a GPU, and return the limit: never above what the user exports."""
    least = min(float(fraction), exported_fraction(os.environ))
    # torch makes it the current device, and leaves it so
    with torch.cuda.device(index):
        torch.cuda.set_per_process_memory_fraction(least, index)
    return least


def _limit_host(fraction: float) -> MemoryLimit:
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
    """Let this process's caching allocator hold at most this share of a GPU's memory. It takes
    effect when torch starts CUDA, and does not start CUDA. A limit that is refused is logged.
    ``index`` is None for the CPU. Returns False if torch is not imported yet."""
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
