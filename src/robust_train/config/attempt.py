"""One attempt: its config, typed for us and composed for its trainer, and its request."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from robust_train.config.projects import ours, resolved, write_to_theirs
from robust_train.config.schema import RobustConfig, TrainingConfig
from robust_train.config.trainers import MainModule, TrainerRef
from robust_train.model.errors import ConfigError
from robust_train.model.parts import parts_like
from robust_train.model.spec import AttemptSpec, Knob

_OF_TRAINING = {item.name for item in fields(TrainingConfig)}


def guest_config(cfg: DictConfig, engine: str, world_size: int) -> DictConfig:
    """Return the config of a job whose ranks an engine has started. Raises ConfigError: the config
    asks for other ranks, or for a script."""
    cfg = cfg.copy()
    own = ours(cfg)
    if own.num_gpus not in (1, world_size):
        raise ConfigError(
            f"num_gpus={own.num_gpus}: {engine} has started {world_size} ranks; leave num_gpus out"
        )
    if OmegaConf.select(own, "trainer.argv") is not None:
        raise ConfigError(
            f"trainer.argv: a script cannot be a rank of {engine}; start it there itself"
        )
    with open_dict(own):
        own.num_gpus = world_size
        own.isolation = "process"
        # each restart is a launch, and the policy counts them
        own.max_launches = 0
    return cfg


def for_attempt(config: RobustConfig, spec: AttemptSpec, device: str) -> RobustConfig:
    """Return a job's config with what one attempt uses."""
    chosen: dict[str, Any] = {
        "batch_size": spec.batch_size,
        "gradient_accumulation_steps": spec.gradient_accumulation_steps,
    }
    lr = config.training.lr
    if config.traits.is_program:
        lr = config.learning_rate_at(spec.effective_batch_size)
        chosen["effective_batch_size"] = spec.effective_batch_size
    training = replace(config.training, lr=lr, **chosen)
    config = replace(config, device=device, num_gpus=spec.ranks, training=training)
    for kind in parts_like(Knob):
        config = spec.of(kind).applied(config)
    return config


def for_rank(config: RobustConfig, rank: int) -> RobustConfig:
    """Return an attempt's config as one of its ranks needs it."""
    if config.device.startswith("cuda"):
        config = replace(config, device=f"cuda:{rank}")
    return config


def trainer_config(cfg: DictConfig, config: RobustConfig) -> DictConfig:
    """Return the composed config as the trainer of an attempt sees it, fully resolved."""
    cfg = cfg.copy()
    own = ours(cfg)
    kinds: list[type[Any]] = [AttemptSpec, *parts_like(Knob)]
    names = {field.name for kind in kinds for field in fields(kind)}
    # the keys under `training` that are chosen for each attempt
    keys = (names & _OF_TRAINING) | {"effective_batch_size"}
    chosen = {name: getattr(config.training, name) for name in keys}
    lr = OmegaConf.select(own, "training.lr")
    # as it is written in the user's config, unless this attempt has another
    if lr is not None and config.training.lr != lr:
        chosen["lr"] = config.training.lr
    if own is not cfg:
        write_to_theirs(cfg, chosen)
    with open_dict(own):
        own.device = config.device
        own.num_gpus = config.num_gpus
        own.training.update(chosen)
    return resolved(cfg)


def early_imports(cfg: DictConfig) -> list[str]:
    """Return the modules to import before a device is there: ``trainer.preload_modules``.

    Raises:
        ConfigError: it is not a list.
    """
    cfg = ours(cfg)
    wanted = OmegaConf.select(cfg, "trainer.preload_modules")
    if wanted is not None and not isinstance(wanted, ListConfig):
        raise ConfigError(f"trainer.preload_modules={wanted}: must be a list of modules")
    several = cfg.num_gpus > 1 and OmegaConf.select(cfg, "trainer.argv") is None
    modules = [str(name) for name in wanted or ()]
    return modules + ["torch.distributed"] * several


