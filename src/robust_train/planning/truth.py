"""What earlier runs have measured: peaks of memory, from their run folders."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from robust_train.batch.known import memory_settings
from robust_train.runfolder.summary import read_summary

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
