"""The configuration's schema and its range checks.

Importing this module puts the schemas into Hydra's ConfigStore; the YAML files under ``configs/``
build on them by name (``plain_schema``, ``robust_schema``, ``schema/model/…``). The root stays
open, so that a user's own project can add keys beside ours; every key of ours is typed.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from robust_train.errors import ConfigError


@dataclass
class TrainingConfig:
    """``training``: what every trainer needs to know, and what the launcher adapts."""

    batch_size: Any = 64  # a whole number or auto: see batch_config.py
    gradient_accumulation_steps: int = 1
    effective_batch_size: int | None = None
    num_workers: int = 2
    prefetch_factor: int = 2
    epochs: int = 10
    lr: float = 1e-3
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    label_smoothing: float = 0.0
    warmup_fraction: float = 0.05
    mixed_precision: bool = True
    gradient_checkpointing: bool = False
    seed: int = 42
    log_every_steps: int = 50
    regrow_after_steps: int | None = None
    checkpoint_every_steps: int | None = None
    checkpoint_every_minutes: Any = "auto"  # minutes or auto: see runfolder/cadence.py
    keep_checkpoints: int = 2


@dataclass
class MemoryConfig:
    """``memory``: what each attempt does about memory. Steps are optimizer steps, 0 is never."""

    clear_on_start: bool = True
    fraction: float = 0.95
    expandable_segments: Any = "auto"
    empty_cache_frequency: int = 10
    empty_cache_threshold: float = 0.5
    clear_after_save: bool = True
    clear_after_epoch: bool = True
    clear_on_failure: bool = True
    log_frequency: int = 0
    sample_interval_ms: int = 100
    snapshot_on_oom: bool = True


@dataclass
class CnnConfig:
    """``model=cnn``: a small convolutional network, trained from scratch."""

    name: str = "cnn"
    width: int = 32
    image_size: int | None = None
    dropout: float = 0.1
    lr: float = 3e-3
    weights: str | None = None


@dataclass
class BackboneConfig:
    """What the models on a timm backbone share."""

    name: str = MISSING
    backbone: str = MISSING
    pretrained: bool = True
    weights: str | None = None
    image_size: int = 224
    dropout: float = 0.0
    lr: float = 1e-3


@dataclass
class LinearProbeConfig(BackboneConfig):
    """``model=linear_probe``: a frozen backbone and one trained linear layer."""

    name: str = "linear_probe"


@dataclass
class LoraModelConfig(BackboneConfig):
    """``model=lora``: low-rank adapters (peft) in a frozen backbone, and a trained head."""

    name: str = "lora"
    lora_r: int = 8
    lora_alpha: int = 16
    lora_dropout: float = 0.1
    target_modules: list[str] = field(default_factory=lambda: ["attn.qkv", "attn.proj"])


@dataclass
class FullFinetuneConfig(BackboneConfig):
    """``model=full_finetune``: every weight of the backbone is trained."""

    name: str = "full_finetune"


@dataclass
class DatasetConfig:
    """What every data set has. ``root`` is relative to the directory the command was typed in."""

    name: str = MISSING
    root: str = "data"
    download: bool = True
    num_classes: int | None = None
    augment: str = "crop_flip"
    num_workers: int = 2
    epochs: int = 10


@dataclass
class ImageFolderConfig(DatasetConfig):
    """``dataset=image_folder``: one folder of images a class."""

    name: str = "image_folder"
    root: str = MISSING
    train: str = "train"
    test: str = "test"
    test_fraction: float = 0.2


@dataclass
class CommandConfig:
    """``trainer=command``: a script in any language."""

    _target_: str = MISSING
    argv: list[str] = MISSING
    resume_argv: list[str] = field(default_factory=list)
    checkpoint_glob: str | None = None
    cwd: str | None = None


@dataclass
class PlainConfig:
    """The root of ``configs/config.yaml``, which serves ``train.py``."""

    model: Any = MISSING
    dataset: Any = MISSING
    trainer: Any = MISSING
    training: TrainingConfig = field(default_factory=TrainingConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    device: str = "auto"
    seed: int = 42


@dataclass
class RobustConfig(PlainConfig):
    """The root of ``configs/robust.yaml``, which serves ``train_robust.py``."""

    job_name: str | None = None
    auto_device: bool = True
    num_gpus: int = 1
    wait_for_gpu: bool = True
    min_gpu_memory_mb: int = 4000
    gpu_wait_timeout_minutes: float = 60.0
    gpu_check_interval_seconds: float = 30.0
    gpu_queue: bool = True
    gpu_queue_dir: str | None = None
    gpu_jobs_per_device: int = 1
    cuda_visible_devices: str = "auto"
    min_batch_size: int = 4
    max_retries: int = 3
    allow_cpu_fallback: bool = True
    preserve_effective_batch_size: bool = True
    reuse_known_batch: bool = True
    isolation: str = "process"
    stop_grace_seconds: float = 20.0
    stall_timeout_minutes: float = 0.0
    retry_pause_seconds: float = 10.0
    resume: bool = True
    sweep_resume: bool = True
    sweep_fail_fast: bool = False


ISOLATIONS = ("process", "none")
GPU_NAMES = ("auto", "uuid", "index")
_DEVICE = re.compile(r"auto|cpu|cuda|cuda:\d+|GPU-[0-9a-fA-F-]+|MIG-\S+")


def open_root(schema: type) -> DictConfig:
    """``schema`` as a root with typed keys that still accepts other keys beside them.

    A dataclass as Hydra's root would reject a user's own top-level keys, and a dataclass derived
    from ``Dict`` is deprecated in OmegaConf; typed nodes in a plain dictionary are neither.
    """
    typed = OmegaConf.structured(schema)
    root = OmegaConf.create({})
    for name in typed:
        root._set_item_impl(name, typed._get_node(name))
    return root


def register() -> None:
    """Put the schemas into Hydra's ConfigStore. Safe to call again."""
    store = ConfigStore.instance()
    store.store(name="plain_schema", node=open_root(PlainConfig), provider="robust_train")
    store.store(name="robust_schema", node=open_root(RobustConfig), provider="robust_train")
    for group, name, schema in (
        ("model", "cnn", CnnConfig),
        ("model", "linear_probe", LinearProbeConfig),
        ("model", "lora", LoraModelConfig),
        ("model", "full_finetune", FullFinetuneConfig),
        ("dataset", "dataset", DatasetConfig),
        ("dataset", "image_folder", ImageFolderConfig),
        ("trainer", "command", CommandConfig),
    ):
        store.store(group=f"schema/{group}", name=name, node=schema, provider="robust_train")
    # cached like Hydra's ``now``: jobs that run in other processes belong to the same sweep folder
    OmegaConf.register_new_resolver("robust_pid", os.getpid, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("robust_job", _short_name, replace=True)


def _short_name(job_name: str | None, model: str, dataset: str, trainer: str) -> str:
    """What a run folder is called: ``job_name``, else ``lora_flowers102``, else the trainer."""
    name = job_name or "_".join(part for part in (model, dataset) if part != "none") or trainer
    return re.sub(r"[^\w.-]+", "_", name)


def complete(cfg: Mapping[str, Any] | DictConfig) -> DictConfig:
    """``cfg`` over the defaults of :class:`RobustConfig`: what :func:`robust_train.launch` gets.

    Args:
        cfg: a Hydra config, or a plain mapping with any part of the keys.

    Raises:
        ConfigError: a value is of the wrong type.
    """
    try:
        merged = OmegaConf.merge(open_root(RobustConfig), cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0] + f" (key {error.full_key})") from error
    assert isinstance(merged, DictConfig)
    for group in ("model", "dataset", "trainer"):
        if OmegaConf.is_missing(merged, group):
            merged[group] = {}
    return merged


