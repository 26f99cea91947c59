"""Checks before the first job of a sweep starts, and mistakes that launchers of Hydra and other
projects leave to us. Jobs check the rest."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from robust_train.config.checks import checked, unchecked
from robust_train.config.composition import complete
from robust_train.config.projects import their_keys
from robust_train.config.refusals import REFUSALS, explain_job
from robust_train.config.words import Words
from robust_train.host.loggers import change_words
from robust_train.model.errors import EXIT_BAD_CONFIG, EXIT_FAILED, ConfigError
from robust_train.model.spec import MAXIMIZE, MINIMIZE

log = logging.getLogger("robust_train")

_MOST_JOBS = 50
MOST_SECONDS = 5.0
SMALLEST_IS_BEST = re.compile(
    r"(?<![a-z])(loss|error|err|mse|rmse|mae|nll|perplexity|ppl|wer|cer|fid)(?![a-z])"
)
"""Names of figures whose smallest value is the best."""
Check = Callable[[DictConfig], None]


@dataclass(frozen=True)
class SweeperSettings:
    """``hydra.sweeper`` of our sweepers."""

    sampler: Mapping[str, Any] | None = None  # None: every combination once
    pruner: Mapping[str, Any] | None = None
    direction: str | None = None  # read by direction_of
    n_trials: int = 20
    n_jobs: int | None = None
    repeat: int = 1
    seed_key: str = "seed"
    params: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("n_trials", "repeat", "n_jobs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"hydra.sweeper.{name}={value}: must be 1 or more")
        if self.pruner is not None and self.repeat != 1:
            # one repetition says too little of the point
            raise ConfigError(f"hydra.sweeper.repeat={self.repeat}: a pruner needs repeat=1")


def check_jobs(config: DictConfig, check: Check | None) -> None:
    """Check jobs in which each value of each key occurs, a few seconds at most. Raises ConfigError:
    a key cannot have a value, or none of these jobs can be run, for the same reason."""
    columns = list(_overrides(config))
    until = time.monotonic() + MOST_SECONDS
    most = min(max(map(len, columns), default=1), _MOST_JOBS)
    problems = set[str]()
    for number in range(most):
        job = [column[number % len(column)] for column in columns]
        problem = _problem_of(config, job, check)
        problems.add(str(problem))
        # the first two differ in all that is swept
        if problem is not None and len(problems) == 1 and number + 1 >= min(most, 2):
            raise problem
        if time.monotonic() > until:
            return


def _overrides(config: DictConfig) -> Iterator[list[str]]:
    """Yield the first overrides that each key may have: several if the key is swept."""
    # `${hydra:job.num}` is each job's own
    hydra: Any = OmegaConf.to_container(config.hydra)
    # a sweeper of another kind may have a list
    params = hydra["sweeper"].get("params")
    given = params if isinstance(params, dict) else {}
    lines = [f"{key}={value}" for key, value in given.items()]
    lines += hydra["overrides"]["task"]
    parser = OverridesParser.create()
    for line in lines:
        # a glob: the sweeper's to choose
        with contextlib.suppress(Exception):
            override = parser.parse_override(line)
            values: Iterable[object] = ()
            ends = override.value()
            if isinstance(ends, IntervalSweep):
                values = (ends.start, ends.end)
            elif override.is_sweep_override():
                values = override.sweep_string_iterator()
            key = override.get_key_element()
            choices = [f"{key}={value}" for value in itertools.islice(values, _MOST_JOBS)]
            yield choices or [line]


def _problem_of(
    config: DictConfig, overrides: list[str], check: Check | None
) -> ConfigError | None:
    """Return why a job cannot run. Raises ConfigError if no job with one of its values can."""
    try:
        loader = GlobalHydra.instance().config_loader()
        cfg = loader.load_sweep_config(config, overrides)
    except REFUSALS as error:
        raise ConfigError(explain_job(error, config, overrides)) from error
    if check is None and not unchecked(cfg).chosen("detach"):
        return None  # a project's main may complete it
    with open_dict(cfg):
        cfg.hydra.job.num = 0
        cfg.hydra.job.id = "0"
        cfg.hydra.runtime.output_dir = "."
    with hydra_knows(cfg):
        with open_dict(cfg):
            del cfg["hydra"]
        cfg = complete(cfg)
        try:
            checked(cfg)
            if check is not None:
                check(cfg)
        except ConfigError as error:
            return error
    return None


def direction_of(config: DictConfig) -> str:
    """Return which result of a sweep is best: the largest (``maximize``) or the smallest.

    A line says so if only the name of ``objective`` decides it, or nothing does. Raises
    ConfigError: the sweeper's own direction is neither of them, or is not that of
    ``sweep_direction``.
    """
    settings = unchecked(config)
    wanted = settings.sweep_direction
    given = config.hydra.sweeper.get("direction")
    # an enum with Hydra's own Optuna sweeper; with several objectives a list, which ranks no job
    name = getattr(given, "name", given)
    if isinstance(name, str):
        if name not in (MAXIMIZE, MINIMIZE):
            raise ConfigError(f"hydra.sweeper.direction={name}: must be maximize or minimize")
        if wanted not in ("auto", name):
            raise ConfigError(
                f"sweep_direction={wanted}, but hydra.sweeper.direction={name}: leave one out"
            )
        return name
    if wanted != "auto":
        return wanted
    objective = settings.objective
    if not objective:
        objective = config.get("optimized_metric")
    if not objective and given is None and not settings.is_built_in:
        # The trainer may return its loss, and nothing shows the direction of an unnamed result.
        log.info("the largest result is best; sweep_direction=minimize says otherwise")
    if not (objective and SMALLEST_IS_BEST.search(str(objective).lower())):
        return MAXIMIZE
    log.info(
        "the smallest %s is best, by its name; sweep_direction=maximize says otherwise", objective
    )
    return MINIMIZE


def speak_of_keys_in(config: DictConfig) -> None:
    """Let our log lines name keys as the user of this config writes them."""
    words = Words(their_keys(config))
    if words.of_log is not None:
        change_words(words.of_log)


@contextlib.contextmanager
def hydra_knows(config: DictConfig) -> Iterator[None]:
    """Have ``${hydra:…}`` resolved in a config."""
    instance = HydraConfig.instance()
    before = instance.cfg
    try:
        instance.set_config(config)
        yield
    finally:
        instance.cfg = before


def launcher_of(config: DictConfig) -> str:
    """Return Hydra's name of the launcher that was chosen."""
    return str(config.hydra.runtime.choices.get("hydra/launcher"))


