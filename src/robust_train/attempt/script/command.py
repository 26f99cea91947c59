"""The trainer behind ``trainer=command``: one attempt is one run of the script.

The runner calls :func:`train` in the attempt's process. It starts the script (:mod:`.program`),
passes on its reports and checkpoints while it runs (:mod:`.watched`), and raises an exception if it
fails. The script inherits the output streams, so that its output is shown and kept like any
trainer's. The launcher classifies the failure by the end of this output.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
import signal
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from robust_train.attempt.run import Run, live_of
from robust_train.attempt.script.check import check_command, user_path
from robust_train.attempt.script.checkpoint_watch import (
    NOTHING,
    CheckpointWatch,
    Found,
    find_checkpoint,
    find_stamps,
)
from robust_train.attempt.script.program import Program
from robust_train.attempt.script.rendezvous import rendezvous_environment
from robust_train.attempt.script.watched import WatchedScript
from robust_train.attempt.supports import WORKERS
from robust_train.config.checks import read
from robust_train.config.placeholders import (
    AUTO,
    EVENTS_VARIABLE,
    ScriptValues,
    decimal,
    placeholders_in,
)
from robust_train.config.schema import RobustConfig
from robust_train.failures.exits import signal_of
from robust_train.files import write_json
from robust_train.folder.checkpoint_files import damage_in, is_whole
from robust_train.folder.checkpoints import USELESS, read_manifests
from robust_train.folder.identity import wait_until_readable
from robust_train.host.linux import TICK_SECONDS, shared_machine_environment
from robust_train.model.errors import TrainingStopped, UserError
from robust_train.model.events import Json, ScriptEnded, ScriptStarted
from robust_train.readable import signal_name

log = logging.getLogger("robust_train")

# The file in the run folder with the checkpoints from before the job.
_BEFORE = "checkpoints_before.json"
# Keys of `training` that have another name as a placeholder.
_PLACEHOLDERS = {"lr": "learning_rate"}


def preload_modules(cfg: DictConfig) -> tuple[str, ...]:
    """Check the config before a device is chosen. A command has no modules to import early.

    Raises:
        ConfigError: the command is empty, or its program cannot be found.
    """
    check_command(read(RobustConfig, cfg, ""))
    return ()


def train(cfg: DictConfig, run: Run) -> Json:
    """Run the script once, and return the result that it reported, None if it reported none.

    Raises:
        ConfigError: it cannot be started.
        UserError: it failed.
        TrainingStopped: it was asked to stop, whatever its exit status.
    """
    config = read(RobustConfig, cfg, "")
    cwd = check_command(config)
    live = live_of(run)
    _describe_script(config, run)
    # The messages of the script are read twice a second.
    live.speed.measure_rarely(10 * TICK_SECONDS)
    values = _collect_values(config, run)
    watch = _watch_checkpoints(config, cwd, values, run)
    checkpoint = _choose_checkpoint(watch, run)
    template = config.trainer.argv or ()
    if checkpoint != NOTHING:
        values = replace(values, checkpoint=str(checkpoint.path))
        template += config.trainer.resume_argv
    argv = tuple(values.fill(word) for word in template)
    script = WatchedScript(run, cwd, watch, checkpoint)
    # From here on, a signal is meant for the script, and does not interrupt this process.
    if run.should_stop():
        raise TrainingStopped("asked to stop before the script was started")
    live.reports.send(ScriptStarted(argv, str(cwd)))
    stop_signal = signal.Signals[f"SIG{config.trainer.stop_signal}"]
    environ = _build_environment(argv, values, _most_ranks(config, run), script.events)
    program = Program(argv, environ, cwd, stop_signal)
    returncode = -signal.SIGKILL
    try:
        returncode = program.wait(run, config.stop_grace_seconds, script.poll)
    finally:
        script.finish(was_killed=signal_of(returncode) > 0)
    live.reports.send(ScriptEnded(returncode, program.pid))
    # A script that had completed when the request to stop arrived keeps its result.
    has_completed = program.has_ended_by_itself and returncode == 0
    if not has_completed and run.should_stop():
        raise TrainingStopped(f"the script was asked to stop and {_describe_exit(returncode)}")
    if returncode != 0:
        raise UserError(f"the script {_describe_exit(returncode)}")
    # The next job in this folder starts from the beginning.
    (run.run_dir / _BEFORE).unlink(missing_ok=True)
    return script.result


def _describe_script(config: RobustConfig, run: Run) -> None:
    """Set which config keys the script reads and which features it supports, by its placeholders.
    Every script may have data-loader workers, whose number it finds in its environment."""

    def has_read(key: str) -> bool:
        return _has_placeholder(_PLACEHOLDERS.get(key, key), config)

    def supports(feature: str) -> bool:
        return feature == WORKERS or _has_placeholder(feature, config)

    live_of(run).describe_trainer(has_read, supports)


def _has_placeholder(name: str, config: RobustConfig) -> bool:
    """Return whether the script's command has the placeholder ``name``."""
    words = (config.trainer.argv or ()) + config.trainer.resume_argv
    return any(name in placeholders_in(word) for word in words)


