"""The trainer behind ``trainer=command``: one attempt is one run of the script.

:func:`train` runs in the attempt's process. The script inherits its output streams, so its output
is shown and kept like any trainer's. The launcher, which has the end of the output, classifies
failures.
"""

from __future__ import annotations

import contextlib
import difflib
import glob
import json
import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from robust_train.attempt.run import Run, live_of
from robust_train.attempt.script.messages import LineReader, Result, parse
from robust_train.attempt.script.program import Program
from robust_train.attempt.script.rendezvous import rendezvous_environment
from robust_train.attempt.supports import WORKERS
from robust_train.config.checks import read
from robust_train.config.placeholders import (
    AUTO,
    EVENTS_VARIABLE,
    ScriptValues,
    decimal,
    near_miss_in,
    placeholders_in,
)
from robust_train.config.schema import RobustConfig
from robust_train.config.trainers import PROGRAM_FILE
from robust_train.failures.exits import signal_of
from robust_train.files import write_json
from robust_train.folder.checkpoints import (
    START,
    SUFFIX,
    UNFINISHED,
    USELESS,
    Position,
    damage_in,
    files_in,
    is_whole,
    read_manifests,
)
from robust_train.folder.identity import wait_until_readable
from robust_train.host.linux import TICK_SECONDS, shared_machine_environment
from robust_train.model.errors import ConfigError, TrainingDiverged, TrainingStopped, UserError
from robust_train.model.events import (
    CheckpointSaved,
    CheckpointUnused,
    EpochEnded,
    Json,
    Progress,
    ScriptEnded,
    ScriptStarted,
    SpeedMeasured,
    TrainingStarted,
    UserEvent,
)
from robust_train.readable import signal_name

log = logging.getLogger("robust_train")

_BEGAN_AGAIN = (
    "the script was given %s, but wrote %s: it starts over in each attempt, or counts from 0 "
    "again; does it load the checkpoint that it is given?"
)
_OF_TRANSFORMERS = "trainer_state.json"  # each checkpoint of transformers' Trainer has this file
_WITH_TRANSFORMERS = " trainer.train(resume_from_checkpoint=args.resume_from_checkpoint) does"
_BEFORE = "checkpoints_before.json"
_PLACEHOLDERS = {"lr": "learning_rate"}
"""The names of ``training`` keys in a command."""
_INTERPRETER = re.compile(r"python[\d.]*$|(ba|z)?sh$|Rscript$|julia$|perl$|ruby$|node$")


Stamp = tuple[int, int]
"""A file's or folder's fingerprint: last change in nanoseconds, and size in bytes."""

Stamped = tuple[Path, Stamp]

NOTHING: Stamped = Path(), (0, 0)
"""No checkpoint: every other checkpoint is later."""


def preload_modules(cfg: DictConfig) -> tuple[str, ...]:
    """Check the config before a device is chosen. A command has nothing to import early.

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
        TrainingStopped: it was asked to stop, whatever its exit.
    """
    config = read(RobustConfig, cfg, "")
    cwd = check_command(config)
    trainer = config.trainer
    # Any script may have workers, and read their number from its environment.
    live_of(run).describe_trainer(
        lambda key: _asks_for(_PLACEHOLDERS.get(key, key), config),
        lambda name: name == WORKERS or _asks_for(name, config),
    )
    # Its messages are read at these intervals.
    live_of(run).speed.measure_rarely(10 * TICK_SECONDS)
    values = _values(config, run)
    watch = _watch(config, cwd, values, run)
    checkpoint = _checkpoint(watch, run)
    template = trainer.argv or ()
    if checkpoint != NOTHING:
        values = replace(values, checkpoint=str(checkpoint[0]))
        template += trainer.resume_argv
    argv = tuple(values.fill(word) for word in template)
    attempt = _Attempt(run, cwd, watch, checkpoint)
    # From here on a signal is for the script, and does not interrupt this process.
    if run.should_stop():
        raise TrainingStopped("asked to stop before the script was started")
    live_of(run).reports.send(ScriptStarted(argv, str(cwd)))
    stop_signal = signal.Signals[f"SIG{trainer.stop_signal}"]
    environ = _environment(argv, values, _most_ranks(config, run), attempt.events)
    program = Program(argv, environ, cwd, stop_signal)
    returncode = -signal.SIGKILL
    try:
        returncode = program.wait(run, config.stop_grace_seconds, attempt.poll)
    finally:
        attempt.finish(was_killed=signal_of(returncode) > 0)
    live_of(run).reports.send(ScriptEnded(returncode, program.pid))
    # A script that had completed when the stop arrived keeps its result.
    has_completed = program.has_ended_by_itself and returncode == 0
    if not has_completed and run.should_stop():
        raise TrainingStopped(f"the script was asked to stop and {_how(returncode)}")
    if returncode != 0:
        raise UserError(f"the script {_how(returncode)}")
    # The next job in this folder starts afresh.
    (run.run_dir / _BEFORE).unlink(missing_ok=True)
    return attempt.result


