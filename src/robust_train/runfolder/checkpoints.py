"""Checkpoint files: written whole or not at all, checked before they are believed."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from errno import EINVAL, ENOENT
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from robust_train.compat import tree_leaves, tree_map_only
from robust_train.failures import classify_failure
from robust_train.files import replacing
from robust_train.memory.host import read_host_memory
from robust_train.readable import first_line
from robust_train.run import Run
from robust_train.runfolder.identity import wait_until_readable
from robust_train.runfolder.manifests import read_manifests

log = logging.getLogger("robust_train")

_LARGEST_COPY = 0.25

Content = dict[str, Any]  # What a checkpoint holds, by name: state dictionaries, tensors, figures


class CheckpointError(OSError):
    """A checkpoint cannot be written. The message names file and reason."""


class CheckpointFolder:
    """The checkpoints of a run in its ``checkpoint_dir``, ``step-00000120.pt`` and so on, of which
    the newest ``keep`` are kept."""

    def __init__(self, run: Run, *, keep: int) -> None:
        self.path = run.checkpoint_dir
        self._run = run
        self._keep = keep
        self._writing: tuple[int, Future[None]] | None = None

    def save(self, content: Content, step: int) -> Path:
        """Save and report a checkpoint, then remove the ones that are too many. Raises
        CheckpointError: it could not be written; the earlier ones are untouched."""
        self.report_written(wait=True)
        write_atomically(content, self._path(step))
        return self._report(step)

    def save_from_copy(self, content: Content, step: int) -> None:
        """Save while training goes on, if there is memory for a copy: call
        :meth:`report_written` after each step. Raises CheckpointError, also for the one before."""
        self.report_written(wait=True)
        copy = _host_copy(content)
        if copy is None:
            self.save(content, step)
            return
        thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing = step, thread.submit(write_atomically, copy, self._path(step))
        thread.shutdown(wait=False)  # it ends with the write, and no process ends before it
        self._run.saving.clock.copied()

    def report_written(self, *, wait: bool = False) -> None:
        """Report the checkpoint that was written meanwhile, if it is; ``wait`` until it is. Raises
        CheckpointError if it could not be; the earlier ones are untouched."""
        if self._writing is not None and (wait or self._writing[1].done()):
            (step, writing), self._writing = self._writing, None
            writing.result()
            self._report(step)

    def remove_leftovers(self) -> None:
        """Remove the temporary files of attempts that were killed while they wrote."""
        for leftover in self.path.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self.path / f"step-{step:08d}.pt"

    def _report(self, step: int) -> Path:
        path = self._path(step)
        self._run.checkpoint_saved(path, step)
        self._run.saving.rotate("step-*.pt", self._keep)
        return path


def _host_copy(content: Content) -> Content | None:
    """Return a copy with all tensors in host memory; None where that would take more than a quarter
    of what is available."""
    tensors = [leaf for leaf in tree_leaves(content) if isinstance(leaf, torch.Tensor)]
    if sum(tensor.nbytes for tensor in tensors) > _LARGEST_COPY * read_host_memory().available:
        return None
    try:
        copied: Content = tree_map_only(
            torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), content
        )
        return copied
    except Exception as error:
        if classify_failure(error).kind.is_memory:
            return None
        raise


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


def write_atomically(content: Content, path: Path) -> None:
    """Save such that ``path`` is at every moment absent, the old file or the new one,
    also after a power cut.

    Tensors on a GPU are copied to the host one at a time while they are written. Raises
    CheckpointError: no space, no permission, too large …; nothing of the attempt is left.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=True) as temporary, temporary.open("wb") as file:
            recording = _RecordingFile(file)
            try:
                torch.save(content, recording)  # type: ignore[arg-type]
            except (OSError, RuntimeError):
                if recording.error is not None:
                    raise recording.error from None
                raise
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from None


class _RecordingFile:
    """Remembers the system's error, which torch's zip writer replaces by one of its own."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.flush = file.flush
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise


def read_newest(path: Path, required: Collection[str] = ()) -> tuple[Path, Content] | None:
    """Return the checkpoint ``path``, or the newest intact one before it in the same folder, with
    its content on the CPU; None if none is intact.

    A file without the keys ``required`` is somebody else's.

    Raises:
        ConfigError: a file cannot be read now, also after a while.
        MemoryError, RuntimeError: there is no memory to read it, whatever the file is like.
    """
    known = wait_until_readable(lambda: read_manifests(path.parent))
    wanted = next((one for one in known if one.path == path.absolute()), None)
    older = [
        one
        for one in known
        if one.path.parent == path.parent.absolute()
        and one.path.suffix == path.suffix
        and (wanted is None or (one.job == wanted.job and one.order < wanted.order))
    ]
    older.sort(key=lambda one: one.order, reverse=True)
    for candidate in (path, *(one.path for one in older)):
        try:
            return candidate, wait_until_readable(partial(_read, candidate, required))
        except _Unusable as fault:
            log.warning(
                "the checkpoint %s is damaged (%s); trying the one before it", candidate, fault
            )
    return None


class _Unusable(Exception):
    """What is wrong with a checkpoint file."""


def _read(path: Path, required: Collection[str]) -> Content:
    """Return the content of a whole checkpoint; raise _Unusable, or OSError if it cannot be read
    now."""
    try:
        path.open("rb").close()
        # torch.load itself does not compare the checksums
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
        if bad is not None:
            raise _Unusable(f"the checksum of {bad} is wrong")
        # weights_only: a file from elsewhere must not run code here
        content = torch.load(path, map_location="cpu", weights_only=True)
    except _Unusable:
        raise
    except Exception as error:
        # damaged files make zip and pickle readers raise nearly anything, EINVAL for a bad offset
        is_away = isinstance(error, OSError) and error.errno not in (None, EINVAL, ENOENT)
        if is_away or classify_failure(error).kind.is_memory:
            raise
        raise _Unusable(first_line(error)) from None
    if not isinstance(content, dict):
        raise _Unusable(f"it holds a {type(content).__name__} and is no checkpoint")
    missing = sorted(set(required) - content.keys())
    if missing:
        raise _Unusable(f"it has no {missing[0]!r} and is no checkpoint of this trainer")
    return content
