"""When to save a checkpoint: often if that is cheap, more often if the job fails often.

Runs in the process that trains. :class:`.live.LiveAttempt` asks :class:`SaveClock` after each step.
:class:`.saves.Saves` reports each written checkpoint to :class:`Saving`, which writes manifests and
removes old checkpoints. A save calls the clock's ``begin``, then ``copied`` if training
continues during the write, and at last ``saved`` or ``failed``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from robust_train.attempt.data_position import Batches
from robust_train.config.placeholders import SavePlan
from robust_train.folder.checkpoints import (
    START,
    CheckpointError,
    Manifest,
    Position,
    content_of,
    damage_in,
    mark,
    newest_checkpoint,
    of_job,
    record_checkpoint,
    rotate,
    size_of,
    spoil,
)
from robust_train.folder.identity import is_of_job, read_identity, wait_until_readable

log = logging.getLogger("robust_train")

SHORTEST_SECONDS = 10.0
LONGEST_SECONDS = 300.0
LEAST_SECONDS = 1.0
"""The least time between two checkpoints of a job that fails often, and before the first, which
measures the cost of a save."""
_FIRST_COSTS = 6.0
"""A job's first save takes this many times as long: the copy's memory has to be allocated first."""
OWED_SECONDS = 60.0
"""The time until a failed checkpoint is tried again."""
_LARGEST_SHARE = 0.01
_READS_BYTES_PER_SECOND = 300e6  # an assumption until it is measured
_WRITER_NICE = 10


def seconds_between_saves(cost: float, failures: int, seconds: float) -> float:
    """Return the time between two checkpoints.

    The first checkpoint comes after a second. From then on saving takes at most 1 % of the time,
    with 10 seconds to 5 minutes between checkpoints. A failure costs half the interval on average.
    An interval of √(2 × cost × mean time between failures) loses least in total (Young 1974,
    doi:10.1145/361147.361115), so a job that has failed uses it if it is shorter. A job without
    failures may still fail after running as long again. If that gives less than 10 seconds, it
    replaces the 10 seconds too.

    Args:
        cost: how long a save holds training up in seconds, 0 if unknown.
        failures: how often the job has failed so far.
        seconds: the time in which it failed that often.
    """
    loses_least = math.sqrt(2 * cost * max(seconds, 0.0) / max(failures, 1))
    loses_least = max(loses_least, LEAST_SECONDS)
    shortest = SHORTEST_SECONDS if failures else min(loses_least, SHORTEST_SECONDS)
    interval = min(max(cost / _LARGEST_SHARE, shortest), LONGEST_SECONDS)
    return min(interval, loses_least) if failures else interval


class SaveClock:
    """Measures what saving costs and when the next checkpoint is due."""

    def __init__(
        self,
        plan: SavePlan,  # the config's demands
        *,
        # How long the job's last save took in seconds, 0 if unknown.
        cost: float = 0.0,
        # Number of the job's attempts before this one.
        failures: int = 0,
        job_seconds: float = 0.0,  # time since the job's first launch
        now: Callable[[], float] = time.monotonic,  # the clock, in seconds
    ) -> None:
        self._plan = plan
        self._cost = cost
        self._failures = failures
        self._now = now
        self._began = now() - job_seconds  # the start of the job on this clock
        self._last_saved = self._saved_at = now()
        self.interval = 0.0  # seconds between the last two saves
        self._saved_step: int | None = None
        self._saving_since: float | None = None
        self._has_saved = False
        self._retries_at = 0.0  # set after a failed save
        self._calls = 0
        self.spent = 0.0  # seconds for which saves have held training up

    def is_due(self, step: int | None) -> bool:
        """Return whether to save after optimizer step ``step``. If it is None, the calls are
        counted."""
        self._calls += 1
        step = self._calls if step is None else step
        if self._saved_step is None:
            self._saved_step = step - 1
        now = self._now()
        plan = self._plan
        if self._retries_at:
            return now >= self._retries_at
        if plan.every_steps and step - self._saved_step >= plan.every_steps:
            return True
        every = plan.every_seconds
        if every is None:
            since = now - self._began
            every = seconds_between_saves(self._cost, self._failures, since)
        return now - self._saved_at >= every

    def begin(self, step: int | None) -> None:
        """Record the start of a save."""
        self._mark(step)
        self._saving_since = self._saved_at
        # this save is the retry, however long it takes to be written
        self._retries_at = 0.0

    def copied(self) -> None:
        """Record that training continues while a copy is written."""
        if self._saving_since is not None:
            seconds = self._now() - self._saving_since
            self.spent += seconds
            # The first save also allocates the memory that the next saves use again.
            is_first = not self._has_saved
            self._has_saved = True
            expected = self._cost if self._cost else seconds / _FIRST_COSTS
            self._cost = min(seconds, expected) if is_first else seconds
        self._saving_since = None

    def failed(self) -> None:
        """Record that the checkpoint could not be written: it is due again in a minute."""
        self._saving_since = None
        self._retries_at = self._now() + OWED_SECONDS

    def saved(self, step: int | None) -> float:
        """Return how long the save held training up in seconds, 0 if that is unknown."""
        self._retries_at = 0.0
        now = self._now()
        self.interval = now - self._last_saved
        self._last_saved = now
        # The next save may have begun before this checkpoint was on the disk.
        if step is None or self._saved_step is None or step >= self._saved_step:
            self.copied()
            self._mark(step)
        return self._cost

    def _mark(self, step: int | None) -> None:
        self._saved_at = self._now()
        self._saved_step = self._calls if step is None else step


class Saving:
    """Decides when attempt number ``attempt`` of a job saves, and records what it has saved."""

    def __init__(
        self,
        run_dir: Path,
        attempt: int,
        # Returns whether the weights after a step are known to be good.
        proves: Callable[[int], bool] = lambda step: False,
    ) -> None:
        # Writes and removes checkpoints while training continues.
        self.writer = ThreadPoolExecutor(1, "checkpoint", _let_training_go_first)
        self.batches = Batches()
        self.folder = run_dir / "checkpoints"  # the folder of the checkpoints
        identity = wait_until_readable(lambda: read_identity(run_dir))
        # Identity of the job, the same for all of its attempts. Empty without a launcher. None if
        # no one would resume, so that no manifest is written.
        self.job: str | None = "" if identity is None else identity.id
        self._attempt = attempt
        self._proves = proves
        self._job_started = time.time() if identity is None else identity.started
        # Why the last checkpoint could not be written, None if it was.
        self.owed: CheckpointError | None = None
        self.has_saved = False  # whether a checkpoint of this attempt is on the disk
        self.rotates = False  # whether this attempt, and not a framework, removes old checkpoints
        # The measured speed of reading back.
        self._bytes_per_second = _READS_BYTES_PER_SECOND
        self._contents: dict[Path, int] = {}  # checksums of the files that were read back
        # The manifests that could not be written, by checkpoint.
        self._unlisted: dict[Path, Manifest] = {}
        self.plan = SavePlan()  # how often to save

    def follow(self, plan: SavePlan) -> None:
        """Save as often as ``plan`` says. Called before the first save."""
        self.plan = plan

    def list_nothing(self) -> None:
        """Write no manifests, because no one would resume."""
        self.job = None

    def check_folder(self) -> None:
        """Check that the run folder still belongs to this job. Each save calls this first.

        Raises:
            CheckpointError: another job has the run folder.
        """
        if not self.owns_folder():
            raise CheckpointError(
                f"{self.folder.parent}: this run folder was removed and begun anew by another job, "
                "whose checkpoints stay as they are"
            )

    def owns_folder(self) -> bool:
        """Return whether the run folder still belongs to this job, as far as is known."""
        return not self.job or is_of_job(self.folder.parent, self.job)

    def start_writer(self) -> None:
        """Start the writer's thread, before training takes the memory: with little memory left,
        ``Thread.start()`` may hang (https://github.com/python/cpython/issues/140746)."""
        self.writer.submit(int).result()

    @cached_property
    def clock(self) -> SaveClock:
        """Return the clock of the checkpoints, which starts at the first call."""
        manifests: list[Manifest] = []
        # If the disk is unreachable, this figure is missing, and training continues.
        with contextlib.suppress(OSError):
            manifests = of_job(self.folder, self.job) if self.job else []
        return SaveClock(
            self.plan,
            cost=next(
                (manifest.seconds for manifest in reversed(manifests) if manifest.seconds), 0.0
            ),
            failures=self._attempt - 1,
            job_seconds=time.time() - self._job_started,
        )

    def saved(
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
            self._unlisted[path] = Manifest(
                self.job,
                self._attempt,
                step,
                path,
                seconds=seconds or None,
                loss=loss,
                position=position,
                content=self._contents.pop(path, None),
            )
            self._list()

    def _list(self) -> None:
        """Write the manifests that are missing, newest first."""
        for path, manifest in reversed(tuple(self._unlisted.items())):
            try:
                self.check_folder()
                record_checkpoint(self.folder, manifest)
            except OSError as error:
                log.warning(
                    "no manifest of the checkpoint %s yet: %s", path, error.strerror or error
                )
                if path.exists():
                    return
            del self._unlisted[path]

    def damage_in(self, path: Path) -> str:
        """Return what is wrong with a checkpoint, empty if nothing is known to be. Reading it back
        takes at most 1 % of the time."""
        if self.job is None:
            return ""
        # A checkpoint that cannot be read back just now may be undamaged.
        with contextlib.suppress(OSError, MemoryError):
            size = size_of(path)
            takes = size / self._bytes_per_second
            reads = takes <= _LARGEST_SHARE * self.clock.interval
            started = time.monotonic()
            damage = damage_in(path, reads=reads)
            if reads and not damage:
                self._contents[path] = content_of(path)
                seconds = time.monotonic() - started
                self._bytes_per_second = max(size, 1) / max(seconds, 1e-6)
            return damage
        return ""

    def failed(self, error: CheckpointError) -> None:
        """Record that a checkpoint could not be written."""
        self.owed = error
        self.clock.failed()

    def settle(self) -> None:
        """Record that no checkpoint is owed any longer."""
        self.owed = None

    def rotate(self, keep: int) -> None:
        """Remove all but the newest ``keep`` checkpoints and the last that is known to be good."""

        def loss_of(manifest: Manifest) -> str:
            may_be = manifest.loss == "finite" and manifest.step is not None
            return "proven" if may_be and self._proves(manifest.step or 0) else manifest.loss

        if self.job is not None:
            with _warned():
                mark(self.folder, self.job, loss_of)
            # Checkpoints whose manifest is still missing count towards `keep`.
            rotate(self.folder, self.job, max(keep - len(self._unlisted), 1))
            self._list()

    def spoiled(self, good_step: int, since: float) -> Manifest | None:
        """Exclude checkpoints after ``good_step`` from resumption (see :func:`spoil`), and return
        the newest that remains."""
        if not self.job:
            return None
        with _warned():
            spoil(self.folder, self.job, good_step, since)
        with contextlib.suppress(OSError):
            return newest_checkpoint(self.folder, self.job)
        return None


def _let_training_go_first() -> None:
    """Lower the priority of this thread. Linux has a priority for each thread."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WRITER_NICE)


@contextlib.contextmanager
def _warned() -> Iterator[None]:
    """Warn if manifests cannot be written."""
    try:
        yield
    except OSError as error:
        log.warning("manifests of checkpoints cannot be written: %s", error)
