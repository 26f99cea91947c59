"""The config and the request of an attempt.

The launcher creates both, in the types of the code and composed for the trainer. The attempt's
process reads them.
"""

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
    """Return the config of a job whose ranks an engine has started.

    Raises:
        ConfigError: the config asks for other ranks, or for a script.
    """
    cfg = cfg.copy()
    keys = ours(cfg)
    if keys.num_gpus not in (1, world_size):
        raise ConfigError(
            f"num_gpus={keys.num_gpus}: {engine} has started {world_size} ranks; leave num_gpus out"
        )
    if OmegaConf.select(keys, "trainer.argv") is not None:
        raise ConfigError(
            f"trainer.argv: a script cannot be a rank of {engine}; start it there itself"
        )
    with open_dict(keys):
        keys.num_gpus = world_size
        keys.isolation = "process"
        # Each restart is a launch, and the policy counts them.
        keys.max_launches = 0
    return cfg


def for_attempt(config: RobustConfig, spec: AttemptSpec, device: str) -> RobustConfig:
    """Put an attempt's choices into a job's config."""
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
        config = spec.of(kind).apply_to_config(config)
    return config


def for_rank(config: RobustConfig, rank: int) -> RobustConfig:
    """Put a rank's values into an attempt's config."""
    if config.device.startswith("cuda"):
        config = replace(config, device=f"cuda:{rank}")
    return config


def trainer_config(cfg: DictConfig, config: RobustConfig) -> DictConfig:
    """Return the composed config for the trainer of an attempt, fully resolved."""
    cfg = cfg.copy()
    keys_of_ours = ours(cfg)
    kinds: list[type[Any]] = [AttemptSpec, *parts_like(Knob)]
    names = {field.name for kind in kinds for field in fields(kind)}
    # The keys under `training` that are chosen for each attempt.
    keys = (names & _OF_TRAINING) | {"effective_batch_size"}
    chosen = {name: getattr(config.training, name) for name in keys}
    lr = OmegaConf.select(keys_of_ours, "training.lr")
    # The user's spelling stays, unless this attempt has another learning rate.
    if lr is not None and config.training.lr != lr:
        chosen["lr"] = config.training.lr
    if keys_of_ours is not cfg:
        write_to_theirs(cfg, chosen)
    with open_dict(keys_of_ours):
        keys_of_ours.device = config.device
        keys_of_ours.num_gpus = config.num_gpus
        keys_of_ours.training.update(chosen)
    return resolved(cfg)


def early_imports(cfg: DictConfig) -> list[str]:
    """Return the modules to import before a device is chosen: ``trainer.preload_modules``.

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
        # joblib, submitit and Ray carry the types of a script to this process by value.
        import cloudpickle

        return bytes(cloudpickle.dumps(cfg))


@dataclass(frozen=True)
class AttemptRequest:
    """One attempt, as the launcher sends it to another process."""

    trainer: TrainerRef
    # The composed config with this attempt's device, batch and workers, fully resolved. In transit
    # it is pickled, because its types may be those of the trainer's own module.
    cfg: DictConfig | bytes
    # Hydra's own config, so that `HydraConfig` and logging work in the trainer.
    hydra_cfg: DictConfig | None
    config: RobustConfig  # the same config in the types of the code
    spec: AttemptSpec  # the choices for this attempt
    attempt: int  # number of the attempt, counted from 1
    run_dir: Path
    resume_checkpoint: Path | None
    environ: dict[str, str]  # the whole environment of the attempt's process
    cwd: str
    # The longest time between two reports of the job so far, in seconds.
    longest_pause: float = 0.0
    # Whether the launcher shows steps and loss on a terminal.
    has_live_status: bool = False
    # Variables in `environ` that only rank 0 gets.
    of_first_rank: tuple[str, ...] = ()
    # The split of the batch that the user requested; None for this attempt's split.
    asked: AttemptSpec | None = None
    is_first: bool = True  # whether it is the first attempt of its launch
    # Dotted names of the features' halves in the attempt.
    features: tuple[str, ...] = ()
    # Dotted names of the features' watches, which run in the launcher.
    watches: tuple[str, ...] = ()
    # The script's start method for multiprocessing, if it has chosen any. It may have done so under
    # its guard, which does not run in the attempt.
    start_method: str | None = None

    def __getstate__(self) -> dict[str, object]:
        """Return the state for the attempt's process."""
        cfg = _pickled(self.cfg)
        trainer = self.trainer
        # A type that the script defines, or its name as a ``_target_``, needs the script's module.
        if b"__main__" in cfg and trainer.main is None:
            trainer = replace(trainer, main=MainModule.of_this_process())
        return {**vars(self), "cfg": cfg, "trainer": trainer}

    def trainer_cfg(self) -> DictConfig:
        """Return the config for the trainer, which has been imported by now."""
        if isinstance(self.cfg, bytes):
            cfg: DictConfig = pickle.loads(self.cfg)
        else:
            cfg = self.cfg
        keys = ours(cfg)
        with open_dict(keys):
            keys.device = self.config.device  # each rank has its own device
        return cfg

    @property
    def ranks(self) -> int:
        """Number of processes that run the trainer together. A script starts its own ranks."""
        return self.config.traits.count_interpreters(self.spec.ranks)

    @property
    def log_file(self) -> Path:
        """The file with the attempt's output."""
        return self.run_dir / f"attempt-{self.attempt}.log"

    @property
    def stacks_file(self) -> Path:
        """The file with the stacks of the attempt's threads after a stall."""
        return self.run_dir / f"attempt-{self.attempt}.stacks"


@dataclass(frozen=True)
class Preparation:
    """The preparation of an interpreter before it gets an attempt."""

    path: tuple[str, ...]  # the launcher's `sys.path`
    # The launcher's `sys.argv`, which a trainer's module may parse.
    argv: tuple[str, ...]
    # The modules to import. If an import fails, that is left to the attempt.
    modules: tuple[str, ...] = ()
    # Leave the processor to the attempt that trains: pause between imports as long as they take.
    is_standby: bool = False
    # A built-in trainer, which checks `cfg`.
    trainer: TrainerRef | None = None
    cfg: DictConfig | None = None


@dataclass(frozen=True)
class Begin:
    """An attempt, as an interpreter gets it. File descriptors come with it."""

    request: AttemptRequest
    rank: int = 0  # the rank of this process
    store_port: int = 0  # where the ranks meet, 0 if there is no store
