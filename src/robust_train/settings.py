"""What a job reads out of its config before it starts."""

from __future__ import annotations

import importlib.util
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from robust_train.config import names, schema
from robust_train.config.batch import memory_settings
from robust_train.config.retry_rules import retry_rules
from robust_train.config.schema import RobustConfig
from robust_train.errors import ConfigError
from robust_train.memory.allocator import (
    exported_expandable_segments,
    is_wsl,
    use_expandable_segments,
)
from robust_train.policy.sizes import PolicySettings
from robust_train.runfolder.command_line import command
from robust_train.runfolder.detach import is_detached
from robust_train.runfolder.notifier import EVENTS, URLS_VARIABLE, NotifySettings, is_secret
from robust_train.script.placeholders import placeholders_in
from robust_train.values import MIB

log = logging.getLogger("robust_train")

_LONGEST_COMMAND = 2000


@dataclass(frozen=True)
class LauncherSettings:
    """What the launcher itself goes by."""

    num_nodes: int  # machines that the job spans
    resume: bool  # go on with the unfinished job that the run folder holds
    max_launches: int  # of a job, in a row, that save no new checkpoint; 0: any number
    runs_inline: bool  # attempts run in the launcher's process
    is_script: bool  # the trainer is a program of the user's
    # it prints to a terminal that nobody else draws on: no debugger, no other job
    owns_terminal: bool
    gpus_by_index: bool  # an attempt is given indices in `CUDA_VISIBLE_DEVICES`, not UUIDs
    # without progress for so long an attempt counts as hanging; 0: never, None: as is learned
    stall_timeout_seconds: float | None
    stop_grace_seconds: float  # from a request to stop until the attempt is killed


def launcher_settings(cfg: DictConfig) -> LauncherSettings:
    """Return the part of the config that :class:`robust_train.launcher.Job` needs."""
    if detaches(cfg) and sweep_folder() is None:
        raise ConfigError(
            "detach=true: only a command goes on in the background, not a call of launch(); start "
            "the program with nohup, or use robust-train run --detach -- PROGRAM"
        )
    is_script = schema.is_script(cfg)
    names, stalls = cfg.cuda_visible_devices, cfg.stall_timeout_minutes
    return LauncherSettings(
        num_nodes=cfg.num_nodes,
        resume=cfg.resume,
        max_launches=cfg.max_launches,
        runs_inline=cfg.isolation == "none",
        is_script=is_script,
        owns_terminal=cfg.isolation != "none" and _owns_terminal(),
        gpus_by_index=names == "index" or (names == "auto" and is_script),
        stall_timeout_seconds=None if stalls in (None, "auto") else 60 * float(stalls),
        stop_grace_seconds=cfg.stop_grace_seconds,
    )


def _has_batch(cfg: DictConfig) -> bool:
    """Return whether the trainer is given a batch size: 1 is also what scripts without one have."""
    is_one = cfg.training.batch_size == cfg.training.gradient_accumulation_steps == 1
    return not schema.is_script(cfg) or not is_one or "batch_size" in _placeholders(cfg)


def _placeholders(cfg: DictConfig) -> set[str]:
    argv = OmegaConf.select(cfg, "trainer.argv") or ()
    return placeholders_in(" ".join(map(str, argv)))


def _owns_terminal() -> bool:
    """Return whether this is a terminal, and no sweep runs other jobs on it at the same time."""
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return False
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return True
    return str(HydraConfig.get().launcher.get("_target_")).endswith(".BasicLauncher")


