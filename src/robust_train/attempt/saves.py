"""Loads the checkpoint that an attempt resumes from, and saves its checkpoints.

:class:`.live.LiveAttempt` holds one :class:`Saves` in each process that trains. A disk that does
not take a checkpoint never ends training. Instead, :class:`Saves` logs a warning, and the
checkpoint is owed until a later save succeeds.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from robust_train.attempt.checkpoint_records import CheckpointRecords
from robust_train.attempt.data_position import BatchFacts
from robust_train.attempt.reports import Reports
from robust_train.folder.checkpoint_writing import CheckpointError, Content
from robust_train.folder.checkpoints import Manifest, Position

if TYPE_CHECKING:
    from robust_train.attempt.checkpoints import CheckpointFolder

log = logging.getLogger("robust_train")

T = TypeVar("T")

_KEEP = 2
"""How many checkpoints stay if the config does not say it."""


class CheckpointReport(Protocol):
    """A callback for complete checkpoints."""

    def __call__(self, path: Path, step: int | None, position: Position | None = None) -> None:
        """Receive a checkpoint's path, its step, and its position in the data."""


class Saves:
    """Loads and saves the checkpoints of an attempt.

    Attributes:
        resume_checkpoint: the checkpoint to resume from, None for a fresh start.
        keep: the number of checkpoints of `run.save` to keep.
        skips_to: the optimizer step up to which the data should be skipped, because training
            diverged there.
        passes_over: whether the trainer skips this data.
    """

    def __init__(
        self,
        saving: CheckpointRecords,
        reports: Reports,
        resume_checkpoint: Path | None,
        *,
        is_main: bool,
        report: CheckpointReport,
        report_failure: Callable[[CheckpointError], None],
    ) -> None:
        self.resume_checkpoint = resume_checkpoint
        self.keep = _KEEP
        self.skips_to = 0
        self.passes_over = False
        self._saving = saving
        self._reports = reports
        self._is_main = is_main
        self._report = report
        self._report_failure = report_failure
        self._folder: CheckpointFolder | None = None
        self._has_position = False
        self._raises = False

    def keep_newest(self, keep: int) -> None:
        """Set the number of checkpoints of `run.save` to keep."""
        self.keep = keep

    # --- the position in the data ---

    def skip_to(self, step: int) -> None:
        """Request that the trainer skips the data up to an optimizer step."""
        self.skips_to = step

    def pass_over_skipped(self) -> None:
        """Record that the trainer skips the data up to ``skips_to``."""
        self.passes_over = True

    def pass_over(self, loader: Iterable[T], facts: Callable[[], BatchFacts]) -> Iterator[T]:
        """Yield from ``loader``, without the part that earlier attempts have seen."""
        self.passes_over = True
        self._find_position()
        yield from self._saving.batches.iterate(loader, facts())

    def _find_position(self) -> None:
        """Find the resumed checkpoint's position in the data.

        This is called at the first batch or checkpoint, because by then the trainer has reported
        the step that it starts from.
        """
        if self.resume_checkpoint is not None and not self._has_position:
            self._saving.batches.resume(
                self.resume_checkpoint, self._reports.steps_before, self.skips_to
            )
        self._has_position = True

    # --- loading ---

    def load(self, state: MutableMapping[str, Any]) -> int:
        """Restore the newest checkpoint into ``state``, and return its step, or 0 if there is no
        checkpoint."""
        from robust_train.attempt.checkpoint_content import STEP, restore_state
        from robust_train.attempt.read_checkpoint import read_newest
        from robust_train.step.ranks import of_all_ranks

        path = self.resume_checkpoint
        self.resume_checkpoint = None
        if path is None:
            return 0
        required = {STEP} | state.keys()
        newest = read_newest(path, required, gather=of_all_ranks)
        if newest is None:
            return 0
        self.resume_checkpoint, content = newest
        return restore_state(state, content)

    # --- saving ---

    def save(self, content: Content, step: int, *, keep: int, suffix: str) -> None:
        """Save a dictionary of values and tensors while training continues."""
        # The previous checkpoint may have failed in the meantime, which must not prevent this one.
        self.finish()
        self._saving.clock.begin(step)
        self._find_position()
        is_first = self._folder is None
        folder = self.folder(keep, suffix)
        if is_first:
            folder.remove_leftovers(self.resume_checkpoint)
        self.try_to_write(lambda: folder.save_from_copy(content, step))

    def folder(self, keep: int, suffix: str = ".pt", **options: Any) -> CheckpointFolder:
        """Return the folder that writes and reports checkpoints. For the arguments see
        :class:`.checkpoints.CheckpointFolder`."""
        from robust_train.attempt.checkpoints import CheckpointFolder

        if self._folder is None:
            self._folder = CheckpointFolder(
                self._saving,
                self._report,
                is_main=self._is_main,
                keep=keep,
                suffix=suffix,
                **options,
            )
        return self._folder

    def finish(self, *, wait: bool = True) -> None:
        """Report the checkpoint that is written in the background, if it is complete.

        With ``wait``, wait until it is complete.
        """
        folder = self._folder
        if folder is not None:
            self.try_to_write(lambda: folder.report_written(wait=wait))

    def try_to_write(self, write: Callable[[], object]) -> None:
        """Write a checkpoint. If that fails, training continues."""
        try:
            write()
        except CheckpointError as error:
            if self._raises:
                raise
            if self._is_main:
                kept = "none is saved yet"
                if self.has_checkpoint:
                    kept = "earlier checkpoints are kept"
                log.warning("%s; training continues, %s", error, kept)
            self._report_failure(error)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Raise the error of a checkpoint that cannot be written within the block, instead of
        logging a warning: the caller tries again."""
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is written while training continues, and not reported yet."""
        return self._folder is not None and self._folder.is_writing

    @property
    def has_checkpoint(self) -> bool:
        """Whether a checkpoint of the job is on the disk, as far as this attempt knows."""
        return self._saving.has_saved or self.resume_checkpoint is not None

    def write_again(self) -> bool:
        """Write the newest checkpoint again, if the disk did not take it, and return whether its
        copy still exists.

        Raises:
            CheckpointError: the disk still does not take it.
        """
        return self._folder is not None and self._folder.write_again()

    def record(self, path: Path, step: int | None, loss: str, position: Position | None) -> str:
        """Write the manifest of a complete checkpoint. Returns the checkpoint's damage, empty if
        it has none."""
        damage = ""
        if position is None:
            self._find_position()
            damage = self._saving.damage_in(path)
            position = self._saving.batches.position
        self._saving.record(path, step, loss, position, is_good=not damage)
        return damage

    def spoil(self, good_step: int, since: float) -> Manifest | None:
        """Exclude checkpoints of diverged training from resumption, and return the newest usable
        checkpoint, or None. See :func:`robust_train.folder.checkpoints.spoil`."""
        self.finish()
        # Each rank does this, because the failure of any rank may be the failure that counts.
        return self._saving.spoil(good_step, since)
