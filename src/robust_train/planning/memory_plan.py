"""What a job will need and where it fits: :func:`plan_memory`, behind ``robust-train plan``."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from robust_train.batch.known import memory_settings
from robust_train.config.batch import settle_batch_size
from robust_train.config.schema import complete, validate
from robust_train.errors import ConfigError
from robust_train.gpu.footprint import CACHE_FACTOR, CONTEXT_BYTES
from robust_train.planning import fit
from robust_train.planning.fit import Peak
from robust_train.planning.machine import GpuRoom, read_rooms
from robust_train.runfolder.summary import read_summary
from robust_train.settings import target_of

SCHEMA = 1
BUILT_IN = "robust_train.vision.trainer.train"
_ROWS = 4


@dataclass(frozen=True)
class PlannedSize:
    """One micro-batch."""

    peak: Peak  # predicted
    fits_on: tuple[int, ...] = ()  # indices (NVML's) of the GPUs on which it fits now
    # by the newest earlier run with this micro-batch, None where there is none
    measured: Measured | None = None

    @property
    def error_percent(self) -> float | None:
        """Return the prediction's error, None where nothing was measured."""
        if self.measured is None:
            return None
        return fit.error_percent(self.peak.allocated_bytes, self.measured.peak_bytes)

    def as_json(self) -> dict[str, object]:
        """Return the row in JSON's types."""
        measured = self.measured
        return {
            **asdict(self.peak),
            "allocated_bytes": self.peak.allocated_bytes,
            "gpu_bytes": self.peak.gpu_bytes,
            "fits_on": list(self.fits_on),
            "measured_bytes": None if measured is None else measured.peak_bytes,
            "measured_in": None if measured is None else str(measured.run_dir),
            "error_percent": self.error_percent,
        }


@dataclass(frozen=True)
class GpuFit:
    """A GPU and the largest micro-batches that fit there."""

    room: GpuRoom
    now: int | None = None  # the largest micro-batch that fits now
    empty: int | None = None  # the same if the GPU were empty

    def as_json(self) -> dict[str, object]:
        """Return the fit in JSON's types."""
        names = ("index", "uuid", "name", "total_bytes", "free_bytes")
        return {
            **{name: getattr(self.room.gpu, name) for name in names},
            "usable_bytes": self.room.usable_bytes,
            "why_not": self.room.why_not,
            "largest_batch_now": self.now,
            "largest_batch_empty": self.empty,
        }


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
    truth: Truth  # what earlier runs have measured
    seconds: float  # that all this took, imports included

    @property
    def mean_error_percent(self) -> float | None:
        """Return the mean of the rows' absolute errors; None where nothing was measured."""
        errors = [abs(row.error_percent) for row in self.rows if row.error_percent is not None]
        return sum(errors) / len(errors) if errors else None

    def as_json(self) -> dict[str, object]:
        """Return the plan in JSON's types; sizes are bytes."""
        names = ("model", "dataset", "precision", "batch_size", "problem", "mean_error_percent")
        return {
            "schema": SCHEMA,
            **{name: getattr(self, name) for name in names},
            "allowances": {
                "cublas_bytes": fit.WORKSPACE_BYTES,
                "cache_factor": CACHE_FACTOR,
                "context_bytes": CONTEXT_BYTES,
            },
            "rows": [row.as_json() for row in self.rows],
            "gpus": [found.as_json() for found in self.gpus],
            "typical_gpus": [
                {"total_bytes": size, "largest_batch": batch} for size, batch in self.sizes.items()
            ],
            "runs_on_cpu": self.truth.on_cpu,
            "seconds": round(self.seconds, 2),
        }


