"""The object ``run`` of a Python script, which ``robust_train.current_run()`` returns.

The script's process uses it. It gets its settings from environment variables (`value_from`), and
writes its reports as lines of JSON into the file that ``ROBUST_TRAIN_EVENTS`` names.
:mod:`.messages` reads them in the attempt's process::

    run = robust_train.current_run()  # works without the launcher too, but reports nothing
    run.progress(step, loss=loss)
    if run.should_save():
        save(path)
        run.checkpoint_saved(path, step)
    run.result(accuracy)
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from robust_train.attempt.run import Run, live_of
from robust_train.config.placeholders import AUTO, EVENTS_VARIABLE, value_from
from robust_train.config.training_plans import MicroBatchPlan, SavePlan, SplitRule
from robust_train.files import LineFile, to_plain
from robust_train.folder.trackers import TrackerNote
from robust_train.model import events

ReportLine = Callable[[dict[str, events.Json]], None]
"""Writes the JSON object of a message as a line."""

_SPLIT = ("batch_size", "gradient_accumulation_steps")
"""The names of the values by which a script splits its batch."""


class ScriptRun(Run):
    """A :class:`~robust_train.Run` for a script.

    Attributes:
        device: ``cuda:0`` or ``cpu``, None without the launcher.
    """

    def __init__(
        self, environ: Mapping[str, str], report_line: ReportLine = lambda line: None
    ) -> None:
        run_dir = value_from(environ, "run_dir")
        checkpoint = value_from(environ, "checkpoint")
        super().__init__(
            run_dir=Path(run_dir) if run_dir else Path.cwd(),
            attempt=int(value_from(environ, "attempt") or 1),
            resume_checkpoint=Path(checkpoint) if checkpoint else None,
            report=lambda event: report_line(event.as_json()),
            # torchrun sets these two variables.
            rank=int(environ.get("RANK", 0)),
            world_size=int(environ.get("WORLD_SIZE", 1)),
        )
        live = live_of(self)
        if not run_dir:
            # Without the launcher, no one resumes from this run.
            live.saving.list_nothing()
        # The runs of experiment trackers are known only in the script's process.
        self._trackers = TrackerNote(self.run_dir, live.saving.job if self.is_main else None)
        minutes = value_from(environ, "checkpoint_every_minutes")
        live.saving.follow(
            SavePlan(
                every_seconds=None if minutes in (None, "", AUTO) else 60 * float(minutes),
                every_steps=_read_number(environ, "checkpoint_every_steps") or 0,
            )
        )
        live.saves.keep_newest(_read_number(environ, "keep_checkpoints") or live.saves.keep)
        self.device = value_from(environ, "device")
        self._report_line = report_line
        self._split = {name: _read_number(environ, name) for name in _SPLIT}
        # The values that the script has read.
        self._read_names: set[str] = set()
        live.parts.check_by(SplitRule.named(value_from(environ, "split_rule")))
        live.parts.split_by(
            MicroBatchPlan(
                batch_size=self._split["batch_size"],
                gradient_accumulation_steps=self._split["gradient_accumulation_steps"] or 1,
                min_batch_size=_read_number(environ, "min_batch_size") or 1,
            )
        )
        live.parts.call_before_first(self._read_split)

    def progress(self, /, step: int, *, total_steps: int | None = None, **scalars: float) -> bool:
        """Report that optimizer step ``step`` is done. See :meth:`.Run.progress`."""
        is_sent = super().progress(step, total_steps=total_steps, **scalars)
        if is_sent:
            self._trackers.poll()
        return is_sent

    @property
    def batch_size(self) -> int | None:
        """Micro-batch size of this attempt, None without the launcher. Once a script has read it,
        the next attempt may have a smaller size."""
        return self._read("batch_size")

    @property
    def gradient_accumulation_steps(self) -> int | None:
        """Micro-batches per optimizer step, None without the launcher."""
        return self._read("gradient_accumulation_steps")

    def _read_split(self) -> None:
        """Report that the script follows the split of its batch, so that the next attempt may have
        another split."""
        for name in _SPLIT:
            self._read(name)

    def _read(self, name: str) -> int | None:
        """Return a value, and report the first time that the script reads it."""
        if name not in self._read_names:
            self._read_names.add(name)
            live_of(self).reports.send(events.TrainerSupports((name,)))
        return self._split[name]

    def result(self, value: events.Json) -> None:
        """Report the job's result. A sweep optimises it or, if it is a dictionary, the figure that
        the setting ``objective`` names."""
        self._report_line({"event": "result", "value": value})


@functools.cache
def current_run() -> ScriptRun:
    """Return the run of this script. Every call returns the same object.

    Under the launcher, SIGTERM no longer ends a script that calls ``run.should_stop()``, but makes
    that call return True. With several ranks, only rank 0 reports.
    """
    path = os.environ.get(EVENTS_VARIABLE)
    if path is None:
        return ScriptRun(os.environ)
    if os.environ.get("RANK", "0") == "0":
        run = ScriptRun(os.environ, line_writer(Path(path)))
        atexit.register(live_of(run).reports.send_last_progress)
        atexit.register(live_of(run).speed.send)
    else:
        run = ScriptRun(os.environ)
    if threading.current_thread() is threading.main_thread():
        _stop_on_sigterm(run)
    return run


def line_writer(path: Path) -> ReportLine:
    """Return a function that appends messages to a file."""
    file = LineFile(path)

    def report(event: dict[str, events.Json]) -> None:
        # The script must survive a full disk and the end of its launcher.
        with contextlib.suppress(OSError):
            file.append((json.dumps(event, default=to_plain) + "\n").encode())

    return report


def _stop_on_sigterm(run: Run) -> None:
    """Let SIGTERM ask the script to stop, unless the script has its own handler."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        live_of(run).stops.request_stop()
        # A script that has never called should_stop ends at once, as without this handler.
        if not live_of(run).stops.is_cooperative:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _read_number(environ: Mapping[str, str], name: str) -> int | None:
    text = value_from(environ, name)
    return int(text) if text else None
