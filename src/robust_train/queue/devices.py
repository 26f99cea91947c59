"""Acquire the GPUs for a job's first attempt, and offer GPUs for the attempts after it.

The launcher's driver holds a :class:`Devices`, which joins what NVML shows, the job's keys and the
host's queue.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from robust_train.config.schema import RobustConfig
from robust_train.gpu.footprint import estimate_footprint, learn_context_bytes
from robust_train.gpu.inventory import NO_DRIVER, ask_health_again, close_session, read_inventory
from robust_train.gpu.select import can_be_one_of, could_ever_fit, rank
from robust_train.gpu.visible import Visible, allocated_by, visible_gpus
from robust_train.model.attempt import Attempt
from robust_train.model.errors import ConfigError, NoDeviceError
from robust_train.model.events import Event, MemoryReported
from robust_train.model.failure import FailureKind
from robust_train.model.gpu import Group, gpus_of
from robust_train.model.spec import Room
from robust_train.policy.context import Offers
from robust_train.policy.gpus import gpus_to_exclude
from robust_train.queue.host_queue import GpuRequest, HostQueue
from robust_train.queue.queue_dir import directory_for
from robust_train.queue.registry import QueuedJob
from robust_train.queue.waiting import NoGpu, Waiting, WaitStatus, wait_for_gpus, why_pointless
from robust_train.readable import MIB

log = logging.getLogger("robust_train")

# How long to wait until the driver returns an attempt's memory, and how much may stay missing.
_SETTLE_SECONDS = 5.0
_SETTLE_BAND_BYTES = 256 * MIB


class FreeBytes(NamedTuple):
    """Free memory of a GPU before and after an attempt, in bytes, or None if unknown."""

    before: int | None = None
    after: int | None = None


class Devices:
    """The devices as one job sees them, and its reservations in the host's queue."""

    def __init__(
        self,
        config: RobustConfig,
        job_name: str,  # shown to the other jobs of the host
        # Its CUDA_VISIBLE_DEVICES bounds the choice.
        environ: Mapping[str, str],
        run_dir: Path,
        # Waits a number of seconds. An exception ends the waiting.
        sleep: Callable[[float], None],
        # Called with each status of the waiting.
        on_wait: Callable[[WaitStatus], None] = lambda status: None,
        # Marks the job's processes and its record in the queue. Empty: a new token.
        token: str = "",
        *,
        job_id: str = "",
        in_sweep: bool = False,
    ) -> None:
        self._config = config
        self._environ = environ
        self._sleep = sleep
        self._on_wait = on_wait
        self._need_bytes = config.min_gpu_memory_bytes
        self._other_ranks_bytes = 0  # the most that a rank other than 0 has reserved
        self._free_before: dict[str, int] = {}
        # The GPU that the config names, if any.
        self._named: tuple[str, ...] = ()
        # The time when the job got its GPUs, by the monotonic clock.
        self.acquired_at = -math.inf
        self._only: frozenset[str] | None = None  # UUIDs that ``device`` lists
        job = QueuedJob(
            job=job_id,
            name=job_name,
            run_dir=str(run_dir),
            jobs_per_device=config.gpu_jobs_per_device,
            urgency=config.urgency(in_sweep=in_sweep),
        )
        directory = _queue_directory(config, environ)
        self.queue = HostQueue(directory, self._read, job, token)

    def acquire(self, fewer: Sequence[int] = ()) -> Group:
        """Return ``num_gpus`` GPUs to start on, or none for the CPU.

        If not that many become free in time, any of the numbers ``fewer`` will do.

        Raises:
            NoDeviceError: no GPU is suitable, and the CPU is not allowed.
            ConfigError: ``device`` names a GPU that this machine does not have, or a single GPU for
                a job of several, or the job wants more than the GPUs could ever give.
        """
        config = self._config
        wanted = "auto" if config.picks_gpu else config.device
        if wanted == "cpu":
            return ()
        if config.num_gpus > 1 and wanted != "auto":
            raise ConfigError(
                f"num_gpus={config.num_gpus} cannot be combined with "
                f"device={wanted}, which is one GPU: leave device out, and name the GPUs "
                "that may be taken in CUDA_VISIBLE_DEVICES"
            )
        is_used = config.names_several or config.device in ("auto", "cuda")
        if config.auto_device and not is_used:
            log.warning("device=%s is not used because auto_device=true", config.device)
        visible = self._read(False)
        # Without GPUs, the warning is the reason below.
        if visible.warning and visible.gpus:
            log.warning("%s", visible.warning)
        if not visible.gpus:
            return self._without_gpus(visible)
        if config.names_several:
            self._only = _several(config.device, visible)
            visible = self._read(False)
        self._named = _named(wanted, visible)
        request = self._request(config.min_gpu_memory_bytes, self._named)
        # An unreadable GPU may have more, and an administrator may open a prohibited GPU.
        changes = any(not could_ever_fit(gpu, 1) for gpu in visible.gpus)
        default_bytes = RobustConfig.min_gpu_memory_mb * MIB
        if config.num_gpus > 1 or config.min_gpu_memory_bytes > default_bytes:
            least = replace(request, count=min(fewer, default=request.count))
            pointless = "" if changes else why_pointless(least, visible)
            if pointless:
                raise ConfigError(pointless)
        group = self._wait(request, itertools.chain([request.count], fewer))
        if isinstance(group, NoGpu):
            return self._cpu_or_nothing(group.reason, has_gpus=True)
        if len(group) < request.count:
            log.warning(
                "num_gpus=%d, but only %d are available: training begins with these (min_num_gpus)",
                request.count,
                len(group),
            )
        names = (f"GPU {gpu.index} ({gpu.name}, {gpu.uuid})" for gpu in group)
        log.info("using %s", ", ".join(names))
        return group

    def offers(self) -> Offers:
        """Return the GPUs for the next attempt: those that could be taken now, and those in use.

        The first are best first, with the usable memory as ``free_bytes``. The others are healthy
        GPUs that other jobs have.
        """
        count = self._config.num_gpus
        least = self._config.min_gpu_memory_bytes
        free = [gpu for gpu in self.queue.open_gpus() if can_be_one_of(gpu, count)]
        gpus = tuple(rank(free, least))
        uuids = {gpu.uuid for gpu in gpus}
        held = (
            gpu
            for gpu in self.queue.read().gpus
            if gpu.uuid not in uuids
            and gpu.unusable is None
            and gpu.total_bytes >= least
            and can_be_one_of(gpu, count)
        )
        return Offers(gpus, tuple(held))

    def take(self, group: Group) -> bool:
        """Reserve the next attempt's GPUs in place of the last attempt's.

        Returns:
            False if another job has taken any of them, so that a new choice is needed.
        """
        offered = min((gpu.free_bytes for gpu in group), default=0)
        return self.queue.take([gpu.uuid for gpu in group], self._need_bytes, offered)

    def who_waits(self) -> QueuedJob | None:
        """Return the job of another user with fewer GPUs that waits for GPUs of this job."""
        return self.queue.who_waits()

    def leave(self, count: int) -> Room:
        """Release the GPUs, and return what the job then waits for, behind all waiting jobs."""
        # The job's waiting interpreters have its mark but no attempt: no GPU is kept for them.
        self.queue.take((), 0)
        return Room((), self._need_bytes, counts=(count,))

    def begin(self, group: Group) -> None:
        """Note the free memory before an attempt in another process."""
        self._free_before = free_bytes(group)

    def on_event(self, event: Event) -> None:
        """Report the memory that the attempt has reserved on its GPUs to the queue."""
        if isinstance(event, MemoryReported) and event.reserved is not None:
            rank = event.rank or 0
            self.queue.report(event.reserved, rank)
            if rank > 0:  # rank 0's peak is in the outcome, which is more exact
                self._other_ranks_bytes = max(self._other_ranks_bytes, event.reserved)

    def ended(self, attempt: Attempt) -> FreeBytes:
        """Record that an attempt's processes have ended.

        Returns:
            The free memory, before and after, of the GPU on which it failed, if that is a GPU of
            the job.
        """
        group = attempt.spec.gpus
        failure = attempt.failure
        self._learn(attempt)
        if failure is None:
            return FreeBytes()
        self.queue.drain()
        if failure.kind is FailureKind.DEVICE_FAULT:
            ask_health_again()
            suspects = gpus_of(group, failure.rank)
            excluded = gpus_to_exclude(failure, suspects, free_bytes(suspects))
            for uuid, reason in excluded.items():
                self.queue.exclude(uuid, reason)
        before = self._free_before
        self._free_before = {}
        if not before:
            return FreeBytes()
        after = self._settle(group, before)
        failed_on = gpus_of(group, failure.rank or 0)
        uuid = failed_on[0].uuid if failed_on else ""
        return FreeBytes(before.get(uuid), after.get(uuid))

    def wait_for_room(self, room: Room, *, for_ever: bool) -> Group | NoGpu:
        """Wait for free memory, on the job's own GPUs or, with the old ticket, on any GPUs.

        Args:
            room: the memory and the GPUs to wait for.
            for_ever: wait without a limit, at the same queue position.

        Returns:
            The GPUs that have it, or why the waiting ended.
        """
        only = room.gpu_uuids or self._named
        request = self._request(room.free_bytes, only, room.exclude)
        if for_ever:
            request = replace(request, timeout_seconds=math.inf)
        if not room.gpu_uuids:
            return self._wait(request, room.counts)
        # These GPUs are reserved already.
        alone = HostQueue(None, self._read)
        return Waiting(request, alone, self._on_wait, self._sleep).run()

    def _wait(self, request: GpuRequest, counts: Iterable[int]) -> Group | NoGpu:
        """Wait for the first of ``counts``. When the time is over, try the others once."""
        deadline = time.monotonic() + request.timeout_seconds
        why = NoGpu("no GPU is wanted")
        for number, count in enumerate(counts):
            left = max(deadline - time.monotonic(), 0.0)
            request = replace(request, count=count, timeout_seconds=left)
            result = wait_for_gpus(self.queue, request, self._on_wait, self._sleep)
            if not isinstance(result, NoGpu):
                self.acquired_at = time.monotonic()
                return result
            if number == 0 or left:  # only a request that has waited gives the reason
                why = result
        return why

    def _request(
        self, min_bytes: int, only: Sequence[str], exclude: Sequence[str] = ()
    ) -> GpuRequest:
        """Return a request for all GPUs of ``only``, or for as many as the job needs."""
        config = self._config
        minutes = config.gpu_wait_timeout_minutes if config.wait_for_gpu else 0
        return GpuRequest(
            min_bytes=min_bytes,
            timeout_seconds=60 * minutes,
            interval_seconds=config.gpu_check_interval_seconds,
            only=frozenset(only),
            exclude=frozenset(exclude),
            count=len(only) or config.num_gpus,
        )

    def _read(self, processes: bool) -> Visible:
        visible = visible_gpus(read_inventory(processes=processes), self._environ)
        if self._only is None:
            return visible
        return replace(visible, gpus=tuple(gpu for gpu in visible.gpus if gpu.uuid in self._only))

    def _learn(self, attempt: Attempt) -> None:
        """Learn from an attempt how much memory the next attempt needs."""
        group = attempt.spec.gpus
        shown = attempt.memory
        peak = max(shown.get("max_allocated", 0), shown.get("reserved", 0), self._other_ranks_bytes)
        self._other_ranks_bytes = 0
        if peak:
            name = group[0].name if group else ""
            learn_context_bytes(name, shown)
            needed = estimate_footprint(peak, name)
            # the estimate may be more than there was, and no GPU would ever do
            had = max((self._free_before.get(gpu.uuid, gpu.free_bytes) for gpu in group), default=0)
            needed = min(needed, max(had, peak))
            self._need_bytes = max(self._config.min_gpu_memory_bytes, needed)

    def _settle(self, group: Group, before: Mapping[str, int]) -> Mapping[str, int]:
        """Wait a few seconds for the memory of an attempt, which NVIDIA's driver may return late.

        Returns:
            The free memory after the wait, by UUID.
        """
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            now = _free_bytes(group)
            is_back = all(
                now[uuid] >= before[uuid] - _SETTLE_BAND_BYTES
                for uuid in now.keys() & before.keys()
            )
            if is_back or time.monotonic() >= deadline:
                return now
            self._sleep(0.05)

    def _without_gpus(self, visible: Visible) -> Group:
        """Return an empty group for the CPU if no GPU is visible.

        Raises:
            ConfigError: ``device`` needs a GPU.
            NoDeviceError: the CPU is not allowed.
        """
        why = visible.why_none
        if self._config.needs_gpu:
            device = self._config.device
            raise ConfigError(f"device={device}: no such GPU here: {why}")
        has_gpus = visible.inventory.may_have_gpus and not visible.hidden_on_purpose
        return self._cpu_or_nothing(why, has_gpus=has_gpus)

    def _cpu_or_nothing(self, reason: str, *, has_gpus: bool) -> Group:
        if not self._config.allow_cpu_fallback:
            raise NoDeviceError(f"{reason}, and allow_cpu_fallback is false")
        number = self._config.num_gpus
        if number > 1:
            log.warning(
                "num_gpus=%d: %s: training on the CPU in one process (in %d with device=cpu)",
                number,
                reason,
                number,
            )
        elif has_gpus:
            log.warning("%s: training on the CPU, which may take many times as long", reason)
        else:
            log.info(
                "%s: training on the CPU (details: robust-train doctor)",
                "no GPU here" if reason == NO_DRIVER else reason,
            )
        return ()