def validate(cfg: DictConfig) -> None:
    """Check the ranges that types cannot express.

    Raises:
        ConfigError: with one line naming the key, its value and what is accepted.
    """
    _reject_near_misses(cfg)
    _resolve_all(cfg)
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise ConfigError(f"{missing[0]}: has no default and must be given: {missing[0]}=…")
    training = "training."
    _at_least(cfg, 1, training + "batch_size", training + "gradient_accumulation_steps")
    _at_least(
        cfg, 1, training + "epochs", training + "prefetch_factor", training + "log_every_steps"
    )
    _at_least(cfg, 1, training + "keep_checkpoints")
    _at_least(cfg, 0, training + "num_workers", training + "weight_decay", training + "seed")
    _at_least(cfg, 0, training + "max_grad_norm")
    if str(cfg.training.checkpoint_every_minutes).lower() != "auto":
        _at_least(cfg, 0, training + "checkpoint_every_minutes")
    for key in ("regrow_after_steps", "checkpoint_every_steps"):
        if OmegaConf.select(cfg, training + key) is not None:
            _at_least(cfg, 0, training + key)
    _above(cfg, 0, training + "lr")
    _within(cfg, 0, 1, training + "label_smoothing", training + "warmup_fraction")
    memory = "memory."
    if cfg.memory.expandable_segments not in ("auto", True, False):
        raise ConfigError(
            f"memory.expandable_segments={cfg.memory.expandable_segments}: accepted are auto, "
            "true, false"
        )
    _at_least(cfg, 0, memory + "empty_cache_frequency", memory + "log_frequency")
    _within(cfg, 0, 1, memory + "empty_cache_threshold")
    _above(cfg, 0, memory + "fraction")
    _within(cfg, 0, 1, memory + "fraction")
    if cfg.memory.sample_interval_ms:
        _at_least(cfg, 10, memory + "sample_interval_ms")
    device = str(cfg.device)
    if not _DEVICE.fullmatch(device):
        raise ConfigError(
            f"device={device}: accepted are auto, cpu, cuda, cuda:<number> or a GPU's UUID"
        )
    if "isolation" in cfg:
        _validate_launcher(cfg)


