"""A script's reports: lines of JSON in the file that ``ROBUST_TRAIN_EVENTS`` names.

It is a file because any language can append to a file, also in a process several wrappers below,
and it never blocks anyone. Both sides are here: the reader in the attempt, and the class for Python
scripts::

    run = robust_train.current_run()  # also without the launcher: then nothing is reported
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from robust_train.attempt.run import Run, live_of
from robust_train.config.placeholders import (
    AUTO,
    EVENTS_VARIABLE,
    MicroBatchPlan,
    SavePlan,
    SplitRule,
    value_from,
)
from robust_train.files import LineFile, to_plain
from robust_train.folder.trackers import TrackerNote
from robust_train.host.linux import release_blocks
from robust_train.model import events

ReportLine = Callable[[dict[str, events.Json]], None]

_LARGEST_LINE = 50_000
_ADDED_FIELDS = frozenset({"event", "attempt", "time"})
_DOCUMENTED = {
    "progress": "progress",
    "started": "training_started",
    "training_started": "training_started",
    "checkpoint": "checkpoint",
    "report": "report",
}
"""The event for each of a script's events."""
_OF_A_RUN = frozenset(
    {
        "micro_batch_changed",
        "micro_batch_exhausted",
        "split_checked",
        "memory",
        "memory_cleared",
        "epoch",
        "speed",
        "trainer_supports",
    }
)
"""Events that :func:`robust_train.current_run` sends in addition to the documented messages."""
_SPLIT = ("batch_size", "gradient_accumulation_steps")


class NotUnderstoodError(ValueError):
    """A line is not a message. The text is the reason."""


@dataclass(frozen=True)
class Result:
    """The job's result."""

    value: events.Json


