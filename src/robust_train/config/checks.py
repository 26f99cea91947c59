"""Turns a composed config into a :class:`RobustConfig`, or refuses it with one line.

Commands and the launcher call :func:`checked`. The package's code reads the `RobustConfig`, and the
trainer gets the composed config itself.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from robust_train.config.keys import Group, schema
from robust_train.config.projects import GROUP, ours, their_keys
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
from robust_train.config.words import Words
from robust_train.model.errors import ConfigError
from robust_train.readable import suggest

T = TypeVar("T")

_DEFAULTS = RobustConfig()
_ONE_OF_SEVERAL = re.compile(r"cuda:\d+|GPU-[0-9a-fA-F-]+|MIG-\S+")
_DEVICE = re.compile(r"auto|cpu|cuda|cuda:\d+|GPU-[0-9a-fA-F-]+|MIG-\S+")


def checked(cfg: DictConfig) -> RobustConfig:
    """Return a composed config as a `RobustConfig`, with micro-batch and accumulation settled.

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
    with Words(theirs).rewording_errors():
        config = replace(_settle_batch(config), objective=objective, theirs=theirs)
        mistakes = list(_find_mistakes(config))
        if mistakes:
            raise ConfigError(mistakes[0])
    return config


def unchecked(cfg: DictConfig) -> RobustConfig:
    """Return a config that no job has checked.

    A key has its default if it is missing, or if the job will refuse its value.
    """
    return _read_all(ours(cfg), "", is_lenient=True)


def hide_urls(cfg: DictConfig, environ: MutableMapping[str, str] = os.environ) -> bool:
    """Move ``notify.urls`` from the config, and from the overrides that Hydra records, into the
    environment. Return whether there were any URLs."""
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
    return _settle_memory(config)


def _settle_memory(config: RobustConfig) -> RobustConfig:
    """Settle the memory to reserve and the jobs per GPU. With ``auto``, a job starts with the
    default memory and without other jobs on its GPU."""
    # The fields have None for `auto`.
    memory_mb: int | None = config.min_gpu_memory_mb
    if memory_mb is None:
        default_mb = RobustConfig.min_gpu_memory_mb
        config = replace(config, min_gpu_memory_mb=default_mb, measures_memory=True)
    jobs: int | None = config.gpu_jobs_per_device
    if jobs is None:
        # The user chose any number other than the default, and no less than that is reserved.
        is_default = config.min_gpu_memory_mb == RobustConfig.min_gpu_memory_mb
        config = replace(
            config,
            gpu_jobs_per_device=1,
            measures_memory=config.measures_memory or is_default,
            packs_gpus=True,
        )
    return config


def read(owner: type[T], cfg: DictConfig, prefix: str, *, is_lenient: bool = False) -> T:
    """Return the keys that a dataclass declares. All other keys of ``cfg`` belong to the trainer.

    Args:
        owner: the dataclass.
        cfg: the config, or a group of it.
        prefix: the group's name, for errors.
        is_lenient: whether a missing or refused value becomes the default.
    """
    values: dict[str, Any] = {}
    for item in fields(owner):  # type: ignore[arg-type]
        # A field without metadata is not a key.
        if not item.metadata:
            continue
        name = prefix + item.name
        group = item.metadata.get("group")
        if group is None:
            group = item.metadata.get("open")
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
    """Resolve every value of ``cfg``, and raise an error that names the key if one fails."""
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
    """Refuse a key at the root that resembles one of our keys, because it is probably a typo.

    In a project's group ``robust`` (with a ``prefix``), all keys belong to this package, so every
    unknown key is refused, also in open groups.
    """
    members = schema().root.members
    for name in sorted({str(key) for key in cfg} - members.keys()):
        close = difflib.get_close_matches(name, members, n=1, cutoff=0.85)
        if close or prefix:
            raise unknown_key(name, members, prefix)
    if not prefix:
        return
    for group_name, group in members.items():
        if not isinstance(group, Group) or not group.is_open or group_name not in cfg:
            continue
        accepted = {*group.members, "preload_modules"}
        unknown = sorted({str(key) for key in cfg[group_name]} - accepted)
        if unknown:
            raise unknown_key(unknown[0], accepted, f"{prefix}{group_name}.")


