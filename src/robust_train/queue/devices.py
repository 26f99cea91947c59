"""Finds the GPUs of a job: acquires them for its first attempt, and offers them for later attempts.

The driver (:mod:`robust_train.launcher.driver`) holds one :class:`Devices` per job, in the
launcher's process. It combines the GPUs that NVML lists with the job's keys and the host's queue.
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
from robust_train.model.gpu import Group, select_gpus
from robust_train.model.spec import Room
from robust_train.policy.context import Offers
from robust_train.policy.gpus import gpus_to_exclude
from robust_train.queue.host_queue import GpuRequest, HostQueue
from robust_train.queue.queue_dir import directory_for
from robust_train.queue.registry import QueuedJob
from robust_train.queue.waiting import NoGpu, Waiting, WaitStatus, wait_for_gpus, why_pointless
from robust_train.readable import MIB

log = logging.getLogger("robust_train")

# How long to wait until the driver has freed an attempt's memory, and how much may stay missing.
_SETTLE_SECONDS = 5.0
_SETTLE_BAND_BYTES = 256 * MIB


class FreeBytes(NamedTuple):
    """Free memory of a GPU before and after an attempt, in bytes, or None if unknown."""

    before: int | None = None
    after: int | None = None


class Devices:
    """Finds devices for one job, and reserves them in the host's queue.

    Args:
        config: the job's config.
        job_name: the name that other jobs of the host see.
        environ: the launcher's environment, whose CUDA_VISIBLE_DEVICES limits the choice.
        run_dir: the job's run folder.
        sleep: waits for some seconds. An exception that it raises ends the wait.
        on_wait: called with each status of a wait.
        token: marks the job's processes and its record in the queue. Empty for a new token.
        job_id: the job's id, which the queue shows.
        in_sweep: whether the job belongs to a sweep.
    """

    def __init__(
        self,
        config: RobustConfig,
        job_name: str,
        environ: Mapping[str, str],
        run_dir: Path,
        sleep: Callable[[float], None],
        on_wait: Callable[[WaitStatus], None] = lambda status: None,
        token: str = "",
        *,
        job_id: str = "",
        in_sweep: bool = False,
    ) -> None:
        self._config = config
        self._environ = environ
        self._sleep = sleep
        self._on_wait = on_wait
        # Memory that the next attempt needs on each GPU, learned from earlier attempts.
        self._need_bytes = config.min_gpu_memory_bytes
        # Memory that an attempt was measured to need, at least.
        self._measured_bytes = 0
        self._other_ranks_bytes = 0  # the most memory that a rank other than 0 has reserved
        self._free_before: dict[str, int] = {}  # free memory before the attempt, by UUID
        self._named: tuple[str, ...] = ()  # the UUID of the GPU that the config names, if any
        # When the job acquired its GPUs, by the monotonic clock.
        self.acquired_at = -math.inf
        # UUIDs of the GPUs that ``device`` lists, None if it lists no GPUs.
        self._only: frozenset[str] | None = None
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
        """Wait for the job's GPUs, reserve them and return them, or return no GPU for the CPU.

        Args:
            fewer: numbers of GPUs to accept if ``num_gpus`` do not become free in time.

        Raises:
            NoDeviceError: no GPU is suitable, and the CPU is not allowed.
            ConfigError: ``device`` names a GPU that this machine does not have, or a single GPU for
                a job of several GPUs, or the job needs more memory than the GPUs have.
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
        agrees = config.names_several or config.device in ("auto", "cuda")
        if config.auto_device and not agrees:
            log.warning("device=%s is not used because auto_device=true", config.device)
        visible = self._read(False)
        # If no GPU is visible, the next lines report the warning as the reason.
        if visible.warning and visible.gpus:
            log.warning("%s", visible.warning)
        if not visible.gpus:
            return self._without_gpus(visible)
        if config.names_several:
            self._only = _find_listed(config.device, visible)
            visible = self._read(False)
        self._named = _find_named(wanted, visible)
        request = self._request(config.min_gpu_memory_bytes, self._named)
        # A GPU that no job can use now may still become usable: an administrator may change its
        # compute mode, or it may become readable and turn out to be larger.
        may_change = any(not could_ever_fit(gpu, 1) for gpu in visible.gpus)
        default_bytes = RobustConfig.min_gpu_memory_mb * MIB
        is_demanding = config.num_gpus > 1 or config.min_gpu_memory_bytes > default_bytes
        if is_demanding and not may_change:
            least = replace(request, count=min(fewer, default=request.count))
            pointless = why_pointless(least, visible)
            if pointless:
                raise ConfigError(pointless)
        group = self._wait(request, itertools.chain([request.count], fewer))
        if isinstance(group, NoGpu):
            return self._fall_back_to_cpu(group.reason, has_gpus=True)
        if len(group) < request.count:
            log.warning(
                "num_gpus=%d, but only %d are available: training starts with these (min_num_gpus)",
                request.count,
                len(group),
            )
        names = (f"GPU {gpu.index} ({gpu.name}, {gpu.uuid})" for gpu in group)
        log.info("using %s", ", ".join(names))
        return group

    def offers(self) -> Offers:
        """Return the GPUs that the next attempt could use.

        Returns:
            The GPUs that are available now, best first, with the usable memory as ``free_bytes``,
            and the healthy GPUs that other jobs use.
        """
        count = self._config.num_gpus
        least = self._config.min_gpu_memory_bytes
        free = [gpu for gpu in self.queue.find_open_gpus() if can_be_one_of(gpu, count)]
        available = tuple(rank(free, least))
        uuids = {gpu.uuid for gpu in available}
        in_use = []
        for gpu in self.queue.read().gpus:
            is_healthy = gpu.unusable is None and gpu.total_bytes >= least
            if gpu.uuid not in uuids and is_healthy and can_be_one_of(gpu, count):
                in_use.append(gpu)
        return Offers(available, tuple(in_use))

    def take(self, group: Group) -> bool:
        """Reserve the next attempt's GPUs in place of the last attempt's.

        Returns:
            False if another job has taken any of them, so that a new choice is needed.
        """
        offered = min((gpu.free_bytes for gpu in group), default=0)
        return self.queue.take([gpu.uuid for gpu in group], self._next_need_bytes, offered)

    @property
    def _next_need_bytes(self) -> int:
        return max(self._need_bytes, self._measured_bytes)

    def raise_need(self, measured_bytes: int) -> None:
        """Reserve no less than this for later attempts: an attempt before them was measured."""
        self._measured_bytes = max(self._measured_bytes, measured_bytes)

    def find_job_to_yield_to(self) -> QueuedJob | None:
        """Return the waiting job to which this job should release its GPUs, if any."""
        return self.queue.find_job_to_yield_to()

    def release_for_others(self, count: int) -> Room:
        """Release the GPUs, and return the room for which the job then waits, at the queue's end.

        Args:
            count: the number of GPUs to wait for.
        """
        # No GPU is kept for the job's standby interpreters, although they have its mark.
        self.queue.take((), 0)
        return Room((), self._next_need_bytes, counts=(count,))

    def note_free_memory(self, group: Group) -> None:
        """Note the free memory before an attempt in another process."""
        self._free_before = read_free_bytes(group)

    def on_event(self, event: Event) -> None:
        """Report the memory that the attempt has reserved on its GPUs to the queue."""
        if isinstance(event, MemoryReported) and event.reserved is not None:
            rank = event.rank or 0
            self.queue.report(event.reserved, rank)
            if rank > 0:  # the attempt's record has a more exact peak of rank 0
                self._other_ranks_bytes = max(self._other_ranks_bytes, event.reserved)

    def record_end(self, attempt: Attempt) -> FreeBytes:
        """Learn from an attempt whose processes have ended, and exclude a GPU that failed.

        Returns:
            The free memory of the GPU on which the attempt failed, before and after the attempt.
        """
        group = attempt.spec.gpus
        failure = attempt.failure
        self._learn_need(attempt)
        if failure is None:
            return FreeBytes()
        self.queue.drain()
        if failure.kind is FailureKind.DEVICE_FAULT:
            ask_health_again()
            suspects = select_gpus(group, failure.rank)
            excluded = gpus_to_exclude(failure, suspects, read_free_bytes(suspects))
            for uuid, reason in excluded.items():
                self.queue.exclude(uuid, reason)
        before = self._free_before
        self._free_before = {}
        if not before:
            return FreeBytes()
        after = self._await_memory(group, before)
        failed_on = select_gpus(group, failure.rank or 0)
        uuid = failed_on[0].uuid if failed_on else ""
        return FreeBytes(before.get(uuid), after.get(uuid))

    def wait_for_room(self, room: Room, *, for_ever: bool) -> Group | NoGpu:
        """Wait for free memory, on the job's own GPUs or, with the old ticket, on any GPUs.

        Args:
            room: the memory and the GPUs to wait for.
            for_ever: whether to wait without a time limit.

        Returns:
            The GPUs that have enough free memory, or the reason why the wait ended.
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
        """Wait for the first number of GPUs in ``counts``, then try each other number once."""
        deadline = time.monotonic() + request.timeout_seconds
        why = NoGpu("no GPU is wanted")
        for number, count in enumerate(counts):
            left = max(deadline - time.monotonic(), 0.0)
            request = replace(request, count=count, timeout_seconds=left)
            result = wait_for_gpus(self.queue, request, self._on_wait, self._sleep)
            if not isinstance(result, NoGpu):
                self.acquired_at = time.monotonic()
                return result
            if number == 0 or left:  # the reason comes from a request that has waited
                why = result
        return why

    def _request(
        self, min_bytes: int, only: Sequence[str], exclude: Sequence[str] = ()
    ) -> GpuRequest:
        """Return a request for all GPUs in ``only``, or for ``num_gpus`` GPUs if it is empty."""
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
        """Return the visible GPUs, limited to the GPUs that ``device`` lists."""
        visible = visible_gpus(read_inventory(processes=processes), self._environ)
        if self._only is None:
            return visible
        return replace(visible, gpus=tuple(gpu for gpu in visible.gpus if gpu.uuid in self._only))

    def _learn_need(self, attempt: Attempt) -> None:
        """Learn from an attempt how much memory the next attempt needs."""
        group = attempt.spec.gpus
        shown = attempt.memory
        peak = max(shown.get("max_allocated", 0), shown.get("reserved", 0), self._other_ranks_bytes)
        self._other_ranks_bytes = 0
        if peak:
            name = group[0].name if group else ""
            learn_context_bytes(name, shown)
            needed = estimate_footprint(peak, name)
            # The estimate may exceed the memory of every GPU, so it is limited by the memory that
            # the attempt had.
            had = max((self._free_before.get(gpu.uuid, gpu.free_bytes) for gpu in group), default=0)
            needed = min(needed, max(had, peak))
            self._need_bytes = max(self._config.min_gpu_memory_bytes, needed)

    def _await_memory(self, group: Group, before: Mapping[str, int]) -> Mapping[str, int]:
        """Wait a few seconds for the memory of an attempt, which NVIDIA's driver may free late.

        Returns:
            The free memory after the wait, by UUID.
        """
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            now = _read_free_bytes(group)
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
        return self._fall_back_to_cpu(why, has_gpus=has_gpus)

    def _fall_back_to_cpu(self, reason: str, *, has_gpus: bool) -> Group:
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
            if reason == NO_DRIVER:
                reason = "no GPU here"
            log.info("%s: training on the CPU (details: robust-train doctor)", reason)
        return ()


def read_free_bytes(group: Group) -> dict[str, int]:
    """Return the free memory of the GPUs that answer, in bytes, by UUID.

    This closes the NVML session: training takes days, and an open session blocks a reset of GPUs.
    """
    try:
        return _read_free_bytes(group)
    finally:
        close_session()


def _read_free_bytes(group: Group) -> dict[str, int]:
    uuids = {gpu.uuid for gpu in group}
    gpus = read_inventory(processes=False).gpus if uuids else ()
    return {gpu.uuid: gpu.free_bytes for gpu in gpus if gpu.uuid in uuids}


def name_for_trainer(group: Group, environ: Mapping[str, str], *, own_process: bool) -> str:
    """Return the value of ``cfg.device`` for the trainer.

    Args:
        group: the attempt's GPUs. With several ranks, each rank's process replaces the value.
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
    """Return the host's queue directory, or None if this job does not use the queue."""
    queue = config.gpu_queue
    if queue is False:
        return None
    owner = allocated_by(environ)
    if owner:
        log.info("the GPUs are allocated by %s: the host's own queue is not used", owner)
        return None
    return directory_for(None if queue is True else str(queue), environ)


def select_usable_gpus(config: RobustConfig, visible: Visible) -> Group:
    """Return the visible GPUs that ``device`` names, all of them if it leaves the choice.

    Raises:
        ConfigError: ``device`` names a GPU that is not visible.
    """
    if config.names_several:
        uuids = _find_listed(config.device, visible)
    elif config.picks_gpu:
        return visible.gpus
    else:
        uuids = frozenset(_find_named(config.device, visible))
    return tuple(gpu for gpu in visible.gpus if gpu.uuid in uuids)


def _find_listed(devices: str, visible: Visible) -> frozenset[str]:
    """Return the UUIDs of the visible GPUs that ``devices`` lists."""
    return frozenset(uuid for device in devices.split(",") for uuid in _find_named(device, visible))


def _find_named(device: str, visible: Visible) -> tuple[str, ...]:
    """Return the UUID of the visible GPU that ``device`` names, or nothing for ``auto``.

    Raises:
        ConfigError: no GPU has that name, or several GPUs have it.
    """
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
