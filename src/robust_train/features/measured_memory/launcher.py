"""Measures in the launcher what a job's processes hold on its GPUs. The reservation follows.

NVML counts all that a process holds: CUDA's context, the libraries and every allocator. A sample is
taken each second in an attempt's first minute, and about every ten seconds later.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from robust_train.config.attempt import AttemptRequest
from robust_train.features.measured_memory.measurement import Measurement
from robust_train.features.measured_memory.model import (
    FIRST_STEPS,
    MOST_TOGETHER,
    PEAK,
    Sample,
    add_margin,
    choose_reservation,
    compute_torch_peak,
    has_taken_all_at_once,
    is_measured,
)
from robust_train.features.measured_memory.probe import is_probe, stop_probe
from robust_train.features.measured_memory.recall import fingerprint_job
from robust_train.features.measured_memory.sampling import read_sample, uses_torch
from robust_train.features.measured_memory.store import remember
from robust_train.gpu.inventory import close_session, read_inventory
from robust_train.launcher.hooks import History, InLauncher, JobView
from robust_train.model.attempt import Attempt
from robust_train.model.events import Event
from robust_train.model.gpu import GpuInfo
from robust_train.readable import memory, mib

log = logging.getLogger("robust_train")

# An attempt allocates most of its memory in its first minute, so samples are frequent then.
_FIRST_SECONDS = 60.0
_LEAST_PAUSE_AT_FIRST = 1.0
_LEAST_PAUSE_LATER = 10.0
_LONGEST_PAUSE = 30.0
# The largest share of the time that reading the GPUs may take.
_COST_AT_FIRST = 0.02
_COST_LATER = 0.005
# A probe ends after this many samples behind its tenth step, even if nothing was measured.
_SAMPLES_OF_A_PROBE = 3
# Other processes that took a smaller share of a GPU did not cause a shortage.
_NOTABLE_SHARE = 0.05


class MeasuredMemory(InLauncher):
    """Measures a job with ``min_gpu_memory_mb=auto``, and jobs that share a GPU.

    For all other jobs nothing is read or written, and their declared reservation stands.
    """

    def __init__(self, job: JobView) -> None:
        super().__init__(job)
        config = job.plan.config
        shares_gpu = config.packs_gpus or config.gpu_jobs_per_device > 1
        self._is_on = config.measures_memory or shares_gpu
        self._is_probe = is_probe()
        self._warned: set[str] = set()
        self._earlier_bytes = 0  # the reservation by the peaks of earlier attempts
        # The measurement of the running attempt. None if it is not measured.
        self.current: Measurement | None = None

    def request(self, request: AttemptRequest, attempt: Attempt) -> AttemptRequest:
        """Note the memory in use on the GPUs before the attempt begins."""
        self.current = None
        uuids = tuple(gpu.uuid for gpu in attempt.spec.gpus)
        # In the launcher's own process, closing our session of NVML would also end the trainer's.
        if self._is_on and uuids and not self.job.plan.config.runs_inline:
            gpus = read_inventory(processes=False).gpus
            used = {gpu.uuid: gpu.used_bytes for gpu in gpus if gpu.uuid in uuids}
            self.current = Measurement(uuids, used)
        return request

    def event(self, event: Event, attempt: Attempt | None) -> None:
        """Follow the attempt's steps, saves and shortages."""
        if self.current is not None:
            self.current.follow_event(event)

    def tick(self, attempt: Attempt | None) -> None:
        """Take a sample if the next sample is due."""
        current = self.current
        if attempt is None or current is None or current.takes_all:
            return
        started = time.monotonic()
        if started < current.next_at:
            return
        inventory = read_inventory()
        cost_seconds = time.monotonic() - started
        is_first = started - current.began < _FIRST_SECONDS
        current.next_at = started + _choose_pause(cost_seconds, is_first=is_first)
        if not is_first:
            # An open session blocks a reset of any GPU.
            close_session()
        by_uuid = {gpu.uuid: gpu for gpu in inventory.gpus}
        if not all(uuid in by_uuid for uuid in current.uuids):
            return
        gpus = [by_uuid[uuid] for uuid in current.uuids]
        queue = self.job.driver.devices.queue
        samples = [read_sample(gpu, queue, current) for gpu in gpus]
        held = [self._find_held(sample, current) for sample in samples]
        current.raise_peaks(gpus, held)
        if current.peak:
            self._conclude(current, attempt, gpus)
        if current.peak and not current.takes_all:
            self._follow(current, held, attempt)
        self._blame_others(current, samples, gpus)
        self._end_probe(current)

    def _find_held(self, sample: Sample, current: Measurement) -> int | None:
        """Return the bytes that the job's processes hold on a GPU, or None if unknown."""
        held = sample.by_process()
        if held is not None:
            current.has_figures = True
            return held
        # The driver stops listing a process that ends before its memory is free.
        is_ending = current.has_figures and not sample.ours
        if is_ending or sample.is_before_cuda:
            return None
        held = sample.by_difference()
        if held is None:
            self._warn(
                "NVML does not show the memory of each process here, and other processes share the "
                "GPU: the reservation stays as it is"
            )
        elif held:
            self._warn(
                "NVML does not show the memory of each process here: all growth of the GPU's used "
                "memory counts as the job's"
            )
        return held or None

    def _conclude(self, current: Measurement, attempt: Attempt, gpus: Sequence[GpuInfo]) -> None:
        """Decide whether the peak counts as measured, or says nothing about the program's need."""
        if current.is_settled:
            # A job that was measured and takes more has grown, whatever its allocator.
            return
        job_id = self.job.driver.devices.queue.job_id
        has_allocator = bool(attempt.memory) or uses_torch(gpus, job_id)
        if has_taken_all_at_once(current.history, current.total, has_allocator=has_allocator):
            current.takes_all = True
            self._warn(
                f"the program took {mib(current.peak)} of {mib(current.total)} at once, as JAX and "
                "TensorFlow do whatever they need: the reservation stays at min_gpu_memory_mb"
            )
            return
        current.is_settled = is_measured(
            current.steps,
            saved=current.has_saved or self._is_probe,
            quiet_seconds=time.monotonic() - current.grew_at,
        )

    def _follow(self, current: Measurement, held: Sequence[int | None], attempt: Attempt) -> None:
        """Adapt the reservation to the peak. Log and keep the peak once it counts as measured."""
        config = self.job.plan.config
        need = add_margin(current.peak)
        # A reservation that the user declared never falls. A reservation based on earlier runs or
        # attempts does not fall until this attempt is measured.
        if not config.measures_memory or not current.is_settled:
            need = max(need, config.min_gpu_memory_bytes, self._earlier_bytes)
        most_jobs = None
        if config.packs_gpus and current.is_settled:
            most_jobs = MOST_TOGETHER
        reserved = self.job.driver.devices.queue.follow(held, need, most_jobs)
        if current.is_settled and not current.is_reported:
            current.is_reported = True
            line = f"the job holds at most {mib(current.peak)} of a GPU"
            if reserved is not None:
                line += f"; {mib(reserved)} are now reserved"
            log.info("%s", line)
            self._remember(current, attempt, is_whole=False)

    def _blame_others(
        self, current: Measurement, samples: Sequence[Sample], gpus: Sequence[GpuInfo]
    ) -> None:
        """Warn once if memory ran out in a step because other processes took it."""
        if not current.has_run_out:
            return
        current.has_run_out = False
        for sample, gpu in zip(samples, gpus, strict=True):
            taken = sample.taken_by_others()
            if taken >= _NOTABLE_SHARE * gpu.total_bytes and not current.has_blamed:
                current.has_blamed = True
                log.warning(
                    "memory ran out in a step: others took %s of GPU %d since the attempt began "
                    "(robust-train gpus)",
                    memory(taken),
                    gpu.index,
                )

    def _end_probe(self, current: Measurement) -> None:
        """Stop a probe run that was measured, or that cannot be measured."""
        if (current.steps or 0) >= FIRST_STEPS:
            current.samples_after_steps += 1
        is_over = current.samples_after_steps >= _SAMPLES_OF_A_PROBE
        if self._is_probe and (current.is_settled or current.takes_all or is_over):
            self._is_probe = False
            log.info("the probe run ends here")
            with contextlib.suppress(OSError):
                stop_probe(self.job.plan.run_dir)

    def evidence(self, attempt: Attempt, history: History) -> Attempt:
        """Return the attempt with the peak of its GPU memory, and keep the peak for later runs."""
        current = self.current
        self.current = None
        # A program that takes all of a GPU does not show its need.
        if current is None or not current.peak or current.takes_all:
            return attempt
        # Torch's own peak includes tensors that existed only between two samples.
        current.peaks[current.fullest] = max(current.peak, compute_torch_peak(attempt.memory))
        has_succeeded = attempt.failure is None
        if current.is_settled:
            self._earlier_bytes = choose_reservation(current.peak, current.total)
            self.job.driver.devices.raise_need(self._earlier_bytes)
        if current.is_settled or has_succeeded:
            is_whole_run = has_succeeded and attempt.resumed_from is None
            self._remember(current, attempt, is_whole=current.is_settled and is_whole_run)
        return replace(attempt, memory={**attempt.memory, PEAK: current.peak})

    def _remember(self, current: Measurement, attempt: Attempt, *, is_whole: bool) -> None:
        """Keep the peak for later runs of the same job at the same micro-batch."""
        gpus = attempt.spec.gpus
        if gpus and self.job.plan.config.measures_memory and not current.is_split:
            size = attempt.spec.batch_size
            job = fingerprint_job(self.job.plan)
            remember(job, gpus[0].name, size, current.peak, is_whole=is_whole)

    def _warn(self, line: str) -> None:
        """Log a warning once."""
        if line not in self._warned:
            self._warned.add(line)
            log.warning("%s", line)


def _choose_pause(cost_seconds: float, *, is_first: bool) -> float:
    """Return the seconds until the next sample, after a sample that took ``cost_seconds``.

    ``is_first`` is set in the attempt's first minute.
    """
    if is_first:
        pause = max(cost_seconds / _COST_AT_FIRST, _LEAST_PAUSE_AT_FIRST)
    else:
        pause = max(cost_seconds / _COST_LATER, _LEAST_PAUSE_LATER)
    return min(pause, _LONGEST_PAUSE)
