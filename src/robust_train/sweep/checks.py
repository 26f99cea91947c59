"""Checks a sweep's config before its first job starts, and explains mistakes that Hydra ignores.

`sweep.session` and our sweepers use this module in the sweep's process. A job checks its own config
again when it starts.
"""

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

_MOST_JOBS = 50  # that `check_jobs` checks
MOST_SECONDS = 5.0  # that `check_jobs` takes, about

SMALLEST_IS_BEST = re.compile(
    r"(?<![a-z])(loss|error|err|mse|rmse|mae|nll|perplexity|ppl|wer|cer|fid)(?![a-z])"
)
"""Matches the names of figures whose smallest value is the best."""

Check = Callable[[DictConfig], None]
"""Raises ConfigError if a job with this config cannot run."""


@dataclass(frozen=True)
class SweeperSettings:
    """The config group ``hydra.sweeper`` of our sweepers."""

    sampler: Mapping[str, Any] | None = None  # None runs every combination once
    pruner: Mapping[str, Any] | None = None
    direction: str | None = None  # `find_direction` reads it
    n_trials: int = 20
    n_jobs: int | None = None  # jobs at once, None to choose
    repeat: int = 1  # jobs of each combination, with different seeds
    seed_key: str = "seed"
    params: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("n_trials", "repeat", "n_jobs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"hydra.sweeper.{name}={value}: must be 1 or more")
        if self.pruner is not None and self.repeat != 1:
            # A combination must not be judged by only one of its seeds.
            raise ConfigError(f"hydra.sweeper.repeat={self.repeat}: a pruner needs repeat=1")


def check_jobs(config: DictConfig, check: Check | None) -> None:
    """Check a sample of a sweep's jobs, in which every value of every key occurs.

    For example, ``a=1,2,3 b=x,y`` has 6 jobs, and the sample is ``a=1 b=x``, ``a=2 b=y`` and
    ``a=3 b=x``. The check stops after `MOST_SECONDS`.

    Raises:
        ConfigError: a key cannot have one of its values, or the first two jobs cannot run for the
            same reason.
    """
    columns = list(_values_of_keys(config))
    until = time.monotonic() + MOST_SECONDS
    longest = max((len(column) for column in columns), default=1)
    count = min(longest, _MOST_JOBS)
    problems = set[str]()
    for number in range(count):
        job = [column[number % len(column)] for column in columns]
        problem = _find_problem(config, job, check)
        problems.add(str(problem))
        # The first two jobs differ in every swept key, so a problem that both have is not caused
        # by one of the values.
        has_compared = number + 1 >= min(count, 2)
        if problem is not None and len(problems) == 1 and has_compared:
            raise problem
        if time.monotonic() > until:
            return


def _values_of_keys(config: DictConfig) -> Iterator[list[str]]:
    """Yield, for each key, overrides with its first values. A key that is not swept has one."""
    # Without resolving: `${hydra:job.num}` exists only in jobs.
    hydra: Any = OmegaConf.to_container(config.hydra)
    params = hydra["sweeper"].get("params")
    if not isinstance(params, dict):  # Ax's sweeper, for example, has another form.
        params = {}
    lines = [f"{key}={value}" for key, value in params.items()]
    lines += hydra["overrides"]["task"]
    parser = OverridesParser.create()
    for line in lines:
        # An override that cannot be expanded here, such as a glob, is left to the sweeper.
        with contextlib.suppress(Exception):
            override = parser.parse_override(line)
            values: Iterable[object] = ()
            value = override.value()
            if isinstance(value, IntervalSweep):
                values = (value.start, value.end)
            elif override.is_sweep_override():
                values = override.sweep_string_iterator()
            key = override.get_key_element()
            first_values = itertools.islice(values, _MOST_JOBS)
            choices = [f"{key}={value}" for value in first_values]
            yield choices or [line]


def _find_problem(
    config: DictConfig, overrides: list[str], check: Check | None
) -> ConfigError | None:
    """Return why a job cannot run, or None if it can.

    Raises:
        ConfigError: Hydra refuses one of the overrides, so every job with it would fail.
    """
    try:
        loader = GlobalHydra.instance().config_loader()
        cfg = loader.load_sweep_config(config, overrides)
    except REFUSALS as error:
        raise ConfigError(explain_job(error, config, overrides)) from error
    if check is None and not unchecked(cfg).chosen("detach"):
        return None  # The config may be incomplete until the project's ``main`` completes it.
    with open_dict(cfg):
        cfg.hydra.job.num = 0
        cfg.hydra.job.id = "0"
        cfg.hydra.runtime.output_dir = "."
    with resolve_hydra(cfg):
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


def find_direction(config: DictConfig) -> str:
    """Return which result of a sweep is best: the largest (``maximize``) or ``minimize``.

    If the config names no direction, the name of ``objective`` decides, and a line is logged.

    Raises:
        ConfigError: the sweeper's direction is invalid, or differs from ``sweep_direction``.
    """
    settings = unchecked(config)
    direction = settings.sweep_direction
    sweepers_direction = config.hydra.sweeper.get("direction")
    # Hydra's own Optuna sweeper has an enum here. With several objectives it has a list, which
    # cannot rank jobs.
    name = getattr(sweepers_direction, "name", sweepers_direction)
    if isinstance(name, str):
        if name not in (MAXIMIZE, MINIMIZE):
            raise ConfigError(f"hydra.sweeper.direction={name}: must be maximize or minimize")
        if direction not in ("auto", name):
            raise ConfigError(
                f"sweep_direction={direction}, but hydra.sweeper.direction={name}: leave one out"
            )
        return name
    if direction != "auto":
        return direction
    objective = settings.objective
    if not objective:
        objective = config.get("optimized_metric")
    if objective and SMALLEST_IS_BEST.search(str(objective).lower()):
        log.info(
            "the smallest %s is best, by its name; set sweep_direction=maximize if not", objective
        )
        return MINIMIZE
    if not objective and sweepers_direction is None and not settings.is_built_in:
        # The trainer may return its loss, and nothing shows the direction of an unnamed result.
        log.info("the largest result is best; set sweep_direction=minimize if not")
    return MAXIMIZE


def name_keys_as_in(config: DictConfig) -> None:
    """Let our log lines name keys as the user of this config writes them."""
    words = Words(their_keys(config))
    if words.for_log is not None:
        change_words(words.for_log)


@contextlib.contextmanager
def resolve_hydra(config: DictConfig) -> Iterator[None]:
    """Let ``${hydra:…}`` refer to this config within the block."""
    instance = HydraConfig.instance()
    before = instance.cfg
    try:
        instance.set_config(config)
        yield
    finally:
        instance.cfg = before


def launcher_of(config: DictConfig) -> str:
    """Return the name of the launcher that the user chose, such as ``basic``."""
    return str(config.hydra.runtime.choices.get("hydra/launcher"))


def explain_ignored_launcher(config: DictConfig, running: str | None) -> str | None:
    """Return why Hydra ignores the launcher in a job's config, or None if it does not.

    ``running`` is the launcher that runs the sweep, None if it is unknown.
    """
    chosen = launcher_of(config)
    if config.hydra.mode != RunMode.MULTIRUN:
        is_on_command_line = f"hydra/launcher={chosen}" in config.hydra.overrides.hydra
        if chosen == "basic" or not is_on_command_line:
            return None
        return (
            f"hydra/launcher={chosen}: a launcher runs the jobs of a sweep, and this is a single "
            "job; add -m"
        )
    if running in (None, chosen):
        return None
    # hydra#2946: Hydra reads a file that the sweep varies once per job, long after it chose the
    # launcher.
    return (
        f"hydra/launcher: {chosen}: chosen in a file that the sweep itself selects, which is too "
        f"late, because {running} already runs the sweep; put hydra/launcher={chosen} on the "
        "command line"
    )


def explain_plugin_error(error: BaseException) -> tuple[str, int] | None:
    """Return a message and an exit code for a launcher's error that the user can fix, or None."""
    if isinstance(error, RuntimeError) and 'Could not detect "srun"' in str(error):
        return (
            "hydra/launcher=submitit_slurm: srun is not installed here; start the sweep on a "
            "machine with Slurm's commands, or use hydra/launcher=gpu_queue on this machine",
            EXIT_BAD_CONFIG,
        )
    # submitit raises this error for a job that ended without a result. The sweep's table shows
    # why the job ended.
    if type(error).__name__ == "UncompletedJobError":
        return " ".join(str(error).splitlines()[:2]), EXIT_FAILED
    return None
