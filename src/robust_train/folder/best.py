"""The best checkpoint of a job: ``best.pt`` next to the newest checkpoints, and the reason in
``best.json``."""

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
        """Return whether this checkpoint replaces ``other``, which has to be worse."""
        if not math.isfinite(self.value):
            return False
        if other is None or (other.mode, other.figure) != (self.mode, self.figure):
            return True
        if self.mode == "min":
            return self.value < other.value
        return self.value > other.value

    def about(self, folder: Path) -> dict[str, Json]:
        """Return it for ``summary.json``, with its path."""
        return {"path": str(folder / BEST_NAME), **asdict(self)}


def read_best(folder: Path) -> Best | None:
    """Return the best checkpoint in a folder, or None if it does not exist or its record is
    damaged."""
    if not (folder / BEST_NAME).is_file():
        return None
    with contextlib.suppress(MalformedEventError):
        return from_json(Best, read_object(folder / RECORD_NAME))
    return None


def best_in(folder: Path) -> dict[str, Json] | None:
    """Return the best checkpoint in a folder for ``summary.json``, if it exists."""
    best = read_best(folder)
    return None if best is None else best.about(folder)


def keep_if_best(checkpoint: Path, best: Best) -> None:
    """Keep a file as ``best.pt`` too, unless the present ``best.pt`` is as good.

    It is a hard link if the disk supports them, which costs neither time nor space until the first
    name is removed. Raises OSError if it cannot be written.
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
    """Write ``best.json``, after its file. Raises OSError."""
    write_json(folder / RECORD_NAME, asdict(best), durable=True)
