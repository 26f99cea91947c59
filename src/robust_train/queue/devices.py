"""Acquire the GPUs for a job's first attempt, and offer others for the next ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from robust_train.config.schema import RobustConfig
from robust_train.gpu.footprint import footprint, learn_context_bytes
from robust_train.gpu.inventory import ask_health_again, read_inventory
from robust_train.gpu.nvml_session import NO_DRIVER, close_session
from robust_train.gpu.select import can_be_one_of, could_ever_fit, rank
from robust_train.gpu.visible import Visible, allocated_by, visible_gpus
from robust_train.model.attempt import Attempt
from robust_train.model.errors import ConfigError, NoDevice
from robust_train.model.events import Event, MemoryReported
from robust_train.model.failure import FailureKind
from robust_train.model.gpu import GpuInfo, Group, gpus_of
from robust_train.model.spec import Room
from robust_train.policy.context import excluded_after
from robust_train.queue.host_queue import HostQueue
from robust_train.queue.queue_dir import directory_for
from robust_train.queue.waiting import (
    GpuRequest,
    NoGpu,
    WaitStatus,
    wait_for_gpu,
    why_pointless,
)
from robust_train.readable import MIB

log = logging.getLogger("robust_train")

FreeBytes = tuple[int | None, ...]
"""Free memory of each GPU of a group, in its order; None for one that does not answer."""

_SETTLE_SECONDS = 5.0
_SETTLE_BAND_BYTES = 256 * MIB


class Devices:
    """The devices as one job sees them, and what it has reserved of them."""

    def __init__(
        self,
        config: RobustConfig,
        job_name: str,  # shown to the other jobs of the host
        environ: Mapping[str, str],  # whose CUDA_VISIBLE_DEVICES bounds the choice
        run_dir: Path,
        sleep: Callable[
            [float], None
        ],  # how to wait; whatever it raises ends the waiting
        # called with each status of the waiting
        on_wait: Callable[[WaitStatus], None] = lambda status: None,
        token: str = "",  # the last part of the job's id in the host's queue; empty: any
    ) -> None:
        self._config = config
        self._environ = environ
        self._sleep = sleep
        self._on_wait = on_wait
        self._need_bytes = config.min_gpu_memory_bytes
        self._other_ranks_bytes = 0
        self._queue = HostQueue(
            _queue_directory(config, environ),
            name=job_name,
            run_dir=str(run_dir),
            jobs_per_device=config.gpu_jobs_per_device,
            read=self._read,
            token=token,
        )

    @property
    def job_id(self) -> str | None:
        """The job's id in the host's queue, None before it was there."""
        return self._queue.job_id

    @property
    def hold(self) -> tuple[int, ...]:
        """The descriptor that keeps the reservation alive, if there is one."""
        return () if self._queue.hold is None else (self._queue.hold,)

    def acquire(self, fewer: Sequence[int] = ()) -> Group:
        """Return the GPUs to start on, ``num_gpus`` of them, or none at all for the CPU.

        If there are not that many in time, one of the numbers ``fewer`` will do.

        Raises:
            NoDevice: nothing suitable, and the CPU is not allowed.
            ConfigError: ``device`` names a GPU that this machine does not have, or one GPU for a
                job of several; or more is wanted than the GPUs could ever give.
        """
        config = self._config
        if not config.auto_device and config.device == "cpu":
            return ()
        if config.num_gpus > 1 and not config.auto_device and config.device != "auto":
            raise ConfigError(
                f"num_gpus={config.num_gpus} does not go with auto_device=false "
                f"device={config.device}, which is one GPU: leave device out, and name the GPUs "
                "that may be taken in CUDA_VISIBLE_DEVICES"
            )
        if config.auto_device and config.device not in ("auto", "cuda"):
            log.warning("device=%s is not used because auto_device=true", config.device)
        visible = self._read(False)
        if visible.warning is not None and visible.gpus:  # else it is the reason below
            log.warning("%s", visible.warning)
        if not visible.gpus and not config.auto_device and config.device != "auto":
            raise ConfigError(
                f"device={config.device}: no such GPU here: {visible.why_none}"
            )
        if not visible.gpus:
            has_gpus = visible.may_have_gpus and not visible.hidden_on_purpose
            return self._cpu_or_nothing(visible.why_none, has_gpus=has_gpus)
        only = () if config.auto_device else _named(config.device, visible)
        request = self._request(config.min_gpu_memory_bytes, only)
        # an unreadable GPU may have more, and an administrator may open a prohibited one
        changes = any(not could_ever_fit(gpu, 1) for gpu in visible.gpus)
        default_bytes = RobustConfig.min_gpu_memory_mb * MIB
        asks_for_more = (
            config.num_gpus > 1 or config.min_gpu_memory_bytes > default_bytes
        )
        least = replace(request, count=min((request.count, *fewer)))
        if asks_for_more and not changes and (why := why_pointless(least, visible)):
            raise ConfigError(why)
        group = self._wait(request, (request.count, *fewer))
        if isinstance(group, NoGpu):
            return self._cpu_or_nothing(group.reason, has_gpus=True)
        if len(group) < request.count:
            log.warning(
                "num_gpus=%d, but only %d are available: training begins with these (min_num_gpus)",
                request.count,
                len(group),
            )
        log.info(
            "using %s", ", ".join(f"GPU {g.index} ({g.name}, {g.uuid})" for g in group)
        )
        return group

    def candidates(self) -> tuple[GpuInfo, ...]:
        """Return the GPUs that could be taken right now, best first; ``free_bytes`` as usable."""
        count, least = self._config.num_gpus, self._config.min_gpu_memory_bytes
        return tuple(
            rank([g for g in self._queue.open_gpus() if can_be_one_of(g, count)], least)
        )

    def held_by_others(self, candidates: Group) -> tuple[GpuInfo, ...]:
        """Return the healthy GPUs that the job may use and that are not among the candidates."""
        have = {gpu.uuid for gpu in candidates}
        return tuple(
            gpu
            for gpu in self._queue.read().gpus
            if gpu.uuid not in have
            and gpu.unusable is None
            and gpu.total_bytes >= self._config.min_gpu_memory_bytes
            and can_be_one_of(gpu, self._config.num_gpus)
        )

    def take(self, group: Group) -> bool:
        """Reserve the next attempt's GPUs in place of the last one's. Returns False if another job
        has one by now, and a new choice has to be made."""
        return self._queue.take(tuple(gpu.uuid for gpu in group), self._need_bytes)

    def on_event(self, event: Event) -> None:
        """Report to the queue how much memory the attempt has reserved on its GPUs."""
        if isinstance(event, MemoryReported) and event.reserved is not None:
            rank = event.rank or 0
            self._queue.report(event.reserved, rank)
            if rank > 0:  # rank 0's peak is in the outcome, and more exact
                self._other_ranks_bytes = max(self._other_ranks_bytes, event.reserved)

    def tick(self) -> None:
        """Record what an attempt in another process uses; to be called often."""
        self._queue.tick()

    def ended(self, attempt: Attempt, free_before: FreeBytes) -> FreeBytes:
        """Record that an attempt's processes are gone; wait for its memory if it failed. Returns
        bytes that are free on each of its GPUs after that; empty where it did not fail."""
        group, shown, failure = attempt.spec.gpus, attempt.memory, attempt.failure
        peak = max(
            shown.get("max_allocated", 0),
            shown.get("reserved", 0),
            self._other_ranks_bytes,
        )
        self._other_ranks_bytes = 0
        if peak:
            name = group[0].name if group else None
            if name is not None:
                learn_context_bytes(name, shown)
            self._need_bytes = max(
                self._config.min_gpu_memory_bytes, footprint(peak, name)
            )
        if failure is None:
            return ()
        self._queue.drain()
        if failure.kind is FailureKind.DEVICE_FAULT:
            ask_health_again()
            suspects = gpus_of(group, failure.rank)
            excluded = excluded_after(failure, suspects, free_bytes(suspects))
            for uuid, reason in excluded.items():
                self._queue.exclude(uuid, reason)
        return self._settle(group, free_before)

    def wait_for_room(self, room: Room) -> Group | NoGpu:
        """Wait for free memory: on any GPUs in the queue, with the old ticket, or on the job's own.
        Returns the GPUs that have it, else why the waiting ended."""
        request = self._request(room.free_bytes, room.gpu_uuids, room.exclude)
        if not room.gpu_uuids:
            return self._wait(request, room.counts)
        # these are reserved already
        return wait_for_gpu(
            request, read=self._read, on_status=self._on_wait, sleep=self._sleep
        )

    def _wait(self, request: GpuRequest, counts: Sequence[int]) -> Group | NoGpu:
        """Wait for the first of ``counts`` that can be had at all, then take what there is."""
        waits, why = request.wait, NoGpu("no GPU is wanted")
        for number, count in enumerate(counts):
            asked = replace(request, count=count, wait=waits)
            found = self._queue.wait(asked, self._on_wait, self._sleep)
            if not isinstance(found, NoGpu):
                return found
            if number == 0 or found.timed_out:
                why = found
            waits = waits and not found.timed_out
        return why

    def release(self) -> None:
        """Release what is reserved."""
        self._queue.release()

    def _request(
        self, min_bytes: int, only: Sequence[str], exclude: Sequence[str] = ()
    ) -> GpuRequest:
        """Return a request for all GPUs of ``only``, or for as many as the job needs."""
        return GpuRequest(
            min_bytes=min_bytes,
            wait=self._config.wait_for_gpu,
            timeout_seconds=60 * self._config.gpu_wait_timeout_minutes,
            interval_seconds=self._config.gpu_check_interval_seconds,
            only=frozenset(only) if only else None,
            exclude=frozenset(exclude),
            count=len(only) or self._config.num_gpus,
        )

    def _read(self, processes: bool) -> Visible:
        return visible_gpus(read_inventory(processes=processes), self._environ)

    def _settle(self, group: Group, free_before: FreeBytes) -> FreeBytes:
        """Wait some seconds for the memory of an attempt: the driver may return it with a delay."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            now = _free_bytes(group)
            is_back = all(
                after is None or before is None or after >= before - _SETTLE_BAND_BYTES
                for before, after in zip(free_before, now, strict=False)
            )
            if is_back or time.monotonic() >= deadline:
                return now
            self._sleep(0.05)

    def _cpu_or_nothing(self, reason: str, *, has_gpus: bool) -> Group:
        if not self._config.allow_cpu_fallback:
            raise NoDevice(f"{reason}, and allow_cpu_fallback is false")
        if has_gpus:
            log.warning(
                "%s: training on the CPU, which may take many times as long", reason
            )
        else:
            why = "no GPU here" if reason == NO_DRIVER else reason
            log.info("%s: training on the CPU (details: robust-train doctor)", why)
        return ()


