"""Measures what a job's processes hold on its GPUs, and lets its reservation follow."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from robust_train.config.attempt import AttemptRequest
from robust_train.features.measured_memory.model import (
    FIRST_STEPS,
    MOST_TOGETHER,
    PEAK,
    Sample,
    is_measured,
    peak_by_torch,
    to_reserve,
    took_all_at_once,
    with_margin,
)
from robust_train.features.measured_memory.probe import is_probe, stop_probe
from robust_train.features.measured_memory.recall import fingerprint_of
from robust_train.features.measured_memory.store import remember
from robust_train.gpu.inventory import close_session, read_inventory
from robust_train.gpu.processes import has_library, has_this_number_here, sees_host_pids
from robust_train.host.linux import job_mark
from robust_train.host.reaper import mark_of
from robust_train.launcher.hooks import History, InLauncher, JobView
from robust_train.model.attempt import Attempt
from robust_train.model.events import (
    CheckpointSaved,
    EpochEnded,
    Event,
    MicroBatchChanged,
    Progress,
    ValueReported,
)
from robust_train.model.gpu import GpuInfo
from robust_train.queue.host_queue import HostQueue
from robust_train.queue.queue_dir import QueueError
from robust_train.readable import memory, mib

log = logging.getLogger("robust_train")

_LEAST_SECONDS = 1.0
_MOST_SECONDS = 30.0
_OFTEN_SECONDS = 60.0  # an attempt allocates most of what it will hold in its first minute
_SAMPLES_OF_A_PROBE = 3  # after ten steps, until it ends whatever is known
_NOTABLE_SHARE = 0.05  # a smaller share of a GPU did not make a step run out
_TAKE_ALL = ("xla_", "tensorflow")  # in the paths of JAX's and TensorFlow's libraries
_COST_SHARE = 0.005  # the share of the time that reading the GPUs may take
_FIRST_COST_SHARE = 0.02  # the same share in the first minute


@dataclass
class Measurement:
    """The measurements of the current attempt."""

    number: int
    uuids: tuple[str, ...]
    used_before: Mapping[str, int]  # bytes by UUID, before it began
    began: float = field(default_factory=time.monotonic)
    peaks: dict[str, int] = field(default_factory=dict)  # bytes by UUID
    history: list[int] = field(default_factory=list)  # peaks of the fullest GPU, as they rose
    grew_at: float = field(default_factory=time.monotonic)
    totals: dict[str, int] = field(default_factory=dict)
    first_step: int | None = None
    last_step: int | None = None
    has_saved: bool = False
    is_split: bool = False  # a step ran at a smaller micro-batch than the attempt's
    next_at: float = 0.0
    is_settled: bool = False
    has_run_out: bool = False  # a step ran out since the last sample
    has_blamed: bool = False  # a line has blamed others for that
    samples_after_steps: int = 0  # samples since ten steps were done
    takes_all: bool = False
    has_figures: bool = False  # NVML has said what a process of the job holds
    # UUIDs of GPUs on which another job of the queue was seen.
    shared: set[str] = field(default_factory=set)

    @property
    def peak(self) -> int:
        """The most memory that it held on any GPU."""
        return max(self.peaks.values(), default=0)

    @property
    def total(self) -> int:
        """The memory of the GPU on which it held the most."""
        fullest = max(self.peaks, key=lambda uuid: self.peaks[uuid])
        return self.totals[fullest]

    @property
    def steps(self) -> int | None:
        """Optimizer steps since it began, or None if it reports no steps."""
        if self.first_step is None or self.last_step is None:
            return None
        return self.last_step - self.first_step + 1


class MeasuredMemory(InLauncher):
    """Asks NVML from the launcher, so whatever a process holds counts: CUDA's context, libraries
    and all allocators.

    A job is measured with ``min_gpu_memory_mb=auto``, or if it shares its GPU with other jobs. All
    other jobs keep their declared figure, and nothing is read or written for them.
    """

    def __init__(self, job: JobView) -> None:
        super().__init__(job)
        config = job.plan.config
        self.current: Measurement | None = None
        self._warned: set[str] = set()
        shares_gpu = config.packs_gpus or config.gpu_jobs_per_device > 1
        self._is_on = config.measures_memory or shares_gpu
        self._is_probe = is_probe()
        self._earlier_bytes = 0  # the need of earlier attempts, as measured

    def request(self, request: AttemptRequest, attempt: Attempt) -> AttemptRequest:
        """Note what is used on the GPUs before the attempt begins."""
        self.current = None
        uuids = tuple(gpu.uuid for gpu in attempt.spec.gpus)
        # A session of NVML in an attempt's own process would end with ours.
        if self._is_on and uuids and not self.job.plan.config.runs_inline:
            gpus = read_inventory(processes=False).gpus
            used = {gpu.uuid: gpu.used_bytes for gpu in gpus if gpu.uuid in uuids}
            self.current = Measurement(attempt.number, uuids, used)
        return request

    def event(self, event: Event, attempt: Attempt | None) -> None:
        """Count the steps, and note that the attempt saved or validated."""
        current = self.current
        if current is None:
            return
        if isinstance(event, Progress):
            if current.first_step is None:
                current.first_step = event.step
            current.last_step = event.step
        elif isinstance(event, (CheckpointSaved, EpochEnded, ValueReported)):
            current.has_saved = True
        elif isinstance(event, MicroBatchChanged):
            current.is_split = True
            current.has_run_out = True
            current.next_at = 0.0

    def tick(self, attempt: Attempt | None) -> None:
        """Measure, if the next sample is due."""
        current = self.current
        if attempt is None or current is None or current.takes_all:
            return
        now = time.monotonic()
        if now < current.next_at:
            return
        inventory = read_inventory()
        seconds = time.monotonic() - now
        least = _LEAST_SECONDS
        share = _FIRST_COST_SHARE
        if now - current.began >= _OFTEN_SECONDS:
            least = _MOST_SECONDS / 3
            share = _COST_SHARE
            close_session()
        pause = min(max(seconds / share, least), _MOST_SECONDS)
        current.next_at = now + pause
        gpus = {gpu.uuid: gpu for gpu in inventory.gpus}
        if all(uuid in gpus for uuid in current.uuids):
            its_gpus = [gpus[uuid] for uuid in current.uuids]
            samples = [self._sample_of(gpu, current) for gpu in its_gpus]
            held = [self._held_by(sample, current) for sample in samples]
            self._follow(current, held, attempt, its_gpus)
            self._tell_shortage_apart(current, samples, its_gpus)
            self._end_probe(current)

    def _tell_shortage_apart(
        self, current: Measurement, samples: Sequence[Sample], gpus: Sequence[GpuInfo]
    ) -> None:
        """Warn once if memory ran out in a step because others took it."""
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

    def _held_by(self, sample: Sample, current: Measurement) -> int | None:
        """Return the bytes that the job's processes hold on a GPU, or None if unknown."""
        held = sample.by_process()
        if held is not None:
            current.has_figures = True
            return held
        # The driver no longer lists a process that ends, and returns its memory later.
        is_ending = current.has_figures and not sample.ours
        if is_ending or sample.is_before_cuda:
            return None
        held = sample.by_difference()
        if held is None:
            self._warn(
                "NVML does not say what each process holds here, and others share the GPU: "
                "the reservation stays as it is"
            )
        elif held:
            self._warn(
                "NVML does not say what each process holds here: what the GPU holds more than "
                "before counts as the job's"
            )
        return held or None

    def _sample_of(self, gpu: GpuInfo, current: Measurement) -> Sample:
        """Return NVML's figures of a GPU, with the processes of the job and of others."""
        queue = self.job.driver.devices.queue
        processes = gpu.processes or ()
        its_pids = self._its_pids(gpu)
        ours = tuple(row.used_bytes for row in processes if row.pid in its_pids)
        is_said = bool(ours) and None not in ours
        if not is_said and gpu.uuid not in current.shared and _has_others(queue, gpu.uuid):
            current.shared.add(gpu.uuid)
        return Sample(
            used_bytes=gpu.used_bytes,
            before_bytes=current.used_before.get(gpu.uuid, gpu.used_bytes),
            ours=ours,
            others=sum(row.computes for row in processes if row.pid not in its_pids),
            is_listed=gpu.processes is not None and sees_host_pids(),
            is_alone=gpu.uuid not in current.shared,
        )

    def _its_pids(self, gpu: GpuInfo) -> set[int]:
        """Return the job's processes that NVML lists on a GPU."""
        mark = job_mark(self.job.driver.devices.queue.job_id)
        pids = {row.pid for row in gpu.processes or () if mark_of(row.pid) == mark}
        return set(filter(has_this_number_here, pids))

    def _uses_torch(self, gpus: Sequence[GpuInfo]) -> bool:
        """Return whether torch surely allocates the memory of the job's processes.

        It takes only what is used, also in a script that reports nothing. JAX's programs load their
        data with torch, too.
        """
        pids = {pid for gpu in gpus for pid in self._its_pids(gpu)}
        has_torch = any(has_library(pid, "libc10_cuda") for pid in pids)
        return has_torch and not any(has_library(pid, name) for pid in pids for name in _TAKE_ALL)

    def _follow(
        self,
        current: Measurement,
        held: Sequence[int | None],
        attempt: Attempt,
        gpus: Sequence[GpuInfo],
    ) -> None:
        """Raise the peaks, and adapt the reservation to them."""
        for gpu, size in zip(gpus, held, strict=True):
            if size is not None and size > current.peaks.get(gpu.uuid, 0):
                current.peaks[gpu.uuid] = size
                current.totals[gpu.uuid] = gpu.total_bytes
                current.grew_at = time.monotonic()
        peak = current.peak
        if not peak:
            return
        if not current.history or peak > current.history[-1]:
            current.history.append(peak)
        config = self.job.plan.config
        total = current.total
        # A job that was measured has grown, whatever its allocator.
        if not current.is_settled and took_all_at_once(
            current.history, total, has_allocator=bool(attempt.memory) or self._uses_torch(gpus)
        ):
            current.takes_all = True
            self._warn(
                f"the program took {mib(peak)} of {mib(total)} at once, as JAX and TensorFlow do "
                "whatever they need: the reservation stays at min_gpu_memory_mb"
            )
            return
        was_settled = current.is_settled
        current.is_settled = was_settled or is_measured(
            current.steps,
            saved=current.has_saved or self._is_probe,
            quiet_seconds=time.monotonic() - current.grew_at,
        )
        need = with_margin(peak)
        # A declared figure stands, and so does that of an earlier run until this one is measured.
        if not config.measures_memory or not current.is_settled:
            need = max(need, config.min_gpu_memory_bytes, self._earlier_bytes)
        is_open = config.packs_gpus and current.is_settled
        most = MOST_TOGETHER if is_open else None
        reserved = self.job.driver.devices.queue.follow(held, need, most)
        if current.is_settled and not was_settled:
            shown = "" if reserved is None else f"; {mib(reserved)} are reserved by now"
            log.info("the job holds at most %s of a GPU%s", mib(peak), shown)
            self._remember(current, attempt, is_whole=False)

    def evidence(self, attempt: Attempt, history: History) -> Attempt:
        """Return the attempt with the peak of its GPU memory."""
        current = self.current
        self.current = None
        # What a program takes that takes all says nothing of what it needs.
        if current is None or not current.peak or current.takes_all:
            return attempt
        # Torch also counts what it held for less than a second, between two samples.
        fullest = max(current.peaks, key=current.peaks.__getitem__)
        current.peaks[fullest] = max(current.peak, peak_by_torch(attempt.memory))
        if current.is_settled:
            self._earlier_bytes = to_reserve(current.peak, current.total)
            self.job.driver.devices.raise_need(self._earlier_bytes)
        if current.is_settled or attempt.failure is None:
            has_ended = attempt.failure is None and attempt.resumed_from is None
            self._remember(current, attempt, is_whole=current.is_settled and has_ended)
        return replace(attempt, memory={**attempt.memory, PEAK: current.peak})

    def _remember(self, current: Measurement, attempt: Attempt, *, is_whole: bool) -> None:
        """Keep the peak for later runs of the same job at the same micro-batch."""
        gpus = attempt.spec.gpus
        is_kept = self.job.plan.config.measures_memory and not current.is_split
        if is_kept and gpus:
            size = attempt.spec.batch_size
            job = fingerprint_of(self.job.plan)
            remember(job, gpus[0].name, size, current.peak, is_whole=is_whole)

    def _warn(self, line: str) -> None:
        """Log a line once."""
        if line not in self._warned:
            self._warned.add(line)
            log.warning("%s", line)


def _has_others(queue: HostQueue, uuid: str) -> bool:
    """Return whether another job of the queue is on a GPU. True if that is unknown."""
    try:
        return any(uuid in job.gpus for job in queue.others())
    except QueueError:
        return True
