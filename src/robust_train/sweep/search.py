"""A search: Optuna says what to try next, each time a job can start.

The study is one file in the sweep's folder, and only that: a launcher that goes on with it, or
shares it with another, reads there which trials there are.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.pruners import NopPruner
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, Trial, TrialState

from robust_train.compat import running_trial, suggest
from robust_train.model.errors import EXIT_TRY_LATER, ConfigError
from robust_train.model.events import ValueReported
from robust_train.sweep.points import STUDY_FILE, Claims, Job, Points, SweeperSettings
from robust_train.sweep.record import (
    COMPLETED,
    FAILED,
    PRUNED,
    REFUSED,
    SweepJob,
    as_number,
)

log = logging.getLogger("robust_train")

_STUDY = "sweep"
_RETRY_SECONDS = 1.0  # until others are asked again for what they have left
_SEEDS_APART = 1_000_003


class Search(Points):
    """Trials of ``space``, which says what each key may be, with what :meth:`next` gives out."""

    def __init__(
        self,
        folder: Path,
        space: Mapping[str, BaseDistribution],
        fixed: Sequence[str],
        seeds: Sequence[str],
        settings: SweeperSettings,
        claims: Claims,
    ) -> None:
        self._path, self._claims, self._settings = folder / STUDY_FILE, claims, settings
        self._space, self.fixed, self._seeds = dict(space), fixed, seeds
        self.most = settings.n_trials * len(seeds)
        self._jobs = deque[Job]()
        self._running: dict[int, dict[int, SweepJob | None]] = {}  # jobs of each trial
        self._trial: dict[int, Trial] = {}  # those that run here
        self._had = set[int]()  # trials that this launcher has run
        self._is_over, self._next_try = False, 0.0
        self._pruner = _made(settings.pruner) or NopPruner()
        self.prunes = settings.pruner is not None and settings.repeat == 1
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with self._alone():
            backend = JournalFileBackend(
                str(self._path),
                lock_obj=_Ours(str(self._path)),
            )
            self._study = optuna.create_study(
                study_name=_STUDY,
                storage=JournalStorage(backend),
                direction=optuna.study.StudyDirection[settings.direction.upper()],
                pruner=self._pruner,
                load_if_exists=True,
            )
            about = {"repeat": settings.repeat, "direction": settings.direction}
            known = self._study.user_attrs
            for name, value in about.items():
                if known.setdefault(name, value) != value:
                    raise ConfigError(
                        f"hydra.sweeper.{name}={value}: the search in {folder} was begun with "
                        f"{known[name]}; choose another hydra.sweep.dir"
                    )
                self._study.set_user_attr(name, value)

    @property
    def finished(self) -> set[int]:
        """The jobs of the trials that have ended, in any launch."""
        ended = (trial.number for trial in self._trials() if trial.state.is_finished())
        return {job for number in ended for job in self._numbers(number)}

    def _numbers(self, trial: int) -> range:
        return range(trial * len(self._seeds), (trial + 1) * len(self._seeds))

    def next(self) -> Job | None:
        """Return the next job of a trial that was left, or of a new one."""
        if not self._jobs and time.monotonic() >= self._next_try:
            trial = self._next_trial()
            if trial is None:
                self._next_try = time.monotonic() + _RETRY_SECONDS
            else:
                point = [f"{key}={value}" for key, value in trial.params.items()]
                numbers = self._numbers(trial.number)
                self._had.add(trial.number)
                self._running[trial.number] = dict.fromkeys(numbers)
                for number, seed in zip(numbers, self._seeds, strict=True):
                    own = [*self.fixed, *point, *filter(None, [seed])]
                    self._jobs.append((number, own))
        return self._jobs.popleft() if self._jobs else None

    def _next_trial(self) -> FrozenTrial | None:
        """Return a trial that is this launcher's from now on."""
        with self._alone():
            trials = self._trials()
            left = [t for t in trials if not t.state.is_finished()]
            for known in left:
                if known.number not in self._had and self._claims.take(known.number):
                    if known.params.keys() - self._space.keys():
                        self._fail(known.number, "its keys are searched no more")
                        continue
                    self._study.sampler = self._sampler(known.number)
                    return self._with_params(running_trial(self._study, known))
            if len(trials) < self._settings.n_trials:
                self._study.sampler = self._sampler(len(trials))
                trial = self._study.ask()
                self._claims.take(trial.number)
                return self._with_params(trial)
            # those that others have end with them, or are left
            self._is_over = all(known.number in self._had for known in left)
            return None

    def _with_params(self, trial: Trial) -> FrozenTrial:
        """Return a trial with a value of each key, also if its launcher was killed before."""
        for name, space in self._space.items():
            try:
                suggest(trial, name, space)
            except ValueError as error:
                raise ConfigError(
                    f"{name}: {error}; choose another hydra.sweep.dir"
                ) from error
        self._trial[trial.number] = trial
        return self._trials()[trial.number]

    def reported(
        self,
        job: int,
        values: Sequence[ValueReported],
    ) -> str | None:
        """Report a job's values to its trial; return why the pruner stops it, if it does."""
        number = job // len(self._seeds)
        if len(self._seeds) > 1:
            return None  # one repetition says too little of the point
        trial = self._trial[number]
        with self._alone():
            for event in values:
                if event.step in self._trials()[number].intermediate_values:
                    continue  # reported before it was resumed
                trial.report(event.value, event.step)
                if trial.should_prune():
                    name = type(self._pruner).__name__
                    return f"{event.value:.6g} at step {event.step} ({name})"
        return None

    def ended(self, row: SweepJob) -> None:
        """Tell the study how a trial went once all its jobs have ended."""
        assert row.job is not None
        number = row.job // len(self._seeds)
        rows = self._running[number]
        rows[row.job] = row
        ended = [one for one in rows.values() if one is not None]
        if len(ended) < len(rows):
            return
        del self._running[number]
        with self._alone():
            if all(map(_is_final, ended)):  # else it can go on later
                self._tell(number, ended)
        self._claims.release(number)

    def _tell(
        self,
        number: int,
        rows: Sequence[SweepJob],
    ) -> None:
        if any(row.status == PRUNED for row in rows):
            self._study.tell(number, state=TrialState.PRUNED)
            return
        values = [as_number(row.result) for row in rows if row.status == COMPLETED]
        numbers = [value for value in values if value is not None]
        if numbers and len(numbers) == len(values):
            self._study.tell(number, fmean(numbers))
            return
        reason = "; ".join(str(row.reason) for row in rows if row.reason)
        if not reason:
            results = ", ".join(str(row.result) for row in rows)
            reason = f"its result is not a number: {results}"
            log.warning(
                "trial %d counts as failed: %s",
                number,
                reason,
            )
        self._fail(number, reason)

    def _fail(
        self,
        number: int,
        reason: str,
    ) -> None:
        trial = running_trial(self._study, self._trials()[number])
        trial.set_user_attr("reason", reason)
        self._study.tell(number, state=TrialState.FAIL)

    @property
    def is_over(self) -> bool:
        """Whether all trials have ended, or have been tried here."""
        return self._is_over and not self._jobs

    @property
    def best(self) -> FrozenTrial | None:
        """The trial with the best value; None if none has one."""
        try:
            return self._study.best_trial
        except ValueError:
            return None

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _sampler(self, trial: int) -> Any:
        """Return a sampler of the trial's own: what it draws depends on no other launcher."""
        wanted = dict(self._settings.sampler or {})
        if wanted.get("seed") is not None:
            wanted["seed"] = int(wanted["seed"]) * _SEEDS_APART + trial
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return _made(wanted)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let no other launcher read or write the study meanwhile."""
        with self._claims.alone():
            with open(self._path, "ab+") as file:
                # a power cut or a kill may have torn the last line
                file.seek(0)
                content = file.read() if _is_torn(file) else b""
                if content:
                    os.ftruncate(file.fileno(), content.rfind(b"\n") + 1)
            yield


def importances_in(folder: Path) -> dict[str, float]:
    """Return the importance of each parameter of the study in ``folder``."""
    path = str(folder / STUDY_FILE)
    storage = JournalStorage(JournalFileBackend(path, lock_obj=_Ours(path)))
    study = optuna.load_study(study_name=_STUDY, storage=storage)
    with warnings.catch_warnings():  # of few trials, and of what is experimental
        warnings.simplefilter("ignore")
        evaluator = PedAnovaImportanceEvaluator()
        return get_param_importances(study, evaluator=evaluator)


def _made(wanted: Any) -> Any:
    """Return what the ``_target_`` of a sampler or pruner makes; its arguments may have one too."""
    if isinstance(wanted, list):
        return [_made(each) for each in wanted]
    if not isinstance(wanted, dict):
        return wanted
    arguments = {key: _made(value) for key, value in wanted.items()}
    if (target := arguments.pop("_target_", None)) is None:
        return arguments
    module, _, name = str(target).rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)(**arguments)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"hydra.sweeper: {target}: {error}") from error


def _is_final(row: SweepJob) -> bool:
    """Return whether another launch would end alike."""
    has_failed = row.status in (FAILED, REFUSED) and row.exit_code != EXIT_TRY_LATER
    return row.status in (COMPLETED, PRUNED) or has_failed


class _Ours(JournalFileOpenLock):
    """No lock: whoever writes is alone already. Optuna's own is broken after 30 s."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _is_torn(file: Any) -> bool:
    size = os.fstat(file.fileno()).st_size
    return size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"


