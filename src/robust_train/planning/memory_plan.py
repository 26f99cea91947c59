"""What a job will need and where it fits: :func:`plan_memory`, behind ``robust-train plan``."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from omegaconf import DictConfig

from robust_train.config.batch import settle
from robust_train.config.schema import complete
from robust_train.errors import ConfigError
from robust_train.gpu.allocation import allocated_by
from robust_train.gpu.footprint import CACHE_FACTOR, CONTEXT_BYTES
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.visible import visible_gpus
from robust_train.planning import fit
from robust_train.planning.fit import Peak
from robust_train.queue.exclusions import mark_excluded, read_exclusions
from robust_train.queue.order import GpuReservation, QueueRules, WaitingJob
from robust_train.queue.queue_dir import directory_for
from robust_train.queue.queue_rules import read_rules
from robust_train.queue.queued_job import split
from robust_train.queue.reservations import boottime, existing_registry
from robust_train.queue.scheduler import open_to
from robust_train.settings import DeviceSettings, device_settings, target_of
from robust_train.values import MIB, GpuInfo

SCHEMA = 1
BUILT_IN = "robust_train.vision.trainer.train"
_ROWS = 4
_BEHIND_ALL = 10**15


@dataclass(frozen=True)
class PlannedSize:
    """One micro-batch: what its steps are predicted to take, as in :class:`Peak`."""

    batch_size: int
    accumulates: bool
    tensors_bytes: int
    parts: Mapping[str, int]
    allocated_bytes: int
    gpu_bytes: int
    fits_on: tuple[int, ...]  # indices (NVML's) of the GPUs on which it fits now


@dataclass(frozen=True)
class GpuFit:
    """A GPU as NVML reports it, and what a new job can count on there."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    # free, less what others have reserved and not taken yet; 0 where no new job may start now
    usable_bytes: int
    why_not: str | None  # in that case the reason
    largest_batch_now: int | None = None  # the largest micro-batch that fits now
    largest_batch_empty: int | None = None  # the same if the GPU were empty


@dataclass(frozen=True)
class MemoryPlan:
    """What a job will need, and where it fits."""

    model: str  # as in `model.name`
    dataset: str  # as in `dataset.name`
    precision: str  # number format of the forward pass
    batch_size: int  # the micro-batch that the config asks for
    rows: tuple[PlannedSize, ...]  # by micro-batch, smallest first
    gpus: tuple[GpuFit, ...]  # of this machine
    problem: str | None  # why there are none
    # where there are none, the largest micro-batch for GPUs of common sizes (bytes)
    sizes: Mapping[int, int | None]
    seconds: float  # that all this took, imports included

    def as_json(self) -> dict[str, object]:
        """Return the plan in JSON's types; sizes are bytes."""
        content = {"schema": SCHEMA, **asdict(self), "seconds": round(self.seconds, 2)}
        sizes = content.pop("sizes").items()
        return {
            **content,
            "allowances": {
                "cublas_bytes": fit.WORKSPACE_BYTES,
                "cache_factor": CACHE_FACTOR,
                "context_bytes": CONTEXT_BYTES,
            },
            "typical_gpus": [{"total_bytes": one, "largest_batch": batch} for one, batch in sizes],
        }


