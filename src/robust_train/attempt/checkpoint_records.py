"""An attempt's records of its checkpoints: their manifests, and which checkpoints may be removed.

:class:`.saves.Saves` and :class:`.checkpoints.CheckpointFolder` use it in the process that trains.
A manifest is a small file next to a checkpoint. By the manifests, a later attempt chooses the
checkpoint to resume from. See :mod:`robust_train.folder.checkpoints`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from robust_train.attempt.cadence import LARGEST_SHARE, SaveClock
from robust_train.attempt.data_position import Batches
from robust_train.config.placeholders import SavePlan
from robust_train.folder.checkpoint_files import content_of, damage_in, size_of
from robust_train.folder.checkpoint_writing import CheckpointError
from robust_train.folder.checkpoints import (
    START,
    Manifest,
    Position,
    mark,
    newest_checkpoint,
    of_job,
    record_checkpoint,
    rotate,
    spoil,
)
from robust_train.folder.identity import is_of_job, read_identity, wait_until_readable

log = logging.getLogger("robust_train")

_READS_BYTES_PER_SECOND = 300e6  # an assumption until it is measured
_WRITER_NICE = 10


class CheckpointRecords:
    """Records the checkpoints of a job's attempt number ``attempt``.

    Attributes:
        folder: the folder of the checkpoints.
        job: the job's id, which all of its attempts share. It is empty without a launcher, and None
            if no one would resume, so that no manifest is written.
        batches: counts the batches, for the position in the data.
        writer: the thread that writes and removes checkpoints while training continues.
        plan: how often to save.
        owed: the reason why the last checkpoint could not be written, or None.
        has_saved: whether a checkpoint of this attempt is on the disk.
        rotates: whether this attempt, and not a framework, removes old checkpoints.
    """

    def __init__(
        self,
        run_dir: Path,
        attempt: int,
        # Returns whether the weights after a step are known to be good.
        proves: Callable[[int], bool] = lambda step: False,
    ) -> None:
        self.writer = ThreadPoolExecutor(1, "checkpoint", _let_training_go_first)
        self.batches = Batches()
        self.folder = run_dir / "checkpoints"
        identity = wait_until_readable(lambda: read_identity(run_dir))
        self.job: str | None = "" if identity is None else identity.id
        self.plan = SavePlan()
        self.owed: CheckpointError | None = None
        self.has_saved = False
        self.rotates = False
        self._attempt = attempt
        self._proves = proves
        self._job_started = time.time() if identity is None else identity.started
        # The measured speed of reading a checkpoint back.
        self._bytes_per_second = _READS_BYTES_PER_SECOND
        self._contents: dict[Path, int] = {}  # checksums of the files that were read back
        # The manifests that could not be written yet, by checkpoint.
        self._unwritten_manifests: dict[Path, Manifest] = {}

    def follow(self, plan: SavePlan) -> None:
        """Save as often as ``plan`` says. Called before the first save."""
        self.plan = plan

    def list_nothing(self) -> None:
        """Write no manifests, because no one would resume."""
        self.job = None

    def start_writer(self) -> None:
        """Start the writer's thread, before training takes the memory: with little memory left,
        ``Thread.start()`` may hang (https://github.com/python/cpython/issues/140746)."""
        self.writer.submit(int).result()

    @cached_property
    def clock(self) -> SaveClock:
        """The clock that says when to save. It starts when it is first used."""
        manifests: list[Manifest] = []
        # If the disk is unreachable, the cost of a save is unknown, and training continues.
        with contextlib.suppress(OSError):
            manifests = of_job(self.folder, self.job) if self.job else []
        costs = [manifest.seconds for manifest in manifests if manifest.seconds]
        return SaveClock(
            self.plan,
            cost=costs[-1] if costs else 0.0,
            failures=self._attempt - 1,
            job_seconds=time.time() - self._job_started,
        )

    # --- before a save ---

    def check_folder(self) -> None:
        """Check that the run folder still belongs to this job. Each save calls this first.

        Raises:
            CheckpointError: another job has the run folder.
        """
        if not self.owns_folder():
            raise CheckpointError(
                f"{self.folder.parent}: another job has removed and restarted this run folder, and "
                "its checkpoints are left alone"
            )

    def owns_folder(self) -> bool:
        """Return whether the run folder still belongs to this job, as far as is known."""
        return not self.job or is_of_job(self.folder.parent, self.job)

    # --- after a save ---

    def damage_in(self, path: Path) -> str:
        """Return the damage of a checkpoint, empty if none is known. The checkpoint is read back
        if that takes at most 1 % of the time since the previous checkpoint."""
        if self.job is None:
            return ""
        # A checkpoint that cannot be read now may be undamaged.
        with contextlib.suppress(OSError, MemoryError):
            size = size_of(path)
            expected_seconds = size / self._bytes_per_second
            reads = expected_seconds <= LARGEST_SHARE * self.clock.interval
            started = time.monotonic()
            damage = damage_in(path, reads=reads)
            if reads and not damage:
                self._contents[path] = content_of(path)
                seconds = time.monotonic() - started
                self._bytes_per_second = max(size, 1) / max(seconds, 1e-6)
            return damage
        return ""

    def record(
        self,
        path: Path,
        step: int | None,
        loss: str = "unknown",
        position: Position = START,
        *,
        is_good: bool = True,
    ) -> None:
        """Write the manifest of the complete checkpoint at ``path``, if it is good."""
        seconds = self.clock.saved(step)
        self.owed = None
        self.has_saved |= is_good
        if self.job is not None and is_good:
            self._unwritten_manifests[path] = Manifest(
                self.job,
                self._attempt,
                step,
                path,
                seconds=seconds or None,
                loss=loss,
                position=position,
                content=self._contents.pop(path, None),
            )
            self._write_manifests()

    def _write_manifests(self) -> None:
        """Write the manifests that are missing, newest first."""
        for path, manifest in reversed(tuple(self._unwritten_manifests.items())):
            try:
                self.check_folder()
                record_checkpoint(self.folder, manifest)
            except OSError as error:
                log.warning(
                    "no manifest of the checkpoint %s yet: %s", path, error.strerror or error
                )
                if path.exists():
                    return
            del self._unwritten_manifests[path]

    def failed(self, error: CheckpointError) -> None:
        """Record that a checkpoint could not be written."""
        self.owed = error
        self.clock.failed()

    def settle(self) -> None:
        """Record that no checkpoint is owed any longer."""
        self.owed = None

    def rotate(self, keep: int) -> None:
        """Remove all checkpoints except the newest ``keep`` and the newest that is known to be
        good."""
        if self.job is not None:
            with _warning_of_manifests():
                mark(self.folder, self.job, self._loss_of)
            # Checkpoints whose manifest is still missing count towards `keep`.
            rotate(self.folder, self.job, max(keep - len(self._unwritten_manifests), 1))
            self._write_manifests()

    def _loss_of(self, manifest: Manifest) -> str:
        """Return the current value of ``loss`` for the manifest of a checkpoint."""
        has_finite_loss = manifest.loss == "finite" and manifest.step is not None
        if has_finite_loss and self._proves(manifest.step or 0):
            return "proven"
        return manifest.loss

    def spoil(self, good_step: int, since: float) -> Manifest | None:
        """Exclude checkpoints of diverged training from resumption, and return the newest usable
        checkpoint, or None. See :func:`robust_train.folder.checkpoints.spoil`."""
        if not self.job:
            return None
        with _warning_of_manifests():
            spoil(self.folder, self.job, good_step, since)
        with contextlib.suppress(OSError):
            return newest_checkpoint(self.folder, self.job)
        return None


def _let_training_go_first() -> None:
    """Lower the priority of this thread. Linux has a priority for each thread."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WRITER_NICE)


@contextlib.contextmanager
def _warning_of_manifests() -> Iterator[None]:
    """Log a warning if manifests cannot be written within the block."""
    try:
        yield
    except OSError as error:
        log.warning("manifests of checkpoints cannot be written: %s", error)