def free_bytes(group: Group) -> FreeBytes:
    """Return the free memory of each of the GPUs.

    Closes the session: a training takes days, and an open one blocks a reset of any GPU.
    """
    try:
        return _free_bytes(group)
    finally:
        close_session()


def _free_bytes(group: Group) -> FreeBytes:
    if not group:
        return ()
    now = {gpu.uuid: gpu.free_bytes for gpu in read_inventory(processes=False).gpus}
    return tuple(now.get(gpu.uuid) for gpu in group)


def with_free_bytes(attempt: Attempt, before: FreeBytes, after: FreeBytes) -> Attempt:
    """Return the attempt with the free memory of the GPU on which it failed, if that is ours."""
    rank = 0 if attempt.failure is None else attempt.failure.rank or 0
    if attempt.failure is None or rank >= min(len(before), len(after)):
        return attempt
    return replace(
        attempt, gpu_free_before_bytes=before[rank], gpu_free_after_bytes=after[rank]
    )


def name_for_trainer(
    group: Group, environ: Mapping[str, str], *, own_process: bool
) -> str:
    """Return the value of ``cfg.device`` for the trainer.

    Args:
        group: the attempt's GPUs; each rank's own is set in its process.
        environ: the launcher's environment.
        own_process: the trainer's process sees only these GPUs.
    """
    if not group:
        return "cpu"
    if own_process:
        return "cuda:0"
    visible = visible_gpus(read_inventory(processes=False), environ)
    return f"cuda:{visible.ordinal(group[0].uuid) or 0}"


def _queue_directory(config: RobustConfig, environ: Mapping[str, str]) -> Path | None:
    """Return where the host's jobs queue; None if this one does not."""
    if not config.gpu_queue:
        return None
    owner = allocated_by(environ)
    if owner is not None:
        log.info(
            "the GPUs are allocated by %s: the host's own queue is not used", owner
        )
        return None
    return directory_for(config.gpu_queue_dir, environ)


def _named(device: str, visible: Visible) -> tuple[str, ...]:
    """Return the UUID of the GPU that ``device`` names among the visible ones; none for any."""
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