def _resolve_all(cfg: DictConfig, prefix: str = "") -> None:
    """Look every value up, so that one which cannot be resolved is named by its own key."""
    for key in cfg:
        name = prefix + str(key)
        if OmegaConf.is_missing(cfg, key):
            continue
        try:
            value = cfg[key]
        except OmegaConfBaseException as error:
            raise ConfigError(f"{name}: {str(error).splitlines()[0]}") from error
        if isinstance(value, DictConfig):
            _resolve_all(value, f"{name}.")


def _validate_launcher(cfg: DictConfig) -> None:
    _at_least(cfg, 0, "min_gpu_memory_mb", "gpu_wait_timeout_minutes", "max_retries")
    _at_least(cfg, 0, "stop_grace_seconds", "stall_timeout_minutes", "retry_pause_seconds")
    _above(cfg, 0, "gpu_check_interval_seconds")
    _at_least(cfg, 1, "min_batch_size", "gpu_jobs_per_device", "num_gpus")
    if cfg.min_batch_size > cfg.training.batch_size:
        raise ConfigError(
            f"min_batch_size={cfg.min_batch_size}: must not be above "
            f"training.batch_size={cfg.training.batch_size}"
        )
    if cfg.cuda_visible_devices not in GPU_NAMES:
        raise ConfigError(
            f"cuda_visible_devices={cfg.cuda_visible_devices}: accepted are {', '.join(GPU_NAMES)}"
        )
    if cfg.isolation not in ISOLATIONS:
        raise ConfigError(f"isolation={cfg.isolation}: accepted are {', '.join(ISOLATIONS)}")
    if cfg.isolation == "none" and cfg.num_gpus > 1:
        raise ConfigError(
            f"num_gpus={cfg.num_gpus}: every GPU needs a process of its own; leave isolation=none "
            "out, or use num_gpus=1"
        )
    if cfg.isolation == "none" and OmegaConf.select(cfg, "trainer.argv") is not None:
        raise ConfigError("isolation=none: a script (trainer.argv) has a process of its own anyway")


def _number(cfg: DictConfig, key: str) -> float:
    try:
        value = OmegaConf.select(cfg, key, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from error
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{key}={value}: accepted is a number") from None


def _at_least(cfg: DictConfig, least: float, *keys: str) -> None:
    for key in keys:
        # `not >=` also refuses NaN
        if not (value := _number(cfg, key)) >= least:
            raise ConfigError(f"{key}={value:g}: must be {least:g} or more")


def _above(cfg: DictConfig, bound: float, *keys: str) -> None:
    for key in keys:
        if not (value := _number(cfg, key)) > bound:
            raise ConfigError(f"{key}={value:g}: must be more than {bound:g}")


def _within(cfg: DictConfig, low: float, high: float, *keys: str) -> None:
    for key in keys:
        if not low <= (value := _number(cfg, key)) <= high:
            raise ConfigError(f"{key}={value:g}: must be from {low:g} to {high:g}")


def _reject_near_misses(cfg: DictConfig) -> None:
    """The root is open for a user's own keys, so a typo in a config file would pass unseen."""
    known = {item.name for item in fields(RobustConfig)}
    for key in cfg:
        name = str(key)
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            if close:
                raise ConfigError(f"{name}: no such key; did you mean {close[0]}?")


register()
