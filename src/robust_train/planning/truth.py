"""What earlier runs have measured: peaks of memory, from their run folders."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from robust_train.batch.known import memory_settings
from robust_train.runfolder.summary import AttemptSummary, read_summary

ROOTS = ("outputs", "multirun")
"""Where Hydra puts run folders, relative to where the command runs."""

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
    """Peaks on GPUs, newest first, and the number of attempts on the CPU.

    Figures of the CPU are those of a whole process and say nothing about a GPU.
    """

    measured: tuple[Measured, ...] = ()
    on_cpu: int = 0

    def of(self, batch_size: int, accumulates: bool) -> Measured | None:
        """Return the newest of a size."""
        key = (batch_size, accumulates)
        return next((m for m in self.measured if (m.batch_size, m.accumulates) == key), None)


def find_truth(cfg: DictConfig, roots: Iterable[Path]) -> Truth:
    """Find runs of the same model, data shape and precision, in ``roots`` at any depth."""
    wanted = memory_settings(cfg)
    measured: list[Measured] = []
    on_cpu = 0
    for folder in _run_folders(roots):
        if not _is_of(folder, wanted) or _has_split_steps(folder / "journal.jsonl"):
            continue
        summary = read_summary(folder)
        for attempt in () if summary is None else summary.attempts:
            if not attempt.gpu_uuids:
                on_cpu += 1
            elif _is_measurement(attempt):
                measured.append(
                    Measured(
                        batch_size=attempt.batch_size or 0,
                        accumulates=attempt.gradient_accumulation_steps != 1,
                        peak_bytes=attempt.peak_memory_bytes or 0,
                        run_dir=folder,
                        time=(folder / "summary.json").stat().st_mtime,
                    )
                )
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
        return isinstance(cfg, DictConfig) and memory_settings(cfg) == wanted
    except Exception:  # whatever is wrong with a file of the past, it is none to compare with
        return False


def _is_measurement(attempt: AttemptSummary) -> bool:
    """Return False for one that ran out of memory, had no second step, or was one of several ranks,
    which also hold what they send each other."""
    steps = (attempt.end_step or 0) - attempt.start_step
    return (
        attempt.outcome in ("completed", "interrupted")
        and steps >= _LEAST_STEPS
        and attempt.ranks == 1
        and bool(attempt.peak_memory_bytes and attempt.batch_size)
    )


def _has_split_steps(journal: Path) -> bool:
    """Return whether micro-batches got smaller inside an attempt: its peak is of several sizes."""
    try:
        return '"micro_batch_changed"' in journal.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
