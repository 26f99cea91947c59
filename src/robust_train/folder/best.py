"""Keeps the best checkpoint of a job as ``best.pt``, and its rating in ``best.json``.

The attempt's process writes both files into ``checkpoints/``. The launcher and commands read them.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from robust_train.files import read_object, replacing, write_json
from robust_train.model.json import Json, MalformedEventError, from_json

BEST_NAME = "best.pt"
RECORD_NAME = "best.json"
Mode = Literal["max", "min"]


@dataclass(frozen=True)
class Best:
    """The rating of the best checkpoint: the value of its ``figure`` after ``step``."""

    value: float
    step: int
    figure: str = "metric"
    mode: str = "max"  # or `min`: which value is the best
    schema: int = 1

    def is_better_than(self, other: Best | None) -> bool:
        """Return whether this checkpoint is better than ``other``, and so replaces it."""
        if not math.isfinite(self.value):
            return False
        if other is None or (other.mode, other.figure) != (self.mode, self.figure):
            return True
        if self.mode == "min":
            return self.value < other.value
        return self.value > other.value

    def about(self, folder: Path) -> dict[str, Json]:
        """Return the rating and the path of the checkpoint, for ``summary.json``."""
        return {"path": str(folder / BEST_NAME), **asdict(self)}


def read_best(folder: Path) -> Best | None:
    """Return the rating of the best checkpoint in a folder, or None without a readable rating."""
    if not (folder / BEST_NAME).is_file():
        return None
    with contextlib.suppress(MalformedEventError):
        return from_json(Best, read_object(folder / RECORD_NAME))
    return None


def best_in(folder: Path) -> dict[str, Json] | None:
    """Return the best checkpoint in a folder for ``summary.json``, None if there is none."""
    best = read_best(folder)
    return None if best is None else best.about(folder)


def keep_if_best(checkpoint: Path, best: Best) -> None:
    """Keep a checkpoint as ``best.pt`` too, if it is better than the current ``best.pt``.

    ``best.pt`` is a hard link if the disk supports hard links, because a link takes no time and no
    additional space.

    Raises:
        OSError: the file cannot be written.
    """
    folder = checkpoint.parent
    if not best.is_better_than(read_best(folder)):
        return
    with replacing(folder / BEST_NAME, durable=True) as new:
        try:
            os.link(checkpoint, new)
        except OSError:
            shutil.copyfile(checkpoint, new)
    record_best(folder, best)


def record_best(folder: Path, best: Best) -> None:
    """Write ``best.json``, once ``best.pt`` is complete.

    Raises:
        OSError: the file cannot be written.
    """
    write_json(folder / RECORD_NAME, asdict(best), durable=True)