def _environment(
    argv: tuple[str, ...], values: ScriptValues, most_ranks: int, events: Path
) -> dict[str, str]:
    """Return the environment of a script: this process's, with the values of the attempt."""
    return {
        # Otherwise a Python script's output would appear only when a buffer is full, and be lost if
        # it is killed.
        "PYTHONUNBUFFERED": "1",
        **shared_machine_environment(os.environ),
        **rendezvous_environment(argv, os.environ, most_ranks),
        "PATH": users_path(os.environ),
        **values.environment(),
        EVENTS_VARIABLE: str(events),
    }


def _most_ranks(config: RobustConfig, run: Run) -> int:
    """Return the largest number of ranks in which the script may train. A command that does not
    name ``{num_gpus}`` starts as many on the CPU."""
    requested = live_of(run).parts.asked
    return max(config.num_gpus, 1 if requested is None else requested.ranks)


def _asks_for(name: str, config: RobustConfig) -> bool:
    """Return whether the script's command has the placeholder ``name``."""
    words = (config.trainer.argv or ()) + config.trainer.resume_argv
    return any(name in placeholders_in(word) for word in words)


class _Attempt:
    """Watches a script while it runs."""

    def __init__(
        self,
        run: Run,
        cwd: Path,
        watch: CheckpointWatch,
        checkpoint: Stamped,  # the checkpoint to resume from
    ) -> None:
        # The file for its messages.
        self.events = run.run_dir / f"attempt-{run.attempt}.events"
        self.events.write_bytes(b"")
        self.result: Json = None  # its reported result, None so far
        self._run = run
        self._cwd = cwd
        self._watch = watch
        self._lines = LineReader(self.events)
        self._resumed = checkpoint[0]
        # The newest checkpoint may be another one than it resumes from.
        self._known = max(checkpoint, watch.newest(at_rest=True), key=_changed)
        # A checkpoint that looked damaged at the last poll, and its step: the script may be
        # overwriting it.
        self._doubted: list[tuple[Path, Stamped, int | None]] = []
        self._complained = self._has_ended = False
        if checkpoint != NOTHING and self._resumed != run.resume_checkpoint:
            run.checkpoint_saved(self._resumed, run.last_step)

    def poll(self, reported: Collection[Path] | None = None) -> None:
        """Pass on the script's new reports and checkpoints."""
        for path, _, step in self._doubted:
            self._saved(path, step)
        for line in self._lines.read(to_the_end=self._has_ended):
            try:
                self._take(line)
            except TrainingDiverged:
                raise
            # A path may be invalid, for example. No other line may end the script.
            except Exception as problem:
                if not self._complained:
                    self._complained = True
                    name = self.events.name
                    log.warning("%s: %r: %s", name, line[:200], problem)
        newest = self._watch.newest(at_rest=self._has_ended, reported=reported)
        # While the newest is overwritten, the newest at rest is an older checkpoint.
        is_later = _changed(newest) >= _changed(self._known)
        if is_later and newest not in (NOTHING, self._known):
            self._saved(newest[0], self._run.last_step)

    def finish(self, *, was_killed: bool) -> None:
        """Pass on the rest after the script has ended; remove an empty file of messages."""
        self._has_ended = True
        self.poll([self._known[0]] if was_killed else None)
        unused = self._watch.unused(self._known)
        if unused is not None:
            live_of(self._run).reports.send(unused)
        with contextlib.suppress(OSError):  # the script may have removed it
            if self.events.stat().st_size == 0:
                self.events.unlink()

    def _saved(self, path: Path, step: int | None) -> None:
        """Report a checkpoint. If it looks damaged, it is checked again until it stays the same:
        the script may be writing the next checkpoint over it."""
        if _is_before(path.name, self._resumed.name):
            advice = ""
            if (path / _OF_TRANSFORMERS).exists():
                advice = _WITH_TRANSFORMERS
            log.warning(_BEGAN_AGAIN + advice, self._resumed.name, path.name)
            self._resumed = NOTHING[0]
        self._known = _stamped(path)
        has_size = self._known[1][1] or self._known == NOTHING
        is_empty = not has_size and not is_whole(path)
        damage = live_of(self._run).saving.damage_in(path) or is_empty
        seen = path, self._known, step
        if damage and not self._has_ended and seen not in self._doubted:
            self._doubted = [seen]
            return
        self._doubted = []
        if is_empty:
            log.warning("checkpoint %s is empty; it is not used", path)
        else:
            live_of(self._run).checkpoint_saved(
                path, step, None if damage else self._position_in(path)
            )

    def _position_in(self, path: Path) -> Position:
        """Return the script's position in its data, which its `run` may have stored."""
        with contextlib.suppress(OSError):
            for manifest in read_manifests(self._run.checkpoint_dir):
                is_known = manifest.path == path.absolute()
                if is_known and manifest.attempt == self._run.attempt:
                    return manifest.position
        return START

    def _take(self, line: str) -> None:
        match parse(line):
            case Progress(step=step, total_steps=total, metrics=metrics):
                self._run.progress(step, total_steps=total, **metrics)
            case TrainingStarted(step=step):
                self._run.started(step)
            case CheckpointSaved(path=path, step=step):
                step = self._run.last_step if step is None else step
                where = self._cwd / os.path.expanduser(path)
                self._saved(where, step)
            case Result(value=value):
                self.result = value
            # A script does not know which figure `objective` names.
            case EpochEnded(epoch=epoch, metrics=metrics) as event:
                live_of(self._run).reports.send(event)
                live_of(self._run).reports.report_objective(metrics, epoch)
            case UserEvent(fields=fields) as event:
                live_of(self._run).reports.send(event)
                live_of(self._run).reports.report_objective(fields, fields.get("step"))
            case event:
                if isinstance(event, SpeedMeasured):
                    live_of(self._run).speed.stop()
                live_of(self._run).reports.send(event)


