"""The other side: what a Python script that runs under ``trainer=command`` can ask and report.

::

    run = robust_train.current_run()  # also without the launcher: then nothing is reported
    run.progress(step, loss=loss)
    if run.checkpoint_due:
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

from robust_train.attempt.run import Run
from robust_train.config.placeholders import (
    AUTO,
    EVENTS_VARIABLE,
    MicroBatchPlan,
    SavePlan,
    value_from,
)
from robust_train.files import LineFile, plain
from robust_train.model.events import Json

ReportLine = Callable[[dict[str, Json]], None]


class ScriptRun(Run):
    """A :class:`~robust_train.Run` for a script."""

    def __init__(
        self, environ: Mapping[str, str], report_line: ReportLine | None
    ) -> None:
        checkpoint = value_from(environ, "checkpoint")
        super().__init__(
            run_dir=Path(value_from(environ, "run_dir") or Path.cwd()),
            attempt=int(value_from(environ, "attempt") or 1),
            resume_checkpoint=Path(checkpoint) if checkpoint else None,
            report=None
            if report_line is None
            else lambda event: report_line(event.as_json()),
            # of torchrun, where that is what the launcher has started
            rank=int(environ.get("RANK", 0)),
            world_size=int(environ.get("WORLD_SIZE", 1)),
        )
        if not value_from(environ, "run_dir"):
            self.saving.job = None  # no one resumes
        minutes = value_from(environ, "checkpoint_every_minutes")
        self.saving.plan = SavePlan(
            every_seconds=None if minutes in (None, "", AUTO) else 60 * float(minutes),
            every_steps=_number(environ, "checkpoint_every_steps") or None,
        )
        self._report_line = report_line or (lambda line: None)
        # micro-batch of this attempt, None without the launcher
        self.batch_size = _number(environ, "batch_size")
        # micro-batches per optimizer step, None without the launcher
        self.gradient_accumulation_steps = _number(
            environ, "gradient_accumulation_steps"
        )
        self.device = value_from(
            environ, "device"
        )  # `cuda:0` or `cpu`, None without the launcher
        self.micro_batch_plan = MicroBatchPlan(
            batch_size=self.batch_size,
            gradient_accumulation_steps=self.gradient_accumulation_steps or 1,
            min_batch_size=_number(environ, "min_batch_size") or 1,
        )

    def result(self, value: Json) -> None:
        """Report the job's result; a sweep optimises it, or its key ``objective``."""
        self._report_line({"event": "result", "value": value})


@functools.cache
def current_run() -> ScriptRun:
    """Return the attempt that this script is.

    Under the launcher SIGTERM then asks to stop (``run.stop_requested``) instead of ending the
    process, if the script ever reads that. Of the processes of one distributed job only rank 0
    reports.
    """
    path = os.environ.get(EVENTS_VARIABLE)
    reports = path is not None and os.environ.get("RANK", "0") == "0"
    run = ScriptRun(os.environ, appending_to(Path(path)) if path and reports else None)
    if reports:
        atexit.register(run.send_last_progress)
        atexit.register(run.speed.send)
    if path is not None and threading.current_thread() is threading.main_thread():
        _stop_on_sigterm(run)
    return run


def appending_to(path: Path) -> ReportLine:
    file = LineFile(path)

    def report(event: dict[str, Json]) -> None:
        # a launcher that is gone, or a full disk, must not end the script
        with contextlib.suppress(OSError):
            file.append((json.dumps(event, default=plain) + "\n").encode())

    return report


def _stop_on_sigterm(run: Run) -> None:
    """Handle SIGTERM, unless the script itself does."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        run.request_stop()
        if not run.is_cooperative:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    os.register_at_fork(
        after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL)
    )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = value_from(environ, name)
    return int(text) if text else None
