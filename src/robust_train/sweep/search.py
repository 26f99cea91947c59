"""Runs a search: Optuna chooses the values of the next trial whenever a job can start.

`GpuQueue` asks a `Search` for jobs and reports their ends, in the sweep's process. Optuna's study
is a file in the sweep's folder, so a later launch continues with the trials of earlier launches.
"""

from __future__ import annotations

import contextlib
import logging
import math
import pkgutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import optuna
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, Transformer
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.pruners import NopPruner
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from robust_train.compat import open_trial, suggest
from robust_train.folder.secrets import public_command
from robust_train.model.errors import EXIT_TRY_LATER, ConfigError
from robust_train.model.events import ValueReported
from robust_train.readable import named_line
from robust_train.sweep.checks import SweeperSettings
from robust_train.sweep.gpu_queue import GpuQueue, Jobs
from robust_train.sweep.record import (
    STUDY,
    STUDY_FILE,
    Status,
    SweepJob,
    job_folders,
    read_row,
    select_job_overrides,
    storage_in,
)

log = logging.getLogger("robust_train")

_SEEDS = 2**32  # numpy accepts smaller seeds only.
_SEED_STEP = 1_000_003  # between the sampler seeds of two searches with consecutive seeds


class Search(Jobs):
    """The trials of a search, as jobs for the queue.

    A trial is a combination of values. It has one job for each seed.

    Args:
        queue: the queue of the sweep.
        swept: the keys to search, with their ranges in Hydra's syntax.
        fixed: the overrides that all jobs share.
        seeds: the overrides of each of a trial's jobs.
        settings: the user's settings of the search.

    Raises:
        ConfigError: a range cannot be searched, or the study cannot be continued.
    """

    def __init__(
        self,
        queue: GpuQueue,
        swept: Mapping[str, Override],
        fixed: list[str],
        seeds: list[list[str]],
        settings: SweeperSettings,
    ) -> None:
        super().__init__({})
        self._folder = queue.folder
        self._settings = settings
        self._space = {key: build_distribution(override) for key, override in swept.items()}
        self._fixed = fixed
        self._seeds = seeds
        self.max_jobs = settings.n_trials * len(seeds)
        self._started: dict[int, Trial] = {}  # the trials that this launch started, by number
        self._ended_jobs: dict[int, list[SweepJob]] = {}  # of each of these trials
        self._has_all_trials = False
        pruner = _instantiate(settings.pruner)
        self.prunes = pruner is not None
        if pruner is None:
            pruner = NopPruner()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = self._open_study(queue.sweep.table.direction, pruner)
        self._adopt_ended_trials(queue.sweep.table.sweep)

    def _open_study(self, direction: str, pruner: Any) -> Any:
        """Return the study in the sweep's folder, which is created if it does not exist."""
        drop_torn_line(self._folder / STUDY_FILE)
        try:
            study = optuna.create_study(
                study_name=STUDY,
                storage=storage_in(self._folder),
                direction=StudyDirection[direction.upper()],
                pruner=pruner,
                load_if_exists=True,
            )
        except Exception as error:  # A damaged file raises any kind of error.
            raise ConfigError(
                f"{self._folder / STUDY_FILE}: {named_line(error)}; choose another "
                "hydra.sweep.dir, or move the file away to start the search again"
            ) from error
        settings = {"repeat": self._settings.repeat, "direction": direction}
        earlier_settings = study.user_attrs or settings
        if earlier_settings != settings:
            raise ConfigError(
                f"the search in {self._folder} was started with hydra.sweeper.repeat="
                f"{earlier_settings['repeat']} and direction={earlier_settings['direction']}; "
                "choose another hydra.sweep.dir"
            )
        for name, value in settings.items():
            study.set_user_attr(name, value)
        return study

    def _adopt_ended_trials(self, sweep: str) -> None:
        """Make the jobs of trials that ended in an earlier launch part of this launch.

        Log a warning if their fixed overrides differ from those of this launch.
        """
        ended = {trial.number for trial in self._trials() if trial.state.is_finished()}
        seed_keys = [seed.partition("=")[0] for seed in self._seeds[0]]
        keys_of_trial = (*self._space, *seed_keys)
        fixed = set(self._fixed)
        differing = set[str]()
        for folder in job_folders(self._folder):
            row = read_row(folder)
            if row is None or row.sweep == sweep or row.trial not in ended:
                continue
            replace(row, sweep=sweep, reused=True).write(folder)
            earlier_fixed = {
                override
                for override in row.overrides
                if override.partition("=")[0] not in keys_of_trial
            }
            differing |= earlier_fixed ^ fixed
        shown = public_command(select_job_overrides(sorted(differing)))
        if shown:
            log.warning(
                "trials that have ended count, though not all had the same overrides (%s); "
                "another hydra.sweep.dir starts a new search",
                " ".join(shown),
            )

    @property
    def is_over(self) -> bool:
        """Whether every trial has ended, or was started by this launch."""
        return self._has_all_trials and not self._waiting

    def take_next(self) -> tuple[int, Sequence[str]] | None:
        """Return the next job of an unfinished trial, or of a new trial."""
        if not self._waiting:
            trial = self._start_trial()
            if trial is None:
                self._has_all_trials = True
                return None
            self._started[trial.number] = trial
            self._ended_jobs[trial.number] = []
            first = trial.number * len(self._seeds)
            chosen = [f"{key}={trial.params[key]}" for key in self._space]
            for number, seed in enumerate(self._seeds, first):
                self._waiting[number] = self._fixed + chosen + seed
        return super().take_next()

    def _start_trial(self) -> Trial | None:
        """Return a trial that an earlier launch left unfinished, or a new trial, with its values.

        Returns None if ``n_trials`` trials already exist.
        """
        trials = self._trials()
        unfinished = [
            trial
            for trial in trials
            if not trial.state.is_finished() and trial.number not in self._started
        ]
        if unfinished:
            self._study.sampler = self._create_sampler(unfinished[0].number)
            trial: Trial = open_trial(self._study, unfinished[0])
        elif len(trials) < self._settings.n_trials:
            self._study.sampler = self._create_sampler(len(trials))
            trial = self._study.ask()
        else:
            return None
        for name, space in self._space.items():
            try:
                # A trial whose sweep was killed may lack some values. Others stay as they are.
                suggest(trial, name, space)
            except ValueError as error:
                problem = f"{name}: {error}; choose another hydra.sweep.dir"
                raise ConfigError(problem) from error
        return trial

    def _create_sampler(self, trial: int) -> Any:
        """Return a sampler for this trial alone, so that it draws the same values after a kill."""
        arguments = dict(self._settings.sampler or {})
        if arguments.get("seed") is not None:
            seed = int(arguments["seed"]) * _SEED_STEP + trial
            arguments["seed"] = seed % _SEEDS
        return _instantiate(arguments)

    def find_reason_to_prune(self, job: int, values: Sequence[ValueReported]) -> str | None:
        """Report a job's values to its trial. Return why the pruner stops the job, or None."""
        if not self.prunes:
            return None
        # With a pruner, `repeat` is 1, so a job has the number of its trial.
        trial = self._started[job]
        reported = self._trials()[job].intermediate_values
        for event in values:
            # A resumed job reports some steps again, and Optuna refuses negative steps.
            if event.step in reported or event.step < 0:
                continue
            trial.report(event.value, event.step)
            if trial.should_prune():
                name = type(self._study.pruner).__name__
                return f"{event.value:.6g} at step {event.step} ({name})"
        return None

    def record_end(self, row: SweepJob) -> None:
        """Record the result of a trial in the study once all its jobs have ended.

        A trial with an interrupted job stays unfinished, so that a later launch continues it.
        """
        assert row.trial is not None
        rows = self._ended_jobs[row.trial]
        rows.append(row)
        have_all_ended = len(rows) == len(self._seeds)
        if have_all_ended and all(_is_final(each) for each in rows):
            self._record_result(self._started[row.trial], rows)

    def _record_result(self, trial: Trial, rows: Sequence[SweepJob]) -> None:
        """Record the mean of the jobs' results, or that the trial was pruned or has failed."""
        values = [row.value for row in rows if row.value is not None]
        completed = [row for row in rows if row.has_completed]
        if any(row.is_pruned for row in rows):
            self._study.tell(trial, state=TrialState.PRUNED)
        elif values and len(values) == len(completed):
            self._study.tell(trial, fmean(values))
        else:
            reasons = [row.why for row in rows if row.why]
            reason = "; ".join(dict.fromkeys(reasons))
            if len(completed) == len(rows):
                log.warning("trial %d counts as failed: %s", trial.number, reason)
            trial.set_user_attr("reason", reason)
            self._study.tell(trial, state=TrialState.FAIL)

    def _trials(self) -> list[FrozenTrial]:
        """Return the trials of all launches, by number."""
        trials: list[FrozenTrial] = self._study.get_trials(deepcopy=False)
        return trials


