"""A search: Optuna says what to try next, each time a job can start.

The study is one file in the sweep's folder, and only that: a launcher that goes on with it, or
shares it with another, reads there which trials there are.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import optuna
from hydra.core.override_parser.types import (
    IntervalSweep,
    Override,
    RangeSweep,
    Transformer,
)
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.pruners import NopPruner
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from robust_train.compat import importances_of, running_trial, suggest
from robust_train.model.errors import EXIT_TRY_LATER, ConfigError
from robust_train.model.events import ValueReported
from robust_train.sweep.points import STUDY_FILE, Claims, Job, Points, SweeperSettings
from robust_train.sweep.record import (
    COMPLETED,
    FAILED,
    PRUNED,
    REFUSED,
    SweepJob,
    job_folders,
    read_row,
)

log = logging.getLogger("robust_train")

_STUDY = "sweep"
_RETRY_SECONDS = 1.0  # until others are asked again for what they have left
_SEEDS_APART = 1_000_003


class Search(Points):
    """Trials of what is ``swept``, with what :meth:`next` gives out."""

    def __init__(
        self,
        folder: Path,
        swept: Mapping[str, Override],
        fixed: Sequence[str],
        seeds: Sequence[str],
        settings: SweeperSettings,
        claims: Claims,
    ) -> None:
        self._folder, self._claims, self._settings = folder, claims, settings
        self._space = {key: distribution(override) for key, override in swept.items()}
        self.fixed, self._seeds = fixed, seeds
        self.most = settings.n_trials * len(seeds)
        self._jobs = deque[Job]()
        self._running: dict[int, dict[int, SweepJob]] = {}  # ended jobs of each trial
        self._had: dict[int, Trial] = {}  # trials that this launcher has run
        self._is_over, self._next_try = False, 0.0
        pruner = _made(settings.pruner)
        self.prunes = pruner is not None and settings.repeat == 1
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with self._alone():
            self._study = optuna.create_study(
                study_name=_STUDY,
                storage=_storage(folder),
                direction=StudyDirection[settings.direction.upper()],
                pruner=pruner or NopPruner(),
                load_if_exists=True,
            )
            known = self._study.user_attrs
            for name in ("repeat", "direction"):
                value = getattr(settings, name)
                if known.setdefault(name, value) != value:
                    raise ConfigError(
                        f"hydra.sweeper.{name}={value}: the search in {folder} was begun with "
                        f"{known[name]}; choose another hydra.sweep.dir"
                    )
                self._study.set_user_attr(name, value)

    def adopt_finished(self, sweep: str) -> None:
        """Make the jobs of trials that ended in an earlier launch a part of this ``sweep``."""
        over = {one.number for one in self._trials() if one.state.is_finished()}
        for folder in job_folders(self._folder):
            row = read_row(folder)
            is_over = row.job is not None and row.job // len(self._seeds) in over
            if is_over and row.sweep != sweep:
                with contextlib.suppress(OSError):
                    replace(row, sweep=sweep, reused=True).write(folder)

    def next(self) -> Job | None:
        """Return the next job of a trial that was left, or of a new one."""
        if not self._jobs and time.monotonic() >= self._next_try:
            trial = self._next_trial()
            if trial is None:
                self._next_try = time.monotonic() + _RETRY_SECONDS
                return None
            point = [f"{key}={value}" for key, value in trial.params.items()]
            self._had[trial.number] = trial
            self._running[trial.number] = {}
            for number, seed in enumerate(self._seeds):
                own = [*self.fixed, *point, *filter(None, [seed])]
                self._jobs.append((trial.number * len(self._seeds) + number, own))
        return self._jobs.popleft() if self._jobs else None

    def _next_trial(self) -> Trial | None:
        """Return a trial that is this launcher's from now on."""
        with self._alone():
            trials = self._trials()
            left = [t for t in trials if not t.state.is_finished()]
            for known in left:
                number = known.number
                if number not in self._had and self._claims.take(number):
                    if known.params.keys() - self._space.keys():
                        self._fail(number, "its keys are searched no more")
                        continue
                    self._study.sampler = self._sampler(number)
                    return self._with_params(running_trial(self._study, known))
            if len(trials) < self._settings.n_trials:
                self._study.sampler = self._sampler(len(trials))
                trial = self._study.ask()
                self._claims.take(trial.number)
                return self._with_params(trial)
            # those that others have end with them, or are left
            self._is_over = all(known.number in self._had for known in left)
            return None

    def _with_params(self, trial: Trial) -> Trial:
        """Return a trial with a value of each key, also if its launcher was killed before."""
        for name, space in self._space.items():
            try:
                suggest(trial, name, space)
            except ValueError as error:
                raise ConfigError(
                    f"{name}: {error}; choose another hydra.sweep.dir"
                ) from error
        return trial

    def reported(
        self,
        job: int,
        values: Sequence[ValueReported],
    ) -> str | None:
        """Report a job's values to its trial; return why the pruner stops it, if it does."""
        if len(self._seeds) > 1:
            return None  # one repetition says too little of the point
        trial = self._had[job]
        with self._alone():
            known = self._trials()[job].intermediate_values
            for event in values:
                if event.step in known:
                    continue  # reported before it was resumed
                trial.report(event.value, event.step)
                if trial.should_prune():
                    name = type(self._study.pruner).__name__
                    return f"{event.value:.6g} at step {event.step} ({name})"
        return None

    def ended(self, row: SweepJob) -> None:
        """Tell the study how a trial went once all its jobs have ended."""
        assert row.job is not None
        number = row.job // len(self._seeds)
        rows = self._running[number]
        rows[row.job] = row
        if len(rows) < len(self._seeds):
            return
        del self._running[number]
        with self._alone():
            if all(map(_is_final, rows.values())):  # else it can go on later
                self._tell(number, list(rows.values()))
        self._claims.release(number)

    def _tell(self, number: int, rows: Sequence[SweepJob]) -> None:
        if any(row.status == PRUNED for row in rows):
            self._study.tell(number, state=TrialState.PRUNED)
            return
        done = [row for row in rows if row.status == COMPLETED]
        values = [row.value for row in done if row.value is not None]
        if values and len(values) == len(done):
            self._study.tell(number, fmean(values))
            return
        reason = "; ".join(str(row.reason) for row in rows if row.reason)
        if not reason:
            results = ", ".join(str(row.result) for row in rows)
            reason = f"its result is not a number: {results}"
            log.warning("trial %d counts as failed: %s", number, reason)
        self._fail(number, reason)

    def _fail(self, number: int, reason: str) -> None:
        trial = running_trial(self._study, self._trials()[number])
        trial.set_user_attr("reason", reason)
        self._study.tell(number, state=TrialState.FAIL)

    @property
    def is_over(self) -> bool:
        """Whether all trials have ended, or have been tried here."""
        return self._is_over and not self._jobs

    def log_best(self) -> None:
        """Log the trial with the best value, if one has one."""
        with contextlib.suppress(ValueError):
            best = self._study.best_trial
            params = " ".join(f"{key}={value}" for key, value in best.params.items())
            log.info("best: trial %d, %s: %s", best.number, best.value, params)

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _sampler(self, trial: int) -> Any:
        """Return a sampler of the trial's own: what it draws depends on no other launcher."""
        wanted = dict(self._settings.sampler or {})
        if wanted.get("seed") is not None:
            wanted["seed"] = int(wanted["seed"]) * _SEEDS_APART + trial
        return _made(wanted)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Let no other launcher read or write the study meanwhile."""
        with self._claims.alone():
            with contextlib.suppress(FileNotFoundError):
                path = self._folder / STUDY_FILE
                content = path.read_bytes()
                if not content.endswith(b"\n"):  # torn by a power cut or a kill
                    os.truncate(path, content.rfind(b"\n") + 1)
            yield


def importances_in(folder: Path) -> dict[str, float]:
    """Return the importance of each parameter of the study in ``folder``."""
    study = optuna.load_study(study_name=_STUDY, storage=_storage(folder))
    return importances_of(study)


def _storage(folder: Path) -> JournalStorage:
    path = str(folder / STUDY_FILE)
    return JournalStorage(JournalFileBackend(path, lock_obj=_NoLock(path)))


class _NoLock(JournalFileOpenLock):
    """No lock: whoever writes is alone already. Optuna's own is broken after 30 s."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _made(wanted: Any) -> Any:
    """Return what the ``_target_`` of a sampler or pruner makes; its arguments may have one too."""
    # not by Hydra's `instantiate`, which asks from 1.4 on for a list of what may be made
    if isinstance(wanted, list):
        return [_made(each) for each in wanted]
    if not isinstance(wanted, dict):
        return wanted
    arguments = {key: _made(value) for key, value in wanted.items()}
    if (target := arguments.pop("_target_", None)) is None:
        return arguments
    module, _, name = str(target).rpartition(".")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return getattr(importlib.import_module(module), name)(**arguments)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"hydra.sweeper: {target}: {error}") from error


