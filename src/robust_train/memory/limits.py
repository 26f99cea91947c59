"""Limits and settings of memory for this process."""

from __future__ import annotations

import logging
import os
import resource
import sys
from dataclasses import dataclass
from typing import Any

from robust_train.compat import set_allocator_settings, when_cuda_starts
from robust_train.config.schema import MemoryConfig
from robust_train.host.memory import read_host_memory
from robust_train.memory import allocator
from robust_train.memory.cuda import HOST, gpu_number, ordinal_of, usable_torch
from robust_train.readable import MIB, first_line

log = logging.getLogger("robust_train")


@dataclass(frozen=True)
class MemoryLimit:
    """A limit that this process has been given.

    Attributes:
        device: ``cuda:0`` or ``cpu``.
        fraction: of ``total``.
        bytes: the most that the caching allocator may reserve; on the host, that writable private
            memory may be.
        total: bytes of the device; of the host, or of the cgroup if that has less.
        in_use: what counts towards the limit now.
    """

    device: str
    fraction: float
    bytes: int
    total: int
    in_use: int

    @property
    def description(self) -> str:
        """The limit in a line for people."""
        where = self.device
        if self.device == "cpu":
            where = "no CUDA in this process; host memory (RLIMIT_DATA)"
        text = (
            f"{where}: at most {self.bytes / MIB:,.0f} of {self.total / MIB:,.0f} MiB "
            f"({self.fraction:g}), {self.in_use / MIB:,.0f} MiB in use"
        )
        if self.in_use > self.bytes:
            text += (
                "; that is more than the limit, so the next larger request will fail"
            )
        return text


def set_memory_fraction(fraction: float = 0.8, device: Any = None) -> MemoryLimit:
    """Let this process take at most a share of the device's memory; 1 lifts the limit.

    On a GPU it limits torch's caching allocator, as if the GPU were smaller; CUDA contexts and
    NCCL's memory do not count. CUDA is started if it was not. Without CUDA the writable private
    memory of this process is limited to that share of the host's (RLIMIT_DATA, see setrlimit(2)):
    a request beyond it raises MemoryError. Child processes inherit that, each for itself.

    Args:
        fraction: over 0, up to 1.
        device: as in :func:`robust_train.memory.get_gpu_memory_stats`.

    Raises:
        ValueError: no such fraction or device; or the host process has more already, and would
            fail at once.
    """
    is_number = isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
    if not (is_number and 0 < fraction <= 1):
        raise ValueError(f"fraction={fraction!r}: accepted is a number over 0, up to 1")
    ordinal = ordinal_of(device)
    torch = usable_torch()
    if ordinal == HOST or torch is None:
        limit = _limit_host(float(fraction))
    else:
        index = gpu_number(torch, ordinal)
        torch.cuda.set_per_process_memory_fraction(float(fraction), index)
        total = torch.cuda.get_device_properties(index).total_memory
        most, in_use = int(fraction * total), torch.cuda.memory_reserved(index)
        limit = MemoryLimit(f"cuda:{index}", float(fraction), most, total, in_use)
    log.info("%s", limit.description)
    return limit


def limit_when_cuda_starts(fraction: float, index: int | None) -> bool:
    """Let this process's caching allocator hold at most this share of a GPU's memory. Takes effect
    when torch starts CUDA, and does not start it; a limit that is refused is logged. ``index`` is
    None for the CPU. Returns False if torch is not imported yet."""
    if index is None:
        if fraction != MemoryConfig.fraction:
            log.info("memory.fraction=%g: has no effect on the CPU", fraction)
        return True
    torch = sys.modules.get("torch")
    if torch is None:
        return False

    def limit() -> None:
        try:
            torch.cuda.set_per_process_memory_fraction(float(fraction), index)
        except (RuntimeError, ValueError) as error:
            log.warning("memory.fraction=%g: %s", fraction, first_line(error))

    when_cuda_starts(torch, limit)
    return True


def enable_memory_efficient_settings(
    *, fraction: float | None = 0.95, tf32: bool = True
) -> tuple[str, ...]:
    """Set up CUDA's allocator and arithmetic for a tight GPU; returns what was done, in sentences.

    Expandable segments, unless the environment forbids them or this is WSL, which lacks them: in
    the variable, for programs started from here, and in this process where CUDA is there.
    Segments that the allocator has already stay as they are, so call it before CUDA is used.

    Args:
        fraction: as in :func:`set_memory_fraction`; None sets no limit.
        tf32: let float32 matrix products use TensorFloat32 if the GPU has it (Ampere and later), as
            convolutions do by default: faster, at 10 bits of mantissa. It saves no memory.
    """
    exported = allocator.exported_expandable_segments(os.environ)
    settings = allocator.allocator_settings(os.environ, expandable_segments=True)
    is_possible = exported is None and not allocator.is_wsl()
    if is_possible:
        os.environ[allocator.VARIABLE] = settings
        done = [f"{allocator.VARIABLE}={settings} for programs started from here"]
    elif exported is None:
        done = ["no expandable segments: WSL's driver lacks them"]
    else:
        done = [
            f"{allocator.VARIABLE} has expandable_segments:{exported} already, which stays"
        ]
    torch = usable_torch()
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
    """Apply settings to the allocator of this process; return what was done, in a sentence."""
    try:
        set_allocator_settings(torch, settings)
    except (RuntimeError, ValueError) as error:
        return f"torch refuses {settings}: {first_line(error)}"
    return f"the allocator of this process: {settings}"


def _limit_host(fraction: float) -> MemoryLimit:
    memory = read_host_memory()
    limit = MemoryLimit(
        "cpu", fraction, int(fraction * memory.total), memory.total, memory.data
    )
    if limit.in_use >= limit.bytes:
        raise ValueError(
            f"fraction={fraction:g}: that is {limit.bytes / MIB:,.0f} MiB of host memory, and this "
            f"process has {limit.in_use / MIB:,.0f} already"
        )
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = hard if fraction == 1 else limit.bytes
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    return limit
