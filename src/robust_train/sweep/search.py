"""A search: Optuna chooses the next trial, each time a job can start.

:class:`.gpu_queue.GpuQueue` asks for jobs and reports their ends, in the process of the sweep. The
study is a single file in the sweep's folder, where a later launch that continues it finds the
trials.
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
    of_jobs,
    read_row,
    storage_in,
)

log = logging.getLogger("robust_train")

_SEEDS = 2**32
_SEEDS_APART = 1_000_003


class Search(Jobs):
    """Trials of the ``swept`` keys. Each has a job for each of ``seeds``."""

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
        self._space = {key: distribution(override) for key, override in swept.items()}
        self._fixed = fixed
        self._seeds = seeds
        self.most = settings.n_trials * len(seeds)
        self._had: dict[int, Trial] = {}  # trials that this launch has started, by number
        # ended jobs of each of them
        self._rows: dict[int, list[SweepJob]] = {}
        self._is_over = False
        pruner = _made(settings.pruner)
        self.prunes = pruner is not None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        direction = queue.sweep.table.direction
        drop_torn_line(self._folder / STUDY_FILE)
        try:
            self._study = optuna.create_study(
                study_name=STUDY,
                storage=storage_in(self._folder),
                direction=StudyDirection[direction.upper()],
                pruner=pruner if pruner else NopPruner(),
                load_if_exists=True,
            )
        except Exception as error:  # A damaged file raises any kind of error.
            raise ConfigError(
                f"{self._folder / STUDY_FILE}: {named_line(error)}; choose another "
                "hydra.sweep.dir, or move the file away to begin the search again"
            ) from error
        begun = {"repeat": settings.repeat, "direction": direction}
        attributes = self._study.user_attrs or begun
        if attributes != begun:
            raise ConfigError(
                f"the search in {self._folder} was begun with hydra.sweeper.repeat="
                f"{attributes['repeat']} and direction={attributes['direction']}; choose another "
                "hydra.sweep.dir"
            )
        for name, value in begun.items():
            self._study.set_user_attr(name, value)
        self._adopt_ended_trials(queue.sweep.table.sweep)

    def _adopt_ended_trials(self, sweep: str) -> None:
        """Add the jobs of trials that ended in an earlier launch to this launch, and warn if they
        had other overrides."""
        ended = {trial.number for trial in self._trials() if trial.state.is_finished()}
        seed_keys = [seed.partition("=")[0] for seed in self._seeds[0]]
        drawn = (*self._space, *seed_keys)
        changed = set[str]()
        for folder in job_folders(self._folder):
            row = read_row(folder)
            if row and row.trial in ended and row.sweep != sweep:
                replace(row, sweep=sweep, reused=True).write(folder)
                before = {word for word in row.overrides if word.partition("=")[0] not in drawn}
                changed |= before ^ {*self._fixed}
        others = public_command(of_jobs(sorted(changed)))
        if others:
            log.warning(
                "trials that have ended count, though not all had the same overrides (%s); "
                "another hydra.sweep.dir begins a new search",
                " ".join(others),
            )

    @property
    def is_over(self) -> bool:
        """Whether there is no further job: each trial has ended, or was started here."""
        return self._is_over and not self._waiting

    def next(self) -> tuple[int, Sequence[str]] | None:
        """Return the next job of an unfinished trial, or of a new trial."""
        if not self._waiting:
            trial = self._next_trial()
            if trial is None:
                return None
            self._had[trial.number] = trial
            self._rows[trial.number] = []
            first = trial.number * len(self._seeds)
            point = [f"{key}={trial.params[key]}" for key in self._space]
            for number, seed in enumerate(self._seeds, first):
                self._waiting[number] = self._fixed + point + seed
        return super().next()

    def _next_trial(self) -> Trial | None:
        """Return a trial that an earlier launch left, or a new trial, with a value of each key.
        None if there are enough trials."""
        trials = self._trials()
        left = [
            trial
            for trial in trials
            if not trial.state.is_finished() and trial.number not in self._had
        ]
        if left:
            self._study.sampler = self._sampler(left[0].number)
            trial: Trial = open_trial(self._study, left[0])
        elif len(trials) < self._settings.n_trials:
            self._study.sampler = self._sampler(len(trials))
            trial = self._study.ask()
        else:
            self._is_over = True
            return None
        for name, space in self._space.items():
            try:
                # a trial of a launcher that was killed may lack some of its values
                suggest(trial, name, space)
            except ValueError as error:
                problem = f"{name}: {error}; choose another hydra.sweep.dir"
                raise ConfigError(problem) from error
        return trial

    def _sampler(self, trial: int) -> Any:
        """Return a sampler for this trial alone, so that it draws the same values after a kill."""
        wanted = dict(self._settings.sampler or {})
        if wanted.get("seed") is not None:
            seed = int(wanted["seed"]) * _SEEDS_APART + trial
            wanted["seed"] = seed % _SEEDS  # numpy takes no other
        return _made(wanted)

    def reported(self, job: int, values: Sequence[ValueReported]) -> str:
        """Report a job's values to its trial, and return why the pruner stops it, if it does."""
        if not self.prunes:
            return ""
        trial = self._had[job]
        reported = self._trials()[job].intermediate_values
        for event in values:
            # the job reported it before it was resumed, or Optuna refuses the step
            if event.step in reported or event.step < 0:
                continue
            trial.report(event.value, event.step)
            if trial.should_prune():
                name = type(self._study.pruner).__name__
                return f"{event.value:.6g} at step {event.step} ({name})"
        return ""

    def ended(self, row: SweepJob) -> None:
        """Tell the study how a trial went once all its jobs have ended."""
        assert row.trial is not None
        rows = self._rows[row.trial]
        rows.append(row)
        is_whole = len(rows) == len(self._seeds)
        if is_whole and all(map(_is_final, rows)):  # else it can continue later
            self._tell(self._had[row.trial], rows)

    def _tell(self, trial: Trial, rows: Sequence[SweepJob]) -> None:
        values = [row.value for row in rows if row.value is not None]
        if any(row.is_pruned for row in rows):
            self._study.tell(trial, state=TrialState.PRUNED)
        elif values and len(values) == sum(row.has_completed for row in rows):
            self._study.tell(trial, fmean(values))
        else:
            reason = "; ".join(dict.fromkeys(row.why for row in rows if row.why))
            if all(row.has_completed for row in rows):
                log.warning("trial %d counts as failed: %s", trial.number, reason)
            trial.set_user_attr("reason", reason)
            self._study.tell(trial, state=TrialState.FAIL)

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)


def drop_torn_line(path: Path) -> None:
    """Cut off the last line of a file if a kill or a power cut has left only a part of it."""
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)


def _made(wanted: Any) -> Any:
    """Return the sampler or pruner that its ``_target_`` creates. Its arguments may have a
    ``_target_`` too."""
    # not with Hydra's `instantiate`, which from 1.4 on needs a list of allowed targets
    if isinstance(wanted, list):
        return [_made(each) for each in wanted]
    if not isinstance(wanted, dict):
        return wanted
    arguments = {key: _made(value) for key, value in wanted.items()}
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


def distribution(override: Override) -> BaseDistribution:
    """Return the distribution of a key, from Hydra's grammar. ``tag(log, …)`` means by magnitude.
    Raises ConfigError if Optuna lacks such a distribution."""
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
        return CategoricalDistribution(
            [
                each if isinstance(each, (bool, int, float)) else str(each)
                for each in override.sweep_iterator(transformer=Transformer.encode)
            ]
        )
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"{override.input_line}: {error}") from error