def _pickled(cfg: DictConfig | bytes) -> bytes:
    try:
        return pickle.dumps(cfg)
    except (pickle.PicklingError, AttributeError, TypeError):
        # joblib, submitit and Ray have carried the types of a script to this process by value
        import cloudpickle

        return bytes(cloudpickle.dumps(cfg))


@dataclass(frozen=True)
class AttemptRequest:
    """One attempt, ready to be carried to another process."""

    trainer: TrainerRef
    # the composed config with this attempt's device, batch and workers, fully resolved; pickled
    # where it was carried over: its types may be those of the trainer's own module
    cfg: DictConfig | bytes
    # Hydra's own config, so that `HydraConfig` and logging work in the trainer
    hydra_cfg: DictConfig | None
    config: RobustConfig  # the same in the types of the code
    spec: AttemptSpec  # what it was made of
    attempt: int  # number of the attempt, counted from 1
    run_dir: Path
    resume_checkpoint: Path | None
    environ: dict[str, str]  # the whole environment of the attempt's process
    cwd: str
    # between two reports in the job so far, seconds
    longest_pause: float = 0.0
    # the launcher shows steps and loss on a terminal
    has_live_status: bool = False
    # variables in `environ` that the other ranks do without
    of_first_rank: tuple[str, ...] = ()
    # the split of the batch that the job was asked for; None: this attempt's own
    asked: AttemptSpec | None = None
    is_first: bool = True  # of its launch
    # dotted names of the features' halves in the attempt
    features: tuple[str, ...] = ()
    # dotted names of what features look for in its processes, from the launcher
    watches: tuple[str, ...] = ()
    # how the script has multiprocessing start processes, if it has chosen: it may have done so
    # under its guard, which does not run in the attempt
    start_method: str | None = None

    def __getstate__(self) -> dict[str, object]:
        """Return what is carried to the attempt."""
        cfg = _pickled(self.cfg)
        trainer = self.trainer
        # a type that the script defines, or its name as a ``_target_``
        if b"__main__" in cfg and trainer.main is None:
            trainer = replace(trainer, main=MainModule.of_this_process())
        return {**vars(self), "cfg": cfg, "trainer": trainer}

    def trainer_cfg(self) -> DictConfig:
        """Return the config for the trainer, which has been imported."""
        if isinstance(self.cfg, bytes):
            cfg: DictConfig = pickle.loads(self.cfg)
        else:
            cfg = self.cfg
        own = ours(cfg)
        with open_dict(own):
            own.device = self.config.device  # each rank has its own
        return cfg

    @property
    def ranks(self) -> int:
        """Processes that run the trainer together; a script starts its own."""
        return self.config.traits.interpreters(self.spec.ranks)

    @property
    def log_file(self) -> Path:
        """What the attempt prints."""
        return self.run_dir / f"attempt-{self.attempt}.log"

    @property
    def stacks_file(self) -> Path:
        """What the threads of the attempt's processes are doing when it stalls."""
        return self.run_dir / f"attempt-{self.attempt}.stacks"


@dataclass(frozen=True)
class Preparation:
    """What an interpreter does before it is given an attempt."""

    path: tuple[str, ...]  # the launcher's `sys.path`
    # the launcher's `sys.argv`: a trainer's module may parse it
    argv: tuple[str, ...]
    # to import; one that fails is left to the attempt
    modules: tuple[str, ...] = ()
    # leave the processor to the attempt that trains: as much time between imports as in them
    is_standby: bool = False
    # one of robust-train's own, which checks `cfg`
    trainer: TrainerRef | None = None
    cfg: DictConfig | None = None


@dataclass(frozen=True)
class Begin:
    """An attempt, as one interpreter is given it; descriptors come with it."""

    request: AttemptRequest
    rank: int = 0  # of the trainer's processes
    store_port: int = 0  # where the ranks find each other; 0 without
