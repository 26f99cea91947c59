"""Decides how much memory to reserve for a job, and whether its measurement is complete. Pure.

The launcher's hooks, the command ``need`` and the plan of a job call these functions. For example,
a job that held 3000 MiB at its peak reserves 3300 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FIRST_STEPS = 10
"""Number of optimizer steps after which an attempt's peak counts as measured."""

PEAK = "gpu_peak"
"""The name of the measured peak among an attempt's memory figures."""

QUIET_SECONDS = 60.0
"""A program that reports no steps counts as measured once its peak has not grown for this long."""

MOST_TOGETHER = 16
"""Maximum number of jobs per GPU with ``gpu_jobs_per_device=auto``, including the measured job.
More CUDA contexts than that cost more than they compute."""

_MARGIN = 10
"""The peak divided by this number is reserved in addition to the peak."""

_MOST_OF_A_GPU = 0.95
"""The largest share of a GPU that a job may wait for, because a desktop may hold the rest."""

_ALL_AT_ONCE = 0.7
"""A program that takes this share of a GPU at once does so whatever it needs: JAX takes three
quarters of a GPU when it starts, and TensorFlow takes nearly all of it."""

_MOST_BEFORE_ALL = 0.1
"""The share of a GPU that the CUDA context and libraries may hold before such an allocation."""


def add_margin(peak_bytes: int, held_bytes: int = 0) -> int:
    """Return the bytes to reserve for a peak: a tenth more, and at least ``held_bytes``."""
    return max(peak_bytes + math.ceil(peak_bytes / _MARGIN), held_bytes)


def compute_torch_peak(figures: Mapping[str, int]) -> int:
    """Return the bytes that a process with torch held at its peak, or 0 if unknown.

    Args:
        figures: the process's memory in bytes, as `memory_in_use` returns it after an attempt.
    """
    cache = max(figures.get("reserved", 0), figures.get("max_allocated", 0))
    context = figures.get("context_bytes", 0)
    if not cache or not context:
        return 0
    return cache + context


def choose_reservation(peak_bytes: int, capacity_bytes: int) -> int:
    """Return the bytes to reserve for a peak on a GPU with ``capacity_bytes`` for all jobs.

    A measurement never prevents a job from starting. If the GPU has no room for the margin, the
    margin shrinks, and a little memory is left for a desktop. A peak that the GPU cannot hold was
    measured on another model or extrapolated. The job then gets the GPU and recovers by itself.
    """
    most = int(_MOST_OF_A_GPU * capacity_bytes)
    if peak_bytes <= capacity_bytes:
        most = max(most, peak_bytes)
    return min(add_margin(peak_bytes), most)


def estimate_peak(peaks: Mapping[int, int], micro_batch: int) -> int | None:
    """Estimate the peak at a micro-batch size from measured peaks. Return None if unknown.

    Memory is affine in the micro-batch: a constant part for weights and optimizer, and a part for
    each sample. A single peak is only an upper bound for smaller micro-batches.
    """
    if micro_batch in peaks:
        return peaks[micro_batch]
    if not peaks:
        return None
    nearest = sorted(sorted(peaks), key=lambda size: abs(size - micro_batch))
    if len(nearest) == 1:
        measured = nearest[0]
        return peaks[measured] if micro_batch < measured else None
    low, high = sorted(_find_neighbours(nearest, micro_batch))
    slope = max(peaks[high] - peaks[low], 0) / (high - low)
    return max(math.ceil(peaks[low] + slope * (micro_batch - low)), 0)


def _find_neighbours(nearest: Sequence[int], micro_batch: int) -> tuple[int, int]:
    """Return the nearest size on each side of a micro-batch size, or else the two nearest sizes."""
    below = next((size for size in nearest if size < micro_batch), None)
    above = next((size for size in nearest if size > micro_batch), None)
    if below is None or above is None:
        return nearest[0], nearest[1]
    return below, above


