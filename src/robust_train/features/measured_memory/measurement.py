"""The measurements of one attempt, as the launcher's hooks collect them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from robust_train.model.events import (
    CheckpointSaved,
    EpochEnded,
    Event,
    MicroBatchChanged,
    Progress,
    ValueReported,
)
from robust_train.model.gpu import GpuInfo


@dataclass
class Measurement:
    """The memory that an attempt has held on its GPUs, and its progress.

    Times are on the monotonic clock, and sizes are in bytes.
    """

    uuids: tuple[str, ...]  # its GPUs
    used_before: Mapping[str, int]  # memory in use on each GPU before the attempt began, by UUID
    began: float = field(default_factory=time.monotonic)
    next_at: float = 0.0  # when the next sample is due
    # --- memory held ---
    peaks: dict[str, int] = field(default_factory=dict)  # by UUID
    totals: dict[str, int] = field(default_factory=dict)  # the memory of each GPU, by UUID
    history: list[int] = field(default_factory=list)  # the peak of the fullest GPU as it rose
    grew_at: float = field(default_factory=time.monotonic)  # when a peak last rose
    # --- progress ---
    first_step: int | None = None  # the first optimizer step that it reported
    last_step: int | None = None
    has_saved: bool = False  # a checkpoint, an epoch or a validation has ended
    is_split: bool = False  # a step ran at a smaller micro-batch than the attempt's
    has_run_out: bool = False  # memory ran out in a step since the last sample
    samples_after_steps: int = 0  # samples since ten steps were done
    # --- conclusions ---
    is_settled: bool = False  # the peak counts as measured
    takes_all: bool = False  # the program takes most of a GPU whatever it needs
    is_reported: bool = False  # a line has shown the measured peak
    has_blamed: bool = False  # a warning has named other processes as the cause of a shortage
    # --- figures from NVML ---
    has_figures: bool = False  # NVML has shown the memory of a process of the job
    shared: set[str] = field(default_factory=set)  # UUIDs of GPUs on which another job was seen

    @property
    def peak(self) -> int:
        """The most memory that it held on any GPU."""
        return max(self.peaks.values(), default=0)

    @property
    def fullest(self) -> str:
        """The UUID of the GPU on which it held the most. Some peak must be known."""
        return max(self.peaks, key=lambda uuid: self.peaks[uuid])

    @property
    def total(self) -> int:
        """The memory of the GPU on which it held the most."""
        return self.totals[self.fullest]

    @property
    def steps(self) -> int | None:
        """Optimizer steps since it began, or None if it reports no steps."""
        if self.first_step is None or self.last_step is None:
            return None
        return self.last_step - self.first_step + 1

    def follow_event(self, event: Event) -> None:
        """Count the steps, and note that the attempt saved, validated or ran out of memory."""
        if isinstance(event, Progress):
            if self.first_step is None:
                self.first_step = event.step
            self.last_step = event.step
        elif isinstance(event, (CheckpointSaved, EpochEnded, ValueReported)):
            self.has_saved = True
        elif isinstance(event, MicroBatchChanged):
            self.is_split = True
            self.has_run_out = True
            # Look for the cause of the shortage at once, before other processes free memory.
            self.next_at = 0.0

    def raise_peaks(self, gpus: Sequence[GpuInfo], held: Sequence[int | None]) -> None:
        """Raise the peaks to the bytes that the attempt holds on each GPU now, None if unknown."""
        for gpu, size in zip(gpus, held, strict=True):
            if size is not None and size > self.peaks.get(gpu.uuid, 0):
                self.peaks[gpu.uuid] = size
                self.totals[gpu.uuid] = gpu.total_bytes
                self.grew_at = time.monotonic()
        if self.peak and (not self.history or self.peak > self.history[-1]):
            self.history.append(self.peak)