def drop_torn_line(path: Path) -> None:
    """Cut off an incomplete last line, which a kill or a power cut may leave in a file."""
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        end_of_last_line = file.read().rfind(b"\n") + 1
        file.truncate(end_of_last_line)


def _instantiate(config: Any) -> Any:
    """Create the sampler or pruner that ``_target_`` names. Arguments may have ``_target_`` too.

    From version 1.4 on, Hydra's own ``instantiate`` needs a list of allowed targets.
    """
    if isinstance(config, list):
        return [_instantiate(each) for each in config]
    if not isinstance(config, dict):
        return config
    arguments = {key: _instantiate(value) for key, value in config.items()}
    target = arguments.pop("_target_", None)
    if target is None:
        return arguments
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return pkgutil.resolve_name(target)(**arguments)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"hydra.sweeper: {target}: {error}") from error


def _is_final(row: SweepJob) -> bool:
    """Return whether the job would end the same way in another launch."""
    if row.status in (Status.FAILED, Status.REFUSED):
        return row.exit_code != EXIT_TRY_LATER
    return row.has_completed or row.is_pruned


def build_distribution(override: Override) -> BaseDistribution:
    """Return Optuna's distribution for a range in Hydra's syntax.

    For example, ``lr=tag(log,interval(1e-5,1e-1))`` is searched by magnitude.

    Raises:
        ConfigError: Optuna has no such distribution.
    """
    value: Any = override.value()
    is_log = "log" in getattr(value, "tags", ())
    try:
        if isinstance(value, IntervalSweep):
            start: Any = value.start
            end: Any = value.end
            if not math.isfinite(end - start):
                raise ValueError("an interval has two ends")
            are_integers = isinstance(start, int) and isinstance(end, int)
            kind = IntDistribution if are_integers else FloatDistribution
            return kind(start, end, log=is_log)
        if isinstance(value, RangeSweep) and not value.shuffle:
            numbers = list(value.range())
            step = abs(value.step)
            low = min(numbers)
            high = max(numbers)
            if isinstance(value.start, int) and isinstance(step, int):
                return IntDistribution(int(low), int(high), log=is_log, step=step)
            return FloatDistribution(low, high, step=step)
        choices: list[Any] = []
        for choice in override.sweep_iterator(transformer=Transformer.encode):
            if not isinstance(choice, (bool, int, float)):
                choice = str(choice)
            choices.append(choice)
        return CategoricalDistribution(choices)
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"{override.input_line}: {error}") from error
