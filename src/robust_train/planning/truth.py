"""What earlier runs have measured: peaks of memory, from their run folders."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

ROOTS = ("outputs", "multirun")
"""Where Hydra puts run folders, relative to where the command is typed."""

_LEAST_STEPS = 2
_NOT_OF_MEMORY = frozenset({"lr", "pretrained", "weights"})
_OF_TRAINING = ("mixed_precision", "gradient_checkpointing")


@dataclass(frozen=True)
class Measured:
    """The peak of one attempt on a GPU.

    Attributes:
        batch_size: micro-batch, samples.
        accumulates: its steps had more than one.
        peak_bytes: ``torch.cuda.max_memory_allocated`` at its end.
        run_dir: the run folder.
        time: of the run's end, seconds since the epoch.
    """

    batch_size: int
    accumulates: bool
    peak_bytes: int
    run_dir: Path
    time: float


@dataclass(frozen=True)
class Truth:
    """What was found: peaks on GPUs, newest first, and how many runs were on the CPU, whose figures
    are those of a whole process and tell nothing of a GPU."""

    measured: tuple[Measured, ...] = ()
    on_cpu: int = 0

    def of(self, batch_size: int, accumulates: bool) -> Measured | None:
        """The newest of a size."""
        key = (batch_size, accumulates)
        return next((m for m in self.measured if (m.batch_size, m.accumulates) == key), None)


def find_truth(cfg: DictConfig, roots: Iterable[Path]) -> Truth:
    """Look for runs of the same model, data shape and precision.

    Args:
        cfg: the job that is planned.
        roots: folders to look in, at any depth.
    """
    wanted = _what_memory_depends_on(cfg)
    measured: list[Measured] = []
    on_cpu = 0
    for folder in _run_folders(roots):
        if _config_of(folder) != wanted or _has_split_steps(folder / "journal.jsonl"):
            continue
        summary = folder / "summary.json"
        for attempt in _attempts(summary):
            if attempt.get("gpu_uuid") is None:
                on_cpu += 1
            elif (found := _measured(attempt, folder, summary.stat().st_mtime)) is not None:
                measured.append(found)
    return Truth(tuple(sorted(measured, key=lambda m: -m.time)), on_cpu)


def _what_memory_depends_on(cfg: Any) -> dict[str, Any] | None:
    """The part of a config that decides about memory, the batch left out."""
    try:
        plain = OmegaConf.to_container(cfg, resolve=False)
        assert isinstance(plain, dict)
        model, dataset, training = (dict(plain[key]) for key in ("model", "dataset", "training"))
    except (OmegaConfBaseException, AssertionError, KeyError, TypeError, ValueError):
        return None
    data = {key: dataset.get(key) for key in ("name", "num_classes")}
    if data["name"] == "image_folder" and data["num_classes"] is None:
        data["root"] = dataset.get("root")
    return {
        "trainer": (plain.get("trainer") or {}).get("_target_"),
        "model": {key: value for key, value in model.items() if key not in _NOT_OF_MEMORY},
        "dataset": data,
        **{key: training.get(key) for key in _OF_TRAINING},
    }


def _config_of(folder: Path) -> dict[str, Any] | None:
    try:
        return _what_memory_depends_on(OmegaConf.load(folder / ".hydra" / "config.yaml"))
    except Exception:  # whatever is wrong with a file of the past, it is none to compare with
        return None


def _run_folders(roots: Iterable[Path]) -> Iterator[Path]:
    for root in roots:
        for folder, folders, files in os.walk(root):
            if "summary.json" in files:
                # a run folder; its checkpoints and logs hold no other
                folders.clear()
                yield Path(folder)


def _attempts(path: Path) -> list[Mapping[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        attempts = content["attempts"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return [item for item in attempts if isinstance(item, dict)]


def _measured(attempt: Mapping[str, Any], folder: Path, time: float) -> Measured | None:
    """None for an attempt that tells nothing: it ran out of memory, had no second step, or was one
    of several processes, which also hold what they send each other."""
    peak, batch = attempt.get("peak_memory_bytes"), attempt.get("batch_size")
    steps = (attempt.get("end_step") or 0) - (attempt.get("start_step") or 0)
    if attempt.get("outcome") not in ("completed", "interrupted") or steps < _LEAST_STEPS:
        return None
    if attempt.get("ranks", 1) != 1:
        return None
    if not isinstance(peak, int) or not isinstance(batch, int) or peak <= 0:
        return None
    accumulates = attempt.get("gradient_accumulation_steps") != 1
    return Measured(batch, accumulates, peak, folder, time)


def _has_split_steps(journal: Path) -> bool:
    """Whether micro-batches got smaller within an attempt: then its peak is of several sizes."""
    try:
        return '"micro_batch_changed"' in journal.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