def _is_final(row: SweepJob) -> bool:
    """Return whether another launch would end alike."""
    has_failed = row.status in (FAILED, REFUSED) and row.exit_code != EXIT_TRY_LATER
    return row.status in (COMPLETED, PRUNED) or has_failed


def distribution(override: Override) -> BaseDistribution:
    """Return what a key may be, as Hydra's grammar has it; ``tag(log, …)`` by magnitude.

    Raises:
        ConfigError: Optuna has nothing like it.
    """
    value: Any = override.value()
    is_log = "log" in getattr(value, "tags", ())
    try:
        if isinstance(value, IntervalSweep):
            start: Any = value.start
            end: Any = value.end
            are_integers = isinstance(start, int) and isinstance(end, int)
            kind = IntDistribution if are_integers else FloatDistribution
            return kind(start, end, log=is_log)
        if isinstance(value, RangeSweep) and not value.shuffle:
            numbers, step = list(value.range()), abs(value.step)
            if isinstance(value.start, int) and isinstance(step, int):
                low, high = int(min(numbers)), int(max(numbers))
                return IntDistribution(low, high, log=is_log, step=step)
            return FloatDistribution(
                float(min(numbers)),
                float(max(numbers)),
                step=float(step),
            )
        return CategoricalDistribution(
            [
                each if isinstance(each, (bool, int, float)) else str(each)
                for each in override.sweep_iterator(transformer=Transformer.encode)
            ]
        )
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"{override.input_line}: {error}") from error
