"""A sweep from its start to its end, in the process that runs its command."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import socket
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from robust_train.config.checks import checked, unchecked
from robust_train.config.composition import complete
from robust_train.config.refusals import REFUSALS, explain
from robust_train.config.schema import NotifyConfig
from robust_train.folder.lock import RunLock, read_holder
from robust_train.folder.provenance import this_command
from robust_train.host.signals import SignalWatch
from robust_train.launcher import detach
from robust_train.launcher.notifier import Notifier, notifications
from robust_train.model.errors import ConfigError
from robust_train.readable import duration
from robust_train.sweep.current import SWEEP_VARIABLE
from robust_train.sweep.job_record import INTERRUPTED, NOT_STARTED, SweepJob
from robust_train.sweep.page import write_sweep_report
from robust_train.sweep.plugins_of_others import remember_mask
from robust_train.sweep.program import program
from robust_train.sweep.sweep_table import (
    ENDED,
    FILE,
    SweepRow,
    SweepTable,
    as_csv,
    exit_code_of,
    read_rows,
    row_of,
    screen_table,
    tally,
)

log = logging.getLogger("robust_train")

_MOST_CHECKS, _MOST_SECONDS = 50, 5.0


@dataclass
class Sweep:
    """A sweep that runs."""

    id: str  # this launch of it
    folder: Path  # the sweep folder
    launcher: str  # name of Hydra's launcher
    since_ns: int  # when it began, by the clock of the folder's file system
    lock: RunLock  # of the folder; the jobs of `gpu_queue`, which are forks, hold it as well
    # jobs that our launcher knows of, by number
    planned: dict[int, SweepJob] = field(default_factory=dict)
    notifier: Notifier = field(default_factory=lambda: Notifier(NotifyConfig()))
    started: float = field(default_factory=time.monotonic)
    pid: int = field(default_factory=os.getpid)

    def rows(self) -> list[SweepRow]:
        """Return the jobs so far, by number, with known ones that have not started."""
        rows = read_rows(self.folder, self.id, self.since_ns)
        seen = {row.job for row in rows}
        rows += [
            row_of(None, r, None)
            for number, r in self.planned.items()
            if number not in seen
        ]
        return sorted(rows, key=lambda row: row.sort_key)


def check_job(config: DictConfig) -> None:
    """Check a single job before anything is written; raises ConfigError."""
    if program.check is not None:
        program.check(config)


def begin(config: DictConfig) -> None:
    """Begin a sweep, before its first job: lock its folder and write ``sweep.json``. Raises
    ConfigError: a live sweep holds the folder, or it would be a job's too; nothing was written;
    OSError: the sweep folder cannot be made."""
    finish()  # an earlier sweep of this process that an error has ended
    subdir = OmegaConf.to_container(config.hydra.sweep)["subdir"]  # type: ignore[call-overload,index]
    if os.path.normpath(str(subdir)) == ".":
        raise ConfigError(
            f"hydra.sweep.subdir={subdir}: a job needs a run folder of its own inside the sweep's, "
            "as by hydra.sweep.subdir='${hydra.job.num}'"
        )
    folder = Path(str(config.hydra.sweep.dir)).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    launcher = str(config.hydra.runtime.choices.get("hydra/launcher"))
    id_ = uuid.uuid4().hex
    sweep = Sweep(id_, folder, launcher, since_ns=0, lock=_lock(folder, id_))
    sweep.notifier = Notifier(notifications(unchecked(config).notify, os.environ))
    os.environ[SWEEP_VARIABLE] = sweep.id
    remember_mask(os.environ)
    SweepTable(sweep.id, launcher).write(folder)
    sweep.since_ns = (folder / FILE).stat().st_mtime_ns
    program.sweep, program.exit_code = sweep, 0
    detach.has_begun(folder, detach.sweep_text(folder))
    # a project with a command of its own gets its table also when a job's error ends the sweep
    atexit.register(finish)


def check_jobs(config: DictConfig) -> None:
    """Check that each value of each swept key goes with some values of the other keys: a few
    seconds at most, and before a job starts. Raises ConfigError: no job can use a value."""
    fixed: list[str] = []
    swept: list[list[str]] = []
    hydra: Any = OmegaConf.to_container(
        config.hydra
    )  # ``${hydra:job.num}`` is each job's own
    params = hydra["sweeper"].get("params")  # a sweeper of another kind may have a list
    given = (
        [f"{k}={value}" for k, value in params.items()]
        if isinstance(params, dict)
        else []
    )
    parser = OverridesParser.create()
    for line in [*given, *hydra["overrides"]["task"]]:
        with contextlib.suppress(
            Exception
        ):  # an interval, a glob: the sweeper's to choose
            override = parser.parse_override(line)
            if override.is_sweep_override():
                values = itertools.islice(
                    override.sweep_string_iterator(), _MOST_CHECKS
                )
                own = [f"{override.get_key_element()}={value}" for value in values]
                swept += [own] if own else []
            else:
                fixed.append(line)
    until = time.monotonic() + _MOST_SECONDS
    each = [
        [*swept[:n], [value], *swept[n + 1 :]]
        for n, own in enumerate(swept)
        for value in own
    ]
    for columns in each[:_MOST_CHECKS] or [[]]:
        apart = [tuple(values[k % len(values)] for values in columns) for k in (0, 1)]
        all_jobs = itertools.islice(itertools.product(*columns), _MOST_CHECKS)
        jobs, problems = dict.fromkeys([*apart, *all_jobs]), list[str]()
        for job in itertools.takewhile(lambda _: time.monotonic() < until, jobs):
            try:
                _check_one(config, [*fixed, *job])
                break
            except ConfigError as error:
                problems.append(str(error))
                # in every job, or whatever the values of all other keys
                if (
                    len(problems) == len(jobs) < _MOST_CHECKS
                    or problems == [str(error)] * 2
                ):
                    raise


def _check_one(config: DictConfig, overrides: list[str]) -> None:
    try:
        loader = GlobalHydra.instance().config_loader()
        cfg = loader.load_sweep_config(config, overrides)
    except REFUSALS as error:
        raise ConfigError(explain(error, "robust", overrides)) from error
    if program.check is None and not unchecked(cfg).detach:
        return  # a project's main may complete it
    before = HydraConfig.instance().cfg
    try:
        with open_dict(cfg):
            cfg.hydra.job.num, cfg.hydra.job.id, cfg.hydra.runtime.output_dir = (
                0,
                "0",
                ".",
            )
            HydraConfig.instance().set_config(cfg)
            del cfg["hydra"]
        cfg = complete(cfg)
        checked(cfg)
        check_job(cfg)
    finally:
        HydraConfig.instance().cfg = before


def _lock(folder: Path, sweep: str) -> RunLock:
    try:
        return RunLock(folder, sweep)
    except ConfigError as error:
        holder = read_holder(folder)
        if holder is None:
            raise
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
        raise ConfigError(
            f"sweep folder {folder} is in use by the sweep of {holder.user} on {holder.host}, pid "
            f"{holder.pid}, since {since}; choose another hydra.sweep.dir, or stop that sweep: "
            f"robust-train run stop {folder}"
        ) from error


def finish() -> int:
    """Show the table and write the files, once; return the exit code that the jobs ask for. Safe to
    call again, and where there was no sweep."""
    sweep, program.sweep = program.sweep, None
    if sweep is None or sweep.pid != os.getpid():
        return program.exit_code
    try:
        _show_and_write(sweep)
    finally:
        sweep.lock.release()
        signals = SignalWatch()
        with signals, signals.handed_to(lambda signum: sweep.notifier.hurry()):
            sweep.notifier.finish()
    return program.exit_code


def _show_and_write(sweep: Sweep) -> None:
    rows = sweep.rows()
    if all(row.status == NOT_STARTED for row in rows):
        with contextlib.suppress(OSError):
            (sweep.folder / FILE).unlink()
        return
    code = exit_code_of(rows)
    program.note(code)
    wall_seconds = time.monotonic() - sweep.started
    table = SweepTable(
        sweep.id, sweep.launcher, ENDED, code, round(wall_seconds, 3), tuple(rows)
    )
    try:
        table.write(sweep.folder)
        (sweep.folder / "sweep.csv").write_text(as_csv(rows), encoding="utf-8")
    except OSError as error:
        log.warning(
            "cannot write the sweep's table to %s: %s", sweep.folder, error.strerror
        )
    write_sweep_report(sweep.folder)
    _notify(sweep, rows, code, wall_seconds)
    # not through logging: after an interruption that may still write into a job's log file
    with contextlib.suppress(OSError, ValueError):
        print(f"sweep:\n{screen_table(rows)}")
        print(
            f"{tally(rows)} in {duration(wall_seconds)}\nsweep folder: {sweep.folder}"
        )
        if code:
            print(f"to go on: {this_command('hydra.sweep.dir', sweep.folder)}")
        sys.stdout.flush()


def _notify(sweep: Sweep, rows: list[SweepRow], code: int, wall_seconds: float) -> None:
    """Notify of the sweep's end."""
    stopped = any(row.status in (INTERRUPTED, NOT_STARTED) for row in rows)
    event = "completed" if not code else "interrupted" if stopped else "failed"
    host = socket.gethostname()
    text = f"sweep on {host}: {tally(rows)} in {duration(wall_seconds)}; {sweep.folder}"
    about = {"sweep": sweep.id, "sweep_folder": str(sweep.folder), "exit_code": code}
    jobs = [
        {"job": row.job, "status": row.status, "result": row.result} for row in rows
    ]
    sweep.notifier.send(event, text, {**about, "host": host, "jobs": jobs})
