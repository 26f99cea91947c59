"""The trainer behind ``trainer=command``: one attempt is one run of the script.

The script inherits the attempt's output streams, so what it prints is shown and kept as any
trainer's. How it ended is the event ``script_ended``; why it failed is classified by the
launcher, which has the end of the output.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from robust_train.errors import Interrupted, UserError
from robust_train.events import ScriptEnded, ScriptStarted
from robust_train.execution.environment import shared_machine_environment
from robust_train.run import Run
from robust_train.runfolder.cadence import AUTO
from robust_train.runfolder.whole import is_whole
from robust_train.script.checkpoints import (
    CheckpointWatch,
    Stamp,
    read_stamps,
    stamp_of,
    stamps,
    write_stamps,
)
from robust_train.script.messages import (
    LineReader,
    Message,
    NotUnderstood,
    event_of,
    metrics_of,
    parse,
)
from robust_train.script.process import Script
from robust_train.script.settings import CommandSettings
from robust_train.script.values import EVENTS_VARIABLE, ScriptValues
from robust_train.values import FailureKind

log = logging.getLogger("robust_train")

_BEFORE = "checkpoints_before.json"


def preload_modules(cfg: DictConfig) -> tuple[str, ...]:
    """Nothing to import early; called before a device is chosen, so the place to refuse.

    Raises:
        ConfigError: there is nothing to run, or it cannot be found.
    """
    CommandSettings.of(cfg)
    return ()


def train(cfg: DictConfig, run: Run) -> Any:
    """Run the script once; return the result that it reported, None if none.

    Raises:
        ConfigError: it cannot be started.
        UserError: it failed.
        Interrupted: it was asked to stop, however it ended then.
    """
    settings = CommandSettings.of(cfg)
    # nothing is held here, and what is logged here would be read as the end of the output
    run.memory_keeper = None
    values = _values(cfg, run)
    pattern = settings.checkpoint_glob
    pattern = pattern and str(settings.cwd / values.fill(pattern))
    before = _before(pattern, settings, run)
    checkpoint = _checkpoint(pattern, before, run)
    values = _values(cfg, run, checkpoint)
    words = settings.argv if checkpoint is None else (*settings.argv, *settings.resume_argv)
    argv = [values.fill(word) for word in words]
    if checkpoint is not None and checkpoint != run.resume_checkpoint:
        _report_checkpoint(run, checkpoint)
    events = run.run_dir / f"attempt-{run.attempt}.events"
    events.write_bytes(b"")
    attempt = _Attempt(run, settings, events, pattern, before, checkpoint)
    run.report(ScriptStarted(tuple(argv), str(settings.cwd)))
    script = Script(argv, _environment(values, events), settings.cwd)
    try:
        returncode = script.wait(run, settings.stop_grace_seconds, attempt.poll)
    finally:
        attempt.finish()
    kind, message = attempt.failure or (None, None)
    run.report(ScriptEnded(returncode, script.pid, kind, message))
    if run.stop_requested:
        raise Interrupted(f"the script was asked to stop and {_how(returncode)}")
    if returncode != 0:
        raise UserError(f"the script {_how(returncode)}")
    (run.run_dir / _BEFORE).unlink(missing_ok=True)  # what comes next in this folder starts afresh
    return attempt.result


class _Attempt:
    """What is seen of a script while it runs."""

    def __init__(
        self,
        run: Run,
        settings: CommandSettings,
        events: Path,
        pattern: str | None,
        before: Mapping[str, Stamp],
        checkpoint: Path | None,
    ) -> None:
        self.result: Any = None
        self.failure: tuple[FailureKind, str] | None = None
        self._run = run
        self._cwd = settings.cwd
        self._lines = LineReader(events)
        self._events = events
        self._watch = None if pattern is None else CheckpointWatch(pattern, before)
        self._known = (checkpoint, None if checkpoint is None else _stamp(checkpoint))
        self._complained = False

    def poll(self) -> None:
        """Pass on what the script has reported and saved."""
        self._take_lines(self._lines.read())
        if self._watch is not None:
            self._found(self._watch.newest(at_rest=False))

    def finish(self) -> None:
        """The same when the script has ended."""
        self._take_lines(self._lines.read(to_the_end=True))
        if self._watch is not None:
            self._found(self._watch.newest(at_rest=True))
        if self._events.stat().st_size == 0:
            self._events.unlink()

    def _found(self, checkpoint: Path | None) -> None:
        if checkpoint is not None and self._known != (found := (checkpoint, _stamp(checkpoint))):
            self._known = found
            _report_checkpoint(self._run, checkpoint)

    def _take_lines(self, lines: list[str]) -> None:
        for line in lines:
            try:
                self._take(parse(line))
            except NotUnderstood as problem:
                if not self._complained:
                    self._complained = True
                    log.warning("%s: %r: %s", self._events.name, line[:200], problem)

    def _take(self, message: Message) -> None:
        fields = dict(message.fields)
        if message.event == "progress":
            self._run.progress(
                fields["step"], total_steps=fields.get("total_steps"), **metrics_of(message)
            )
        elif message.event in ("started", "training_started"):
            self._run.started(fields["step"])
        elif message.event == "checkpoint":
            path = self._cwd / Path(fields["path"]).expanduser()
            self._known = (path, _stamp(path))
            _report_checkpoint(self._run, path, fields.get("step"))
        elif message.event == "result":
            self.result = fields["value"]
        elif message.event == "failed":
            self.failure = FailureKind(fields["kind"]), fields["message"]
        else:
            self._run.report(event_of(message))


def _values(cfg: DictConfig, run: Run, checkpoint: Path | None = None) -> ScriptValues:
    training = cfg.training
    return ScriptValues(
        batch_size=training.batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        num_gpus=cfg.get("num_gpus") or 1,
        min_batch_size=cfg.get("min_batch_size") or 1,
        num_workers=training.num_workers,
        device=str(cfg.device),
        attempt=run.attempt,
        checkpoint="" if checkpoint is None else str(checkpoint),
        run_dir=str(run.run_dir),
        checkpoint_every_minutes=str(training.get("checkpoint_every_minutes") or AUTO),
        checkpoint_every_steps=training.get("checkpoint_every_steps") or 0,
    )


def _environment(values: ScriptValues, events: Path) -> dict[str, str]:
    return {
        # or what a Python script prints would be seen when a buffer is full, and lost at a kill
        "PYTHONUNBUFFERED": "1",
        **shared_machine_environment(os.environ),
        **values.environment(),
        EVENTS_VARIABLE: str(events),
    }


def _before(pattern: str | None, settings: CommandSettings, run: Run) -> Mapping[str, Stamp]:
    """What matched before the job began: noted at its first attempt."""
    if pattern is None:
        return {}
    path = run.run_dir / _BEFORE
    starts_afresh = not settings.resume and run.resume_checkpoint is None
    noted = None if run.attempt == 1 or starts_afresh else read_stamps(path)
    if noted is None:
        noted = stamps(pattern)
        write_stamps(path, noted)
    return noted


def _checkpoint(pattern: str | None, before: Mapping[str, Stamp], run: Run) -> Path | None:
    """The newest of the one that was reported and those that the pattern finds."""
    reported = run.resume_checkpoint
    if reported is not None and not is_whole(reported):
        log.warning("checkpoint %s is gone or torn; it is passed over", reported)
        reported = None
    found = None if pattern is None else CheckpointWatch(pattern, before).newest(at_rest=True)
    candidates = [path for path in (reported, found) if path is not None]
    return max(candidates, key=lambda path: stamp_of(path).changed_ns, default=None)


def _report_checkpoint(run: Run, path: Path, step: Any = None) -> None:
    run.checkpoint_saved(path, step if type(step) is int else run.last_step)


def _stamp(path: Path) -> Stamp | None:
    with contextlib.suppress(OSError):
        return stamp_of(path)
    return None


def _how(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        return f"ended by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"ended by signal {-returncode}"