def plan_memory(
    cfg: Any,
    *,
    batch_sizes: Sequence[int] | None = None,
    environ: Mapping[str, str] | None = None,
    on_size: Callable[[int], None] = lambda size: None,
) -> MemoryPlan:
    """Predict the GPU memory of a job of the built-in trainer, and where it fits now.

    Needs no GPU, no data and no weights, and starts no CUDA. Imports torch.

    Args:
        cfg: as for :func:`robust_train.launch`: a Hydra config, or a mapping with any part of it.
        batch_sizes: micro-batches to predict; None: the configured one, twice that, and halves.
        environ: whose CUDA_VISIBLE_DEVICES bounds the GPUs; None: this process's.
        on_size: called with each micro-batch before it is predicted, which takes seconds.

    Raises:
        ConfigError: the config cannot be used, or is of another trainer.
    """
    started = time.monotonic()
    cfg = complete(cfg)
    settle(cfg)
    target = target_of(cfg)
    if target != BUILT_IN:
        raise ConfigError(
            f"trainer._target_={target}: only the built-in trainer can be planned; a short run of "
            "yours leaves its peak as peak_memory_bytes in summary.json"
        )
    from robust_train.planning.prediction import StepPredictor
    from robust_train.vision.datasets import training_images

    predictor = StepPredictor(cfg)

    @functools.cache
    def predict(size: int, accumulates: bool) -> Peak:
        on_size(size)
        return predictor.predict(size, accumulates=accumulates)

    images = training_images(cfg.dataset)
    environ = os.environ if environ is None else environ
    rooms, problem = read_rooms(device_settings(cfg, ""), environ)

    def does_fit(peak: Peak, free_bytes: int, total_bytes: int) -> bool:
        return fit.fits(peak, free_bytes, total_bytes, cfg.memory.fraction)

    def largest(free_bytes: int, total_bytes: int) -> int | None:
        found = free_bytes and fit.largest_batch(
            lambda size: predict(size, accumulates=_accumulates(cfg, size)),
            lambda peak: does_fit(peak, free_bytes, total_bytes),
            near=cfg.training.batch_size,
        )
        return min(found, images) if found else None

    def row(size: int, accumulates: bool) -> PlannedSize:
        peak = predict(size, accumulates=accumulates)
        on = (r.index for r in rooms if does_fit(peak, r.usable_bytes, r.total_bytes))
        return PlannedSize(
            **vars(peak),
            allocated_bytes=peak.allocated_bytes,
            gpu_bytes=peak.gpu_bytes,
            fits_on=tuple(on),
        )

    def with_largest(room: GpuFit) -> GpuFit:
        now, empty = largest(room.usable_bytes, room.total_bytes), room.total_bytes
        return replace(room, largest_batch_now=now, largest_batch_empty=largest(empty, empty))

    wanted = {(size, _accumulates(cfg, size)) for size in batch_sizes or _default_sizes(cfg)}
    return MemoryPlan(
        model=cfg.model.name,
        dataset=cfg.dataset.name,
        precision="bfloat16" if cfg.training.mixed_precision else "float32",
        batch_size=cfg.training.batch_size,
        rows=tuple(row(size, accumulates) for size, accumulates in sorted(wanted)),
        gpus=tuple(map(with_largest, rooms)),
        problem=problem,
        sizes={} if rooms else {size: largest(size, size) for size in fit.TYPICAL_SIZES},
        seconds=time.monotonic() - started,
    )


def _accumulates(cfg: DictConfig, batch_size: int) -> bool:
    """Return whether the launcher would make a step of several such micro-batches."""
    training = cfg.training
    if not cfg.preserve_effective_batch_size or batch_size > training.batch_size:
        return bool(training.gradient_accumulation_steps > 1)
    return bool(batch_size < training.batch_size * training.gradient_accumulation_steps)


def _default_sizes(cfg: DictConfig) -> list[int]:
    sizes = [2 * cfg.training.batch_size]
    while len(sizes) < _ROWS and sizes[-1] // 2 >= cfg.min_batch_size:
        sizes.append(sizes[-1] // 2)
    return sizes


def read_rooms(
    wanted: DeviceSettings, environ: Mapping[str, str]
) -> tuple[tuple[GpuFit, ...], str | None]:
    """Return the GPUs for a job that starts now, or why there are none. ``environ``:
    whose CUDA_VISIBLE_DEVICES bounds the choice."""
    visible = visible_gpus(read_inventory(processes=False), environ)
    gpus: Sequence[GpuInfo] = visible.gpus
    waiting: Sequence[WaitingJob] = ()
    reservations: Sequence[GpuReservation] = ()
    rules = QueueRules()
    queues = wanted.queue and gpus and allocated_by(environ) is None
    with existing_registry(directory_for(wanted.queue_dir, environ)) as registry:
        if registry is not None and queues:
            gpus = mark_excluded(visible.gpus, read_exclusions(registry.directory))
            jobs = registry.jobs()
            waiting, reservations = split(jobs)
            rules = read_rules(registry.directory, jobs)
    now = boottime()
    need, uuids = wanted.min_free_bytes, frozenset(gpu.uuid for gpu in gpus)
    me = WaitingJob("", _BEHIND_ALL, need, uuids, wanted.jobs_per_device, now, user=os.geteuid())
    found = open_to(me, waiting, reservations, gpus, now, rules)
    usable = {gpu.uuid: gpu.free_bytes for gpu in found}
    rooms = tuple(
        GpuFit(
            *(gpu.index, gpu.uuid, gpu.name, gpu.total_bytes, gpu.free_bytes),
            usable_bytes=usable.get(gpu.uuid, 0),
            why_not=None if gpu.uuid in usable else _why_not(gpu, need, reservations),
        )
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
