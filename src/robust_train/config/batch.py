"""Check a config and settle its batch; what a batch's memory depends on."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf, open_dict

from robust_train.config.plans import AUTO
from robust_train.config.schema import RobustConfig, TrainingConfig, resolve_all, validate
from robust_train.errors import ConfigError

# how long a run goes and what it is called, not what a step needs; the launcher's keys likewise
_NO_MATTER = {
    "training": (
        "batch_size gradient_accumulation_steps effective_batch_size num_workers prefetch_factor "
        "epochs lr weight_decay warmup_fraction label_smoothing max_grad_norm seed log_every_steps "
        "regrow_after_steps checkpoint_every_steps checkpoint_every_minutes keep_checkpoints"
    ),
    "memory": (
        "clear_on_start empty_cache_frequency empty_cache_threshold clear_after_save "
        "clear_after_epoch clear_on_failure log_frequency sample_interval_ms snapshot_on_oom"
    ),
    "model": "lr pretrained weights",
    "dataset": "download num_workers epochs",
}
_MATTERS = ("model", "dataset", "trainer", "training", "memory", "gpu_jobs_per_device")


def settle(cfg: DictConfig) -> bool:
    """Check a complete config; replace ``training.batch_size=auto`` and ``effective_batch_size`` in
    it by numbers. Returns whether the micro-batch is to be found. Raises ConfigError: one line with
    the key, its value and what is accepted."""
    resolve_all(cfg)
    is_auto = _settle_batch_size(cfg)
    validate(cfg)
    return is_auto


def _settle_batch_size(cfg: DictConfig) -> bool:
    """Begin with each rank's share of the effective batch for ``auto``, without accumulation; give
    a number beside an effective batch the accumulation that it needs."""
    training = cfg.training
    chosen = training.batch_size
    effective = training.effective_batch_size
    accumulation = training.gradient_accumulation_steps
    gpus, nodes = (OmegaConf.select(cfg, key) or 1 for key in ("num_gpus", "num_nodes"))
    ranks, processes = gpus * nodes, f"num_gpus={gpus}"
    processes += f" × num_nodes={nodes}" if nodes > 1 else ""
    if effective is not None and effective < 1:
        raise ConfigError(f"training.effective_batch_size={effective}: must be 1 or more")
    is_auto = isinstance(chosen, str) and chosen.strip().lower() == AUTO
    if is_auto:
        effective = TrainingConfig.batch_size if effective is None else effective
        size, accumulation = _share(effective, ranks, processes), 1
        _check_auto(cfg, size)
    else:
        size = _integer(chosen)
        if effective is not None:
            accumulation = _accumulation(size, accumulation, effective, ranks, processes)
    with open_dict(cfg):
        training.batch_size = size
        training.gradient_accumulation_steps = accumulation
        training.effective_batch_size = effective
    return is_auto


def _share(effective: int, ranks: int, processes: str) -> int:
    if effective % max(ranks, 1):
        raise ConfigError(
            f"training.effective_batch_size={effective}: is no multiple of {processes}"
        )
    return effective // max(ranks, 1)


def _check_auto(cfg: DictConfig, share: int) -> None:
    steps = cfg.training.gradient_accumulation_steps
    if steps != 1:
        raise ConfigError(
            f"training.gradient_accumulation_steps={steps}: with training.batch_size=auto it "
            "follows from training.effective_batch_size=…; give that instead"
        )
    if OmegaConf.select(cfg, "preserve_effective_batch_size") is False:
        raise ConfigError(
            "preserve_effective_batch_size=false: with training.batch_size=auto the result would "
            "depend on the GPU; leave it true, or give training.batch_size as a number"
        )
    least = OmegaConf.select(cfg, "min_batch_size")
    if least is not None and least > share:
        raise ConfigError(
            f"min_batch_size={least}: must not be above {share}, the share of each process in "
            "training.effective_batch_size"
        )


def _integer(value: object) -> int:
    if isinstance(value, str) and value.strip().isdigit():  # environment variables are text
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"training.batch_size={value}: accepted is an integer or auto")
    return value


def _accumulation(size: int, steps: int, effective: int, ranks: int, processes: str) -> int:
    needed, rest = divmod(effective, max(size * ranks, 1))
    processes = "" if ranks == 1 else f" × {processes}"
    if rest or needed < 1:
        raise ConfigError(
            f"training.effective_batch_size={effective}: is no multiple of "
            f"training.batch_size={size}{processes}"
        )
    if steps not in (1, needed):
        raise ConfigError(
            f"training.gradient_accumulation_steps={steps}: {size} × {steps}{processes} is not "
            f"training.effective_batch_size={effective}; give only one of the two"
        )
    return needed


def memory_settings(cfg: DictConfig) -> dict[str, object]:
    """Return the part of a config on which memory depends, the batch left out.

    Keys of a user's own project are part of it, since any may change a tensor's shape.
    """
    content = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(content, dict)
    ours = {*RobustConfig.__dataclass_fields__, "logger"} - set(_MATTERS)
    parts: dict[str, object] = {str(k): value for k, value in content.items() if k not in ours}
    for group, names in _NO_MATTER.items():
        part = parts.get(group)
        if isinstance(part, dict):
            parts[group] = {k: v for k, v in part.items() if k not in names.split()}
    return parts