def distribution(override: Override) -> BaseDistribution:
    """Return what a key may be, as Hydra's grammar has it; ``tag(log, …)`` by magnitude.

    Raises:
        ValueError: Optuna has nothing like it.
    """
    value = override.value()
    is_log = "log" in getattr(value, "tags", ())
    if isinstance(value, IntervalSweep):
        assert value.start is not None
        assert value.end is not None
        if isinstance(value.start, int) and isinstance(value.end, int):
            return IntDistribution(
                value.start,
                value.end,
                log=is_log,
            )
        return FloatDistribution(
            value.start,
            value.end,
            log=is_log,
        )
    if isinstance(value, RangeSweep) and not value.shuffle:
        numbers = [float(number) for number in value.range()]
        if all(isinstance(each, int) for each in (value.start, value.step)):
            step = abs(int(value.step))
            low, high = int(min(numbers)), int(max(numbers))
            return IntDistribution(
                low,
                high,
                log=is_log,
                step=step,
            )
        return FloatDistribution(
            min(numbers),
            max(numbers),
            step=abs(float(value.step)),
        )
    choices = [
        each if isinstance(each, (bool, int, float)) else str(each)
        for each in override.sweep_iterator(transformer=Transformer.encode)
    ]
    return CategoricalDistribution(choices)