def plan_memory(
    cfg: Any,
    *,
    batch_sizes: Sequence[int] | None = None,
    runs: Iterable[str | Path] | None = None,
    environ: Mapping[str, str] | None = None,
    on_size: Callable[[int], None] = lambda size: None,
) -> MemoryPlan:
    """Predict the GPU memory of a job of the built-in trainer, and where it fits now.

    Needs no GPU, no data and no weights, and starts no CUDA. Imports torch.

    Args:
        cfg: as for :func:`robust_train.launch`: a Hydra config, or a mapping with any part of it.
        batch_sizes: micro-batches to predict; None: the configured one, twice that, and halves.
        runs: folders to look for earlier runs in; None: ``outputs`` and ``multirun`` here.
        environ: whose CUDA_VISIBLE_DEVICES bounds the GPUs; None: this process's.
        on_size: called with each micro-batch before it is predicted, which takes seconds.

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
    from robust_train.planning.prediction import StepPredictor
    from robust_train.vision.datasets import training_images

    predictor = StepPredictor(cfg)

    @functools.cache
    def predict(size: int, accumulates: bool) -> Peak:
        on_size(size)
        return predictor.predict(size, accumulates=accumulates)

    truth = find_truth(cfg, map(Path, ROOTS if runs is None else runs))
    images = training_images(cfg.dataset)
    rooms, problem = read_rooms(cfg, os.environ if environ is None else environ)

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
        on = [r.gpu.index for r in rooms if does_fit(peak, r.usable_bytes, r.gpu.total_bytes)]
        return PlannedSize(peak, tuple(on), truth.of(size, accumulates))

    def gpu_fit(room: GpuRoom) -> GpuFit:
        total = room.gpu.total_bytes
        return GpuFit(room, largest(room.usable_bytes, total), largest(total, total))

    wanted = {(size, _accumulates(cfg, size)) for size in batch_sizes or _default_sizes(cfg)}
    wanted |= {(found.batch_size, found.accumulates) for found in truth.measured}
    return MemoryPlan(
        model=cfg.model.name,
        dataset=cfg.dataset.name,
        precision="bfloat16" if cfg.training.mixed_precision else "float32",
        batch_size=cfg.training.batch_size,
        rows=tuple(row(size, accumulates) for size, accumulates in sorted(wanted)),
        gpus=tuple(map(gpu_fit, rooms)),
        problem=problem,
        sizes={} if rooms else {size: largest(size, size) for size in fit.TYPICAL_SIZES},
        truth=truth,
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


ROOTS = ("outputs", "multirun")  # Where Hydra puts run folders, relative to where the command runs
_LEAST_STEPS = 2


@dataclass(frozen=True)
class Measured:
    """The peak of one attempt on a GPU."""

    batch_size: int  # micro-batch, samples
    accumulates: bool  # its steps had more than one
    peak_bytes: int  # `torch.cuda.max_memory_allocated` at its end
    run_dir: Path  # the run folder
    time: float  # of the run's end, seconds since the epoch


@dataclass(frozen=True)
class Truth:
    """Peaks on GPUs, newest first, and the number of attempts on the CPU, whose figures are those
    of a whole process and show nothing of a GPU."""

    measured: tuple[Measured, ...] = ()
    on_cpu: int = 0

    def of(self, batch_size: int, accumulates: bool) -> Measured | None:
        """Return the newest of a size."""
        key = (batch_size, accumulates)
        return next((m for m in self.measured if (m.batch_size, m.accumulates) == key), None)


def find_truth(cfg: DictConfig, roots: Iterable[Path]) -> Truth:
    """Find runs of the same model, data shape and precision, in ``roots`` at any depth. Attempts
    that ran out of memory, had no second step, changed their micro-batch, or were one of several
    ranks (which also hold what they send each other) do not count."""
    wanted = memory_settings(cfg)
    measured: list[Measured] = []
    on_cpu = 0
    for folder in _run_folders(roots):
        summary = read_summary(folder)
        if summary is None or not _is_of(folder, wanted):
            continue
        time = (folder / "summary.json").stat().st_mtime
        for one in summary.attempts:
            peak, size = one.peak_memory_bytes, one.batch_size
            on_cpu += not one.gpu_uuids
            is_whole = one.outcome in ("completed", "interrupted") and one.ranks == 1
            steps = (one.end_step or 0) - one.start_step
            if one.gpu_uuids and is_whole and steps >= _LEAST_STEPS and peak and size:
                accumulates = one.gradient_accumulation_steps != 1
                measured.append(Measured(size, accumulates, peak, folder, time))
    return Truth(tuple(sorted(measured, key=lambda m: -m.time)), on_cpu)


def _run_folders(roots: Iterable[Path]) -> Iterator[Path]:
    for root in roots:
        for folder, folders, files in os.walk(root):
            if "summary.json" in files:
                # a run folder; its checkpoints and logs hold no other
                folders.clear()
                yield Path(folder)


def _is_of(folder: Path, wanted: object) -> bool:
    try:
        cfg = OmegaConf.load(folder / ".hydra" / "config.yaml")
        if not isinstance(cfg, DictConfig) or memory_settings(cfg) != wanted:
            return False
        journal = folder / "journal.jsonl"
        has_journal = journal.exists()
        return not has_journal or b'"micro_batch_changed"' not in journal.read_bytes()
    except Exception:  # whatever is wrong with a file of the past, it is none to compare with
        return False