def parse(line: str) -> events.Event | Result:
    """Return the event in one line. An unknown event is the script's own event.

    Raises:
        NotUnderstoodError: the line is not a message.
    """
    if len(line) > _LARGEST_LINE:
        raise NotUnderstoodError(f"longer than {_LARGEST_LINE} characters")
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NotUnderstoodError(f"not JSON: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("event"), str):
        raise NotUnderstoodError('not an object with a name under "event"')
    name = data["event"]
    fields = {key: to_plain(value) for key, value in data.items() if key not in _ADDED_FIELDS}
    if name in _DOCUMENTED:
        return _documented(name, fields)
    if name == "result":
        if "value" not in fields:
            raise NotUnderstoodError("result needs value")
        return Result(fields["value"])
    if name in _OF_A_RUN:
        with contextlib.suppress(events.MalformedEventError):
            return events.parse({"event": name, **fields})
    if name == "user" and isinstance(fields.get("event_name"), str):
        name = fields["event_name"]
        inner = fields.get("fields")
        fields = inner if isinstance(inner, dict) else {}
    return events.UserEvent(name, fields)


def _documented(name: str, fields: dict[str, events.Json]) -> events.Event:
    step = fields.get("step")
    if isinstance(step, int) and step < 0:
        raise NotUnderstoodError(f"{name}: step must be an integer of 0 or more")
    if name == "progress":
        nested = fields.get("metrics")
        given = fields | (nested if isinstance(nested, dict) else {})
        fields["total_steps"] = fields.get("total_steps") or None
        fields["metrics"] = {
            key: value
            for key, value in given.items()
            if key not in ("step", "total_steps") and isinstance(value, (int, float))
        }
    elif name == "checkpoint":
        fields = {"path": fields.get("path") or None, "step": step if type(step) is int else None}
    try:
        return events.parse({**fields, "event": _DOCUMENTED[name]})
    except events.MalformedEventError as error:
        raise NotUnderstoodError(f"{name}: {error}") from None


class LineReader:
    """Reads whole lines as they are appended to a file, in bounded memory and disk space."""

    def __init__(self, path: Path, *, block_bytes: int = 1 << 20) -> None:
        self._path = path
        self._block = block_bytes
        self._offset = self._released = 0
        self._rest = b""

    def read(self, *, to_the_end: bool = False) -> Iterator[str]:
        """Yield the lines since the last call, shortened if they are too long; ``to_the_end``
        includes an incomplete last line."""
        # One block of passed-on lines is kept, because some of it may still be on its way.
        old = self._offset - self._block - self._released
        if old >= self._block:
            release_blocks(self._path, self._released, old)
            self._released += old
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            # A script that writes faster than this loop would keep it reading without end.
            size = os.fstat(file.fileno()).st_size
            file.seek(self._offset)
            while data := file.read(min(self._block, max(size - self._offset, 0))):
                self._offset += len(data)
                *lines, rest = (self._rest + data).split(b"\n")
                self._rest = rest[: 4 * _LARGEST_LINE + 1]
                yield from _texts(lines)
        if to_the_end:
            yield from _texts([self._rest])
            self._rest = b""


def _texts(lines: Iterable[bytes]) -> Iterator[str]:
    for line in lines:
        text = line.decode(errors="replace").strip()
        if text:
            yield text


class ScriptRun(Run):
    """A :class:`~robust_train.Run` for a script."""

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
            # torchrun sets the rank, if the launcher has started torchrun.
            rank=int(environ.get("RANK", 0)),
            world_size=int(environ.get("WORLD_SIZE", 1)),
        )
        live = live_of(self)
        if not value_from(environ, "run_dir"):
            live.saving.list_nothing()  # no one resumes from here
        # Only the script's process sees which runs of trackers it logs to.
        self._trackers = TrackerNote(self.run_dir, live.saving.job if self.is_main else None)
        minutes = value_from(environ, "checkpoint_every_minutes")
        live.saving.follow(
            SavePlan(
                every_seconds=None if minutes in (None, "", AUTO) else 60 * float(minutes),
                every_steps=_number(environ, "checkpoint_every_steps") or 0,
            )
        )
        live.saves.keep_newest(_number(environ, "keep_checkpoints") or live.saves.keep)
        self._report_line = report_line
        self._split = {name: _number(environ, name) for name in _SPLIT}
        self._has_read: set[str] = set()
        # `cuda:0` or `cpu`, None without the launcher.
        self.device = value_from(environ, "device")
        live.parts.check_by(SplitRule.named(value_from(environ, "split_rule")))
        live.parts.split_by(
            MicroBatchPlan(
                batch_size=self._split["batch_size"],
                gradient_accumulation_steps=self._split["gradient_accumulation_steps"] or 1,
                min_batch_size=_number(environ, "min_batch_size") or 1,
            )
        )
        live.parts.call_before_first(self._read_split)

    def progress(self, /, step: int, *, total_steps: int | None = None, **scalars: float) -> bool:
        """Report that optimizer step ``step`` is done. See :meth:`.Run.progress`."""
        is_passed_on = super().progress(step, total_steps=total_steps, **scalars)
        if is_passed_on:
            self._trackers.poll()
        return is_passed_on

    @property
    def batch_size(self) -> int | None:
        """Micro-batch size of this attempt, None without the launcher. A script that reads it may
        get a smaller size in the next attempt."""
        return self._read("batch_size")

    @property
    def gradient_accumulation_steps(self) -> int | None:
        """Micro-batches per optimizer step, None without the launcher."""
        return self._read("gradient_accumulation_steps")

    def _read_split(self) -> None:
        """Report that the script reads its batch: a different split keeps the effective batch."""
        for name in _SPLIT:
            self._read(name)

    def _read(self, name: str) -> int | None:
        if name not in self._has_read:
            self._has_read.add(name)
            live_of(self).reports.send(events.TrainerSupports((name,)))
        return self._split[name]

    def result(self, value: events.Json) -> None:
        """Report the job's result. A sweep optimises it, or its key ``objective``."""
        self._report_line({"event": "result", "value": value})


@functools.cache
def current_run() -> ScriptRun:
    """Return the attempt that this script belongs to.

    Under the launcher SIGTERM then asks to stop (``run.should_stop()``) instead of ending the
    process, if the script ever calls that. In a distributed job only rank 0 reports.
    """
    path = os.environ.get(EVENTS_VARIABLE)
    if path is None:
        return ScriptRun(os.environ)
    if os.environ.get("RANK", "0") == "0":
        run = ScriptRun(os.environ, appending_to(Path(path)))
        atexit.register(live_of(run).reports.send_last_progress)
        atexit.register(live_of(run).speed.send)
    else:
        run = ScriptRun(os.environ)
    if threading.current_thread() is threading.main_thread():
        _stop_on_sigterm(run)
    return run


def appending_to(path: Path) -> ReportLine:
    file = LineFile(path)

    def report(event: dict[str, events.Json]) -> None:
        # A launcher that has ended, or a full disk, must not end the script.
        with contextlib.suppress(OSError):
            file.append((json.dumps(event, default=to_plain) + "\n").encode())

    return report


def _stop_on_sigterm(run: Run) -> None:
    """Handle SIGTERM, unless the script handles it."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        live_of(run).stops.request_stop()
        if not live_of(run).stops.is_cooperative:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = value_from(environ, name)
    return int(text) if text else None
