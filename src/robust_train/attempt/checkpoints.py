"""Writes checkpoints: each is complete or absent, and is checked before it is reported.

:class:`.saves.Saves`, the integrations and the built-in trainer use it in the process that trains.
:class:`CheckpointFolder` copies the content to host memory (:mod:`.host_copies`), and a thread
writes the copy while training continues. The training loop calls
:meth:`CheckpointFolder.report_written` after each step, which reports the checkpoint once it is
complete or raises the error of the write.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from errno import ENOSPC
from functools import partial
from pathlib import Path
from typing import Any

from robust_train.attempt.checkpoint_content import METRIC
from robust_train.attempt.checkpoint_errors import is_disk_error, run_on_all_ranks
from robust_train.attempt.checkpoint_records import CheckpointRecords
from robust_train.attempt.host_copies import HostCopies
from robust_train.attempt.read_checkpoint import VALUES
from robust_train.compat import redirect_savers
from robust_train.folder.best import Best, keep_if_best
from robust_train.folder.checkpoint_files import sync_all
from robust_train.folder.checkpoint_writing import CheckpointError, Content, write_atomically
from robust_train.folder.checkpoints import SUFFIX, Position
from robust_train.folder.full_disk import why_full
from robust_train.readable import first_line
from robust_train.step.ranks import of_all_ranks

log = logging.getLogger("robust_train")


@dataclass(frozen=True)
class _BackgroundSave:
    """A checkpoint that is written while training continues."""

    future: Future[Path]
    step: int
    position: Position  # its position in the data
    write: Callable[[], Path] | None  # writes it again; None if only its framework can


class CheckpointFolder:
    """Saves checkpoints, of which the newest ``keep`` stay.

    A checkpoint is a file like ``step-00000120.pt``, or a folder like ``step-00000120`` that
    ``write_folder`` writes. All ranks save a folder together, and rank 0 reports it.
    """

    def __init__(
        self,
        saving: CheckpointRecords,
        # Reports a complete checkpoint: its path, its step, and its position in the data.
        report: Callable[[Path, int, Position | None], None],
        *,
        is_main: bool,
        keep: int,  # 0 if a framework removes old checkpoints
        write_folder: Callable[[Content, Path], Path] | None = None,
        # How many ranks of this host copy a checkpoint at the same time.
        copies: int = 1,
        suffix: str = ".pt",
    ) -> None:
        saving.rotates = keep > 0
        self.path = saving.folder
        self._saving = saving
        self._report = report
        self._is_main = is_main
        self._keep = keep
        self._write_folder = write_folder
        self._suffix = suffix
        self._in_flight: _BackgroundSave | None = None
        # The newest checkpoint, if the disk did not take it.
        self._unwritten: _BackgroundSave | None = None
        self._rotating: Future[None] | None = None
        self._host_copies = HostCopies(copies)

    # --- to save ---

    def save(self, content: Content, step: int) -> Path:
        """Save and report a checkpoint, then remove the oldest checkpoints beyond ``keep``.

        Raises:
            CheckpointError: it could not be written. The earlier checkpoints are untouched.
        """
        self.report_written(wait=True)
        self._unwritten = None
        path = self._write(content, step)
        self._report_and_rotate(path, step, self._saving.batches.position)
        self.report_written(wait=True)
        return path

    def save_from_copy(self, content: Content, step: int) -> None:
        """Save while training continues, or at once if there is no memory for a copy. Call
        :meth:`report_written` after each step.

        Raises:
            CheckpointError: this or the previous checkpoint could not be written.
        """
        self.report_written(wait=True)
        # The new copy overwrites the previous copy, which can then no longer be written again.
        self._unwritten = None
        self._host_copies.begin()
        copied = self._host_copies.copy(content)
        if copied is None:
            # Ranks write a folder together, whether they write from a copy or not.
            self.save(content, step)
            return
        write = partial(self._write, copied, step)
        self._write_in_background(step, write, write_again=write)

    def save_files(
        self,
        path: Path,
        step: int,
        *,
        write: Callable[[], object],
        publish: Callable[[], Path],
        at_once: bool = False,
    ) -> None:
        """Save a checkpoint of many files, which a framework writes. All ranks must call it.

        On rank 0, all that the framework passes to ``torch.save`` and safetensors is copied, and
        written while training continues. The other ranks write at once, so that rank 0 knows when
        their files exist.

        Args:
            path: the folder of the unfinished checkpoint.
            step: the step of the checkpoint.
            write: creates the files in ``path``.
            publish: turns them into a complete checkpoint, and returns its path.
            at_once: rank 0 writes at once too.

        Raises:
            CheckpointError: this or the previous checkpoint could not be written. No file of it is
                left.
        """
        self.report_written(wait=True)
        self._saving.check_folder()
        self._host_copies.begin()
        postponed: list[Callable[[], None]] = []

        def postpone(save: Callable[[Any], None], content: Any, file: Path) -> None:
            copied = self._host_copies.copy({os.path.relpath(file, path): content})
            if copied is None:
                save(content)
            else:
                postponed.append(partial(save, *copied.values()))

        def complete() -> Path:
            self._saving.check_folder()
            with self._removing_on_failure(path):
                for save in postponed:
                    save()
                published = publish()
                sync_all(published)
            return self._check(published)

        copying = redirect_savers(postpone) if self._is_main and not at_once else nullcontext()
        with self._removing_on_failure(path), copying:
            run_on_all_ranks(write, of_all_ranks)
        if self._is_main:
            self._write_in_background(step, complete, write_again=None)
        else:
            self._report(path, step, None)

    @contextlib.contextmanager
    def _removing_on_failure(self, path: Path) -> Iterator[None]:
        """Remove ``path`` if the disk does not take it.

        Raises:
            CheckpointError: the disk did not take it.
        """
        try:
            yield
        except Exception as error:
            if not is_disk_error(error):
                raise
            why = first_line(error)
            # torch's file writer does not name the reason.
            if not isinstance(error, OSError) and why_full(self.path.parent, str(path)):
                why = os.strerror(ENOSPC)
            if self._is_main:
                shutil.rmtree(path, ignore_errors=True)
            raise CheckpointError(f"cannot write {path}: {why}") from None

    def _write(self, content: Content, step: int) -> Path:
        self._saving.check_folder()
        path = self.path / f"step-{step:08d}"
        if self._write_folder is not None:
            return self._check(self._write_folder(content, path))
        written = self._check(write_atomically(content, path.with_suffix(self._suffix)))
        if METRIC in content:
            _keep_if_best(written, step, *content[METRIC])
        return written

    def _check(self, path: Path) -> Path:
        """Return the path of a checkpoint that was just written.

        Raises:
            CheckpointError: it is damaged.
        """
        if self._is_main and (damage := self._saving.damage_in(path)):
            raise CheckpointError(f"checkpoint {path}: {damage}; it is not used")
        return path

    # --- while training continues ---

    def _write_in_background(
        self, step: int, write: Callable[[], Path], *, write_again: Callable[[], Path] | None
    ) -> None:
        """Write a checkpoint on the writer's thread. ``write_again`` writes it once more from the
        same copy, None if that is impossible."""
        future = self._saving.writer.submit(write)
        position = self._saving.batches.position
        self._in_flight = _BackgroundSave(future, step, position, write_again)
        self._saving.clock.copied()

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is written while training continues, and not reported yet."""
        return self._in_flight is not None

    def report_written(self, *, wait: bool = False) -> None:
        """Report the checkpoint that is written in the background, if it is complete. ``wait``
        until it is.

        Raises:
            CheckpointError: it could not be written. The earlier checkpoints are untouched.
        """
        checkpoint = self._in_flight
        if checkpoint is not None and (wait or checkpoint.future.done()):
            self._in_flight = None
            self._unwritten = checkpoint
            try:
                path = checkpoint.future.result()
            finally:
                self._host_copies.shrink()
            self._unwritten = None
            self._report_and_rotate(path, checkpoint.step, checkpoint.position)
        if wait and self._rotating is not None:
            self._rotating.result()

    def write_again(self) -> bool:
        """Write the newest checkpoint again, if the disk did not take it, and return whether its
        copy still exists.

        Raises:
            CheckpointError: the disk still does not take it.
        """
        checkpoint = self._unwritten
        if checkpoint is None or checkpoint.write is None:
            return False
        self._report_and_rotate(checkpoint.write(), checkpoint.step, checkpoint.position)
        self._unwritten = None
        self.report_written(wait=True)
        return True

    def _report_and_rotate(self, path: Path, step: int, position: Position) -> None:
        """Report a complete checkpoint as rank 0, and let the writer's thread remove old ones."""
        if not self._is_main:
            return
        self._report(path, step, position)
        if self._keep:
            # Removing a large file takes time, too.
            self._rotating = self._saving.writer.submit(self._saving.rotate, self._keep)

    # --- at the start ---

    def remove_leftovers(self, resumed_from: Path | None) -> None:
        """Remove unfinished checkpoints of attempts that were killed."""
        if not self._saving.owns_folder():
            return
        for leftover in self.path.glob(".*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
            # A folder may have disappeared, and leftovers do no harm.
            with contextlib.suppress(OSError):
                leftover.unlink()
        for values in self.path.glob(f"step-*/{VALUES}"):
            folder = values.parent
            manifest = folder.with_name(folder.name + SUFFIX)
            if folder != resumed_from and not manifest.exists():
                shutil.rmtree(folder, ignore_errors=True)


def _keep_if_best(checkpoint: Path, step: int, value: float, mode: str) -> None:
    """Keep a checkpoint of ``run.save`` as the best checkpoint, if its metric is the best so far. A
    full disk causes a warning only."""
    try:
        keep_if_best(checkpoint, Best(value, step, mode=mode))
    except OSError as error:
        log.warning("%s: not kept as the best checkpoint: %s", checkpoint, error.strerror)
