"""What an attempt itself goes by: its trainer is given the whole config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from robust_train.config.plans import MicroBatchPlan, SavePlan
from robust_train.config.schema import MemoryConfig, complete, is_script
from robust_train.errors import ConfigError
from robust_train.values import AttemptSpec


@dataclass(frozen=True)
class AttemptSettings:
    """The keys that an attempt goes by."""

    device: str = "cpu"
    is_script: bool = False  # the trainer is a program
    shrink_before_oom: bool = False
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    micro_batch: MicroBatchPlan = field(default_factory=MicroBatchPlan)
    saving: SavePlan = field(default_factory=SavePlan)

    @classmethod
    def of(cls, cfg: DictConfig) -> AttemptSettings:
        """Read an attempt's config, which is complete."""
        return cls(
            str(cfg.device),
            is_script(cfg),
            cfg.shrink_before_oom,
            MemoryConfig(**cfg.memory),
            MicroBatchPlan.of(cfg),
            SavePlan.of(cfg),
        )


def plain_config(cfg: DictConfig) -> DictConfig:
    """Return the config of a job of ``train.py``: one attempt, without choosing or waiting."""
    plain = complete(cfg)
    plain.isolation = "process" if is_script(cfg) else "none"
    plain.auto_device = plain.gpu_queue = plain.wait_for_gpu = False
    plain.min_gpu_memory_mb, plain.min_batch_size = 0, 1
    return plain


def attempt_config(cfg: DictConfig, spec: AttemptSpec, device: str) -> DictConfig:
    """Return the job's config as one attempt's trainer sees it, fully resolved."""
    cfg = cfg.copy()
    with open_dict(cfg):
        cfg.device = device
        cfg.num_gpus = spec.ranks // cfg.num_nodes
        cfg.training.batch_size = spec.batch_size
        cfg.training.gradient_accumulation_steps = spec.gradient_accumulation_steps
        cfg.training.num_workers = spec.num_workers
        cfg.training.prefetch_factor = spec.prefetch_factor
        cfg.training.gradient_checkpointing = spec.gradient_checkpointing
    OmegaConf.resolve(cfg)
    return cfg


def rank_config(cfg: DictConfig, rank: int, local: int) -> DictConfig:
    """Return an attempt's config as one rank's trainer sees it; ``local``: its number on a node."""
    cfg = cfg.copy()
    with open_dict(cfg):
        if str(cfg.device).startswith("cuda"):
            cfg.device = f"cuda:{local}"
        if rank:
            # one record of memory over time, in one file
            cfg.memory.sample_interval_ms = 0
    return cfg


def early_imports(cfg: DictConfig, found: Sequence[str]) -> list[str]:
    """Return the modules to import before a device is there: ``trainer.preload_modules``, else
    those ``found``. Raises ConfigError: it is no list."""
    wanted = OmegaConf.select(cfg, "trainer.preload_modules")
    if wanted is not None and not isinstance(wanted, ListConfig):
        raise ConfigError(f"trainer.preload_modules={wanted}: accepted is a list of modules")
    several = cfg.num_gpus * cfg.num_nodes > 1 and not is_script(cfg)
    names = found if wanted is None else map(str, wanted)
    return [*names, *(["torch.distributed"] if several else [])]
