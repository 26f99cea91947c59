"""The configuration's schema and its range checks.

Importing this module puts the schemas into Hydra's ConfigStore; the YAML files under ``configs/``
build on them by name. The root stays open for a user's own keys; every key of ours is typed.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from robust_train.compat import typed_nodes
from robust_train.config.names import folder_name
from robust_train.errors import ConfigError
from robust_train.readable import meant


@dataclass(frozen=True)
class Range:
    """The accepted numbers of a key, in words and as a test."""

    words: str
    has: Callable[[float], bool]


FROM_0 = Range("0 or more", lambda value: value >= 0)
FROM_1 = Range("1 or more", lambda value: value >= 1)
FROM_10 = Range("10 or more", lambda value: value >= 10)
POSITIVE = Range("more than 0", lambda value: value > 0)
SHARE = Range("from 0 to 1", lambda value: 0 <= value <= 1)
POSITIVE_SHARE = Range("more than 0 and at most 1", lambda value: 0 < value <= 1)


def _range(accepted: Range, *, off: object = None) -> dict[str, object]:
    """Return metadata of a key: its value has to be in a range, or equal to ``off``."""
    return {"range": accepted, "off": off}


def _choices(*accepted: object) -> dict[str, object]:
    return {"choices": accepted}


def _in(accepted: Range, default: Any, *, off: object = None) -> Any:
    return field(default=default, metadata=_range(accepted, off=off))


@dataclass
class TrainingConfig:
    """``training``: what every trainer needs to know, and what the launcher adapts."""

    # an integer or auto: see batch.py
    batch_size: Any = field(default=64, metadata=_range(FROM_1))
    gradient_accumulation_steps: int = _in(FROM_1, 1)
    effective_batch_size: int | None = None
    num_workers: int = _in(FROM_0, 2)
    prefetch_factor: int = _in(FROM_1, 2)
    epochs: int = _in(FROM_1, 10)
    lr: float = _in(POSITIVE, 1e-3)
    weight_decay: float = _in(FROM_0, 0.01)
    max_grad_norm: float = _in(FROM_0, 1.0)
    label_smoothing: float = _in(SHARE, 0.0)
    warmup_fraction: float = _in(SHARE, 0.05)
    mixed_precision: bool = True
    gradient_checkpointing: bool = False
    sharding: str = field(default="ddp", metadata=_choices("ddp", "fsdp"))
    seed: int = _in(FROM_0, 42)
    log_every_steps: int = _in(FROM_1, 50)
    regrow_after_steps: int | None = _in(FROM_0, None)
    checkpoint_every_steps: int | None = _in(FROM_0, None)
    # minutes or auto
    checkpoint_every_minutes: Any = field(default="auto", metadata=_range(FROM_0, off="auto"))
    keep_checkpoints: int = _in(FROM_1, 2)


@dataclass
class MemoryConfig:
    """``memory``: what each attempt does about memory. Steps are optimizer steps, 0 is never."""

    clear_on_start: bool = True
    fraction: float = _in(POSITIVE_SHARE, 0.95)
    expandable_segments: Any = field(default="auto", metadata=_choices("auto", True, False))
    empty_cache_frequency: int = _in(FROM_0, 10)
    empty_cache_threshold: float = _in(SHARE, 0.5)
    clear_after_save: bool = True
    clear_after_epoch: bool = True
    clear_on_failure: bool = True
    log_frequency: int = _in(FROM_0, 0)
    sample_interval_ms: int = _in(FROM_10, 100, off=0)
    snapshot_on_oom: bool = True


@dataclass
class NotifyConfig:
    """``notify``: who is notified about a job, and of what."""

    # a command line or a list
    command: Any = None
    # one or a list; never written anywhere
    urls: Any = None
    # a list of events; null: all
    on: Any = None
    waiting_minutes: float = _in(FROM_0, 30.0)
    sweep_jobs: bool = False


@dataclass
class RetryConfig:
    """``retry``: what the user knows about failures; see retry_rules.py."""

    rules: list[Any] = field(default_factory=list)


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
    lr: float = 5e-5


@dataclass
class DatasetConfig:
    """What every data set has. ``root`` is relative to the directory the command was run in."""

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
    detach: bool = False
    auto_device: bool = True
    num_gpus: int = _in(FROM_1, 1)
    num_nodes: int = _in(FROM_1, 1)
    min_num_gpus: int | None = _in(FROM_1, None)
    wait_for_gpu: bool = True
    min_gpu_memory_mb: int = _in(FROM_0, 4000)
    gpu_wait_timeout_minutes: float = _in(FROM_0, 60.0)
    gpu_check_interval_seconds: float = _in(POSITIVE, 30.0)
    gpu_queue: bool = True
    gpu_queue_dir: str | None = None
    gpu_jobs_per_device: int = _in(FROM_1, 1)
    cuda_visible_devices: str = field(default="auto", metadata=_choices("auto", "uuid", "index"))
    min_batch_size: int = _in(FROM_1, 4)
    max_retries: int = _in(FROM_0, 3)
    max_launches: int = _in(FROM_0, 3)
    retry: RetryConfig = field(default_factory=RetryConfig)
    allow_gradient_checkpointing: bool = True
    shrink_before_oom: bool = False
    allow_cpu_fallback: bool = True
    preserve_effective_batch_size: bool = True
    reuse_known_batch: bool = True
    isolation: str = field(default="process", metadata=_choices("process", "none"))
    stop_grace_seconds: float = _in(FROM_0, 20.0)
    # minutes or auto
    stall_timeout_minutes: Any = field(default="auto", metadata=_range(FROM_0, off="auto"))
    retry_pause_seconds: float = _in(FROM_0, 10.0)
    resume: bool = True
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    sweep_resume: bool = True
    sweep_fail_fast: bool = False


_DEVICE = re.compile(r"auto|cpu|cuda|cuda:\d+|GPU-[0-9a-fA-F-]+|MIG-\S+")


def open_root(schema: type) -> DictConfig:
    """Return a root with the typed keys of ``schema`` that accepts other keys beside them. A
    dataclass as Hydra's root would reject a user's own top-level keys."""
    typed = OmegaConf.structured(schema)
    root = OmegaConf.create({})
    for name, node in typed_nodes(typed).items():
        root[name] = node
    return root


def register() -> None:
    """Put the schemas into Hydra's ConfigStore, unless it has them."""
    store = ConfigStore.instance()
    if "robust_schema.yaml" not in store.repo:
        _store_schemas(store)
    # cached like Hydra's ``now``: jobs that run in other processes belong to the same sweep folder
    OmegaConf.register_new_resolver("robust_pid", os.getpid, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("robust_job", folder_name, replace=True)


def _store_schemas(store: ConfigStore) -> None:
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


def complete(cfg: Mapping[str, Any] | DictConfig) -> DictConfig:
    """Return ``cfg``, which has any part of the keys, over the defaults of :class:`RobustConfig`.
    Raises ConfigError: a value is of the wrong type."""
    try:
        merged = OmegaConf.merge(open_root(RobustConfig), cfg)
    except OmegaConfBaseException as error:
        parent, _, name = str(error.full_key).rpartition(".")
        kind = error.object_type
        known = [item.name for item in fields(kind)] if is_dataclass(kind) else []
        if isinstance(error, ConfigKeyError) and known:
            hint = meant(name, known, f"{parent}.")
            raise ConfigError(f"{error.full_key}: no such key; {hint}") from None
        raise ConfigError(str(error).splitlines()[0] + f" (key {error.full_key})") from None
    assert isinstance(merged, DictConfig)
    for group in ("model", "dataset", "trainer"):
        if OmegaConf.is_missing(merged, group):
            merged[group] = {}
    return merged


def is_script(cfg: DictConfig) -> bool:
    """Return whether the trainer is a program of the user's."""
    return OmegaConf.select(cfg, "trainer.argv") is not None


def validate(cfg: DictConfig) -> None:
    """Check the ranges that types cannot express, of a config whose values are resolved. Raises
    ConfigError: with one line naming the key, its value and what is accepted."""
    _reject_near_misses(cfg)
    if missing := sorted(OmegaConf.missing_keys(cfg)):
        raise ConfigError(f"{missing[0]}: has no default and must be given: {missing[0]}=…")
    parts = {"training.": TrainingConfig, "memory.": MemoryConfig, "notify.": NotifyConfig}
    for prefix, schema in {"": RobustConfig, **parts}.items():
        _check_fields(cfg, schema, prefix)
    device = str(cfg.device)
    if not _DEVICE.fullmatch(device):
        raise ConfigError(
            f"device={device}: accepted are auto, cpu, cuda, cuda:<number> or a GPU's UUID"
        )
    if "isolation" in cfg:
        _validate_launcher(cfg)


def resolve_all(cfg: DictConfig, prefix: str = "") -> None:
    """Resolve every value, so that an error names the key itself."""
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
            resolve_all(value, f"{name}.")


def _validate_launcher(cfg: DictConfig) -> None:
    for key, other in (("min_batch_size", "training.batch_size"), ("min_num_gpus", "num_gpus")):
        least, most = OmegaConf.select(cfg, key), OmegaConf.select(cfg, other)
        if (least or 1) > most:
            raise ConfigError(f"{key}={least}: must not be above {other}={most}")
    if cfg.isolation == "none" and cfg.num_gpus > 1:
        raise ConfigError(
            f"num_gpus={cfg.num_gpus}: every GPU needs a process of its own; leave isolation=none "
            "out, or use num_gpus=1"
        )
    if cfg.isolation == "none" and is_script(cfg):
        raise ConfigError("isolation=none: a script (trainer.argv) has a process of its own anyway")


def _check_fields(cfg: DictConfig, schema: type, prefix: str) -> None:
    """Compare the values with the ranges and choices in the schema."""
    for item in fields(schema):
        key, value = prefix + item.name, OmegaConf.select(cfg, prefix + item.name)
        choices, accepted = item.metadata.get("choices"), item.metadata.get("range")
        if value is None:
            continue
        if choices is not None and value not in choices:
            names = ", ".join(str(one).lower() for one in choices)
            raise ConfigError(f"{key}={value}: accepted are {names}")
        if accepted is None or value == item.metadata["off"]:
            continue
        try:
            number = float(value)
        except (TypeError, ValueError):
            auto = f" or {item.metadata['off']}" if isinstance(item.metadata["off"], str) else ""
            raise ConfigError(f"{key}={value}: accepted is a number{auto}") from None
        if not accepted.has(number):  # NaN is in no range
            raise ConfigError(f"{key}={number:g}: must be {accepted.words}")


def _reject_near_misses(cfg: DictConfig) -> None:
    """Refuse likely typos: the root is open, so one in a config file would pass unseen."""
    known = {item.name for item in fields(RobustConfig)}
    for name in {str(key) for key in cfg} - known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        if close:
            raise ConfigError(f"{name}: no such key; did you mean {close[0]}?")


register()