def _values(config: RobustConfig, run: Run) -> ScriptValues:
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


def _watch(config: RobustConfig, cwd: Path, values: ScriptValues, run: Run) -> CheckpointWatch:
    """Return a watch for the script's checkpoints. Files that matched before the job started are
    noted at its first attempt, and compared by size and modification time: no two clocks have to
    agree."""
    inside = config.trainer.checkpoint_glob
    if inside is None:
        return CheckpointWatch("", {})
    # The folders may have brackets in their names.
    pattern = str(Path(glob.escape(str(cwd)), values.fill(inside, glob.escape)))
    path = run.run_dir / _BEFORE
    starts_afresh = not config.resume and run.resume_checkpoint is None
    if run.attempt > 1 and not starts_afresh:
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            noted = json.loads(path.read_text()).items()
            before = {name: (changed, size) for name, (changed, size) in noted}
            return CheckpointWatch(pattern, before)
    before = stamps(pattern)
    write_json(path, before)
    return CheckpointWatch(pattern, before)


def _checkpoint(watch: CheckpointWatch, run: Run) -> Stamped:
    """Return the newest of the reported checkpoint and those that the pattern matches."""
    given = NOTHING
    reported = run.resume_checkpoint
    if reported is not None and is_whole(reported):
        given = _stamped(reported)
    elif reported is not None:
        log.warning("checkpoint %s is missing or torn and is skipped", reported)
    manifests = wait_until_readable(lambda: read_manifests(run.checkpoint_dir))
    for match in watch.found(at_rest=True, reported=[manifest.path for manifest in manifests]):
        # The launcher has read the given checkpoint.
        if match == given or _changed(match) < _changed(given):
            break
        path = match[0]
        if any(manifest.path == path and manifest.loss in USELESS for manifest in manifests):
            continue
        try:
            damage = damage_in(path, reads=True)
        except OSError as error:
            damage = str(error)
        if not damage:
            return match
        log.warning("checkpoint %s is damaged (%s) and is skipped", path, damage)
    return given


