"""Checkpoint files: written whole or not at all, checked before they are believed."""

from __future__ import annotations

import logging
import re
import zipfile
from collections.abc import Collection, Mapping
from errno import EINVAL, ENOENT
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from robust_train.failures import classify_failure
from robust_train.files import replacing
from robust_train.run import Run
from robust_train.runfolder.background import BackgroundWrite, host_copy
from robust_train.runfolder.identity import wait_until_readable
from robust_train.runfolder.manifests import read_manifests
from robust_train.values import MEMORY_FAILURES

log = logging.getLogger("robust_train")

_NAME = re.compile(r"step-(\d{8,})\.pt")


class CheckpointError(OSError):
    """A checkpoint cannot be written. The message names file and reason."""


class CheckpointFolder:
    """A job's checkpoints, ``step-00000120.pt`` and so on.

    Args:
        run: the run that saves them, into its ``checkpoint_dir``.
        keep: how many of the newest to keep.
    """

    def __init__(self, run: Run, *, keep: int) -> None:
        self.path = run.checkpoint_dir
        self._run = run
        self._keep = keep
        self._writing: BackgroundWrite | None = None

    def save(self, content: Mapping[str, Any], step: int) -> Path:
        """Save and report a checkpoint, then remove the ones that are too many.

        Raises:
            CheckpointError: it could not be written; the earlier ones are untouched.
        """
        self.report_written(wait=True)
        path = self._path(step)
        write_atomically(content, path)
        self._report(step)
        return path

    def save_from_copy(self, content: Mapping[str, Any], step: int) -> None:
        """Save while training goes on, if there is memory for a copy: call
        :meth:`report_written` after each step.

        Raises:
            CheckpointError: this or the one before could not be written.
        """
        self.report_written(wait=True)
        copy = host_copy(content)
        if copy is None:
            self.save(content, step)
            return
        write = partial(write_atomically, copy, self._path(step))
        self._writing = BackgroundWrite(write, step)
        self._run.saving.clock.copied()

    def report_written(self, *, wait: bool = False) -> None:
        """Report the checkpoint that was written meanwhile, if it is; ``wait`` until it is.

        Raises:
            CheckpointError: it could not be written; the earlier ones are untouched.
        """
        if self._writing is not None and (wait or self._writing.is_done):
            writing, self._writing = self._writing, None
            writing.wait()
            self._report(writing.step)

    def _path(self, step: int) -> Path:
        return self.path / f"step-{step:08d}.pt"

    def _report(self, step: int) -> None:
        self._run.checkpoint_saved(self._path(step), step)
        self._run.saving.rotate("step-*.pt", self._keep)

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
        with replacing(path, durable=True) as temporary, temporary.open("wb") as file:
            _save(content, file)
            file.flush()
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


def read_newest(path: Path, required: Collection[str] = ()) -> tuple[Path, dict[str, Any]] | None:
    """Read the checkpoint ``path``, or the newest intact one before it in the same folder.

    Args:
        path: the checkpoint that is wanted.
        required: keys that its content must have; a file without them is somebody else's.

    Returns:
        The file that was read and its content on the CPU; None where no intact one is left.

    Raises:
        ConfigError: a file cannot be read now, also after a while.
        MemoryError, RuntimeError: there is no memory to read it; that says nothing about the file.
    """
    match = _NAME.fullmatch(path.name)
    wanted = int(match[1]) if match else None
    jobs = {one.path: one.job for one in wait_until_readable(lambda: read_manifests(path.parent))}
    job = jobs.get(path.absolute())
    older = [
        other
        for other in _by_step(path.parent)
        if other != path
        and (wanted is None or _step(other) <= wanted)
        and (job is None or jobs.get(other.absolute(), job) == job)
    ]
    for candidate in [path, *older]:
        try:
            return candidate, wait_until_readable(partial(_read, candidate, required))
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
        OSError: it cannot be read now.
    """
    try:
        path.open("rb").close()
        # torch.load itself does not compare the checksums
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
        if bad is None:
            # weights_only: a file from elsewhere must not run code here
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # damaged files make zip and pickle readers raise nearly anything, EINVAL for a bad offset
        is_away = isinstance(error, OSError) and error.errno not in (None, EINVAL, ENOENT)
        if is_away or classify_failure(error).kind in MEMORY_FAILURES:
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
