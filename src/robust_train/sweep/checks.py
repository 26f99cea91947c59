"""What is checked before the first job of a sweep starts; the rest is left to the jobs."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep
from omegaconf import DictConfig, OmegaConf, open_dict

from robust_train.config.checks import checked, unchecked
from robust_train.config.composition import complete
from robust_train.config.refusals import REFUSALS, explain
from robust_train.model.errors import ConfigError

_MOST_CHECKS, _MOST_SECONDS = 50, 5.0
Check = Callable[[DictConfig], None]


def check_jobs(config: DictConfig, check: Check | None) -> None:
    """Check that each value of each swept key goes with some values of the other keys: a few
    seconds at most, and before a job starts. Raises ConfigError: no job can use a value."""
    swept = list(_overrides(config))
    until = time.monotonic() + _MOST_SECONDS
    each = [
        [*swept[:n], [value], *swept[n + 1 :]]
        for n, own in enumerate(swept)
        for value in (own if len(own) > 1 else ())
    ]
    for columns in each[:_MOST_CHECKS] or [swept]:
        apart = [tuple(values[k % len(values)] for values in columns) for k in (0, 1)]
        all_jobs = itertools.islice(itertools.product(*columns), _MOST_CHECKS)
        jobs, problems = dict.fromkeys([*apart, *all_jobs]), list[str]()
        for job in itertools.takewhile(lambda _: time.monotonic() < until, jobs):
            try:
                _check_one(config, list(job), check)
                break
            except ConfigError as error:
                problems.append(str(error))
                # in every job, or whatever the values of all other keys
                in_every_job = len(problems) == len(jobs) < _MOST_CHECKS
                if in_every_job or problems == [str(error)] * 2:
                    raise


def _overrides(config: DictConfig) -> Iterator[list[str]]:
    """Yield the first overrides that each key may have: one, or several where it is swept."""
    # `${hydra:job.num}` is each job's own
    hydra: Any = OmegaConf.to_container(config.hydra)
    params = hydra["sweeper"].get("params")  # a sweeper of another kind may have a list
    given = params.items() if isinstance(params, dict) else ()
    parser = OverridesParser.create()
    for line in [*(f"{k}={value}" for k, value in given), *hydra["overrides"]["task"]]:
        # a glob: the sweeper's to choose
        with contextlib.suppress(Exception):
            override = parser.parse_override(line)
            ends: Any = override.value()
            if not override.is_sweep_override():
                yield [line]
                continue
            values: Iterable[object] = (
                (ends.start, ends.end)
                if isinstance(ends, IntervalSweep)
                else override.sweep_string_iterator()
            )
            key, first = (
                override.get_key_element(),
                itertools.islice(values, _MOST_CHECKS),
            )
            if own := [f"{key}={value}" for value in first]:
                yield own


def _check_one(
    config: DictConfig,
    overrides: list[str],
    check: Check | None,
) -> None:
    try:
        loader = GlobalHydra.instance().config_loader()
        cfg = loader.load_sweep_config(config, overrides)
    except REFUSALS as error:
        raise ConfigError(explain(error, "robust", overrides)) from error
    if check is None and not unchecked(cfg).detach:
        return  # a project's main may complete it
    before = HydraConfig.instance().cfg
    try:
        with open_dict(cfg):
            cfg.hydra.job.num = 0
            cfg.hydra.job.id = "0"
            cfg.hydra.runtime.output_dir = "."
            HydraConfig.instance().set_config(cfg)
            del cfg["hydra"]
        cfg = complete(cfg)
        checked(cfg)
        if check is not None:
            check(cfg)
    finally:
        HydraConfig.instance().cfg = before