def unknown_key(name: str, accepted: Collection[str], prefix: str) -> ConfigError:
    """Return the refusal of a key that does not exist."""
    hint = suggest(name, accepted, prefix)
    return ConfigError(f"{prefix}{name}: no such key; {hint}")


def _settle_batch(config: RobustConfig) -> RobustConfig:
    """Settle micro-batch and accumulation.

    ``batch_size=auto`` starts with each rank's share of the effective batch. If ``batch_size`` and
    ``effective_batch_size`` are numbers, accumulation follows from them.
    """
    training = config.training
    # The field has None for `auto`.
    size: int | None = training.batch_size
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
        _check_auto_batch(config, size)
    elif effective is not None:
        steps = _compute_accumulation(config, size, effective)
    training = replace(
        training, batch_size=size, gradient_accumulation_steps=steps, effective_batch_size=effective
    )
    return replace(config, training=training, finds_batch_size=finds_batch_size)


def _check_auto_batch(config: RobustConfig, share: int) -> None:
    """Refuse keys that contradict ``batch_size=auto``. ``share`` is the share of each rank in the
    effective batch."""
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


def _compute_accumulation(config: RobustConfig, size: int, effective: int) -> int:
    """Return the accumulation for a micro-batch and an effective batch.

    Raises:
        ConfigError: the numbers contradict each other.
    """
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


def _find_mistakes(config: RobustConfig) -> Iterator[str]:
    """Yield refusals of the device, and of values that contradict each other."""
    pattern = _ONE_OF_SEVERAL if config.names_several else _DEVICE
    if not all(pattern.fullmatch(device) for device in config.device.split(",")):
        yield (
            f"device={config.device}: must be auto, cpu, cuda, cuda:<number>, a GPU's UUID, or a "
            "list of GPUs, device=[2,3]"
        )
    if config.theirs is not None:
        yield from _find_mistakes_in_project(config, config.theirs)
    size = config.training.batch_size
    if config.min_batch_size > size:
        smallest = config.min_batch_size
        yield f"min_batch_size={smallest}: must not be above training.batch_size={size}"
    if config.packs_gpus and config.finds_batch_size:
        yield (
            "gpu_jobs_per_device=auto: training.batch_size=auto fills a GPU with one job; give one "
            "of them a number"
        )
    if config.runs_inline and config.num_gpus > 1:
        yield (
            f"num_gpus={config.num_gpus}: every GPU needs a separate process; leave isolation=none "
            "out, or use num_gpus=1"
        )
    if config.runs_inline and config.traits.is_program:
        yield "isolation=none: a script (trainer.argv) always runs in a separate process"
    for keys in schema().features:
        yield from config.of(keys).mistakes(config)


def _find_mistakes_in_project(config: RobustConfig, theirs: Mapping[str, str]) -> Iterator[str]:
    """Yield refusals of values that a project's code would never see. ``theirs`` has the project's
    key for each of our keys that refers to one."""
    training = config.training
    for key, value, default in (
        (BATCH, training.batch_size, 1),
        (ACCUMULATION, training.gradient_accumulation_steps, 1),
        (WORKERS, training.num_workers, 0),
        (CHECKPOINTING, training.gradient_checkpointing or 0, 0),
    ):
        if value > default and key not in theirs:
            yield (
                f"{key}={value}: the project's config has no key for it; refer to the key that its "
                f"code reads: '{key}=${{its.name}}'"
            )
    for key in UNREAD_IN_PROJECTS:
        value = attrgetter(key)(config)
        if value != attrgetter(key)(_DEFAULTS):
            yield f"{key}={value}: a project's code does not see it; set the project's own key"
