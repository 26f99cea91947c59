"""The GPUs that a new job of this machine could have now."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from robust_train.gpu.allocation import allocated_by
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.visible import visible_gpus
from robust_train.queue.exclusions import mark_excluded, read_exclusions
from robust_train.queue.order import GpuReservation, QueueRules, WaitingJob
from robust_train.queue.queue_dir import directory_for
from robust_train.queue.queue_rules import read_rules
from robust_train.queue.queued_job import split
from robust_train.queue.reservations import boottime, existing_registry
from robust_train.queue.scheduler import open_to
from robust_train.values import MIB, GpuInfo

_BEHIND_ALL = 10**15


@dataclass(frozen=True)
class GpuRoom:
    """A GPU and what a new job can count on there."""

    gpu: GpuInfo  # as NVML reports it
    # free, less what others have reserved and not taken yet; 0 where no new job may start now
    usable_bytes: int
    why_not: str | None = None  # in that case the reason


def read_rooms(
    cfg: DictConfig, environ: Mapping[str, str]
) -> tuple[tuple[GpuRoom, ...], str | None]:
    """Return the GPUs for a job with this config that starts now, or why there are none.

    Args:
        cfg: a complete config: ``gpu_queue``, ``gpu_queue_dir``, ``gpu_jobs_per_device`` and
            ``min_gpu_memory_mb`` count.
        environ: whose CUDA_VISIBLE_DEVICES bounds the choice.
    """
    visible = visible_gpus(read_inventory(processes=False), environ)
    gpus: Sequence[GpuInfo] = visible.gpus
    waiting: Sequence[WaitingJob] = ()
    reservations: Sequence[GpuReservation] = ()
    rules = QueueRules()
    queues = cfg.gpu_queue and gpus and allocated_by(environ) is None
    with existing_registry(directory_for(cfg.gpu_queue_dir, environ)) as registry:
        if registry is not None and queues:
            gpus = mark_excluded(visible.gpus, read_exclusions(registry.directory))
            jobs = registry.jobs()
            waiting, reservations = split(jobs)
            rules = read_rules(registry.directory, jobs)
    now = boottime()
    need, uuids = cfg.min_gpu_memory_mb * MIB, frozenset(gpu.uuid for gpu in gpus)
    me = WaitingJob("", _BEHIND_ALL, need, uuids, cfg.gpu_jobs_per_device, now, user=os.geteuid())
    found = open_to(me, waiting, reservations, gpus, now, rules)
    usable = {gpu.uuid: gpu.free_bytes for gpu in found}
    rooms = tuple(
        GpuRoom(gpu, usable[gpu.uuid])
        if gpu.uuid in usable
        else GpuRoom(gpu, 0, _why_not(gpu, need, reservations))
        for gpu in gpus
    )
    return rooms, None if rooms else visible.why_none


def _why_not(gpu: GpuInfo, need: int, reservations: Sequence[GpuReservation]) -> str:
    if gpu.unusable is not None:
        return gpu.unusable
    owners = [r.owner or r.id for r in reservations if r.gpu in (gpu.uuid, None)]
    if owners:
        return f"reserved by {'; '.join(owners)}"
    if gpu.free_bytes < need:
        return f"less than min_gpu_memory_mb={need // MIB} is free"
    return "kept for jobs that came earlier"