def find_largest_fitting(peaks: Mapping[int, int], room_bytes: int) -> int | None:
    """Return the largest micro-batch size whose reservation fits. Return 0 if no size fits, or None
    if unknown."""
    if not peaks:
        return None
    fits = 0
    size = 1
    peak = estimate_peak(peaks, 1)
    # The size is doubled until it does not fit, then the gap is halved.
    while peak is not None and add_margin(peak) <= room_bytes and size < 1 << 20:
        fits = size
        size *= 2
        peak = estimate_peak(peaks, size)
    if peak is None:
        fitting = [measured for measured in peaks if add_margin(peaks[measured]) <= room_bytes]
        return max(fitting, default=fits or None)
    step = (size - fits) // 2
    while step:
        between = estimate_peak(peaks, fits + step)
        if between is not None and add_margin(between) <= room_bytes:
            fits += step
        step //= 2
    return fits


@dataclass(frozen=True)
class Sample:
    """NVML's figures for a GPU on which a job runs, at one moment."""

    used_bytes: int  # memory used by all processes
    before_bytes: int  # memory used before the attempt began
    # Bytes that each process of the job holds there, None if NVML does not say.
    ours: tuple[int | None, ...] = ()
    others: int = 0  # number of other processes that NVML lists on it
    is_listed: bool = True  # whether NVML lists processes, by the pids that they have here
    is_alone: bool = True  # whether no other job of the queue has used it since the attempt began

    def by_process(self) -> int | None:
        """Return the bytes that NVML counts for the job's processes, or None if unknown."""
        sizes = [size for size in self.ours if size is not None]
        return sum(sizes) if sizes and len(sizes) == len(self.ours) else None

    @property
    def is_before_cuda(self) -> bool:
        """Whether none of the job's processes appears to have started CUDA.

        Under WSL2, NVML lists no processes at all, so growth of the used memory is the only sign.
        """
        grew = self.used_bytes - self.before_bytes
        is_seen = bool(self.ours) or (self.others == 0 and grew >= _LEAST_CONTEXT)
        return self.is_listed and not is_seen

    def by_difference(self) -> int | None:
        """Return the growth of the used memory, or None if other processes may have caused it."""
        if not self.is_alone or (self.is_listed and self.others):
            return None
        return max(self.used_bytes - self.before_bytes, 0)

    def taken_by_others(self) -> int:
        """Return the bytes that other processes took since the attempt began, or 0 if unknown."""
        held = self.by_process()
        if held is None:
            return 0
        return max(self.used_bytes - held - self.before_bytes, 0)


_LEAST_CONTEXT = 64 << 20
"""The smallest size of a CUDA context in bytes. The driver itself may take less than this."""


def is_measured(
    steps: int | None,  # steps since the attempt began, None if it reports no steps
    *,
    saved: bool,  # a checkpoint, an epoch or a validation has ended
    quiet_seconds: float,  # time since the peak last grew
) -> bool:
    """Return whether an attempt has probably reached its peak."""
    if steps is None:
        return quiet_seconds >= QUIET_SECONDS
    return steps >= FIRST_STEPS and saved


def has_taken_all_at_once(peaks: Sequence[int], total_bytes: int, *, has_allocator: bool) -> bool:
    """Return whether a program takes most of a GPU whatever it needs, as JAX and TensorFlow do.

    Args:
        peaks: the bytes that it held in each sample so far, without zeros.
        total_bytes: the GPU's memory.
        has_allocator: whether torch reports the bytes of its own allocator.
    """
    if has_allocator or not peaks:
        return False
    # A first step may also allocate half a GPU at once, but only on top of the weights.
    rises = (
        after - before
        for before, after in zip((0, *peaks), peaks, strict=False)
        if before <= _MOST_BEFORE_ALL * total_bytes
    )
    return max(peaks) >= _ALL_AT_ONCE * total_bytes and max(rises) >= total_bytes / 2