def _changed(checkpoint: Stamped) -> int:
    return checkpoint[1][0]


def _is_before(name: str, other: str) -> bool:
    """Return whether two names differ only in their numbers, and the first different number, for
    example an epoch before a loss, is smaller in ``name``."""
    parts, others = (re.split(r"(\d+)", text) for text in (name, other))
    numbers = (list(map(int, text[1::2])) for text in (parts, others))
    return parts[::2] == others[::2] and next(numbers) < next(numbers)


def _how(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    return f"ended by {signal_name(-returncode)}"


def users_path(environ: Mapping[str, str]) -> str:
    """Return the PATH for a script's programs: PATH without the environment of a tool.

    ``uvx robust-train`` puts the tool's environment in front of PATH, and the ``python`` in there
    has none of the user's packages.
    """
    folders = environ.get("PATH", os.defpath).split(os.pathsep)
    prefix = Path(sys.prefix)
    # uv installs a tool with a receipt, or into its cache. Environments that the user activated are
    # the user's, wherever they are.
    is_a_tools = (prefix / "uv-receipt.toml").exists() or any(
        (folder / "CACHEDIR.TAG").exists() for folder in prefix.parents[:2]
    )
    if not is_a_tools or environ.get("VIRTUAL_ENV") == sys.prefix:
        return os.pathsep.join(folders)
    return os.pathsep.join(folder for folder in folders if Path(folder) != prefix / "bin")


def check_command(config: RobustConfig) -> Path:
    """Return the script's working directory.

    Raises:
        ConfigError: the command is empty, or its program cannot be found.
    """
    trainer = config.trainer
    if not trainer.argv:
        raise ConfigError(
            "trainer.argv: must name a program, as in "
            "'trainer.argv=[python, train.py, --batch_size, \"{batch_size}\"]'"
        )
    # {batchsize} would reach the script unchanged. In resume_argv that also holds for unknown
    # names.
    for key, words in (
        ("argv", trainer.argv),
        ("resume_argv", trainer.resume_argv),
        ("checkpoint_glob", [trainer.checkpoint_glob or ""]),
    ):
        for word in words:
            miss = near_miss_in(word, every=key == "resume_argv")
            if miss:
                raise ConfigError(
                    f"trainer.{key}: {{{miss[0]}}} is not a placeholder; did you mean "
                    f"{{{miss[1]}}}? robust-train run --help lists all"
                )
    cwd = Path(os.path.expanduser(trainer.cwd or ".")).absolute()
    if not cwd.is_dir():
        raise ConfigError(f"trainer.cwd={cwd}: no such folder")
    _refuse_missing(cwd, trainer.argv)
    return cwd


def _refuse_missing(cwd: Path, argv: Sequence[str]) -> None:
    """Refuse a program that does not exist or is not executable, and a script that an interpreter
    would not find."""
    program = argv[0]
    script = argv[1] if argv[1:] else ""
    path = cwd / os.path.expanduser(program)
    command = f"{'python' if path.suffix == '.py' else 'bash'} {program}"
    if "/" in program:
        if not path.exists():
            raise ConfigError(f"trainer.argv: {program}: no such file in {cwd}")
        if path.is_dir():
            raise ConfigError(f"trainer.argv: {program} is a folder")
        if shutil.which(path) is None:
            raise ConfigError(
                f"trainer.argv: {program} is not an executable file: chmod +x {program}, or name "
                f"its interpreter: {command}"
            )
    elif shutil.which(program, path=users_path(os.environ)) is None:
        hint = f"; write {command}" if path.is_file() else ""
        if "=" in program:
            hint = f"; write env {program} PROGRAM"
        raise ConfigError(f"trainer.argv: {program!r} is not a program on PATH{hint}")
    if _INTERPRETER.match(Path(program).name) and PROGRAM_FILE.search(script):
        path = cwd / os.path.expanduser(script)
        if not os.path.lexists(path) and "{" not in script:
            there = [neighbour.name for neighbour in path.parent.glob(f"*{path.suffix}")]
            near = difflib.get_close_matches(path.name, there, n=1)
            hint = f"; did you mean {near[0]}?" if near else f" in {cwd}"
            raise ConfigError(f"trainer.argv: {script}: no such file{hint}")


class CheckpointWatch:
    """Looks for new checkpoints by a pattern for :func:`glob.glob` (absolute, ``**`` included).
    ``before`` are the files from before the job."""

    def __init__(self, pattern: str, before: Mapping[str, Stamp]) -> None:
        self._pattern = pattern
        self._before = dict(before)
        self._last_seen: dict[str, Stamp] = {}

    def newest(self, *, at_rest: bool, reported: Collection[Path] | None = None) -> Stamped:
        """Return the first of :meth:`found`, ``NOTHING`` if there is none."""
        return next(self.found(at_rest=at_rest, reported=reported), NOTHING)

    def unused(self, newest_usable: Stamped) -> CheckpointUnused | None:
        """Return why the newest match is not ``newest_usable``, or why a file with
        the pattern's name does not match, or None otherwise."""
        seen = stamps(self._pattern)
        matches = [
            (Path(path), stamp) for path, stamp in seen.items() if self._before.get(path) != stamp
        ]
        newest, stamp = max(matches, key=_changed, default=NOTHING)
        if stamp > newest_usable[1] and not is_whole(newest):
            what = "is not whole" if newest.is_dir() else "is cut off"
            if not stamp[1]:
                what = "is empty"
            text = f"checkpoint {newest} {what} and is not used"
            return CheckpointUnused(text, str(newest))
        # The working directory and the run folder are already escaped.
        literal = re.sub(r"(\[[\[*?]\])|\[", lambda bracket: bracket[1] or "[[]", self._pattern)
        if seen or literal == self._pattern or not stamps(literal):
            return None
        return CheckpointUnused(
            "a bracket in the pattern for checkpoints begins a set of characters; write [[] for "
            f"one in a name: {literal}"
        )

    def found(
        self, *, at_rest: bool, reported: Collection[Path] | None = None
    ) -> Iterator[Stamped]:
        """Yield the complete checkpoints of this job among the matches, newest first.

        Only files that have not changed since the last call count, unless all are ``at_rest``. A
        folder needs all files of the folder before it. The first folder has to be in ``reported``,
        if that is given: a script that was killed may have left it incomplete.
        """
        seen = stamps(self._pattern)
        last_seen = self._last_seen
        self._last_seen = seen
        matches = [
            (Path(path), stamp)
            for path, stamp in seen.items()
            if self._before.get(path) != stamp and (at_rest or last_seen.get(path) == stamp)
        ]
        matches.sort(key=lambda match: (_changed(match), match), reverse=True)
        for number, (path, stamp) in enumerate(matches, start=1):
            if not is_whole(path):
                continue
            earlier = (folder for folder, _ in matches[number:] if folder.is_dir())
            before = next(earlier, None)
            if not path.is_dir() or (
                _names(before) <= _names(path)
                if before is not None
                else reported is None or path in reported
            ):
                yield path, stamp
            elif reported is not None:
                log.warning("checkpoint %s may lack files and is not used", path)


def _names(folder: Path) -> set[str]:
    """Return the names of the files in a folder. Names that differ in numbers only are the same."""
    inside = (str(file.relative_to(folder)) for file in files_in(folder))
    return {re.sub(r"\d+", "0", name) for name in inside}


def stamps(pattern: str) -> dict[str, Stamp]:
    """Return every match with its fingerprint, except unfinished files by their name, and
    manifests."""
    stamped: dict[str, Stamp] = {}
    for match in glob.glob(pattern, recursive=True):
        path = match.rstrip("/")
        if not path.endswith((*UNFINISHED, SUFFIX)):
            with contextlib.suppress(OSError):
                stamped[path] = stamp_of(Path(path))
    return stamped


def stamp_of(path: Path) -> Stamp:
    """Return the fingerprint of a file, or of a folder with all its content.

    Raises:
        OSError: it no longer exists.
    """
    status = path.stat()
    if not path.is_dir():
        return status.st_mtime_ns, status.st_size
    inside = [file.stat() for file in files_in(path)]
    changed = max([status.st_mtime_ns] + [status_of.st_mtime_ns for status_of in inside])
    return changed, sum(status_of.st_size for status_of in inside)


def _stamped(path: Path) -> Stamped:
    with contextlib.suppress(OSError):
        return path, stamp_of(path)
    return NOTHING  # it was removed