def misplaced_launcher(config: DictConfig, running: str) -> str:
    """Return one line for a launcher in a job's config that Hydra silently ignores, empty if it
    counts. ``running`` is the launcher that runs the sweep, empty if unknown."""
    chosen = launcher_of(config)
    if config.hydra.mode != RunMode.MULTIRUN:
        if chosen == "basic" or f"hydra/launcher={chosen}" not in config.hydra.overrides.hydra:
            return ""
        return (
            f"hydra/launcher={chosen}: a launcher runs the jobs of a sweep, and this is none; "
            "add -m"
        )
    if running in ("", chosen):
        return ""
    # hydra#2946: a file that the sweep varies is read per job, long after the launcher was chosen
    return (
        f"hydra/launcher: {chosen}: chosen in a file that the sweep itself selects, which is too "
        f"late ({running} is running it already); put hydra/launcher={chosen} on the command line"
    )


def known_problem(error: BaseException) -> tuple[str, int] | None:
    """Return a line and an exit code for a plugin's error that the user can fix, or None."""
    if isinstance(error, RuntimeError) and 'Could not detect "srun"' in str(error):
        return (
            "hydra/launcher=submitit_slurm: no srun here; start the sweep where Slurm's commands "
            "are, or use hydra/launcher=gpu_queue on this machine",
            EXIT_BAD_CONFIG,
        )
    # This is submitit's error, and the table has the reason.
    if type(error).__name__ == "UncompletedJobError":
        return " ".join(str(error).splitlines()[:2]), EXIT_FAILED
    return None