def policy_settings(
    cfg: DictConfig, *, finds_batch_size: bool = False, can_checkpoint: bool = False
) -> PolicySettings:
    """Return the part of the config that decisions depend on.

    ``can_checkpoint``: the trainer's source reads ``training.gradient_checkpointing``.
    """
    is_script = schema.is_script(cfg)
    can_checkpoint |= _is_built_in(cfg) or "gradient_checkpointing" in _placeholders(cfg)
    is_free = exported_expandable_segments(os.environ) is None
    expandable_segments = use_expandable_segments(
        cfg.memory.expandable_segments,
        os.environ,
        is_script=is_script,
        gpus=cfg.num_gpus * cfg.num_nodes,
    )
    return PolicySettings(
        batch_size=cfg.training.batch_size,
        gradient_accumulation_steps=cfg.training.gradient_accumulation_steps,
        ranks=cfg.num_gpus * cfg.num_nodes,
        nodes=cfg.num_nodes,
        min_ranks=cfg.min_num_gpus,
        cpu_ranks=1 if cfg.auto_device or cfg.device != "cpu" else cfg.num_gpus * cfg.num_nodes,
        num_workers=cfg.training.num_workers,
        min_batch_size=cfg.min_batch_size,
        max_retries=cfg.max_retries,
        # the others' GPUs are not ours to choose
        may_switch_gpu=cfg.auto_device and cfg.num_nodes == 1,
        allow_cpu_fallback=cfg.allow_cpu_fallback and cfg.num_nodes == 1,
        preserve_effective_batch_size=cfg.preserve_effective_batch_size,
        min_gpu_memory_bytes=cfg.min_gpu_memory_mb * MIB,
        prefetch_factor=cfg.training.prefetch_factor,
        expandable_segments=expandable_segments,
        may_use_expandable_segments=is_free and not is_wsl(),
        may_wait=cfg.wait_for_gpu,
        retry_pause_seconds=cfg.retry_pause_seconds,
        finds_batch_size=finds_batch_size,
        reports_start=_is_built_in(cfg),
        has_batch=_has_batch(cfg),
        gradient_checkpointing=cfg.training.gradient_checkpointing,
        may_checkpoint_gradients=cfg.allow_gradient_checkpointing and can_checkpoint,
        rules=retry_rules(cfg, is_script=is_script),
    )


@dataclass(frozen=True)
class DeviceSettings:
    """The keys about devices; ``job_name`` is shown to the other jobs of the host."""

    job_name: str
    device: str
    auto_device: bool
    num_gpus: int
    min_free_bytes: int
    wait: bool
    wait_timeout_seconds: float
    check_interval_seconds: float
    allow_cpu_fallback: bool
    queue: bool
    queue_dir: str | None
    jobs_per_device: int

    @property
    def asks_for_more(self) -> bool:
        """Whether the user asks for more than the defaults do."""
        default_bytes = RobustConfig.min_gpu_memory_mb * MIB
        return self.num_gpus > 1 or self.min_free_bytes > default_bytes


def device_settings(cfg: DictConfig, name: str) -> DeviceSettings:
    """Return the part of the config that :class:`robust_train.queue.devices.Devices` needs."""
    return DeviceSettings(
        job_name=name,
        device=str(cfg.device),
        auto_device=cfg.auto_device,
        num_gpus=cfg.num_gpus,
        min_free_bytes=cfg.min_gpu_memory_mb * MIB,
        wait=cfg.wait_for_gpu,
        wait_timeout_seconds=cfg.gpu_wait_timeout_minutes * 60,
        check_interval_seconds=cfg.gpu_check_interval_seconds,
        allow_cpu_fallback=cfg.allow_cpu_fallback and cfg.num_nodes == 1,
        queue=cfg.gpu_queue,
        queue_dir=cfg.gpu_queue_dir,
        jobs_per_device=cfg.gpu_jobs_per_device,
    )


def job_name(cfg: DictConfig, trainer: str | Callable[..., Any]) -> str:
    """Return how queue, tables and run folder call the job."""
    # train.py's config has no `job_name`
    keys = ("job_name", "model.name", "dataset.name")
    chosen, model, dataset = (OmegaConf.select(cfg, key) for key in keys)
    target = name_of(trainer)
    if target.startswith("__main__."):
        script = getattr(sys.modules["__main__"], "__file__", None)  # None in a notebook
        target = target.replace("__main__.", f"{Path(script).stem}." if script else "", 1)
    return names.job_name(chosen, model, dataset, target, OmegaConf.select(cfg, "trainer.argv"))


