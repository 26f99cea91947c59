"""Turns a composed config into a :class:`RobustConfig`, or refuses it with one line.

Commands and the launcher call :func:`checked`. The package's code reads the result, and the trainer
gets the config itself.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterator, MutableMapping
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from robust_train.config.keys import Group, schema
from robust_train.config.projects import GROUP, Words, ours, their_keys
from robust_train.config.schema import (
    ACCUMULATION,
    BATCH,
    CHECKPOINTING,
    UNREAD_IN_PROJECTS,
    WORKERS,
    RobustConfig,
    TrainingConfig,
)
from robust_train.config.values import URLS_VARIABLE, is_secret
from robust_train.model.errors import ConfigError
from robust_train.readable import meant

T = TypeVar("T")

_DEFAULTS = RobustConfig()
_ONE_OF_SEVERAL = re.compile(r"cuda:\d+|GPU-[0-9a-fA-F-]+|MIG-\S+")
_DEVICE = re.compile(r"auto|cpu|cuda|cuda:\d+|GPU-[0-9a-fA-F-]+|MIG-\S+")


def checked(cfg: DictConfig) -> RobustConfig:
    """Return a composed config in the types of the code, with its batch settled.

    Raises:
        ConfigError: one line with the key, its value and the accepted values.
    """
    keys = ours(cfg)
    theirs = their_keys(cfg)
    prefix = "" if theirs is None else f"{GROUP}."
    refuse_values_of_groups(keys, prefix)
    _resolve_all(keys, prefix)
    _refuse_near_misses(keys, prefix)
    missing = sorted(OmegaConf.missing_keys(keys))
    if missing:
        raise _missing(prefix + missing[0])
    config = _read_all(keys, prefix)
    objective = config.objective
    if not objective:
        objective = cfg.get("optimized_metric")
    with Words(theirs).of_errors():
        config = replace(_with_batch(config), objective=objective, theirs=theirs)
        for mistake in _mistakes(config):
            raise ConfigError(mistake)
    return config


def unchecked(cfg: DictConfig) -> RobustConfig:
    """Return the readable values of a config that no job has checked. A project's config may lack
    this package's keys, or have values that the job will refuse, so these keys have their defaults.
    """
    return _read_all(ours(cfg), "", is_lenient=True)


def hide_urls(cfg: DictConfig, environ: MutableMapping[str, str] = os.environ) -> bool:
    """Move ``notify.urls`` out of the config, and of Hydra's part of it, into the environment, and
    return whether there were any."""
    keys = ours(cfg)
    given = OmegaConf.select(keys, "notify.urls", throw_on_missing=False)
    if not given:
        return False
    urls = [str(url) for url in given] if OmegaConf.is_list(given) else str(given).split()
    urls_before = environ.get(URLS_VARIABLE, "").split()
    environ[URLS_VARIABLE] = " ".join(dict.fromkeys(urls_before + urls))
    with read_write(keys), open_dict(keys):
        OmegaConf.update(keys, "notify.urls", None)
    overrides = OmegaConf.select(cfg, "hydra.overrides.task") or []
    for line in [override for override in overrides if is_secret(override)]:
        with read_write(cfg.hydra), open_dict(cfg.hydra):
            overrides.remove(line)
            name = str(cfg.hydra.job.override_dirname).replace(line, "notify")
            cfg.hydra.job.override_dirname = name
    return True


def _read_all(cfg: DictConfig, prefix: str, *, is_lenient: bool = False) -> RobustConfig:
    """Return the keys of the kernel and of all features."""
    config = read(RobustConfig, cfg, prefix, is_lenient=is_lenient)
    for keys in schema().features:
        try:
            group = cfg.get(keys.group) if keys.group else cfg
        except OmegaConfBaseException:
            if not is_lenient:
                raise
            continue
        if isinstance(group, DictConfig):
            name = f"{prefix}{keys.group}." if keys.group else prefix
            config = config.having(read(keys, group, name, is_lenient=is_lenient))
    return _with_memory(config)


def _with_memory(config: RobustConfig) -> RobustConfig:
    """Settle the memory to reserve, and who may share the GPU: ``auto`` begins with the default,
    and with the job alone."""
    size: int | None = config.min_gpu_memory_mb  # None: auto
    if size is None:
        least = RobustConfig.min_gpu_memory_mb
        config = replace(config, min_gpu_memory_mb=least, measures_memory=True)
    number: int | None = config.gpu_jobs_per_device  # None: auto
    if number is None:
        config = replace(config, gpu_jobs_per_device=1, measures_memory=True, packs_gpus=True)
    return config


def read(owner: type[T], cfg: DictConfig, prefix: str, *, is_lenient: bool = False) -> T:
    """Return the keys that a dataclass declares, ``prefix`` before their names in errors. All other
    keys belong to the trainer."""
    values: dict[str, Any] = {}
    for item in fields(owner):  # type: ignore[arg-type]
        name = prefix + item.name
        group = item.metadata.get("group")
        if not group:
            group = item.metadata.get("open")
        if not item.metadata:
            continue
        if OmegaConf.is_missing(cfg, item.name) and not is_lenient:
            raise _missing(name)
        if item.name not in cfg:
            continue
        try:
            given = cfg[item.name]
            if group is not None:
                if isinstance(given, DictConfig):
                    values[item.name] = read(group, given, f"{name}.", is_lenient=is_lenient)
                continue
            if isinstance(given, ListConfig):
                given = OmegaConf.to_container(given, resolve=True)
            values[item.name] = item.metadata["key"].value(name, given)
        except (ConfigError, OmegaConfBaseException):
            if not is_lenient:
                raise
    return owner(**values)


def _missing(name: str) -> ConfigError:
    return ConfigError(f"{name}: has no default and must be given: {name}=…")


def _resolve_all(cfg: DictConfig, prefix: str = "") -> None:
    """Resolve every value, so that an error names its key."""
    for key in cfg:
        name = prefix + str(key)
        if OmegaConf.is_missing(cfg, key):
            continue
        try:
            value = cfg[key]
            if isinstance(value, ListConfig):
                OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{name}: {str(error).splitlines()[0]}") from error
        if isinstance(value, DictConfig):
            _resolve_all(value, f"{name}.")


def refuse_values_of_groups(cfg: DictConfig, prefix: str = "") -> None:
    """Refuse a value in the place of a group of keys, such as ``retry=3``. OmegaConf's own error
    would name the class that declares the group."""
    for name, group in schema().root.members.items():
        if not isinstance(group, Group) or group.is_open or name not in cfg:
            continue
        if OmegaConf.is_interpolation(cfg, name) or OmegaConf.is_missing(cfg, name):
            continue
        value = cfg[name]
        if not isinstance(value, DictConfig):
            given = f"{prefix}{name}"
            if not is_secret(f"{name}="):
                given += f"={value}"
            keys = ", ".join(f"{prefix}{name}.{key}" for key in group.members)
            raise ConfigError(f"{given}: is a group of keys, not a value; it has {keys}")


def _refuse_near_misses(cfg: DictConfig, prefix: str) -> None:
    """Refuse likely typos, which the open root would accept unseen. In a project's group ``robust``
    this includes the open groups, because all keys there belong to this package."""
    groups = schema().root.members
    for name in sorted({str(key) for key in cfg} - groups.keys()):
        close = difflib.get_close_matches(name, groups, n=1, cutoff=0.85)
        if close or prefix:
            raise unknown(name, groups, prefix)
    for top, group in groups.items() if prefix else ():
        if not isinstance(group, Group) or not group.is_open or top not in cfg:
            continue
        accepted = {*group.members, "preload_modules"}
        for name in sorted({str(key) for key in cfg[top]} - accepted):
            raise unknown(name, accepted, f"{prefix}{top}.")


def unknown(name: str, accepted: Collection[str], prefix: str) -> ConfigError:
    """Return the refusal of an unknown key."""
    hint = meant(name, accepted, prefix)
    return ConfigError(f"{prefix}{name}: no such key; {hint}")


def _with_batch(config: RobustConfig) -> RobustConfig:
    """Settle micro-batch and accumulation. ``auto`` starts with each rank's share of the effective
    batch. A number together with an effective batch gets the accumulation that it needs."""
    training = config.training
    size: int | None = training.batch_size  # None for auto
    effective = training.effective_batch_size
    steps = training.gradient_accumulation_steps
    finds_batch_size = size is None
    if size is None:
        effective = effective or TrainingConfig.batch_size
        size, rest = divmod(effective, config.num_gpus)
        if rest:
            raise ConfigError(
                f"training.effective_batch_size={effective}: is not a multiple of "
                f"num_gpus={config.num_gpus}"
            )
        _check_auto(config, size)
    elif effective is not None:
        steps = _accumulation(config, size, effective)
    training = replace(
        training, batch_size=size, gradient_accumulation_steps=steps, effective_batch_size=effective
    )
    return replace(config, training=training, finds_batch_size=finds_batch_size)


def _check_auto(config: RobustConfig, share: int) -> None:
    steps = config.training.gradient_accumulation_steps
    if steps != 1:
        raise ConfigError(
            f"training.gradient_accumulation_steps={steps}: with training.batch_size=auto it "
            "follows from training.effective_batch_size=…; give that instead"
        )
    if config.preserve_effective_batch_size is False:
        raise ConfigError(
            "preserve_effective_batch_size=false: with training.batch_size=auto the result would "
            "depend on the GPU; leave it out, or give training.batch_size as a number"
        )
    if config.min_batch_size > share:
        raise ConfigError(
            f"min_batch_size={config.min_batch_size}: must not be above {share}, the share of each "
            "process in training.effective_batch_size"
        )


def _accumulation(config: RobustConfig, size: int, effective: int) -> int:
    steps = config.training.gradient_accumulation_steps
    gpus = config.num_gpus
    needed, rest = divmod(effective, size * gpus)
    processes = "" if gpus == 1 else f" × num_gpus={gpus}"
    if rest or needed < 1:
        raise ConfigError(
            f"training.effective_batch_size={effective}: is not a multiple of "
            f"training.batch_size={size}{processes}"
        )
    if steps not in (1, needed):
        raise ConfigError(
            f"training.gradient_accumulation_steps={steps}: {size} × {steps}{processes} is not "
            f"training.effective_batch_size={effective}; give only one of the two"
        )
    return needed


def _mistakes(config: RobustConfig) -> Iterator[str]:
    """Yield the conflicts between the values of two keys."""
    pattern = _ONE_OF_SEVERAL if config.names_several else _DEVICE
    if not all(map(pattern.fullmatch, config.device.split(","))):
        yield (
            f"device={config.device}: must be auto, cpu, cuda, cuda:<number>, a GPU's UUID, or a "
            "list of GPUs, device=[2,3]"
        )
    size = config.training.batch_size
    gpus = config.num_gpus
    if config.theirs is not None:
        steps = config.training.gradient_accumulation_steps
        for key, value, least in (
            (BATCH, size, 1),
            (ACCUMULATION, steps, 1),
            (WORKERS, config.training.num_workers, 0),
            (CHECKPOINTING, config.training.gradient_checkpointing or 0, 0),
        ):
            if value > least and key not in config.theirs:
                yield (
                    f"{key}={value}: the project's config has no key for it; refer to the one "
                    f"that its code reads: '{key}=${{its.name}}'"
                )
        for key in UNREAD_IN_PROJECTS:
            value = attrgetter(key)(config)
            if value != attrgetter(key)(_DEFAULTS):
                yield f"{key}={value}: a project's code does not see it; set the project's own key"
    if config.min_batch_size > size:
        least = config.min_batch_size
        yield f"min_batch_size={least}: must not be above training.batch_size={size}"
    if config.packs_gpus and config.finds_batch_size:
        yield (
            "gpu_jobs_per_device=auto: training.batch_size=auto fills a GPU with one job; give one "
            "of them a number"
        )
    if config.runs_inline and gpus > 1:
        yield (
            f"num_gpus={gpus}: every GPU needs a process of its own; leave isolation=none out, or "
            "use num_gpus=1"
        )
    if config.runs_inline and config.traits.is_program:
        yield "isolation=none: a script (trainer.argv) always runs in a process of its own"
    for keys in schema().features:
        yield from config.of(keys).mistakes(config)