def _collect_values(config: RobustConfig, run: Run) -> ScriptValues:
    """Return the values of this attempt for the script's placeholders and environment."""
    training = config.training
    minutes = training.checkpoint_every_minutes
    return ScriptValues(
        batch_size=training.batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        effective_batch_size=training.effective_batch_size or training.batch_size,
        learning_rate=decimal(training.lr),
        num_gpus=config.num_gpus,
        min_batch_size=config.min_batch_size,
        num_workers=training.num_workers,
        device=config.device,
        attempt=run.attempt,
        checkpoint="",
        run_dir=str(run.run_dir),
        checkpoint_every_minutes=AUTO if minutes is None else decimal(minutes),
        checkpoint_every_steps=training.checkpoint_every_steps or 0,
        keep_checkpoints=training.keep_checkpoints,
        gradient_checkpointing=str(training.gradient_checkpointing).lower(),
        split_rule=live_of(run).parts.split_rule.name,
    )


def _watch_checkpoints(
    config: RobustConfig, cwd: Path, values: ScriptValues, run: Run
) -> CheckpointWatch:
    """Return a watch for the script's checkpoints.

    The job's first attempt records the files that match already. They are recognised by size and
    modification time, so that this machine's clock need not agree with the disk's.
    """
    relative_pattern = config.trainer.checkpoint_glob
    if relative_pattern is None:
        return CheckpointWatch("", {})
    # The folders may have brackets in their names.
    pattern = str(Path(glob.escape(str(cwd)), values.fill(relative_pattern, glob.escape)))
    path = run.run_dir / _BEFORE
    starts_over = not config.resume and run.resume_checkpoint is None
    if run.attempt > 1 and not starts_over:
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            recorded = json.loads(path.read_text()).items()
            before = {name: (changed, size) for name, (changed, size) in recorded}
            return CheckpointWatch(pattern, before)
    before = find_stamps(pattern)
    write_json(path, before)
    return CheckpointWatch(pattern, before)


def _choose_checkpoint(watch: CheckpointWatch, run: Run) -> Found:
    """Return the checkpoint to resume from, or ``NOTHING``: the checkpoint that the launcher chose,
    or a newer one that matches the pattern."""
    chosen = NOTHING
    resumed = run.resume_checkpoint
    if resumed is not None and is_whole(resumed):
        chosen = find_checkpoint(resumed)
    elif resumed is not None:
        log.warning("checkpoint %s is missing or torn and is skipped", resumed)
    manifests = wait_until_readable(lambda: read_manifests(run.checkpoint_dir))
    reported = [manifest.path for manifest in manifests]
    useless = [manifest.path for manifest in manifests if manifest.loss in USELESS]
    for match in watch.find_complete(at_rest=True, reported=reported):
        # The launcher has already read the checkpoint that it chose.
        if match == chosen or match.changed < chosen.changed:
            break
        if match.path in useless:
            continue
        try:
            damage = damage_in(match.path, reads=True)
        except OSError as error:
            damage = str(error)
        if not damage:
            return match
        log.warning("checkpoint %s is damaged (%s) and is skipped", match.path, damage)
    return chosen


def _most_ranks(config: RobustConfig, run: Run) -> int:
    """Return the largest number of ranks in which the script may train. A command that does not
    name ``{num_gpus}`` starts the same number on the CPU."""
    requested = live_of(run).parts.asked
    return max(config.num_gpus, 1 if requested is None else requested.ranks)


def _build_environment(
    argv: tuple[str, ...], values: ScriptValues, most_ranks: int, events: Path
) -> dict[str, str]:
    """Return a script's environment: this process's environment with the attempt's values."""
    return {
        # Otherwise a Python script's output would appear only when a buffer is full, and be lost if
        # it is killed.
        "PYTHONUNBUFFERED": "1",
        **shared_machine_environment(os.environ),
        **rendezvous_environment(argv, os.environ, most_ranks),
        "PATH": user_path(os.environ),
        **values.environment(),
        EVENTS_VARIABLE: str(events),
    }


def _describe_exit(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    return f"ended by {signal_name(-returncode)}"