@dataclass(frozen=True)
class BatchSettings:
    """The part of the config on which the first size depends."""

    trainer: str  # the trainer's dotted path
    memory_settings: Mapping[str, Any]  # the part of the config on which memory depends
    memory_share: float  # of the device's memory, the most to count on
    reuse_known_batch: bool  # whether sizes that earlier jobs found count
    is_script: bool  # the trainer is a program that cannot be probed


def batch_settings(cfg: DictConfig, trainer: str | Callable[..., Any]) -> BatchSettings:
    """Return the part of the config that :class:`robust_train.batch.job_sizes.BatchSizes` needs."""
    return BatchSettings(
        trainer=_identity_of(trainer),
        memory_settings=memory_settings(cfg),
        memory_share=cfg.memory.fraction / cfg.gpu_jobs_per_device,
        reuse_known_batch=cfg.reuse_known_batch,
        is_script=schema.is_script(cfg),
    )


def _identity_of(trainer: str | Callable[..., Any]) -> str:
    """Return a name that no other script's or notebook's function shares."""
    name = name_of(trainer)
    if not name.startswith("__main__."):
        return name
    where = getattr(sys.modules["__main__"], "__file__", None)
    return f"{Path(where).resolve() if where else Path.cwd()}:{name}"


def _is_built_in(cfg: DictConfig) -> bool:
    target = OmegaConf.select(cfg, "trainer._target_")
    return isinstance(target, str) and target.startswith("robust_train.vision.")


def target_of(cfg: DictConfig) -> str:
    """Return the dotted path of the trainer that the config names."""
    target = OmegaConf.select(cfg, "trainer._target_")
    if not isinstance(target, str):
        raise ConfigError(
            "trainer._target_: missing; accepted is the dotted path of a function "
            "trainer(cfg) or trainer(cfg, run)"
        )
    return target


def name_of(trainer: str | Callable[..., Any]) -> str:
    """Return a trainer's dotted path; of a callable its module and qualified name."""
    if isinstance(trainer, str):
        return trainer
    module, name = (getattr(trainer, key, "") for key in ("__module__", "__qualname__"))
    return f"{module}.{name}" if name else f"__main__.{type(trainer).__name__}"


def data_folder(cfg: DictConfig) -> str | None:
    """Return the folder that has to hold the built-in trainer's data already, None if none has."""
    data = cfg.dataset if _is_built_in(cfg) else {}
    name, is_no_download = data.get("name"), data.get("download") is False
    is_local = name == "image_folder" or (is_no_download and name != "digits")
    return data.get("root") if is_local else None


def about_job(cfg: DictConfig, name: str) -> dict[str, str]:
    """Return what a launch records of its job: name, model, data set, overrides and command."""
    overrides = list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
    about = {"name": name}
    for group in ("model", "dataset"):
        # the default is no matter of a trainer that has its own
        if _is_built_in(cfg) or any(one.startswith(group) for one in overrides):
            about[group] = str(OmegaConf.select(cfg, f"{group}.name") or "")
    # of `python -c` the command is a whole program
    whole = shlex.join(command())[:_LONGEST_COMMAND]
    about |= {"overrides": shlex.join(overrides), "command": whole}
    return {key: value for key, value in about.items() if value}


def run_folder(run_dir: str | Path | None, name: str) -> Path:
    """Make and return the run folder: the one given, Hydra's, or a new one for a job's name. Raises
    ConfigError: it cannot be made."""
    if run_dir is not None:
        path = Path(run_dir)
    elif HydraConfig.initialized():
        path = Path(HydraConfig.get().runtime.output_dir)
    else:
        name = f"{names.folder_name(name)}_{os.getpid()}"
        path = Path("outputs") / time.strftime(f"%Y-%m-%d/%H-%M-%S_{name}")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run folder {path}: cannot be made: {error.strerror}") from error
    return path.resolve()


