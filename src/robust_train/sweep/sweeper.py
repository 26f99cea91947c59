"""Our sweepers: each combination of a grid (``hydra/sweeper=robust_grid``), or what Optuna suggests
(``robust_optuna``), never in batches.
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
    """Run a sweep, of which ``hydra.sweeper`` is ``given``, to its end.

    Raises:
        ConfigError: what was asked for cannot be searched.
        JobInterrupted: a signal ended the sweep, after every job has ended.
    """
    launcher = launcher_of(config)
    if launcher not in ("basic", "gpu_queue"):
        raise ConfigError(
            f"hydra/launcher={launcher}: this sweeper runs its jobs itself, on the machine that it "
            "is started on; leave the launcher out"
        )
    content: Any = OmegaConf.to_container(OmegaConf.create(dict(given)))
    unknown = sorted(content.keys() - vars(SweeperSettings()).keys())
    if unknown:
        raise ConfigError(f"hydra.sweeper.{unknown[0]}: no such key")
    try:
        settings = from_json(SweeperSettings, content)
    except MalformedEventError as error:
        problem = str(error).replace("SweeperSettings", "hydra.sweeper")
        raise ConfigError(problem) from error
    params = settings.params or {}
    lines = [f"{key}={value}" for key, value in params.items()]
    lines += arguments  # comes last, and counts
    parser = OverridesParser.create(config_loader=context.config_loader)
    by_key = {override.get_key_element(): override for override in parser.parse_overrides(lines)}
    swept = {k: override for k, override in by_key.items() if override.is_sweep_override()}
    fixed = [
        f"{key}={override.get_value_element_as_str()}"
        for key, override in by_key.items()
        if key not in swept
    ]
    seeds = _seeds(settings, config, by_key)
    n_jobs = settings.n_jobs
    if not n_jobs:
        n_jobs = config.hydra.launcher.get("n_jobs")
    queue = GpuQueue(context, task_function, config, n_jobs)
    if settings.sampler is None:
        queue.run(queue.in_order(dict(enumerate(_combinations(swept, fixed, seeds)))))
        return
    try:
        from robust_train.sweep.search import Search
    except ImportError as error:
        raise ConfigError(
            f"hydra/sweeper=robust_optuna: {error}; "
            'pip install "robust-train[sweep]", which brings optuna'
        ) from error
    queue.run(Search(queue, swept, fixed, seeds, settings))


def _combinations(
    swept: Mapping[str, Override], fixed: list[str], seeds: list[list[str]]
) -> list[list[str]]:
    """Return the overrides of each job of a grid."""
    jobs = [fixed]
    for key, override in swept.items():
        if not override.is_discrete_sweep():
            raise ConfigError(
                f"{override.input_line}: a grid needs values, as by range(1,10) or choice(1,2); "
                "hydra/sweeper=robust_optuna searches an interval"
            )
        overrides = [f"{key}={value}" for value in override.sweep_string_iterator()]
        jobs = [[*job, override] for job in jobs for override in overrides]
    return [job + seed for job in jobs for seed in seeds]


def _seeds(
    settings: SweeperSettings, config: DictConfig, by_key: Mapping[str, Override]
) -> list[list[str]]:
    """Return the overrides of each repetition of a point, or none without ``repeat``."""
    if settings.repeat == 1:
        return [[]]
    key = settings.seed_key
    given = by_key.get(key)
    if given is not None and given.is_sweep_override():
        raise ConfigError(
            f"hydra.sweeper.repeat={settings.repeat} sets {key} itself; leave it out of the sweep"
        )
    first: Any = OmegaConf.select(config, key) if given is None else given.value()
    return [[f"{key}={int(first or 0) + number}"] for number in range(settings.repeat)]
