"""Builds the config of an attempt, and the request with which the launcher starts it.

The launcher puts an attempt's choices (device, batch, learning rate) into the job's config, and
sends an `AttemptRequest` to the attempt's process. The request has the config twice: as a
`RobustConfig` for this package's code, and as a composed config for the trainer.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from robust_train.config.projects import ours, resolve_values, write_to_theirs
from robust_train.config.schema import RobustConfig, TrainingConfig
from robust_train.config.trainers import MainModule, TrainerRef
from robust_train.model.errors import ConfigError
from robust_train.model.parts import parts_like
from robust_train.model.spec import AttemptSpec, Knob

_TRAINING_KEYS = {item.name for item in fields(TrainingConfig)}


def guest_config(cfg: DictConfig, engine: str, world_size: int) -> DictConfig:
    """Return the config of a job whose ranks an engine has started.

    Raises:
        ConfigError: the config asks for other ranks, or for a script.
    """
    cfg = cfg.copy()
    keys = ours(cfg)
    if keys.num_gpus not in (1, world_size):
        raise ConfigError(
            f"num_gpus={keys.num_gpus}: {engine} started {world_size} ranks; leave num_gpus out"
        )
    if OmegaConf.select(keys, "trainer.argv") is not None:
        raise ConfigError(
            f"trainer.argv: a script cannot be a rank of {engine}; start the script by {engine} "
            "itself"
        )
    with open_dict(keys):
        keys.num_gpus = world_size
        keys.isolation = "process"
        # Each restart by the engine is a launch, and the policy counts restarts instead.
        keys.max_launches = 0
    return cfg


def for_attempt(config: RobustConfig, spec: AttemptSpec, device: str) -> RobustConfig:
    """Return the job's config with an attempt's choices."""
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
    """Return the attempt's config with the device of a rank."""
    if config.device.startswith("cuda"):
        config = replace(config, device=f"cuda:{rank}")
    return config


def trainer_config(cfg: DictConfig, config: RobustConfig) -> DictConfig:
    """Return the job's composed config with the values of an attempt's ``config``, fully resolved,
    for the trainer."""
    cfg = cfg.copy()
    our_keys = ours(cfg)
    kinds: list[type[Any]] = [AttemptSpec, *parts_like(Knob)]
    names = {field.name for kind in kinds for field in fields(kind)}
    # The keys under `training` that are chosen for each attempt.
    keys = (names & _TRAINING_KEYS) | {"effective_batch_size"}
    chosen = {name: getattr(config.training, name) for name in keys}
    lr = OmegaConf.select(our_keys, "training.lr")
    # The user's spelling of the number stays, unless this attempt has another learning rate.
    if lr is not None and config.training.lr != lr:
        chosen["lr"] = config.training.lr
    if our_keys is not cfg:
        write_to_theirs(cfg, chosen)
    with open_dict(our_keys):
        our_keys.device = config.device
        our_keys.num_gpus = config.num_gpus
        our_keys.training.update(chosen)
    return resolve_values(cfg)


def early_imports(cfg: DictConfig) -> list[str]:
    """Return the modules that an interpreter imports before a device is chosen: those of
    ``trainer.preload_modules``, and for several ranks ``torch.distributed``.

    Raises:
        ConfigError: it is not a list.
    """
    cfg = ours(cfg)
    wanted = OmegaConf.select(cfg, "trainer.preload_modules")
    if wanted is not None and not isinstance(wanted, ListConfig):
        raise ConfigError(f"trainer.preload_modules={wanted}: must be a list of modules")
    modules = [str(name) for name in wanted or ()]
    if cfg.num_gpus > 1 and OmegaConf.select(cfg, "trainer.argv") is None:
        modules.append("torch.distributed")
    return modules


@dataclass(frozen=True)
class AttemptRequest:
    """One attempt, as the launcher sends it to another process."""

    trainer: TrainerRef
    # The composed config with this attempt's device, batch and workers, fully resolved. It is sent
    # pickled, because its types may be defined in the trainer's own module.
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
    # Dotted names of the parts of features that run in the attempt.
    features: tuple[str, ...] = ()
    # Dotted names of the features' watches, which run in the launcher.
    watches: tuple[str, ...] = ()
    # The start method for multiprocessing that the script chose, or None. It may have done so under
    # its ``__main__`` guard, which does not run in the attempt.
    start_method: str | None = None

    def __getstate__(self) -> dict[str, object]:
        """Return the state for the attempt's process."""
        cfg = _pickle(self.cfg)
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


def _pickle(cfg: DictConfig | bytes) -> bytes:
    try:
        return pickle.dumps(cfg)
    except (pickle.PicklingError, AttributeError, TypeError):
        # Types of a script cannot be pickled by name if joblib, submitit or Ray sent them to this
        # process by value.
        import cloudpickle

        return bytes(cloudpickle.dumps(cfg))


@dataclass(frozen=True)
class Preparation:
    """What an interpreter imports and checks before it gets an attempt."""

    path: tuple[str, ...]  # the launcher's `sys.path`
    # The launcher's `sys.argv`, which a trainer's module may parse.
    argv: tuple[str, ...]
    # The modules to import. A failed import is ignored here, and the attempt reports it.
    modules: tuple[str, ...] = ()
    # Another attempt is training. To leave the processor to it, pause after each import for as long
    # as the import took.
    is_standby: bool = False
    # A built-in trainer, to check `cfg`.
    trainer: TrainerRef | None = None
    cfg: DictConfig | None = None


@dataclass(frozen=True)
class Begin:
    """The message that starts an attempt in an interpreter. File descriptors are sent with it."""

    request: AttemptRequest
    rank: int = 0  # the rank of this process
    store_port: int = 0  # the port of the ranks' store, 0 if there is no store
