"""The trainer behind ``trainer=command``: one attempt is one run of the script.

The script inherits the attempt's output streams, so what it prints is shown and kept as any
trainer's. Why it failed is classified by the launcher, which has the end of the output.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from robust_train.config.plans import AUTO
from robust_train.errors import ConfigError, Interrupted, UserError
from robust_train.events import (
    CheckpointSaved,
    Json,
    Progress,
    ScriptEnded,
    ScriptStarted,
    SpeedMeasured,
    TrainingStarted,
)
from robust_train.execution import TICK_SECONDS
from robust_train.execution.environment import shared_machine_environment
from robust_train.files import write_json
from robust_train.readable import signal_name
from robust_train.run import Run
from robust_train.runfolder.manifests import is_whole
from robust_train.script.checkpoint_watch import (
    CheckpointWatch,
    Stamp,
    read_stamps,
    stamp_of,
    stamps,
)
from robust_train.script.messages import LineReader, OwnFailure, Result, parse
from robust_train.script.placeholders import (
    EVENTS_VARIABLE,
    PLACEHOLDERS,
    ScriptValues,
    near_misses_in,
)
from robust_train.script.program import Program

log = logging.getLogger("robust_train")

_BEFORE = "checkpoints_before.json"


def preload_modules(cfg: DictConfig) -> tuple[str, ...]:
    """Return nothing to import early, but check the config before a device is chosen. Raises
    ConfigError: there is nothing to run, or it cannot be found."""
    CommandSettings.of(cfg)
    return ()


def train(cfg: DictConfig, run: Run) -> Json:
    """Run the script once; return the result that it reported, None if none.

    Raises:
        ConfigError: it cannot be started.
        UserError: it failed.
        Interrupted: it was asked to stop, however it ended then.
    """
    settings = CommandSettings.of(cfg)
    # nothing is held here, and what is logged here would be read as the end of the output
    run.memory_keeper = None
    run.speed.least_seconds = 10 * TICK_SECONDS  # its messages are read so often
    values = _values(cfg, run)
    pattern = settings.checkpoint_glob
    if pattern is not None:  # the folders themselves may have brackets in their names
        pattern = str(Path(glob.escape(str(settings.cwd)), values.fill(pattern, glob.escape)))
    before = _before(pattern, settings, run)
    checkpoint = _checkpoint(pattern, before, run)
    template = settings.argv
    if checkpoint is not None:
        values = replace(values, checkpoint=str(checkpoint))
        template += settings.resume_argv
    argv = tuple(values.fill(word) for word in template)
    watch = CheckpointWatch(pattern, before) if pattern else None
    attempt = _Attempt(run, settings.cwd, watch, checkpoint)
    if run.stop_requested:  # from here on a signal is for the script, and interrupts nothing here
        raise Interrupted("asked to stop before the script was started")
    run.report(ScriptStarted(argv, str(settings.cwd)))
    program = Program(argv, _environment(values, attempt.events), settings.cwd)
    try:
        returncode = program.wait(run, settings.stop_grace_seconds, attempt.poll)
    finally:
        attempt.finish()
    failure = attempt.failure
    kind, message = (failure.kind, failure.message) if failure else (None, None)
    run.report(ScriptEnded(returncode, program.pid, kind, message))
    if run.stop_requested:
        raise Interrupted(f"the script was asked to stop and {_how(returncode)}")
    if returncode != 0:
        raise UserError(f"the script {_how(returncode)}")
    (run.run_dir / _BEFORE).unlink(missing_ok=True)  # what comes next in this folder starts afresh
    return attempt.result


class _Attempt:
    """What is seen of a script while it runs."""

    def __init__(
        self, run: Run, cwd: Path, watch: CheckpointWatch | None, checkpoint: Path | None
    ) -> None:
        self.events = run.run_dir / f"attempt-{run.attempt}.events"  # the file for its messages
        self.events.write_bytes(b"")
        self.result: Json = None  # the one that it reported, None so far
        self.failure: OwnFailure | None = None  # why it is about to fail, if it reported that
        self._run = run
        self._cwd = cwd
        self._watch = watch
        self._lines = LineReader(self.events)
        self._known = _with_stamp(checkpoint)
        self._complained = False
        if checkpoint is not None and checkpoint != run.resume_checkpoint:
            run.checkpoint_saved(checkpoint, run.last_step)

    def poll(self, *, at_rest: bool = False) -> None:
        """Pass on what the script has reported and saved."""
        for line in self._lines.read(to_the_end=at_rest):
            try:
                self._take(line)
            except Exception as problem:  # as of a path that is none: no line ends the script
                if not self._complained:
                    self._complained = True
                    log.warning("%s: %r: %s", self.events.name, line[:200], problem)
        if self._watch is not None:
            self._found(self._watch.newest(at_rest=at_rest))

    def finish(self) -> None:
        """Pass on the rest after the script has ended; remove an empty file of messages."""
        self.poll(at_rest=True)
        with contextlib.suppress(OSError):  # the script may have removed it
            if self.events.stat().st_size == 0:
                self.events.unlink()

    def _found(self, checkpoint: Path | None) -> None:
        _, known = self._known
        _, stamp = found = _with_stamp(checkpoint)
        if checkpoint is None or stamp is None or found == self._known:
            return
        # while the newest is written over, the newest at rest is an older one
        if known is None or stamp[0] >= known[0]:
            self._known = found
            self._run.checkpoint_saved(checkpoint, self._run.last_step)

    def _take(self, line: str) -> None:
        match parse(line):
            case Progress(step=step, total_steps=total, metrics=metrics):
                self._run.progress(step, total_steps=total, **metrics)
            case TrainingStarted(step=step):
                self._run.started(step)
            case CheckpointSaved(path=path, step=step):
                saved = self._cwd / os.path.expanduser(path)
                self._known = _with_stamp(saved)
                self._run.checkpoint_saved(saved, self._run.last_step if step is None else step)
            case Result(value=value):
                self.result = value
            case SpeedMeasured() as event:
                self._run.speed.stop()
                self._run.report(event)
            case OwnFailure() as failure:
                self.failure = failure
            case event:
                self._run.report(event)


def _with_stamp(path: Path | None) -> tuple[Path | None, Stamp | None]:
    if path is not None:
        with contextlib.suppress(OSError):
            return path, stamp_of(path)
    return path, None


def _values(cfg: DictConfig, run: Run) -> ScriptValues:
    training = cfg.training
    return ScriptValues(
        batch_size=training.batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        num_gpus=cfg.get("num_gpus") or 1,
        min_batch_size=cfg.get("min_batch_size") or 1,
        num_workers=training.num_workers,
        device=str(cfg.device),
        attempt=run.attempt,
        checkpoint="",
        run_dir=str(run.run_dir),
        checkpoint_every_minutes=str(training.get("checkpoint_every_minutes") or AUTO),
        checkpoint_every_steps=training.get("checkpoint_every_steps") or 0,
        gradient_checkpointing=str(bool(training.get("gradient_checkpointing"))).lower(),
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
    """Return what matched before the job began: noted at its first attempt."""
    if pattern is None:
        return {}
    path = run.run_dir / _BEFORE
    starts_afresh = not settings.resume and run.resume_checkpoint is None
    noted = None if run.attempt == 1 or starts_afresh else read_stamps(path)
    if noted is None:
        noted = stamps(pattern)
        write_json(path, noted)
    return noted


def _checkpoint(pattern: str | None, before: Mapping[str, Stamp], run: Run) -> Path | None:
    """Return the newest of the one that was reported and those that the pattern finds."""
    reported = run.resume_checkpoint
    if reported is not None and not is_whole(reported):
        log.warning("checkpoint %s is gone or torn; it is passed over", reported)
        reported = None
    found = None if pattern is None else CheckpointWatch(pattern, before).newest(at_rest=True)
    candidates = [path for path in (reported, found) if path is not None]
    return max(candidates, key=lambda path: stamp_of(path)[0], default=None)


def _how(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    return f"ended by {signal_name(-returncode)}"


@dataclass(frozen=True)
class CommandSettings:
    """What to run."""

    argv: tuple[str, ...]  # program and arguments, with placeholders
    resume_argv: tuple[str, ...]  # appended where there is a checkpoint to go on from
    # where the script's own checkpoints lie, None if it has none; relative to `cwd`
    checkpoint_glob: str | None
    cwd: Path  # the script's working directory
    stop_grace_seconds: float  # time for a last checkpoint when stopped
    resume: bool  # whether an earlier launch's checkpoints in the same run folder count

    @classmethod
    def of(cls, cfg: Mapping[Any, Any]) -> CommandSettings:
        """Read a composed config. Raises ConfigError: there is nothing to run, or it cannot be
        found."""
        trainer = cfg["trainer"]
        if OmegaConf.is_config(trainer):
            trainer = OmegaConf.to_container(trainer, resolve=True)
        settings = cls(
            argv=_words("trainer.argv", trainer.get("argv")),
            resume_argv=_words("trainer.resume_argv", trainer.get("resume_argv")),
            checkpoint_glob=trainer.get("checkpoint_glob") or None,
            cwd=Path(os.path.expanduser(trainer.get("cwd") or ".")).absolute(),
            stop_grace_seconds=float(cfg.get("stop_grace_seconds", 20.0)),
            resume=bool(cfg.get("resume", True)),
        )
        _check(settings)
        return settings


def _check(settings: CommandSettings) -> None:
    if not settings.argv:
        raise ConfigError(
            "trainer.argv: must name a program, as in "
            "'trainer.argv=[python, train.py, --batch_size, \"{batch_size}\"]'"
        )
    for key in ("argv", "resume_argv"):
        for word in getattr(settings, key):
            _refuse_near_misses(f"trainer.{key}", word)
    _refuse_near_misses("trainer.checkpoint_glob", settings.checkpoint_glob or "")
    if not settings.cwd.is_dir():
        raise ConfigError(f"trainer.cwd={settings.cwd}: no such folder")
    program = settings.argv[0]
    is_file = "/" in program
    if shutil.which(settings.cwd / os.path.expanduser(program) if is_file else program) is None:
        where = "an executable file" if is_file else "a program on PATH"
        raise ConfigError(f"trainer.argv: {program!r} is not {where}")


def _refuse_near_misses(key: str, text: str) -> None:
    """Refuse ``{batchsize}``, which would reach the script unchanged."""
    for name, meant in near_misses_in(text):
        raise ConfigError(
            f"{key}: {{{name}}} is no placeholder; did you mean {{{meant}}}? "
            f"There are {', '.join(PLACEHOLDERS)}"
        )


def _words(key: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{key}={value}: accepted is a list, {key}=[program, argument, …]")
    return tuple(str(word) for word in value)