def sweep_folder() -> Path | None:
    """Return the folder of the sweep that this process's job belongs to, or None."""
    if not HydraConfig.initialized():
        return None
    hydra = HydraConfig.get()
    if hydra.mode != RunMode.MULTIRUN:
        return None
    # relative to where the sweep was started: Hydra may have changed the working directory
    return Path(str(hydra.runtime.cwd)) / str(hydra.sweep.dir)


@dataclass(frozen=True)
class EarlySettings:
    """The keys that are read before a job's config is checked; a project's may lack them."""

    sweep_fail_fast: bool  # the first failure ends it
    sweep_resume: bool  # completed jobs of earlier launches are not run again
    gpu_jobs_per_device: int
    num_gpus: int
    num_nodes: int
    min_num_gpus: int | None
    auto_device: bool
    device: str
    isolation: str
    detach: bool


def early_settings(cfg: DictConfig) -> EarlySettings:
    """Return the part of the config that sweeps and launchers of several nodes need."""
    defaults = ((one.name, getattr(RobustConfig, one.name)) for one in fields(EarlySettings))
    how = {"throw_on_resolution_failure": False}  # the job refuses such a key
    return EarlySettings(*(OmegaConf.select(cfg, k, default=value, **how) for k, value in defaults))


def detaches(cfg: DictConfig) -> bool:
    """Return whether the command is to go on in the background, and is not there yet."""
    return early_settings(cfg).detach and not is_detached


def take_notify_settings(cfg: DictConfig) -> NotifySettings:
    """Return who is notified of what; the URLs, which may hold passwords, leave the config. Raises
    ConfigError: it cannot be used."""
    environ = dict(os.environ)  # for this job alone: a program may call launch() again
    hide_urls(cfg, environ)
    urls = tuple(environ.get(URLS_VARIABLE, "").split())
    one, on = OmegaConf.select(cfg, "notify"), EVENTS
    if one is None or (sweep_folder() is not None and not one.sweep_jobs):
        return NotifySettings()
    try:
        words = shlex.split(one.command) if isinstance(one.command, str) else one.command or ()
    except ValueError as error:
        raise ConfigError(f"notify.command={one.command}: {error}") from None
    if one.on is not None:
        on = tuple(one.on) if OmegaConf.is_list(one.on) else (str(one.on),)
        for name in set(on) - set(EVENTS):
            raise ConfigError(f"notify.on={name}: accepted are {', '.join(EVENTS)}")
    if urls and importlib.util.find_spec("apprise") is None:
        log.warning(
            "notify.urls: nobody is notified: pip install 'robust-train[notify]' is missing"
        )
    return NotifySettings(tuple(map(str, words)), urls, on, 60 * one.waiting_minutes)


def hide_urls(cfg: DictConfig, environ: MutableMapping[str, str] = os.environ) -> bool:
    """Move ``notify.urls`` out of the config, and of Hydra's part of it, into the environment;
    return whether there was any."""
    given = OmegaConf.select(cfg, "notify.urls", throw_on_missing=False)
    if not given:
        return False
    urls = [str(url) for url in given] if OmegaConf.is_list(given) else str(given).split()
    known = environ.get(URLS_VARIABLE, "").split()
    environ[URLS_VARIABLE] = " ".join(dict.fromkeys([*known, *urls]))
    with read_write(cfg), open_dict(cfg):
        cfg.notify.urls = None
    lines = list(cfg.hydra.overrides.task) if "hydra" in cfg else []
    for line in filter(is_secret, lines):
        with read_write(cfg.hydra), open_dict(cfg.hydra):
            cfg.hydra.overrides.task.remove(line)
            name = str(cfg.hydra.job.override_dirname).replace(line, "notify")
            cfg.hydra.job.override_dirname = name
    return True
