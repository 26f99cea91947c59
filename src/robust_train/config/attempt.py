"""The config of one attempt: typed for us, composed for its trainer."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from robust_train.config.composition import complete
from robust_train.config.schema import RobustConfig, TrainingConfig
from robust_train.model.errors import ConfigError
from robust_train.model.spec import AttemptSpec

_OF_TRAINING = {item.name for item in fields(TrainingConfig)}
_CHOSEN = _OF_TRAINING & {item.name for item in fields(AttemptSpec)}
"""Keys under ``training`` that are chosen for each attempt."""


def plain_config(cfg: DictConfig) -> DictConfig:
    """Return the config of a job of ``train.py``: one attempt, without choosing or waiting."""
    plain = complete(cfg)
    is_script = OmegaConf.select(plain, "trainer.argv") is not None
    plain.isolation = "process" if is_script else "none"
    plain.auto_device = plain.gpu_queue = plain.wait_for_gpu = False
    plain.min_gpu_memory_mb, plain.min_batch_size = 0, 1
    return plain


def guest_config(cfg: DictConfig, engine: str, world_size: int) -> DictConfig:
    """Return the config of a job whose ranks an engine has started. Raises ConfigError: the config
    asks for other ranks, or for a script."""
    cfg = cfg.copy()
    if cfg.num_gpus not in (1, world_size):
        raise ConfigError(
            f"num_gpus={cfg.num_gpus}: {engine} has started {world_size} ranks; leave num_gpus out"
        )
    if OmegaConf.select(cfg, "trainer.argv") is not None:
        raise ConfigError(
            f"trainer.argv: a script cannot be a rank of {engine}; start it there itself"
        )
    with open_dict(cfg):
        cfg.num_gpus, cfg.isolation = world_size, "process"
    return cfg


def for_attempt(config: RobustConfig, spec: AttemptSpec, device: str) -> RobustConfig:
    """Return a job's config with what one attempt uses."""
    chosen: dict[str, Any] = {name: getattr(spec, name) for name in _CHOSEN}
    training = replace(config.training, **chosen)
    return replace(config, device=device, num_gpus=spec.ranks, training=training)


def for_rank(config: RobustConfig, rank: int) -> RobustConfig:
    """Return an attempt's config as one of its ranks needs it."""
    if config.device.startswith("cuda"):
        config = replace(config, device=f"cuda:{rank}")
    if rank:
        # one record of memory over time, in one file
        config = replace(config, memory=replace(config.memory, sample_interval_ms=0))
    return config


def trainer_config(cfg: DictConfig, config: RobustConfig) -> DictConfig:
    """Return the composed config as the trainer of an attempt sees it, fully resolved."""
    cfg = cfg.copy()
    with open_dict(cfg):
        cfg.device, cfg.num_gpus = config.device, config.num_gpus
        for name in (*_CHOSEN, "effective_batch_size"):
            cfg.training[name] = getattr(config.training, name)
    OmegaConf.resolve(cfg)
    return cfg


def early_imports(cfg: DictConfig) -> list[str]:
    """Return the modules to import before a device is there: ``trainer.preload_modules``.

    Raises:
        ConfigError: it is not a list.
    """
    wanted = OmegaConf.select(cfg, "trainer.preload_modules")
    if wanted is not None and not isinstance(wanted, ListConfig):
        raise ConfigError(
            f"trainer.preload_modules={wanted}: must be a list of modules"
        )
    several = cfg.num_gpus > 1 and OmegaConf.select(cfg, "trainer.argv") is None
    return [*map(str, wanted or ()), *(["torch.distributed"] if several else [])]
