"""Passes on the reports and checkpoints of a running script.

The trainer behind ``trainer=command`` polls :class:`WatchedScript` in the attempt's process, about
twice a second. The script reports through lines of JSON in a file (:mod:`.messages`), and its
checkpoints are found by a pattern (:mod:`.checkpoint_watch`). Both go to ``run``, like the reports
of any trainer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Collection
from pathlib import Path

from robust_train.attempt.run import Run, live_of
from robust_train.attempt.script.checkpoint_watch import (
    NOTHING,
    CheckpointWatch,
    Found,
    find_checkpoint,
)
from robust_train.attempt.script.messages import LineReader, Result, parse
from robust_train.folder.checkpoint_files import is_whole
from robust_train.folder.checkpoints import START, Position, read_manifests
from robust_train.model.errors import TrainingDiverged
from robust_train.model.events import (
    CheckpointSaved,
    EpochEnded,
    Json,
    Progress,
    SpeedMeasured,
    TrainingStarted,
    UserEvent,
)

log = logging.getLogger("robust_train")

_STARTED_OVER = (
    "the script was given %s, but wrote %s: it starts over in each attempt, or counts from 0 "
    "again; does it load the checkpoint that it is given?"
)
_OF_TRANSFORMERS = "trainer_state.json"  # each checkpoint of transformers' Trainer has this file
_WITH_TRANSFORMERS = " trainer.train(resume_from_checkpoint=args.resume_from_checkpoint) does"


class WatchedScript:
    """Reads the messages of a script while it runs, and looks for its checkpoints.

    Attributes:
        events: the file for its messages.
        result: the result that it reported, None so far.
    """

    def __init__(
        self,
        run: Run,
        cwd: Path,
        watch: CheckpointWatch,
        checkpoint: Found,  # the checkpoint to resume from
    ) -> None:
        self.events = run.run_dir / f"attempt-{run.attempt}.events"
        self.events.write_bytes(b"")
        self.result: Json = None
        self._run = run
        self._cwd = cwd
        self._watch = watch
        self._lines = LineReader(self.events)
        self._resumed = checkpoint.path
        # The newest checkpoint may be another than the checkpoint that it resumes from.
        newest = watch.newest(at_rest=True)
        self._newest = newest if newest.changed > checkpoint.changed else checkpoint
        # A checkpoint that looked damaged at the last poll, because the script may be overwriting
        # it: its path, its fingerprint and its step.
        self._doubted: tuple[Path, Found, int | None] | None = None
        self._has_warned = False
        self._has_ended = False
        if checkpoint != NOTHING and self._resumed != run.resume_checkpoint:
            run.checkpoint_saved(self._resumed, run.last_step)

    def poll(self, reported: Collection[Path] | None = None) -> None:
        """Pass on the script's new reports and checkpoints. For ``reported`` see
        :meth:`.CheckpointWatch.find_complete`."""
        if self._doubted is not None:
            path, _, step = self._doubted
            self._report_checkpoint(path, step)
        for line in self._lines.read(to_the_end=self._has_ended):
            try:
                self._pass_on(line)
            except TrainingDiverged:
                raise
            # A line may name an invalid path, for example, which must not end the script.
            except Exception as problem:
                if not self._has_warned:
                    self._has_warned = True
                    name = self.events.name
                    log.warning("%s: %r: %s", name, line[:200], problem)
        newest = self._watch.newest(at_rest=self._has_ended, reported=reported)
        # While the script overwrites its newest checkpoint, the watch finds an older one.
        is_later = newest.changed >= self._newest.changed
        if is_later and newest not in (NOTHING, self._newest):
            self._report_checkpoint(newest.path, self._run.last_step)

    def finish(self, *, was_killed: bool) -> None:
        """Pass on the remaining reports after the script has ended, and remove an empty file of
        messages."""
        self._has_ended = True
        self.poll([self._newest.path] if was_killed else None)
        unused = self._watch.explain_unused(self._newest)
        if unused is not None:
            live_of(self._run).reports.send(unused)
        with contextlib.suppress(OSError):  # The script may have removed it.
            if self.events.stat().st_size == 0:
                self.events.unlink()

    def _pass_on(self, line: str) -> None:
        """Pass a message of the script on to ``run``."""
        reports = live_of(self._run).reports
        match parse(line):
            case Progress(step=step, total_steps=total, metrics=metrics):
                self._run.progress(step, total_steps=total, **metrics)
            case TrainingStarted(step=step):
                self._run.started(step)
            case CheckpointSaved(path=path, step=step):
                if step is None:
                    step = self._run.last_step
                self._report_checkpoint(self._cwd / os.path.expanduser(path), step)
            case Result(value=value):
                self.result = value
            # A script does not know which figure `objective` names.
            case EpochEnded(epoch=epoch, metrics=metrics) as event:
                reports.send(event)
                reports.report_objective(metrics, epoch)
            case UserEvent(fields=fields) as event:
                reports.send(event)
                reports.report_objective(fields, fields.get("step"))
            case SpeedMeasured() as event:
                # The script measures its own speed.
                live_of(self._run).speed.stop()
                reports.send(event)
            case event:
                reports.send(event)

    def _report_checkpoint(self, path: Path, step: int | None) -> None:
        """Report a checkpoint. If it looks damaged, it is checked again at the next poll, until it
        stays the same: the script may be writing the next checkpoint over it."""
        self._warn_if_started_over(path)
        self._newest = find_checkpoint(path)
        was_removed = self._newest == NOTHING
        is_empty = not self._newest.size and not was_removed and not is_whole(path)
        is_damaged = bool(live_of(self._run).saving.damage_in(path)) or is_empty
        doubted = path, self._newest, step
        if is_damaged and not self._has_ended and doubted != self._doubted:
            self._doubted = doubted
            return
        self._doubted = None
        if is_empty:
            log.warning("checkpoint %s is empty; it is not used", path)
            return
        # With a position, the checkpoint is not checked for damage again.
        position = None if is_damaged else self._position_in(path)
        live_of(self._run).checkpoint_saved(path, step, position)

    def _warn_if_started_over(self, path: Path) -> None:
        """Warn, once, if the script writes a checkpoint from before the checkpoint that it resumes
        from."""
        if _is_before(path.name, self._resumed.name):
            advice = ""
            if (path / _OF_TRANSFORMERS).exists():
                advice = _WITH_TRANSFORMERS
            log.warning(_STARTED_OVER + advice, self._resumed.name, path.name)
            self._resumed = NOTHING.path

    def _position_in(self, path: Path) -> Position:
        """Return the script's position in its data, which its own ``run`` may have stored."""
        with contextlib.suppress(OSError):
            for manifest in read_manifests(self._run.checkpoint_dir):
                is_same = manifest.path == path.absolute()
                if is_same and manifest.attempt == self._run.attempt:
                    return manifest.position
        return START


def _is_before(name: str, other: str) -> bool:
    """Return whether two names differ only in their numbers, and the first number in which they
    differ is smaller in ``name``. Example: ``epoch=2-loss=0.5`` is before ``epoch=3-loss=0.7``."""
    parts = re.split(r"(\d+)", name)
    other_parts = re.split(r"(\d+)", other)
    numbers = [int(number) for number in parts[1::2]]
    other_numbers = [int(number) for number in other_parts[1::2]]
    return parts[::2] == other_parts[::2] and numbers < other_numbers
