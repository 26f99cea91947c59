"""What a job will need and where it fits: :func:`plan_memory`, behind ``robust-train plan``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from robust_train.config.batch import settle_batch_size
from robust_train.config.schema import complete, validate
from robust_train.errors import ConfigError
from robust_train.gpu.footprint import CACHE_FACTOR, CONTEXT_BYTES
from robust_train.planning.fit import (
    TYPICAL_SIZES,
    WORKSPACE_BYTES,
    Peak,
    error_percent,
    fits,
    largest_batch,
)
from robust_train.planning.machine import GpuRoom, machine_now
from robust_train.planning.truth import ROOTS, Measured, Truth, find_truth
from robust_train.settings import target_of

SCHEMA = 1
BUILT_IN = "robust_train.vision.trainer.train"
_ROWS = 4


@dataclass(frozen=True)
class PlannedSize:
    """One micro-batch.

    Attributes:
        peak: predicted.
        fits_on: indices (NVML's) of the GPUs on which it fits now.
        measured: by the newest earlier run with this micro-batch, None where there is none.
    """

    peak: Peak
    fits_on: tuple[int, ...] = ()
    measured: Measured | None = None

    @property
    def error_percent(self) -> float | None:
        """Return the prediction's error, None where nothing was measured."""
        if self.measured is None:
            return None
        return error_percent(self.peak.allocated_bytes, self.measured.peak_bytes)


@dataclass(frozen=True)
class GpuFit:
    """A GPU and the largest micro-batches that fit there, None where none does.

    Attributes:
        room: the GPU and what can be used of it.
        now: with what is free.
        empty: if nobody else were there.
    """

    room: GpuRoom
    now: int | None
    empty: int | None


@dataclass(frozen=True)
class MemoryPlan:
    """What a job will need, and where it fits.

    Attributes:
        model: as in ``model.name``.
        dataset: as in ``dataset.name``.
        precision: number format of the forward pass.
        batch_size: the micro-batch that the config asks for.
        rows: by micro-batch, smallest first.
        gpus: of this machine.
        problem: why there are none.
        sizes: where there are none, the largest micro-batch for GPUs of common sizes (bytes).
        truth: what earlier runs have measured.
        seconds: that all this took, imports included.
    """

    model: str
    dataset: str
    precision: str
    batch_size: int
    rows: tuple[PlannedSize, ...]
    gpus: tuple[GpuFit, ...]
    problem: str | None
    sizes: Mapping[int, int | None]
    truth: Truth
    seconds: float

    @property
    def mean_error_percent(self) -> float | None:
        """Return the mean of the rows' absolute errors; None where nothing was measured."""
        errors = [abs(row.error_percent) for row in self.rows if row.error_percent is not None]
        return sum(errors) / len(errors) if errors else None

    def as_json(self) -> dict[str, Any]:
        """Return the plan in JSON's types; sizes are bytes."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "dataset": self.dataset,
            "precision": self.precision,
            "batch_size": self.batch_size,
            "allowances": {
                "cublas_bytes": WORKSPACE_BYTES,
                "cache_factor": CACHE_FACTOR,
                "context_bytes": CONTEXT_BYTES,
            },
            "rows": [_row_as_json(row) for row in self.rows],
            "gpus": [
                {
                    "index": fit.room.gpu.index,
                    "uuid": fit.room.gpu.uuid,
                    "name": fit.room.gpu.name,
                    "total_bytes": fit.room.gpu.total_bytes,
                    "free_bytes": fit.room.gpu.free_bytes,
                    "usable_bytes": fit.room.usable_bytes,
                    "why_not": fit.room.why_not,
                    "largest_batch_now": fit.now,
                    "largest_batch_empty": fit.empty,
                }
                for fit in self.gpus
            ],
            "problem": self.problem,
            "typical_gpus": [
                {"total_bytes": size, "largest_batch": batch} for size, batch in self.sizes.items()
            ],
            "runs_on_cpu": self.truth.on_cpu,
            "mean_error_percent": self.mean_error_percent,
            "seconds": round(self.seconds, 2),
        }


def plan_memory(
    cfg: Any,
    *,
    batch_sizes: Sequence[int] | None = None,
    runs: Iterable[str | Path] | None = None,
    environ: Mapping[str, str] | None = None,
) -> MemoryPlan:
    """Predict the GPU memory of a job of the built-in trainer, and say where it fits now.

    Needs no GPU, no data and no weights, and starts no CUDA. Imports torch.

    Args:
        cfg: as for :func:`robust_train.launch`: a Hydra config, or a mapping with any part of it.
        batch_sizes: micro-batches to predict; None: the configured one, twice that, and halves.
        runs: folders to look for earlier runs in; None: ``outputs`` and ``multirun`` here.
        environ: whose CUDA_VISIBLE_DEVICES bounds the GPUs; None: this process's.

    Raises:
        ConfigError: the config cannot be used, or is of another trainer.
    """
    started = time.monotonic()
    cfg = complete(cfg)
    settle_batch_size(cfg)
    validate(cfg)
    target = target_of(cfg)
    if target != BUILT_IN:
        raise ConfigError(
            f"trainer._target_={target}: only the built-in trainer can be planned; a short run of "
            "yours leaves its peak as peak_memory_bytes in summary.json"
        )
    predict = _predictor(cfg)
    truth = find_truth(cfg, map(Path, ROOTS if runs is None else runs))
    machine = machine_now(cfg, os.environ if environ is None else environ)
    fraction = cfg.memory.fraction

    def fit_on(free_bytes: int, total_bytes: int) -> int | None:
        if not free_bytes:
            return None
        return largest_batch(
            lambda size: predict(size, _accumulates(cfg, size)),
            lambda peak: fits(peak, free_bytes, total_bytes, fraction),
            near=cfg.training.batch_size,
        )

    wanted = {(size, _accumulates(cfg, size)) for size in batch_sizes or _default_sizes(cfg)}
    wanted |= {(found.batch_size, found.accumulates) for found in truth.measured}
    rows = []
    for size, accumulates in sorted(wanted):
        peak = predict(size, accumulates)
        holds = [
            room.gpu.index
            for room in machine.gpus
            if fits(peak, room.usable_bytes, room.gpu.total_bytes, fraction)
        ]
        rows.append(PlannedSize(peak, tuple(holds), truth.of(size, accumulates)))
    return MemoryPlan(
        model=cfg.model.name,
        dataset=cfg.dataset.name,
        precision="bfloat16" if cfg.training.mixed_precision else "float32",
        batch_size=cfg.training.batch_size,
        rows=tuple(rows),
        gpus=tuple(
            GpuFit(
                room,
                fit_on(room.usable_bytes, room.gpu.total_bytes),
                fit_on(room.gpu.total_bytes, room.gpu.total_bytes),
            )
            for room in machine.gpus
        ),
        problem=machine.problem,
        sizes={} if machine.gpus else {size: fit_on(size, size) for size in TYPICAL_SIZES},
        truth=truth,
        seconds=time.monotonic() - started,
    )


def _predictor(cfg: DictConfig) -> Callable[[int, bool], Peak]:
    from robust_train.planning.prediction import StepPredictor

    steps = StepPredictor(cfg)
    known: dict[tuple[int, bool], Peak] = {}

    def predict(batch_size: int, accumulates: bool) -> Peak:
        key = (batch_size, accumulates)
        if key not in known:
            known[key] = steps.predict(batch_size, accumulates=accumulates)
        return known[key]

    return predict


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


def _row_as_json(row: PlannedSize) -> dict[str, Any]:
    measured = row.measured
    return {
        **asdict(row.peak),
        "allocated_bytes": row.peak.allocated_bytes,
        "gpu_bytes": row.peak.gpu_bytes,
        "fits_on": list(row.fits_on),
        "measured_bytes": None if measured is None else measured.peak_bytes,
        "measured_in": None if measured is None else str(measured.run_dir),
        "error_percent": row.error_percent,
    }