def free_bytes(group: Group) -> dict[str, int]:
    """Return the free memory of the GPUs that answer, in bytes, by UUID.

    It closes the session: a training takes days, and an open session blocks a reset of any GPU.
    """
    try:
        return _free_bytes(group)
    finally:
        close_session()


def _free_bytes(group: Group) -> dict[str, int]:
    uuids = {gpu.uuid for gpu in group}
    gpus = read_inventory(processes=False).gpus if uuids else ()
    return {gpu.uuid: gpu.free_bytes for gpu in gpus if gpu.uuid in uuids}


def name_for_trainer(group: Group, environ: Mapping[str, str], *, own_process: bool) -> str:
    """Return the value of ``cfg.device`` for the trainer.

    Args:
        group: the attempt's GPUs. Each rank sets its own in its process.
        environ: the launcher's environment.
        own_process: whether the trainer's process sees only these GPUs.
    """
    if not group:
        return "cpu"
    if own_process:
        return "cuda:0"
    visible = visible_gpus(read_inventory(processes=False), environ)
    return f"cuda:{visible.ordinal(group[0].uuid) or 0}"


def _queue_directory(config: RobustConfig, environ: Mapping[str, str]) -> Path | None:
    """Return the queue directory of the host, or None if this job does not queue."""
    queue = config.gpu_queue
    if queue is False:
        return None
    owner = allocated_by(environ)
    if owner:
        log.info("the GPUs are allocated by %s: the host's own queue is not used", owner)
        return None
    return directory_for(None if queue is True else str(queue), environ)


def _several(devices: str, visible: Visible) -> frozenset[str]:
    """Return the UUIDs of the visible GPUs that ``devices`` lists."""
    return frozenset(uuid for device in devices.split(",") for uuid in _named(device, visible))


def _named(device: str, visible: Visible) -> tuple[str, ...]:
    """Return the UUID of the visible GPU that ``device`` names, if any."""
    if device == "auto":
        return ()
    if device.startswith("cuda"):
        matches = visible.gpus[int(device.partition(":")[2] or 0) :][:1]
    else:
        matches = tuple(gpu for gpu in visible.gpus if gpu.uuid.startswith(device))
    if len(matches) == 1:
        return (matches[0].uuid,)
    listed = ", ".join(f"cuda:{i} ({gpu.uuid})" for i, gpu in enumerate(visible.gpus))
    raise ConfigError(f"device={device}: no such GPU here; there are {listed}")
