"""Runs our sweepers: ``hydra/sweeper=robust_grid`` and ``hydra/sweeper=robust_optuna``.

Hydra's plugin calls `sweep` in the sweep's process. The grid runs every combination of values, and
Optuna chooses them one by one. Both start a job whenever there is room, and never wait for a batch
of jobs to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from robust_train.model.errors import ConfigError
from robust_train.model.json import MalformedEventError, from_json
from robust_train.sweep.checks import SweeperSettings, launcher_of
from robust_train.sweep.gpu_queue import GpuQueue


def sweep(
    context: HydraContext,
    task_function: TaskFunction,
    config: DictConfig,
    given: Mapping[str, Any],
    arguments: Sequence[str],
) -> None:
    """Run a sweep to its end.

    Args:
        context, task_function, config: Hydra's.
        given: the config group ``hydra.sweeper``.
        arguments: the overrides on the command line.

    Raises:
        ConfigError: the sweep cannot run with this config.
        JobInterrupted: a signal ended the sweep, after every job has ended.
    """
    launcher = launcher_of(config)
    if launcher not in ("basic", "gpu_queue"):
        raise ConfigError(
            f"hydra/launcher={launcher}: this sweeper runs its jobs itself, on the machine where "
            "it is started; leave the launcher out"
        )
    settings = _read_settings(given)
    params = settings.params or {}
    # An override on the command line comes last, so it replaces the same key in `params`.
    lines = [f"{key}={value}" for key, value in params.items()]
    lines += arguments
    parser = OverridesParser.create(config_loader=context.config_loader)
    by_key = {override.get_key_element(): override for override in parser.parse_overrides(lines)}
    swept = {}
    fixed = []
    for key, override in by_key.items():
        if override.is_sweep_override():
            swept[key] = override
        else:
            fixed.append(f"{key}={override.get_value_element_as_str()}")
    seeds = _list_seeds(settings, config, by_key)
    n_jobs = settings.n_jobs
    if not n_jobs:
        n_jobs = config.hydra.launcher.get("n_jobs")
    queue = GpuQueue(context, task_function, config, n_jobs)
    if settings.sampler is None:
        combinations = _list_combinations(swept, fixed, seeds)
        queue.run(queue.order_jobs(dict(enumerate(combinations))))
        return
    try:
        from robust_train.sweep.search import Search
    except ImportError as error:
        raise ConfigError(
            f"hydra/sweeper=robust_optuna: {error}; "
            'pip install "robust-train[sweep]", which installs Optuna'
        ) from error
    queue.run(Search(queue, swept, fixed, seeds, settings))


def _read_settings(given: Mapping[str, Any]) -> SweeperSettings:
    """Return the settings in ``hydra.sweeper``.

    Raises:
        ConfigError: a key is unknown, or has a wrong value.
    """
    content: Any = OmegaConf.to_container(OmegaConf.create(dict(given)))
    unknown = sorted(content.keys() - vars(SweeperSettings()).keys())
    if unknown:
        raise ConfigError(f"hydra.sweeper.{unknown[0]}: no such key")
    try:
        return from_json(SweeperSettings, content)
    except MalformedEventError as error:
        problem = str(error).replace("SweeperSettings", "hydra.sweeper")
        raise ConfigError(problem) from error


def _list_combinations(
    swept: Mapping[str, Override], fixed: list[str], seeds: list[list[str]]
) -> list[list[str]]:
    """Return the overrides of each job of a grid."""
    jobs = [fixed]
    for key, override in swept.items():
        if not override.is_discrete_sweep():
            raise ConfigError(
                f"{override.input_line}: a grid needs separate values, such as range(1,10) or "
                "choice(1,2); hydra/sweeper=robust_optuna searches an interval"
            )
        overrides = [f"{key}={value}" for value in override.sweep_string_iterator()]
        jobs = [[*job, override] for job in jobs for override in overrides]
    return [job + seed for job in jobs for seed in seeds]


def _list_seeds(
    settings: SweeperSettings, config: DictConfig, by_key: Mapping[str, Override]
) -> list[list[str]]:
    """Return the overrides that set the seed of each of a combination's jobs.

    Without ``repeat``, a combination has one job, whose seed is not set.
    """
    if settings.repeat == 1:
        return [[]]
    key = settings.seed_key
    given = by_key.get(key)
    if given is not None and given.is_sweep_override():
        raise ConfigError(
            f"hydra.sweeper.repeat={settings.repeat} sets {key} itself; leave it out of the sweep"
        )
    value: Any = OmegaConf.select(config, key) if given is None else given.value()
    first = int(value or 0)
    return [[f"{key}={first + number}"] for number in range(settings.repeat)]
