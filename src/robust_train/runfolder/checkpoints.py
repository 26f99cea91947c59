"""Checkpoint files: written whole or not at all, checked before they are believed."""

from __future__ import annotations

import logging
import os
import re
import time
import zipfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from robust_train.failures import classify_failure
from robust_train.files import replacing
from robust_train.values import MEMORY_FAILURES

log = logging.getLogger("robust_train.vision")

_NAME = re.compile(r"step-(\d{8,})\.pt")
_CHEAP_SHARE = 0.05


class CheckpointError(OSError):
    """A checkpoint cannot be written. The message names file and reason."""


class CheckpointFolder:
    """A job's checkpoints, ``step-00000120.pt`` and so on.

    Args:
        path: the folder; made when the first checkpoint is saved.
        keep: how many of the newest to keep.
    """

    def __init__(self, path: Path, *, keep: int) -> None:
        self.path = path
        self._keep = keep

    def save(self, content: Mapping[str, Any], step: int) -> Path:
        """Save a checkpoint, then remove the ones that are too many.

        Raises:
            CheckpointError: it could not be written; the earlier ones are untouched.
        """
        path = self.path / f"step-{step:08d}.pt"
        write_atomically(content, path)
        for old in _by_step(self.path)[self._keep :]:
            old.unlink(missing_ok=True)
        return path

    def remove_leftovers(self) -> None:
        """Remove the temporary files of attempts that were killed while they wrote."""
        for leftover in self.path.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)


def save_checkpoint(content: Mapping[str, Any], path: str | Path) -> Path:
    """Save ``content`` as ``path``, whole or not at all, without a second copy on the GPU::

        save_checkpoint({"model": model, "optimizer": optimizer, "step": step}, "last.pt")

    Whatever has a ``state_dict`` (modules, optimizers, schedulers, scalers) is saved as that;
    ``torch.load(path, weights_only=True)`` reads the file. Storages are copied to the host one at a
    time as they are written, so the host needs room for the largest one only.

    Args:
        content: what to save, by name.
        path: the file; its folder is made.

    Raises:
        CheckpointError: it could not be written; a file that was there is untouched.
    """
    path = Path(path)
    states = {
        name: value.state_dict() if hasattr(value, "state_dict") else value
        for name, value in content.items()
    }
    write_atomically(states, path)
    return path


def write_atomically(content: Mapping[str, Any], path: Path) -> None:
    """``torch.save`` such that ``path`` is at every moment absent, the old file or the new one,
    also after a power cut.

    Tensors on a GPU are copied to the host one at a time while they are written.

    Raises:
        CheckpointError: no space, no permission, too large …; nothing of the attempt is left.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            _save(content, file)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


class _RecordingFile:
    """Remembers the system's error, which torch's zip writer replaces by one of its own."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()


def _save(content: Mapping[str, Any], file: IO[bytes]) -> None:
    recording = _RecordingFile(file)
    try:
        torch.save(dict(content), recording)  # type: ignore[arg-type]
    except (OSError, RuntimeError):
        if recording.error is not None:
            raise recording.error from None
        raise


def _sync_folder(folder: Path) -> None:
    """The rename itself must reach the disk too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_newest(path: Path, required: Collection[str] = ()) -> tuple[Path, dict[str, Any]] | None:
    """Read the checkpoint ``path``, or the newest intact one before it in the same folder.

    Args:
        path: the checkpoint that is wanted.
        required: keys that its content must have; a file without them is somebody else's.

    Returns:
        The file that was read and its content on the CPU; None where no intact one is left.

    Raises:
        MemoryError, RuntimeError: there is no memory to read it; that says nothing about the file.
    """
    match = _NAME.fullmatch(path.name)
    wanted = int(match[1]) if match else None
    older = [
        other
        for other in _by_step(path.parent)
        if other != path and (wanted is None or _step(other) <= wanted)
    ]
    for candidate in [path, *older]:
        try:
            return candidate, _read(candidate, required)
        except _Unusable as fault:
            log.warning(
                "the checkpoint %s is damaged (%s); trying the one before it", candidate, fault
            )
    return None


class _Unusable(Exception):
    """What is wrong with a checkpoint file."""


def _read(path: Path, required: Collection[str]) -> dict[str, Any]:
    """The content of a file that is whole and a checkpoint.

    Raises:
        _Unusable: it is not.
    """
    try:
        # torch.load itself does not compare the checksums
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
        if bad is None:
            # weights_only: a file from elsewhere must not run code here
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # damaged files make zip and pickle readers raise nearly anything
        if classify_failure(error).kind in MEMORY_FAILURES:
            raise
        raise _Unusable(
            str(error).splitlines()[0] if str(error) else type(error).__name__
        ) from None
    if bad is not None:
        raise _Unusable(f"the checksum of {bad} is wrong")
    if not isinstance(content, dict):
        raise _Unusable(f"it holds a {type(content).__name__} and is no checkpoint")
    missing = sorted(set(required) - content.keys())
    if missing:
        raise _Unusable(f"it has no {missing[0]!r} and is no checkpoint of this trainer")
    return content


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _by_step(folder: Path) -> list[Path]:
    """Complete checkpoints, the newest first."""
    return sorted((p for p in folder.glob("step-*.pt") if _step(p) >= 0), key=_step, reverse=True)


class SaveClock:
    """When to save: how much work may be lost, against what saving costs.

    The interval that loses least is √(2 × cost of a save × mean time between failures) (Young
    1974, doi:10.1145/361147.361115). A save of 2 s, of a model with some 10⁸ weights, and a failure
    every six hours give 5 minutes, the default: 0.7 % of the time for saving, and half of 5 minutes
    lost at a failure on average.

    Args:
        every_seconds: longest time without a checkpoint.
        every_steps: most optimizer steps without one; None or 0: any number.
        now: the clock, in seconds.
    """

    def __init__(
        self,
        every_seconds: float,
        *,
        every_steps: int | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every = every_seconds
        self._every_steps = every_steps or None
        self._saved_step: int | None = None
        self._now = now
        self._saved_at = now()
        self._cost: float | None = None

    def is_due(self, step: int) -> bool:
        """After optimizer step ``step``: the longest time or the most steps without a checkpoint
        are over.
        """
        if self._saved_step is None:
            self._saved_step = step - 1
        if self._every_steps is not None and step - self._saved_step >= self._every_steps:
            return True
        return self._now() - self._saved_at >= self._every

    def is_due_after_epoch(self) -> bool:
        """After an epoch also if saving costs at most a twentieth of the time since the last save.

        Memory may run out long after the first epoch; where saving is cheap, as for an adapter or a
        small network, a failure then costs less than an epoch. The first epoch always saves, and
        so measures the cost.
        """
        waited = self._now() - self._saved_at
        if self._cost is None or waited >= self._every:
            return True
        return self._cost <= _CHEAP_SHARE * waited

    def saved(self, seconds: float, step: int) -> None:
        """A save was made, or tried, at ``step``, and took ``seconds``."""
        self._saved_at = self._now()
        self._saved_step = step
        self._cost = seconds
